"""Allocator of unique numbers for inodes, sessions and versions; no number is issued twice.

A number is issued only if it lies below a bound that is already synced. After a restart the allocator
continues at the bound, so a number issued before, used or not, never returns, even after a power loss. The
record stores the bound, u64 little-endian, under a key that the owner chooses. The bound grows by 65,536 at a
time, so that many numbers cost one sync, which begins when half of them are left. Used by meta and cluster,
on the thread that owns the Kv.
"""

from __future__ import annotations

import asyncio

from nvpool.core.errors import Busy, CorruptRecord, InvalidRequest
from nvpool.kv.api import Kv

NUMBERS_PER_BATCH = 65_536


class NumberBounds:
    """One sequence of numbers: call `open`, then `take`."""

    def __init__(self, kv: Kv, key: bytes, first: int = 1, batch_size: int = NUMBERS_PER_BATCH) -> None:
        if batch_size < 2:
            raise InvalidRequest(
                "numbers are reserved by two at least, since the second half is given while the next is made"
            )
        self._kv = kv
        self._key = key
        self._first = first
        self._batch_size = batch_size
        self._next = self._bound = 0
        self._reserving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start at the stored bound and reserve the first numbers. Errors as in `more`; may be repeated."""
        raw = self._kv.get(self._key)
        if raw is not None and len(raw) != 8:
            raise CorruptRecord(f"the bound of numbers {self._key.hex()} is {len(raw)} bytes long")
        self._next = self._bound = self._first if raw is None else int.from_bytes(raw, "little")
        await self.more()

    @property
    def bound(self) -> int:
        """Exclusive upper bound of all numbers ever issued, here or before a restart."""
        return self._bound

    def take(self) -> int:
        """Return a number that was never issued before; Busy if none is left: await `more`, then repeat."""
        number = self._next
        if number >= self._bound:
            raise Busy("the next numbers are being reserved")
        self._next = number + 1
        if self._bound - number < self._batch_size // 2 and self._reserving is None:
            self._begin()
        return number

    async def more(self) -> None:
        """Return when at least half of a reservation is left.

        NoSpace, Fenced, Busy: the Kv refused the reservation; repeat later.
        """
        while self._bound - self._next < self._batch_size // 2:
            task = self._reserving or self._begin()
            await asyncio.wait((task,))
            if (error := task.exception()) is not None:
                raise error

    def _begin(self) -> asyncio.Task[None]:
        self._reserving = asyncio.get_running_loop().create_task(self._reserve())
        self._reserving.add_done_callback(self._ended)
        return self._reserving

    async def _reserve(self) -> None:
        bound = self._bound + self._batch_size
        await self._kv.room()
        # The change reclaims no space. But without numbers nothing could be removed: removals need sessions
        # too.
        sequence = self._kv.apply([(self._key, bound.to_bytes(8, "little"))], reclaims=True)
        await self._kv.sync(sequence)
        self._bound = bound

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._reserving = None
        if not task.cancelled():
            # Retrieved, so that asyncio does not log it; a caller without numbers tries again and gets the
            # error.
            task.exception()

    async def close(self) -> None:
        """Wait for a running reservation. May be called twice."""
        if self._reserving is not None:
            await asyncio.wait((self._reserving,))
