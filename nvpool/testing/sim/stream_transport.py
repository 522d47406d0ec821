"""Stream transport of a simulated process: the real connections of rpc/transports/stream on simulated sockets.

Both ends of a connection are the product's: frames, checksums, the request tables, and the fast paths that a
listener asks, compiled if they are built. Only sockets and TLS are left out. Over TCP the listener sees the
certificate of the peer's node (`Peer.member`), as with TLS; over a unix socket it sees none.

Every process has a TCP endpoint. A supervisor also has a unix socket, and an endpoint of the scheme `grpc`,
which carries the same frames here: it stands for a transport of a lower rank. `sim/faults` breaks and repairs
them one by one. A daemon reaches its own supervisor over TCP, with the name of its node, while the unix socket
is broken. Used by `sim/pool`, `sim/control_plane` and `sim/faults`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from nvpool.core.clock import Clock
from nvpool.core.endpoint import Endpoint, parse_endpoint
from nvpool.rpc.api import Greeting, Handler, Listener, Transport
from nvpool.rpc.peer_limits import Limits
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.transports.socket_options import TlsOptions, listen_error
from nvpool.rpc.transports.stream import (
    StreamConnection,
    StreamListener,
    StreamServed,
    StreamTransport,
    UnixStreamTransport,
)
from nvpool.testing.sim.network import Server, SimulatedNetwork, StreamEnd

GRPC_RANK = 10


def endpoint_of(process: str) -> str:
    """Return the endpoint of a process that has one."""
    return f"stream://{process}:1"


def supervisor_endpoints(directory: Path, node: int) -> tuple[str, ...]:
    """Return endpoints, best first: a unix socket in `directory`, and two that other nodes reach too."""
    name = f"supervisor-{node}"
    return f"stream+unix://{directory}/{name}.sock?host=host-{node}", endpoint_of(name), f"grpc://{name}:1"


def address_of(where: Endpoint) -> str:
    """Return the address of an endpoint in the simulated network."""
    return f"{where.scheme}://{where.path or where.host}"


def host_of(place: str) -> str:
    """Return the id of the host that is this node."""
    return "host" + place.removeprefix("node")


def member_of(place: str) -> str:
    """Return the name in the certificate of a pool node's processes; empty for other hosts."""
    return f"node/{place}" if place[5:].isdigit() else ""


class SimulatedListener(StreamListener):
    """Listener whose connections come from the simulated network."""

    def __init__(
        self,
        network: SimulatedNetwork,
        address: str,
        endpoint: str,
        greeting: Greeting,
        handler: Handler,
        local: bool,
        clock: Clock,
    ) -> None:
        super().__init__(greeting, handler, local, clock)
        self.endpoint = endpoint
        self._network = network
        self._address = address

    def accept(self, end: StreamEnd) -> StreamServed:
        """Return the server side of a new connection."""
        place = self._network.places[end.peer.process]
        peer = (
            Peer("unknown", "unix", True)
            if self.local
            else Peer("unknown", f"{place}:1", False, member_of(place))
        )
        return StreamServed(self, known_peer=peer)

    async def close(self, drain_s: float = 0.0) -> None:
        """Close as StreamListener.close does."""
        self._network.servers.pop(self._address, None)
        await super().close(drain_s)


class SimulatedTransport(StreamTransport):
    """Transport of one process for the endpoints of one scheme."""

    def __init__(
        self, network: SimulatedNetwork, process: str, clock: Clock, scheme: str = "stream", rank: int = 30
    ) -> None:
        super().__init__(clock)
        self.scheme = scheme
        self.rank = rank
        self.local = scheme.endswith("+unix")
        self._network = network
        self._process = process

    async def _open(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: Callable[[], StreamConnection],
        where: Endpoint,
        tls: TlsOptions,
    ) -> None:
        await self._network.connect(self._process, address_of(where), protocol)

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        """Listen as StreamTransport.listen does. InUse: a process listens there."""
        where = parse_endpoint(endpoint)
        if greeting.limits is None:
            # Plain text: no other host is limited, since the time slices of limited peers are measured in real time.
            greeting = greeting._replace(limits=Limits(clock=self._clock, plain_text=True))
        address = address_of(where)
        listener = SimulatedListener(
            self._network, address, endpoint, greeting, handler, self.local, self._clock
        )
        try:
            self._network.listen(address, Server(self._process, listener.accept))
        except OSError as error:
            raise listen_error(error, endpoint) from None
        if self.local:
            Path(where.path).touch()  # noqa: ASYNC240 - in memory
            self._network.broken.pop(address, None)  # a new supervisor makes its own socket
        return listener


def transports_of(network: SimulatedNetwork, process: str, clock: Clock) -> dict[str, Transport]:
    """Return the transports of a process by scheme."""
    kinds = (
        ("stream+unix", UnixStreamTransport.rank),
        ("stream", StreamTransport.rank),
        ("grpc", GRPC_RANK),
    )
    return {scheme: SimulatedTransport(network, process, clock, scheme, rank) for scheme, rank in kinds}
