"""The portable engine: libfuse through pyfuse3 3.5, with one event loop and one mount per process.

The only importer of pyfuse3. It unpacks pyfuse3's arguments, calls `fuse/ops/operations`, packs the result
and turns errors into errnos. It never decides what a request means. Used by mountd/server and
bench/fuse_floor.

pyfuse3's own worker loop is used unchanged: a worker reads one request, awaits its handler, replies, and
waits for the next. Only the few names that pyfuse3 takes from trio are replaced (`_TrioLoop`), as
pyfuse3.asyncio.enable() does. pyfuse3's own replacement is not used, because it registers and removes the
descriptor with epoll for each request and hands a lock from task to task. Measured from memory, 4 KiB
O_DIRECT reads: 28 k/s alone and 35 k/s from 8 threads with theirs, 51 and 95 k/s with ours.

pyfuse3 3.5 cannot do the following, as docs/reference/semantics.md says: locks and flock beyond this node,
fallocate, SEEK_HOLE, copy_file_range, XATTR_CREATE and XATTR_REPLACE in one step, distinguishing "now" from a
time in utimensat, O_TMPFILE, the birth time, and ignoring the umask where a directory has a default access
control list.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import functools
import logging
import os
import select
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, StatvfsData, readdir_reply

from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import InUse, NvpoolError, Unavailable
from nvpool.fuse.mount_point import Mount, MountOptions, mount_at, unmount
from nvpool.fuse.ops.metadata import ASK
from nvpool.fuse.ops.operations import FuseOps, errno_of
from nvpool.fuse.protocol.replies import BLOCK_BYTES
from nvpool.metrics.exposition import Page

log = logging.getLogger(__name__)

WORKERS_MAX = 128
"""Pending requests at a time; others wait in the kernel.

Each worker has a buffer of libfuse (1 MiB of address space, touched as far as writes were large). A dead
store can block this many reads until their deadline.
"""

SPIN_LOOKS = 48
"""Polls before sleeping, about 20 µs. A process that sleeps in a virtual machine needs 25 µs to wake up."""

SPIN_CREDIT_MAX = 16
"""Most credit for polling. A poll that finds a request earns two credits, one without success costs one.

Without credit only every 32nd time is tried. So a machine whose cores are all busy does not pay for polling.
"""

BURST_MAX = 16
"""Requests in a row that a worker may take before other events of the loop."""


def _words(options: MountOptions) -> set[str]:
    """Mount options for libfuse.

    No max_read: libfuse wants the same number from an init handler, which pyfuse3 does not let us have. Reads
    are limited to 1 MiB anyway, the 256 pages of libfuse's buffer.
    """
    shown = options.shown.replace("\\", r"\\").replace(",", r"\,")
    words = {f"fsname={shown}", "subtype=nvpool", "default_permissions", *options.extra}
    if options.allow_other:
        words.add("allow_other")
    if options.read_only:
        words.add("ro")
    return words


class _SessionClosed(Exception):
    """Raised out of wait_readable when the session ends, as pyfuse3 expects."""


class _NoLock:
    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_) -> None:
        pass


class _TaskName(NamedTuple):
    name: str


class _TrioLoop:
    """The part of trio that pyfuse3's session loop uses, on an asyncio loop.

    One reader stays registered for /dev/fuse. When it is readable, one idle worker is woken; that worker
    reads without waiting, since no other worker is woken before it has run. A worker that has replied and is
    the only busy one polls SPIN_LOOKS times for the next request before it sleeps: a wake-up costs more than
    an application takes to send its next request.
    """

    ClosedResourceError = _SessionClosed

    def __init__(self, on_burst: Callable[[], None]) -> None:
        self._on_burst = on_burst
        self.lowlevel = self.from_thread = self
        self.idle: list[asyncio.Future] = []
        self.failed: BaseException | None = None
        self.closing = False
        self._fd = -1
        self._poll = lambda wait_ms: []
        self._burst = 0
        self._credit = SPIN_CREDIT_MAX
        self._turn = 0
        self._ready: asyncio.Future
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task] = set()
        self._ended = asyncio.Event()

    Lock = _NoLock

    @staticmethod
    def current_trio_token() -> str:
        return "asyncio"

    @staticmethod
    def current_task() -> _TaskName:
        return _TaskName("fuse")

    def wait_readable(self, fd: int) -> asyncio.Future:
        if self._fd < 0:
            self._fd = fd
            # a request that is interrupted between epoll and read must not block the loop
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, self._readable)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            self._poll = poll.poll
            self._ready = self._loop.create_future()
            self._ready.set_result(None)
        elif len(self._tasks) - len(self.idle) == 1 and self._burst:
            self._turn += 1
            if self._credit or not self._turn & 31:
                self._burst -= 1
                look = self._poll
                for _ in range(SPIN_LOOKS):
                    if look(0):
                        self._credit = min(self._credit + 2, SPIN_CREDIT_MAX)
                        return self._ready
                self._credit = max(self._credit - 1, 0)
        future = self._loop.create_future()
        if self.closing:
            future.set_exception(_SessionClosed())
        else:
            self.idle.append(future)
        return future

    def _readable(self) -> None:
        self._burst = BURST_MAX
        self._on_burst()
        if self.idle:
            self.idle.pop().set_result(None)

    def notify_closing(self, _fd: int = -1) -> None:
        self.closing = True
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        while self.idle:
            self.idle.pop().set_exception(_SessionClosed())

    # -- the nursery: workers and their ends ---------------------------------------------------------------------------

    def open_nursery(self) -> _TrioLoop:
        return self

    async def __aenter__(self) -> _TrioLoop:
        return self

    def start_soon(self, worker: Callable, *arguments, name: str = "") -> None:
        if self.closing:
            return
        task = self._loop.create_task(worker(*arguments), name=name)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._worker_ended, worker, arguments))

    def _worker_ended(self, worker: Callable, arguments: tuple, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OSError) and error.errno != errno.EAGAIN:
            self.failed = error
        # unmounted, stopped, or /dev/fuse failed: the other workers end too
        if error is None or self.failed is not None:
            self.notify_closing()
        else:
            if not isinstance(error, OSError):
                log.error("a request could not be answered", exc_info=error)
            self.start_soon(worker, *arguments)
        if not self._tasks:
            self._ended.set()

    async def __aexit__(self, *_) -> None:
        await self._ended.wait()


def _entry(attr, options, kept: bool = True) -> EntryAttributes:
    entry = EntryAttributes()
    entry.st_ino = attr.inode
    entry.st_mode = attr.mode
    entry.st_nlink = attr.links
    entry.st_uid = attr.uid
    entry.st_gid = attr.gid
    entry.st_size = attr.size
    entry.st_blocks = attr.blocks
    entry.st_blksize = BLOCK_BYTES
    entry.st_rdev = attr.rdev
    entry.st_atime_ns = attr.atime_ns
    entry.st_mtime_ns = attr.mtime_ns
    entry.st_ctime_ns = attr.ctime_ns
    entry.attr_timeout = options.attr_timeout_s
    entry.entry_timeout = options.entry_timeout_s if kept else 0.0
    return entry


def _answering(method):
    """Wrap a handler so that it raises only FUSEError.

    Any other error would leave the caller waiting forever.
    """
    name = method.__name__

    @functools.wraps(method)
    async def answer(*arguments):
        try:
            return await method(*arguments)
        except Exception as error:
            raise FUSEError(errno_of(error, name)) from None

    return answer


def _caller(ctx) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid, ctx.umask)


class _Requests(pyfuse3.Operations):
    """pyfuse3's handlers.

    `read` and `write` contain the code of `_answering`: it saves a coroutine on the hot path.
    """

    def __init__(self, ops: FuseOps, on_ready: Callable[[], None], acl: bool) -> None:
        self._ops = ops
        self.enable_acl = acl
        ops.set_kernel_features(keeps_acls=acl)
        self._options = ops.options
        self._on_ready = on_ready
        # st_ino 0: the kernel caches for this time that the name does not exist
        self._missing = EntryAttributes()
        self._missing.entry_timeout = ops.options.negative_timeout_s

    def init(self) -> None:
        self._on_ready()

    async def read(self, fh, off, size):
        try:
            found = self._ops.read_now(fh, off, size)
            return found if found is not None else await self._ops.read(fh, off, size)
        except Exception as error:
            raise FUSEError(errno_of(error, "read")) from None

    async def write(self, fh, off, buf):
        try:
            return await self._ops.write(fh, off, buf)
        except Exception as error:
            raise FUSEError(errno_of(error, "write")) from None

    @_answering
    async def lookup(self, parent_inode, name, ctx):
        attr = self._ops.lookup_now(parent_inode, name)
        if attr is ASK:
            attr = await self._ops.lookup(parent_inode, name)
        return self._missing if attr is None else self._named(attr)

    def _named(self, attr) -> EntryAttributes:
        return _entry(attr, self._options, self._ops.name_is_kept)

    def forget(self, inode_list):
        self._ops.forget(inode_list)

    @_answering
    async def getattr(self, inode, ctx):
        return _entry(self._ops.getattr_now(inode) or await self._ops.getattr(inode), self._options)

    @_answering
    async def setattr(self, inode, attr, fields, fh, ctx):
        return _entry(
            await self._ops.setattr(
                inode,
                _caller(ctx),
                fh,
                mode=attr.st_mode if fields.update_mode else None,
                uid=attr.st_uid if fields.update_uid else None,
                gid=attr.st_gid if fields.update_gid else None,
                size=attr.st_size if fields.update_size else None,
                atime_ns=attr.st_atime_ns if fields.update_atime else None,
                mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            ),
            self._options,
        )

    @_answering
    async def readlink(self, inode, ctx):
        return bytes(await self._ops.readlink(inode))

    @_answering
    async def mknod(self, parent_inode, name, mode, rdev, ctx):
        return self._named(await self._ops.mknod(parent_inode, name, mode, rdev, _caller(ctx)))

    @_answering
    async def mkdir(self, parent_inode, name, mode, ctx):
        return self._named(await self._ops.mkdir(parent_inode, name, mode, _caller(ctx)))

    @_answering
    async def unlink(self, parent_inode, name, ctx):
        await self._ops.unlink(parent_inode, name, _caller(ctx))

    @_answering
    async def rmdir(self, parent_inode, name, ctx):
        await self._ops.rmdir(parent_inode, name, _caller(ctx))

    @_answering
    async def symlink(self, parent_inode, name, target, ctx):
        return self._named(await self._ops.symlink(parent_inode, name, target, _caller(ctx)))

    @_answering
    async def rename(self, parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx):
        await self._ops.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, _caller(ctx))

    @_answering
    async def link(self, inode, new_parent_inode, new_name, ctx):
        return self._named(await self._ops.link(inode, new_parent_inode, new_name, _caller(ctx)))

    @_answering
    async def open(self, inode, flags, ctx):
        caller = _caller(ctx)
        opened = self._ops.open_now(inode, flags, caller) or await self._ops.open(inode, flags, caller)
        return FileInfo(opened.handle, opened.direct_io, opened.keep_cache)

    @_answering
    async def create(self, parent_inode, name, mode, flags, ctx):
        attr, opened = await self._ops.create(parent_inode, name, mode, flags, _caller(ctx))
        return FileInfo(opened.handle, opened.direct_io, opened.keep_cache), self._named(attr)

    @_answering
    async def flush(self, fh):
        await self._ops.flush(fh)

    @_answering
    async def release(self, fh):
        await self._ops.release(fh)

    @_answering
    async def fsync(self, fh, datasync):
        await self._ops.fsync(fh, datasync)

    @_answering
    async def opendir(self, inode, ctx):
        return await self._ops.opendir(inode)

    @_answering
    async def readdir(self, fh, start_id, token):
        await self._ops.readdir(
            fh, start_id, lambda name, attr, cursor: readdir_reply(token, name, self._named(attr), cursor)
        )

    @_answering
    async def releasedir(self, fh):
        await self._ops.releasedir(fh)

    @_answering
    async def fsyncdir(self, fh, datasync):
        await self._ops.fsyncdir(fh)

    @_answering
    async def statfs(self, ctx):
        space = await self._ops.statfs()
        answer = StatvfsData()
        answer.f_bsize = answer.f_frsize = space.block_bytes
        answer.f_blocks = space.blocks_total
        answer.f_bfree = space.blocks_free
        answer.f_bavail = space.blocks_available
        answer.f_files = space.files_total
        answer.f_ffree = answer.f_favail = space.files_free
        answer.f_namemax = space.name_bytes_max
        return answer

    @_answering
    async def getxattr(self, inode, name, ctx):
        return bytes(await self._ops.getxattr(inode, name))

    @_answering
    async def setxattr(self, inode, name, value, ctx):
        await self._ops.setxattr(inode, name, value, 0, _caller(ctx))  # pyfuse3 has checked the flags

    @_answering
    async def listxattr(self, inode, ctx):
        return await self._ops.listxattr(inode)

    @_answering
    async def removexattr(self, inode, name, ctx):
        await self._ops.removexattr(inode, name, _caller(ctx))

    @_answering
    async def access(self, inode, mode, ctx):
        await self._ops.access(inode, mode, _caller(ctx))
        return True


_CAP_SYS_RESOURCE = 24
_CAPABILITY_VERSION_3 = 0x20080522


def _do_without_splice() -> None:
    """Give up CAP_SYS_RESOURCE in this thread, which nothing here needs.

    With the capability libfuse splices each request through a pipe. Splicing costs two more system calls and
    a page per request. libfuse reads directly if the pipe cannot hold the largest request, which is 1 MiB
    and one page; without the capability a pipe has at most 1 MiB (/proc/sys/fs/pipe-max-size). pyfuse3 has no
    option for it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of bits 0..31, then of 32..63
    if libc.capget(header, sets) == 0 and sets[0] & 1 << _CAP_SYS_RESOURCE:
        sets[0] &= ~(1 << _CAP_SYS_RESOURCE)
        libc.capset(header, sets)


class Pyfuse3Engine:
    """See engines.Engine. One per process."""

    name = "pyfuse3"
    is_mounted = False
    """Whether this process has a mount of this engine."""

    def __init__(
        self,
        ops: FuseOps,
        mount_point: Path,
        options: MountOptions,
        on_ready: Callable[[], None] = lambda: None,
        on_burst: Callable[[], None] = lambda: None,
    ):
        self._requests = _Requests(ops, on_ready, options.acl)
        ops.notices.connect(
            invalidate_attributes=self._invalidate_attributes,
            invalidate=self._invalidate,
            drop=self._drop_pages,
            store=self._store_pages,
        )
        self._mount_point = mount_point
        self._options = options
        self._on_burst = on_burst
        self._mount: Mount | None = None
        self._loop: _TrioLoop | None = None

    def mount(self) -> Mount:
        """Mount. On return the mount is in the name space; its requests are answered once `serve` runs.

        InUse: this process already has a mount.
        Unavailable: libfuse refused and gave the reason on stderr (no /dev/fuse, no right to mount, allow_other
        not permitted).
        """
        if Pyfuse3Engine.is_mounted:
            raise InUse("pyfuse3 can serve one mount per process")
        _do_without_splice()
        try:
            pyfuse3.init(self._requests, os.fspath(self._mount_point), _words(self._options))
        except RuntimeError as error:
            raise Unavailable(f"{self._mount_point} could not be mounted: {error}") from None
        Pyfuse3Engine.is_mounted = True
        self._mount = mount_at(self._mount_point)
        if self._mount is None:
            raise Unavailable(f"{self._mount_point} was unmounted by another process")
        return self._mount

    async def serve(self) -> None:
        """Answer requests until the mount is gone or `stop` is called.

        Raises Unavailable if /dev/fuse fails.
        """
        self._loop = pyfuse3.trio = _TrioLoop(self._on_burst)
        await pyfuse3.main(WORKERS_MAX, WORKERS_MAX)
        if self._loop.failed is not None:
            raise Unavailable(f"/dev/fuse failed: {self._loop.failed}")

    def _invalidate_attributes(self, inode: int) -> None:
        """With attr_only the kernel marks the attributes and returns; dropping pages would wait."""
        try:
            pyfuse3.invalidate_inode(inode, attr_only=True)
        except OSError as error:
            if error.errno != errno.ENOENT:  # the kernel does not know the inode
                log.warning("attributes of %#x could not be invalidated: %s", inode, error)

    async def _invalidate(self, names: Iterable[tuple[int, bytes]], inodes: Iterable[int]) -> None:
        """Invalidate in a thread: the kernel waits for requests that this process has to answer."""
        await asyncio.get_running_loop().run_in_executor(None, _invalidate_all, list(names), list(inodes))

    async def _drop_pages(self, inode: int, offset: int, length: int) -> None:
        """Drop all pages: libfuse's wrapper takes no range."""
        await self._invalidate((), (inode,))

    async def _store_pages(self, inode: int, offset: int, content: bytes) -> None:
        await asyncio.get_running_loop().run_in_executor(
            None, _notify, functools.partial(pyfuse3.notify_store, inode, offset, content)
        )

    def stop(self) -> None:
        """Accept no further request; `serve` returns when the pending ones are answered."""
        if self._loop is not None and not self._loop.closing:
            pyfuse3.terminate()

    def measure(self, page: Page) -> None:
        """Do nothing: this engine counts nothing."""

    def close(self) -> None:
        """Close /dev/fuse and unmount if the mount is still there. Does not wait. May be called twice.

        The descriptor is closed first: the kernel may write pages back while it unmounts, and no process
        would answer.
        """
        if self._mount is None:
            return
        pyfuse3.close(unmount=False)
        there = mount_at(self._mount.point)
        if there is not None and there.device == self._mount.device:
            try:
                unmount(there.point, lazy=True)
            except NvpoolError as error:
                log.warning("the mount is left behind: %s", error)
        self._mount = None
        Pyfuse3Engine.is_mounted = False


def _invalidate_all(names: list[tuple[int, bytes]], inodes: list[int]) -> None:
    for notice in (
        *[functools.partial(pyfuse3.invalidate_entry, *place) for place in names],
        *[functools.partial(pyfuse3.invalidate_inode, inode) for inode in inodes],
    ):
        _notify(notice)


def _notify(notice: Callable[[], object]) -> None:
    try:
        notice()
    except OSError as error:
        if error.errno != errno.ENOENT:  # the kernel does not know the name or inode any more
            log.warning("the kernel has not taken a notice: %s", error)
