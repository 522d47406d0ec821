"""Life cycle of a daemon of one shard or target: lock, map, listeners, announcement, map watch, drain.

Used by daemons/meta and daemons/store. Guarantees: nothing is opened before this process holds run/NAME.lock.
The process is announced as serving only when it serves. On a stop, requests in progress are finished (in at
most drain_s) before the records are closed. This module knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.config import Config, NetworkConfig, Rdma, as_dict, load, networks_of
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import (
    BadConfiguration,
    CorruptRecord,
    Fenced,
    InUse,
    NvpoolError,
    Unavailable,
    from_os_error,
)
from nvpool.core.names import MEMBER_S
from nvpool.core.version import VERSION
from nvpool.host.pool_directory import Flock, PoolDirectory, announcement
from nvpool.host.pool_directory_modes import group_number
from nvpool.host.process_identity import host_id
from nvpool.metrics.exposition import Page
from nvpool.poolmap.model import PoolMap, decode_map
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import Call, Greeting, Listener
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.peer_limits import Bounds, Limits
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.transport_registry import listen
from nvpool.rpc.v1.pool_pb2 import MapReply, MapRequest
from nvpool.rpc.v1.wire_pb2 import POOL_MAP, PROCESS_METRICS
from nvpool.runtime import metrics as runtime_metrics
from nvpool.runtime.audit_events import MetaAudit, audit_log
from nvpool.runtime.cpu_latency import CpuLatencyRequest
from nvpool.runtime.daemon_process import EXIT_IN_USE, Stop, exit_code, keep_supervised, run
from nvpool.runtime.logging_setup import start_log
from nvpool.runtime.scheduling import schedule
from nvpool.security.tls import TlsIdentity, identity_in, leaves_host
from nvpool.security.volume_keys import PoolKeys

_MAP_WAIT_S = min(30.0, MEMBER_S / 12)
"""Longest wait for a new map; the certificate is checked as often."""
MAP_RETRY_S = 0.5
_PORT_WAIT_S = 10.0
REFRESH_S = 0.02
"""Shortest time between two looks at poolmap.json; a store lets clients retry after as long."""

log = logging.getLogger("nvpool.runtime.daemon_lifecycle")

Listen = Callable[[str, Greeting, Callable[[Call], None]], Awaitable[Listener]]


class Service(Protocol):
    def handle(self, call: Call) -> None: ...

    def update_map(self, pool_map: PoolMap) -> None: ...

    def measure(self, page: Page) -> None: ...

    async def start(self) -> None: ...

    def begin_drain(self) -> None:
        """Answer requests that wait for other requests.

        Called before new ones are refused and running ones drained.
        """

    async def close(self, drain_s: float) -> None: ...


class ServiceContext:
    """Environment that a daemon passes to its service.

    It consists of the directory, the shard or target number, the configuration, the present map, a dialer and
    the grant key.
    """

    def __init__(
        self,
        directory: PoolDirectory,
        number: int,
        config: Config,
        pool_map: PoolMap,
        dialer: Dialer,
        key: bytes,
    ):
        self.directory = directory
        self.number = number
        self.config = config
        self.pool_map = pool_map
        self.dialer = dialer
        self.grant_secret = key
        self.callers = Callers(operators_of(config))
        self.pool_keys = PoolKeys(
            key_file=config.encryption.key_file, key_command=config.encryption.key_command
        )
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, reason: str) -> None:
        """End the process because stored data may not be trusted.

        Its restart begins from what the drive holds.
        """
        if not self.failed.done():
            self.failed.set_exception(Fenced(reason))
            self.failed.exception()  # mark as retrieved, in case the process ends for another reason


class DaemonHandler:
    """Request handler of a daemon's listeners: answers what all roles share, then calls the service."""

    def __init__(
        self, service: Service, awake: CpuLatencyRequest, callers: Callers, audit: MetaAudit | None = None
    ) -> None:
        self._service = service
        self._callers = callers
        self._audit = audit
        self._awake = awake
        self._answer = getattr(service, "fast_path", None) and service.fast_path.answer
        self.fast_path = self._answer_fast if self._answer is not None else None

    def __call__(self, call: Call) -> None:
        if call.method == PROCESS_METRICS:
            self._callers.check(call)
            runtime_metrics.answer(call, self._service.measure)
            return
        self._awake.touch()
        if self._audit is None:
            self._service.handle(call)
            return
        watched = self._audit.watched(call)
        try:
            self._service.handle(watched)
        except Exception as error:
            watched.fail(error)

    def _answer_fast(
        self, buffer: bytearray, end: int, in_work: dict, reply_stats: ReplyStats, out: list, side
    ) -> int:
        if self._audit is None:
            taken = self._answer(buffer, end, in_work, reply_stats, out, side)
        else:
            taken = self._answer(buffer, end, in_work, reply_stats, out, side, self._audit.watched)
        if taken:
            self._awake.touch()
        return taken


def read_map(directory: PoolDirectory) -> PoolMap:
    try:
        return decode_map(directory.poolmap.read_bytes())
    except OSError as error:
        raise from_os_error(error, f"read {directory.poolmap}") from error


class MapRefresh:
    """Reads poolmap.json again when a request names a newer map than this process knows.

    Any client may claim a newer map, and to decode one takes milliseconds. So the file is looked at no more
    often than every REFRESH_S, and read only if it was replaced since the last time.
    """

    def __init__(
        self, directory: PoolDirectory, update: Callable[[PoolMap], None], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._directory = directory
        self._update = update
        self._clock = clock
        self._not_before_s = 0.0
        self._seen: tuple[int, int, int] | None = None

    def __call__(self) -> None:
        """Pass the map in the file to `update`, unless it was read before or a call came just now."""
        now_s = self._clock.boottime_s()
        if now_s < self._not_before_s:
            return
        self._not_before_s = now_s + REFRESH_S
        try:
            found = os.stat(self._directory.poolmap)
        except OSError as error:
            raise from_os_error(error, f"read {self._directory.poolmap}") from error
        # Before the file is read: one that is replaced meanwhile is read again at the next call.
        seen = found.st_ino, found.st_mtime_ns, found.st_size
        if seen != self._seen:
            pool_map = read_map(self._directory)
            self._seen = seen
            self._update(pool_map)


def read_grant_key(directory: PoolDirectory) -> bytes:
    try:
        key = directory.grant_key.read_bytes()
    except OSError as error:
        raise from_os_error(error, f"read {directory.grant_key}") from error
    if len(key) != 32:
        raise CorruptRecord(
            f"{directory.grant_key} has {len(key)} bytes, 32 are right; restore it from a copy"
        )
    return key


async def load_pool_keys(pool_keys: PoolKeys) -> None:
    """Load the pool's keys.

    If that fails, everything except encrypted volumes is served, and their users get an error.
    """
    try:
        await asyncio.get_running_loop().run_in_executor(None, pool_keys.load)
    except BadConfiguration as error:
        log.error("encrypted volumes cannot be used through this daemon: %s", error)


def operators_of(config: Config) -> int | None:
    """Id of the group whose processes have the rights of a node, or None. BadConfiguration."""
    return group_number(config.access.operators, "access.operators")


def is_wanted(endpoint: str, network: NetworkConfig) -> bool:
    """Whether a process of this node shall listen at the endpoint.

    A loopback address is wanted only if `network.host` names it; maps of earlier versions have one for each
    process.
    """
    where = parse_endpoint(endpoint)
    return not where.host or leaves_host(where) or where.host == network.host


def _remove_socket(endpoint: str) -> None:
    if endpoint.startswith("stream+unix://"):
        Path(parse_endpoint(endpoint).path).unlink(missing_ok=True)


async def listen_on(
    endpoints: tuple[str, ...], greeting: Greeting, handler: Callable[[Call], None], listen: Listen = listen
) -> list[Listener]:
    """Open a listener at each endpoint; after an error none is left open.

    Unix sockets of an earlier process are replaced: the caller holds the lock, so that process has ended. The
    kernel closes a killed process's descriptors one by one, so its lock can be free before its ports are: an
    address in use is retried for some seconds.

    BadConfiguration: a TCP endpoint without a certificate and without configured plain text."""
    for endpoint in endpoints:
        if greeting.identity is None and parse_endpoint(endpoint).host:
            raise BadConfiguration(
                f"{endpoint}: this directory has no certificate of its pool, and without one nothing "
                f'listens on TCP; set network.host = "" in node.toml for unix sockets alone, or '
                f"network.plain_text = true"
            )
    listeners: list[Listener] = []
    give_up_s = SYSTEM_CLOCK.boottime_s() + _PORT_WAIT_S
    try:
        for endpoint in endpoints:
            while True:
                _remove_socket(endpoint)
                try:
                    listeners.append(await listen(endpoint, greeting, handler))
                    break
                except InUse as error:
                    if SYSTEM_CLOCK.boottime_s() > give_up_s:
                        raise InUse(
                            f"{error}; end the program that listens there (ss -ltnp names it)"
                        ) from None
                    await asyncio.sleep(0.05)
    except BaseException:
        for listener in listeners:
            await listener.close()
        raise
    return listeners


def offering(rdma: Rdma) -> Listen:
    """`listen` for services with large replies: stream endpoints offer RDMA if the configuration enables
    it."""
    if rdma.enabled == "off" or not (rdma.networks or rdma.local):
        return listen
    from nvpool.rpc.transports.rdma import RdmaSettings, RdmaTransport, RdmaUnixTransport
    from nvpool.rpc.transports.ucx import missing

    if reason := missing():
        log.warning("no RDMA is offered, although node.toml wants it: %s", reason)
        return listen
    settings = RdmaSettings(
        networks_of(rdma.networks), rdma.local, rdma.transports, rdma.devices, rdma.poll_us
    )
    offering = {"stream": RdmaTransport(settings), "stream+unix": RdmaUnixTransport(settings)}

    def listen_there(
        endpoint: str, greeting: Greeting, handler: Callable[[Call], None]
    ) -> Awaitable[Listener]:
        found = offering.get(parse_endpoint(endpoint).scheme)
        return (
            listen(endpoint, greeting, handler)
            if found is None
            else found.listen(endpoint, greeting, handler)
        )

    return listen_there


def main(
    role: str,
    name: str,
    path: str,
    number: int,
    endpoints: Callable[[PoolMap], tuple[str, ...]],
    open_service: Callable[[ServiceContext], Awaitable[Service]],
) -> int:
    """Run a daemon from start to end; return its exit code."""
    directory = PoolDirectory(path)
    start_log(name, "info", None)
    try:
        directory.check()
        config = load(directory.node_toml)
        start_log(
            name,
            config.log.level,
            directory.log / f"{name}.log" if config.log.to == "file" else None,
            form=config.log.format,
            node_toml=directory.node_toml,
        )
        schedule(config.processors.scheduling)
        lock = Flock.take(directory.run / f"{name}.lock", name)
    except InUse as error:
        log.warning("%s", error)
        return EXIT_IN_USE
    except NvpoolError as error:
        log.error("%s", error)
        return exit_code(error)

    async def serve(stop: Stop) -> None:
        pool_map = read_map(directory)
        identity = identity_in(directory.secret, pool_map.pool_id, config.network.plain_text)
        greeting = Greeting(
            name, pool_map.fingerprint, identity=identity, limits=limits_of(config), local_users=True
        )
        dialer = Dialer(greeting, host_id=host_id())
        opened = ServiceContext(directory, number, config, pool_map, dialer, read_grant_key(directory))
        await load_pool_keys(opened.pool_keys)
        service = await open_service(opened)
        awake = CpuLatencyRequest(config.processors.awake)

        audit = audit_log(directory, name)
        handle = DaemonHandler(service, awake, opened.callers, MetaAudit(audit) if role == "meta" else None)
        listeners: list[Listener] = []
        try:
            service.update_map(pool_map)
            await service.start()
            directory.make_socket_directory()
            own = tuple(endpoint for endpoint in endpoints(pool_map) if is_wanted(endpoint, config.network))
            follow_members(identity, pool_map)
            listeners = await listen_on(
                own, greeting, handle, offering(config.rdma) if role == "store" else listen
            )
            directory.announce(
                name,
                announcement(
                    role,
                    number=number,
                    endpoints=own,
                    software=f"nvpool {VERSION}",
                    now_ms=SYSTEM_CLOCK.wall_ns() // 1_000_000,
                ),
            )
            keep_supervised(directory, stop)
            log.info("serving at %s", ", ".join(own))
            watching = asyncio.ensure_future(watch_map(directory, dialer, pool_map, service, identity))
            asked = asyncio.ensure_future(stop.asked.wait())
            await asyncio.wait([watching, asked, opened.failed], return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            for ended in (opened.failed, watching):
                if ended.done():
                    ended.result()  # both end only with an error: raise it
            watching.cancel()
        finally:
            drain_s = config.supervisor.drain_s if stop.asked.is_set() else 0.0
            deadline_s = SYSTEM_CLOCK.boottime_s() + drain_s
            service.begin_drain()
            await asyncio.gather(*(listener.close(drain_s) for listener in listeners), return_exceptions=True)
            await service.close(max(0.0, deadline_s - SYSTEM_CLOCK.boottime_s()))
            await dialer.close()
            awake.close()
            await asyncio.to_thread(audit.close)
            directory.withdraw(name)

    try:
        return run(serve)
    finally:
        lock.release()


def limits_of(config: Config) -> Limits:
    """Limits shared by all listeners of a daemon."""
    return Limits(
        Bounds(**as_dict(config)["limits"]),
        operators=operators_of(config),
        plain_text=config.network.plain_text,
    )


def follow_members(identity: TlsIdentity | None, pool_map: PoolMap) -> None:
    """Accept the members of this map, and close the connections of removed ones."""
    if identity is not None:
        identity.update_members(pool_map.members)


def show_renewed(identity: TlsIdentity | None) -> None:
    """Present our certificate after the supervisor has renewed it."""
    if identity is not None:
        try:
            identity.refresh()
        except NvpoolError as error:
            log.error("the renewed certificate cannot be used: %s", error)


async def watch_map(
    directory: PoolDirectory,
    dialer: Dialer,
    pool_map: PoolMap,
    service: Service,
    identity: TlsIdentity | None,
) -> None:
    """Pass each newer map to the service.

    The map comes from this node's supervisor or, while there is none, from poolmap.json. No error ends this:
    the service continues with the map that it has, as long as its leases last.
    """
    node, logged = directory.node, ""
    while True:
        newer = None
        show_renewed(identity)
        try:
            request = MapRequest(newer_than=pool_map.epoch, wait_s=_MAP_WAIT_S).SerializeToString()
            known = pool_map.node_by_id.get(node)
            reply = await dialer.call(
                known.endpoints if known is not None else (),
                POOL_MAP,
                request,
                deadline_s=SYSTEM_CLOCK.boottime_s() + _MAP_WAIT_S + 10,
            )
            raw = decoded(MapReply, reply.message).map
            newer, logged = decode_map(raw) if raw else None, ""
        except NvpoolError as error:
            await asyncio.sleep(MAP_RETRY_S)
            why = "" if isinstance(error, Unavailable) else f"the supervisor gives no pool map: {error}"
            try:
                newer = read_map(directory)
            except NvpoolError as unread:
                why = f"there is no pool map to read: {unread}"
            if why and why != logged:
                log.error("%s", why)
            logged = why
        if newer is not None and newer.epoch > pool_map.epoch:
            log.info("the pool map has epoch %d now", newer.epoch)
            pool_map = newer
            follow_members(identity, pool_map)
            service.update_map(pool_map)
