"""Workload that drains drives of a simulated pool and takes drains back while it serves, so that chains move.

Final checks: every drain ends, and no target keeps a chunk of a chain that it does not belong to. Used by
`sim/scenario`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

from nvpool.core.errors import InvalidRequest, Unavailable
from nvpool.poolmap.chains.rebalance import with_goals
from nvpool.poolmap.chains.transitions import named, with_desired_state
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import PoolMap
from nvpool.testing.sim.control_plane import until_changed
from nvpool.testing.sim.pool import SimPool

ENDS_S = 240
"""Time in which drains end and left-over chunks are removed, once faults have ended: STAY_S of
store/maintenance/orphan_chunks, the copying, and a restarted target that counts that time again."""


class Drains:
    """Starts drains until `over()`; `done` counts them. At least as many drives as the pool has replicas are
    not drained."""

    def __init__(
        self, pool: SimPool, chance: random.Random, over: Callable[[], bool], done: dict[str, int]
    ) -> None:
        self._pool = pool
        self._chance = chance
        self._over = over
        self._done = done

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(0.4))
            if self._over():
                return
            targets = self._pool.pool_map.targets
            sharing = [target.id for target in targets if target.desired_state == "share"]
            draining = [target.id for target in targets if target.desired_state == "drain"]
            if draining and (len(sharing) <= self._pool.replicas or self._chance.random() < 0.4):
                await self._set_desired_state(self._chance.choice(draining), "share")
            elif len(sharing) > self._pool.replicas:
                await self._set_desired_state(self._chance.choice(sharing), "drain")

    async def _set_desired_state(self, target: int, desired_state: str) -> None:
        def decide(now: PoolMap) -> PoolMap:
            return with_goals(with_desired_state(now, target, desired_state))

        with suppress(InvalidRequest):  # too few other drives can take its chunks now
            await until_changed(self._pool.managing, decide)
            self._done["drains"] += desired_state == "drain"
            self._pool.invariants.happened(
                asyncio.get_running_loop().time(), f"the desired state of target {target} is {desired_state}"
            )

    async def until_ended(self) -> list[str]:
        """Wait at most ENDS_S for all drains, and return why some have not ended."""
        problems: list[str] = []
        for _ in range(ENDS_S):
            problems = self._left()
            if not problems:
                return []
            await asyncio.sleep(1.0)
        return [f"{problem}, {ENDS_S} s after all was mended" for problem in problems]

    def _left(self) -> list[str]:
        pool_map = self._pool.pool_map
        problems = [
            f"target {target.id} is drained and still has a part in chains"
            for target in pool_map.targets
            if target.desired_state == "drain" and target.id in named(pool_map)
        ]
        for number, store in self._pool.stores.items():
            try:
                chunks = store.chunks()
            except Unavailable as error:
                problems.append(str(error))
                continue
            for (inode, index), chunk in chunks.items():
                chain = pool_map.chain(chunk.table or 1, chain_of(inode, index))
                if number not in (*chain.targets, *chain.joining, *chain.goal):
                    problems.append(
                        f"target {number} keeps chunk {index} of inode {inode:#x} with version {chunk.version:#x}; "
                        f"its chain has epoch {chain.epoch} and targets {chain.targets}"
                    )
        return problems
