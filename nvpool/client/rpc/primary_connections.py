"""Connections to the shards' primaries, which follow a primary that moves to another member.

A refusal or a broken connection starts a search for a newer pool map. A primary that is stopped or cut off
refuses nothing: so a reply that is missing for a second also starts the search. When a newer map names
another primary, the connection to the old one is closed, and all requests that wait on it fail, of every
sender. This holds for every shard, because the client's map may be older than the standby that takes over.

A primary that the pool reaches and this client does not is not replaced; the log and `silent_s` report it.
This module retries nothing: the metadata client does, with its slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from math import inf

from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import Busy, StaleEpoch, StaleIdentity, Unavailable, Unreachable
from nvpool.poolmap.model import PoolMap, Shard
from nvpool.poolmap.shards.members import process_name
from nvpool.rpc.api import Buffer, Connection, Reply
from nvpool.rpc.v1 import wire_pb2

SILENT_S = 1.0
LOOK_S = 0.25
SILENT_LOG_S = 5.0
"""Silence that the log reports, if the map names no other primary.

By then a standby would have replaced a lost one.
"""
_LONG = frozenset((wire_pb2.META_WATCH, wire_pb2.META_LOCK_WAIT))
"""Long polls: requests that are answered when there is news."""

log = logging.getLogger("nvpool.client.rpc.primary_connections")


class PrimaryConnections:
    """The connections of a client to the primaries of all shards."""

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
        """Endpoints of a primary -> time since which no connection to it could be made."""
        self._silent: dict[int, float] = {}
        """Shard -> time since which its primary has not answered, if that is longer than SILENT_S ago."""
        self._logged_silent: dict[int, float] = {}
        """The silent shards that the log has reported -> time since which."""
        view.changed.append(self._map_changed)

    async def connection(self, shard: Shard, deadline_s: float) -> Connection:
        """The connection to the shard's primary. Errors as Dialer.connect.

        Also Unreachable if another primary takes over meanwhile.
        """
        if (self._looking is None or self._looking.done()) and not self._closed:
            self._looking = asyncio.create_task(self._look())
        connection = self._dialer.live(shard.endpoints)
        if connection is None:
            self._unreached.setdefault(shard.endpoints, self._clock.boottime_s())
            try:
                with self._followed():
                    connection = await self._connect(shard.endpoints, deadline_s)
            except StaleIdentity:  # the primary answers, and refuses this client
                self._unreached.pop(shard.endpoints, None)
                raise
            self._unreached.pop(shard.endpoints, None)
        return connection

    def silent_s(self) -> dict[int, float]:
        """Shard -> seconds for which its primary has not answered this client; 0 while it answers."""
        now_s = self._clock.boottime_s()
        return {shard.id: now_s - self._silent.get(shard.id, now_s) for shard in self._view.map.shards}

    async def _connect(self, endpoints: tuple[str, ...], deadline_s: float) -> Connection:
        """Connect, and give up when the primary moves to another member.

        A stopped daemon accepts a connection but never greets.
        """
        moved = self._moved.setdefault(endpoints, asyncio.get_running_loop().create_future())
        connecting = asyncio.ensure_future(self._dialer.connect(endpoints, deadline_s))
        # retrieve the error if `moved` completes first
        connecting.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not moved.done():
                if connecting.done():
                    return connecting.result()
                done, _ = await asyncio.wait(
                    [connecting, moved], timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    self._view.follow()
            raise Unreachable("the shard has another primary by now")
        finally:
            connecting.cancel()

    async def call(
        self,
        connection: Connection,
        method: int,
        message: bytes,
        deadline_s: float,
        payload: Sequence[Buffer] = (),
    ) -> Reply:
        """As Connection.call; a failure makes the client follow the pool map."""
        with self._followed():
            return await connection.call(method, message, payload, deadline_s=deadline_s)

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        """Follow the pool map after a failure, including those of renewals and watches."""
        try:
            yield
        except Busy:
            raise  # the primary is alive
        except (StaleEpoch, Unavailable):
            self._view.follow()
            raise

    async def _look(self) -> None:
        """Search for silent primaries, in the background; requests sent without `connection` count too."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.look():
                self._view.follow()

    def look(self) -> bool:
        """Record and log silent primaries; return whether one with a connection is silent."""
        now_s, silent, must_follow = self._clock.boottime_s(), {}, False
        shards = self._view.map.shards
        for shard in shards:
            connections = self._dialer.connections(shard.endpoints)
            since_s = min(
                (connection.unanswered_since_s(_LONG) for connection in connections),
                default=self._unreached.get(shard.endpoints, inf),
            )
            if since_s < now_s - SILENT_S:
                silent[shard.id] = min(since_s, self._silent.get(shard.id, since_s))
                must_follow = must_follow or bool(connections)
        self._silent = silent
        self._unreached = {
            shard.endpoints: self._unreached[shard.endpoints]
            for shard in shards
            if shard.endpoints in self._unreached
        }
        self._log_silent(now_s)
        return must_follow

    def _log_silent(self, now_s: float) -> None:
        for shard in self._view.map.shards:
            since_s = self._silent.get(shard.id)
            if (
                since_s is not None
                and now_s - since_s >= SILENT_LOG_S
                and shard.id not in self._logged_silent
            ):
                self._logged_silent[shard.id] = since_s
                log.warning(
                    "the primary of shard %d, %s on node %d (%s), has not answered this client for %.0f s, and the "
                    "newest pool map known here names no other primary: its requests wait. If nvpool status on a node "
                    "shows the primary serving, the network between this host and node %d is broken",
                    shard.id,
                    process_name(shard.id, shard.member),
                    shard.node,
                    ", ".join(shard.endpoints),
                    now_s - since_s,
                    shard.node,
                )
            elif since_s is None and shard.id in self._logged_silent:
                log.warning(
                    "the primary of shard %d answers this client again after %.0f s",
                    shard.id,
                    now_s - self._logged_silent.pop(shard.id),
                )

    def _map_changed(self, pool_map: PoolMap) -> None:
        before, self._before = self._before, pool_map
        for known in before.shards:
            shard = pool_map.shard_by_id.get(known.id)
            if shard is not None and shard.endpoints == known.endpoints:
                continue
            moved = self._moved.pop(known.endpoints, None)
            if moved is not None:
                moved.set_result(None)
            # A shard that has left the pool has given up its partitions; it says so itself to pending
            # requests.
            for connection in self._dialer.connections(known.endpoints) if shard is not None else ():
                task = asyncio.ensure_future(connection.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def close(self) -> None:
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
