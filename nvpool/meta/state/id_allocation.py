"""Allocation of numbers that are never given twice: inode counters and session numbers.

One counter serves all partitions of a shard (an inode number is partition and counter). So a reservation
costs one record, whatever the number of partitions. A shard that receives a migrated partition raises its
counter above the source's bound. Numbers are given only below a bound that is synced; a start continues at
the bound. Used by `meta/server/service`.
"""

from __future__ import annotations

import asyncio

from nvpool.core.ids import COUNTER_MASK
from nvpool.kv.api import Kv
from nvpool.meta.state import records

RESERVED = 65_536
"""Numbers reserved by one sync; a start loses as many of 2**51."""


class Numbers:
    """The synced bounds. The next inode counter itself is in the View, where decisions use it."""

    def __init__(self, kv: Kv) -> None:
        self._kv = kv
        self.bounds = records.IssuedNumbers(0, 0)
        """Upper bounds of the numbers that may be given; they are synced."""
        self.next_session = 0
        self.reserving: asyncio.Task | None = None

    async def begin(self) -> int:
        """Reserve numbers from the stored bounds on; return the first inode counter to give."""
        raw = self._kv.get(records.BOUNDS_KEY)
        stored = records.decode_bounds(raw) if raw is not None else records.IssuedNumbers(2, 1)
        self.next_session = stored.session
        await self._raise(stored)
        return stored.inode

    async def _raise(self, beginning: records.IssuedNumbers) -> None:
        bounds = records.IssuedNumbers(
            min(beginning.inode + RESERVED, COUNTER_MASK), beginning.session + RESERVED
        )
        while self._kv.full:
            await self._kv.room()
        sequence = self._kv.apply([(records.BOUNDS_KEY, records.encode_bounds(bounds))], reclaims=True)
        await self._kv.sync(sequence)
        self.bounds = bounds

    def low(self, next_inode: int) -> bool:
        """Whether more numbers should be reserved soon."""
        return (
            self.bounds.inode - next_inode < RESERVED // 2
            or self.bounds.session - self.next_session < RESERVED // 2
        )

    async def more(self) -> None:
        """Return when the bounds are higher by RESERVED. All concurrent callers share one sync."""
        if self.reserving is None or self.reserving.done():
            self.reserving = asyncio.ensure_future(self._raise(self.bounds))
            # each waiting caller gets it
            self.reserving.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self.reserving)

    async def raise_above(self, counter: int) -> None:
        """Raise the stored bound above this counter and above all reserved numbers.

        Needed after damage, and when partitions come from a shard that gave numbers up to this counter.
        """
        await self._raise(records.IssuedNumbers(max(counter + 1, self.bounds.inode), self.next_session))
