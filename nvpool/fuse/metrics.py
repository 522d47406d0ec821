"""How many requests of the kernel took how long, by operation. Counted by `fuse/kernel/connection`, told to whoever measures.

Requests that are answered where they are read come many in a turn: the mean of such a run counts for each of them, for two
looks at the clock together. What has to wait is timed by itself.
"""

from __future__ import annotations

from nvpool.fuse.protocol.constants import Op
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.metrics.registry import Times


class Spent:
    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times: list[Times | None] = [None] * 256

    def add(self, opcode: int, seconds: float, count: int = 1) -> None:
        """`count` requests of one operation took so long together."""
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
