"""Requests to targets that fail early when a newer pool map reports the target down.

A stopped process or a disconnected host sends nothing, so a request would wait for its whole deadline; the
map shows the failure once the lease has ended. Used by services that call stores: shards, and other stores.
Requests are not retried here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from nvpool.core.errors import Unreachable, WrongTarget
from nvpool.core.futures import abandon
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.api import Buffer, Reply


class TargetDialer(Protocol):
    def call(
        self,
        endpoints: tuple[str, ...],
        method: int,
        message: bytes,
        payload: Sequence[Buffer] = (),
        *,
        deadline_s: float,
        into: memoryview | None = None,
    ) -> Awaitable[Reply]: ...


class TargetCalls:
    """Requests to targets. `map` is the newest pool map known here; None at first."""

    def __init__(self, dialer: TargetDialer | None) -> None:
        """Without a dialer no target can be called."""
        self.map: PoolMap | None = None
        self._dialer = dialer
        self._gone: dict[int, asyncio.Future[None]] = {}

    def use_map(self, pool_map: PoolMap) -> None:
        before, self.map = self.map, pool_map
        for target in [
            target for target in self._gone if _serves(before, target) and not _serves(pool_map, target)
        ]:
            self._gone.pop(target).set_result(None)

    async def call(self, target: int, method: int, message: bytes, *, deadline_s: float) -> Reply:
        """Call a target as Connection.call does.

        WrongTarget: the map does not know the target. Unreachable: raised as soon as the map says that it
        does not serve.
        """
        known = self.map.target_by_id.get(target) if self.map is not None else None
        if known is None or self._dialer is None:
            raise WrongTarget(f"the pool map has no target {target}")
        gone = self._gone.get(target)
        if gone is None:
            gone = self._gone[target] = asyncio.get_running_loop().create_future()
        asked = asyncio.ensure_future(
            self._dialer.call(known.endpoints, method, message, deadline_s=deadline_s)
        )
        try:
            both: list[asyncio.Future[Any]] = [asked, gone]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            assert self.map is not None  # it was, and `use_map` only replaces it
            raise Unreachable(f"target {target} does not serve any more, by the map {self.map.epoch}")
        finally:
            abandon(asked)


def _serves(pool_map: PoolMap | None, target: int) -> bool:
    known = pool_map.target_by_id.get(target) if pool_map is not None else None
    return known is not None and known.state not in ("down", "gone")
