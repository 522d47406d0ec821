"""read_many of the SDK: paths and open files mixed, into one buffer.

Files named by path are opened for the batch and kept open for the ones after it, as long as the client's `attr_s`: so a
loader that reads the same shards again and again asks the metadata service once a second for each, not once a read. Bounded;
what was not used for longest is closed first. Called by the SDK's file systems.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from nvpool.base.errors import InvalidRequest, IsADirectory, NotFound, NvpoolError
from nvpool.client.vfs import Caller, FileHandle, Vfs
from nvpool.sdk.paths import Path, as_os_error, find, locate, names_of
from nvpool.wire.v1.meta_pb2 import Attr

KEPT_OPEN = 1024
"""Files; each costs 2 KiB here and a number at the shard."""
_DIRECTORY = 0o040000


class Batches:
    def __init__(self, vfs: Vfs, caller: Caller):
        self._vfs = vfs
        self._caller = caller
        self._kept: OrderedDict[bytes, tuple[FileHandle, float]] = OrderedDict()
        self._busy = 0

    async def read_many(self, reads: Sequence[tuple[Path | FileHandle, int, int]], into: memoryview) -> list[int]:
        """Each (path or handle, offset, length) into `into`, one behind the other; how many bytes each got: fewer than asked
        for only at the end of its file. One message per target. On an error `into` holds nothing that may be relied on."""
        self._busy += 1
        try:
            handles: dict[Path, FileHandle] = {}
            plan = []
            for what, offset, length in reads:
                if offset < 0 or length < 0:
                    raise InvalidRequest(f"{length} bytes at {offset}")
                if type(what) is not FileHandle:
                    handle = handles.get(what)
                    if handle is None:
                        handle = handles[what] = await self._opened(what)
                    what = handle
                plan.append((what, offset, length))
            return await self._vfs.read_many(plan, into)
        finally:
            self._busy -= 1
            if len(self._kept) > KEPT_OPEN and not self._busy:
                await self._trim(KEPT_OPEN)

    async def read_whole(self, paths: Sequence[Path]) -> list[memoryview]:
        """All bytes of each file. OSError for the first path that leads to none."""
        names = [names_of(path) for path in paths]
        directories = {b"/".join(parts[:-1]): 0 for parts in names}
        await asyncio.gather(*[self._find_directory(path, directories) for path in directories])
        plain = [number for number, parts in enumerate(names)
                 if parts and parts[-1] != b".." and directories[b"/".join(parts[:-1])]]
        handles: list[FileHandle | None] = [None] * len(paths)
        try:
            with as_os_error():
                opened = await self._vfs.open_many([(directories[b"/".join(names[number][:-1])], names[number][-1])
                                                    for number in plain], self._caller)
            found = dict(zip(plain, opened, strict=True))
            handles = [one if isinstance(one := found.get(number), FileHandle) else None for number in range(len(paths))]
            for number, path in enumerate(paths):
                if handles[number] is None:
                    with as_os_error(path):
                        handles[number] = await self._open_alone(path, found.get(number))
            with as_os_error():
                return await self._vfs.read_whole(handles)
        finally:
            for handle in handles:
                if handle is not None:
                    await self._vfs.release(handle)

    async def _find_directory(self, path: bytes, directories: dict[bytes, int]) -> None:
        try:
            attr = await find(self._vfs, path)
        except NvpoolError:
            return  # told with the path itself
        if stat.S_ISDIR(attr.mode):
            directories[path] = attr.inode

    async def _open_alone(self, path: Path, known: Attr | NvpoolError | None) -> FileHandle:
        """What many at once could not: symbolic links, paths that lead nowhere."""
        if isinstance(known, NvpoolError):
            raise known
        attr = (await locate(self._vfs, path, to_open=True)).attr
        if attr is None:
            raise NotFound
        if stat.S_ISDIR(attr.mode):
            raise IsADirectory
        if not stat.S_ISREG(attr.mode):
            raise InvalidRequest("only regular files can be read")
        return await self._vfs.open(attr.inode, os.O_RDONLY, self._caller)

    async def _opened(self, path: Path) -> FileHandle:
        key = os.fsencode(path)
        now_s = self._vfs.clock.boottime_s()
        kept = self._kept.get(key)
        if kept is not None and kept[1] > now_s:
            self._kept.move_to_end(key)
            return kept[0]
        attr = await find(self._vfs, path)
        if attr.mode & 0o170000 == _DIRECTORY:
            raise IsADirectory
        handle = await self._vfs.open(attr.inode, os.O_RDONLY, self._caller)
        before = self._kept.pop(key, None)
        self._kept[key] = handle, now_s + self._vfs.options.attr_s
        if before is not None:
            await self._vfs.release(before[0])
        return handle

    async def _trim(self, count: int) -> None:
        while len(self._kept) > count:
            await self._vfs.release(self._kept.popitem(last=False)[1][0])

    async def forget(self, paths: Iterable[Path] | None = None) -> None:
        """Close what is kept open, all of it or these: their names mean something else now."""
        keys = list(self._kept) if paths is None else [os.fsencode(path) for path in paths]
        for key in keys:
            kept = self._kept.pop(key, None)
            if kept is not None:
                await self._vfs.release(kept[0])


def contiguous(into) -> memoryview:
    """`into` as writable bytes. TypeError for a buffer that is read-only or has gaps."""
    view = memoryview(into)
    if view.readonly:
        raise TypeError("the buffer to read into is read-only")
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
