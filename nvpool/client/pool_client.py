"""A client of a pool: finds the pool map, makes its parts, runs their background work.

`Client.open` is the only entry point for mounts, the SDK and tools; `Client.close` stops everything. A client
belongs to one event loop and one process: after a fork the child must not use the client.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable
from functools import partial
from urllib.parse import quote

from nvpool.client.certificate_renewal import keep_renewed, renew_once
from nvpool.client.state.options import ClientOptions, configured
from nvpool.client.state.pool_map_cache import PoolView, fetch_map, read_map_file
from nvpool.client.vfs.filesystem import Vfs
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.config import Config, load
from nvpool.core.errors import AccessDenied, BadConfiguration, InvalidRequest, NotFound, NvpoolError
from nvpool.core.names import squashes_root
from nvpool.host.pool_directory import PoolDirectory
from nvpool.host.process_identity import host_id, host_name
from nvpool.poolmap.model import PoolMap, encode_map
from nvpool.rpc import transport_registry
from nvpool.rpc.api import Greeting, Transport
from nvpool.rpc.connection_pool import Dialer
from nvpool.security.tls import TlsIdentity, identity_in
from nvpool.shm.mount_state import KeptMemory

__all__ = ["Client", "ClientOptions"]

log = logging.getLogger(__name__)

TICK_S = 0.5
"""Interval of background work: half of the second within which unstored bytes must be sent."""
CLOSE_S = 10.0
FIRST_MAP_S = 2.0
"""How long `Client.open` waits for a newer pool map where the directory is a client's.

The map in such a directory may be as old as the day on which the client joined. After this time the client
starts with that map.
"""


class Client:
    """A running client. `vfs` is the file system and `pool_map` the newest pool map.

    `dialer` holds the connections, for tools that send requests to daemons themselves.
    """

    def __init__(self, vfs: Vfs, view: PoolView, dialer: Dialer, clock: Clock):
        self.vfs = vfs
        self.dialer = dialer
        self._view = view
        self._clock = clock
        self._closed = False
        self._tasks = [asyncio.create_task(self._tick())]

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def pool_map(self) -> PoolMap:
        return self._view.map

    async def refresh_map(self) -> None:
        """Fetch the pool map once. If no node answers, the old map stays in use."""
        await self._view.refresh()

    @classmethod
    async def open(
        cls,
        where: str | os.PathLike[str] | PoolMap,
        name: str = "",
        options: ClientOptions | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        dialer: Dialer | None = None,
        kept: KeptMemory | None = None,
    ) -> Client:
        """Open a client of the pool that `where` names.

        `where` is the pool's directory on this host, "host:port" or an endpoint URL of any of its nodes, or a
        PoolMap. Without `options` the client uses section [client] of the directory's node.toml.

        This call does not contact the metadata service: the session starts with the first operation, so a
        mount comes up while a shard is down. With `kept` the client also writes the state that must outlive
        this process there; see Vfs.take_over.

        NotFound, WrongFormat: the directory is not a pool's. BadConfiguration. Unreachable: no node answers.
        """
        host = host_id()
        greeting = Greeting(name=name or f"client pid {os.getpid()}", host_id=host)
        directory, pool_map, shown = None, where, ()
        try:
            if not isinstance(where, PoolMap):
                directory = _directory(os.fspath(where))
                if directory is not None:
                    place = PoolDirectory(directory)
                    try:
                        pool_map = read_map_file(directory)
                    except AccessDenied:
                        pool_map, directory = None, None
                        shown = tuple(f"stream+unix://{quote(path)}" for path in place.shown_sockets())
                        if not shown:
                            raise
                    config = load(place.node_toml) if os.access(place.node_toml, os.R_OK) else Config()
                    options = options or configured(config.client)
                    if pool_map is not None:
                        greeting = greeting._replace(
                            identity=identity_in(place.secret, pool_map.pool_id, config.network.plain_text)
                        )
            options = options or ClientOptions()
            certified = (
                directory is not None
                and not PoolDirectory(directory).node
                and greeting.identity is not None
                and greeting.identity.secured
            )
            dialer = dialer or Dialer(
                greeting, host_id=host, clock=clock, transports=_only(options.transport), certified=certified
            )
            if not isinstance(pool_map, PoolMap):
                pool_map = await fetch_map(dialer, shown or _endpoints(os.fspath(where)), clock)
            dialer.set_fingerprint(pool_map.fingerprint)
        except BaseException:
            if dialer is not None:
                await dialer.close()
            raise
        clients = (
            PoolDirectory(directory) if directory is not None and not PoolDirectory(directory).node else None
        )
        if clients is not None:
            # no other process updates the map in this directory, so the client asks the nodes
            directory = None
        view = PoolView(pool_map, directory=directory, dialer=dialer, clock=clock)
        if greeting.identity is not None:
            greeting.identity.update_members(pool_map.members)
            view.changed.append(lambda newer: greeting.identity.update_members(newer.members))
        if clients is not None:
            view.changed.append(partial(_keep_nodes, clients, [pool_map.nodes]))
            await asyncio.wait([asyncio.ensure_future(view.refresh())], timeout=FIRST_MAP_S)
        squashed = certified and squashes_root(greeting.identity.own_member())
        vfs = Vfs(
            view,
            dialer,
            options,
            clock,
            name=f"{greeting.name} on {host_name()}",
            kept=kept,
            squashes_root=squashed,
        )
        client = cls(vfs, view, dialer, clock)
        if certified:
            # in a node's directory the node's supervisor renews
            client.start_renewal(clients, greeting.identity)
        return client

    def start_renewal(self, directory: PoolDirectory, identity: TlsIdentity) -> None:
        """Start the task that renews the client's certificate in its directory until `close`."""

        def once() -> Awaitable[bool]:
            return renew_once(directory, identity, self._view.map, self.dialer, clock=self._clock)

        self._tasks.append(asyncio.create_task(keep_renewed(once, identity)))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.vfs.run_once()
            except NvpoolError as error:
                log.warning("background work of the client: %s", error)
            except Exception:
                log.critical(
                    "background work of the client broke; it goes on with the next tick", exc_info=True
                )

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Store and report all written data, end the session and close the connections, within `timeout_s`.

        May be called twice. Data that cannot be stored in that time is lost without an error here; a caller
        that must know calls fsync first.
        """
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await self.vfs.close(self._clock.boottime_s() + timeout_s)
        await self._view.close()
        await self.dialer.close()


def _keep_nodes(directory: PoolDirectory, kept: list, newer: PoolMap) -> None:
    """Write the pool map to a client's directory when the set of nodes has changed.

    All nodes that were there when the client joined may be gone some day; then an old map would lead nowhere.
    """
    if newer.nodes != kept[0]:
        kept[0] = newer.nodes
        try:
            if read_map_file(str(directory.path)).epoch < newer.epoch:
                directory.publish(encode_map(newer))
        except (OSError, NvpoolError) as error:
            log.warning("the map in %s is not kept up to date: %s", directory.path, error)


def _only(scheme: str) -> dict[str, Transport] | None:
    """The one transport that the Dialer may use, or None for all installed transports."""
    if scheme == "auto":
        return None
    found = transport_registry.only(scheme)
    if found is None:
        raise BadConfiguration(
            f"no transport {scheme!r} is installed; there are {', '.join(transport_registry.transports())}"
        )
    return found


def _directory(place: str) -> str | None:
    return os.path.abspath(place) if "://" not in place and os.path.isdir(place) else None


def _endpoints(place: str) -> tuple[str, ...]:
    if "://" in place:
        return tuple(part for part in place.split(",") if part)
    if "/" in place:
        raise NotFound(
            f"there is no directory {place}; name a pool by its directory or by HOST:PORT of a node"
        )
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidRequest(
            f"{place} is neither a directory of a pool nor the address of a node; write DIR or HOST:PORT"
        )
    return (f"stream://{place}",)
