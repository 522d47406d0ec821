"""Watched state: what a coordinator knows, and the callers that wait for changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from nvpool.cluster.coordinator_api import WATCH_S_MAX
from nvpool.poolmap.model import PoolMap


class MapWatchers:
    """Watched state of a coordinator, used from one event loop.

    The epoch of `pool_map` only grows; `present` and `leader` are replaced as a whole when they change.
    """

    def __init__(self, pool_map: PoolMap) -> None:
        self.pool_map = pool_map
        self.present: Mapping[str, bytes] = {}
        self.leader: str | None = None
        self.closed = False
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def notify(self) -> None:
        """Wake the waiting callers after a change; each checks its condition again."""
        waiting, self._next = self._next, asyncio.get_running_loop().create_future()
        if not waiting.done():
            waiting.set_result(None)

    async def wait(self, is_so: Callable[[], bool], wait_s: float) -> bool:
        """Return True if the condition holds now, or within `wait_s` and before `close`.

        The wait is at most WATCH_S_MAX."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(wait_s, WATCH_S_MAX)
        while not is_so():
            left_s = until_s - loop.time()
            if self.closed or left_s <= 0:
                return False
            await asyncio.wait([self._next], timeout=left_s)
        return True

    async def watch(self, newer_than: int, wait_s: float) -> PoolMap | None:
        """See MapCoordinator.watch."""
        return self.pool_map if await self.wait(lambda: self.pool_map.epoch > newer_than, wait_s) else None

    async def watch_present(self, known: Mapping[str, bytes], wait_s: float) -> Mapping[str, bytes]:
        """See MapCoordinator.watch_present."""
        await self.wait(lambda: self.present != known, wait_s)
        return self.present

    def close(self) -> None:
        self.closed = True
        self.notify()
