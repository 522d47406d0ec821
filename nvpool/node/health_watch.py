"""Memory of a supervisor for `nvpool status` and its metrics: times of problems, and drains that stand still.

`HealthWatch.run` looks at the map and, while a drive is drained, asks the stores how much they have copied or removed. Nothing
here changes the pool. Used by node/status and node/supervisor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import NvpoolError
from nvpool.poolmap.health_checks import Problem, with_since
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.placement import beside

LOOK_S = 5.0
STALLED_S = 60.0
"""A drain without a chain that left, without a byte copied, and then without one removed, for so long makes no progress."""

Mark = tuple[int, int]
"""Of a drain: what is to go, and bytes that were copied anywhere in the pool; where nothing is, those still on the drive."""


def draining(pool_map: PoolMap) -> dict[int, int]:
    """Drive -> chains and shards that are to leave it, of the drives that are being drained or have been."""
    drives = {target.id: target.drive for target in pool_map.targets if target.wish in ("drain", "remove")
              and target.state != "gone"}
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
    def __init__(self, pool_map: Callable[[], PoolMap], stores: Callable[[], Awaitable[Iterable[Mapping]]],
                 clock: Clock = SYSTEM_CLOCK) -> None:
        """`stores`: what the targets say of themselves (node/status)."""
        self._pool_map = pool_map
        self._stores = stores
        self._clock = clock
        self._marks: dict[int, tuple[Mark, float]] = {}
        """Drive -> its last mark, and since when it is the same."""
        self._known: dict[tuple, int] = {}
        """Key of a problem -> wall-clock ms."""
        self._facts: dict[tuple, int] = {}
        """Target that is down, or (shard, member) that does not have everything -> since when, by the maps seen here."""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.run_once()
            except NvpoolError:
                pass  # the stores are asked again
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
            if count or amount:  # else it is empty, or its store is silent
                before, since_s = self._marks.get(drive, ((), now_s))
                marks[drive] = (count, amount), since_s if before == (count, amount) else now_s
        self._marks = marks

    def _note_facts(self) -> None:
        pool_map, now_ms = self._pool_map(), self._clock.wall_ns() // 1_000_000
        facts = [(target.id,) for target in pool_map.targets if target.state == "down"]
        facts += [(shard.id, standby.member) for shard in pool_map.shards for standby in shard.standbys
                  if standby.state == "syncing"]
        self._facts = {fact: self._facts.get(fact, now_ms) for fact in facts}

    def stalled_s(self) -> dict[int, float]:
        """Drive -> for how long its drain has made no progress, of those for which that is too long; at once while moving is
        paused."""
        is_paused, now_s = self._pool_map().moving.paused, self._clock.boottime_s()
        return {drive: now_s - since_s for drive, ((count, _), since_s) in self._marks.items()
                if now_s - since_s >= (0.0 if is_paused and count else STALLED_S)}

    def since(self, problems: Iterable[Problem]) -> list[Problem]:
        """These problems, which are all that are known now, with the times since when they are."""
        self._note_facts()
        problems = list(problems)
        known = self._known | {problem.key: min(since_ms, self._known.get(problem.key, since_ms)) for problem in problems
                               if (since_ms := self._facts.get((problem.target,) if problem.target is not None
                                                               else (problem.shard, problem.member))) is not None}
        dated = with_since(problems, known, self._clock.wall_ns() // 1_000_000)
        self._known = {problem.key: problem.since_ms for problem in dated}
        return dated
