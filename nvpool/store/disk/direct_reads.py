"""Direct reads, which bypass the page cache, for clients that cache data themselves.

The kernel of a mount has its own page cache. Data read once should not evict data from our page cache that
others read again. So larger reads of such clients bypass our page cache. Data that is read again a short time
later, in the same pieces, goes through the cache: then another node probably does the same work. The
algorithm is 2Q (T. Johnson, D. Shasha, VLDB 1994). The user is `device`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from nvpool.blockio.api import Outcome, WaitingReader
from nvpool.blockio.reader import DIRECT_READ_BYTES, cached_pages, open_direct, open_exact
from nvpool.core.clock import SYSTEM_CLOCK, Clock

AGAIN_S = 20.0
"""Lifetime of a remembered read.

Reads this recent are remembered for sure, and reads up to twice as old perhaps.
"""
PLACES_MAX = 32768
"""Size of each of the two sets of remembered reads: 64 GiB of reads of 1 MiB, some 6 MB of memory."""


class DirectReads:
    def __init__(self, fd: int, reader: WaitingReader, clock: Clock = SYSTEM_CLOCK) -> None:
        """Create direct reads. `fd` reads through the page cache; `fd` and `reader` remain the caller's."""
        self._fd, self._reader = fd, reader
        self.direct_fd, self.exact_fd = open_direct(fd), open_exact(fd)
        self.on = self.direct_fd >= 0 and self.exact_fd >= 0
        """Whether the drive accepts direct reads, as far as is known."""
        self._now_s = clock.boottime_s
        self.young: set[int] = set()
        self.old: set[int] = set()
        """Reads of this period and of the one before; such a read goes through the page cache if repeated."""
        self._turn_s = 0.0

    def wants(self, offsets: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether to bypass the page cache: all reads are large, and less than half of their data is cached.

        Such reads should not be tried on the page cache first, since a try brings the data into the cache.
        """
        return (
            self.on
            and min(lengths) >= DIRECT_READ_BYTES
            and sum(map(cached_pages, [self._fd] * len(offsets), offsets, lengths)) << 13 < sum(lengths)
        )

    def descriptor_for(self, offset: int, length: int) -> int:
        """Return the descriptor for one read for which `wants` is true, else -1.

        The caller's memory must begin at a page. If the read fails, call `refused` and use `begin`.
        """
        if (
            not self.on
            or length < DIRECT_READ_BYTES
            or cached_pages(self._fd, offset, length) << 13 >= length
        ):
            return -1
        return self.exact_fd if self._known((offset | length >> 12,)) else self.direct_fd

    def refused(self) -> None:
        """Switch direct reads off: the drive needs larger blocks. A broken drive shows on the next read."""
        self.on = False

    def begin(
        self, offsets, lengths, positions, into: memoryview, on_done: Callable[[Outcome], None]
    ) -> None:
        """Start reads like WaitingReader.begin; bypass the page cache for data that was not read recently.

        `into` begins at a page, and the positions are whole blocks. If a direct read fails, the reads are
        repeated through the page cache.
        """

        def came(outcome: Outcome) -> None:
            if any(outcome):
                self.refused()
                self._reader.begin(self._fd, offsets, lengths, positions, into, on_done)
            else:
                on_done(outcome)

        if self._known([offset | length >> 12 for offset, length in zip(offsets, lengths, strict=True)]):
            self._reader.begin(self.exact_fd, offsets, lengths, positions, into, on_done)
        else:
            self._reader.begin(self.direct_fd, offsets, lengths, positions, into, came)

    def _known(self, reads: Sequence[int]) -> bool:
        """Whether one of these reads was made recently; records all of them.

        (Offset | blocks; less than 16 MiB.)
        """
        now_s = self._now_s()
        if now_s >= self._turn_s or len(self.young) >= PLACES_MAX:
            self.old = self.young if now_s < self._turn_s + AGAIN_S else set()
            self.young = set()
            self._turn_s = now_s + AGAIN_S
        known = any(read in self.young or read in self.old for read in reads)
        self.young.update(reads)
        return known

    def close(self) -> None:
        """Close the descriptors. Call when the reader has no reads in progress."""
        for descriptor in (self.direct_fd, self.exact_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.direct_fd, self.exact_fd, self.on = -1, -1, False
