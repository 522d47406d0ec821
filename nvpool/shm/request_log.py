"""Request log: kernel requests that outlive the process that read them, in one versioned shared memory.

For kernels that do not resend requests left unanswered by a dead process (Linux before 6.9): the successor
process finds the requests here. The process reads a request into `buffer`, which is part of this memory, so a
request is never only in private memory. Before the process reads the next request, it copies an unanswered
one to a slot. A slot is valid while its mark, the number of the request, is not zero; the bytes are written
before the mark. A valid slot does not prove that the request is unanswered: `fuse/kernel/replay_engine` asks the
kernel.

Most requests have at most one page. Longer ones use larger slots, of which there are fewer. The memory is
sparse: unused parts cost nothing. This module is plain bookkeeping: it never waits, and knows neither the
kernel nor the pool.
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
"""magic, version, zero, total bytes, bytes of the longest request"""
_MARK = struct.Struct("<Q")
_REQUEST = struct.Struct("=IIQ")
"""Header of a request as the kernel writes it: length, operation, number of the request."""
LENGTH_MIN = 40
"""Length of the header that every request has."""
PAGE = 4096
SMALL_COUNT = 1 << 14
"""Large, because each request that waits for a lock keeps a slot, possibly for ever."""
_LARGE_BYTES = 256 * MIB
_MARKS_PLACE = PAGE


def _large_count(request_bytes: int) -> int:
    return max(16, _LARGE_BYTES // request_bytes)


def _places(request_bytes: int) -> tuple[int, int, int, int]:
    """Return the offsets of the buffer, the small slots, the large slots, and the end."""
    buffer = _MARKS_PLACE + (_MARK.size * (SMALL_COUNT + _large_count(request_bytes)) + PAGE - 1 & -PAGE)
    small = buffer + request_bytes
    large = small + SMALL_COUNT * PAGE
    return buffer, small, large, large + _large_count(request_bytes) * request_bytes


class Unanswered:
    """One mapping of a request log. `descriptor` stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        """Map and verify the memory.

        WrongFormat: the memory has another version.
        CorruptRecord: its contents are inconsistent.
        """
        size = os.fstat(descriptor).st_size
        if size < PAGE:
            raise CorruptRecord(f"the requests that a mount's process left have {size} bytes")
        self._memory = memory = mmap.mmap(descriptor, size)
        magic, version, _, total, request_bytes = _HEAD.unpack_from(memory)
        if magic != MAGIC or version != VERSION:
            raise WrongFormat(
                f"the requests that a mount's process left have version {version}, this nvpool knows {VERSION}: "
                "unmount, and mount again"
                if magic == MAGIC
                else "this is not the memory of a mount's requests"
            )
        if request_bytes % PAGE or not request_bytes or total != size or _places(request_bytes)[-1] != total:
            raise CorruptRecord(
                f"the requests that a mount's process left are said to have {total} bytes, and have {size}"
            )
        self.request_bytes: int = request_bytes
        self._buffer_place, self._small_place, self._large_place, _ = _places(request_bytes)
        view = memoryview(memory)
        self.buffer = view[self._buffer_place : self._small_place]
        """Buffer into which the kernel's requests are read. Other code writes requests here with `put`
        only."""
        self._view = view
        self._at: dict[int, int] = {}  # number of a request -> index of its slot
        self._small: list[int] = []  # free small slots, the next one last
        self._large: list[int] = []
        count = SMALL_COUNT + _large_count(request_bytes)
        for index, unique in enumerate(struct.unpack_from(f"<{count}Q", memory, _MARKS_PLACE)):
            if not unique:
                (self._small if index < SMALL_COUNT else self._large).append(index)
            elif self._length_at(self.place_of(index)) and unique not in self._at:
                self._at[unique] = index
            else:
                raise CorruptRecord(f"request {unique} that a mount's process left makes no sense")
        self._small.reverse()
        self._large.reverse()

    @classmethod
    def make(cls, request_bytes: int) -> int:
        """Create an empty request log for requests of up to `request_bytes`, a multiple of the page size.

        Returns its descriptor, which is closed on exec and has a sealed size.
        """
        total = _places(request_bytes)[-1]
        return make_sealed("nvpool requests", total, _HEAD.pack(MAGIC, VERSION, 0, total, request_bytes))

    def place_of(self, index: int) -> int:
        """Offset of the request at this index."""
        if index < SMALL_COUNT:
            return self._small_place + index * PAGE
        return self._large_place + (index - SMALL_COUNT) * self.request_bytes

    def _length_at(self, place: int) -> int:
        """Return the length of the request at `place`; 0 if there is none."""
        length: int
        length, _, _ = _REQUEST.unpack_from(self._memory, place)
        room = PAGE if self._small_place <= place < self._large_place else self.request_bytes
        return length if LENGTH_MIN <= length <= room else 0

    @property
    def has_room(self) -> bool:
        """Whether a request of any length could be kept now."""
        return bool(self._small and self._large)

    @property
    def count(self) -> int:
        return len(self._at)

    def keep(self, unique: int, request: memoryview) -> None:
        """Keep an unanswered request under its number, unless it is kept already.

        The caller has checked `has_room` before it read the request.
        """
        if unique in self._at:
            return
        length = len(request)
        index = (self._small if length <= PAGE else self._large).pop()
        place = self.place_of(index)
        self._view[place : place + length] = request
        _MARK.pack_into(self._memory, _MARKS_PLACE + _MARK.size * index, unique)
        self._at[unique] = index

    def forget(self, unique: int) -> None:
        """Delete an answered request; do nothing if it was not kept."""
        index = self._at.pop(unique, None)
        if index is not None:
            _MARK.pack_into(self._memory, _MARKS_PLACE + _MARK.size * index, 0)
            (self._small if index < SMALL_COUNT else self._large).append(index)

    def put(self, request: bytes) -> None:
        """Write a request into the buffer, never partially: the length, which makes it valid, is written
        last."""
        _MARK.pack_into(self.buffer, 0, 0)
        self.buffer[4 : len(request)] = request[4:]
        self.buffer[:4] = request[:4]

    def left(self, mask: int) -> list[tuple[int, bytes]]:
        """Return (number, request) of the previous process's requests, in the order of their numbers.

        `mask` selects the significant bits of a request number. A request still in the buffer is moved to a
        slot.
        """
        length = self._length_at(self._buffer_place)
        if length:
            unique = _REQUEST.unpack_from(self.buffer)[2] & mask
            if unique:
                self.keep(unique, self.buffer[:length])
        found = []
        for unique in sorted(self._at):
            place = self.place_of(self._at[unique])
            found.append((unique, bytes(self._view[place : place + self._length_at(place)])))
        return found
