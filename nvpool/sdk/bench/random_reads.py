"""Closed-loop random reads of local files and of a pool: rate and latencies.

`nvpool bench` and the quickstart use this module to compare the two; the local files may be on a mount. A
loop requests the next piece when it has received the one before, so a latency is the time that a program
would have waited. The loops are threads of one Python process: up to some 100,000 reads a second the storage
is measured, above that Python (bench/ uses fio).
"""

from __future__ import annotations

import array
import asyncio
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import InvalidRequest, from_os_error
from nvpool.core.units import BLOCK_BYTES

if TYPE_CHECKING:
    from nvpool.client.state.vfs_types import FileHandle
    from nvpool.client.vfs.filesystem import Vfs

_STEP_S = 1e-7
_STEPS = 2_000_000
"""Latencies are counted in steps of 0.1 µs, up to 0.2 s. Longer ones count as 0.2 s."""


class Measured(NamedTuple):
    reads: int
    bytes: int
    seconds: float
    p50_us: float
    p99_us: float

    @property
    def rate(self) -> float:
        return self.reads / self.seconds if self.seconds else 0.0

    @property
    def bytes_rate(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


class Latencies:
    """Latency histogram. Adding a latency always costs the same."""

    def __init__(self) -> None:
        self.counts = array.array("L", bytes(array.array("L").itemsize * (_STEPS + 1)))
        self.count = 0

    def add(self, seconds: float) -> None:
        self.counts[min(int(seconds / _STEP_S), _STEPS)] += 1
        self.count += 1

    def merge(self, other: Latencies) -> None:
        for step, count in enumerate(other.counts):
            if count:
                self.counts[step] += count
        self.count += other.count

    def percentile(self, share: float) -> float:
        """The percentile in microseconds."""
        wanted, seen = share * self.count, 0
        for step, count in enumerate(self.counts):
            seen += count
            if seen >= wanted and count:
                return step * _STEP_S * 1e6
        return 0.0

    def measured(self, piece_bytes: int, seconds: float, pieces_each: int = 1) -> Measured:
        reads = self.count * pieces_each
        return Measured(reads, reads * piece_bytes, seconds, self.percentile(0.5), self.percentile(0.99))


class Places:
    """Random source of read positions: all whole pieces of all files are equally likely."""

    def __init__(self, sizes: Sequence[int], piece_bytes: int):
        self._piece_bytes = piece_bytes
        pieces = [size // piece_bytes for size in sizes]
        self.total = sum(pieces)
        if not self.total:
            raise InvalidRequest(f"no file here has {piece_bytes} bytes: nothing to read at random")
        self._ends, end = [], 0
        for count in pieces:
            end += count
            self._ends.append(end)
        self._random = SYSTEM_CLOCK.random()

    def next(self) -> tuple[int, int]:
        """The next position: (index of the file, offset)."""
        piece = int(self._random.random() * self.total)
        file = bisect_right(self._ends, piece)
        return file, (piece - (self._ends[file - 1] if file else 0)) * self._piece_bytes


def read_local(
    paths: Sequence[str],
    *,
    seconds: float,
    threads: int = 1,
    piece_bytes: int = BLOCK_BYTES,
    direct: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Measured:
    """Read pieces of the files at random positions with `threads` threads. `direct` uses O_DIRECT, so the
    reads bypass the page cache.

    InvalidRequest: no file is as long as a piece, or the file system has no O_DIRECT. Other errors: NotFound,
    AccessDenied, DriveFailed.
    """
    descriptors: list[int] = []
    try:
        try:
            for path in paths:
                descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)))
        except OSError as error:
            raise from_os_error(error, f"open {path}") from None
        sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
        results = [Latencies() for _ in range(threads)]
        failures: list[OSError] = []
        began_s = SYSTEM_CLOCK.boottime_s()

        def loop(latencies: Latencies) -> None:
            places = Places(sizes, piece_bytes)
            buffer = mmap.mmap(-1, piece_bytes)  # aligned to a page, as O_DIRECT requires
            now_s, into = SYSTEM_CLOCK.boottime_s(), [buffer]
            try:
                while now_s - began_s < seconds and not stop():
                    file, offset = places.next()
                    before_s = SYSTEM_CLOCK.boottime_s()
                    os.preadv(descriptors[file], into, offset)
                    now_s = SYSTEM_CLOCK.boottime_s()
                    latencies.add(now_s - before_s)
            except OSError as error:
                failures.append(error)

        Places(sizes, piece_bytes)
        readers = [threading.Thread(target=loop, args=(latencies,)) for latencies in results]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        if failures:
            raise from_os_error(failures[0], "reading")
        taken_s = SYSTEM_CLOCK.boottime_s() - began_s
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    for other in results[1:]:
        results[0].merge(other)
    return results[0].measured(piece_bytes, taken_s)


async def read_pool(
    vfs: Vfs,
    handles: Sequence[FileHandle],
    *,
    seconds: float,
    piece_bytes: int = BLOCK_BYTES,
    batch: int = 64,
    in_flight: int = 2,
) -> Measured:
    """Read pieces of open files of a pool at random positions with read_many.

    `in_flight` batches of `batch` pieces run in parallel. A latency is that of a whole batch, because the
    first piece of a batch is returned together with its last.
    """
    sizes = [handle.size for handle in handles]
    latencies = Latencies()
    began_s = SYSTEM_CLOCK.boottime_s()

    async def loop() -> None:
        places, into = Places(sizes, piece_bytes), memoryview(bytearray(batch * piece_bytes))
        now_s = began_s
        while now_s - began_s < seconds:
            pieces = []
            for _ in range(batch):
                file, offset = places.next()
                pieces.append((handles[file], offset, piece_bytes))
            before_s = SYSTEM_CLOCK.boottime_s()
            await vfs.read_many(pieces, into=into)
            now_s = SYSTEM_CLOCK.boottime_s()
            latencies.add(now_s - before_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(loop())
    return latencies.measured(piece_bytes, SYSTEM_CLOCK.boottime_s() - began_s, batch)


def time_each(
    step: Callable[[int], object], piece_bytes: int, *, seconds: float = 1e9, count: int = 1 << 60
) -> Measured:
    """Call step(0), step(1), … until `seconds` have passed or it was called `count` times."""
    latencies, number = Latencies(), 0
    began_s = now_s = SYSTEM_CLOCK.boottime_s()
    while number < count and now_s - began_s < seconds:
        step(number)
        before_s, now_s = now_s, SYSTEM_CLOCK.boottime_s()
        latencies.add(now_s - before_s)
        number += 1
    return latencies.measured(piece_bytes, now_s - began_s)


async def time_each_async(
    step: Callable[[int], Awaitable[object]], piece_bytes: int, *, seconds: float = 1e9, count: int = 1 << 60
) -> Measured:
    """`time_each` for a coroutine function."""
    latencies, number = Latencies(), 0
    began_s = now_s = SYSTEM_CLOCK.boottime_s()
    while number < count and now_s - began_s < seconds:
        await step(number)
        before_s, now_s = now_s, SYSTEM_CLOCK.boottime_s()
        latencies.add(now_s - before_s)
        number += 1
    return latencies.measured(piece_bytes, now_s - began_s)
