"""Cache of the contents of small files, each read as a whole.

A small file costs one request to a store whatever its reader does next, and none when it is opened again. The
key is the inode and its `change` number, which grows when a writer anywhere closes the file: bytes read under
a number include all writes that were closed before the service gave out that number. Contents are used while
a lease proves that the number is the newest, or as long as read-ahead bytes would be; never for files that
are being written here. Bounded in bytes, with least-recently-used eviction. Used by the reader.
"""

from __future__ import annotations

from collections import OrderedDict

from nvpool.client.state.leases import Leases
from nvpool.core.clock import Clock
from nvpool.core.units import KIB

SMALL_BYTES = 64 * KIB
"""The smallest chunk size, so that a small file is one read. Its latency is less than twice that of 4 KiB."""
_ENTRY_BYTES = 300
LIFE_S = 3.0
"""Life of contents without a lease, for readers that keep a file open.

Close-to-open consistency would allow longer, but people who follow a log would notice.
"""


class Contents:
    """The contents of small files, by inode."""

    def __init__(self, bytes_max: int, leases: Leases, clock: Clock) -> None:
        self.bytes_max = bytes_max
        self._leases = leases
        self._clock = clock
        # inode -> (change, content, time of the read)
        self.kept: OrderedDict[int, tuple[int, bytes, float]] = OrderedDict()
        self.byte_count = 0
        self.counters = {"small_hits": 0, "small_reads": 0}

    def __contains__(self, inode: int) -> bool:
        return inode in self.kept

    def get(self, inode: int, change: int) -> bytes | None:
        kept = self.kept.get(inode)
        if kept is None or kept[0] != change:
            return None
        if self._leases.held(inode) is None and kept[2] + LIFE_S <= self._clock.boottime_s():
            return None
        self.kept.move_to_end(inode)
        self.counters["small_hits"] += 1
        return kept[1]

    def put(self, inode: int, change: int, content: bytes, read_s: float) -> None:
        """Cache the content. `read_s`: a time before the read was sent."""
        self.forget(inode)
        self.kept[inode] = change, content, read_s
        self.byte_count += len(content) + _ENTRY_BYTES
        while self.byte_count > self.bytes_max:
            self.byte_count -= len(self.kept.popitem(last=False)[1][1]) + _ENTRY_BYTES

    def forget_all(self) -> None:
        self.kept.clear()
        self.byte_count = 0

    def forget(self, inode: int) -> None:
        kept = self.kept.pop(inode, None)
        if kept is not None:
            self.byte_count -= len(kept[1]) + _ENTRY_BYTES
