"""gRPC server of the Container Storage Interface (CSI) on a unix socket.

daemons/bridge runs `serve_csi` beside the Docker plugin, on the same event loop. Each call gets a reply, or a
status with a sentence for a person. Contents of requests are not logged, because they may contain secrets. A
call that is not served is UNIMPLEMENTED. A process that can open the socket may make every call; so only root
can open it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import socket
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode

from nvpool.bridge.csi.controller import Controller
from nvpool.bridge.csi.errors import CsiRefusal, invalid, log, status_of
from nvpool.bridge.csi.identity import CsiIdentity
from nvpool.bridge.csi.node import CsiNode
from nvpool.bridge.metrics import BridgeMetrics
from nvpool.bridge.request_validation import SOCKET_BYTES_MAX, shown
from nvpool.bridge.v1 import csi_pb2
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import BadConfiguration, InUse, from_os_error

if TYPE_CHECKING:
    from nvpool.bridge.volumes import BridgeVolumes

CALLS_MAX = 256
"""Concurrent calls; a node has a few dozen pods, a controller's sidecars make 10 to 100 calls at a time."""
GRACE_S = 5.0
_SEGMENT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
"""Valid values of a CSI topology segment that are also valid Kubernetes label values."""
_OPTIONS = (("grpc.max_concurrent_streams", CALLS_MAX), ("grpc.so_reuseport", 0))


def socket_path(address: str) -> Path:
    """Return the path in unix:///run/csi.sock, unix:/run/csi.sock or /run/csi.sock.

    BadConfiguration: the address is no unix socket, or its path is too long.
    """
    text = address.removeprefix("unix:")
    text = "/" + text.lstrip("/") if text.startswith("/") else text
    if not text.startswith("/") or "\0" in text or text.endswith("/"):
        raise BadConfiguration(
            f"{shown(address)} is not a unix socket; write it like unix:///run/nvpool/csi.sock"
        )
    if len(os.fsencode(text)) > SOCKET_BYTES_MAX:
        raise BadConfiguration(
            f"the path of the socket {shown(address)} is longer than {SOCKET_BYTES_MAX} bytes; choose a "
            "shorter one"
        )
    return Path(text)


def check_label(pool: str) -> None:
    """Raise BadConfiguration if the name of the pool is not valid as a label of nodes."""
    if not _SEGMENT.fullmatch(pool):
        raise BadConfiguration(
            f"{shown(pool)} cannot be a label of nodes: at most 63 letters, digits and - _ . of ASCII, "
            "with a letter or digit at both ends; give another one with --csi-pool"
        )


class _Calls(grpc.GenericRpcHandler):
    """Dispatcher of gRPC calls to the methods of the services with the same names."""

    def __init__(self, services: dict[str, object], counts: BridgeMetrics) -> None:
        self._counts = counts
        self._methods: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {}
        for name, service in services.items():
            for method in csi_pb2.DESCRIPTOR.services_by_name[name].methods:
                path = f"/{csi_pb2.DESCRIPTOR.package}.{name}/{method.name}"
                self._methods[path] = GetMessageClass(method.input_type), getattr(service, method.name)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        path = handler_call_details.method

        async def answer(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
            began_s = SYSTEM_CLOCK.boottime_s()
            reply, code, text = await self._answered(path, raw)
            if path in self._methods:
                self._counts.done(
                    "csi",
                    path.rpartition("/")[2].lower(),
                    SYSTEM_CLOCK.boottime_s() - began_s,
                    code.name.lower() if code is not StatusCode.OK else "",
                )
            if code is not StatusCode.OK:
                log.info("%s: %s: %s", path.rpartition("/")[2], code.name, text)
                await context.abort(code, text)
            return reply

        return grpc.unary_unary_rpc_method_handler(answer)

    async def _answered(self, path: str, raw: bytes) -> tuple[bytes, StatusCode, str]:
        """Return (reply, status, text). All exceptions are caught here, outside of gRPC's frames.

        Otherwise a traceback, kept for example by a log record, could hold an object of gRPC; if that object
        is freed after gRPC's last server, the process crashes.
        """
        try:
            return (await self._done(path, raw)).SerializeToString(), StatusCode.OK, ""
        except Exception as error:
            return b"", *status_of(error)

    async def _done(self, path: str, raw: bytes) -> Message:
        found = self._methods.get(path)
        if found is None:
            raise CsiRefusal(
                StatusCode.UNIMPLEMENTED,
                f"{path.rpartition('/')[2]} is not served here; see the capabilities",
            )
        request_class, method = found
        try:
            request = request_class.FromString(raw)
        except DecodeError:
            raise invalid("the request cannot be read: it is not a message of CSI 1") from None
        return await method(request)


async def serve_csi(
    volumes: BridgeVolumes,
    address: str,
    *,
    pool: str,
    controller: bool = True,
    node: bool = True,
    started: Callable[[], object] | None = None,
    counts: BridgeMetrics | None = None,
) -> None:
    """Serve CSI until cancelled; then calls in progress have GRACE_S to finish.

    `volumes` is started, and the caller owns it. `pool` is the label value of nodes that mount the pool.
    `started` is called once the server answers calls; calls are recorded in `counts`. A socket that an
    earlier bridge left at the address is replaced.

    BadConfiguration   the address or the pool's name cannot be used
    InUse              another process answers there already
    """
    path = socket_path(address)
    check_label(pool)
    services: dict[str, object] = {"Identity": CsiIdentity(node=node)}
    if controller:
        services["Controller"] = Controller(volumes, pool)
    if node:
        services["Node"] = CsiNode(volumes, pool)
    _keep_grpc()
    await asyncio.to_thread(_make_room, path)
    server = grpc.aio.server(
        handlers=[_Calls(services, counts or BridgeMetrics())],
        options=_OPTIONS,
        maximum_concurrent_rpcs=CALLS_MAX,
    )
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise BadConfiguration(f"no socket can be made at {path}: {error}") from None
    finally:
        os.umask(before)
    await server.start()
    log.info("CSI is served at %s: %s", path, ", ".join(services))
    if started is not None:
        started()
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(GRACE_S)
        gc.collect()  # calls in reference cycles: freed after gRPC's last server, they crash the process


@cache
def _keep_grpc() -> None:
    """Keep the core of gRPC alive until the process ends.

    Otherwise the core ends with the last server, and a call that is freed later, for example one held by the
    traceback in a log record, crashes the process with SIGSEGV (gRPC 1.85).
    """
    grpc.aio.init_grpc_aio()


def _make_room(path: Path) -> None:
    """Create the directory of the socket, and remove a socket at which no process listens.

    InUse: another bridge listens there. BadConfiguration: the path is not a socket.
    """
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not path.is_socket():
            if path.exists():
                raise BadConfiguration(
                    f"{path} is there and is not a socket; remove it, or choose another address"
                )
            return
        with socket.socket(socket.AF_UNIX) as caller:
            try:
                caller.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                return
    except OSError as error:
        raise from_os_error(error, f"use {path}") from error
    raise InUse(f"another bridge answers at {path}; stop it, or choose another address")
