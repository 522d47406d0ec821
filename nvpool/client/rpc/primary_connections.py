"""Connections to the shards' primaries: another member may take a primary's place while requests to it are under way.

A refusal or a broken connection makes this client look out for a newer map. A primary that is stopped or cut off refuses
nothing: so where an answer is missing for a second a newer map is looked out for as well, and when one names another primary
the connection to the old one is given up, with all that waits for it, whoever sent it. The map that this client knows may be
older than the standby that takes over: so this holds for every shard. A primary that the pool reaches and this client does not
is not replaced: the log and `silent_s` report it. Requests are repeated by metaclient, which gives them
their slots; here nothing is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from math import inf

from nvpool.client.state.pool_view import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import Busy, StaleEpoch, StaleIdentity, Unavailable, Unreachable
from nvpool.poolmap.model import PoolMap, Shard
from nvpool.poolmap.shards.members import process_name
from nvpool.rpc.api import Buffer, Connection, Reply
from nvpool.rpc.v1 import wire_pb2

SILENT_S = 1.0
LOOK_S = 0.25
TOLD_S = 5.0
"""Without an answer, while the map names no other primary: by then a standby would have followed one that is lost."""
_LONG = frozenset((wire_pb2.META_WATCH, wire_pb2.META_LOCK_WAIT))
"""Answered when there is something to tell."""

log = logging.getLogger("nvpool.client.rpc.primary_connections")


class Primaries:
    def __init__(self, view: PoolView, dialer, clock: Clock) -> None:
        self._view = view
        self._dialer = dialer
        self._clock = clock
        self._before = view.map
        self._moved: dict[tuple[str, ...], asyncio.Future[None]] = {}
        self._looking: asyncio.Task | None = None
        self._closing: set[asyncio.Task] = set()
        self._closed = False
        self._unreached: dict[tuple[str, ...], float] = {}
        """Endpoints of a primary -> since when no connection to it could be made."""
        self._silent: dict[int, float] = {}
        """Shard -> since when its primary has not answered, where that is longer than SILENT_S."""
        self._told: dict[int, float] = {}
        """Of these, those that the log has: since when."""
        view.changed.append(self._map_changed)

    async def connection(self, shard: Shard, deadline_s: float) -> Connection:
        """To the shard's primary. As Dialer.connect; Unreachable as well where another one takes its place meanwhile."""
        if (self._looking is None or self._looking.done()) and not self._closed:
            self._looking = asyncio.create_task(self._look())
        connection = self._dialer.live(shard.endpoints)
        if connection is None:
            self._unreached.setdefault(shard.endpoints, self._clock.boottime_s())
            try:
                with self._followed():
                    connection = await self._connect(shard.endpoints, deadline_s)
            except StaleIdentity:  # it answers, and refuses us
                self._unreached.pop(shard.endpoints, None)
                raise
            self._unreached.pop(shard.endpoints, None)
        return connection

    def silent_s(self) -> dict[int, float]:
        """Shard -> for how long its primary has not answered this client; 0 while it does."""
        now_s = self._clock.boottime_s()
        return {shard.id: now_s - self._silent.get(shard.id, now_s) for shard in self._view.map.shards}

    async def _connect(self, endpoints: tuple[str, ...], deadline_s: float) -> Connection:
        """A daemon that is stopped lets us connect and never greets."""
        moved = self._moved.setdefault(endpoints, asyncio.get_running_loop().create_future())
        connecting = asyncio.ensure_future(self._dialer.connect(endpoints, deadline_s))
        connecting.add_done_callback(lambda done: done.cancelled() or done.exception())  # where another has come first
        try:
            while not moved.done():
                if connecting.done():
                    return connecting.result()
                done, _ = await asyncio.wait([connecting, moved], timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    self._view.follow()
            raise Unreachable("the shard has another primary by now")
        finally:
            connecting.cancel()

    async def call(self, connection: Connection, method: int, message: bytes, deadline_s: float,
                   payload: Sequence[Buffer] = ()) -> Reply:
        """As Connection.call."""
        with self._followed():
            return await connection.call(method, message, payload, deadline_s=deadline_s)

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        """What fails makes us look out for a newer map: renewals and watches, too, for which nobody waits."""
        try:
            yield
        except Busy:
            raise  # it serves
        except (StaleEpoch, Unavailable):
            self._view.follow()
            raise

    async def _look(self) -> None:
        """Look for primaries that are silent; what is asked of them without `connection` counts as well."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.look():
                self._view.follow()

    def look(self) -> bool:
        """Note which primaries are silent, and tell of those that stay so; whether one with a connection is."""
        now_s, silent, must_follow = self._clock.boottime_s(), {}, False
        shards = self._view.map.shards
        for shard in shards:
            connections = self._dialer.connections(shard.endpoints)
            since_s = min((connection.unanswered_since_s(_LONG) for connection in connections),
                          default=self._unreached.get(shard.endpoints, inf))
            if since_s < now_s - SILENT_S:
                silent[shard.id] = min(since_s, self._silent.get(shard.id, since_s))
                must_follow = must_follow or bool(connections)
        self._silent = silent
        self._unreached = {shard.endpoints: self._unreached[shard.endpoints] for shard in shards
                           if shard.endpoints in self._unreached}
        self._tell(now_s)
        return must_follow

    def _tell(self, now_s: float) -> None:
        for shard in self._view.map.shards:
            since_s = self._silent.get(shard.id)
            if since_s is not None and now_s - since_s >= TOLD_S and shard.id not in self._told:
                self._told[shard.id] = since_s
                log.warning("the primary of shard %d, %s on node %d (%s), has not answered this client for %.0f s, and the "
                            "newest pool map known here names no other: what needs it waits. Where nvpool status on a node "
                            "shows it serving, the network between this host and node %d is cut", shard.id,
                            process_name(shard.id, shard.member), shard.node, ", ".join(shard.endpoints), now_s - since_s,
                            shard.node)
            elif since_s is None and shard.id in self._told:
                log.warning("the primary of shard %d answers this client again after %.0f s", shard.id,
                            now_s - self._told.pop(shard.id))

    def _map_changed(self, pool_map: PoolMap) -> None:
        before, self._before = self._before, pool_map
        for known in before.shards:
            shard = pool_map.shard_by_id.get(known.id)
            if shard is not None and shard.endpoints == known.endpoints:
                continue
            moved = self._moved.pop(known.endpoints, None)
            if moved is not None:
                moved.set_result(None)
            # A shard that has left the pool has given up its partitions: it says so itself of what is under way.
            for connection in self._dialer.connections(known.endpoints) if shard is not None else ():
                task = asyncio.ensure_future(connection.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def close(self) -> None:
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
