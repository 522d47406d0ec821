"""read_many of the SDK: paths and open files mixed, into one buffer.

Files named by path are opened for the batch and kept open for the ones after it, as long as the client's `attr_s`: so a
loader that reads the same shards again and again asks the metadata service once a second, for all of them together, and not
once a read. Bounded; what was not used for longest is closed first. Called by the SDK's file systems.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from nvpool.base.errors import InvalidRequest, IsADirectory, NvpoolError
from nvpool.client.vfs import Caller, FileHandle, Vfs
from nvpool.sdk.paths import Path, as_os_error, names_of
from nvpool.sdk.ways import Way, read_links, walk_together

KEPT_OPEN = 1024
"""Files; each costs 2 KiB here and a number at the shard."""


class _Wanted:
    """A file that is to be read: the way to its directory, which it may share with others, and its name there."""

    __slots__ = ("way", "name", "link", "handle", "error")

    def __init__(self, names: list[bytes], ways: dict[bytes, Way]) -> None:
        self.handle: FileHandle | None = None
        self.error: NvpoolError | None = None
        self.link = 0
        self.name = names.pop() if names and names[-1] != b".." else b""
        directory = b"/".join(names)
        self.way = ways.get(directory) or ways.setdefault(directory, Way(names))

    def follow(self, target: bytes | NvpoolError) -> None:
        """The name stands for a symbolic link."""
        self.way = self.way.branch()
        self.way.follow(target)
        self.name = self.way.take_last()


class Batches:
    def __init__(self, vfs: Vfs, caller: Caller):
        self._vfs = vfs
        self._caller = caller
        self._kept: OrderedDict[bytes, tuple[FileHandle, float]] = OrderedDict()
        self._running: dict[int, None] = {}  # numbers of the batches that are being read, rising
        self._begun = 0
        self._left: deque[tuple[int, FileHandle]] = deque()
        """Not kept any more, with the last batch that may be reading by it."""

    async def read_many(self, reads: Sequence[tuple[Path | FileHandle, int, int]], into: memoryview) -> list[int]:
        """Each (path or handle, offset, length) into `into`, one behind the other; how many bytes each got: fewer than asked
        for only at the end of its file. One message per target. On an error `into` holds nothing that may be relied on."""
        paths: dict[Path, None] = {}
        for what, offset, length in reads:
            if offset < 0 or length < 0:
                raise InvalidRequest(f"{length} bytes at {offset}")
            if type(what) is not FileHandle:
                paths[what] = None
        self._begun += 1
        me = self._begun
        self._running[me] = None
        try:
            plan = reads
            if paths:
                handles = await self._opened(paths)
                plan = [(what if type(what) is FileHandle else handles[what], offset, length) for what, offset, length in reads]
            return await self._vfs.read_many(plan, into)
        finally:
            del self._running[me]
            await self._trim(KEPT_OPEN)

    async def read_whole(self, paths: Sequence[Path]) -> list[memoryview]:
        """All bytes of each file. OSError for the first path that leads to none."""
        ways: dict[bytes, Way] = {}
        wanted = [_Wanted(names_of(path), ways) for path in paths]
        try:
            with as_os_error():
                await self._open_all(wanted)
            for one, path in zip(wanted, paths, strict=True):
                if one.error is not None:
                    with as_os_error(path):
                        raise one.error
            with as_os_error():
                return await self._vfs.read_whole([one.handle for one in wanted])
        finally:
            for one in wanted:
                if one.handle is not None:
                    await self._vfs.release(one.handle)

    async def _open_all(self, wanted: list[_Wanted]) -> None:
        """Each has a handle after this, or an error. Symbolic links at the ends are followed together, too."""
        while wanted:
            await walk_together(self._vfs, list({id(one.way): one.way for one in wanted}.values()))
            plain = []
            for one in wanted:
                one.error = one.way.error or (None if one.name else IsADirectory())
                if one.error is None:
                    plain.append(one)
            opened = await self._vfs.open_many([(one.way.inode, one.name) for one in plain], self._caller)
            wanted = []
            for one, found in zip(plain, opened, strict=True):
                if type(found) is FileHandle:
                    one.handle = found
                elif isinstance(found, NvpoolError):
                    one.error = found
                elif stat.S_ISLNK(found.mode):
                    one.link = found.inode
                    wanted.append(one)
                else:
                    one.error = IsADirectory() if stat.S_ISDIR(found.mode) else InvalidRequest("only regular files can be read")
            targets = await read_links(self._vfs, {one.link for one in wanted})
            for one in wanted:
                one.follow(targets[one.link])

    async def _opened(self, paths: Iterable[Path]) -> dict[Path, FileHandle]:
        """Those that are not open, or were for long enough, are opened together. OSError for one that leads to no file."""
        found: dict[Path, FileHandle] = {}
        ways: dict[bytes, Way] = {}
        wanted: dict[Path, _Wanted] = {}
        now_s = self._vfs.clock.boottime_s()
        for path in paths:
            key = os.fsencode(path)
            kept = self._kept.get(key)
            if kept is not None and kept[1] > now_s:
                self._kept.move_to_end(key)
                found[path] = kept[0]
            else:
                wanted[path] = _Wanted(names_of(path), ways)
        if not wanted:
            return found
        try:
            await self._open_all(list(wanted.values()))
        finally:
            for path, one in wanted.items():
                if one.handle is not None:
                    found[path] = one.handle
                    self._keep(os.fsencode(path), one.handle, now_s + self._vfs.options.attr_s)
        for path, one in wanted.items():
            if one.error is not None:
                with as_os_error(path):
                    raise one.error
        return found

    def _keep(self, key: bytes, handle: FileHandle, until_s: float) -> None:
        self._leave(key)
        self._kept[key] = handle, until_s

    def _leave(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._left.append((self._begun, kept[0]))

    async def _trim(self, count: int) -> None:
        """Keep so many, and close those that are not kept and that nobody can be reading by."""
        while len(self._kept) > count:
            self._leave(next(iter(self._kept)))
        while self._left and self._left[0][0] < next(iter(self._running), self._begun + 1):
            await self._vfs.release(self._left.popleft()[1])

    async def forget(self, paths: Iterable[Path] | None = None) -> None:
        """Keep none of them, or of these: their names mean something else now. What no batch is reading by is closed."""
        if paths is None:
            await self._trim(0)
            return
        for path in paths:
            self._leave(os.fsencode(path))
        await self._trim(KEPT_OPEN)


def contiguous(into) -> memoryview:
    """`into` as writable bytes. TypeError for a buffer that is read-only or has gaps."""
    view = memoryview(into)
    if view.readonly:
        raise TypeError("the buffer to read into is read-only")
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
