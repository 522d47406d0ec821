"""Block readers for a data file or device: cached data immediately, other data through io_uring or threads.

The store that owns the descriptor uses this module, and so do clients on its host to which the descriptor was
passed. Data in the page cache is read immediately (preadv with RWF_NOWAIT, Linux 4.14). Other data is read
asynchronously: through io_uring if the compiled module and the kernel allow it (one submission per batch, one
wake-up for several completions), otherwise by a few threads that each get a share of the batch. A caller with
its own cache may bypass the page cache (`open_direct`). This module does not know chunks and verifies no
checksums. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nvpool.blockio.api import Outcome, WaitingReader
from nvpool.blockio.uring_reader import UringReader
from nvpool.core.compiled_loader import load_compiled
from nvpool.core.errors import Cancelled, DriveFailed, from_os_error
from nvpool.core.units import BLOCK_BYTES, KIB

_uring = load_compiled("nvpool.blockio._uring")
_compiled_read_now = getattr(_uring, "read_now", None)
READ_THREADS = 8
"""Number of threads, and so of simultaneous shares of a batch, without io_uring."""

DIRECT_READ_BYTES = 64 * KIB
"""Minimum size of a read for which bypassing the page cache is cheaper: 1 MiB from the drive costs 60 to 130
µs of processor time instead of 180 to 2,000 (finding and filling pages; most in a virtual machine that must
request each page from its host)."""
_CACHESTAT = 451
_libc = ctypes.CDLL(None)


def read_now_plain(fd: int, offsets, lengths, positions, into: memoryview) -> list[int]:
    """Read each (offset, length) to its position in `into`.

    Return the indexes of those that would have to wait.
    """
    missed = []
    preadv, nowait = os.preadv, os.RWF_NOWAIT
    for at, offset in enumerate(offsets):
        position = positions[at]
        length = lengths[at]
        try:
            if preadv(fd, (into[position : position + length],), offset, nowait) != length:
                missed.append(at)
        except OSError:  # EAGAIN: not cached. The waiting read meets any other error again and reports it.
            missed.append(at)
    return missed


read_now = _compiled_read_now or read_now_plain


def open_direct(fd: int) -> int:
    """Return a descriptor of the same file that bypasses the page cache; the caller closes it.

    Reads must be whole blocks into memory at block borders. Returns -1 if there is none: a file system
    without O_DIRECT, another user's file, or a kernel that does not report cached pages (cachestat, Linux
    6.5). In the last case data may be cached, and a test by reading would fill the cache.
    """
    return _open_again(fd, os.O_DIRECT) if cached_pages(fd, 0, BLOCK_BYTES) >= 0 else -1


def open_exact(fd: int) -> int:
    """Return a descriptor of the same file that reads through the page cache without kernel read-ahead; the
    caller closes it.

    With read-ahead, one such read would cache the data after it, which is then read from the cache and
    triggers more read-ahead. Returns -1 if the file cannot be opened again.
    """
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
    """Return how many pages of a range are in the page cache; -1 if the kernel does not report this."""
    found = (ctypes.c_uint64 * 5)()  # cached, dirty, under writeback, evicted, recently evicted
    failed = _libc.syscall(
        ctypes.c_long(_CACHESTAT),
        ctypes.c_int(fd),
        (ctypes.c_uint64 * 2)(offset, length),
        found,
        ctypes.c_uint(0),
    )
    return -1 if failed else found[0]


cached_pages = getattr(_uring, "cached_pages", None) or cached_pages_plain


def reader_for(fd: int, *, uring: bool = True) -> WaitingReader:
    """Return the best asynchronous reader of this system."""
    return (UringReader.probe(fd) if uring else None) or ThreadReader()


class ThreadReader(WaitingReader):
    """Asynchronous reads in a bounded set of threads.

    A batch is divided into shares, so one task does many reads.
    """

    name = "executor"

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="read")

    def begin(
        self, fd: int, offsets, lengths, positions, into: memoryview, on_done: Callable[[Outcome], None]
    ) -> None:
        task = asyncio.ensure_future(self._shares(fd, offsets, lengths, positions, into))
        task.add_done_callback(
            lambda task: on_done([Cancelled()] * len(offsets) if task.cancelled() else task.result())
        )

    async def _shares(self, fd: int, offsets, lengths, positions, into: memoryview) -> Outcome:
        count = len(offsets)
        share = max(1, -(-count // READ_THREADS))
        loop = asyncio.get_running_loop()
        parts = [
            loop.run_in_executor(
                self._threads,
                self._share,
                fd,
                offsets[at : at + share],
                lengths[at : at + share],
                positions[at : at + share],
                into,
            )
            for at in range(0, count, share)
        ]
        return [one for part in await asyncio.gather(*parts) for one in part]

    @staticmethod
    def _share(fd: int, offsets, lengths, positions, into) -> Outcome:
        outcome: Outcome = []
        for offset, length, position in zip(offsets, lengths, positions, strict=True):
            try:
                got = os.preadv(fd, [into[position : position + length]], offset)
                outcome.append(
                    None if got == length else DriveFailed(f"{got} of {length} bytes read at {offset}")
                )
            except OSError as error:
                outcome.append(from_os_error(error, f"reading {length} bytes at {offset}"))
        return outcome

    async def close(self) -> None:
        self._threads.shutdown(wait=True)
