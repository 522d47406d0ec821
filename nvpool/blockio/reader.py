"""Reads of whole blocks through a descriptor of a data file or device: by the store that owns it, and by clients of its host
that it was passed to.

What the kernel has in memory is read at once (preadv with RWF_NOWAIT, Linux 4.14); what it has not, waits: through io_uring
where the compiled module and the kernel allow it (one submission a batch, one wake-up for what has ended), else through a few
threads that get a share of the batch each. Who keeps what he reads by himself may read past the kernel's cache (`open_direct`).
Knows no chunks and checks no checksums. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nvpool.blockio import uring as _ring
from nvpool.blockio.api import Outcome, WaitingReader
from nvpool.blockio.uring import UringReader
from nvpool.core.errors import Cancelled, DriveFailed, from_os_error
from nvpool.core.units import BLOCK_BYTES, KIB

_compiled_read_now = getattr(_ring._uring, "read_now", None)
READ_THREADS = 8
"""Shares of a batch that wait at once where io_uring is not to be had."""

DIRECT_READ_BYTES = 64 * KIB
"""From here on a read past the cache costs less than one through it: 1 MiB from the drive 60 to 130 µs of processor time
instead of 180 to 2,000 (finding and filling pages; the most where a virtual machine has to ask its host for each)."""
_CACHESTAT = 451
_libc = ctypes.CDLL(None)


def read_now_plain(fd: int, offsets, lengths, positions, into: memoryview) -> list[int]:
    """Read each (offset, length) to its position in `into`; returns the indexes of those that would have to wait."""
    missed = []
    preadv, nowait = os.preadv, os.RWF_NOWAIT
    for at, offset in enumerate(offsets):
        position = positions[at]
        length = lengths[at]
        try:
            if preadv(fd, (into[position:position + length],), offset, nowait) != length:
                missed.append(at)
        except OSError:  # EAGAIN: not in memory. Anything else shows again, and is told, when we wait for it.
            missed.append(at)
    return missed


read_now = _compiled_read_now or read_now_plain


def open_direct(fd: int) -> int:
    """A descriptor of the same file that reads past the page cache, whole blocks into memory at borders of them; the caller's
    to close. -1 where there is none: a file system without O_DIRECT, a file of somebody else, a kernel that does not tell what
    is in memory (cachestat, Linux 6.5): it may be there, and a look by reading brings it there."""
    return _open_again(fd, os.O_DIRECT) if cached_pages(fd, 0, BLOCK_BYTES) >= 0 else -1


def open_exact(fd: int) -> int:
    """A descriptor of the same file that reads through the page cache what it is asked for, and nothing in advance: else one
    such read brings what comes behind it, which is then read from there, and brings more. The caller's to close; -1: none."""
    exact = _open_again(fd, 0)
    if exact >= 0:
        os.posix_fadvise(exact, 0, 0, os.POSIX_FADV_RANDOM)
    return exact


def _open_again(fd: int, flags: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError:
        return -1


def cached_pages_plain(fd: int, offset: int, length: int) -> int:
    """How many pages of that range the kernel has in memory; -1 where it does not say."""
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, under writeback, evicted, recently evicted
    failed = _libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_int(fd), (ctypes.c_uint64 * 2)(offset, length), found,
                           ctypes.c_uint(0))
    return -1 if failed else found[0]


cached_pages = getattr(_ring._uring, "cached_pages", None) or cached_pages_plain


def reader_for(fd: int, *, uring: bool = True) -> WaitingReader:
    """What waits for reads best here."""
    return (UringReader.probe(fd) if uring else None) or ThreadReader()


class ThreadReader(WaitingReader):
    """Reads that wait, in a bounded set of threads: a batch is cut into shares, so that a task costs many reads."""

    name = "executor"

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="read")

    def begin(self, fd: int, offsets, lengths, positions, into: memoryview, on_done: Callable[[Outcome], None]) -> None:
        task = asyncio.ensure_future(self._shares(fd, offsets, lengths, positions, into))
        task.add_done_callback(lambda task: on_done([Cancelled()] * len(offsets) if task.cancelled() else task.result()))

    async def _shares(self, fd: int, offsets, lengths, positions, into: memoryview) -> Outcome:
        count = len(offsets)
        share = max(1, -(-count // READ_THREADS))
        loop = asyncio.get_running_loop()
        parts = [loop.run_in_executor(self._threads, self._share, fd, offsets[at:at + share], lengths[at:at + share],
                                      positions[at:at + share], into) for at in range(0, count, share)]
        return [one for part in await asyncio.gather(*parts) for one in part]

    @staticmethod
    def _share(fd: int, offsets, lengths, positions, into) -> Outcome:
        outcome: Outcome = []
        for offset, length, position in zip(offsets, lengths, positions, strict=True):
            try:
                got = os.preadv(fd, [into[position:position + length]], offset)
                outcome.append(None if got == length else DriveFailed(f"{got} of {length} bytes read at {offset}"))
            except OSError as error:
                outcome.append(from_os_error(error, f"reading {length} bytes at {offset}"))
        return outcome

    async def close(self) -> None:
        self._threads.shutdown(wait=True)
