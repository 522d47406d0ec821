"""Names and attributes: look-ups, attributes, and changes of names.

A part of `fuse/ops/operations`. A request for a name in a directory that is gone fails with ESTALE if the
kernel may have reached that directory by a cached name. Otherwise, and when the request is repeated, the name
does not exist (ENOENT), as on a local file system.
"""

from __future__ import annotations

import stat
from typing import Any

from nvpool.client.state.vfs_types import RENAME_EXCHANGE, Caller
from nvpool.client.vfs.lookup_batcher import PendingLookup
from nvpool.core.errors import DirectoryGone, InvalidRequest, NotFound, NotSupported
from nvpool.fuse.ops.inline_completions import SubmittedUnlink
from nvpool.fuse.ops.kernel_cache.names import CachedNames
from nvpool.fuse.ops.kernel_cache.options import ChangeCount, FuseOptions
from nvpool.fuse.ops.kernel_cache.page_cache_bypass import PageCacheBypass
from nvpool.fuse.ops.kernel_cache.pages import CachedPages
from nvpool.fuse.ops.listing import DirectoryListings
from nvpool.fuse.ops.locks import AbsentNames
from nvpool.fuse.ops.open_files import OpenFiles
from nvpool.fuse.ops.read_worker_files import PublishedFiles
from nvpool.fuse.ops.setid import SET_IDS, drops_set_gid, without_set_ids
from nvpool.rpc.messages.meta_messages import Attr

ASK = object()
"""Returned by `lookup_now` if a server must be queried; None would mean that the name does not exist."""

DOTS = frozenset((b".", b".."))
"""Names that only NFS export and open_by_handle look up."""


class NamesAndAttributes:
    """Requests for names and attributes of one mount."""

    def __init__(
        self,
        vfs: Any,
        options: FuseOptions,
        can_be_exported: bool,
        changes: ChangeCount,
        names: CachedNames,
        absent: AbsentNames,
        pages: CachedPages,
        bypass: PageCacheBypass,
        published: PublishedFiles,
        files: OpenFiles,
        listings: DirectoryListings,
    ) -> None:
        self._vfs = vfs
        self._options = options
        self._can_be_exported = can_be_exported
        self._changes = changes
        self._names = names
        self._absent = absent
        self._pages = pages
        self._bypass = bypass
        self._published = published
        self._files = files.by_handle
        self._listings = listings

    async def lookup(self, parent: int, name: bytes) -> Attr | None:
        """Attributes of the name.

        None: it does not exist; the kernel may cache that for negative_timeout_s.
        """
        if name in DOTS:
            if not self._can_be_exported:
                raise NotSupported("a subtree cannot be exported")
            attr = await self.getattr(parent)
            self._names.name_is_kept = False
            return attr if name == b"." else await self.getattr(attr.parent or parent)
        try:
            return self._names.record_name(parent, name, await self._vfs.lookup(parent, name))
        except DirectoryGone as error:
            raise self._names.directory_gone(error, parent) from None
        except NotFound:
            if not self._absent.record(parent, name):
                raise
            return None

    def lookup_now(self, parent: int, name: bytes) -> Attr | object | None:
        """The result of `lookup` from the cache, or ASK if a server must be queried.

        This, `begin_lookup` and `getattr_now` take a few microseconds. An engine calls them before the
        methods that wait.
        """
        if name in DOTS:
            return ASK
        try:
            attr = self._vfs.lookup_now(parent, name)
        except NotFound:
            if not self._absent.record(parent, name):
                raise
            return None
        return ASK if attr is None else self._names.record_name(parent, name, attr)

    def begin_lookup(self, parent: int, name: bytes) -> PendingLookup | None:
        """Start `lookup` without a task if possible, as `begin_read` does. Call `lookup_now` before."""
        asked = self._vfs.begin_lookup(parent, name) if name not in DOTS else None
        if asked is not None:
            asked.then = self._looked_up
        return asked

    def _looked_up(
        self, asked: PendingLookup, attr: Attr | None, error: BaseException | None
    ) -> tuple[Attr | None, BaseException | None]:
        if attr is not None:
            return self._names.record_name(asked.parent, asked.name, attr), None
        if isinstance(error, DirectoryGone):
            return None, self._names.directory_gone(error, asked.parent)
        if type(error) is NotFound and self._absent.record(asked.parent, asked.name):
            return None, None
        return None, error

    def getattr_now(self, inode: int) -> Attr | None:
        """The result of `getattr` from the cache, or None if a server must be queried."""
        attr = self._vfs.getattr_now(inode)
        return None if attr is None else self._names.record_attr(attr)

    async def getattr(self, inode: int) -> Attr:
        """Attributes of the inode, also of a removed directory that is still in use here."""
        try:
            return self._names.record_attr(await self._vfs.getattr(inode))
        except NotFound:
            attr = self._removed(inode)
            if attr is None:
                raise
            return attr

    def _removed(self, inode: int) -> Attr | None:
        """Last known attributes of a directory that another node removed.

        For processes that have the directory open here or work in it; else None.
        """
        known = self._vfs.known_attr(inode)
        if (
            known is None
            or not stat.S_ISDIR(known.mode)
            or (not self._listings.is_listed(inode) and self._names.is_stale(inode))
        ):
            return None
        attr = Attr.FromString(known.SerializeToString())
        attr.links = attr.size = 0
        return attr

    async def setattr(
        self,
        inode: int,
        caller: Caller,
        handle: int | None,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        drop_set_ids: bool = False,
    ) -> Attr:
        """Change attributes; returns the new ones.

        `handle`: the open file, if the application named one (ftruncate); it permits what the mode may not. A
        time may be NOW. `drop_set_ids`: the caller may not change a set-id file and leave the set-id bits on
        it.
        """
        if size is not None:
            mtime_ns = None  # the metadata service sets the time when the size changes
        if drop_set_ids and mode is None:
            mode = without_set_ids(await self._vfs.getattr(inode), caller)
        if caller.uid and mode is None and (uid is not None or gid is not None):
            attr = await self._vfs.getattr(inode)
            if drops_set_gid(attr, caller):
                mode = attr.mode & 0o7777 & ~SET_IDS
        before = None
        if size is not None:
            self._published.bar(inode)
            if not self._options.writeback:
                before = self._vfs.size_here(inode)
        try:
            attr = await self._vfs.setattr(
                inode,
                mode=mode,
                uid=uid,
                gid=gid,
                size=size,
                atime_ns=atime_ns,
                mtime_ns=mtime_ns,
                caller=caller,
                handle=self._files.get(handle) if handle is not None else None,
            )
            if size is not None and before is not None and before < size:
                await self._bypass.growing(inode, before, size)
        finally:
            self._changes.count += 1
            if size is not None:
                self._published.unbar(inode)
        if size is None:
            self._pages.changed_here(inode, attr.change)
        return self._names.record_attr(attr)

    async def readlink(self, inode: int) -> bytes:
        """Target of the symbolic link."""
        target: bytes = await self._vfs.readlink(inode)
        return target

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attr:
        """Create a file that is not opened, or a special file."""
        with self._names.changing(parent):
            return self._names.record_name(
                parent, name, await self._vfs.mknod(parent, name, mode, rdev, caller)
            )

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attr:
        """Create a directory."""
        with self._names.changing(parent):
            return self._names.record_name(parent, name, await self._vfs.mkdir(parent, name, mode, caller))

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attr:
        """Create a symbolic link to `target`."""
        with self._names.changing(parent):
            return self._names.record_name(
                parent, name, await self._vfs.symlink(parent, name, target, caller)
            )

    async def link(self, inode: int, parent: int, name: bytes, caller: Caller) -> Attr:
        """Give the inode one more name."""
        with self._names.changing(parent):
            return self._names.record_name(parent, name, await self._vfs.link(inode, parent, name, caller))

    async def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        """Remove the name of a file."""
        with self._names.changing(parent):
            await self._vfs.unlink(parent, name, caller)

    async def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        """Remove an empty directory."""
        with self._names.changing(parent):
            await self._vfs.rmdir(parent, name, caller)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        """Rename. `flags` of renameat2(2): 1 NOREPLACE, 2 EXCHANGE; InvalidRequest for others."""
        if flags & ~3 or flags == 3:
            raise InvalidRequest(f"rename flags {flags:#x}")
        with self._names.changing(parent, new_parent):
            moved, other = await self._vfs.rename(parent, name, new_parent, new_name, flags, caller)
        self._names.record_moved(moved, new_parent, new_name)
        if flags == RENAME_EXCHANGE:
            self._names.record_moved(other, parent, name)

    async def access(self, inode: int, mask: int, caller: Caller) -> None:
        """Check the rights of `mask`, as access(2)."""
        await self._vfs.access(inode, mask, caller)

    def begin_unlink(self, parent: int, name: bytes, caller: Caller, unique: int) -> SubmittedUnlink | None:
        """Start `unlink`, as `begin_create` does."""
        ending = SubmittedUnlink(self._changes, self._names, parent)
        ending.begun = self._vfs.begin_unlink(parent, name, caller, unique, ending.ended)
        if ending.begun is None:
            return None
        self._names.lock_directory(parent)
        return ending

    async def statx(self, inode: int) -> tuple[Attr, int]:
        """Attributes as from `getattr`, and the birth time in nanoseconds; 0 if unknown."""
        return await self.getattr(inode), await self._vfs.birth_ns(inode)

    async def statfs(self, node: int) -> Any:
        """Usage of the volume that contains the node, or of the pool."""
        return await self._vfs.statfs(node)
