"""Dirty extents of one open inode: bytes that are not yet reported to the service.

The bookkeeping never waits and sends nothing. The writer creates and changes these objects; the open inode,
the reader and vfs read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from nvpool.client.state.metadata_cache import OpenInode
from nvpool.core.checksum import piece_checksums
from nvpool.core.errors import NvpoolError
from nvpool.core.units import BLOCK_BYTES, KIB

_UNIT_BITS_MAX = 20
JOURNAL_VIEW_MIN = 32 * KIB
"""From this size on a write of immutable bytes is not copied. Smaller writes are merged by copying."""
_KEEP_BYTES = JOURNAL_VIEW_MIN
_ORDERED_MAX = 256
"""Extents of a file up to which their order is examined. Scattered writes leave holes in any case."""


Record = tuple[int, int]
"""An increasing number, and the place of a piece in the mount state.

The mount state is memory that outlives the process.
"""


class DirtyExtent:
    """A dirty extent: the bytes [start, end) of the file, in consecutive parts.

    An extent changes only while it is dirty, never after it has been sent.
    """

    __slots__ = ("start", "end", "parts", "number", "born_s", "due", "records")

    def __init__(self, start: int, end: int, parts: list, number: int, born_s: float):
        self.records: list[Record] = []  # mount-state records of its pieces, older ones first
        self.start = start
        self.end = end
        self.parts = parts
        self.number = number
        self.born_s = born_s
        self.due = False

    def bytes(self) -> bytearray:
        """All bytes as one buffer, which remains part of the extent."""
        if len(self.parts) != 1 or type(self.parts[0]) is not bytearray:
            self.parts = [bytearray().join(self.parts)]
        return self.parts[0]


class UnfairLock:
    """A lock without fairness: a caller that finds it free takes it without a wait.

    So a waiter may have to wait again after it was woken.
    """

    __slots__ = ("taken", "waiting")

    def __init__(self) -> None:
        self.taken = False
        self.waiting: list[asyncio.Future] = []

    def take(self) -> bool:
        """Take the lock if it is free. Return whether the caller has it now and must `release` it."""
        if self.taken:
            return False
        self.taken = True
        return True

    def release(self) -> None:
        self.taken = False
        if self.waiting:
            self._wake()

    def _wake(self) -> None:
        while self.waiting:
            future = self.waiting.pop(0)
            if not future.done():
                future.set_result(None)
                return

    async def __aenter__(self) -> None:
        while self.taken:
            future = asyncio.get_running_loop().create_future()
            self.waiting.append(future)
            try:
                await future
            except BaseException:
                if not self.taken:
                    # woken and cancelled at the same time: pass the wake-up on to the next waiter
                    self._wake()
                raise
        self.taken = True

    async def __aexit__(self, *_) -> None:
        self.release()


class DirtyFile:
    """The writer's state of one open inode: its dirty extents, sizes and errors."""

    __slots__ = (
        "file",
        "unit_bits",
        "dirty",
        "sending",
        "end",
        "stored_end",
        "wrote",
        "wrote_s",
        "error",
        "changed",
        "held",
        "reporting",
        "paused",
        "stored_bytes",
        "begun",
        "entry",
        "flushing",
        "met",
        "ahead",
        "appended",
    )

    def __init__(self, file: OpenInode):
        self.file = file
        self.unit_bits = min(file.chunk_bits, _UNIT_BITS_MAX)
        self.dirty: dict[int, list[DirtyExtent]] = {}  # unit -> extents, disjoint and in order
        self.sending: dict[int, list[DirtyExtent]] = {}  # unit -> extents in flight, which share no block
        self.end = 0  # of all unreported bytes: dirty, in flight, or stored
        self.stored_end = 0  # of the bytes at stores, as far as nothing older before them is missing
        self.ahead: tuple[tuple[int, int], ...] = ()  # (number, end) of extents stored before older ones
        self.wrote = False  # written since the service last set the time
        self.wrote_s = 0.0
        self.error: NvpoolError | None = None  # not reported to any caller so far
        self.met: NvpoolError | None = None  # the last error, reported or not
        self.changed: asyncio.Future | None = None
        self.held = 0
        self.stored_bytes = 0  # since the last report: the service estimates the file's space from it
        self.reporting: UnfairLock = UnfairLock()
        self.begun = False  # something was written
        self.paused = 0  # while above 0 nothing is sent, because the file is being truncated
        self.flushing = None  # called when a send ends; see client/write/sender
        self.entry = -1  # index in the mount state
        # append state, from the first append on; see client/write/append_reservations
        self.appended: Any = None

    def segments(self) -> Iterator[DirtyExtent]:
        """All extents; older ones come before newer ones that overlap them."""
        for units in (self.sending, self.dirty):
            if units:
                for segments in units.values():
                    yield from segments

    def meet(self, error: NvpoolError) -> None:
        """Record that some bytes cannot be stored.

        The next caller that asks gets the error, and so does each fsync that waits.
        """
        self.error = self.error or error
        self.met = error

    def was_cut(self) -> None:
        """Forget the stored and unreported bytes after a truncation.

        Stores have dropped the bytes of the old truncate number.
        """
        self.stored_end = 0
        self.ahead = ()
        self.find_end()

    def find_end(self) -> None:
        """Set `end` after extents were dropped or reported."""
        found = self.stored_up_to()
        if self.sending or self.dirty:
            void = self.appended.void if self.appended is not None else ()
            for segment in self.segments():
                if segment.end > found and segment.number not in void:
                    found = segment.end
        self.end = found

    def stored_up_to(self) -> int:
        """End of all stored and unreported bytes, with gaps or without."""
        found = self.stored_end
        if self.ahead:
            for _, end in self.ahead:
                found = max(found, end)
        return found

    def has_stored(self, segment: DirtyExtent, end: int) -> None:
        """Record that stores have the extent (still listed here) up to `end`.

        The file must not be reported to end there while an older write that also extends the file is missing:
        other clients would read zeros.
        """
        if (self.dirty or self.ahead or self._has_several_sending()) and end > self.file.attr.size:
            self.ahead = (*self.ahead, (segment.number, end))
            self.catch_up(segment)
        elif end > self.stored_end:
            self.stored_end = end

    def _has_several_sending(self) -> bool:
        """Whether more than one extent is in flight."""
        count = 0
        for segments in self.sending.values():
            count += len(segments)
        return count > 1

    def catch_up(self, stored: DirtyExtent | None = None) -> None:
        """Count ends that were stored ahead of older extents and are no longer ahead.

        `stored`: an extent that is still listed here but is at a store.
        """
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
        """Whether ranges that were reserved for appends must be withdrawn."""
        return self.appended is not None and self.appended.broken is not None

    @property
    def unsettled(self) -> bool:
        """Whether the service lacks some of this client's writes."""
        return bool(
            self.wrote
            or self.dirty
            or self.sending
            or self.stored_end
            or self.reporting.taken
            or self.is_broken
        )

    @property
    def clean(self) -> bool:
        return not (
            self.dirty or self.sending or self.wrote or self.stored_end or self.error or self.is_broken
        )


def kept(data, stays: bool = False):
    """`data` in a form that does not change when its owner continues.

    Returns large immutable bytes themselves, and also data that `stays` unchanged as long as it is needed;
    copies everything else.
    """
    if len(data) >= _KEEP_BYTES:
        if type(data) is bytes or stays:
            return data
        if type(data) is memoryview and type(data.obj) is bytes:
            return data
        return bytes(data)
    return bytearray(data)


def cut_out(segment: DirtyExtent, first: int, last: int) -> bytes:
    found = []
    place = 0
    for part in segment.parts:
        after = place + len(part)
        if after > first and place < last:
            found.append(bytes(memoryview(part)[max(0, first - place) : last - place]))
        place = after
    return found[0] if len(found) == 1 else b"".join(found)


def prepared(segment: DirtyExtent) -> tuple[list, bytes]:
    """The parts of an extent to send, and the checksums of its pieces between block borders."""
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


def copies(written: DirtyFile, start: int, end: int) -> list[tuple[int, int, bytes]]:
    """Copies of the local bytes in [start, end), as (start, end, bytes).

    They are in the order in which they must overlay the stored bytes.
    """
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
