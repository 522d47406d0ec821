"""Requests to shards that have standbys: another member may become the primary while one is under way.

A refusal or a broken connection makes this client look out for a newer map. A primary that is stopped or cut off refuses
nothing: so where an answer is missing for a second a newer map is looked out for as well, and when one names another primary
the connections to the old one are given up, with all that waits for them. Requests are repeated by metaclient, which gives them
their slots; here nothing is. Shards without standbys do not come through here.
"""

from __future__ import annotations

import asyncio

from nvpool.base.clock import Clock
from nvpool.base.errors import Busy, StaleEpoch, Unavailable, Unreachable
from nvpool.client.poolview import PoolView
from nvpool.logic.poolmap import PoolMap, Shard
from nvpool.wire.v1 import wire_pb2

SILENT_S = 1.0
LOOK_S = 0.2
_LONG = frozenset((wire_pb2.META_WATCH, wire_pb2.META_LOCK_WAIT))
"""Answered when there is something to tell."""


class Primaries:
    def __init__(self, view: PoolView, dialer, clock: Clock) -> None:
        self._view = view
        self._dialer = dialer
        self._clock = clock
        self._known: dict[int, tuple[str, ...]] = {}
        self._waiting: dict[object, float] = {}
        self._moved: dict[tuple[str, ...], asyncio.Future[None]] = {}
        self._looking: asyncio.Task | None = None
        self._closing: set[asyncio.Task] = set()
        view.changed.append(self._map_changed)

    async def send(self, shard: Shard, method: int, message: bytes, deadline_s: float):
        """The encoded answer of the shard's primary. As Dialer.call; Unreachable or Disconnected when another one has taken its
        place meanwhile."""
        self._known[shard.id] = shard.endpoints
        token = object()
        try:
            if method not in _LONG:
                self._waiting[token] = self._clock.boottime_s()
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.create_task(self._look())
            connection = self._dialer.live(shard.endpoints)
            if connection is None:
                connection = await self._connect(shard.endpoints, deadline_s)
            return (await connection.call(method, message, deadline_s=deadline_s)).message
        except Busy:
            raise
        except (StaleEpoch, Unavailable):
            self._view.follow()
            raise
        finally:
            self._waiting.pop(token, None)

    async def _connect(self, endpoints: tuple[str, ...], deadline_s: float):
        """A daemon that is stopped lets us connect and never greets."""
        moved = self._moved.setdefault(endpoints, asyncio.get_running_loop().create_future())
        connecting = asyncio.ensure_future(self._dialer.connect(endpoints, deadline_s))
        try:
            await asyncio.wait([connecting, moved], return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            raise Unreachable("the shard has another primary by now")
        finally:
            connecting.cancel()

    async def _look(self) -> None:
        while self._waiting:
            await asyncio.sleep(LOOK_S)
            if self._waiting and self._clock.boottime_s() - next(iter(self._waiting.values())) > SILENT_S:
                self._view.follow()

    def _map_changed(self, pool_map: PoolMap) -> None:
        for number, endpoints in list(self._known.items()):
            shard = pool_map.shard_by_id.get(number)
            if shard is not None and shard.endpoints == endpoints:
                continue
            del self._known[number]
            moved = self._moved.pop(endpoints, None)
            if moved is not None:
                moved.set_result(None)
            connection = self._dialer.live(endpoints)
            if connection is not None:
                task = asyncio.ensure_future(connection.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
