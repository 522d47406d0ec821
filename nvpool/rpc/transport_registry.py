"""Transports of this process: nvpool's own and those installed in the entry-point group `nvpool.transports`.

A transport is imported when an endpoint of its scheme is first used, so that a program which only uses
`stream` never pays for importing gRPC. The built-in transports are also listed here, because reading the
metadata of all installed packages costs a command 30 ms.
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
"""Built-in transports by scheme. A test keeps this table and the entry points in pyproject.toml equal."""


@lru_cache(maxsize=64)
def transport(scheme: str) -> Transport | None:
    """The single instance of this process for `scheme`; None if no transport is installed."""
    where = OURS.get(scheme) or _installed().get(scheme)
    if where is None:
        return None
    module, _, name = where.partition(":")
    made: Transport = getattr(import_module(module), name)()
    return made


@lru_cache(maxsize=1)
def _installed() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP)}


@lru_cache(maxsize=16)
def upgrading(scheme: str) -> Transport | None:
    """Transport for `scheme` that upgrades `stream` connections to RDMA where the server offers it.

    The upgrade also needs RDMA to work on this host. It costs nothing where UCX is not installed, and little
    where no server offers RDMA. For every other scheme the result is that of `transport`.
    """
    from nvpool.rpc.transports import ucx

    if scheme not in ("stream", "stream+unix") or ucx.missing():
        return transport(scheme)
    from nvpool.rpc.transports.rdma import RdmaTransport, RdmaUnixTransport

    return (RdmaTransport if scheme == "stream" else RdmaUnixTransport)(strict=False)


def only(scheme: str) -> dict[str, Transport] | None:
    """The transport of one scheme, by the schemes of the endpoints that it connects to.

    For `rdma` those are the schemes of `stream`: the connection is upgraded to RDMA where the server offers
    it, as stores do. None if the transport is not installed.
    """
    found = transport(scheme)
    if found is None:
        return None
    if scheme in ("rdma", "rdma+unix"):
        return {
            stream: ours for stream in ("stream", "stream+unix") if (ours := upgrading(stream)) is not None
        }
    return {scheme: found}


def transports() -> dict[str, Transport]:
    """All transports by scheme, highest rank first. Loads all of them."""
    found = {
        scheme: one for scheme in OURS.keys() | _installed().keys() if (one := transport(scheme)) is not None
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].rank))


async def listen(endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
    """Listen at `endpoint` with the transport of its scheme.

    InUse: as the transport reports it. BadConfiguration: no installed transport has the scheme.
    """
    found = transport(parse_endpoint(endpoint).scheme)
    if found is None:
        raise BadConfiguration(
            f"{endpoint}: no transport for it is installed; there are {', '.join(transports())}"
        )
    return await found.listen(endpoint, greeting, handler)
