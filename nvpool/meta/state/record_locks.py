"""Record locks of cross-shard transactions: reads of a locked record wait for the transaction's outcome.

Locks are stored as records, so they outlive the process; look-ups use memory. As long as nothing is locked,
the view reads directly from the engine. Used by `transactions/participant` and, for the turn at the root's
own shard, by `transactions/coordinator`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol, TypeVar

from nvpool.core.errors import Unavailable
from nvpool.core.ids import partition_of
from nvpool.meta.state.transaction import View, WaitFirst
from nvpool.meta.state.transaction_records import TransactionId, partition_of_held

HELD_S = 5.0
"""Limit for a request that waits for a locked record: a lock takes milliseconds, or a shard is away. The
client retries."""

T = TypeVar("T")


class Hold:
    """Lock of one cross-shard transaction on a set of records."""

    __slots__ = ("span", "order", "keys", "done", "since_s", "durable")

    def __init__(self, span: TransactionId, order: int, since_s: float) -> None:
        self.span = span
        self.order = order
        self.keys: dict[bytes, None] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.since_s = since_s
        self.durable = False
        """Whether a stored record of the lock exists."""

    def gives_way_to(self, order: int, span: TransactionId) -> bool:
        """Whether the transaction with this order is older: it may wait for ours, ours never waits for it."""
        return (order, span) < (self.order, self.span)


class LockedRecord(WaitFirst):
    """A record is locked. `wait` raises Unavailable after HELD_S."""

    def __init__(self, hold: Hold) -> None:
        super().__init__(partial(until_free, hold))
        self.hold = hold


async def until_free(hold: Hold) -> None:
    try:
        async with asyncio.timeout(HELD_S):
            await asyncio.shield(hold.done)
    except TimeoutError:
        raise Unavailable(
            f"a change that shard {hold.span.shard} decides holds what was asked for", retry_after_s=0.2
        ) from None


async def when_free(read: Callable[[], T]) -> T:
    """Call `read` again until it meets no locked record; return its result. Unavailable after HELD_S."""
    while True:
        try:
            return read()
        except LockedRecord as held:
            await held.wait()


class RecordReads(Protocol):
    """Read interface of requests: a Kv that checks whether the data is ours and open
    (`meta/migration/ownership`)."""

    get: Callable[[bytes], bytes | None]
    get_many: Callable[[list[bytes]], list[bytes | None]]
    scan: Callable[[bytes, bytes, int], list[tuple[bytes, bytes]]]
    changed: list[Callable[[], None]]
    """Listeners that are called after one of these functions was replaced."""

    def check_partition(self, partition: int) -> None:
        """Held, WrongShard, Unavailable: as for a read of a record of the partition."""

    def closed(self, partition: int) -> Hold | None:
        """Lock of the whole partition, if any."""


class Holds:
    """All record locks of a shard."""

    def __init__(self, kv: RecordReads, view: View, clock: Callable[[], float]) -> None:
        """`kv` serves reads of records that are not locked. Its changes are followed."""
        self._kv = kv
        self._view = view
        self._now_s = clock
        self.by_span: dict[TransactionId, Hold] = {}
        self._by_key: dict[bytes, Hold] = {}
        kv.changed.append(self.look_through)

    def of(self, key: bytes) -> Hold | None:
        return self._by_key.get(key)

    def take(self, span: TransactionId, order: int, keys: list[bytes]) -> Hold:
        """Lock these records too. No other transaction may have locked any of them."""
        hold = self.by_span.get(span)
        if hold is None:
            hold = self.by_span[span] = Hold(span, order, self._now_s())
        for key in keys:
            self._by_key[key] = hold
            hold.keys[key] = None
        self.look_through()
        return hold

    def release(self, span: TransactionId) -> None:
        """Release all locks of the transaction; requests that wait for them continue."""
        hold = self.by_span.pop(span, None)
        if hold is None:
            return
        for key in hold.keys:
            del self._by_key[key]
        self.look_through()
        if not hold.done.done():
            hold.done.set_result(None)

    async def quiet(self, partitions: Collection[int]) -> None:
        """Return when nothing in these closed partitions is locked or being truncated at the targets."""
        while True:
            waits = [
                hold.done
                for hold in self.by_span.values()
                if any(partition_of_held(key) in partitions for key in hold.keys)
            ]
            waits += [done for inode, done in self._view.cutting.items() if partition_of(inode) in partitions]
            if not waits:
                return
            await asyncio.wait(waits)

    def look_through(self) -> None:
        """Route the view's reads through this table if anything is locked, else directly to the engine."""
        view, kv = self._view, self._kv
        if self._by_key:
            view.get, view.get_many, view.scan = self._get, self._get_many, self._scan
        else:
            view.get, view.get_many, view.scan = kv.get, kv.get_many, kv.scan

    def _get(self, key: bytes) -> bytes | None:
        if key in self._by_key:
            raise LockedRecord(self._by_key[key])
        return self._kv.get(key)

    def _get_many(self, keys: list[bytes]) -> list[bytes | None]:
        for key in keys:
            if key in self._by_key:
                raise LockedRecord(self._by_key[key])
        return self._kv.get_many(keys)

    def _scan(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        for key, hold in self._by_key.items():
            if first <= key < end:
                raise LockedRecord(hold)
        return self._kv.scan(first, end, limit)
