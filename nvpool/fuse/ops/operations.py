"""File operations: the meaning of each FUSE request, for any engine that speaks to the kernel.

An engine (`fuse/kernel`, `fuse/pyfuse3_engine`) decodes a request, calls the method here and encodes the
result; it turns an exception into an errno with `errno_of`. The code here depends on no FUSE library and on
no structure of the kernel, so tests run all of it without a mount. Below is the client's Vfs; this layer adds
only what a *kernel* needs:

* The node id is the inode number. A look-up pins nothing, so look-ups are not counted, and a forget only
  drops the record of what the kernel caches. Memory does not grow with the number of files that the kernel
  knows.
* Open files and directories get numbers (handles), valid from open to release.
* What the kernel caches of names, attributes and pages, and how that is invalidated: `fuse/ops/kernel_cache`.
* Locks, and what the kernel has to drop when it gets one: `fuse/ops/locks`.
* O_APPEND writers bypass the kernel's pages and offsets (direct_io): the metadata service assigns the place
  of a record. Exception: a kernel that writes pages back (`CachedOps.flags_below`). Privileges that a write
  removes from a program: `fuse/ops/setid`.
* Listings and their read-ahead: `fuse/ops/listing`. Extended attributes: `fuse/ops/xattrs`.

The kernel checks permissions (mount option default_permissions). Methods whose name is in BY_INODE fail with
ESTALE if the inode is gone: Linux then walks the path once more without its caches, and so finds a file that
was replaced on another node. A request for a name in a directory that is gone also fails with ESTALE if the
kernel may have reached that directory by a cached name. Otherwise, and when the request is repeated, the name
does not exist (ENOENT), as on a local file system. A file without a name can be opened while it is open here
(/proc/self/fd), and by a process that has just looked it up.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat

from nvpool.client.rpc.slot_journal import asking
from nvpool.client.state.small_file_cache import SMALL_BYTES
from nvpool.client.state.vfs_types import RENAME_EXCHANGE, Caller, DirHandle
from nvpool.client.vfs.lookup_batcher import PendingLookup
from nvpool.client.vfs.takeover import PredecessorFile
from nvpool.core import errors
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import DirectoryGone, NotFound, NotSupported, NvpoolError
from nvpool.core.ids import ROOT_INODE
from nvpool.fuse.ops.handles import Handles
from nvpool.fuse.ops.inline_completions import Creating, OpenReply, PendingChange
from nvpool.fuse.ops.kernel_cache import FuseOptions
from nvpool.fuse.ops.listing import ListOps
from nvpool.fuse.ops.locks import LockOps
from nvpool.fuse.ops.page_cache_bypass import PageCacheBypass, bypasses
from nvpool.fuse.ops.replay import ReplayOps
from nvpool.fuse.ops.setid import SET_IDS, drops_set_gid, without_set_ids
from nvpool.fuse.ops.writes import WriteOps
from nvpool.fuse.ops.xattrs import XattrOps
from nvpool.rpc.v1.meta_pb2 import Attr

log = logging.getLogger(__name__)

ASK = object()
"""Returned by `lookup_now` if a server must be queried; None would mean that the name does not exist."""

DOTS = frozenset((b".", b".."))
"""Names that only NFS export and open_by_handle look up."""

BY_INODE = frozenset(
    (
        "getattr",
        "setattr",
        "readlink",
        "open",
        "opendir",
        "link",
        "getxattr",
        "setxattr",
        "listxattr",
        "removexattr",
        "access",
        "statx",
    )
)
"""Requests that name an inode which the kernel once looked up."""


def errno_of(error: BaseException, request: str) -> int:
    """The errno that the application sees. This is the only place that maps errors to numbers for the kernel.

    An exception that is not an NvpoolError is a bug: EIO, and the log has the traceback.
    """
    if isinstance(error, DirectoryGone):
        return errno.ESTALE if error.may_be_stale else errno.ENOENT
    if isinstance(error, NotFound) and request in BY_INODE:
        return errno.ESTALE
    if isinstance(error, errors.Bug):
        log.error("%s: %s", request, error, exc_info=error)
        return error.errno
    if isinstance(error, NvpoolError):
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, asyncio.CancelledError):
        return errno.EINTR
    log.error("%s: unexpected %s", request, type(error).__name__, exc_info=error)
    return errno.EIO


class FuseOps(LockOps, ListOps, WriteOps, XattrOps, ReplayOps):
    """All operations of one mount; see the module. Used from one event loop; calls may overlap."""

    shows_subtree = False
    """Whether the root of the mount is another directory than the pool's root."""

    def __init__(self, vfs, options: FuseOptions | None = None, clock=SYSTEM_CLOCK) -> None:
        LockOps.__init__(self, vfs, options or FuseOptions(), clock)
        ReplayOps.__init__(self, vfs)
        self._files: dict[int, object] = {}
        self._appending: dict[int, Caller] = {}  # handle -> the process that opened it
        self.pages = PageCacheBypass(self._own)
        ListOps.__init__(self)
        self.handles = Handles(self.kept)
        self.published.begin(self.handles)

    @property
    def open_files(self) -> int:
        return len(self._files)

    # -- names and attributes ----------------------------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes) -> Attr | None:
        """Attributes of the name.

        None: it does not exist; the kernel may cache that for negative_timeout_s.
        """
        if name in DOTS:
            attr = await self.getattr(parent)
            self.name_is_kept = False
            return attr if name == b"." else await self.getattr(attr.parent or parent)
        try:
            return self.record_name(parent, name, await self._vfs.lookup(parent, name))
        except DirectoryGone as error:
            raise self.directory_gone(error, parent) from None
        except NotFound:
            if not self._record_absent(parent, name):
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
            if not self._record_absent(parent, name):
                raise
            return None
        return ASK if attr is None else self.record_name(parent, name, attr)

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
            return self.record_name(asked.parent, asked.name, attr), None
        if isinstance(error, DirectoryGone):
            return None, self.directory_gone(error, asked.parent)
        if type(error) is NotFound and self._record_absent(asked.parent, asked.name):
            return None, None
        return None, error

    def getattr_now(self, inode: int) -> Attr | None:
        """The result of `getattr` from the cache, or None if a server must be queried."""
        attr = self._vfs.getattr_now(inode)
        return None if attr is None else self._record_attr(attr)

    async def getattr(self, inode: int) -> Attr:
        try:
            return self._record_attr(await self._vfs.getattr(inode))
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
            or (not self.is_listed(inode) and self._is_stale(inode))
        ):
            return None
        attr = Attr()
        attr.CopyFrom(known)
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
            self.published.bar(inode)
            if not self.options.writeback:
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
                handle=self._files.get(handle),
            )
            if before is not None and before < size:
                await self.pages.growing(inode, before, size)
        finally:
            self.change_count += 1
            if size is not None:
                self.published.unbar(inode)
        if size is None:
            self._changed_here(inode, attr.change)
        return self._record_attr(attr)

    async def readlink(self, inode: int) -> bytes:
        return await self._vfs.readlink(inode)

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attr:
        with self._changing_names(parent):
            return self.record_name(parent, name, await self._vfs.mknod(parent, name, mode, rdev, caller))

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attr:
        with self._changing_names(parent):
            return self.record_name(parent, name, await self._vfs.mkdir(parent, name, mode, caller))

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attr:
        with self._changing_names(parent):
            return self.record_name(parent, name, await self._vfs.symlink(parent, name, target, caller))

    async def link(self, inode: int, parent: int, name: bytes, caller: Caller) -> Attr:
        with self._changing_names(parent):
            return self.record_name(parent, name, await self._vfs.link(inode, parent, name, caller))

    async def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        with self._changing_names(parent):
            await self._vfs.unlink(parent, name, caller)

    async def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        with self._changing_names(parent):
            await self._vfs.rmdir(parent, name, caller)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller
    ) -> None:
        """Rename. `flags` of renameat2(2): 1 NOREPLACE, 2 EXCHANGE; InvalidRequest for others."""
        if flags & ~3 or flags == 3:
            raise errors.InvalidRequest(f"rename flags {flags:#x}")
        with self._changing_names(parent, new_parent):
            moved, other = await self._vfs.rename(parent, name, new_parent, new_name, flags, caller)
        self._moving_name(moved, new_parent, new_name)
        if flags == RENAME_EXCHANGE:
            self._moving_name(other, parent, name)

    async def access(self, inode: int, mask: int, caller: Caller) -> None:
        await self._vfs.access(inode, mask, caller)

    # -- open files --------------------------------------------------------------------------------------------------

    async def open(self, inode: int, flags: int, caller: Caller, drop_set_ids: bool = False) -> OpenReply:
        """Open a file. `drop_set_ids`: as in setattr, if O_TRUNC truncates the file."""
        flags = self.flags_below(flags)
        if self._is_withdrawn(inode, caller.pid):
            raise NotFound(f"inode {inode:#x} may have another name by now")
        file = await self._vfs.open(inode, flags, caller)
        if drop_set_ids:
            await self._drop_set_ids(file, caller)
        if (
            not file.attr.links
            and self._is_kept(inode)
            and not any(other.inode == inode for other in self._files.values())
        ):
            await self._vfs.release(file)
            raise NotFound(f"inode {inode:#x} has no name any more")
        return self._opened_existing(file, flags, caller, asking())

    def open_now(self, inode: int, flags: int, caller: Caller, unique: int = 0) -> OpenReply | None:
        """The result of `open` if no server must be queried, else None.

        `unique`: number of the kernel's request.
        """
        if inode in self._withdrawn or (not caller.uid and self._vfs.squashes_root):
            return None
        file = self._vfs.open_now(inode, flags)
        return None if file is None else self._opened_existing(file, flags, caller, unique)

    def _opened_existing(self, file, flags: int, caller: Caller, unique: int) -> OpenReply:
        if self._sent_changes.get(file.inode) != file.attr.change:
            self.invalidate_attributes(file.inode)
        return self.open_reply(file, flags, caller, unique)

    async def create_unnamed(
        self, parent: int, mode: int, flags: int, caller: Caller
    ) -> tuple[Attr, OpenReply]:
        """Create an unnamed file (O_TMPFILE); see `Files.create_unnamed`."""
        flags = self.flags_below(flags)
        attr, file = await self._vfs.create_unnamed(parent, mode, flags, caller)
        return self._record_attr(attr), self.open_reply(file, flags & ~os.O_TMPFILE, caller, asking())

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Attr, OpenReply]:
        flags = self.flags_below(flags)
        with self._changing_names(parent):
            attr, file = await self._vfs.create(parent, name, mode, flags, caller)
        return self.record_name(parent, name, attr), self.open_reply(file, flags, caller, asking())

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
        flags = self.flags_below(flags)
        creating = Creating(self, parent, name, flags, caller, unique)
        creating.begun = self._vfs.begin_create(parent, name, mode, flags, caller, unique, creating)
        if creating.begun is None:
            return None
        creating.hold()
        return creating

    def begin_unlink(self, parent: int, name: bytes, caller: Caller, unique: int) -> PendingChange | None:
        """Start `unlink`, as `begin_create` does."""
        ending = PendingChange(self, directory=parent)
        ending.begun = self._vfs.begin_unlink(parent, name, caller, unique, ending.ended)
        if ending.begun is None:
            return None
        self.lock_directory(parent)
        return ending

    def begin_flush(self, handle: int) -> PendingChange | bool | None:
        """Start `flush`, as `begin_create` does.

        True: nothing is left to flush. Only for a caller without locks.
        """
        file = self._files[handle]
        if self._vfs.is_flushed(file):
            return True
        ending = PendingChange(self, file.inode)
        ending.begun = self._vfs.begin_flush(file, ending.ended)
        return ending if ending.begun not in (None, True) else ending.begun

    def open_reply(self, file, flags: int, caller: Caller, unique: int) -> OpenReply:
        """Register a file that was opened below, and return the reply for the kernel.

        On error the file is closed again.
        """
        keeps = self.record_pages(file.attr)
        if flags & os.O_TRUNC:
            self.change_count += 1
            self.published.take_back(file.inode)
        reads_only = flags & os.O_ACCMODE == os.O_RDONLY
        published = reads_only and self._may_publish(file)
        try:
            handle = self.handles.take(file.inode, flags, caller, unique, published=published)
        except NvpoolError:  # the file is not open, and the kernel gets no word on its pages
            self._seen.pop(file.inode, None)
            self._own(self._vfs.release(file))
            raise
        if published:
            self.published.add(file.inode, handle)
        appending = self.register_open(handle, file, flags, caller)
        if keeps and file.inode not in self._paged:
            self._paging(file.inode)
        return OpenReply(
            handle,
            appending,
            self.options.writeback or keeps,
            # Without data to flush, NOFLUSH saves a request at each close. But a close also ends
            # record locks, so FLUSH is needed while there are any. A lock that is taken later
            # through this descriptor ends with the open file instead.
            reads_only and not self._vfs.is_locked(file.inode),
        )

    def register_open(self, handle: int, file, flags: int, caller: Caller) -> bool:
        """Register an open file. Returns whether it is open for appending."""
        file.number = handle
        self._files[handle] = file
        if bypasses(flags):
            self.pages.opened(file.inode)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return False
        self.published.opened_to_write(file.inode, handle)
        if not flags & os.O_APPEND:
            return False
        self._appending[handle] = Caller(caller.uid, caller.gid, caller.pid)
        return True

    def _may_publish(self, file) -> bool:
        """Whether read workers of this mount may read the file.

        Not small files: this process has them completely sooner than a worker opens them. Not where root is
        squashed: the workers open files as root, and could not.
        """
        inode = file.inode
        if (
            not self.published.on
            or self._vfs.squashes_root
            or file.attr.size <= SMALL_BYTES
            or self.published.is_barred(inode)
        ):
            return False
        if not self._vfs.is_settled(file):
            return False
        if inode not in self._paged:
            # workers fill the kernel's pages too, and those are dropped when the lease ends
            self._paging(inode)
        return inode in self._paged and self._paged[inode][1]

    def burst(self) -> None:
        """Announce that several requests may follow before `burst_over`. Reads among them are batched."""
        self._vfs.hold_reads()

    def burst_over(self) -> None:
        self._vfs.send_reads()

    def read_now(self, handle: int, offset: int, size: int):
        """The result of `read` if it is available without waiting; else None: call `begin_read` or `read`."""
        file = self._files[handle]
        if file.inode not in self._paged:
            self._paging(file.inode)
        return self._vfs.read_now(file, offset, size)

    def begin_read(self, handle: int, offset: int, size: int):
        """Start `read` if that needs no task; else return None: call `read`. Call `read_now` before.

        The result has `cancel`, and calls its `on_end` as a Step does.
        """
        return self._vfs.begin_read(self._files[handle], offset, size)

    @property
    def chunks(self):
        """The client's chunk reader; None: the layer below answers from memory."""
        return getattr(self._vfs, "chunks", None)

    @property
    def short_circuit(self):
        """The client's short-circuit reads from drives of this host.

        None: the layer below answers from memory.
        """
        return getattr(self._vfs, "short_circuit", None)

    def read(self, handle: int, offset: int, size: int):
        """Awaitable of up to `size` bytes as one buffer, short only at the end of the file.

        After `read_now`.
        """
        return self._vfs.read(self._files[handle], offset, size)

    async def flush(self, handle: int, owner: int | None = None) -> None:
        """close(2): on return the stores have all written data, and the size is known to all clients.

        Raises the error of an earlier write if there was one. The record locks of `owner` on the file end.
        """
        file = self._files[handle]
        with self._changing(file):
            await self._vfs.flush(file, owner)

    async def fsync(self, handle: int, datasync: bool) -> None:
        file = self._files[handle]
        with self._changing(file):
            await self._vfs.fsync(file, datasync)

    async def fallocate(self, handle: int, offset: int, length: int, mode: int, caller: Caller) -> None:
        """Allocate space or punch a hole; `mode` as in fallocate(2).

        The kernel writes back the pages of a hole before and drops them after, and queries the attributes
        again.
        """
        file = self._files[handle]
        try:
            await self._take_privileges(file, caller)
            size = file.size
            await self._vfs.fallocate(file, offset, length, mode)
            if file.size > size and not self.options.writeback:
                await self.pages.growing(file.inode, size, file.size)
        finally:
            self.change_count += 1

    async def lseek(self, handle: int, offset: int, whence: int) -> int:
        """Find data or holes (SEEK_DATA and SEEK_HOLE); the kernel does the other kinds of lseek itself.

        NotSupported if the kernel may cache pages that it has not written back: they would be missed.
        """
        if self.options.writeback:
            raise NotSupported("pages that the kernel has not written back would be taken for holes")
        return await self._vfs.seek(self._files[handle], offset, whence)

    async def copy_file_range(
        self,
        handle_in: int,
        offset_in: int,
        handle_out: int,
        offset_out: int,
        length: int,
        flags: int,
        caller: Caller,
    ) -> int:
        """Copy a range; returns the number of bytes copied.

        The kernel has written back its pages of both ranges, and drops those of the second.
        """
        if flags:
            raise errors.InvalidRequest(f"copy_file_range with flags {flags:#x}")
        file = self._files[handle_out]
        try:
            await self._take_privileges(file, caller)
            size = file.size
            copied = await self._vfs.copy_range(self._files[handle_in], offset_in, file, offset_out, length)
            if offset_out > size and not self.options.writeback:
                await self.pages.growing(file.inode, size, offset_out)
            return copied
        finally:
            self.change_count += 1

    def is_locked(self, handle: int) -> bool:
        """Whether a process of this mount holds locks on the open file."""
        file = self._files.get(handle)
        return file is not None and self._vfs.is_locked(file.inode)

    def release_now(self, handle: int) -> bool:
        """Release as `release` does, if that needs no waiting. False: nothing has happened."""
        file = self._files.get(handle)
        if file is None or not self._vfs.release_now(file):
            return False
        self._appending.pop(handle, None)
        del self._files[handle]
        self._released(file, handle)
        return True

    def _released(self, file, handle: int) -> None:
        self.handles.give_back(handle)
        if bypasses(file.flags):
            self.pages.closed(file.inode)
        if file.inode in self.pages.refused:
            self._forget_refused(file.inode)
        if file.inode in self.pages.locked and not self._vfs.is_open(file.inode):
            self.pages.released(file.inode)
        self.published.closed(file.inode, handle)
        if file.inode in self._paged and not self._vfs.is_open(file.inode):
            del self._paged[file.inode]

    async def release(self, handle: int, again: bool = False) -> None:
        """Close the open file after its last descriptor; the locks that belong to it end.

        The number is not used again. `again`: the predecessor may have done this already.
        """
        self._appending.pop(handle, None)
        if again and handle not in self._files:
            return
        file = self._files.pop(handle)
        try:
            await self._vfs.release(file)
        finally:
            self._released(file, handle)

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def statx(self, inode: int) -> tuple[Attr, int]:
        """Attributes as from `getattr`, and the birth time in nanoseconds; 0 if unknown."""
        return await self.getattr(inode), await self._vfs.birth_ns(inode)

    async def statfs(self, node: int = ROOT_INODE):
        """Usage of the volume that contains the node, or of the pool."""
        return await self._vfs.statfs(node)

    # -- after a predecessor of this process ---------------------------------------------------------------------------
    # ---------------------------------------------------------------------------

    async def take_over(self) -> None:
        """Continue a predecessor's open files, locks and unstored writes.

        Call this before any other operation.
        """
        before = self.handles.before()
        self._written_before = self._vfs.keeping.finished()
        handles = await self._vfs.take_over(
            [
                PredecessorFile(one.number, one.inode, self.flags_below(one.flags))
                for one in before
                if not one.is_directory
            ]
        )
        self.handles = Handles(self.kept)  # numbers follow those of the predecessor
        self.published.begin(self.handles)
        for number, handle in handles.items():
            if handle.writable:
                self.published.opened_to_write(handle.inode, number)
        for one in before:
            if one.is_directory:
                self._open_directory(one.number, one.inode, DirHandle(one.inode))
            else:
                self._files[one.number] = handles[one.number]
                if bypasses(handles[one.number].flags):
                    self.pages.opened(one.inode)
                if handles[one.number].append:
                    self._appending[one.number] = one.caller
            if one.unique:
                self._opened_before[one.unique] = one.number
            if one.was_published:
                if self._may_publish(handles[one.number]):
                    self.published.add(one.inode, one.number)
                else:
                    self.handles.take_back(one.number)
        self._inherited_until_s = self.clock.boottime_s() + self.options.negative_timeout_s

    def invalidate_inherited(self) -> None:
        """Invalidate what the kernel got from the predecessor on open files.

        No recall would do that. Call this when serving begins.
        """
        self._invalidate_open_files({file.inode for file in self._files.values()})

    def open_again(self, handle: int) -> OpenReply:
        """The result of `open` in the predecessor, as it was returned or would have been."""
        return OpenReply(handle, handle in self._appending, False)

    async def create_again(self, handle: int) -> tuple[Attr, OpenReply]:
        attr = await self.getattr(self._files[handle].inode)
        self.name_is_kept = False
        return attr, self.open_again(handle)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Flush and release every open file before the mount ends. Errors are logged; all files are tried."""
        for handle, file in list(self._files.items()):
            try:
                await self._vfs.flush(file)
                await self._vfs.release(file)
            except NvpoolError as error:
                log.error("an open file lost its last writes: %s", error)
            if self._files.pop(handle, None) is not None:
                self.handles.give_back(handle)
