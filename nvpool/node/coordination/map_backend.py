"""Map backend of this node: the embedded coordinator, the pool's own etcd, or the transition between them.

Used by nvpoold (what to open) and node/admin/join_server (the transition). DIR/coordinator.json records the
state (provision/map_location):

    embedded   the map is in map/; with `own` an etcd member is being prepared, which nothing uses yet
    moving     the map in map/ does not change any more; its successor is, or will be, the first in etcd
    etcd       the map is in etcd at `members`

Each step is durable before the next begins, and each start continues from the recorded state. Until "moving"
is recorded, the content of etcd is void; from then on the embedded map is the first part of etcd's history.
So there are never two maps that both change.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection

import msgspec

from nvpool.cluster.coordinator_api import MapCoordinator
from nvpool.cluster.embedded_coordinator import EmbeddedCoordinator
from nvpool.cluster.etcd.client import EtcdCertificates
from nvpool.cluster.etcd.coordinator import EtcdCoordinator
from nvpool.cluster.switchable_coordinator import LastKnownMap, Relay
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import Config, NetworkConfig
from nvpool.core.endpoint import host_port
from nvpool.core.errors import (
    BadConfiguration,
    CorruptRecord,
    InvalidRequest,
    NvpoolError,
    Refused,
    StaleIdentity,
    Unavailable,
)
from nvpool.core.programs import Program, command
from nvpool.host.pool_directory import PoolDirectory
from nvpool.host.process_identity import host_id
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.node.child_process import Child
from nvpool.node.coordination.etcd_crl import write_revoked
from nvpool.node.coordination.peer_maps import newest_elsewhere
from nvpool.poolmap.model import EtcdMember, PoolMap, changed, encode_map, problems_of
from nvpool.poolmap.nodes.etcd_membership import clients, last_revoked, of_node
from nvpool.provision.create import free_ports
from nvpool.provision.map_location import (
    EXTERNAL_SECRET,
    MapLocation,
    OwnMember,
    read_map_location,
    write_map_location,
)
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.runtime.daemon_lifecycle import read_map
from nvpool.security.tls import (
    AUTHORITY_FILE,
    AUTHORITY_KEY_FILE,
    CERTIFICATE_FILE,
    ETCD_SECRET,
    identity_in,
    read_key,
)

log = logging.getLogger("nvpool.node.coordination.map_backend")

AGAIN_S = 1.0
_FIRST_WAIT_S = 30.0
"""Time for etcd to answer when it starts for the first time."""
_RECOVER_S = 90.0
_SURE_S = 15.0
"""Silence of etcd before it is given up: longer than an election, with more than one attempt for each
member."""
EPOCHS_SKIPPED = 1000
"""Epochs that the map skips after a recovery: more than the lost ones that others may have seen."""


class MapBackend:
    """Opens the node's coordinator and changes its kind. Other modules use `relay`."""

    def __init__(
        self,
        directory: PoolDirectory,
        config: Config,
        relay: Relay,
        location: MapLocation,
        on_fence: Callable[[str], None],
    ):
        self._directory = directory
        self._config = config
        self.relay = relay
        self._location = location
        self._on_fence = on_fence
        self._moving = asyncio.Lock()
        self.stopping = asyncio.Event()
        self._going_on: asyncio.Task[None] | None = None
        self.etcd: Child | None = None
        """Process of the etcd member on this node, or None."""
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, directory: PoolDirectory, config: Config, on_fence: Callable[[str], None]
    ) -> MapBackend:
        """Open the coordinator with a map in any case.

        While etcd does not answer, the local copy of the map is used. `on_fence` is called when this process
        cannot continue.
        """
        location = read_map_location(directory)
        if location.kind != "etcd":
            kv = await LmdbKv.open(directory.map, LmdbOptions(), on_fence=on_fence)
            inner: MapCoordinator = await EmbeddedCoordinator.open(kv, directory.publish)
            if location.kind == "moving":
                held = LastKnownMap(inner.pool_map, "the pool map is on its way into etcd; try again")
                await inner.close()
                inner = held
        else:
            inner = LastKnownMap(read_map(directory), _no_etcd(location.members))
        keeper = cls(directory, config, Relay(inner), location, on_fence)
        keeper._start_etcd()
        if location.kind != "embedded":
            keeper._begin_going_on()
            await asyncio.wait([keeper._going_on], timeout=_FIRST_WAIT_S / 10)
        return keeper

    def _begin_going_on(self) -> None:
        self._going_on = asyncio.ensure_future(self._go_on())
        self._going_on.add_done_callback(
            lambda done: (
                done.cancelled()
                or done.exception() is None
                or self._on_fence(f"the way to etcd has ended: {done.exception()!r}")
            )
        )

    def _start_etcd(self) -> None:
        own = self._location.own
        if own is not None and self.etcd is None:
            arguments = command(Program.ETCD, str(self._directory.path), str(own.node))
            self.etcd = Child(
                self._directory,
                "etcd",
                own.node,
                arguments,
                self._config.supervisor,
                SYSTEM_CLOCK,
                self.before_start,
            )
            self._keeper = asyncio.ensure_future(self.etcd.keep(self.stopping))

    # -- this node's etcd member -----------------------------------------------------------------------------

    @property
    def own(self) -> OwnMember | None:
        return self._location.own

    @property
    def is_in_etcd(self) -> bool:
        return self._location.kind == "etcd"

    @property
    def own_data_is_lost(self) -> bool:
        """Whether our member has a vote but has lost its data: it must not start, since it could vote
        twice."""
        own = self._location.own
        if own is None or own.alone or not self.is_in_etcd or (own.data(self._directory) / "member").exists():
            return False
        entry = of_node(self.relay.pool_map, own.node)
        return entry is not None and entry.generation == own.generation and entry.state in ("up", "leaving")

    async def before_start(self) -> None:
        """Check that this node's member of etcd may start. Unavailable: it has lost its data or was removed."""
        if self.own_data_is_lost:
            raise Unavailable(
                f"what this node's member of etcd held is not there: {self.own.data(self._directory)}"
            )
        if self.is_in_etcd and not self.own.alone:
            await self._look_around()
        self.write_revoked()

    async def _look_around(self) -> None:
        """Before the start check with the other nodes that our member still counts.

        Unavailable: it was removed while this node was offline. The other members may have continued without
        it, and together with other lost members it could start a second history.
        """
        try:
            newer = await self._elsewhere()
        except StaleIdentity:  # node/coordination/etcd_members reports it in the status
            newer = None
        known = newer or self.relay.pool_map  # our map may come from an earlier check
        if newer is not None and newer.etcd:
            self.learn(newer)
        if not self._is_counted_on(known):
            raise Unavailable("this node's etcd member was removed while the node was away")

    async def _elsewhere(self) -> PoolMap | None:
        """Result of `newest_elsewhere`."""
        pool_map = self.relay.pool_map
        identity = identity_in(self._directory.secret, pool_map.pool_id, self._config.network.plain_text)
        dialer = Dialer(Greeting("supervisor", pool_map.fingerprint, identity=identity), host_id=host_id())
        try:
            return await newest_elsewhere(pool_map, self._directory.node, dialer)
        finally:
            await dialer.close()

    def _is_counted_on(self, known: PoolMap) -> bool:
        """Whether our member keeps the map, according to the map `known`."""
        own = self._location.own
        if not known.etcd or known.epoch <= own.generation:  # then our member is newer (`recover`)
            return True
        entry = of_node(known, own.node)
        return entry is not None and entry.generation == own.generation

    def write_revoked(self) -> None:
        """Give etcd the list of removed nodes, which it reads at its next handshake.

        AccessDenied: impossible.
        """
        if not self._config.network.plain_text:
            write_revoked(self._directory, self.relay.pool_map)

    async def start_again(self) -> None:
        """Restart our member, to close its connections of removed nodes."""
        await self._end_etcd()
        self._start_etcd()

    async def take_place(self, generation: int) -> OwnMember:
        """Choose the addresses of our member and delete the data of an earlier one. May be repeated."""
        own = self._location.own
        if own is None or own.generation != generation:
            await self.give_place_up()
            pool_map = self.relay.pool_map
            client, peer = _places_for_etcd(self._config.network, pool_map)
            own = OwnMember(self._directory.node, client, peer, (), pool_map.pool_id, "existing", generation)
            shutil.rmtree(own.data(self._directory), ignore_errors=True)
            self._put(msgspec.structs.replace(self._location, own=own))
        return own

    def begin(self, cluster: tuple[tuple[int, str], ...]) -> None:
        """Start our member; if it has no data, it starts as a part of `cluster`."""
        own = self._location.own
        if not (own.data(self._directory) / "member").exists() and own.cluster != cluster:
            self._put(
                msgspec.structs.replace(self._location, own=msgspec.structs.replace(own, cluster=cluster))
            )
        self._start_etcd()

    async def give_place_up(self) -> None:
        """Remove our member: on return nothing of it is left. May be repeated."""
        await self._end_etcd()
        own = self._location.own
        if own is not None:
            await asyncio.to_thread(shutil.rmtree, own.data(self._directory), ignore_errors=True)
            self._put(msgspec.structs.replace(self._location, own=None))

    async def _end_etcd(self) -> None:
        child, keeper = self.etcd, self._keeper
        self.etcd = self._keeper = None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await child.end(self._config.supervisor.drain_s, asyncio.Event())

    def use(self, members: tuple[str, ...]) -> None:
        """Use these members of etcd from now on, also after a restart."""
        if members and members != self._location.members:
            self._put(msgspec.structs.replace(self._location, members=members))
            self.show_certificates()

    def show_certificates(self) -> None:
        """Present to etcd the certificate that is in secret/ now."""
        if isinstance(self.relay.inner, EtcdCoordinator):
            self.relay.inner.use(self._nearest(), self.certificates())

    def _nearest(self) -> tuple[str, ...]:
        """Members of etcd, this node's own first: its users do not notice when another node is cut off."""
        own = self._location.own
        return tuple(sorted(self._location.members, key=lambda member: own is None or member != own.client))

    def learn(self, pool_map: PoolMap) -> None:
        """Use the newer map of another node while etcd is unreachable: etcd's members may have changed."""
        held = self.relay.inner
        if (
            self.is_in_etcd
            and isinstance(held, LastKnownMap)
            and not problems_of(held.pool_map, pool_map)
            and held.take(pool_map)
        ):
            self._directory.publish(encode_map(pool_map))
            self.use(clients(pool_map))

    def certificates(self) -> EtcdCertificates | None:
        external = self._location.external
        if external == "plain" or (not external and self._config.network.plain_text):
            return None
        secret = self._directory.secret / (EXTERNAL_SECRET if external else ETCD_SECRET)
        try:
            return EtcdCertificates(
                *((secret / name).read_bytes() for name in (AUTHORITY_FILE, CERTIFICATE_FILE)),
                read_key(secret),
            )
        except OSError as error:
            raise BadConfiguration(f"{error.filename} cannot be read: {error.strerror}") from None

    @property
    def external(self) -> str:
        """Security of an operator's own etcd: "secured" or "plain"; empty for the pool's etcd."""
        return self._location.external

    @property
    def members(self) -> tuple[str, ...]:
        """Addresses of etcd's members, for callers that are to use it."""
        return self._location.members

    async def recover(self, lost: Collection[int] = ()) -> PoolMap:
        """Make our member the only one, with the newest map that this node knows.

        The lost members must never be started with their old data again. A node without a member creates one
        if `lost` names all nodes that have one. Refused: etcd works, or this node lacks what it needs. Once
        begun, the same call and every start continue the recovery.
        """
        own = self._location.own
        if not self.is_in_etcd or own is None:
            self._check_heir(lost, self.relay.pool_map)
        if own is None or not own.alone:
            try:
                await EtcdCoordinator.answers(self._location.members, self.certificates(), wait_s=_SURE_S)
            except Unavailable:
                pass
            else:
                raise Refused(
                    "most members of etcd answer: there is nothing to recover, and those that are away are replaced "
                    "by themselves"
                )
            await self._check_not_left_behind(lost)
            if own is None:
                own = await self.take_place(self.relay.pool_map.epoch)
            self._put(msgspec.structs.replace(self._location, own=msgspec.structs.replace(own, alone=True)))
        if self._going_on is not None:
            self._going_on.cancel()
            await asyncio.gather(self._going_on, return_exceptions=True)
        await self.relay.switch(LastKnownMap(self.relay.pool_map, "etcd is being recovered; try again"))
        await self.start_again()
        self._begin_going_on()
        await asyncio.wait([self._going_on], timeout=_RECOVER_S)
        if not self._going_on.done():
            raise Unavailable(f"etcd does not answer yet; see {self._directory.log}/{self.etcd.name}.log")
        self._going_on.result()
        return self.relay.pool_map

    async def _check_not_left_behind(self, lost: Collection[int]) -> None:
        """Raise Refused if this node, or its etcd member, was removed while it was offline.

        Another node may know of the removal. The others continued without it, and this node would create a
        second history of the pool.
        """
        try:
            newer = await self._elsewhere()
        except StaleIdentity:
            raise Refused(
                "this node was removed from the pool while it was away and cannot take over the map. To continue "
                "with other nodes alone, run the command there. To join again: nvpool pool destroy "
                f"{self._directory.path}   and then nvpool node join HOST:PORT"
            ) from None
        if newer is None:
            return
        self.learn(newer)
        if self._location.own is None:
            self._check_heir(lost, newer)
        elif not self._is_counted_on(newer):
            keeping = ", ".join(str(one.node) for one in newer.etcd)
            raise Refused(
                f"this node's etcd member was removed while the node was away; these nodes have members: {keeping}. "
                f"If most of them are lost for good, run the command on one that is left"
            )

    def _check_heir(self, lost: Collection[int], known: PoolMap) -> None:
        """Raise Refused unless this node may take over the map from lost members.

        This node has no etcd member, and all members must be lost."""
        keeping = sorted(one.node for one in known.etcd)
        if self._location.kind != "etcd" or self._location.external or not keeping:
            raise Refused("this node has no etcd member, and no other node has one")
        member_nodes = ", ".join(map(str, keeping))
        if {*lost} != {*keeping}:
            raise Refused(
                f"this node has no etcd member; these nodes have one: {member_nodes}. If all are lost for good, name each "
                f"with --lost. Switch them off first, and never start them again with their present pool "
                f"directories: a node that is only cut off would continue as a second pool, and the writes of one "
                f"would be lost"
            )
        if not all(
            (self._directory.secret / below / AUTHORITY_KEY_FILE).exists() for below in ("", ETCD_SECRET)
        ):
            raise Refused(
                f"this node lacks the pool's CA keys, which only node {member_nodes} had: without them no machine can "
                f"join and no certificate can be renewed. Copy secret/{AUTHORITY_KEY_FILE} and "
                f"secret/{ETCD_SECRET}/{AUTHORITY_KEY_FILE} from a backup of its pool directory, or create the "
                f"pool again and import the files"
            )

    async def _be_alone(self) -> None:
        """Continue `recover` once our member runs as the only one."""
        location = self._location
        own, known = location.own, self.relay.pool_map
        entry = EtcdMember(
            own.node, own.client, own.peer, generation=own.generation, revoked=last_revoked(known)
        )

        def after(newest: PoolMap) -> PoolMap:
            # Others may have seen maps that we have not, and accept none with an older epoch.
            new = changed(newest if newest.epoch > known.epoch else known, etcd=(entry,))
            return msgspec.structs.replace(new, epoch=new.epoch + EPOCHS_SKIPPED)

        try:
            await EtcdCoordinator.overwrite(
                (own.client,), known.pool_id, after, certificates=self.certificates()
            )
        except CorruptRecord:  # the data of etcd is lost as well: the local copy of the map is used
            found = await EtcdCoordinator.found((own.client,), after(known), certificates=self.certificates())
            await found.close()
        self._put(
            msgspec.structs.replace(
                location,
                members=(own.client,),
                own=msgspec.structs.replace(
                    own, alone=False, state="existing", cluster=((own.node, own.peer),)
                ),
            )
        )
        await self.start_again()
        log.warning("this node's member of etcd is the only one now")

    # -- from the embedded coordinator to etcd ---------------------------------------------------------------

    async def move(self) -> None:
        """Move the map to etcd; on return it is there. Does nothing if it already was.

        Refused, with the remedy: it is not possible. Unavailable: the move is in progress; the same call
        continues, and so does every start.
        """
        async with self._moving:
            if self._location.kind == "embedded":
                await self._prepare()
                # From here on no embedded map is made: we hold the turn, and the next start finds "moving".
                async with self.relay.turn:
                    self._put(msgspec.structs.replace(self._location, kind="moving"))
                    await self.relay.switch(
                        LastKnownMap(self.relay.pool_map, "the pool map is on its way into etcd; try again")
                    )
                self._begin_going_on()
            if self._location.kind == "moving":
                await asyncio.wait([self._going_on], timeout=_FIRST_WAIT_S)
                if not self._going_on.done():
                    raise Unavailable(
                        "the pool map is on its way into etcd, which does not answer; see etcd-1.log"
                    )
                self._going_on.result()

    async def _prepare(self) -> None:
        """Start an etcd member and wait until it answers."""
        if shutil.which("etcd") is None:
            raise Refused(
                "a pool of several nodes keeps its map in etcd, which is not installed on the first node (Debian: "
                "apt install etcd-server)"
            )
        if self._location.own is None:
            client, peer = _places_for_etcd(self._config.network, self.relay.pool_map)
            own = OwnMember(
                self._directory.node,
                client,
                peer,
                ((self._directory.node, peer),),
                self.relay.pool_map.pool_id,
            )
            self._put(msgspec.structs.replace(self._location, own=own, members=(client,)))
        self._start_etcd()
        until_s = SYSTEM_CLOCK.boottime_s() + _FIRST_WAIT_S
        while True:
            try:
                await EtcdCoordinator.answers(self._location.members, self.certificates())
                return
            except Unavailable as error:
                if SYSTEM_CLOCK.boottime_s() > until_s:
                    raise Unavailable(
                        f"etcd does not start on the first node ({error}); its log is {self._directory.log}/"
                        f"{self.etcd.name}.log"
                    ) from None

    async def _go_on(self) -> None:
        """Retry until the map is in etcd and this node uses it there."""
        directory, only = self._directory, str(self._directory.node)  # only us: we hold the lock
        while True:
            try:
                if self.own is not None and self.own.alone:
                    await self._be_alone()
                members, certificates = self._nearest(), self.certificates()
                pool_map = self.relay.pool_map
                if self._location.kind == "moving":
                    own = self._location.own
                    first = changed(pool_map, etcd=(EtcdMember(own.node, own.client, own.peer),))
                    try:
                        found = await EtcdCoordinator.found(
                            members, first, directory.publish, certificates=certificates, only=only
                        )
                    except InvalidRequest:  # an earlier attempt of ours has stored the map
                        found = await EtcdCoordinator.open(
                            members, pool_map.pool_id, directory.publish, certificates=certificates, only=only
                        )
                    self._put(msgspec.structs.replace(self._location, kind="etcd"))
                else:
                    found = await EtcdCoordinator.open(
                        members, pool_map.pool_id, directory.publish, certificates=certificates, only=only
                    )
                if found.pool_map.epoch < self.relay.pool_map.epoch:
                    await found.close()
                    raise Unavailable(
                        f"at {', '.join(members)} is an older map than this node has, of epoch "
                        f"{found.pool_map.epoch}: others keep the map by now"
                    )
                await self.relay.switch(found)
                log.info("the pool map is in etcd, epoch %d", found.pool_map.epoch)
                return
            except NvpoolError as error:
                log.warning("etcd cannot be used yet: %s", error)
                await asyncio.sleep(AGAIN_S)

    def _put(self, location: MapLocation) -> None:
        write_map_location(self._directory, location)
        self._location = location

    # -- close -----------------------------------------------------------------------------------------------

    async def close(self, drain_s: float, hurry: asyncio.Event, *, stop: bool) -> None:
        """Close the coordinator. With `stop` the etcd member ends too, else the next process adopts it."""
        if self._going_on is not None:
            self._going_on.cancel()
        await self.relay.close()
        self.stopping.set()
        if self._keeper is not None:
            await asyncio.gather(self._keeper, return_exceptions=True)
            if stop:
                await self.etcd.end(drain_s, hurry)


def used_ports(pool_map: PoolMap) -> set[int]:
    """TCP ports that the map assigns, on any node."""
    return {
        int(endpoint.rpartition(":")[2])
        for one in (
            *pool_map.targets,
            *pool_map.shards,
            *pool_map.nodes,
            *(s for shard in pool_map.shards for s in shard.standbys),
        )
        for endpoint in one.endpoints
        if not endpoint.startswith("stream+unix")
    } | {int(at.rpartition(":")[2]) for one in pool_map.etcd for at in (one.client, one.peer) if at}


def _places_for_etcd(network: NetworkConfig, pool_map: PoolMap) -> tuple[str, str]:
    """Client and peer address for an etcd member. BadConfiguration: node.toml names no address."""
    if not network.host:
        raise BadConfiguration(
            "a pool of several nodes keeps its map in etcd, which needs an address of this machine: set "
            "network.host in node.toml"
        )
    client, peer = (host_port(network.host, port) for port in free_ports(2, network, used_ports(pool_map)))
    return client, peer


def _no_etcd(members: tuple[str, ...]) -> str:
    return (
        f"the pool map cannot be changed while etcd does not answer ({', '.join(members)}); what has a single copy is "
        f"served"
    )
