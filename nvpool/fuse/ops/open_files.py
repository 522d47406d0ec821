"""Open files of a mount: their handles, opening, reading and closing.

A part of `fuse/ops/operations`. A handle is the number by which the kernel names an open file, from open to
release. O_APPEND writers bypass the kernel's pages and offsets (direct_io): the metadata service assigns the
place of a record. Exception: a kernel that writes pages back (`FuseOptions.flags_below`).
"""

from __future__ import annotations

import logging
import os
from typing import Any

from nvpool.client.rpc.slot_journal import asking
from nvpool.client.state.small_file_cache import SMALL_BYTES
from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.core.errors import NotFound, NotSupported, NvpoolError
from nvpool.fuse.ops.handles import Handles
from nvpool.fuse.ops.inline_completions import Creating, OpenReply
from nvpool.fuse.ops.kernel_cache.names import CachedNames
from nvpool.fuse.ops.kernel_cache.notices import KernelNotices, OwnedTasks
from nvpool.fuse.ops.kernel_cache.options import ChangeCount, FuseOptions
from nvpool.fuse.ops.kernel_cache.page_cache_bypass import PageCacheBypass, bypasses
from nvpool.fuse.ops.kernel_cache.pages import CachedPages
from nvpool.fuse.ops.read_worker_files import PublishedFiles
from nvpool.fuse.ops.setid import Privileges
from nvpool.rpc.messages.meta_messages import Attr

log = logging.getLogger(__name__)


class OpenFiles:
    """Table of the open files, with what opens and closes them."""

    def __init__(
        self,
        vfs: Any,
        options: FuseOptions,
        handles: Handles,
        changes: ChangeCount,
        names: CachedNames,
        pages: CachedPages,
        bypass: PageCacheBypass,
        published: PublishedFiles,
        privileges: Privileges,
        notices: KernelNotices,
        tasks: OwnedTasks,
    ) -> None:
        self._vfs = vfs
        self.options = options
        self.handles = handles
        self.changes = changes
        self.names = names
        self.pages = pages
        self._bypass = bypass
        self._published = published
        self._privileges = privileges
        self._notices = notices
        self._tasks = tasks
        self.by_handle: dict[int, FileHandle] = {}
        self.appending: dict[int, Caller] = {}
        """Handle of an O_APPEND writer -> the process that opened it."""

    async def open(self, inode: int, flags: int, caller: Caller, drop_set_ids: bool = False) -> OpenReply:
        """Open a file. `drop_set_ids`: as in setattr, if O_TRUNC truncates the file."""
        flags = self.options.flags_below(flags)
        if self.names.is_withdrawn(inode, caller.pid):
            raise NotFound(f"inode {inode:#x} may have another name by now")
        file = await self._vfs.open(inode, flags, caller)
        if drop_set_ids:
            await self._privileges.drop_set_ids(file, caller)
        if (
            not file.attr.links
            and self.names.is_kept(inode)
            and not any(other.inode == inode for other in self.by_handle.values())
        ):
            await self._vfs.release(file)
            raise NotFound(f"inode {inode:#x} has no name any more")
        return self._opened_existing(file, flags, caller, asking())

    def open_now(self, inode: int, flags: int, caller: Caller, unique: int = 0) -> OpenReply | None:
        """The result of `open` if no server must be queried, else None.

        `unique`: number of the kernel's request.
        """
        if inode in self.names.withdrawn or (not caller.uid and self._vfs.squashes_root):
            return None
        file = self._vfs.open_now(inode, flags)
        return None if file is None else self._opened_existing(file, flags, caller, unique)

    def _opened_existing(self, file: FileHandle, flags: int, caller: Caller, unique: int) -> OpenReply:
        if self.names.sent_changes.get(file.inode) != file.attr.change:
            self._notices.invalidate_attributes(file.inode)
        return self.open_reply(file, flags, caller, unique)

    async def create_unnamed(
        self, parent: int, mode: int, flags: int, caller: Caller
    ) -> tuple[Attr, OpenReply]:
        """Create an unnamed file (O_TMPFILE); see `Files.create_unnamed`."""
        flags = self.options.flags_below(flags)
        attr, file = await self._vfs.create_unnamed(parent, mode, flags, caller)
        return self.names.record_attr(attr), self.open_reply(file, flags & ~os.O_TMPFILE, caller, asking())

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Attr, OpenReply]:
        """Open the file of that name; create it if it does not exist."""
        flags = self.options.flags_below(flags)
        with self.names.changing(parent):
            attr, file = await self._vfs.create(parent, name, mode, flags, caller)
        return self.names.record_name(parent, name, attr), self.open_reply(file, flags, caller, asking())

    def begin_create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller, unique: int
    ) -> Creating | None:
        """Start `create` without a task: its request is sent before this returns.

        The result has `cancel`, and calls its `on_end` as a Step does. None: something must be awaited first
        and nothing was sent; call `create`. `unique`: number of the kernel's request. As all methods
        `begin_…` this one has the reply sent to the kernel before the caches here are updated.
        """
        if not self.handles.has_room:
            return None
        flags = self.options.flags_below(flags)
        creating = Creating(self, parent, name, flags, caller, unique)
        creating.begun = self._vfs.begin_create(parent, name, mode, flags, caller, unique, creating)
        if creating.begun is None:
            return None
        creating.hold()
        return creating

    def open_reply(self, file: FileHandle, flags: int, caller: Caller, unique: int) -> OpenReply:
        """Register a file that was opened below, and return the reply for the kernel.

        On error the file is closed again.
        """
        inode, pages = file.inode, self.pages
        keeps = pages.record_pages(file.attr)
        if flags & os.O_TRUNC:
            self.changes.count += 1
            self._published.take_back(inode)
        reads_only = flags & os.O_ACCMODE == os.O_RDONLY
        published = reads_only and self.may_publish(file)
        try:
            handle = self.handles.take(inode, flags, caller, unique, published=published)
        except NvpoolError:  # the file is not open, and the kernel gets no word on its pages
            pages.seen.pop(inode, None)
            self._tasks.start(self._vfs.release(file))
            raise
        if published:
            self._published.add(inode, handle)
        appending = self.register(handle, file, flags, caller)
        if keeps and inode not in pages.paged:
            pages.paging(inode)
        return OpenReply(
            handle,
            appending,
            self.options.writeback or keeps,
            # Without data to flush, NOFLUSH saves a request at each close. But a close also ends
            # record locks, so FLUSH is needed while there are any. A lock that is taken later
            # through this descriptor ends with the open file instead.
            reads_only and not self._vfs.is_locked(inode),
        )

    def register(self, handle: int, file: FileHandle, flags: int, caller: Caller) -> bool:
        """Register an open file. Returns whether it is open for appending."""
        file.number = handle
        self.by_handle[handle] = file
        if bypasses(flags):
            self._bypass.opened(file.inode)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return False
        self._published.opened_to_write(file.inode, handle)
        if not flags & os.O_APPEND:
            return False
        self.appending[handle] = Caller(caller.uid, caller.gid, caller.pid)
        return True

    def may_publish(self, file: FileHandle) -> bool:
        """Whether read workers of this mount may read the file.

        Not small files: this process has them completely sooner than a worker opens them. Not where root is
        squashed: the workers open files as root, and could not.
        """
        inode, paged = file.inode, self.pages.paged
        if (
            not self._published.on
            or self._vfs.squashes_root
            or file.attr.size <= SMALL_BYTES
            or self._published.is_barred(inode)
        ):
            return False
        if not self._vfs.is_settled(file):
            return False
        if inode not in paged:
            # workers fill the kernel's pages too, and those are dropped when the lease ends
            self.pages.paging(inode)
        return inode in paged and paged[inode][1]

    def has_pages(self, handle: int) -> bool:
        """Whether the kernel may have pages of the open file.

        It may, even though writes through this handle bypass pages.
        """
        file = self.by_handle.get(handle)
        return file is not None and self._bypass.has_pages(file)

    def is_locked(self, handle: int) -> bool:
        """Whether a process of this mount holds locks on the open file."""
        file = self.by_handle.get(handle)
        return file is not None and bool(self._vfs.is_locked(file.inode))

    def release_now(self, handle: int) -> bool:
        """Release as `release` does, if that needs no waiting. False: nothing has happened."""
        file = self.by_handle.get(handle)
        if file is None or not self._vfs.release_now(file):
            return False
        self.appending.pop(handle, None)
        del self.by_handle[handle]
        self._released(file, handle)
        return True

    def _released(self, file: FileHandle, handle: int) -> None:
        inode, bypass, paged = file.inode, self._bypass, self.pages.paged
        self.handles.give_back(handle)
        if bypasses(file.flags):
            bypass.closed(inode)
        if inode in bypass.refused and not self._vfs.is_open(inode):
            # no descriptor is open, so the kernel can drop the inode and its refused data
            bypass.forget_refused(inode, list(self._vfs.cache.names_of(inode)))
        if inode in bypass.locked and not self._vfs.is_open(inode):
            bypass.released(inode)
        self._published.closed(inode, handle)
        if inode in paged and not self._vfs.is_open(inode):
            del paged[inode]

    async def release(self, handle: int, again: bool = False) -> None:
        """Close the open file after its last descriptor; the locks that belong to it end.

        The number is not used again. `again`: the predecessor may have done this already.
        """
        self.appending.pop(handle, None)
        if again and handle not in self.by_handle:
            return
        file = self.by_handle.pop(handle)
        try:
            await self._vfs.release(file)
        finally:
            self._released(file, handle)

    async def drain(self) -> None:
        """Flush and release every open file before the mount ends. Errors are logged; all files are tried."""
        for handle, file in list(self.by_handle.items()):
            try:
                await self._vfs.flush(file)
                await self._vfs.release(file)
            except NvpoolError as error:
                log.error("an open file lost its last writes: %s", error)
            if self.by_handle.pop(handle, None) is not None:
                self.handles.give_back(handle)


class FileReads:
    """Reads of open files."""

    def __init__(self, vfs: Any, options: FuseOptions, files: OpenFiles, pages: CachedPages) -> None:
        self._vfs = vfs
        self._options = options
        self._files = files.by_handle
        self._pages = pages

    def read_now(self, handle: int, offset: int, size: int) -> Any:
        """The result of `read` if it is available without waiting; else None: call `begin_read` or `read`."""
        file = self._files[handle]
        if file.inode not in self._pages.paged:
            self._pages.paging(file.inode)
        return self._vfs.read_now(file, offset, size)

    def begin_read(self, handle: int, offset: int, size: int) -> Any:
        """Start `read` if that needs no task; else return None: call `read`. Call `read_now` before.

        The result has `cancel`, and calls its `on_end` as a Step does.
        """
        return self._vfs.begin_read(self._files[handle], offset, size)

    def read(self, handle: int, offset: int, size: int) -> Any:
        """Awaitable of up to `size` bytes as one buffer, short only at the end of the file.

        After `read_now`.
        """
        return self._vfs.read(self._files[handle], offset, size)

    async def lseek(self, handle: int, offset: int, whence: int) -> int:
        """Find data or holes (SEEK_DATA and SEEK_HOLE); the kernel does the other kinds of lseek itself.

        NotSupported if the kernel may cache pages that it has not written back: they would be missed.
        """
        if self._options.writeback:
            raise NotSupported("pages that the kernel has not written back would be taken for holes")
        found: int = await self._vfs.seek(self._files[handle], offset, whence)
        return found
