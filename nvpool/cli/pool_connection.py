"""Connections of commands to a pool, named by its directory or by the address of a node.

The commands that send requests to a supervisor use this module. Every request has a deadline. A request
that may be repeated is retried until the deadline, because a supervisor that died is back within a second.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvpool.cli.output import say
from nvpool.cli.pool_suggestions import pool_behind, remedy_for
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    NvpoolError,
    Unavailable,
    Unreachable,
    from_os_error,
)
from nvpool.core.renamed_fields import with_present_fields
from nvpool.host.pool_directory import PoolDirectory
from nvpool.poolmap.model import decode_map

if TYPE_CHECKING:
    from nvpool.security.tls import TlsIdentity

REACH_S = 10.0
"""Time limit for a first reply: a supervisor that died is back within a second or two."""


def directory_of(pool: str) -> PoolDirectory | None:
    """Return the pool directory that `pool` names, after a check; None if `pool` is an address."""
    pool = pool_behind(pool)
    if "://" in pool or (":" in pool and not Path(pool).exists()):
        return None
    return checked(pool)


def checked(path: str | os.PathLike[str]) -> PoolDirectory:
    """Return the pool directory at `path`.

    NotFound: `path` is no pool directory; the remedy suggests pools of this machine. WrongFormat: as
    `PoolDirectory.check`.
    """
    directory = PoolDirectory(path)
    try:
        directory.check()
    except NotFound as error:
        raise NotFound(str(error), remedy=remedy_for(os.fspath(path))) from None
    return directory


def endpoints_of(pool: str) -> tuple[str, ...]:
    """Return the endpoints of the supervisor of the node that `pool` names.

    InvalidRequest: `pool` is neither a directory nor an address. Other errors: the pool map cannot be read.
    """
    directory = directory_of(pool)
    pool = pool_behind(pool)
    if directory is not None:
        try:
            pool_map, node = decode_map(directory.poolmap.read_bytes()), directory.node
        except OSError as error:
            raise from_os_error(error, f"read {directory.poolmap}") from error
        nodes = [pool_map.node_by_id[node]] if node in pool_map.node_by_id else pool_map.nodes
        return tuple(endpoint for one in nodes for endpoint in one.endpoints)
    if "://" in pool:
        return (pool,)
    host, _, port = pool.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(
            f"{pool!r} is neither a pool directory nor the address of a node (HOST:PORT, as `nvpool "
            f"status` shows it)",
            remedy=remedy_for(pool),
        )
    return (f"stream://{pool}", f"grpc://{pool}")


def own_host(address: str) -> str:
    """Return the address of this host on the route to `address`.

    NotFound: there is no route to the host. InvalidRequest: `address` is not HOST:PORT.
    """
    import socket

    host, _, port = address.removeprefix("stream://").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise InvalidRequest(
            f"{address!r} is not the address of a node; write HOST:PORT, as `nvpool node token POOL` "
            "prints it"
        )
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # sends nothing
        except OSError as error:
            raise NotFound(f"{host} cannot be reached from here: {error.strerror or error}") from None
        own: str = probe.getsockname()[0]
        return own


def identity_for(pool: str) -> TlsIdentity | None:
    """Return the TLS identity that this command presents, from the pool directory; None for an address."""
    from nvpool.core.config import load
    from nvpool.security.tls import identity_in

    directory = directory_of(pool)
    if directory is None:
        return None
    try:
        pool_id = decode_map(directory.poolmap.read_bytes()).pool_id
    except OSError as error:
        raise from_os_error(error, f"read {directory.poolmap}") from error
    return identity_in(directory.secret, pool_id, load(directory.node_toml).network.plain_text)


async def ask(
    pool: str,
    method: int,
    request: Any,
    reply_type: Any,
    *,
    wait_s: float,
    repeat: bool = True,
    endpoints: tuple[str, ...] = (),
) -> Any:
    """Send a request to a supervisor and return its decoded reply.

    The request goes to `endpoints`, or to those of `pool` if there are none. With `repeat` it is retried
    until `wait_s` has passed. Unavailable, with the remedy: the supervisor did not reply within `wait_s`.
    """
    from nvpool.host.process_identity import host_id
    from nvpool.rpc.api import Greeting
    from nvpool.rpc.connection_pool import Dialer
    from nvpool.rpc.messages.read_write_codec import decoded

    endpoints = endpoints or endpoints_of(pool)
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    dialer = Dialer(Greeting("nvpool", identity=identity_for(pool)), host_id=host_id())
    nobody = False
    try:
        while True:
            try:
                reply = await dialer.call(
                    endpoints, method, request.SerializeToString(), deadline_s=deadline_s
                )
                return decoded(reply_type, reply.message)
            except Unavailable as error:
                late = isinstance(error, DeadlineExceeded)
                nobody = nobody or isinstance(error, Unreachable) or (late and not error.may_be_applied)
                if late or not repeat or SYSTEM_CLOCK.boottime_s() + 0.2 > deadline_s:
                    if nobody:
                        raise Unreachable(f"the pool {pool} does not answer", remedy=_remedy(pool)) from error
                    raise
            await asyncio.sleep(0.1)
    finally:
        await dialer.close()


def _remedy(pool: str) -> str:
    try:
        directory = directory_of(pool)
    except NvpoolError:
        return ""
    if directory is None:
        return "is the node up, and the port right?"
    if not directory.node:
        return "the directory is a client's: are the nodes of the pool up, and reached from here?"
    if (directory.path / "throw-away").exists():
        return f"start it with: nvpool dev up {directory.path}"
    return f"start it with: nvpool serve {directory.path}"


async def status_of(pool: str, wait_s: float = 5.0) -> dict[str, Any]:
    from nvpool.rpc.v1 import pool_pb2, wire_pb2

    reply = await ask(
        pool, wire_pb2.POOL_STATUS, pool_pb2.PoolStatusRequest(), pool_pb2.PoolStatusReply, wait_s=wait_s
    )
    return _result_of(reply.status)


def _result_of(text: bytes) -> dict[str, Any]:
    """Decode the JSON of a supervisor, which may be of an earlier version."""
    result: dict[str, Any] = with_present_fields(json.loads(text))
    return result


async def statuses(
    pool: str, instead: Callable[[], dict[str, Any] | None] = lambda: None
) -> AsyncIterator[dict[str, Any]]:
    """Yield the status of the pool repeatedly, until the caller stops the iteration.

    While the pool is unavailable, the user gets a message and the iteration waits. If `instead` returns a
    status meanwhile, that status is yielded and the iteration ends. Any other error ends it too.
    """
    while True:
        asked = asyncio.ensure_future(status_of(pool, 30.0))
        while not asked.done():
            await asyncio.wait([asked], timeout=1.0)
            if not asked.done() and (known := instead()) is not None:
                asked.cancel()
                yield known
                return
        try:
            seen = asked.result()
        except Unavailable as error:
            say(f"the pool does not answer at the moment: {error}")
            await asyncio.sleep(1.0)
        else:
            yield seen
            await asyncio.sleep(0.5)


async def change(pool: str, verb: str, arguments: dict[str, Any], wait_s: float = 180.0) -> dict[str, Any]:
    """Request a change of the pool from its supervisor, and return the result.

    The request is not retried. After Unavailable the caller must look whether the change was made.
    AccessDenied: this machine is not a node of the pool, or the user may not open the node's unix socket.
    """
    from nvpool.rpc.v1 import pool_pb2, wire_pb2

    reply = await ask(pool, wire_pb2.POOL_MAP, pool_pb2.MapRequest(), pool_pb2.MapReply, wait_s=REACH_S)
    directory = directory_of(pool)
    node = directory.node if directory is not None else 1
    if node == 0:
        raise AccessDenied("a pool is changed on its nodes; this directory is a client's")
    endpoints = decode_map(reply.map).node_by_id[node].endpoints  # the unix socket is among them
    request = pool_pb2.PoolChangeRequest(verb=verb, arguments=json.dumps(arguments).encode())
    reply = await ask(
        pool,
        wire_pb2.POOL_CHANGE,
        request,
        pool_pb2.PoolChangeReply,
        wait_s=wait_s,
        repeat=False,
        endpoints=endpoints,
    )
    return _result_of(reply.result)
