"""Operations of a read worker: which of a mount's open files it may read, with handles of its own.

The serving process publishes an open file (fuse/ops/handles) before the kernel gets the reply to the open,
and withdraws it before anybody can have changed the file. So a file that a worker opens later has the state
that the kernel was given, for as long as it is published. Used by `fuse/kernel/read_worker`; the serving process
reads everything that a worker cannot read.
"""

from __future__ import annotations

import asyncio
import os

from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.fuse.ops.kernel_cache.notices import KernelNotices
from nvpool.fuse.ops.kernel_cache.options import FuseOptions
from nvpool.shm.mount_state import KeptHandles

OPEN_MAX = 4096
"""Files open in this worker at a time. The serving process reads all others."""
OPEN_S = 0.25
"""Longest wait for the metadata service.

Without its answer the serving process continues to read, for as long as its grant lasts.
"""
LOOK_S = 0.25
"""Interval of the check for closed files. By so much the space of a file without a name is freed later."""


class NotHere(Exception):
    """The serving process has to answer this request."""


class ReadWorkerOps:
    def __init__(self, vfs, kept: KeptHandles) -> None:
        self._vfs = vfs
        self.kept = kept
        self.options = FuseOptions()
        self.held: dict = {}
        # required by the engine; unused, because a worker does not write
        self.notices = KernelNotices()
        self._files: dict[int, FileHandle] = {}
        self._opening: dict[int, asyncio.Task] = {}
        self._late: set[int] = set()  # of `_opening`, those that take longer than OPEN_S

    def may_read(self, handle: int, end: int) -> bool:
        """Whether bytes up to `end` may be read here now.

        Not behind the known end of the file: it may have grown, and only the serving process knows.
        """
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
        """Read `size` bytes. Raises NotHere if the serving process must do it."""
        file = self._files.get(handle) or await self._open(handle)
        if offset + size > file.file.size:
            raise NotHere
        return await self._vfs.read(file, offset, size)

    async def _open(self, handle: int) -> FileHandle:
        opening = self._opening.get(handle)
        if opening is None:
            opening = self._opening[handle] = asyncio.ensure_future(self._open_once(handle))
            # a caller that waits gets the error
            opening.add_done_callback(lambda done: done.cancelled() or done.exception())
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
        """Release files that were closed or withdrawn."""
        for handle in [handle for handle in self._files if not self.kept.published(handle)]:
            await self._vfs.release(self._files.pop(handle))
