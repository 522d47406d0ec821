"""Latency of the kernel's requests, by operation.

`fuse/kernel/connection` records the times. Many requests are answered in the loop iteration that reads them;
such a run is timed as a whole, with two readings of the clock, and each of its requests counts with the mean.
A request that has to wait is timed by itself.
"""

from __future__ import annotations

from nvpool.fuse.protocol.constants import Op
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.metrics.registry import Times


class FuseTimes:
    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times: list[Times | None] = [None] * 256

    def add(self, opcode: int, seconds: float, count: int = 1) -> None:
        """Record that `count` requests of one operation took `seconds` together."""
        times = self.times[opcode] or self._new(opcode)
        times.counts[int(seconds * 1e6 / count).bit_length()] += count
        times.sum_s += seconds

    def _new(self, opcode: int) -> Times:
        times = self.times[opcode] = Times()
        return times

    def measure(self, page: Page) -> None:
        names = {int(op): op.name.lower() for op in Op}
        for opcode, times in enumerate(self.times):
            if times is not None:
                page.times(metrics.FUSE_SECONDS, times, op=names.get(opcode, "unknown"))
