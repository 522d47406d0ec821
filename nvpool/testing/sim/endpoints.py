"""Endpoints of simulated processes: TCP for all, and for supervisors also a unix socket and a second kind of TCP.

`sim/faults` breaks and repairs those of supervisors one by one. A daemon reaches its own supervisor over TCP,
with the name of its node, while the unix socket is broken. Used by `sim/stream_transport`, `sim/pool`,
`sim/control_plane` and `sim/faults`.
"""

from __future__ import annotations

from pathlib import Path

from nvpool.core.endpoint import Endpoint


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
