"""Operator requests for the shards of a simulated pool while it serves: add, remove, cancel a removal.

Partitions move meanwhile. Used by `sim/scenario`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards import partition_moves
from nvpool.testing.sim.control_plane import until_changed
from nvpool.testing.sim.pool import SimPool

SHARDS_MAX = 4
REST_S = 180
"""Time in which all partitions are at their places, once faults have ended."""
KINDS = {"add": 3, "remove": 3, "stay": 1, "pause": 1}


class ShardOperator:
    """Sends operator requests until `over()`; `done` counts them."""

    def __init__(
        self, pool: SimPool, chance: random.Random, over: Callable[[], bool], done: dict[str, int]
    ) -> None:
        self._pool = pool
        self._chance = chance
        self._over = over
        self._done = done

    async def run(self) -> None:
        chance = self._chance
        while not self._over():
            await getattr(self, f"_{chance.choices(list(KINDS), list(KINDS.values()))[0]}")()
            await asyncio.sleep(chance.expovariate(0.3))

    def _record_event(self, event: str) -> None:
        self._pool.invariants.happened(asyncio.get_running_loop().time(), event)

    async def _add(self) -> None:
        if len(self._pool.pool_map.shards) < SHARDS_MAX:
            self._record_event(f"shard {await self._pool.add_shard()} is added")
            self._done["shards"] += 1

    async def _remove(self) -> None:
        """Remove one shard, but never the last that stays."""
        staying = [shard.id for shard in self._pool.pool_map.shards if shard.desired_state == "share"]
        if len(staying) > 1:
            with suppress(
                InvalidRequest
            ):  # a former leader that does not know of its successor may know only one shard
                await self._set_desired_state(self._chance.choice(staying), "remove")
                self._done["shards"] += 1

    async def _stay(self) -> None:
        leaving = [shard.id for shard in self._pool.pool_map.shards if shard.desired_state == "remove"]
        if leaving:
            await self._set_desired_state(self._chance.choice(leaving), "share")

    async def _set_desired_state(self, number: int, desired_state: str) -> None:
        await self._change(
            lambda now: (
                partition_moves.with_desired_state(now, number, desired_state)
                if number in now.shard_by_id
                else now
            )
        )
        self._record_event(f"the desired state of shard {number} is {desired_state}")

    async def _pause(self) -> None:
        await self._paused(True)
        await asyncio.sleep(self._chance.uniform(0.1, 2.0))
        await self._paused(False)

    async def _paused(self, paused: bool) -> None:
        await self._change(lambda now: replace(now, moving=replace(now.moving, paused=paused)))

    async def _change(self, decide: Callable[[PoolMap], PoolMap]) -> None:
        await until_changed(self._pool.managing, decide)

    async def until_at_rest(self) -> list[str]:
        """Wait at most REST_S until no partition moves, and return why some still do."""
        for _ in range(REST_S * 4):
            if not self._pool.pool_map.moves:
                return []
            await asyncio.sleep(0.25)
        return [
            f"{partition_moves.left(self._pool.pool_map)} partitions are still to move {REST_S} s after all was mended"
        ]
