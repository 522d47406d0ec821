"""Questions to targets that end when a newer pool map says that who was asked does not serve any more.

A process that is stopped and a host that is cut off say nothing, so that a question would wait for its whole deadline; the map
knows better after a lease. For services that ask stores: shards, and other stores. Nothing is repeated here.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from nvpool.core.errors import Unreachable, WrongTarget
from nvpool.core.futures import abandon
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.api import Reply


class Dialer(Protocol):
    async def call(self, endpoints: tuple[str, ...], method: int, message: bytes, payload=(), *, deadline_s: float,
                   into: memoryview | None = None) -> Any: ...


class TargetCalls:
    """`map` is the newest that is known here; none at first."""

    def __init__(self, dialer: Dialer | None) -> None:
        """Without a dialer nobody can be asked."""
        self.map: PoolMap | None = None
        self._dialer = dialer
        self._gone: dict[int, asyncio.Future[None]] = {}

    def use_map(self, pool_map: PoolMap) -> None:
        before, self.map = self.map, pool_map
        for target in [target for target in self._gone if _serves(before, target) and not _serves(pool_map, target)]:
            self._gone.pop(target).set_result(None)

    async def call(self, target: int, method: int, message: bytes, *, deadline_s: float) -> Reply:
        """Connection.call to the target. WrongTarget where the map does not know it; Unreachable as soon as it does not serve
        any more."""
        known = self.map.target_by_id.get(target) if self.map is not None else None
        if known is None or self._dialer is None:
            raise WrongTarget(f"the pool map has no target {target}")
        gone = self._gone.get(target)
        if gone is None:
            gone = self._gone[target] = asyncio.get_running_loop().create_future()
        asked = asyncio.ensure_future(self._dialer.call(known.endpoints, method, message, deadline_s=deadline_s))
        try:
            await asyncio.wait([asked, gone], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise Unreachable(f"target {target} does not serve any more, by the map {self.map.epoch}")
        finally:
            abandon(asked)


def _serves(pool_map: PoolMap | None, target: int) -> bool:
    known = pool_map.target_by_id.get(target) if pool_map is not None else None
    return known is not None and known.state not in ("down", "gone")
