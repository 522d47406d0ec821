"""What was written to one open inode and the service does not know yet: segments of bytes, and where they are on their way.

Plain bookkeeping without a wait. Made and changed by the writer only; the open inode, reader and vfs look at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from nvpool.client.state.attr_cache import OpenInode
from nvpool.core.checksum import piece_checksums
from nvpool.core.errors import NvpoolError
from nvpool.core.units import BLOCK_BYTES, KIB

_UNIT_BITS_MAX = 20
_KEEP_BYTES = 32 * KIB
"""From this size a write that cannot change any more (bytes) is kept as it is; smaller ones are gathered by copying."""
_ORDERED_MAX = 256
"""Segments of a file up to which their order is looked at: what is written here and there leaves holes anyway."""


Record = tuple[int, int]
"""A number that grows, and where in the memory that outlives this process a piece is."""


class Segment:
    """Bytes [start, end) of the file, in consecutive parts. Changed only while it is dirty, never once it is being sent."""

    __slots__ = ("start", "end", "parts", "number", "born_s", "due", "records")

    def __init__(self, start: int, end: int, parts: list, number: int, born_s: float):
        self.records: list[Record] = []  # of its pieces, where they are kept; older ones first
        self.start = start
        self.end = end
        self.parts = parts
        self.number = number
        self.born_s = born_s
        self.due = False

    def bytes(self) -> bytearray:
        """All of it as one buffer, which stays a part of the segment."""
        if len(self.parts) != 1 or type(self.parts[0]) is not bytearray:
            self.parts = [bytearray().join(self.parts)]
        return self.parts[0]


class Turn:
    """One at a time. Who finds it free may take it without a wait; so who waits may have to wait once more."""

    __slots__ = ("taken", "_waiting")

    def __init__(self) -> None:
        self.taken = False
        self._waiting: list[asyncio.Future] = []

    def take(self) -> bool:
        """Whether it is the caller's now, who has to `release` it."""
        if self.taken:
            return False
        self.taken = True
        return True

    def release(self) -> None:
        self.taken = False
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            future = self._waiting.pop(0)
            if not future.done():
                future.set_result(None)
                return

    async def __aenter__(self) -> None:
        while self.taken:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                await future
            except BaseException:
                if not self.taken:
                    self._wake()  # it was woken and went away: the next one may have it
                raise
        self.taken = True

    async def __aexit__(self, *_) -> None:
        self.release()


class WrittenFile:
    """What the writer holds of one open inode."""

    __slots__ = ("file", "unit_bits", "dirty", "sending", "end", "stored_end", "wrote", "wrote_s", "error", "changed", "held",
                 "reporting", "paused", "stored_bytes", "begun", "entry", "flushing", "met", "ahead", "appended")

    def __init__(self, file: OpenInode):
        self.file = file
        self.unit_bits = min(file.chunk_bits, _UNIT_BITS_MAX)
        self.dirty: dict[int, list[Segment]] = {}     # by unit; disjoint and in order
        self.sending: dict[int, list[Segment]] = {}   # by unit; disjoint down to blocks
        self.end = 0            # of all bytes that the service does not know of: dirty, on the way, stored and unreported
        self.stored_end = 0     # of those that stores have, as far as nothing older before them is missing
        self.ahead: tuple[tuple[int, int], ...] = ()  # segments that stores have sooner: number and end
        self.wrote = False      # since the service last stamped the time
        self.wrote_s = 0.0
        self.error: NvpoolError | None = None  # that nobody was told of
        self.met: NvpoolError | None = None    # the last one, whoever was told
        self.changed: asyncio.Future | None = None
        self.held = 0
        self.stored_bytes = 0   # since the last report: what the file occupies is reckoned from it
        self.reporting = Turn()
        self.begun = False      # something was written
        self.paused = 0         # nothing is sent while the file is being cut
        self.flushing = None    # who is told on the spot when a segment has ended; see client/write/sender
        self.entry = -1         # in the memory that outlives this process
        self.appended: Any = None  # from the first append on; see client/write/append_reservations

    def segments(self) -> Iterator[Segment]:
        """Older ones before newer ones that lie over them."""
        for units in (self.sending, self.dirty):
            if units:
                for segments in units.values():
                    yield from segments

    def meet(self, error: NvpoolError) -> None:
        """Some of it can not be stored: the next one who asks is told, and who is waiting for it to be durable."""
        self.error = self.error or error
        self.met = error

    def was_cut(self) -> None:
        """The file was truncated: what stores had under the old cut number and nobody knew of is gone."""
        self.stored_end = 0
        self.ahead = ()
        self.find_end()

    def find_end(self) -> None:
        void = self.appended.void if self.appended is not None else ()
        self.end = max((segment.end for segment in self.segments() if segment.number not in void), default=0)
        self.end = max(self.end, self.stored_up_to)

    @property
    def stored_up_to(self) -> int:
        """End of all that stores have and the service does not know, gaps or not."""
        return max(self.stored_end, *[end for _, end in self.ahead]) if self.ahead else self.stored_end

    def has_stored(self, segment: Segment, end: int) -> None:
        """Stores have the segment, which is still here; it counts up to `end`. The file is not to be reported to end there
        while something that was written before, and makes the file longer too, is missing: others would read zeros."""
        if end > self.file.attr.size and (self.dirty or len(self.sending) > 1 or self.ahead
                                          or any(len(segments) > 1 for segments in self.sending.values())):
            self.ahead = (*self.ahead, (segment.number, end))
            self.catch_up(segment)
        else:
            self.stored_end = max(self.stored_end, end)

    def catch_up(self, stored: Segment | None = None) -> None:
        """Count what was stored ahead of others and is not any more. `stored`: a segment that is still here, and at a store."""
        size = self.file.attr.size
        missing = []
        if sum(map(len, self.sending.values())) + sum(map(len, self.dirty.values())) <= _ORDERED_MAX:
            missing = [segment for segment in self.segments() if segment is not stored and segment.end > size]
        kept = []
        for number, end in self.ahead:
            if any(segment.number < number and segment.start < end for segment in missing):
                kept.append((number, end))
            else:
                self.stored_end = max(self.stored_end, end)
        self.ahead = tuple(kept)

    @property
    def is_broken(self) -> bool:
        """Whether places that were reserved for appends have to be withdrawn."""
        return self.appended is not None and self.appended.broken is not None

    @property
    def unsettled(self) -> bool:
        """Whether the service does not know all of our writes."""
        return bool(self.wrote or self.dirty or self.sending or self.stored_end or self.reporting.taken or self.is_broken)

    @property
    def clean(self) -> bool:
        return not (self.dirty or self.sending or self.wrote or self.stored_end or self.error or self.is_broken)


def kept(data, stays: bool = False):
    """`data` in a form that stays as it is when its owner goes on: large immutable bytes themselves, and what `stays` as long
    as it is needed; or a copy."""
    if len(data) >= _KEEP_BYTES:
        if type(data) is bytes or stays:
            return data
        if type(data) is memoryview and type(data.obj) is bytes:
            return data
        return bytes(data)
    return bytearray(data)


def cut_out(segment: Segment, first: int, last: int) -> bytes:
    found = []
    place = 0
    for part in segment.parts:
        after = place + len(part)
        if after > first and place < last:
            found.append(bytes(memoryview(part)[max(0, first - place):last - place]))
        place = after
    return found[0] if len(found) == 1 else b"".join(found)


def prepared(segment: Segment) -> tuple[list, bytes]:
    """The parts of a segment as they are to be sent, and the checksums of the pieces that block borders make of them."""
    if len(segment.parts) == 1:
        return segment.parts, piece_checksums(segment.parts[0], segment.start)
    place = segment.start
    for part in segment.parts[:-1]:
        if (place + len(part)) % BLOCK_BYTES:
            whole = segment.bytes()
            return [whole], piece_checksums(whole, segment.start)
        place += len(part)
    place = segment.start
    checksums = []
    for part in segment.parts:
        checksums.append(piece_checksums(part, place))
        place += len(part)
    return segment.parts, b"".join(checksums)


def copies(written: WrittenFile, start: int, end: int) -> list[tuple[int, int, bytes]]:
    """Of what is here of [start, end), in the order in which they are to be laid over what the stores have."""
    found = []
    bits = written.unit_bits
    units = range(start >> bits, (end - 1 >> bits) + 1)
    for held in (written.sending, written.dirty):
        if not held:
            continue
        for unit in units if len(units) <= len(held) else [u for u in held if u in units]:
            for segment in held.get(unit, ()):
                a, b = max(start, segment.start), min(end, segment.end)
                if a < b:
                    found.append((a, b, cut_out(segment, a - segment.start, b - segment.start)))
    return found
