"""Who asks many daemons: one live connection to each, over the best transport that both ends have.

A daemon is known by its tuple of endpoints, as the pool map lists them. Which transport is used is decided by trying them,
best rank first: what this process has installed, what can be reached from this host, what answers. Callers that need the same
connection at once share one attempt. A connection that ended is not used any more, the next call makes a new one. Requests
are never repeated here: that is metaclient's and chunkclient's business. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Mapping, Sequence

from nvpool.base.clock import SYSTEM_CLOCK, Clock
from nvpool.base.errors import DeadlineExceeded, InvalidRequest, NvpoolError, TooManyOpen, Unreachable
from nvpool.wire import registry
from nvpool.wire.endpoint import parse_endpoint
from nvpool.wire.transport import Buffer, Connection, Greeting, Reply, Transport

ATTEMPT_S = 3.0
"""For one endpoint: a host that is up answers in milliseconds, and the next endpoint wants its turn within the deadline."""

SLOW_FAILURE_S = 0.5
SHUN_S = 30.0
"""An endpoint that failed slowly (a firewall that swallows packets) is tried last for this long. One that is refused at once
costs nothing and is tried in its turn, so that a restarted daemon is found on its best transport."""

Endpoints = tuple[str, ...]


class Dialer:
    """`transports` replaces the installed ones (simulations). `host_id` of this host decides about endpoints with ?host=."""

    def __init__(self, greeting: Greeting, *, host_id: str = "", clock: Clock = SYSTEM_CLOCK,
                 transports: Mapping[str, Transport] | None = None) -> None:
        self._greeting = greeting._replace(host_id=host_id or greeting.host_id)
        self._clock = clock
        self._transports = transports
        self._live: dict[Endpoints, Connection] = {}
        self._connecting: dict[Endpoints, asyncio.Task[Connection]] = {}
        self._shunned: dict[str, float] = {}
        self._closed = False

    @property
    def greeting(self) -> Greeting:
        """What our connections begin with."""
        return self._greeting

    def set_fingerprint(self, fingerprint: str) -> None:
        """Name the pool in later greetings; for a client that has now read its map."""
        self._greeting = self._greeting._replace(fingerprint=fingerprint)

    def live(self, endpoints: Endpoints) -> Connection | None:
        """The connection to this daemon, when there is one now. From any thread."""
        connection = self._live.get(endpoints)
        return None if connection is None or connection.closed else connection

    def call(self, endpoints: Endpoints, method: int, message: Buffer, payload: Sequence[Buffer] = (), *, deadline_s: float,
             into: memoryview | None = None) -> Awaitable[Reply]:
        """Connection.call on the connection to this daemon, made first where there is none.

        Unreachable        nobody answers at any endpoint: nothing was sent
        DeadlineExceeded, Disconnected, and what the other side answers: as Connection.call says
        """
        connection = self.live(endpoints)
        if connection is not None:
            return connection.call(method, message, payload, deadline_s=deadline_s, into=into)
        return self._connect_and_call(endpoints, method, message, payload, deadline_s, into)

    async def _connect_and_call(self, endpoints, method, message, payload, deadline_s, into) -> Reply:
        connection = await self.connect(endpoints, deadline_s)
        return await connection.call(method, message, payload, deadline_s=deadline_s, into=into)

    async def connect(self, endpoints: Endpoints, deadline_s: float) -> Connection:
        """The live connection to this daemon, made first where there is none.

        Unreachable        nobody answers at any of the endpoints
        DeadlineExceeded   the attempt took longer than this caller has; it goes on for others
        ProtocolMismatch   somebody answers, and no endpoint accepts us: another pool or version
        """
        connection = self.live(endpoints)
        if connection is not None:
            return connection
        if self._closed:
            raise Unreachable("this dialer is closed")
        task = self._connecting.get(endpoints)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._make(endpoints))
            self._connecting[endpoints] = task
            task.add_done_callback(lambda done: self._made(endpoints, done))
        await asyncio.wait([task], timeout=max(0.0, deadline_s - self._clock.boottime_s()))
        if not task.done():
            raise DeadlineExceeded(f"no connection to {endpoints[0]} within the deadline", may_be_applied=False)
        if task.cancelled():
            raise Unreachable("this dialer is closed")
        return task.result()

    def _made(self, endpoints: Endpoints, task: asyncio.Task[Connection]) -> None:
        del self._connecting[endpoints]
        if task.cancelled() or task.exception() is not None:
            return
        for gone in [key for key, connection in self._live.items() if connection.closed]:
            del self._live[gone]
        self._live[endpoints] = task.result()

    async def _make(self, endpoints: Endpoints) -> Connection:
        worst: NvpoolError | None = None
        if self._greeting.identity is not None:
            with contextlib.suppress(NvpoolError):  # then what was shown so far is
                self._greeting.identity.refresh()  # another process may have renewed it, and some live longer than it is good
        for endpoint, transport in self._candidates(endpoints):
            began_s = self._clock.boottime_s()
            try:
                connection = await transport.connect(endpoint, self._greeting, deadline_s=began_s + ATTEMPT_S)
            except NvpoolError as error:
                if isinstance(error, TooManyOpen):
                    raise
                if worst is None or isinstance(worst, Unreachable):
                    worst = error
                now_s = self._clock.boottime_s()
                if now_s - began_s > SLOW_FAILURE_S:
                    self._shunned = {key: until_s for key, until_s in self._shunned.items() if until_s > now_s}
                    self._shunned[endpoint] = now_s + SHUN_S
                continue
            self._shunned.pop(endpoint, None)
            return connection
        raise worst or Unreachable(f"none of {', '.join(endpoints) or 'no endpoints'} can be reached from this host")

    def _candidates(self, endpoints: Endpoints) -> list[tuple[str, Transport]]:
        """What can be tried from here, in the order to try it."""
        now_s = self._clock.boottime_s()
        found = []
        for endpoint in endpoints:
            try:
                where = parse_endpoint(endpoint)
            except InvalidRequest:
                continue  # of a newer version, or a mistake in the map: the others may do
            transport = registry.upgrading(where.scheme) if self._transports is None else self._transports.get(where.scheme)
            if transport is None or (where.host_id and self._greeting.host_id and where.scheme.endswith("+unix")
                                     and where.host_id != self._greeting.host_id):
                continue
            if where.scheme.endswith("+unix") and not os.path.exists(where.path):
                continue
            found.append((self._shunned.get(endpoint, 0.0) > now_s, -transport.rank, endpoint, transport))
        return [(endpoint, transport) for _, _, endpoint, transport in sorted(found, key=lambda item: item[:2])]

    async def close(self) -> None:
        """End every connection and attempt. May be called twice."""
        self._closed = True
        tasks = list(self._connecting.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        live, self._live = self._live, {}
        if live:
            await asyncio.gather(*[connection.close() for connection in live.values()])
