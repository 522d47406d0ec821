"""Access to a store's drive: a data file, a raw block device, or a fake in memory.

All chunk data passes through this module, except that the compiled fast paths in `store/server` use its file
descriptor directly.

Reads come in batches of (disk offset, length, position in the buffer). `read_now` fills the data that the
page cache has and returns the missing reads (preadv with RWF_NOWAIT, Linux 4.14). `read` waits for the
missing ones: through io_uring if the compiled module and the kernel allow it, else through a few threads
(blockio/reader). Small writes go to the page cache and return. Large writes may bypass the page cache, in a
thread (`write_direct`). `sync` is fdatasync, in a thread.

With `direct` the file is opened with O_DIRECT: nothing is ever in the page cache, all writes go to the drive
while the event loop waits for them, and buffers are page-aligned.

This module repeats nothing: the caller must remember a failed sync. The only user is the block store.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import mmap
import os
import stat
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from nvpool.blockio import reader as blockio_reader
from nvpool.blockio.api import Outcome
from nvpool.core.errors import DriveFailed, NotSupported, NvpoolError, from_os_error
from nvpool.core.units import BLOCK_BYTES, MIB
from nvpool.store.disk.buffer_pool import BufferPool
from nvpool.store.disk.direct_reads import DirectReads

log = logging.getLogger(__name__)

_IOV_MAX = 1024
DIRECT_WRITE_BYTES = 128 * 1024
"""Size from which a write bypasses the page cache, if the file system allows it.

A write of 1 MiB took 0.8 ms to the drive, with the processor free for other work. Into the cache it took 0.9
to 2.8 ms: the kernel must find new pages, and the sync must still write them. A small write takes 10 µs into
the cache and 60 to the drive. The kernel keeps both coherent, and no block is read and written at the same
time: a written block is free until the index names it.
"""
SMALL_BYTES = 16 * 1024
"""Largest read that gets new memory instead of a pooled buffer.

The memory allocator is faster here than the search for a free buffer.
"""
_DIRECT_THREADS = 4
"""Concurrent direct writes: a single one leaves most of a drive idle."""


class Device(Protocol):
    read_path: str
    """For `status`: how reads that must wait are done."""
    direct: bool
    lacks_room: bool
    """Whether a write met a full file system since this was last set to False."""
    writes: str
    """For `status`: how large writes are made.

    `direct` bypasses the page cache; `cached` means that the drive does not support this.
    """

    def buffer(self, byte_count: int) -> memoryview:
        """Return a buffer of this size, with arbitrary contents.

        It is free again when no view of it exists.
        """

    def read_now(
        self,
        offsets: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[int],
        into: memoryview,
        client_caches: bool = False,
    ) -> list[int]:
        """Read each (offset, length) to its position in `into`; return the indexes of reads that must wait.

        `client_caches` says that the client caches the data, so this machine's page cache need not.
        """

    async def read(
        self, offsets: Sequence[int], lengths: Sequence[int], positions: Sequence[int], into: memoryview
    ) -> list[NvpoolError | None]:
        """Read like `read_now`, but wait for the drive. Returns None or an error for each read."""

    def begin_read(
        self,
        offsets: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[int],
        into: memoryview,
        client_caches: bool,
        on_done: Callable[[Outcome], None],
    ) -> None:
        """Start reads like `read`, without a task.

        `on_done` is called once with the outcome, in a later event-loop iteration. The device uses `into`
        until then, even if the caller has gone.
        """

    def read_whole(self, offset: int, length: int) -> memoryview:
        """Read and block the event loop: for the start only. DriveFailed."""

    def write(self, buffers: list, offset: int) -> None:
        """Write the buffers one after another.

        NoSpace, DriveFailed: any part of the range may have been written.
        """

    def open_for_reader(self) -> int:
        """Return a new descriptor for reads through the page cache by another process.

        The caller closes the descriptor. NotSupported: this device has none.
        """

    direct_write_bytes: int
    """Smallest size for `write_direct`; 0: never available."""

    def write_direct(self, buffer, ranges: Sequence[tuple[int, int]]) -> asyncio.Future:
        """Write whole blocks to these (offset, length) ranges, in order, without blocking the event loop.

        The buffer must stay unchanged until the future is done. The future fails with the errors of `write`.
        It cannot be cancelled: until it is done, the ranges are being written.
        """

    async def sync(self) -> None:
        """Make all data written before the call survive the loss of power.

        DriveFailed: the sync failed; never repeat it.
        """

    async def discard(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Mark these (offset, length) ranges as unused, so that their space may be given back.

        Best effort.
        """

    async def close(self) -> None: ...


class FileDevice:
    """Device on a data file or a block device."""

    def __init__(self, path: str, *, direct: bool = False, uring: bool = True):
        """Open the file for reading and writing. NotFound, AccessDenied, DriveFailed."""
        self.path = os.path.realpath(path)
        self.direct = direct
        self.lacks_room = False
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        except OSError as error:
            raise from_os_error(error, f"opening {path}") from None
        self._direct_fd = self.fd if direct else _open_direct(path)
        if self._direct_fd < 0:
            log.info("%s has no direct writes; large ones go through the page cache", self.path)
        self.direct_write_bytes = DIRECT_WRITE_BYTES if self._direct_fd >= 0 else 0
        self._aligned = BufferPool(_pages, kept_bytes_max=16 * MIB)
        self.is_block = stat.S_ISBLK(os.fstat(self.fd).st_mode)
        self.reader = blockio_reader.reader_for(self.fd, uring=uring)
        self.read_path = self.reader.name
        self.direct_reads = DirectReads(self.fd, self.reader)
        self._pool = self._aligned if direct else BufferPool(_pages)
        self.buffer = self._pool.take if direct else self._buffer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device-sync")
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="device-writeback")
        self._direct_writers = ThreadPoolExecutor(_DIRECT_THREADS, thread_name_prefix="device-write")
        self.run_start = self.run_end = 0
        """Last sequential run of writes whose writeback has not been started."""
        self._starting: list = []

    def _buffer(self, byte_count: int) -> memoryview:
        return self._pool.take(byte_count) if byte_count > SMALL_BYTES else memoryview(bytearray(byte_count))

    @property
    def writes(self) -> str:
        return "direct" if self.direct_write_bytes else "cached"

    def read_now(self, offsets, lengths, positions, into, client_caches=False) -> list[int]:
        if self.direct or (client_caches and self.direct_reads.wants(offsets, lengths)):
            return list(range(len(offsets)))
        return blockio_reader.read_now(self.fd, offsets, lengths, positions, into)

    async def read(self, offsets, lengths, positions, into) -> list[NvpoolError | None]:
        return await self.reader.read(self.fd, offsets, lengths, positions, into)

    def begin_read(self, offsets, lengths, positions, into, client_caches, on_done) -> None:
        if client_caches and not self.direct and self.direct_reads.wants(offsets, lengths):
            self.direct_reads.begin(offsets, lengths, positions, into, on_done)
        else:
            self.reader.begin(self.fd, offsets, lengths, positions, into, on_done)

    def read_whole(self, offset, length) -> memoryview:
        into = self.buffer(length)
        try:
            if os.preadv(self.fd, [into], offset) == length:
                return into
        except OSError as error:
            raise from_os_error(error, f"reading {self.path} at {offset}") from None
        raise DriveFailed(f"{self.path} ends before byte {offset + length}")

    def write(self, buffers: list, offset: int) -> None:
        start = offset
        if self.direct:
            self._write_all(self.fd, [self._in_line(buffers)], offset)
            return
        if len(buffers) == 1:  # as in most writes
            try:
                offset += os.pwrite(self.fd, buffers[0], offset)
            except OSError:  # `_write_all` meets it again, and reports it
                pass
        if offset != start + len(buffers[0]) or len(buffers) > 1:
            offset = self._write_all(self.fd, buffers, start)
        if start == self.run_end and offset - self.run_start < WRITEBACK_BYTES:
            self.run_end = offset
        else:
            self.note_run(start, offset)

    def _in_line(self, buffers: list) -> memoryview:
        aligned = self._aligned.take(sum(map(len, buffers)))
        at = 0
        for buffer in buffers:
            aligned[at : at + len(buffer)] = buffer
            at += len(buffer)
        return aligned

    def _write_all(self, fd: int, buffers: list, offset: int) -> int:
        while buffers:
            try:
                done = os.pwritev(fd, buffers[:_IOV_MAX], offset)
            except OSError as error:
                if error.errno == errno.EINVAL and fd != self.fd:
                    log.warning(
                        "%s refuses direct writes of whole blocks (%s): from now on large writes go through the page "
                        "cache, which costs processor time",
                        self.path,
                        error.strerror,
                    )
                    fd, self.direct_write_bytes = self.fd, 0  # a drive that needs more than 4 KiB alignment
                    continue
                self.lacks_room |= error.errno in (errno.ENOSPC, errno.EDQUOT)
                raise from_os_error(error, f"writing to {self.path} at {offset}") from None
            offset += done
            rest = []
            for buffer in buffers:
                if done >= len(buffer):
                    done -= len(buffer)
                else:
                    rest.append(memoryview(buffer)[done:])
                    done = 0
            buffers = rest
        return offset

    def write_direct(self, buffer, ranges) -> asyncio.Future:
        if not begins_at_page(buffer):
            buffer = self._in_line([buffer])
        return asyncio.get_running_loop().run_in_executor(
            self._direct_writers, self._write_ranges, buffer, ranges
        )

    def _write_ranges(self, buffer: memoryview, ranges) -> None:
        at = 0
        for offset, length in ranges:
            self._write_all(self._direct_fd, [buffer[at : at + length]], offset)
            at += length

    def note_run(self, start: int, end: int) -> None:
        """Start writeback of a long sequential run early.

        Then the later sync has little to write. The kernel alone would start when a tenth of the memory is
        dirty. This is only advice: nothing waits, and errors are ignored.
        """
        if start == self.run_end:
            self.run_end = end
        else:
            self.run_start, self.run_end = start, end
        if self.run_end - self.run_start >= WRITEBACK_BYTES:
            self._starting = [begun for begun in self._starting if not begun.done()]
            if len(self._starting) < _WRITEBACKS_MAX:
                length = self.run_end - self.run_start
                self._starting.append(self._starter.submit(self._start_writeback, self.run_start, length))
            self.run_start = self.run_end

    def _start_writeback(self, offset: int, length: int) -> None:
        _libc.sync_file_range(
            ctypes.c_int(self.fd),
            ctypes.c_long(offset),
            ctypes.c_long(length),
            ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
        )

    def open_for_reader(self) -> int:
        if self.direct:
            raise NotSupported("a drive that is read with O_DIRECT gives no descriptor to clients")
        try:  # a new open file description of this very file: no flags are shared with ours
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, f"opening {self.path} for a reader") from None

    async def sync(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, os.fdatasync, self.fd)
        except OSError as error:
            raise from_os_error(error, f"syncing {self.path}") from None

    async def discard(self, ranges) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, _punch, self.fd, ranges)

    async def close(self) -> None:
        await self.reader.close()
        self.direct_reads.close()
        self._thread.shutdown()
        self._starter.shutdown()
        self._direct_writers.shutdown()
        if self._direct_fd not in (-1, self.fd):
            os.close(self._direct_fd)
            self._direct_fd = -1
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pages(byte_count: int) -> mmap.mmap:
    return mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def begins_at_page(buffer) -> bool:
    """Whether the buffer can be written with O_DIRECT without a copy. Read-only memory counts as no."""
    buffer = memoryview(buffer)
    return not buffer.readonly and not ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % mmap.PAGESIZE


def _open_direct(path: str) -> int:
    """Open a second descriptor with O_DIRECT; -1 if the file system has none (tmpfs before Linux 6.6)."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return -1


WRITEBACK_BYTES = 4 << 20
_WRITEBACKS_MAX = 8
_SYNC_FILE_RANGE_WRITE = 2
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def _punch(fd: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Punch holes with fallocate(2), which the os module lacks.

    A file system without support keeps the space.
    """
    for offset, length in ranges:
        _libc.fallocate(
            ctypes.c_int(fd),
            ctypes.c_int(_FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE),
            ctypes.c_long(offset),
            ctypes.c_long(length),
        )


class MemoryDevice:
    """Fake device in memory, which remembers the synced blocks.

    `crash` drops unsynced blocks, or the part of them that a seeded choice says. Kept blocks may be any of
    them, in any order, as in a drive's cache.

    Faults for tests: `fail_writes` and `fail_syncs` hold errno numbers for the next calls; `cold` makes
    `read_now` miss.
    """

    read_path = writes = "memory"
    direct = False
    direct_write_bytes = DIRECT_WRITE_BYTES

    def __init__(self, byte_count: int):
        self.byte_count = byte_count
        self._now: dict[int, bytes] = {}
        self.unsynced: dict[int, bytes | None] = {}
        self._forgotten: dict[int, bytes | None] = {}
        self.fail_writes: deque[int] = deque()
        self.fail_syncs: deque[int] = deque()
        self.fail_reads: set[int] = set()
        self.cold = False
        self.lacks_room = False
        self.closed = False

    def buffer(self, byte_count: int) -> memoryview:
        return memoryview(bytearray(byte_count))

    def _fill(self, offset: int, length: int, position: int, into: memoryview) -> None:
        for at in range(0, length, BLOCK_BYTES):
            block = self._now.get((offset + at) // BLOCK_BYTES)
            into[position + at : position + at + BLOCK_BYTES] = (
                block if block is not None else bytes(BLOCK_BYTES)
            )

    def read_now(self, offsets, lengths, positions, into, client_caches=False) -> list[int]:
        missed = []
        for at, offset in enumerate(offsets):
            if self.cold or offset // BLOCK_BYTES in self.fail_reads:
                missed.append(at)
            else:
                self._fill(offset, lengths[at], positions[at], into)
        return missed

    async def read(self, offsets, lengths, positions, into) -> list[NvpoolError | None]:
        await asyncio.sleep(0)
        return self._read(offsets, lengths, positions, into)

    def begin_read(self, offsets, lengths, positions, into, client_caches, on_done) -> None:
        asyncio.get_running_loop().call_soon(lambda: on_done(self._read(offsets, lengths, positions, into)))

    def _read(self, offsets, lengths, positions, into) -> Outcome:
        outcome: Outcome = []
        for offset, length, position in zip(offsets, lengths, positions, strict=True):
            if offset // BLOCK_BYTES in self.fail_reads:
                outcome.append(DriveFailed(f"reading at {offset}"))
                continue
            self._fill(offset, length, position, into)
            outcome.append(None)
        return outcome

    def read_whole(self, offset, length) -> memoryview:
        into = self.buffer(length)
        self._fill(offset, length, 0, into)
        return into

    def open_for_reader(self) -> int:
        raise NotSupported("memory has no descriptor")

    def write(self, buffers: list, offset: int) -> None:
        joined = b"".join(buffers)
        if len(joined) % BLOCK_BYTES or offset % BLOCK_BYTES or offset + len(joined) > self.byte_count:
            raise ValueError("a write is whole blocks within the device")
        failing = self.fail_writes.popleft() if self.fail_writes else 0
        if failing:  # half of it arrives, as on a drive that fills up or breaks
            joined = joined[: len(joined) // BLOCK_BYTES // 2 * BLOCK_BYTES]
        for at in range(0, len(joined), BLOCK_BYTES):
            number = (offset + at) // BLOCK_BYTES
            before = self._forgotten.pop(number) if number in self._forgotten else self._now.get(number)
            self.unsynced.setdefault(number, before)
            self._now[number] = joined[at : at + BLOCK_BYTES]
        if failing:
            raise from_os_error(OSError(failing, os.strerror(failing)), "writing")

    def write_direct(self, buffer, ranges) -> asyncio.Future:
        async def later(content: bytes) -> None:
            at = 0
            for offset, length in ranges:
                await asyncio.sleep(0)
                self.write([content[at : at + length]], offset)
                at += length

        return asyncio.ensure_future(later(bytes(buffer)))

    async def sync(self) -> None:
        asked, self.unsynced = self.unsynced, {}
        await asyncio.sleep(0)  # data written in the meantime is not part of this sync
        if self.fail_syncs and (failing := self.fail_syncs.popleft()):
            # Like a kernel: the unsynced data is readable and counts as written, but is not on the drive.
            self._forgotten |= asked
            raise from_os_error(OSError(failing, os.strerror(failing)), "syncing")

    def crash(self, keep=None) -> None:
        """Simulate a loss of power.

        `keep(block number)` says which unsynced blocks reached the drive nevertheless (default: none).
        """
        for number, before in (self.unsynced | self._forgotten).items():
            if keep is not None and keep(number):
                continue
            if before is None:
                del self._now[number]
            else:
                self._now[number] = before
        self.unsynced.clear()
        self._forgotten.clear()

    def flip(self, place: int, byte: int = 100) -> None:
        """Flip one bit of a block."""
        block = bytearray(self._now[place])
        block[byte] ^= 1
        self._now[place] = bytes(block)

    async def discard(self, ranges) -> None:
        for offset, length in ranges:
            for number in range(offset // BLOCK_BYTES, (offset + length) // BLOCK_BYTES):
                self._now.pop(number, None)
                self.unsynced.pop(number, None)

    async def close(self) -> None:
        self.closed = True


NO_SPACE, IO_ERROR = errno.ENOSPC, errno.EIO
