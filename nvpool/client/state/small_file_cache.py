"""Contents of small files, each read as a whole: one trip to a store whatever its reader does next, none for the next opens.

Kept by inode and `change`, the number that grows when a writer anywhere has closed: bytes that were read under a number hold
all that was closed before it was given. Handed out while a lease says that the number is still the newest, or for as long as
bytes read ahead are; never of files that are being written here. Bounded in bytes; what was not used for longest goes first.
Called by reader.
"""

from __future__ import annotations

from collections import OrderedDict

from nvpool.client.state.leases import Leases
from nvpool.core.clock import Clock
from nvpool.core.units import KIB

SMALL_BYTES = 64 * KIB
"""The smallest chunk, so that a small file is one read. Its latency is less than twice that of 4 KiB."""
_ENTRY_BYTES = 300
LIFE_S = 3.0
"""Without a lease, for who keeps a file open. Close-to-open would allow more, people who follow a log would not."""


class Contents:
    def __init__(self, bytes_max: int, leases: Leases, clock: Clock) -> None:
        self._bytes_max = bytes_max
        self._leases = leases
        self._clock = clock
        self._kept: OrderedDict[int, tuple[int, bytes, float]] = OrderedDict()   # inode -> (change, content, when it was read)
        self._bytes = 0
        self.counters = {"small_hits": 0, "small_reads": 0}

    def __contains__(self, inode: int) -> bool:
        return inode in self._kept

    def get(self, inode: int, change: int) -> bytes | None:
        kept = self._kept.get(inode)
        if kept is None or kept[0] != change:
            return None
        if self._leases.held(inode) is None and kept[2] + LIFE_S <= self._clock.boottime_s():
            return None
        self._kept.move_to_end(inode)
        self.counters["small_hits"] += 1
        return kept[1]

    def put(self, inode: int, change: int, content: bytes, read_s: float) -> None:
        """`read_s`: before it was asked for."""
        self.forget(inode)
        self._kept[inode] = change, content, read_s
        self._bytes += len(content) + _ENTRY_BYTES
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._kept.popitem(last=False)[1][1]) + _ENTRY_BYTES

    def forget_all(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def forget(self, inode: int) -> None:
        kept = self._kept.pop(inode, None)
        if kept is not None:
            self._bytes -= len(kept[1]) + _ENTRY_BYTES
