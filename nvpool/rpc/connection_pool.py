"""Connection pool: one live connection to each daemon, over the best transport that both ends have.

A daemon is identified by its tuple of endpoints, as the pool map lists them. The pool tries the endpoints in
the order of their transport's rank: transports that are installed in this process, endpoints that this host
can reach, and then the first that answers. Callers that need the same connection at the same time share one
attempt. A connection that has ended is not reused; the next call makes a new one. A connection over a
transport that is not the best is replaced in the background as soon as a better endpoint answers; pending
requests finish on the connection on which they were sent. The pool never retries a request: that is the task
of the metadata client and the chunk client. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NvpoolError,
    StaleIdentity,
    TooManyOpen,
    Unreachable,
)
from nvpool.rpc import transport_registry
from nvpool.rpc.api import Buffer, Connection, Greeting, Reply, Transport

ATTEMPT_S = 3.0
"""Time for one endpoint: a live host answers in milliseconds, and the next endpoint must also fit in the
deadline."""

SLOW_FAILURE_S = 0.5
SHUN_S = 30.0
"""How long an endpoint that failed slowly (a firewall that drops packets) is tried last.

An endpoint that refuses immediately costs nothing and keeps its place in the order, so that a restarted
daemon is found on its best transport."""
SHUN_LOCAL_S = 2.0
"""The same for a unix socket: there is no firewall, so the daemon was only stopped or busy for a short
time."""

RETURN_LOCAL_S = (1.0, 8.0)
RETURN_S = (5.0, 60.0)
"""First and longest pause between two attempts to reach a better endpoint.

Attempts are made while a worse endpoint is in use. The pause doubles after each failure. For a unix socket an
attempt costs one stat while the socket does not exist."""
RETIRED_LOOK_S = 0.25
RETIRED_S_MAX = 120.0
"""When a replaced connection is closed: once no request waits on it, or after this time.

The longest polls take 40 s."""

Endpoints = tuple[str, ...]


class _Candidate(NamedTuple):
    """An endpoint that can be tried from this host."""

    endpoint: str
    transport: Transport
    socket_path: str
    """Path of a unix socket; empty for other endpoints."""


class _Attempt:
    """One attempt to connect to a daemon: the endpoints that were tried and their failures."""

    def __init__(self) -> None:
        self.task: asyncio.Task[tuple[Connection, int]]
        self.failures: list[tuple[str, NvpoolError]] = []
        self.trying = ""

    def failed(self) -> list[str]:
        return [
            str(error) if endpoint in str(error) else f"{endpoint}: {error}"
            for endpoint, error in self.failures
        ]

    def error(self) -> NvpoolError:
        """All failures as one error, of the most specific class among them."""
        for _, error in self.failures:
            if isinstance(error, StaleIdentity):  # the daemon answers, and this is the cause
                return error
        worst = next(
            (error for _, error in self.failures if not isinstance(error, Unreachable)), self.failures[-1][1]
        )
        return type(worst)(
            "; ".join(self.failed()), may_be_applied=worst.may_be_applied, retry_after_s=worst.retry_after_s
        )


class Dialer:
    """Connection pool of one client.

    `transports` replaces the installed transports (simulations). `host_id` is this host's id and decides
    which endpoints with `?host=` can be used. `certified` means that the certificate identifies the caller:
    then no unix socket of another user is used, because there the daemon would see the user of this process
    instead.
    """

    def __init__(
        self,
        greeting: Greeting,
        *,
        host_id: str = "",
        clock: Clock = SYSTEM_CLOCK,
        transports: Mapping[str, Transport] | None = None,
        certified: bool = False,
    ) -> None:
        self._greeting = greeting._replace(host_id=host_id or greeting.host_id)
        self._clock = clock
        self._transports = transports
        self._certified = certified
        self.by_endpoints: dict[Endpoints, Connection] = {}
        """Newest connection to each daemon; it may be closed. Compiled modules look connections up here."""
        self._ranks: dict[Endpoints, int] = {}
        """Rank of the transport of each connection in `by_endpoints`."""
        self._connecting: dict[Endpoints, _Attempt] = {}
        self.returning: dict[Endpoints, asyncio.Task[None]] = {}
        """Tasks that try to return to a better endpoint."""
        self._retired: dict[Endpoints, list[Connection]] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self.shunned: dict[str, float] = {}
        """Endpoint that did not answer -> time until which others are tried first."""
        self.closed = False

    @property
    def greeting(self) -> Greeting:
        """The greeting that new connections send."""
        return self._greeting

    def set_fingerprint(self, fingerprint: str) -> None:
        """Name the pool in later greetings. A client calls this once it has read its pool map."""
        self._greeting = self._greeting._replace(fingerprint=fingerprint)

    def live(self, endpoints: Endpoints) -> Connection | None:
        """The live connection to this daemon, or None. May be called from any thread."""
        connection = self.by_endpoints.get(endpoints)
        return None if connection is None or connection.closed else connection

    def connections(self, endpoints: Endpoints) -> Iterator[Connection]:
        """All open connections to this daemon: the live one, and replaced ones with pending requests."""
        live = self.live(endpoints)
        if live is not None:
            yield live
        yield from [connection for connection in self._retired.get(endpoints, ()) if not connection.closed]

    def call(
        self,
        endpoints: Endpoints,
        method: int,
        message: Buffer,
        payload: Sequence[Buffer] = (),
        *,
        deadline_s: float,
        into: memoryview | None = None,
    ) -> Awaitable[Reply]:
        """Call Connection.call on the connection to this daemon; connect first if there is none.

        Unreachable        no endpoint answers: nothing was sent
        DeadlineExceeded, Disconnected, and any error of the server: as for Connection.call
        """
        connection = self.live(endpoints)
        if connection is not None:
            return connection.call(method, message, payload, deadline_s=deadline_s, into=into)
        return self._connect_and_call(endpoints, method, message, payload, deadline_s, into)

    async def _connect_and_call(
        self,
        endpoints: Endpoints,
        method: int,
        message: Buffer,
        payload: Sequence[Buffer],
        deadline_s: float,
        into: memoryview | None,
    ) -> Reply:
        connection = await self.connect(endpoints, deadline_s)
        return await connection.call(method, message, payload, deadline_s=deadline_s, into=into)

    async def connect(self, endpoints: Endpoints, deadline_s: float) -> Connection:
        """Return the live connection to this daemon; connect first if there is none.

        Unreachable        no endpoint answers
        DeadlineExceeded   the attempt took longer than this caller's deadline; it continues for other callers
        ProtocolMismatch   a daemon answers, but no endpoint accepts us: another pool or protocol version

        The text of each error names the endpoints that were tried and why each of them failed.
        """
        connection = self.live(endpoints)
        if connection is not None:
            return connection
        if self.closed:
            raise Unreachable("this dialer is closed")
        attempt = self._connecting.get(endpoints)
        if attempt is None:
            attempt = self._connecting[endpoints] = _Attempt()
            attempt.task = asyncio.get_running_loop().create_task(self._make(endpoints, attempt))
            attempt.task.add_done_callback(lambda done: self._made(endpoints, done))
        task = attempt.task
        await asyncio.wait([task], timeout=max(0.0, deadline_s - self._clock.boottime_s()))
        if not task.done():
            said = [*attempt.failed(), f"{attempt.trying or ', '.join(endpoints)} has not answered yet"]
            raise DeadlineExceeded(
                f"no connection within the deadline: {'; '.join(said)}", may_be_applied=False
            )
        if task.cancelled():
            raise Unreachable("this dialer is closed")
        return task.result()[0]

    def redial(self, endpoints: Endpoints) -> None:
        """Make the next call to this daemon use a new connection.

        Pending requests finish on the present one.
        """
        connection = self.by_endpoints.pop(endpoints, None)
        if connection is not None and not connection.closed:
            self._retire(endpoints, connection)

    # -- making a connection

    def _made(self, endpoints: Endpoints, task: asyncio.Task[tuple[Connection, int]]) -> None:
        del self._connecting[endpoints]
        if task.cancelled() or task.exception() is not None:
            return
        for gone in [key for key, connection in self.by_endpoints.items() if connection.closed]:
            del self.by_endpoints[gone]
            self._ranks.pop(gone, None)
        self.by_endpoints[endpoints], self._ranks[endpoints] = task.result()
        former = self.returning.pop(endpoints, None)
        if former is not None:
            former.cancel()
        if not self.closed and self._better(endpoints):
            returning = asyncio.get_running_loop().create_task(self._return(endpoints))
            self.returning[endpoints] = returning
            returning.add_done_callback(lambda done: self._returned(endpoints, done))

    async def _make(self, endpoints: Endpoints, attempt: _Attempt) -> tuple[Connection, int]:
        self._refresh_identity()
        for candidate in self._candidates(endpoints):
            attempt.trying = candidate.endpoint
            try:
                return await self._try(candidate), candidate.transport.rank
            except TooManyOpen:
                raise
            except NvpoolError as error:
                attempt.failures.append((candidate.endpoint, error))
        if attempt.failures:
            raise attempt.error()
        raise Unreachable(f"none of {', '.join(endpoints) or 'no endpoints'} can be reached from this host")

    def _refresh_identity(self) -> None:
        if self._greeting.identity is not None:
            with contextlib.suppress(NvpoolError):  # keep the identity that was used so far
                # A process may outlive its certificate, which another process renews.
                self._greeting.identity.refresh()

    async def _try(self, candidate: _Candidate) -> Connection:
        began_s = self._clock.boottime_s()
        try:
            connection = await candidate.transport.connect(
                candidate.endpoint, self._greeting, deadline_s=began_s + ATTEMPT_S
            )
        except NvpoolError as error:
            now_s = self._clock.boottime_s()
            if now_s - began_s > SLOW_FAILURE_S and not isinstance(error, TooManyOpen):
                self.shunned = {key: until_s for key, until_s in self.shunned.items() if until_s > now_s}
                self.shunned[candidate.endpoint] = now_s + (SHUN_LOCAL_S if candidate.socket_path else SHUN_S)
            raise
        self.shunned.pop(candidate.endpoint, None)
        return connection

    def _usable(self, endpoints: Endpoints) -> Iterator[_Candidate]:
        """Endpoints whose transport is installed and can reach their host.

        A daemon may listen there or not.
        """
        for endpoint in endpoints:
            try:
                where = parse_endpoint(endpoint)
            except InvalidRequest:
                continue  # a newer version wrote it, or the map has an error: other endpoints may work
            transport = (
                transport_registry.upgrading(where.scheme)
                if self._transports is None
                else self._transports.get(where.scheme)
            )
            is_local = where.scheme.endswith("+unix")
            if transport is None or (
                where.host_id
                and self._greeting.host_id
                and is_local
                and where.host_id != self._greeting.host_id
            ):
                continue
            if is_local and self._certified and not _is_ours(where.path):
                continue
            yield _Candidate(endpoint, transport, where.path if is_local else "")

    def _candidates(self, endpoints: Endpoints) -> list[_Candidate]:
        """Endpoints that can be tried from this host, in the order to try them."""
        now_s = self._clock.boottime_s()
        return sorted(
            (candidate for candidate in self._usable(endpoints) if self._is_there(candidate)),
            key=lambda candidate: (
                self.shunned.get(candidate.endpoint, 0.0) > now_s,
                -candidate.transport.rank,
            ),
        )

    def _is_there(self, candidate: _Candidate) -> bool:
        """Whether the socket exists; for a certified caller also whether it is ours, which may have changed."""
        path = candidate.socket_path
        return not path or (os.path.exists(path) and (not self._certified or _is_ours(path)))

    # -- returning to a better endpoint

    def _better(self, endpoints: Endpoints) -> list[_Candidate]:
        """Endpoints with a higher rank than the live connection, best first."""
        rank = self._ranks.get(endpoints, inf)
        return sorted(
            (candidate for candidate in self._usable(endpoints) if candidate.transport.rank > rank),
            key=lambda candidate: -candidate.transport.rank,
        )

    async def _return(self, endpoints: Endpoints) -> None:
        """Replace the live connection by a better one as soon as possible. Ends with the connection."""
        now_s = self._clock.boottime_s
        pauses: dict[str, float] = {}
        due_s: dict[str, float] = {}
        while better := self._better(endpoints):
            for one in better:  # a socket may appear, or get another owner, at any time
                pause_s = pauses.setdefault(
                    one.endpoint, (RETURN_LOCAL_S if one.socket_path else RETURN_S)[0]
                )
                due_s.setdefault(one.endpoint, now_s() + pause_s)
            await asyncio.sleep(max(0.0, min(due_s[one.endpoint] for one in better) - now_s()))
            for candidate in better:
                replaced = self.live(endpoints)
                if replaced is None:
                    return
                endpoint = candidate.endpoint
                if due_s[endpoint] > now_s():
                    continue
                connection = None
                if self._is_there(candidate):
                    self._refresh_identity()
                    try:
                        connection = await self._try(candidate)
                    except NvpoolError:
                        pauses[endpoint] = min(
                            2 * pauses[endpoint], (RETURN_LOCAL_S if candidate.socket_path else RETURN_S)[1]
                        )
                due_s[endpoint] = now_s() + pauses[endpoint]
                if connection is None:
                    continue
                if self.live(endpoints) is not replaced:
                    # The worse one ended meanwhile; the next attempt takes the best anyway.
                    await connection.close()
                    return
                self.by_endpoints[endpoints], self._ranks[endpoints] = connection, candidate.transport.rank
                self._retire(endpoints, replaced)
                break

    def _returned(self, endpoints: Endpoints, task: asyncio.Task[None]) -> None:
        if self.returning.get(endpoints) is task:
            del self.returning[endpoints]

    def _retire(self, endpoints: Endpoints, connection: Connection) -> None:
        self._retired.setdefault(endpoints, []).append(connection)
        task = asyncio.get_running_loop().create_task(self._close_when_idle(endpoints, connection))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _close_when_idle(self, endpoints: Endpoints, connection: Connection) -> None:
        until_s = self._clock.boottime_s() + RETIRED_S_MAX
        await asyncio.sleep(RETIRED_LOOK_S)  # also for callers that received it just now
        while (  # noqa: ASYNC110 - no event reports this
            not connection.closed
            and connection.unanswered_since_s() < inf
            and self._clock.boottime_s() < until_s
        ):
            await asyncio.sleep(RETIRED_LOOK_S)
        await connection.close()
        self._retired[endpoints].remove(connection)
        if not self._retired[endpoints]:
            del self._retired[endpoints]

    async def close(self) -> None:
        """Close every connection and cancel every attempt. May be called twice."""
        self.closed = True
        tasks = [
            *(attempt.task for attempt in self._connecting.values()),
            *self.returning.values(),
            *self._retiring,
        ]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        open_ones = [
            *self.by_endpoints.values(),
            *(connection for some in self._retired.values() for connection in some),
        ]
        self.by_endpoints, self._retired = {}, {}
        if open_ones:
            await asyncio.gather(*[connection.close() for connection in open_ones])


def _is_ours(path: str) -> bool:
    """Whether the daemon at that socket grants this process the rights of a node.

    It does for root and for the owner of the socket. A missing socket may become ours: Dialer._is_there looks
    again when the socket exists.
    """
    user = os.geteuid()
    try:
        return not user or os.stat(path).st_uid == user
    except FileNotFoundError:
        return True
    except OSError:
        return False
