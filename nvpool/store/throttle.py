"""How fast background work may go: so many bytes a second over all of it, and not more than half the time while others wait.

Called by store/replication/resync, store/maintenance/repair and store/maintenance/orphan_chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.core.clock import Clock

BURST_S = 0.1
"""What was not used for longer is lost: a pause is not followed by a flood."""
YIELD_S_MAX = 0.25


class Throttle:
    """`busy` says whether requests of clients wait here."""

    def __init__(self, bytes_per_s: float, clock: Clock, busy: Callable[[], bool]) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy = busy
        self._clock = clock
        self._next_s = 0.0

    async def take(self, byte_count: int) -> None:
        """Wait until so many bytes more may be moved."""
        now_s = self._clock.boottime_s()
        begin_s = max(self._next_s, now_s - BURST_S)
        self._next_s = begin_s + byte_count / self.bytes_per_s
        if begin_s > now_s:
            await asyncio.sleep(begin_s - now_s)

    async def leave(self, worked_s: float, others_busy: bool = False) -> None:
        """After so long a piece of work: leave as long to others, where some wait."""
        if others_busy or self.busy():
            await asyncio.sleep(min(worked_s, YIELD_S_MAX))
