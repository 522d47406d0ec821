"""Rate limit of background work: bytes per second, and half the time at most while clients wait.

The limit covers all background work of a store together. The users are `store/replication/resync`,
`store/maintenance/repair` and `store/maintenance/orphan_chunks`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.core.clock import Clock

BURST_S = 0.1
"""Unused budget older than this expires, so a pause is not followed by a burst."""
YIELD_S_MAX = 0.25


class Throttle:
    """Rate limiter. `busy` returns whether client requests wait at this store."""

    def __init__(self, bytes_per_s: float, clock: Clock, busy: Callable[[], bool]) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy = busy
        self._clock = clock
        self._next_s = 0.0

    async def take(self, byte_count: int) -> None:
        """Wait until the limit allows to move `byte_count` more bytes."""
        now_s = self._clock.boottime_s()
        begin_s = max(self._next_s, now_s - BURST_S)
        self._next_s = begin_s + byte_count / self.bytes_per_s
        if begin_s > now_s:
            await asyncio.sleep(begin_s - now_s)

    async def leave(self, worked_s: float, others_busy: bool = False) -> None:
        """Yield to waiting requests after a piece of work that took `worked_s`.

        Pauses for the same time, at most YIELD_S_MAX, if client requests wait here or `others_busy` is set.
        """
        if others_busy or self.busy():
            await asyncio.sleep(min(worked_s, YIELD_S_MAX))
