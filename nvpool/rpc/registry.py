"""Which transports this process has: ours, and what is installed under the entry-point group `nvpool.transports`.

A transport is loaded when an endpoint of its scheme is first used, so that a program which only speaks `stream` never pays
for importing gRPC. Ours are named here too, because reading the metadata of all installed packages costs a command 30 ms.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import BadConfiguration
from nvpool.rpc.api import Greeting, Handler, Listener, Transport

GROUP = "nvpool.transports"

OURS = {
    "inproc": "nvpool.rpc.transports.inproc:InprocTransport",
    "stream+unix": "nvpool.rpc.transports.stream:UnixStreamTransport",
    "stream": "nvpool.rpc.transports.stream:StreamTransport",
    "grpc": "nvpool.rpc.transports.grpc:GrpcTransport",
    "rdma": "nvpool.rpc.transports.rdma:RdmaTransport",
    "rdma+unix": "nvpool.rpc.transports.rdma:RdmaUnixTransport",
}
"""A test keeps this and the entry points in pyproject.toml equal."""


@lru_cache(maxsize=64)
def transport(scheme: str) -> Transport | None:
    """The one instance of this process for `scheme`, or None when nothing is installed for it."""
    where = OURS.get(scheme) or _installed().get(scheme)
    if where is None:
        return None
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)()


@lru_cache(maxsize=1)
def _installed() -> dict[str, str]:
    from importlib.metadata import entry_points
    return {point.name: point.value for point in entry_points(group=GROUP)}


@lru_cache(maxsize=16)
def upgrading(scheme: str) -> Transport | None:
    """As `transport`, but a connection of `stream` goes on with RDMA where its other side offers that and it works here.
    Costs nothing more where UCX is not installed, and little where nobody offers it."""
    from nvpool.rpc.transports import ucx
    if scheme not in ("stream", "stream+unix") or ucx.missing():
        return transport(scheme)
    from nvpool.rpc.transports.rdma import RdmaTransport, RdmaUnixTransport
    return (RdmaTransport if scheme == "stream" else RdmaUnixTransport)(strict=False)


def only(scheme: str) -> dict[str, Transport] | None:
    """The one transport by the schemes of the endpoints that it connects to: for `rdma` those of `stream`, which go on with
    RDMA where it is offered, as stores do. None when it is not installed."""
    found = transport(scheme)
    if found is None:
        return None
    if scheme in ("rdma", "rdma+unix"):
        return {stream: upgrading(stream) for stream in ("stream", "stream+unix")}
    return {scheme: found}


def transports() -> dict[str, Transport]:
    """Every transport by its scheme, best first. Loads all of them."""
    found = {scheme: transport(scheme) for scheme in OURS.keys() | _installed().keys()}
    return dict(sorted(found.items(), key=lambda item: -item[1].rank))


async def listen(endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
    """Listen at `endpoint` with the transport of its scheme. InUse as the transport says; BadConfiguration when no transport
    has the scheme."""
    found = transport(parse_endpoint(endpoint).scheme)
    if found is None:
        raise BadConfiguration(f"{endpoint}: no transport for it is installed; there are {', '.join(transports())}")
    return await found.listen(endpoint, greeting, handler)
