"""Server of Docker's volume plugin protocol, version 1, on a unix socket.

Decodes each request, calls bridge/volumes, and encodes the result or error. The protocol is that of
docs.docker.com/engine/extend/plugins_volume (and legacy_plugins, plugin_api): POST with a JSON object; in the
JSON reply "Err" is the error. Docker shows that text to its user, so the text says what to do. Podman has the
same protocol.

Every request ends within DEADLINE_S, which is less than Docker waits. The size of the body is bounded, and
more than REQUESTS_MAX concurrent requests are refused. An interrupted request may be repeated, as all
operations of bridge/volumes. Docker retries while nothing answers at the socket, so a restart of the bridge
is only a pause.

This module is the only importer of aiohttp. daemons/bridge starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from nvpool.bridge.metrics import BridgeMetrics
from nvpool.bridge.request_validation import SOCKET_BYTES_MAX, shown
from nvpool.bridge.volumes import BridgeVolumes
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import (
    AccessDenied,
    AlreadyExists,
    BadConfiguration,
    Busy,
    DeadlineExceeded,
    InUse,
    InvalidRequest,
    NotFound,
    NotPermitted,
    NvpoolError,
    Refused,
    Stale,
    TooBig,
    Unavailable,
    from_os_error,
)
from nvpool.core.units import format_bytes

FACE = "docker/"
"""Prefix of the holder ids of this service in bridge/volumes; Docker's id of the mount follows."""
DEADLINE_S = 50.0
"""Below Docker's own limits: 60 s, and 120 s for a mount."""
BODY_BYTES_MAX = 64 << 10
REQUESTS_MAX = 256
CONTENT_TYPE = "application/vnd.docker.plugins.v1.2+json"

log = logging.getLogger("nvpool.bridge.docker")


class DockerRequest(msgspec.Struct, rename="pascal"):
    """Union of the fields of all requests."""

    name: str = ""
    id: str = msgspec.field(default="", name="ID")
    opts: dict[str, Any] | None = None


def _given(asked: DockerRequest) -> str:
    """Return the ID by which the engine distinguishes uses of a volume. InvalidRequest: there is none."""
    if not asked.id:
        raise InvalidRequest("there is no ID in the request; the engine gives each use of a volume one")
    return asked.id


def status_of(error: NvpoolError) -> int:
    """Return the HTTP status of an error, by class where Docker distinguishes classes, else by family."""
    for classes, status in (
        (NotFound, 404),
        ((AlreadyExists, InUse), 409),
        ((AccessDenied, NotPermitted), 403),
        (TooBig, 413),
        (Refused, 400),
        ((Stale, Unavailable), 503),
    ):
        if isinstance(error, classes):
            return status
    return 500


class DockerFace:
    """Service for Docker and Podman engines.

    `activated` is set whenever an engine connects: then the daemon reconciles the references in `volumes`.
    """

    def __init__(
        self,
        volumes: BridgeVolumes,
        *,
        deadline_s: float = DEADLINE_S,
        counts: BridgeMetrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._volumes, self.deadline_s, self._clock = volumes, deadline_s, clock
        self._counts = counts or BridgeMetrics()
        self.activated = asyncio.Event()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._runner: web.AppRunner | None = None
        self._socket: Path | None = None
        self._made: os.stat_result | None = None
        self._verbs: dict[str, Callable[[DockerRequest], Awaitable[dict[str, Any]]]] = {
            "/Plugin.Activate": self._activate,
            "/VolumeDriver.Capabilities": self._capabilities,
            "/VolumeDriver.Create": self._create,
            "/VolumeDriver.Remove": self._remove,
            "/VolumeDriver.Mount": self._mount,
            "/VolumeDriver.Unmount": self._unmount,
            "/VolumeDriver.Path": self._path,
            "/VolumeDriver.Get": self._get,
            "/VolumeDriver.List": self._list,
        }

    # -- life ------------------------------------------------------------------------------------------------------------

    async def start(self, path: Path) -> None:
        """Listen at the socket `path`, which only root may open; a dead socket there is replaced atomically.

        InUse: another process answers there. AccessDenied and other errors of the file system: the socket can
        not be created.
        """
        application = web.Application(client_max_size=BODY_BYTES_MAX)
        application.router.add_route("*", "/{path:.*}", self._serve)
        listening, self._made = _listen(path)
        self._socket = path
        self._runner = web.AppRunner(
            application, access_log=None, handle_signals=False, keepalive_timeout=30.0
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()

    async def close(self, drain_s: float = 10.0) -> None:
        """Remove the socket, accept no more requests, and wait up to `drain_s` for those in progress."""
        if self._socket is not None and self._made is not None:
            _take_away(self._socket, self._made)
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
            try:
                async with asyncio.timeout(drain_s):
                    await self._idle.wait()
            except TimeoutError:
                log.warning("%d requests were cut off; Docker repeats them", self._running)
            await self._runner.cleanup()

    # -- requests --------------------------------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.Response:
        began_s = self._clock.boottime_s()
        response, error = await self._response(request)
        if request.path in self._verbs:
            self._counts.done(
                "docker", request.path.rpartition(".")[2].lower(), self._clock.boottime_s() - began_s, error
            )
        return response

    async def _response(self, request: web.Request) -> tuple[web.Response, str]:
        """Return the response, and the name of the error or an empty string."""
        try:
            if self._running >= REQUESTS_MAX:
                raise Busy(f"{REQUESTS_MAX} requests are in work already; repeat it later")
            self._running += 1
            self._idle.clear()
            try:
                async with asyncio.timeout(self.deadline_s):
                    return _packed(200, await self._answer(request)), ""
            except TimeoutError:
                raise DeadlineExceeded(
                    f"nvpool has not done it within {self.deadline_s:.0f} s; repeat it, and see: nvpool "
                    "status"
                ) from None
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()
        except NvpoolError as error:
            status = status_of(error)
            (log.warning if status >= 500 else log.info)("%s: %s", request.path[:100], error)
            return _packed(status, {"Err": str(error)}), type(error).__name__
        except Exception as error:
            log.error("%s ended by an error that is none of ours", request.path[:100], exc_info=error)
            return _packed(
                500, {"Err": f"this is a bug of nvpool ({type(error).__name__}); the bridge's log has more"}
            ), "Bug"

    async def _answer(self, request: web.Request) -> dict[str, Any]:
        verb = self._verbs.get(request.path)
        if verb is None or request.method != "POST":
            raise NotFound(
                f"this is a volume plugin of Docker; it does not know {request.method[:10]} {request.path[:100]!r}"
            )
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise TooBig(f"the request has more than {BODY_BYTES_MAX} bytes") from None
        try:
            asked = msgspec.json.decode(body, type=DockerRequest) if body.strip() else DockerRequest()
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise InvalidRequest(
                f"the request is not what a volume plugin understands: {str(error)[:200]}"
            ) from None
        return await verb(asked)

    async def _activate(self, _: DockerRequest) -> dict[str, Any]:
        self.activated.set()
        return {"Implements": ["VolumeDriver"]}

    async def _capabilities(self, _: DockerRequest) -> dict[str, Any]:
        return {"Capabilities": {"Scope": "global"}}

    async def _create(self, asked: DockerRequest) -> dict[str, Any]:
        await self._volumes.create(asked.name, asked.opts)
        return {"Err": ""}

    async def _remove(self, asked: DockerRequest) -> dict[str, Any]:
        try:
            await self._volumes.remove(asked.name)
        except InUse:
            if not await self._volumes.reconcile(FACE):  # a killed engine did not report what ended
                raise
            await self._volumes.remove(asked.name)
        return {"Err": ""}

    async def _mount(self, asked: DockerRequest) -> dict[str, Any]:
        return {"Mountpoint": str(await self._volumes.stage(asked.name, FACE + _given(asked))), "Err": ""}

    async def _unmount(self, asked: DockerRequest) -> dict[str, Any]:
        await self._volumes.unstage(asked.name, FACE + _given(asked))
        return {"Err": ""}

    async def _path(self, asked: DockerRequest) -> dict[str, Any]:
        return {"Mountpoint": str(await self._volumes.path(asked.name) or ""), "Err": ""}

    async def _get(self, asked: DockerRequest) -> dict[str, Any]:
        volume = await self._volumes.get(asked.name)
        described = await self._described(volume)
        described["Status"] = {
            "size": format_bytes(volume.bytes_max) if volume.bytes_max else "no bound",
            "used": format_bytes(volume.bytes_used),
            "files_max": volume.files_max,
            "files": volume.files_used,
            "replicas": volume.replicas,
            "sealed": volume.sealed,
            "used by": list(volume.attachments),
        }
        return {"Volume": described, "Err": ""}

    async def _list(self, _: DockerRequest) -> dict[str, Any]:
        return {
            "Volumes": [await self._described(volume) for volume in await self._volumes.list()],
            "Err": "",
        }

    async def _described(self, volume: Any) -> dict[str, Any]:
        made = datetime.datetime.fromtimestamp(volume.created_ns // 1_000_000_000, datetime.UTC)
        return {
            "Name": volume.name,
            "Mountpoint": str(await self._volumes.path(volume.name) or ""),
            "CreatedAt": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


def _packed(status: int, reply: dict[str, Any]) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(reply), headers={"Content-Type": CONTENT_TYPE}
    )


def check_path(path: Path) -> Path:
    """Return the path at which the socket is bound before its rename. BadConfiguration: it is too long."""
    beside = path.parent / f".{path.name}.{os.getpid()}"  # Docker takes names in .sock for plugins
    if len(os.fsencode(beside)) > SOCKET_BYTES_MAX:
        raise BadConfiguration(
            f"the path of the socket {shown(str(path))} is too long; choose a shorter --docker-socket"
        )
    return beside


def _listen(path: Path) -> tuple[socket.socket, os.stat_result]:
    """Bind a socket that only root may open, and move it to `path` atomically."""
    if _answers(path):
        raise InUse(f"somebody answers at {path} already; end that bridge, or choose another --docker-socket")
    beside = check_path(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        listening.bind(os.fspath(beside))
        beside.chmod(0o600)
        listening.listen(REQUESTS_MAX)
        beside.rename(path)
        return listening, path.stat()
    except OSError as error:
        listening.close()
        beside.unlink(missing_ok=True)
        raise from_os_error(error, f"listen at {path}") from error


def _take_away(path: Path, made: os.stat_result) -> None:
    """Remove the socket, unless a successor has already replaced it."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.stat(), made):
            path.unlink()


def _answers(path: Path) -> bool:
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise InUse(f"{path} is there and no socket; choose another --docker-socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(1.0)
            channel.connect(os.fspath(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except TimeoutError:
        return True  # a listener whose queue is full
    except OSError as error:
        raise from_os_error(error, f"look who answers at {path}") from error
    return True
