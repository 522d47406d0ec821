"""What a process that only reads knows of a mount's open files: which of them it may read, and its own handles of these.

The serving process publishes an open file (fuse/ops/handles) before the kernel hears of it, and takes it back before anybody
can have changed the file: so what is opened here after that is what the kernel was told, for as long as it is published. Called
by `fuse/kernel/worker`; whatever can not be read here is read by the serving process.
"""

from __future__ import annotations

import asyncio
import os

from nvpool.client.state.types import Caller, FileHandle
from nvpool.fuse.ops.kernel_cache import FuseOptions
from nvpool.fuse.ops.page_cache_bypass import Bypassing
from nvpool.shm.mount_state import KeptHandles

OPEN_MAX = 4096
"""Files that are open here at once. What comes above it the serving process reads."""
OPEN_S = 0.25
"""For the metadata service's answer. The serving process reads on without one, for as long as its grant lasts."""
LOOK_S = 0.25
"""How often it is looked which of them were closed: so much later the space of a file without a name is free."""


class NotHere(Exception):
    """The serving process has to be asked after all."""


class ReaderOps:
    def __init__(self, vfs, kept: KeptHandles) -> None:
        self._vfs = vfs
        self.kept = kept
        self.options = FuseOptions()
        self.held: dict = {}
        self.pages = Bypassing(asyncio.ensure_future)  # expected by the engine; unused, because nothing is written here
        self._files: dict[int, FileHandle] = {}
        self._opening: dict[int, asyncio.Task] = {}
        self._late: set[int] = set()  # of these, those that take long

    def may_read(self, handle: int, end: int) -> bool:
        """Whether bytes up to `end` may be read here now. What lies behind the end of the file may have grown: others know."""
        if not self.kept.published(handle):
            return False
        file = self._files.get(handle)
        if file is None:
            return handle not in self._late and len(self._files) + len(self._opening) < OPEN_MAX
        return end <= file.file.size and not file.file.lost

    def burst(self) -> None:
        self._vfs.hold_reads()

    def burst_over(self) -> None:
        self._vfs.send_reads()

    def read_now(self, handle: int, offset: int, size: int):
        file = self._files.get(handle)
        return self._vfs.read_now(file, offset, size) if file is not None else None

    def begin_read(self, handle: int, offset: int, size: int):
        file = self._files.get(handle)
        return self._vfs.begin_read(file, offset, size) if file is not None else None

    async def read(self, handle: int, offset: int, size: int):
        """Or NotHere."""
        file = self._files.get(handle) or await self._open(handle)
        if offset + size > file.file.size:
            raise NotHere
        return await self._vfs.read(file, offset, size)

    async def _open(self, handle: int) -> FileHandle:
        opening = self._opening.get(handle)
        if opening is None:
            opening = self._opening[handle] = asyncio.ensure_future(self._open_once(handle))
            opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waits for it meets it
        await asyncio.wait((opening,), timeout=OPEN_S)
        if not opening.done():
            self._late.add(handle)
            raise NotHere
        return opening.result()

    async def _open_once(self, handle: int) -> FileHandle:
        try:
            inode = self.kept.published(handle)
            if not inode:
                raise NotHere
            self._files[handle] = file = await self._vfs.open(inode, os.O_RDONLY, Caller(0, 0))
            return file
        finally:
            del self._opening[handle]
            self._late.discard(handle)

    async def close_old(self) -> None:
        """Release what was closed or taken back."""
        for handle in [handle for handle in self._files if not self.kept.published(handle)]:
            await self._vfs.release(self._files.pop(handle))
