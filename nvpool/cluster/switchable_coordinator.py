"""Switchable coordinator: a relay to another coordinator, and a read-only one for outages.

The supervisor has one Relay for life: first over the embedded coordinator, then over etcd, and over a LastKnownMap
while neither is reachable. A watcher notices nothing of a switch except a new map; leases end with the
coordinator that granted them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from nvpool.cluster.coordinator_api import WATCH_S_MAX, CoordinatorLease, MapCoordinator
from nvpool.cluster.map_watchers import MapWatchers
from nvpool.core.errors import Unavailable
from nvpool.poolmap.model import PoolMap


class LastKnownMap:
    """Read-only coordinator with the last known map; `reason` explains why nothing can be changed.

    With it a lost etcd does not stop reads and writes.
    """

    def __init__(self, pool_map: PoolMap, reason: str) -> None:
        self._watchers = MapWatchers(pool_map)
        self._reason = reason

    @property
    def pool_map(self) -> PoolMap:
        return self._watchers.pool_map

    def take(self, pool_map: PoolMap) -> bool:
        """Use this map if it is newer; return whether it is."""
        if pool_map.epoch <= self.pool_map.epoch:
            return False
        self._watchers.pool_map = pool_map
        self._watchers.notify()
        return True

    async def newest(self) -> PoolMap:
        raise Unavailable(self._reason, retry_after_s=1.0)

    async def replace(self, new: PoolMap, leader: CoordinatorLease | None = None) -> None:
        raise Unavailable(self._reason, retry_after_s=1.0)

    async def watch(self, newer_than: int, wait_s: float) -> PoolMap | None:
        return await self._watchers.watch(newer_than, wait_s)

    async def announce(self, name: str, value: bytes, lease_s: float) -> CoordinatorLease:
        raise Unavailable(self._reason, retry_after_s=1.0)

    def present(self) -> Mapping[str, bytes]:
        return {}

    async def watch_present(self, known: Mapping[str, bytes], wait_s: float) -> Mapping[str, bytes]:
        return await self._watchers.watch_present(known, wait_s)

    async def lead(self, name: str, lease_s: float, wait_s: float) -> CoordinatorLease | None:
        raise Unavailable(self._reason, retry_after_s=1.0)

    def leader(self) -> str | None:
        return None

    async def close(self) -> None:
        self._watchers.close()


class Relay:
    """Coordinator that forwards every call to `inner`."""

    def __init__(self, inner: MapCoordinator) -> None:
        self.inner = inner
        self.turn = asyncio.Lock()
        """Held while a map is replaced: its holder knows that no replacement is in progress."""

    async def switch(self, inner: MapCoordinator) -> None:
        """Continue with `inner`, whose map is at least as new, and close the previous one.

        Does not acquire `turn`.
        """
        before, self.inner = self.inner, inner
        await before.close()

    @property
    def pool_map(self) -> PoolMap:
        return self.inner.pool_map

    async def newest(self) -> PoolMap:
        return await self.inner.newest()

    async def replace(self, new: PoolMap, leader: CoordinatorLease | None = None) -> None:
        async with self.turn:
            await self.inner.replace(new, leader)

    async def watch(self, newer_than: int, wait_s: float) -> PoolMap | None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(wait_s, WATCH_S_MAX)
        while True:
            asked = self.inner
            found = await asked.watch(newer_than, max(0.0, until_s - loop.time()))
            if found is not None or self.inner is asked:
                return found

    async def announce(self, name: str, value: bytes, lease_s: float) -> CoordinatorLease:
        return await self.inner.announce(name, value, lease_s)

    def present(self) -> Mapping[str, bytes]:
        return self.inner.present()

    async def watch_present(self, known: Mapping[str, bytes], wait_s: float) -> Mapping[str, bytes]:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(wait_s, WATCH_S_MAX)
        while True:
            asked = self.inner
            found = await asked.watch_present(known, max(0.0, until_s - loop.time()))
            if found != known or self.inner is asked:
                return found

    async def lead(self, name: str, lease_s: float, wait_s: float) -> CoordinatorLease | None:
        return await self.inner.lead(name, lease_s, wait_s)

    def leader(self) -> str | None:
        return self.inner.leader()

    async def close(self) -> None:
        await self.inner.close()
