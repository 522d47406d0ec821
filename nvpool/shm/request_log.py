"""Requests of the kernel that outlive the process that has read them: one shared memory of a declared version.

For kernels that do not hand out again what a dead process has not answered (Linux before 6.9): whoever goes on finds it here.
A request is read into `buffer`, which is part of this memory, so there is no moment between reading and keeping; before the
next one is read into it, what is still in work is copied to a place of its own. A place counts when its mark, which is the
number of the request, is not zero: the bytes come first. A record is no promise that the request is unanswered: the kernel is
asked that (fuse/kernel/replay_log).

Most requests take a page at most; those that carry more have larger places, of which there are fewer. The memory is sparse:
what was never used costs nothing. Plain bookkeeping: never waits, knows neither the kernel nor the pool.
"""

from __future__ import annotations

import mmap
import os
import struct

from nvpool.core.errors import CorruptRecord, WrongFormat
from nvpool.core.units import MIB
from nvpool.shm.memfd import make_sealed

MAGIC = b"nvpasks\n"
VERSION = 1
_HEAD = struct.Struct("<8sIIQQ")
"""magic, version, zero, bytes of all, of the longest request"""
_MARK = struct.Struct("<Q")
_REQUEST = struct.Struct("=IIQ")
"""As the kernel writes it: length, operation, number of the request."""
LENGTH_MIN = 40
"""Of the head that each has."""
PAGE = 4096
SMALL_COUNT = 1 << 14
"""Who waits for a lock may do so for ever, and has one."""
_LARGE_BYTES = 256 * MIB
_MARKS_PLACE = PAGE


def _large_count(request_bytes: int) -> int:
    return max(16, _LARGE_BYTES // request_bytes)


def _places(request_bytes: int) -> tuple[int, int, int, int]:
    """Of the buffer, of the small ones, of the large ones, and the end."""
    buffer = _MARKS_PLACE + (_MARK.size * (SMALL_COUNT + _large_count(request_bytes)) + PAGE - 1 & -PAGE)
    small = buffer + request_bytes
    large = small + SMALL_COUNT * PAGE
    return buffer, small, large, large + _large_count(request_bytes) * request_bytes


class Unanswered:
    """One mapping of it. `descriptor` stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        """WrongFormat where it is of another version, CorruptRecord where it does not fit together."""
        size = os.fstat(descriptor).st_size
        if size < PAGE:
            raise CorruptRecord(f"the requests that a mount's process left have {size} bytes")
        self._memory = memory = mmap.mmap(descriptor, size)
        magic, version, _, total, request_bytes = _HEAD.unpack_from(memory)
        if magic != MAGIC or version != VERSION:
            raise WrongFormat(f"the requests that a mount's process left have version {version}, this nvpool knows {VERSION}: "
                              "unmount, and mount again" if magic == MAGIC else "this is no memory of a mount's requests")
        if request_bytes % PAGE or not request_bytes or total != size or _places(request_bytes)[-1] != total:
            raise CorruptRecord(f"the requests that a mount's process left are said to have {total} bytes, and have {size}")
        self.request_bytes: int = request_bytes
        self._buffer_place, self._small_place, self._large_place, _ = _places(request_bytes)
        view = memoryview(memory)
        self.buffer = view[self._buffer_place:self._small_place]
        """Requests are read into this. Who writes them here otherwise uses `put`."""
        self._view = view
        self._at: dict[int, int] = {}  # number of a request -> where it is
        self._small: list[int] = []    # free ones, the next one last
        self._large: list[int] = []
        count = SMALL_COUNT + _large_count(request_bytes)
        for index, unique in enumerate(struct.unpack_from(f"<{count}Q", memory, _MARKS_PLACE)):
            if not unique:
                (self._small if index < SMALL_COUNT else self._large).append(index)
            elif self._length_at(self._place(index)) and unique not in self._at:
                self._at[unique] = index
            else:
                raise CorruptRecord(f"request {unique} that a mount's process left makes no sense")
        self._small.reverse()
        self._large.reverse()

    @classmethod
    def make(cls, request_bytes: int) -> int:
        """A new one, empty, for requests of so many bytes, whole pages; its descriptor, which is closed by exec and can not be
        cut."""
        total = _places(request_bytes)[-1]
        return make_sealed("nvpool requests", total, _HEAD.pack(MAGIC, VERSION, 0, total, request_bytes))

    def _place(self, index: int) -> int:
        if index < SMALL_COUNT:
            return self._small_place + index * PAGE
        return self._large_place + (index - SMALL_COUNT) * self.request_bytes

    def _length_at(self, place: int) -> int:
        """Of the request that lies there; 0 where none does."""
        length: int
        length, _, _ = _REQUEST.unpack_from(self._memory, place)
        room = PAGE if self._small_place <= place < self._large_place else self.request_bytes
        return length if LENGTH_MIN <= length <= room else 0

    @property
    def has_room(self) -> bool:
        """Whether any request that is read now could be kept."""
        return bool(self._small and self._large)

    @property
    def count(self) -> int:
        return len(self._at)

    def keep(self, unique: int, request: memoryview) -> None:
        """It is in work from now on, under that number. `has_room` was asked before it was read."""
        if unique in self._at:
            return
        length = len(request)
        index = (self._small if length <= PAGE else self._large).pop()
        place = self._place(index)
        self._view[place:place + length] = request
        _MARK.pack_into(self._memory, _MARKS_PLACE + _MARK.size * index, unique)
        self._at[unique] = index

    def forget(self, unique: int) -> None:
        """It is answered; nothing where it was not kept."""
        index = self._at.pop(unique, None)
        if index is not None:
            _MARK.pack_into(self._memory, _MARKS_PLACE + _MARK.size * index, 0)
            (self._small if index < SMALL_COUNT else self._large).append(index)

    def put(self, request: bytes) -> None:
        """Into the buffer. Never half: its length, without which it is none, comes last."""
        _MARK.pack_into(self.buffer, 0, 0)
        self.buffer[4:len(request)] = request[4:]
        self.buffer[:4] = request[:4]

    def left(self, mask: int) -> list[tuple[int, bytes]]:
        """(number, request) of all that the process before us had in its hands, in the order of their numbers, of which `mask`
        is what counts. That in the buffer is kept like the others from now on."""
        length = self._length_at(self._buffer_place)
        if length:
            unique = _REQUEST.unpack_from(self.buffer)[2] & mask
            if unique:
                self.keep(unique, self.buffer[:length])
        found = []
        for unique in sorted(self._at):
            place = self._place(self._at[unique])
            found.append((unique, bytes(self._view[place:place + self._length_at(place)])))
        return found
