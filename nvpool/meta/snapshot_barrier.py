"""Snapshot barrier: one shard's part in a snapshot that is consistent over all shards of the pool.

Checks (fsck) and dumps use the barrier, so that the snapshots of all shards show the same state. It has three
stages:

    quiet   this shard commits no further cross-shard transaction; the reply comes when all other shards have
            been notified of the transactions that are committed already
    take    sent when all shards are quiet: the shard takes its snapshot, and makes no change from here on
    end     sent when all shards have their snapshot: changes continue; the reply says whether no change was
            made meanwhile

From the last `take` to the first `end` the pool does not change, and the snapshots show exactly this state. A
cross-shard transaction is in them completely or not at all. If a client saw change A before it made change B,
the snapshots never show B without A. A request that was decided before the barrier waits and is decided
again; no request is refused.

A shard waits at most MOMENT_S and then continues on its own. In that case `end` reports that the state has
not `stood`, and the caller starts again. If a partition is being migrated at that time, the shards themselves
say who owns it: each reports its own partitions, and together they must name each partition exactly once, or
the caller starts again.

Owned by `meta/server/service`; driven by `sdk/admin/snapshot_barrier`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nvpool.core.errors import Busy, InvalidRequest

QUIET_S = 1.0
"""Limit for notifying other shards of all committed transactions: this takes milliseconds unless a shard is
unreachable."""
MOMENT_S = 2.0
"""Limit for the whole barrier, counted from the first request: several round trips."""
_NO_NUMBER = "a moment has a number, which is not 0 and is drawn when it begins"


class SnapshotBarrier:
    """Snapshot barrier of one shard; at most one is in progress at a time."""

    def __init__(self, wait_settled: Callable[[], Awaitable[None]]) -> None:
        """`wait_settled` returns when no committed transaction is left of which another shard must still be
        notified."""
        self._wait_settled = wait_settled
        self._id = 0
        self._over: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.spans_wait = False
        """Whether cross-shard transactions must wait before they are committed."""
        self.changes_wait = False
        """Whether all changes must wait."""

    async def quiet(self, number: int) -> None:
        """Stage quiet: stop committing cross-shard transactions.

        On return the other shards have been notified of all committed transactions.

        Busy: another barrier is in progress, or the other shards cannot be notified now. InvalidRequest:
        `number` is 0.
        """
        if not number:
            raise InvalidRequest(_NO_NUMBER)
        if self._id not in (0, number):
            raise Busy("another check or dump is beginning", retry_after_s=0.05)
        if not self._id:
            loop = asyncio.get_running_loop()
            self._id, self._over = number, loop.create_future()
            self._timer = loop.call_later(MOMENT_S, self.end, number)
            self.spans_wait = True
        try:
            async with asyncio.timeout(QUIET_S):
                await self._wait_settled()
        except TimeoutError:
            self.end(number)
            raise Busy("changes over several shards do not come to their end", retry_after_s=0.2) from None
        self._check(number)

    def take(self, number: int) -> None:
        """Stage take: stop all changes.

        Busy: the barrier was not started, or timed out, and changes may have been made since. InvalidRequest:
        `number` is 0.
        """
        if not number:  # 0 means "no barrier": it would match an idle shard, and nothing would end the stage
            raise InvalidRequest(_NO_NUMBER)
        self._check(number)
        self.changes_wait = True  # ends at the latest when the timer that `quiet` started fires

    def _check(self, number: int) -> None:
        if self._id != number:
            raise Busy("the moment has passed", retry_after_s=0.05)

    def end(self, number: int) -> bool:
        """Stage end: let changes continue. Return whether this shard made no change from `take` until now."""
        if not number or self._id != number:
            return False
        stood = self.changes_wait
        self._id, self.spans_wait, self.changes_wait = 0, False, False
        self._timer.cancel()
        self._over.set_result(None)
        return stood

    async def over(self) -> None:
        """Return when the requests that wait for the barrier may continue."""
        if self._id:
            await asyncio.shield(self._over)
