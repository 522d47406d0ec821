"""Reads that wait, through io_uring: a batch is one call in, its completions one wake-up out.

The ring itself is the compiled module `_uring` (Cython over Debian's liburing); where it is not there (no compiler when
nvpool was installed) or the kernel forbids io_uring (containers, sysctl kernel.io_uring_disabled), `probe` says None and
the device uses threads. The ring is bounded: what does not fit waits here, in order.

Called by drive/reading's users on one event loop. A buffer is kept until its reads are done, also when the asker has gone.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

from nvpool.base.errors import DriveFailed, NvpoolError, from_os_error

try:
    from nvpool.drive import _uring
except ImportError:  # not compiled
    _uring = None

RING_ENTRIES = 512


class _Batch:
    __slots__ = ("left", "outcome", "done", "into")

    def __init__(self, count: int, done: asyncio.Future, into: memoryview):
        self.left = count
        self.outcome: list[NvpoolError | None] = [None] * count
        self.done = done
        self.into = into


def _failure(result: int, offset: int, length: int) -> NvpoolError:
    if result >= 0:
        return DriveFailed(f"{result} of {length} bytes read at {offset}")
    return from_os_error(OSError(-result, os.strerror(-result)), f"reading {length} bytes at {offset}")


class UringReader:
    name = "io_uring"

    def __init__(self, ring) -> None:
        self._ring = ring
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inside: dict[int, tuple[_Batch, int, int, int, int, int]] = {}
        self._outside: deque[tuple[_Batch, int, int, int, int, int]] = deque()
        self._token = 0
        self._gathering = False

    @classmethod
    def probe(cls, fd: int) -> UringReader | None:
        """A reader that has just read a block through the ring, or None where that does not work here."""
        if _uring is None:
            return None
        try:
            ring = _uring.Ring(RING_ENTRIES)
        except OSError:
            return None
        try:
            ring.probe(fd)
        except OSError:
            ring.close()
            return None
        return cls(ring)

    async def read(self, fd: int, offsets, lengths, positions, into: memoryview) -> list[NvpoolError | None]:
        return await asyncio.shield(self.begin(fd, offsets, lengths, positions, into))

    def begin(self, fd: int, offsets, lengths, positions, into: memoryview) -> asyncio.Future[list[NvpoolError | None]]:
        """As `read`, without a task. The future must not be cancelled: the kernel writes into the buffer until it is done."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(self._ring.eventfd, self._completed)
        batch = _Batch(len(offsets), loop.create_future(), into)
        waiting = self._outside
        for at, offset in enumerate(offsets):
            waiting.append((batch, at, fd, offset, lengths[at], positions[at]))
        if not self._inside:
            self._submit()
        elif not self._gathering:  # with others under way more come in this turn of the loop: one call for all of them
            self._gathering = True
            loop.call_soon(self._gathered)
        return batch.done

    def _gathered(self) -> None:
        self._gathering = False
        if self._ring is not None:
            self._submit()

    def _submit(self) -> None:
        waiting, inside, ring = self._outside, self._inside, self._ring
        prepared = 0
        while waiting and len(inside) < RING_ENTRIES:
            one = waiting.popleft()
            batch, _, fd, offset, length, position = one
            self._token += 1
            inside[self._token] = one
            ring.prepare_read(fd, offset, length, batch.into, position, self._token)
            prepared += 1
        if prepared:
            ring.submit()

    def _completed(self) -> None:
        inside = self._inside
        for token, result in self._ring.reap():
            batch, at, _, offset, length, _ = inside.pop(token)
            if result != length:
                batch.outcome[at] = _failure(result, offset, length)
            batch.left -= 1
            if not batch.left and not batch.done.done():
                batch.done.set_result(batch.outcome)
        if self._outside:
            self._submit()

    async def close(self) -> None:
        """Wait for what is in the ring: the kernel writes into those buffers."""
        for batch, *_ in self._outside:
            batch.done.cancel()  # whose reads will not be begun any more
        self._outside.clear()
        if self._ring is None:
            return
        while self._inside:
            await asyncio.sleep(0.001)
            self._completed()
        if self._loop is not None:
            self._loop.remove_reader(self._ring.eventfd)
        self._ring.close()
        self._ring = None
