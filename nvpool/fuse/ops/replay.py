"""Replayed requests: the kernel resends them to a process that continues a predecessor's mount.

A part of `fuse/ops/operations`. A request that the predecessor executed without a reply is recognised by its
number and not executed again: opens and writes here, changes of metadata in client/rpc/slot_journal. `kept`
is the mount state (shared memory that outlives this process), or None.
"""

from __future__ import annotations

from typing import Any

from nvpool.client.state.vfs_types import DirHandle
from nvpool.client.vfs.takeover import PredecessorFile
from nvpool.fuse.ops.handles import Handles
from nvpool.fuse.ops.inline_completions import OpenReply
from nvpool.fuse.ops.kernel_cache.names import CachedNames
from nvpool.fuse.ops.kernel_cache.options import FuseOptions
from nvpool.fuse.ops.kernel_cache.page_cache_bypass import PageCacheBypass, bypasses
from nvpool.fuse.ops.kernel_cache.pages import CachedPages
from nvpool.fuse.ops.listing import DirectoryListings
from nvpool.fuse.ops.locks import AbsentNames
from nvpool.fuse.ops.metadata import NamesAndAttributes
from nvpool.fuse.ops.open_files import OpenFiles
from nvpool.fuse.ops.read_worker_files import PublishedFiles
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.shm.mount_state import KeptMemory


class Replay:
    """Takeover of a predecessor's open files, and its requests that come again."""

    def __init__(
        self,
        vfs: Any,
        kept: KeptMemory | None,
        options: FuseOptions,
        handles: Handles,
        files: OpenFiles,
        listings: DirectoryListings,
        metadata: NamesAndAttributes,
        names: CachedNames,
        absent: AbsentNames,
        pages: CachedPages,
        bypass: PageCacheBypass,
        published: PublishedFiles,
    ) -> None:
        self._vfs = vfs
        self._kept = kept
        self._options = options
        self._handles = handles
        self._files = files
        self._listings = listings
        self._metadata = metadata
        self._names = names
        self._absent = absent
        self._pages = pages
        self._bypass = bypass
        self._published = published
        self._opened_before: dict[int, int] = {}  # the kernel's request -> handle
        self._written_before: dict[int, int] = {}  # the kernel's request -> bytes

    def handle_before(self, unique: int) -> int | None:
        """The handle that this request has already opened, or None."""
        return self._opened_before.get(unique)

    def written_before(self, unique: int) -> int | None:
        """How many bytes this write has already written, or None."""
        return self._written_before.get(unique)

    def all_came_again(self, in_work: set[int]) -> None:
        """Note that the kernel has resent everything: later requests are new.

        `in_work`: those still pending.
        """
        self._opened_before.clear()
        self._written_before.clear()
        self._vfs.meta.once.all_came_again(in_work)

    @property
    def held(self) -> dict[int, Any]:
        """Requests whose reply must be reported to `answered`. Always empty without a mount state."""
        held: dict[int, Any] = self._vfs.meta.once.held if self._kept is not None else {}
        return held

    def answered(self, unique: int) -> None:
        """Note that the kernel has the reply to the request: it is not resent."""
        self._vfs.meta.once.answered(unique)

    async def take_over(self) -> None:
        """Continue a predecessor's open files, locks and unstored writes.

        Call this before any other operation.
        """
        before = self._handles.before()
        self._written_before = self._vfs.keeping.finished()
        handles = await self._vfs.take_over(
            [
                PredecessorFile(one.number, one.inode, self._options.flags_below(one.flags))
                for one in before
                if not one.is_directory
            ]
        )
        self._handles.start_life()
        for number, handle in handles.items():
            if handle.writable:
                self._published.opened_to_write(handle.inode, number)
        for one in before:
            if one.is_directory:
                self._listings.add(one.number, one.inode, DirHandle(one.inode))
            else:
                self._files.by_handle[one.number] = handles[one.number]
                if bypasses(handles[one.number].flags):
                    self._bypass.opened(one.inode)
                if handles[one.number].append:
                    self._files.appending[one.number] = one.caller
            if one.unique:
                self._opened_before[one.unique] = one.number
            if one.was_published:
                if self._files.may_publish(handles[one.number]):
                    self._published.add(one.inode, one.number)
                else:
                    self._handles.take_back(one.number)
        self._absent.inherit()

    def invalidate_inherited(self) -> None:
        """Invalidate what the kernel got from the predecessor on open files.

        No recall would do that. Call this when serving begins.
        """
        self._pages.invalidate_inherited({file.inode for file in self._files.by_handle.values()})

    def open_again(self, handle: int) -> OpenReply:
        """The result of `open` in the predecessor, as it was returned or would have been."""
        return OpenReply(handle, handle in self._files.appending, False)

    async def create_again(self, handle: int) -> tuple[Attr, OpenReply]:
        """The result of `create` in the predecessor."""
        attr = await self._metadata.getattr(self._files.by_handle[handle].inode)
        self._names.name_is_kept = False
        return attr, self.open_again(handle)
