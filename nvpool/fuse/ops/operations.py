"""What each request of the FUSE kernel module means, for any engine that speaks to the kernel.

An engine (`kernel_engine`, `pyfuse3_engine`) unpacks a request, calls the method here, packs the answer; what is raised it
turns into an errno with `errno_of`. Nothing here knows a library or the kernel's structures, so all of it runs in tests
without a mount. Below it is the client's Vfs; this layer adds only what a *kernel* needs:

* the node id is the inode number; nothing is pinned by a look-up, so look-ups are not counted and a forget only drops what
  was remembered of what the kernel keeps. Memory does not grow with the number of files that the kernel knows.
* open files and directories get numbers, valid from open to release.
* what the kernel keeps of names, attributes and pages, and how it is made to forget: `fuse/ops/kernel_cache`.
* locks, and what the kernel has to forget when it gets one: `fuse/ops/locks`.
* O_APPEND writers bypass the kernel's pages and offsets (direct_io): the place of a record comes from the metadata service; not
  where the kernel writes pages back (`CachedOps.flags_below`). What a write takes from a program: `fuse/ops/setid`.
* listings, and what is read ahead of them: `fuse/ops/listing`. Extended attributes: `fuse/ops/xattrs`.

Permissions are the kernel's work (mount option default_permissions). Methods whose name is in BY_INODE answer ESTALE where the
inode is gone: Linux then walks the path once more without trusting its caches, so what was replaced on another node is found.
So is a request for a name in a directory that is gone, if the kernel may have come there by a name that it keeps; else, and
when it comes again, there is no such name (ENOENT), as on a local file system. A file without a name can be opened while it is
open here (/proc/self/fd), and by who has just looked it up.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat

from nvpool.client.lookup.batcher import Asked
from nvpool.client.rpc.exactly_once import asking
from nvpool.client.state.small_file_cache import SMALL_BYTES
from nvpool.client.state.types import RENAME_EXCHANGE, Caller, DirHandle
from nvpool.client.vfs.takeover import OpenBefore
from nvpool.core import errors
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import DirectoryGone, NotFound, NotSupported, NvpoolError
from nvpool.core.ids import ROOT_INODE
from nvpool.fuse.ops.handles import Handles
from nvpool.fuse.ops.inline_completions import Creating, Ending, Opened
from nvpool.fuse.ops.kernel_cache import FuseOptions
from nvpool.fuse.ops.listing import ListOps
from nvpool.fuse.ops.locks import LockOps
from nvpool.fuse.ops.page_cache_bypass import Bypassing, bypasses
from nvpool.fuse.ops.replay import AgainOps
from nvpool.fuse.ops.setid import SET_IDS, drops_set_gid, without_set_ids
from nvpool.fuse.ops.writes import WriteOps
from nvpool.fuse.ops.xattrs import XattrOps
from nvpool.rpc.v1.meta_pb2 import Attr

log = logging.getLogger(__name__)

ASK = object()
"""What `lookup_now` returns where somebody has to be asked: None says that there is no such name."""

DOTS = frozenset((b".", b".."))
"""Asked for by NFS export and open_by_handle only."""

BY_INODE = frozenset(("getattr", "setattr", "readlink", "open", "opendir", "link", "getxattr", "setxattr", "listxattr",
                      "removexattr", "access", "statx"))
"""Requests that name an inode which the kernel once looked up."""


def errno_of(error: BaseException, request: str) -> int:
    """The errno that the application sees; the only place where errors become numbers for the kernel.

    What is none of ours is a bug: EIO, and the log has the traceback.
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


class FuseOps(LockOps, ListOps, WriteOps, XattrOps, AgainOps):
    """See the module. Used from one event loop; methods may run at the same time."""

    shows_subtree = False
    """Whether the kernel's root is not the pool's."""

    def __init__(self, vfs, options: FuseOptions | None = None, clock=SYSTEM_CLOCK) -> None:
        LockOps.__init__(self, vfs, options or FuseOptions(), clock)
        AgainOps.__init__(self, vfs)
        self._files: dict[int, object] = {}
        self._appending: dict[int, Caller] = {}  # handle -> who opened it
        self.pages = Bypassing(self._own)
        ListOps.__init__(self)
        self._handles = Handles(self.kept)
        self.published.begin(self._handles)

    @property
    def open_files(self) -> int:
        return len(self._files)

    # -- names and attributes ----------------------------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes) -> Attr | None:
        """None: there is no such name, and the kernel may remember that for options.negative_timeout_s."""
        if name in DOTS:
            attr = await self.getattr(parent)
            self.name_is_kept = False
            return attr if name == b"." else await self.getattr(attr.parent or parent)
        try:
            return self._telling_name(parent, name, await self._vfs.lookup(parent, name))
        except DirectoryGone as error:
            raise self._gone(error, parent) from None
        except NotFound:
            if not self._tell_absent(parent, name):
                raise
            return None

    def lookup_now(self, parent: int, name: bytes) -> Attr | object | None:
        """What `lookup` would bring, where nobody has to be asked; else ASK. As the two below it is a few microseconds, and for
        the engine to call before what waits."""
        if name in DOTS:
            return ASK
        try:
            attr = self._vfs.lookup_now(parent, name)
        except NotFound:
            if not self._tell_absent(parent, name):
                raise
            return None
        return ASK if attr is None else self._telling_name(parent, name, attr)

    def begin_lookup(self, parent: int, name: bytes) -> Asked | None:
        """`lookup`, begun, where that needs no task; as `begin_read`. `lookup_now` was tried before."""
        asked = self._vfs.begin_lookup(parent, name) if name not in DOTS else None
        if asked is not None:
            asked.then = self._looked_up
        return asked

    def _looked_up(self, asked: Asked, attr: Attr | None, error: BaseException | None
                   ) -> tuple[Attr | None, BaseException | None]:
        if attr is not None:
            return self._telling_name(asked.parent, asked.name, attr), None
        if isinstance(error, DirectoryGone):
            return None, self._gone(error, asked.parent)
        if type(error) is NotFound and self._tell_absent(asked.parent, asked.name):
            return None, None
        return None, error

    def getattr_now(self, inode: int) -> Attr | None:
        """What `getattr` would bring, where nobody has to be asked; else None."""
        attr = self._vfs.getattr_now(inode)
        return None if attr is None else self._telling(attr)

    async def getattr(self, inode: int) -> Attr:
        try:
            return self._telling(await self._vfs.getattr(inode))
        except NotFound:
            attr = self._removed(inode)
            if attr is None:
                raise
            return attr

    def _removed(self, inode: int) -> Attr | None:
        """The last attributes of a directory that another node has removed, for who has it open here or works in it."""
        known = self._vfs.known_attr(inode)
        if known is None or not stat.S_ISDIR(known.mode) or (not self.is_listed(inode) and self._is_stale(inode)):
            return None
        attr = Attr()
        attr.CopyFrom(known)
        attr.links = attr.size = 0
        return attr

    async def setattr(self, inode: int, caller: Caller, handle: int | None, *, mode: int | None = None, uid: int | None = None,
                      gid: int | None = None, size: int | None = None, atime_ns: int | None = None,
                      mtime_ns: int | None = None, drop_set_ids: bool = False) -> Attr:
        """`handle`: of the open file where the application named one (ftruncate), which allows what the mode may not. A time
        may be NOW. `drop_set_ids`: the caller may not change a set-id file and leave it one."""
        if size is not None:
            mtime_ns = None  # a change of size is stamped by the service
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
                inode, mode=mode, uid=uid, gid=gid, size=size, atime_ns=atime_ns, mtime_ns=mtime_ns, caller=caller,
                handle=self._files.get(handle))
            if before is not None and before < size:
                await self.pages.growing(inode, before, size)
        finally:
            self._changes += 1
            if size is not None:
                self.published.unbar(inode)
        if size is None:
            self._changed_here(inode, attr.change)
        return self._telling(attr)

    async def readlink(self, inode: int) -> bytes:
        return await self._vfs.readlink(inode)

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attr:
        with self._changing_names(parent):
            return self._telling_name(parent, name, await self._vfs.mknod(parent, name, mode, rdev, caller))

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attr:
        with self._changing_names(parent):
            return self._telling_name(parent, name, await self._vfs.mkdir(parent, name, mode, caller))

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attr:
        with self._changing_names(parent):
            return self._telling_name(parent, name, await self._vfs.symlink(parent, name, target, caller))

    async def link(self, inode: int, parent: int, name: bytes, caller: Caller) -> Attr:
        with self._changing_names(parent):
            return self._telling_name(parent, name, await self._vfs.link(inode, parent, name, caller))

    async def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        with self._changing_names(parent):
            await self._vfs.unlink(parent, name, caller)

    async def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        with self._changing_names(parent):
            await self._vfs.rmdir(parent, name, caller)

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, caller: Caller) -> None:
        """flags of renameat2: 1 NOREPLACE, 2 EXCHANGE; others are refused."""
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

    async def open(self, inode: int, flags: int, caller: Caller, drop_set_ids: bool = False) -> Opened:
        """`drop_set_ids`: as in setattr, where O_TRUNC cuts."""
        flags = self.flags_below(flags)
        if self._is_withdrawn(inode, caller.pid):
            raise NotFound(f"inode {inode:#x} may have another name by now")
        file = await self._vfs.open(inode, flags, caller)
        if drop_set_ids:
            await self._drop_set_ids(file, caller)
        if not file.attr.links and self._is_kept(inode) and not any(other.inode == inode for other in self._files.values()):
            await self._vfs.release(file)
            raise NotFound(f"inode {inode:#x} has no name any more")
        return self._opened_anew(file, flags, caller, asking())

    def open_now(self, inode: int, flags: int, caller: Caller, unique: int = 0) -> Opened | None:
        """What `open` would return, where nobody has to be asked; else None. `unique`: the kernel's request."""
        if inode in self._withdrawn or (not caller.uid and self._vfs.squashes_root):
            return None
        file = self._vfs.open_now(inode, flags)
        return None if file is None else self._opened_anew(file, flags, caller, unique)

    def _opened_anew(self, file, flags: int, caller: Caller, unique: int) -> Opened:
        if self._told.get(file.inode) != file.attr.change:
            self.invalidate_attributes(file.inode)
        return self._opened(file, flags, caller, unique)

    async def create_unnamed(self, parent: int, mode: int, flags: int, caller: Caller) -> tuple[Attr, Opened]:
        """O_TMPFILE: see `Files.create_unnamed`."""
        flags = self.flags_below(flags)
        attr, file = await self._vfs.create_unnamed(parent, mode, flags, caller)
        return self._telling(attr), self._opened(file, flags & ~os.O_TMPFILE, caller, asking())

    async def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[Attr, Opened]:
        flags = self.flags_below(flags)
        with self._changing_names(parent):
            attr, file = await self._vfs.create(parent, name, mode, flags, caller)
        return self._telling_name(parent, name, attr), self._opened(file, flags, caller, asking())

    def begin_create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller, unique: int) -> Creating | None:
        """`create`, sent already, where nothing has to be waited for before: what has `cancel`, and calls its `on_end` as a
        Step does. Else None, and `create` is to be asked. `unique`: the kernel's request. As the others that begin something it
        has the kernel answered before our books are kept."""
        if not self._handles.has_room:
            return None
        flags = self.flags_below(flags)
        creating = Creating(self, parent, name, flags, caller, unique)
        creating.begun = self._vfs.begin_create(parent, name, mode, flags, caller, unique, creating)
        if creating.begun is None:
            return None
        creating.hold()
        return creating

    def begin_unlink(self, parent: int, name: bytes, caller: Caller, unique: int) -> Ending | None:
        """`unlink`, as `begin_create`."""
        ending = Ending(self, directory=parent)
        ending.begun = self._vfs.begin_unlink(parent, name, caller, unique, ending.ended)
        if ending.begun is None:
            return None
        self._lock(parent)
        return ending

    def begin_flush(self, handle: int) -> Ending | bool | None:
        """`flush`, as `begin_create`; True: it is done. Only for who has no locks."""
        file = self._files[handle]
        if self._vfs.is_flushed(file):
            return True
        ending = Ending(self, file.inode)
        ending.begun = self._vfs.begin_flush(file, ending.ended)
        return ending if ending.begun not in (None, True) else ending.begun

    def _opened(self, file, flags: int, caller: Caller, unique: int) -> Opened:
        keeps = self._keeps_pages(file.attr)
        if flags & os.O_TRUNC:
            self._changes += 1
            self.published.take_back(file.inode)
        reads_only = flags & os.O_ACCMODE == os.O_RDONLY
        published = reads_only and self._may_publish(file)
        try:
            handle = self._handles.take(file.inode, flags, caller, unique, published=published)
        except NvpoolError:  # it is not open, and the kernel was not told whether its pages are those of now
            self._seen.pop(file.inode, None)
            self._own(self._vfs.release(file))
            raise
        if published:
            self.published.add(file.inode, handle)
        appending = self._keep_open(handle, file, flags, caller)
        if keeps and file.inode not in self._paged:
            self._paging(file.inode)
        return Opened(handle, appending, self.options.writeback or keeps,
                      # A close that has nothing to say is a request less. It ends record locks, so it is heard where there are
                      # any; one that is taken later through this descriptor ends with the open file instead.
                      reads_only and not self._vfs.is_locked(file.inode))

    def _keep_open(self, handle: int, file, flags: int, caller: Caller) -> bool:
        """Whether it is open for appending."""
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
        """Whether other processes of this mount may read the file. Small ones are here as a whole sooner than they open
        them; where root is squashed they, who open as root, could not."""
        inode = file.inode
        if not self.published.on or self._vfs.squashes_root or file.attr.size <= SMALL_BYTES or self.published.is_barred(inode):
            return False
        if not self._vfs.is_settled(file):
            return False
        if inode not in self._paged:
            self._paging(inode)  # the kernel gets pages from them, and loses them when the lease does
        return inode in self._paged and self._paged[inode][1]

    def burst(self) -> None:
        """Several requests may follow at once, before `burst_over`: reads among them travel together."""
        self._vfs.hold_reads()

    def burst_over(self) -> None:
        self._vfs.send_reads()

    def read_now(self, handle: int, offset: int, size: int):
        """What `read` would bring, where it can be had without waiting; else None, and `read` is to be asked."""
        file = self._files[handle]
        if file.inode not in self._paged:
            self._paging(file.inode)
        return self._vfs.read_now(file, offset, size)

    def begin_read(self, handle: int, offset: int, size: int):
        """`read`, begun, where that needs no task: what has `cancel`, and calls its `on_end` as a Step does. Else None, and
        `read` is to be asked. `read_now` was tried before."""
        return self._vfs.begin_read(self._files[handle], offset, size)

    @property
    def chunks(self):
        """The client's reads of chunks; None: what is below answers from memory."""
        return getattr(self._vfs, "chunks", None)

    @property
    def short_cut(self):
        """The client's short cut to the drives of its host; None: what is below answers from memory."""
        return getattr(self._vfs, "short_cut", None)

    def read(self, handle: int, offset: int, size: int):
        """Awaitable of up to `size` bytes as one buffer, short only at the end of the file. After `read_now`."""
        return self._vfs.read(self._files[handle], offset, size)

    async def flush(self, handle: int, owner: int | None = None) -> None:
        """close(2): what was written is at the stores and the size is known to all, or the error is told here. The record locks
        of `owner` on the file end."""
        file = self._files[handle]
        with self._changing(file):
            await self._vfs.flush(file, owner)

    async def fsync(self, handle: int, datasync: bool) -> None:
        file = self._files[handle]
        with self._changing(file):
            await self._vfs.fsync(file, datasync)

    async def fallocate(self, handle: int, offset: int, length: int, mode: int, caller: Caller) -> None:
        """Modes as of fallocate(2). The kernel writes back the pages of a hole before and drops them after, and asks for the
        attributes again."""
        file = self._files[handle]
        try:
            await self._take_privileges(file, caller)
            size = file.size
            await self._vfs.fallocate(file, offset, length, mode)
            if file.size > size and not self.options.writeback:
                await self.pages.growing(file.inode, size, file.size)
        finally:
            self._changes += 1

    async def lseek(self, handle: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE; the kernel does the others. NotSupported where it may keep pages that are not here yet:
        they would be missed."""
        if self.options.writeback:
            raise NotSupported("pages that the kernel has not written back would be taken for holes")
        return await self._vfs.seek(self._files[handle], offset, whence)

    async def copy_file_range(self, handle_in: int, offset_in: int, handle_out: int, offset_out: int, length: int,
                              flags: int, caller: Caller) -> int:
        """How many bytes were copied. The kernel has written back its pages of both ranges, and drops those of the second."""
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
            self._changes += 1

    def is_locked(self, handle: int) -> bool:
        """Whether somebody here has locks on the open file."""
        file = self._files.get(handle)
        return file is not None and self._vfs.is_locked(file.inode)

    def release_now(self, handle: int) -> bool:
        """Whether it was released as by `release`, without waiting; else nothing has happened."""
        file = self._files.get(handle)
        if file is None or not self._vfs.release_now(file):
            return False
        self._appending.pop(handle, None)
        del self._files[handle]
        self._released(file, handle)
        return True

    def _released(self, file, handle: int) -> None:
        self._handles.give_back(handle)
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
        """The last descriptor of it is closed, and the locks that belong to it end. The number is not used again. `again`: the
        process before us may have done it."""
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
        """As `getattr`, and when the inode was made, in nanoseconds; 0 where that is not known."""
        return await self.getattr(inode), await self._vfs.birth_ns(inode)

    async def statfs(self, node: int = ROOT_INODE):
        """Of the volume that the node is in, or the pool."""
        return await self._vfs.statfs(node)

    # -- after another process of this mount ---------------------------------------------------------------------------

    async def take_over(self) -> None:
        """Go on with what is open, locked and unstored. Before anything else is asked."""
        before = self._handles.before()
        self._written_before = self._vfs.keeping.finished()
        handles = await self._vfs.take_over([OpenBefore(one.number, one.inode, self.flags_below(one.flags)) for one in before
                                             if not one.is_directory])
        self._handles = Handles(self.kept)  # behind the numbers of the life before
        self.published.begin(self._handles)
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
                    self._handles.take_back(one.number)
        self._told_until_s = self._clock.boottime_s() + self.options.negative_timeout_s

    def told_before(self) -> None:
        """Requests are served now: what the process before us has told of open files nobody would take back."""
        self._told_of_before({file.inode for file in self._files.values()})

    def open_again(self, handle: int) -> Opened:
        """What `open` has answered, or would have, in the process before us."""
        return Opened(handle, handle in self._appending, False)

    async def create_again(self, handle: int) -> tuple[Attr, Opened]:
        attr = await self.getattr(self._files[handle].inode)
        self.name_is_kept = False
        return attr, self.open_again(handle)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Flush and release every open file: what a mount does before it goes. Errors are logged, all files are tried."""
        for handle, file in list(self._files.items()):
            try:
                await self._vfs.flush(file)
                await self._vfs.release(file)
            except NvpoolError as error:
                log.error("an open file lost its last writes: %s", error)
            if self._files.pop(handle, None) is not None:
                self._handles.give_back(handle)
