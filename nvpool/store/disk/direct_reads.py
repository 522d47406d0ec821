"""Reads past the page cache of the drive, for clients that keep what they read by themselves.

The kernel of a mount has a cache of its own, and what is read once need not push out of ours what others come back to: so
larger reads of such clients leave it alone. What is read again a short time after, in the same pieces, is brought in: another
node does the same work (2Q: T. Johnson, D. Shasha, VLDB 1994). Called by device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from nvpool.blockio.api import Outcome, WaitingReader
from nvpool.blockio.reader import DIRECT_READ_BYTES, cached_pages, open_direct, open_exact
from nvpool.core.clock import SYSTEM_CLOCK, Clock

AGAIN_S = 20.0
"""What was read so short a time ago is known, and what was up to twice as long ago perhaps."""
PLACES_MAX = 32768
"""Remembered twice: 64 GiB of reads of 1 MiB, some 6 MB."""


class DirectReads:
    def __init__(self, fd: int, reader: WaitingReader, clock: Clock = SYSTEM_CLOCK) -> None:
        """`fd` is the file through the page cache; it and the reader stay the caller's."""
        self._fd, self._reader = fd, reader
        self._direct, self._exact = open_direct(fd), open_exact(fd)
        self._on = self._direct >= 0 and self._exact >= 0
        self._now_s = clock.boottime_s
        self._new: set[int] = set()
        self._old: set[int] = set()
        self._turn_s = 0.0

    def wants(self, offsets: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether these had better not be looked for by reading, which would bring them into the cache: all are large, and less
        than half of them is there."""
        return (self._on and min(lengths) >= DIRECT_READ_BYTES
                and sum(map(cached_pages, [self._fd] * len(offsets), offsets, lengths)) << 13 < sum(lengths))

    def descriptor_for(self, offset: int, length: int) -> int:
        """For one read that `wants` would say yes to: by which it is to be read, into memory that begins at a page. Else -1.
        What can not be read so is to be told by `refused`, and read by `begin`."""
        if not self._on or length < DIRECT_READ_BYTES or cached_pages(self._fd, offset, length) << 13 >= length:
            return -1
        return self._exact if self._known((offset | length >> 12,)) else self._direct

    def refused(self) -> None:
        """A drive that wants larger blocks; and if it is broken, the next answer says so."""
        self._on = False

    def begin(self, offsets, lengths, positions, into: memoryview, on_done: Callable[[Outcome], None]) -> None:
        """As WaitingReader.begin, where `into` begins at a page and the positions are whole blocks: what was not read a short
        time ago, past the cache. What can not be read so is read as always."""

        def came(outcome: Outcome) -> None:
            if any(outcome):
                self.refused()
                self._reader.begin(self._fd, offsets, lengths, positions, into, on_done)
            else:
                on_done(outcome)

        if self._known([offset | length >> 12 for offset, length in zip(offsets, lengths, strict=True)]):
            self._reader.begin(self._exact, offsets, lengths, positions, into, on_done)
        else:
            self._reader.begin(self._direct, offsets, lengths, positions, into, came)

    def _known(self, reads: Sequence[int]) -> bool:
        """Whether one of them was read a short time ago; from now on all were. (Offset | blocks; less than 16 MiB.)"""
        now_s = self._now_s()
        if now_s >= self._turn_s or len(self._new) >= PLACES_MAX:
            self._old = self._new if now_s < self._turn_s + AGAIN_S else set()
            self._new = set()
            self._turn_s = now_s + AGAIN_S
        known = any(read in self._new or read in self._old for read in reads)
        self._new.update(reads)
        return known

    def close(self) -> None:
        """When the reader has nothing under way any more."""
        for descriptor in (self._direct, self._exact):
            if descriptor >= 0:
                os.close(descriptor)
        self._direct, self._exact, self._on = -1, -1, False
