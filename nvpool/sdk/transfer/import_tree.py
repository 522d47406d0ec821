"""Import of a local tree or file into a pool."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import stat
import threading
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from nvpool.client.state.metadata_cache import ACL_FLAG
from nvpool.client.state.vfs_types import Caller
from nvpool.core.checksum import crc32c
from nvpool.core.errors import (
    AlreadyExists,
    ChecksumMismatch,
    IsADirectory,
    NotADirectory,
    NotFound,
    NvpoolError,
    Refused,
    Unavailable,
)
from nvpool.core.ids import ROOT_INODE
from nvpool.core.posix import acl
from nvpool.core.units import clamp_time_ns
from nvpool.sdk.paths import write_all
from nvpool.sdk.transfer.progress import (
    PIECE_BYTES,
    TransferOptions,
    TransferProgress,
    count_local,
    xattrs_of,
)
from nvpool.sdk.transfer.workers import Crew, Folder

if TYPE_CHECKING:
    from nvpool.client.state.vfs_types import FileHandle
    from nvpool.client.vfs.filesystem import Vfs
    from nvpool.rpc.messages.meta_messages import Attr

ENTRIES_PER_BATCH = 1000


async def import_tree(
    vfs: Vfs,
    source: str | bytes | os.PathLike[str],
    destination: bytes,
    *,
    progress: TransferProgress,
    options: TransferOptions | None = None,
) -> None:
    """Copy the local `source` to `destination`, a path in the pool; missing parents are created.

    The contents of a folder become the contents of `destination`. A file becomes the file `destination`, or
    if that is a folder a file of the same name in it. On return everything is synced, except the failures
    that `progress` lists. If this raises, the entries that `progress` counts are in the pool, and a repeated import
    continues after them.

    NotFound  the source does not exist
    NotADirectory, IsADirectory  source and destination are of different kinds
    Unavailable, NoSpace, QuotaExceeded  the pool did not answer in time, or is full: repeat the import when
        the cause is removed
    """
    await _Import(vfs, progress, options or TransferOptions()).run(os.fsencode(source), destination)


class _Owner(TypedDict, total=False):
    uid: int
    gid: int


class _Import:
    def __init__(self, vfs: Vfs, progress: TransferProgress, options: TransferOptions) -> None:
        self._vfs = vfs
        self._progress = progress
        self._options = options
        self._caller = Caller(os.geteuid(), os.getegid())
        self._crew: Crew[int, os.stat_result] = Crew(progress, options.parallel, self._finish_folder)
        self._linked: dict[tuple[int, int], tuple[asyncio.Future[int | None], list[int]]] = {}
        self._folders: list[Folder[int, os.stat_result]] = []

    async def run(self, source: bytes, destination: bytes) -> None:
        try:
            found = os.stat(source)
        except OSError as error:
            raise NotFound(f"{os.fsdecode(source)}: {error.strerror}") from None
        names = [name for name in destination.split(b"/") if name]
        if not stat.S_ISDIR(found.st_mode):
            self._progress.files_total, self._progress.bytes_total = 1, found.st_size
            self._progress.counted = True
            parent, name = await self._place_of_file(names, os.path.basename(source))
            await self._crew.run(
                self._crew.add(None, source, partial(self._file, source, name, parent, found, False))
            )
            await self._vfs.fsyncdir(parent)
            return
        inode: int = ROOT_INODE
        fresh = False
        for name in names:
            inode, fresh = await self._folder(inode, name)
        root = Folder(None, source, inode, found, fresh)
        self._folders.append(root)
        counting = asyncio.create_task(asyncio.to_thread(count_local, source, self._progress, self._options))
        await self._crew.run(self._list_folders())
        await counting
        await self._vfs.fsyncdir(inode)

    async def _place_of_file(self, names: list[bytes], own_name: bytes) -> tuple[int, bytes]:
        inode: int = ROOT_INODE
        for name in names[:-1]:
            inode, _ = await self._folder(inode, name)
        if not names:
            return inode, own_name
        there = await self._look_up(inode, names[-1])
        if there is not None and stat.S_ISDIR(there.mode):
            return there.inode, own_name
        return inode, names[-1]

    # -- folders -----------------------------------------------------------------------------------------------------

    async def _folder(self, parent: int, name: bytes) -> tuple[int, bool]:
        """Create the folder if needed; return its inode and whether this call created it."""
        try:
            return (await self._vfs.mkdir(parent, name, 0o700, self._caller)).inode, True
        except AlreadyExists:
            attr = await self._vfs.lookup(parent, name)
            if not stat.S_ISDIR(attr.mode):
                raise NotADirectory(
                    f"{os.fsdecode(name)} exists in the pool and is not a directory"
                ) from None
            return attr.inode, False

    async def _list_folders(self) -> None:
        while self._folders:
            folder = self._folders.pop()
            await self._crew.guarded(folder.path, self._list_folder(folder))
            await self._crew.leave(folder)

    async def _list_folder(self, folder: Folder[int, os.stat_result]) -> None:
        entries = await self._crew.blocking(DirectoryEntries, folder.path)
        try:
            while batch := await self._crew.blocking(entries.read):
                for name, found in batch:
                    path = os.path.join(folder.path, name)
                    if self._options.leaves_out(name):
                        continue
                    if isinstance(found, OSError):
                        self._progress.fail(path, found)
                    elif stat.S_ISDIR(found.st_mode):
                        made = await self._crew.guarded(path, self._folder(folder.place, name))
                        if made is not None:
                            self._folders.append(Folder(folder, path, made[0], found, made[1]))
                    else:
                        await self._crew.add(folder, path, partial(self._entry, path, name, folder, found))
        finally:
            self._crew.later(entries.close)  # after a cancellation a thread may still be reading them

    async def _finish_folder(self, folder: Folder[int, os.stat_result]) -> None:
        inherits = folder.fresh and bool((await self._vfs.getattr(folder.place)).flags & ACL_FLAG)
        await self._attributes(folder.place, await self._crew.blocking(xattrs_of, folder.path), inherits)
        await self._finish(folder.place, folder.found)

    # -- files, links and special files ----------------------------------------------------------------------------

    async def _entry(
        self, path: bytes, name: bytes, folder: Folder[int, os.stat_result], found: os.stat_result
    ) -> None:
        if found.st_nlink > 1:
            return await self._hard_linked(path, name, folder, found)
        await self._one(path, name, folder, found)

    async def _one(
        self, path: bytes, name: bytes, folder: Folder[int, os.stat_result], found: os.stat_result
    ) -> int | None:
        if stat.S_ISREG(found.st_mode):
            return await self._file(path, name, folder.place, found, folder.fresh)
        if stat.S_ISLNK(found.st_mode):
            return await self._symlink(path, name, folder.place, found)
        there = None if folder.fresh else await self._look_up(folder.place, name)
        if there is None:
            there = await self._vfs.mknod(folder.place, name, found.st_mode, found.st_rdev, self._caller)
        elif stat.S_IFMT(there.mode) != stat.S_IFMT(found.st_mode) or there.rdev != found.st_rdev:
            raise AlreadyExists("exists in the pool and is something else")
        await self._finish(there.inode, found)
        self._progress.special += 1
        return there.inode

    async def _hard_linked(
        self, path: bytes, name: bytes, folder: Folder[int, os.stat_result], found: os.stat_result
    ) -> None:
        """Import one name of a file with several hard links. The worker with the first name copies the
        contents; the others wait for it. That worker is already running, so the wait ends."""
        key = (found.st_dev, found.st_ino)
        if key not in self._linked:
            first = asyncio.get_running_loop().create_future()
            self._linked[key] = (first, [found.st_nlink - 1])
            inode = None
            try:
                inode = await self._one(path, name, folder, found)
            finally:
                if not first.done():  # cancelled, together with the tasks that wait for it
                    first.set_result(inode)
            return
        first, left = self._linked[key]
        left[0] -= 1
        if not left[0]:
            del self._linked[key]
        inode = await first
        if inode is None:
            raise NotFound("the file that this is another name of could not be imported")
        there = await self._look_up(folder.place, name)
        if there is None or there.inode != inode:
            if there is not None:
                await self._vfs.unlink(folder.place, name, self._caller)
            await self._vfs.link(inode, folder.place, name, self._caller)
        self._progress.hard_links += 1
        if stat.S_ISREG(found.st_mode):
            self._progress.files += 1
            self._progress.bytes += found.st_size
            if there is not None and there.inode == inode:
                self._progress.skipped_files += 1
                self._progress.skipped_bytes += found.st_size

    async def _symlink(self, path: bytes, name: bytes, parent: int, found: os.stat_result) -> int:
        target = os.readlink(path)
        there = await self._look_up(parent, name)
        if there is not None and (
            not stat.S_ISLNK(there.mode) or await self._vfs.readlink(there.inode) != target
        ):
            if stat.S_ISDIR(there.mode):
                raise IsADirectory("exists in the pool and is a directory")
            await self._vfs.unlink(parent, name, self._caller)
            there = None
        if there is None:
            there = await self._vfs.symlink(parent, name, target, self._caller)
        await self._finish(there.inode, found, mode=False)
        self._progress.symlinks += 1
        return there.inode

    async def _file(self, path: bytes, name: bytes, parent: int, found: os.stat_result, fresh: bool) -> int:
        there = None if fresh else await self._look_up(parent, name)
        if there is not None:
            if not stat.S_ISREG(there.mode):
                raise AlreadyExists("exists in the pool and is not a file")
            if (
                there.size == found.st_size
                and there.mtime_ns == clamp_time_ns(found.st_mtime_ns)
                and not self._options.compare
            ):
                self._progress.files += 1
                self._progress.bytes += found.st_size
                self._progress.skipped_files += 1
                self._progress.skipped_bytes += found.st_size
                return there.inode
        descriptor, now, piece, xattrs = await self._crew.blocking(_open_source, path)
        fresh = there is None
        try:
            if there is None:
                there, handle = await self._vfs.create(
                    parent, name, 0o600, os.O_RDWR | os.O_EXCL, self._caller
                )
            else:
                handle = await self._vfs.open(there.inode, os.O_RDWR, self._caller)
            try:
                await self._contents(descriptor, now, piece, handle, there)
                await self._attributes(there.inode, xattrs, fresh and bool(there.flags & ACL_FLAG))
                await self._vfs.flush(handle)
            finally:
                await self._vfs.release(handle)
            await self._finish(there.inode, now)
        finally:
            os.close(descriptor)
        self._progress.files += 1
        return there.inode

    async def _contents(
        self,
        descriptor: int,
        now: os.stat_result,
        piece: tuple[int, bytes] | None,
        handle: FileHandle,
        attr: Attr,
    ) -> None:
        """Copy and sync the bytes, then compare the pool's data with the source's."""
        vfs, size, end = self._vfs, attr.size, 0
        offsets, lengths, checksums = array.array("Q"), array.array("L"), array.array("L")
        while piece is not None:
            at, buffer = piece
            behind = at + len(buffer)
            if at > end and size > end:  # a hole in the source, data in the pool: remove that data
                await vfs.setattr(attr.inode, size=end, caller=self._caller, handle=handle)
                size = end
            ahead = None
            if behind < now.st_size:
                ahead = asyncio.create_task(self._crew.blocking(_read_piece, descriptor, behind))
            try:
                if behind > size or bytes(await vfs.read(handle, at, len(buffer))) != buffer:
                    await write_all(vfs, handle, at, buffer)
                    offsets.append(at)
                    lengths.append(len(buffer))
                    checksums.append(crc32c(buffer))
            finally:
                piece = await ahead if ahead is not None else None
            self._progress.bytes += behind - end
            end, size = behind, max(size, behind)
        self._progress.bytes += max(0, now.st_size - end)
        after = os.fstat(descriptor)
        if (after.st_size, after.st_mtime_ns) != (now.st_size, now.st_mtime_ns) or end > now.st_size:
            raise Refused("changed while it was read; import it again")
        if size != now.st_size:
            await vfs.setattr(attr.inode, size=now.st_size, caller=self._caller, handle=handle)
        await vfs.fsync(handle, False)
        if self._options.verify:
            for at, length, checksum in zip(offsets, lengths, checksums, strict=True):
                if crc32c(await vfs.read(handle, at, length)) != checksum:
                    raise ChecksumMismatch(
                        f"the {length} bytes at {at} are not in the pool as they were written"
                    )

    # -- attributes of an entry ------------------------------------------------------------------------------------

    async def _attributes(self, inode: int, xattrs: list[tuple[bytes, bytes]], inherits: bool) -> None:
        """Set the extended attributes of the source. An entry that this import created may have inherited
        access control lists that the source does not have; they are removed."""
        if inherits:
            inherited = acl.NAMES.difference(name for name, _ in xattrs).intersection(
                await self._vfs.listxattr(inode)
            )
            for name in inherited:
                await self._vfs.removexattr(inode, name, self._caller)
        for name, value in xattrs:
            try:
                await self._vfs.setxattr(inode, name, value, 0, self._caller)
            except Unavailable:
                raise
            except NvpoolError:
                self._progress.attributes_not_kept += 1

    async def _finish(self, inode: int, found: os.stat_result, *, mode: bool = True) -> None:
        """Set owner, mode and times in one change, as the last step."""
        owner: _Owner = {"uid": found.st_uid, "gid": found.st_gid} if self._options.owners else {}
        await self._vfs.setattr(
            inode,
            mode=stat.S_IMODE(found.st_mode) if mode else None,
            atime_ns=found.st_atime_ns,
            mtime_ns=found.st_mtime_ns,
            caller=self._caller,
            **owner,
        )

    async def _look_up(self, parent: int, name: bytes) -> Attr | None:
        try:
            return await self._vfs.lookup(parent, name)
        except NotFound:
            return None


class DirectoryEntries:
    """Entries of a local folder. `read` and `close` may run in different threads and are serialised here,
    because os.scandir does not support both at the same time."""

    def __init__(self, path: bytes) -> None:
        self._lock = threading.Lock()
        self.entries = os.scandir(path)

    def read(self) -> list[tuple[bytes, os.stat_result | OSError]]:
        """The next entries; an empty list at the end, and after `close`."""
        found: list[tuple[bytes, os.stat_result | OSError]] = []
        with self._lock:
            for entry in self.entries:
                try:
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
                except OSError as error:
                    found.append((entry.name, error))
                if len(found) == ENTRIES_PER_BATCH:
                    break
        return found

    def close(self) -> None:
        """Close the folder once no thread reads it."""
        with self._lock:
            self.entries.close()


def _open_source(
    path: bytes,
) -> tuple[int, os.stat_result, tuple[int, bytes] | None, list[tuple[bytes, bytes]]]:
    """Open a source file; return its descriptor, stat, first piece and extended attributes. For a small
    file that is all, in one call of a thread."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Refused("is no longer a file")
        return descriptor, found, _read_piece(descriptor, 0), xattrs_of(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _read_piece(descriptor: int, at: int) -> tuple[int, bytes] | None:
    """Read the next data at or after `at`, without holes. The result is (offset, up to PIECE_BYTES bytes
    that do not cross a multiple of PIECE_BYTES), or None at the end of the file."""
    try:
        begin = os.lseek(descriptor, at, os.SEEK_DATA)
        hole = os.lseek(descriptor, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno != errno.EINVAL:
            raise
        begin, hole = at, at + PIECE_BYTES  # the file system does not report holes
    length = min(hole, (begin // PIECE_BYTES + 1) * PIECE_BYTES) - begin
    buffer = os.pread(descriptor, length, begin)
    return (begin, buffer) if buffer else None
