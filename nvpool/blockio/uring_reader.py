"""Asynchronous reads through io_uring: one system call per batch, one wake-up for several completions.

The ring itself is the compiled module `_uring` (Cython over Debian's liburing). `probe` returns None if the
module is missing (no compiler when nvpool was installed) or the kernel forbids io_uring (containers, sysctl
kernel.io_uring_disabled); then the device uses threads. The ring is bounded: reads that do not fit wait here,
in order.

The users of blockio/reader call this module on one event loop. A buffer is kept until its reads complete,
even if the caller was cancelled.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from nvpool.blockio.api import Outcome, WaitingReader
from nvpool.core.compiled_loader import load_compiled
from nvpool.core.errors import Cancelled, DriveFailed, NvpoolError, from_os_error

compiled = load_compiled("nvpool.blockio._uring")

RING_ENTRIES = 512
AGAIN_S = 0.01
"""Delay before reads that the kernel rejected for lack of memory are submitted again."""


class _RingBatch:
    __slots__ = ("left", "outcome", "on_done", "into")

    def __init__(self, count: int, on_done: Callable[[Outcome], None], into: memoryview):
        self.left = count
        self.outcome: Outcome = [None] * count
        self.on_done = on_done
        self.into = into

    def ended(self, at: int, error: NvpoolError | None) -> None:
        self.outcome[at] = error
        self.left -= 1
        if not self.left:
            self.on_done(self.outcome)


def _failure(result: int, offset: int, length: int) -> NvpoolError:
    if result >= 0:
        return DriveFailed(f"{result} of {length} bytes read at {offset}")
    return from_os_error(OSError(-result, os.strerror(-result)), f"reading {length} bytes at {offset}")


class UringReader(WaitingReader):
    name = "io_uring"

    def __init__(self, ring) -> None:
        self.ring = ring
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inside: dict[int, tuple[_RingBatch, int, int, int, int, int]] = {}
        self._outside: deque[tuple[_RingBatch, int, int, int, int, int]] = deque()
        self._token = 0
        self._gathering = False

    @classmethod
    def probe(cls, fd: int) -> UringReader | None:
        """Return a reader that has successfully read a block through the ring, or None if this fails here."""
        if compiled is None:
            return None
        try:
            ring = compiled.Ring(RING_ENTRIES)
        except OSError:
            return None
        try:
            ring.probe(fd)
        except OSError:
            ring.close()
            return None
        return cls(ring)

    def begin(
        self, fd: int, offsets, lengths, positions, into: memoryview, on_done: Callable[[Outcome], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(self.ring.fileno, self._completed)
        batch = _RingBatch(len(offsets), on_done, into)
        waiting = self._outside
        for at, offset in enumerate(offsets):
            waiting.append((batch, at, fd, offset, lengths[at], positions[at]))
        if not self._inside:
            self.submit()
        elif not self._gathering:  # more reads may follow in this loop iteration: submit all with one call
            self._gathering = True
            loop.call_soon(self._gathered)

    def _gathered(self) -> None:
        self._gathering = False
        if self.ring is not None:
            self.submit()

    def submit(self) -> None:
        waiting, inside, ring = self._outside, self._inside, self.ring
        prepared = 0
        while waiting and len(inside) < RING_ENTRIES:
            one = waiting.popleft()
            batch, _, fd, offset, length, position = one
            self._token += 1
            inside[self._token] = one
            ring.prepare_read(fd, offset, length, batch.into, position, self._token)
            prepared += 1
        if prepared:
            self._send()

    def _send(self) -> None:
        if self.ring is not None and self.ring.submit():
            self._loop.call_later(AGAIN_S, self._send)

    def _completed(self) -> None:
        inside = self._inside
        for token, result in self.ring.reap():
            batch, at, _, offset, length, _ = inside.pop(token)
            try:
                batch.ended(at, None if result == length else _failure(result, offset, length))
            except Exception as error:  # bug of the caller: still report the other completed reads
                self._loop.call_exception_handler(
                    {"message": "what was read was not taken", "exception": error}
                )
        if self._outside:
            self.submit()

    async def close(self) -> None:
        """Wait for the reads in the ring, because the kernel writes into their buffers."""
        outside, self._outside = self._outside, deque()
        for batch, at, *_ in outside:
            batch.ended(at, Cancelled("the reader was closed"))
        if self.ring is None:
            return
        while self._inside:
            await asyncio.sleep(0.001)
            self.ring.submit()
            self._completed()
        if self._loop is not None:
            self._loop.remove_reader(self.ring.fileno)
        self.ring.close()
        self.ring = None
