"""Endpoints of simulated supervisors: one unix socket and two kinds of TCP, which break and are repaired one
by one.

Over TCP a process shows the certificate of its node (`Peer.member`), as with TLS; over a unix socket it shows
nothing. A daemon reaches its own supervisor over TCP, with the name of its node, while the unix socket is
broken. Used by `sim/pool`, `sim/management` and `sim/scenario`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nvpool.core.clock import Clock
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import Unreachable
from nvpool.rpc.api import Connection, Greeting, Handler, Listener, Transport
from nvpool.testing.sim.network import SimTransport, SimulatedNetwork

if TYPE_CHECKING:
    from nvpool.testing.sim.pool import SimPool

STAYS_SHARE = 0.4
"""Share of seeds in which no supervisor has a unix socket when the load ends and the final checks run."""
MODES = ("gone", "refuses", "silent")


def supervisor_endpoints(directory: Path, node: int) -> tuple[str, ...]:
    """Return endpoints, best first: a unix socket in `directory`, and two that other nodes reach too."""
    return (
        f"inproc+unix://{directory}/supervisor-{node}.sock?host=host-{node}",
        f"inproc://supervisor-{node}",
        f"grpc://supervisor-{node}:1",
    )


def host_of(place: str) -> str:
    return "host" + place.removeprefix("node")


def member_of(place: str) -> str:
    """Return the name in the certificate of a pool node's processes; empty for other hosts."""
    return f"node/{place}" if place[5:].isdigit() else ""


class EndpointTransport(SimTransport):
    """Transport to a simulated supervisor. `network.broken` names the endpoints that do not answer."""

    def __init__(
        self, network: SimulatedNetwork, process: str, clock: Clock, scheme: str, rank: int, is_local: bool
    ) -> None:
        super().__init__(network, process, clock)
        self.scheme = scheme
        self.rank = rank
        self._is_local = is_local

    async def connect(self, endpoint: str, greeting: Greeting, *, deadline_s: float) -> Connection:
        mode = self._network.broken.get(endpoint)
        if mode == "silent":
            await asyncio.sleep(max(0.0, deadline_s - self.clock.boottime_s()))
        if mode is not None:
            raise Unreachable(f"nobody answers at {endpoint}: {mode}")
        connection = await super().connect(_name(endpoint), greeting, deadline_s=deadline_s)
        served = connection.server_side
        if not self._is_local and self._network.owners.get(
            parse_endpoint(_name(endpoint)).path, ""
        ).startswith("supervisor"):
            served.peer = served.peer._replace(member=member_of(self._network.places[self._process]))
        return connection

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        listener = await super().listen(_name(endpoint), greeting, handler)
        if self._is_local:
            Path(parse_endpoint(endpoint).path).touch()  # noqa: ASYNC240 - in memory
            self._network.broken.pop(endpoint, None)  # a new supervisor makes its own socket
        return listener


def _name(endpoint: str) -> str:
    """Return the name of its listener as an endpoint of the in-process transport."""
    where = parse_endpoint(endpoint)
    return f"inproc://{where.path or f'{where.scheme}.{where.host}'}"


def transports_of(network: SimulatedNetwork, process: str, clock: Clock) -> dict[str, Transport]:
    kinds = (("inproc+unix", 60, True), ("inproc", 50, False), ("grpc", 10, False))
    return {
        scheme: EndpointTransport(network, process, clock, scheme, rank, is_local)
        for scheme, rank, is_local in kinds
    }


class EndpointFaults:
    """Break endpoints of supervisors, one or two of a node, until `over()`.

    Connections to a broken endpoint end, except for some of those to silent ones, which survive.
    """

    def __init__(
        self, pool: SimPool, chance: random.Random, over: Callable[[], bool], done: dict[str, int]
    ) -> None:
        self._pool = pool
        self._chance = chance
        self._over = over
        self._done = done
        self._stays = chance.random() < STAYS_SHARE

    async def run(self) -> None:
        chance, nodes = self._chance, [node.id for node in self._pool.first_map.nodes]
        while not self._over():
            await asyncio.sleep(chance.expovariate(0.4))
            node = chance.choice(nodes)
            endpoints = supervisor_endpoints(self._pool.directory, node)[: chance.choice((1, 1, 2))]
            mode = chance.choice(MODES)
            lasts_s = chance.uniform(0.2, 9.0)
            self._record_event(
                f"{len(endpoints)} endpoints of supervisor-{node} are {mode} for {lasts_s:.1f} s"
            )
            self._done["endpoints"] += 1
            for endpoint in endpoints:
                self._break(endpoint, mode)
            await asyncio.sleep(lasts_s)
            for endpoint in endpoints:
                self._mend(endpoint)
        if self._stays:
            self._record_event("the unix sockets of all supervisors are gone")
            for node in nodes:
                self._break(supervisor_endpoints(self._pool.directory, node)[0], "gone")

    def _record_event(self, event: str) -> None:
        self._pool.invariants.happened(asyncio.get_running_loop().time(), event)

    def _break(self, endpoint: str, mode: str) -> None:
        where = parse_endpoint(endpoint)
        self._pool.network.broken[endpoint] = mode
        if mode == "gone" and where.scheme.endswith("+unix"):
            Path(where.path).unlink(missing_ok=True)
        if mode != "silent" or self._chance.random() < 0.5:
            self._pool.network.hang_up_at(_name(endpoint))

    def _mend(self, endpoint: str) -> None:
        where = parse_endpoint(endpoint)
        self._pool.network.broken.pop(endpoint, None)
        if where.scheme.endswith("+unix"):
            Path(where.path).touch()
