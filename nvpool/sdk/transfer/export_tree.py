"""Export of a tree or a file of a pool to a local file system."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from nvpool.client.state.vfs_types import Caller
from nvpool.core.checksum import crc32c
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    AlreadyExists,
    ChecksumMismatch,
    NotADirectory,
    NotFound,
    Refused,
    from_os_error,
)
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB
from nvpool.sdk.transfer.progress import PIECE_BYTES, TransferOptions, TransferProgress
from nvpool.sdk.transfer.workers import Crew, Folder

if TYPE_CHECKING:
    from nvpool.client.vfs.filesystem import Vfs
    from nvpool.rpc.api import Buffer
    from nvpool.rpc.messages.direntries import DirectoryPage
    from nvpool.rpc.messages.meta_messages import Attr

ENTRIES_PER_BATCH = 1000
_ZEROS = bytes(64 * KIB)
"""Aligned runs of zeros of this size become holes."""


async def export_tree(
    vfs: Vfs,
    source: bytes,
    destination: str | bytes | os.PathLike[str],
    *,
    progress: TransferProgress,
    options: TransferOptions | None = None,
) -> None:
    """Copy `source`, a path in the pool, to the local `destination`; missing parents are created.

    This is `import_tree` in the other direction. Each block that arrives is checked against its writer's
    checksum. The local file is then synced, read back from the drive and compared. A file that an earlier
    export left incomplete is written again; complete files are skipped.

    NotFound  the source does not exist
    NotADirectory, AlreadyExists  source and destination are of different kinds
    Unavailable  the pool did not answer in time
    NoSpace  the local drive is full

    After Unavailable or NoSpace, repeat the export when the cause is removed.
    """
    await _Export(vfs, progress, options or TransferOptions()).run(source, os.fsencode(destination))


class _Follow(TypedDict, total=False):
    follow_symlinks: bool


class _Export:
    def __init__(self, vfs: Vfs, progress: TransferProgress, options: TransferOptions) -> None:
        self._vfs = vfs
        self._progress = progress
        self._options = options
        self._caller = Caller(os.geteuid(), os.getegid())
        self._crew: Crew[bytes, Attr] = Crew(progress, options.parallel, self._finish_folder)
        self._linked: dict[int, tuple[asyncio.Future[bytes | None], list[int]]] = {}
        self._folders: list[Folder[bytes, Attr]] = []

    async def run(self, source: bytes, destination: bytes) -> None:
        attr = await self._vfs.getattr(ROOT_INODE)
        names = [name for name in source.split(b"/") if name]
        for depth, name in enumerate(names, 1):
            try:
                attr = await self._vfs.lookup(attr.inode, name)
            except NotFound:
                raise NotFound(
                    f"/{os.fsdecode(b'/'.join(names[:depth]))} does not exist in the pool"
                ) from None
        if not stat.S_ISDIR(attr.mode):
            if await self._crew.blocking(os.path.isdir, destination):
                destination = os.path.join(destination, names[-1])
            self._progress.files_total, self._progress.bytes_total = 1, attr.size
            self._progress.counted = True
            os.makedirs(os.path.dirname(destination) or b".", exist_ok=True)
            await self._crew.run(self._crew.add(None, source, partial(self._one, destination, attr)))
            return
        try:
            os.makedirs(destination, exist_ok=True)
        except OSError as error:
            raise NotADirectory(f"{os.fsdecode(destination)}: {error.strerror}") from None
        self._folders.append(Folder(None, source, destination, attr, False))
        counting = asyncio.create_task(self._count(attr.inode))
        try:
            await self._crew.run(self._list_folders())
        finally:
            counting.cancel()
        self._progress.counted = True

    async def _count(self, inode: int) -> None:
        """Add up the totals while the export runs."""
        waiting = [inode]
        while waiting:
            async for entries in self._entries(waiting.pop()):
                for entry in entries:
                    if self._options.leaves_out(entry.name):
                        continue
                    if stat.S_ISDIR(entry.attr.mode):
                        waiting.append(entry.inode)
                    elif stat.S_ISREG(entry.attr.mode):
                        self._progress.files_total += 1
                        self._progress.bytes_total += entry.attr.size
        self._progress.counted = True

    async def _entries(self, inode: int) -> AsyncIterator[DirectoryPage]:
        """Iterate over batches of the directory's entries with their attributes."""
        handle = await self._vfs.opendir(inode)
        try:
            cursor, more = 0, True
            while more:
                entries, more = await self._vfs.readdir(handle, cursor, ENTRIES_PER_BATCH)
                if not entries:
                    return
                cursor = entries[-1].cursor
                yield entries
        finally:
            await self._vfs.releasedir(handle)

    # -- folders -----------------------------------------------------------------------------------------------------

    async def _list_folders(self) -> None:
        while self._folders:
            folder = self._folders.pop()
            await self._crew.guarded(folder.path, self._list_folder(folder))
            await self._crew.leave(folder)

    async def _list_folder(self, folder: Folder[bytes, Attr]) -> None:
        async for entries in self._entries(folder.found.inode):
            for entry in entries:
                if self._options.leaves_out(entry.name):
                    continue
                path, place, attr = (
                    folder.path + b"/" + entry.name,
                    os.path.join(folder.place, entry.name),
                    entry.attr,
                )
                if not stat.S_ISDIR(attr.mode):
                    await self._crew.add(folder, path, partial(self._entry, place, attr))
                elif await self._crew.guarded(path, self._crew.blocking(_make_folder, place)):
                    self._folders.append(Folder(folder, path, place, attr, False))

    async def _finish_folder(self, folder: Folder[bytes, Attr]) -> None:
        xattrs = await self._xattrs(folder.found)
        await self._crew.blocking(self._finish, folder.place, folder.found, xattrs)

    # -- files, links and special files ----------------------------------------------------------------------------

    async def _entry(self, place: bytes, attr: Attr) -> None:
        if attr.links <= 1:
            await self._one(place, attr)
            return
        if attr.inode not in self._linked:
            first = asyncio.get_running_loop().create_future()
            self._linked[attr.inode] = (first, [attr.links - 1])
            made = None
            try:
                await self._one(place, attr)
                made = place
            finally:
                if not first.done():  # cancelled, together with the tasks that wait for it
                    first.set_result(made)
            return
        first, left = self._linked[attr.inode]
        left[0] -= 1
        if not left[0]:
            del self._linked[attr.inode]
        made = await first
        if made is None:
            raise NotFound("the file that this is another name of could not be exported")
        there = await self._crew.blocking(_link, made, place)
        self._progress.hard_links += 1
        if stat.S_ISREG(attr.mode):
            self._progress.files += 1
            self._progress.bytes += attr.size
            self._progress.skipped_files += there
            self._progress.skipped_bytes += there * attr.size

    async def _one(self, place: bytes, attr: Attr) -> None:
        if stat.S_ISREG(attr.mode):
            return await self._file(place, attr)
        target = await self._vfs.readlink(attr.inode) if stat.S_ISLNK(attr.mode) else None
        await self._crew.blocking(_make_special, place, attr, target)
        await self._crew.blocking(self._finish, place, attr, [])
        if target is None:
            self._progress.special += 1
        else:
            self._progress.symlinks += 1

    async def _file(self, place: bytes, attr: Attr) -> None:
        if await self._crew.blocking(_is_there, place, attr):
            self._progress.files += 1
            self._progress.bytes += attr.size
            self._progress.skipped_files += 1
            self._progress.skipped_bytes += attr.size
            return
        handle = await self._vfs.open(attr.inode, os.O_RDONLY, self._caller)
        opened, writing = -1, None
        try:
            now = await self._vfs.getattr(attr.inode)
            xattrs = await self._xattrs(now)
            # Read a first piece before the local file is truncated: the pool's data may be unreadable.
            buffer = await self._vfs.read(handle, 0, min(PIECE_BYTES, now.size)) if now.size else b""
            opened = await self._crew.blocking(_open_destination, place)
            checksums, at = [], 0
            while at < now.size:
                if at:
                    buffer = await self._vfs.read(handle, at, min(PIECE_BYTES, now.size - at))
                if writing is not None:
                    await writing
                if not len(buffer):
                    raise Refused("was cut while it was read; export it again")
                checksums.append((at, len(buffer), crc32c(buffer)))
                writing = asyncio.ensure_future(self._crew.blocking(_write_sparse, opened, at, buffer))
                at += len(buffer)
                self._progress.bytes += len(buffer)
            if writing is not None:
                await writing
            await self._crew.blocking(self._finish_file, opened, now, checksums, xattrs)
        finally:
            await self._vfs.release(handle)
            if writing is not None:
                await asyncio.gather(writing, return_exceptions=True)  # a thread may still use the descriptor
            if opened >= 0:
                os.close(opened)
        self._progress.files += 1

    def _finish_file(
        self,
        descriptor: int,
        attr: Attr,
        checksums: list[tuple[int, int, int]],
        xattrs: list[tuple[bytes, bytes]],
    ) -> None:
        os.ftruncate(descriptor, attr.size)
        os.fsync(descriptor)
        if self._options.verify:
            os.posix_fadvise(
                descriptor, 0, 0, os.POSIX_FADV_DONTNEED
            )  # so that the drive is read, not the page cache
            for at, length, checksum in checksums:
                if crc32c(os.pread(descriptor, length, at)) != checksum:
                    raise ChecksumMismatch(
                        f"the {length} bytes at {at} are not on the drive as they were written"
                    )
        self._finish(descriptor, attr, xattrs)

    # -- attributes of an entry ------------------------------------------------------------------------------------

    async def _xattrs(self, attr: Attr) -> list[tuple[bytes, bytes]]:
        if not attr.flags & 1:
            return []
        return [
            (name, await self._vfs.getxattr(attr.inode, name))
            for name in await self._vfs.listxattr(attr.inode)
        ]

    def _finish(self, place: bytes | int, attr: Attr, xattrs: list[tuple[bytes, bytes]]) -> None:
        """Set extended attributes, owner, mode and times, in this order. A change of owner clears the
        set-id bits, and each change changes times."""
        link = stat.S_ISLNK(attr.mode)
        follow: _Follow = {} if isinstance(place, int) else {"follow_symlinks": False}
        for name, value in xattrs:
            try:
                os.setxattr(place, name, value, **follow)
            except OSError:
                self._progress.attributes_not_kept += 1
        if self._options.owners:
            os.chown(place, attr.uid, attr.gid, **follow)
        if not link:
            os.chmod(place, stat.S_IMODE(attr.mode))
        os.utime(place, ns=(attr.atime_ns, attr.mtime_ns), **follow)


# -- local steps, run in threads ---------------------------------------------------------------------------------------


def _make_folder(place: bytes) -> bool:
    try:
        os.mkdir(place, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(place).st_mode):
            raise AlreadyExists("exists here and is not a directory") from None
    return True


def _is_there(place: bytes, attr: Attr) -> bool:
    """Whether the local file is already complete. AlreadyExists: the name belongs to an entry of another
    kind."""
    try:
        found = os.lstat(place)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise AlreadyExists("exists here and is not a file")
    return found.st_size == attr.size and found.st_mtime_ns == attr.mtime_ns


def _open_destination(place: bytes) -> int:
    """Open the local file and truncate it; return its descriptor."""
    try:
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, 0)
        return descriptor
    except OSError as error:
        raise from_os_error(error, f"open {os.fsdecode(place)}") from None


def _write_sparse(descriptor: int, at: int, buffer: Buffer) -> None:
    """Write the parts that are not zero. The file is empty there, so the other parts are holes."""
    view = memoryview(buffer)
    try:
        for begin in range(0, len(view), len(_ZEROS)):
            part = view[begin : begin + len(_ZEROS)]
            if part[0] or part[-1] or bytes(part) != _ZEROS[: len(part)]:
                while part:
                    done = os.pwrite(descriptor, part, at + begin)
                    part, begin = part[done:], begin + done
    except OSError as error:
        raise from_os_error(error, "write") from None


def _make_special(place: bytes, attr: Attr, target: bytes | None) -> None:
    try:
        found = os.lstat(place)
    except FileNotFoundError:
        found = None
    if found is not None:
        if stat.S_IFMT(found.st_mode) != stat.S_IFMT(attr.mode):
            raise AlreadyExists("exists here and is something else")
        if target is None or os.readlink(place) == target:
            return
    if target is not None:
        _replace(place, lambda beside: os.symlink(target, beside))
    else:
        os.mknod(place, attr.mode, attr.rdev)


def _link(made: bytes, place: bytes) -> bool:
    """Make `place` a hard link to `made`; return whether it was one already."""
    try:
        if os.path.samestat(os.lstat(made), os.lstat(place)):
            return True
    except FileNotFoundError:
        pass
    _replace(place, lambda beside: os.link(made, beside, follow_symlinks=False))
    return False


def _replace(place: bytes, make: Callable[[bytes], None]) -> None:
    """Create a new entry beside the old one and rename it over that. If creation fails, the old entry
    keeps its name: a file system may refuse links."""
    beside = place[: place.rfind(b"/") + 1] + b".nvpool-export-%x" % SYSTEM_CLOCK.random().getrandbits(64)
    make(beside)
    try:
        os.replace(beside, place)
    except OSError:
        os.unlink(beside)
        raise
