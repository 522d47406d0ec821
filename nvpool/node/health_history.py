"""Health history of a supervisor: start times of problems, and drains without progress.

For `nvpool status` and the metrics. `HealthWatch.run` checks the map and, while a drive is drained, asks the
stores how much they have copied or removed. It changes nothing in the pool. Used by node/status and
node/supervisor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import NvpoolError
from nvpool.poolmap.health_checks import HealthProblem, with_since
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.placement import beside

LOOK_S = 5.0
STALLED_S = 60.0
"""Time after which a drain counts as stalled.

For this time no chain left the drive, no byte was copied and, once all chains have left, no byte was
removed."""

Mark = tuple[int, int]
"""State of a drain: chains and shards that must leave, and bytes copied anywhere in the pool.

When none must leave, the second number is the bytes that are still on the drive."""


def draining(pool_map: PoolMap) -> dict[int, int]:
    """Drive -> chains and shards that must leave it, for drives under a drain.

    Includes drives whose drain is complete."""
    drives = {
        target.id: target.drive
        for target in pool_map.targets
        if target.desired_state in ("drain", "remove") and target.state != "gone"
    }
    if not drives:
        return {}
    left = {drive: len(beside(pool_map, drive)) for drive in drives.values()}
    for table in pool_map.tables:
        for chain in table.chains:
            for target in {*chain.targets, *chain.joining, *chain.goal}:
                if target in drives:
                    left[drives[target]] += 1
    return left


class HealthWatch:
    def __init__(
        self,
        pool_map: Callable[[], PoolMap],
        stores: Callable[[], Awaitable[Iterable[Mapping]]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`stores` returns the status of the targets (node/status)."""
        self._pool_map = pool_map
        self._stores = stores
        self._clock = clock
        self._marks: dict[int, tuple[Mark, float]] = {}
        """Drive -> its last state, and since when that state is the same."""
        self._known: dict[tuple, int] = {}
        """Key of a problem -> its start, wall clock in ms."""
        self._facts: dict[tuple, int] = {}
        """Start of each fact in the maps seen here, wall clock in ms.

        A fact is a target that is down, or a (shard, member) without all records."""

    async def run(self) -> None:
        """Check periodically, until cancelled."""
        while True:
            try:
                await self.run_once()
            except NvpoolError:
                pass  # the next round asks the stores again
            await asyncio.sleep(LOOK_S)

    async def run_once(self) -> None:
        self._note_facts()
        left = draining(self._pool_map())
        stores = list(await self._stores()) if left else []
        copied = int(sum(store["counters"].get("resync_bytes_copied", 0.0) for store in stores))
        used = {store["drive"]: store["used_bytes"] for store in stores}
        now_s, marks = self._clock.boottime_s(), {}
        for drive, count in left.items():
            amount = copied if count else used.get(drive)
            if count or amount:  # else the drive is empty, or its store does not answer
                before, since_s = self._marks.get(drive, ((), now_s))
                marks[drive] = (count, amount), since_s if before == (count, amount) else now_s
        self._marks = marks

    def _note_facts(self) -> None:
        pool_map, now_ms = self._pool_map(), self._clock.wall_ns() // 1_000_000
        facts = [(target.id,) for target in pool_map.targets if target.state == "down"]
        facts += [
            (shard.id, standby.member)
            for shard in pool_map.shards
            for standby in shard.standbys
            if standby.state == "syncing"
        ]
        self._facts = {fact: self._facts.get(fact, now_ms) for fact in facts}

    def stalled_s(self) -> dict[int, float]:
        """Drive -> seconds without progress of its drain, for stalled drains.

        A drain counts as stalled immediately while data movement is paused.
        """
        is_paused, now_s = self._pool_map().moving.paused, self._clock.boottime_s()
        return {
            drive: now_s - since_s
            for drive, ((count, _), since_s) in self._marks.items()
            if now_s - since_s >= (0.0 if is_paused and count else STALLED_S)
        }

    def since(self, problems: Iterable[HealthProblem]) -> list[HealthProblem]:
        """Add the start times to `problems`, which must be all problems known now."""
        self._note_facts()
        problems = list(problems)
        known = self._known | {
            problem.key: min(since_ms, self._known.get(problem.key, since_ms))
            for problem in problems
            if (
                since_ms := self._facts.get(
                    (problem.target,) if problem.target is not None else (problem.shard, problem.member)
                )
            )
            is not None
        }
        dated = with_since(problems, known, self._clock.wall_ns() // 1_000_000)
        self._known = {problem.key: problem.since_ms for problem in dated}
        return dated
