"""Numbers that are never given twice: inode counters and sessions.

One counter serves all partitions of a shard (an inode number is partition and counter), so a reservation costs one record
whatever the number of partitions; a shard that takes a partition over raises its counter above the giver's bound.
Numbers are given only below a bound that is synced; a start begins at the bound. Used by `meta/server/service`.
"""

from __future__ import annotations

import asyncio

from nvpool.core.ids import COUNTER_MASK
from nvpool.kv.api import Kv
from nvpool.meta.state import records

RESERVED = 65_536
"""One sync for so many births; a start loses as many of 2**51 numbers."""


class Numbers:
    """The synced bounds. The next inode counter itself is in the View, where decisions see it."""

    def __init__(self, kv: Kv) -> None:
        self._kv = kv
        self.bounds = records.Bounds(0, 0)
        """What may be used: synced."""
        self.next_session = 0
        self._reserving: asyncio.Task | None = None

    async def begin(self) -> int:
        """Reserve from the stored bounds on; the first inode counter to give."""
        raw = self._kv.get(records.BOUNDS_KEY)
        stored = records.decode_bounds(raw) if raw is not None else records.Bounds(2, 1)
        self.next_session = stored.session
        await self._raise(stored)
        return stored.inode

    async def _raise(self, beginning: records.Bounds) -> None:
        bounds = records.Bounds(min(beginning.inode + RESERVED, COUNTER_MASK), beginning.session + RESERVED)
        while self._kv.full:
            await self._kv.room()
        sequence = self._kv.apply([(records.BOUNDS_KEY, records.encode_bounds(bounds))], reclaims=True)
        await self._kv.sync(sequence)
        self.bounds = bounds

    def low(self, next_inode: int) -> bool:
        """Whether more should be reserved before long."""
        return self.bounds.inode - next_inode < RESERVED // 2 or self.bounds.session - self.next_session < RESERVED // 2

    async def more(self) -> None:
        """Return when the bounds are higher by RESERVED. All who wait share one sync."""
        if self._reserving is None or self._reserving.done():
            self._reserving = asyncio.ensure_future(self._raise(self.bounds))
            self._reserving.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waits meets it
        await asyncio.shield(self._reserving)

    async def raise_above(self, counter: int) -> None:
        """After damage, and when partitions come from a shard that gave numbers up to it: make the stored bound higher than
        this counter and than all that was reserved."""
        await self._raise(records.Bounds(max(counter + 1, self.bounds.inode), self.next_session))
