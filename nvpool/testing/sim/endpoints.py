"""Endpoints of simulated supervisors: one unix socket and two kinds of TCP.

`sim/faults` breaks and repairs them one by one.

Over TCP a process shows the certificate of its node (`Peer.member`), as with TLS; over a unix socket it shows
nothing. A daemon reaches its own supervisor over TCP, with the name of its node, while the unix socket is
broken. Used by `sim/pool`, `sim/control_plane` and `sim/faults`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from nvpool.core.clock import Clock
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import Unreachable
from nvpool.rpc.api import Connection, Greeting, Handler, Listener, Transport
from nvpool.testing.sim.network import SimTransport, SimulatedNetwork


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
            raise Unreachable(f"no reply from {endpoint}: {mode}")
        connection = await super().connect(listener_of(endpoint), greeting, deadline_s=deadline_s)
        served = connection.server_side
        if not self._is_local and self._network.owners.get(
            parse_endpoint(listener_of(endpoint)).path, ""
        ).startswith("supervisor"):
            served.peer = served.peer._replace(member=member_of(self._network.places[self._process]))
        return connection

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        listener = await super().listen(listener_of(endpoint), greeting, handler)
        if self._is_local:
            Path(parse_endpoint(endpoint).path).touch()  # noqa: ASYNC240 - in memory
            self._network.broken.pop(endpoint, None)  # a new supervisor makes its own socket
        return listener


def listener_of(endpoint: str) -> str:
    """Return the name of its listener as an endpoint of the in-process transport."""
    where = parse_endpoint(endpoint)
    return f"inproc://{where.path or f'{where.scheme}.{where.host}'}"


def transports_of(network: SimulatedNetwork, process: str, clock: Clock) -> dict[str, Transport]:
    kinds = (("inproc+unix", 60, True), ("inproc", 50, False), ("grpc", 10, False))
    return {
        scheme: EndpointTransport(network, process, clock, scheme, rank, is_local)
        for scheme, rank, is_local in kinds
    }
