"""Membership of the pool's own etcd: this node's member and, on the leader, changes of the members.

Run by node/supervisor. poolmap/nodes/etcd_membership decides the steps from the map, which records the
progress of each member: so every step may be interrupted, and the next leader continues. A node does what its
own map entry requires (node/coordination/map_backend owns the process and its data). It gets the keys of the
pool's CAs when it has become a member, and deletes them when it is no longer one. Every few seconds each node
publishes that it is present and whether its member answers. Nothing is changed while etcd is unreachable.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from math import inf

from nvpool.cluster.coordinator_api import WATCH_S_MAX
from nvpool.cluster.etcd.client import answers_alone
from nvpool.cluster.etcd.coordinator import EtcdCoordinator
from nvpool.cluster.switchable_coordinator import LastKnownMap
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.config import Config
from nvpool.core.errors import InvalidRequest, NvpoolError, Refused, StaleIdentity, StaleLease, Unavailable
from nvpool.host.pool_directory import PoolDirectory, write_whole
from nvpool.meta.service_auth import ServiceRight
from nvpool.node.coordination.leadership import Leading
from nvpool.node.coordination.map_backend import MapBackend
from nvpool.node.coordination.peer_maps import ASK_S, away, newest_elsewhere
from nvpool.poolmap.model import EtcdMember, Node, PoolMap
from nvpool.poolmap.nodes import etcd_membership
from nvpool.poolmap.nodes.etcd_membership import MapChange, Remove, of_node
from nvpool.poolmap.nodes.lifecycle import still_counted_on
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import pool_pb2, wire_pb2
from nvpool.runtime.daemon_lifecycle import read_grant_key
from nvpool.security.tls import AUTHORITY_KEY_FILE, ETCD_SECRET

PRESENT_S = 10.0
LOOK_S = 2.0
RETRY_S = 1.0
_LEAVE_S = 90.0
SILENT_S = 5.0
"""Silence after which a member of etcd is reported as a problem.

A restart, as each member makes after a node was removed, takes a second."""
_PRESENT = "etcd/"
"""Prefix of a node's number in the published names."""

log = logging.getLogger("nvpool.node.coordination.etcd_members")


class EtcdMembers:
    def __init__(
        self, directory: PoolDirectory, config: Config, keeper: MapBackend, leading: Leading, dialer: Dialer
    ):
        self._directory = directory
        self.node = directory.node
        self._replace_after_s = config.supervisor.replace_after_s or inf
        self._scheme = "http" if config.network.plain_text else "https"
        self._keeper = keeper
        self._leading = leading
        self._dialer = dialer
        self._last_here: dict[int, float] = {}
        self._silent_since: dict[int, float] = {}
        """Nodes whose etcd member should answer and does not -> since when (boot time, seconds)."""
        self._answers = False
        self._last_reason = ""
        self._revoked = 0
        """Last removal that our member's revocation list contains."""
        self._turned_away = False
        """Whether the other nodes report that this node is not in the pool.

        Our own map may still name this node."""
        self._hung_up = 0
        """Last removal for which our member was restarted."""

    async def run(self) -> None:
        """Run this node's part until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for part in (self.announce(), self._follow(), self._lead(), self.learn()):
                tasks.create_task(part)

    @property
    def etcd(self) -> EtcdCoordinator | None:
        """The coordinator in etcd, or None while this node has only a map that it knew before."""
        inner = self._keeper.relay.inner
        return inner if isinstance(inner, EtcdCoordinator) else None

    # -- presence --------------------------------------------------------------------------------------------

    async def announce(self) -> None:
        """Publish, until cancelled, that this node is present and whether its member of etcd answers."""
        lease, said, reason = None, b"", ""
        while True:
            try:
                own = self._keeper.own
                self._answers = own is not None and await answers_alone(
                    own.client, self._keeper.certificates(), LOOK_S
                )
                says = json.dumps(
                    {"able": shutil.which("etcd") is not None, "answers": self._answers}
                ).encode()
                self._keeper.show_certificates()  # in case they were renewed
                if self.etcd is not None and (lease is None or lease.lost.done() or says != said):
                    before = lease
                    lease, said = (
                        await self._keeper.relay.announce(f"{_PRESENT}{self.node}", says, PRESENT_S),
                        says,
                    )
                    if before is not None:
                        await before.release()
                reason = ""
            except NvpoolError as error:
                if str(error) != reason:  # each reason once, whatever the other parts report meanwhile
                    reason = str(error)
                    log.warning("the presence of this node cannot be announced: %s", error)
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Record whose etcd member does not answer, for `problems`. Call every few seconds."""
        pool_map, now_s = self._keeper.relay.pool_map, SYSTEM_CLOCK.boottime_s()
        here = self._here(pool_map)
        silent = {one.node for one in pool_map.etcd if one.state == "up" and one.node not in here}
        self._silent_since = {node: self._silent_since.get(node, now_s) for node in silent}

    def _here(self, pool_map: PoolMap) -> set[int]:
        found = set()
        for name, says in self._keeper.relay.present().items():
            if name.startswith(_PRESENT):
                try:
                    node, presence = int(name.removeprefix(_PRESENT)), json.loads(says)
                    entry = of_node(pool_map, node)
                    has_member = entry is not None and entry.state in ("added", "up", "leaving")
                    if presence["answers"] if has_member else presence["able"]:
                        found.add(node)
                except (ValueError, KeyError, TypeError):
                    continue
        return found

    # -- this node's own member --------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        epoch = -1
        while True:
            newest = await self._keeper.relay.watch(epoch, LOOK_S)
            try:
                await self.act_here(newest or self._keeper.relay.pool_map)
                epoch = newest.epoch if newest is not None else epoch
            except (NvpoolError, OSError) as error:
                self._say("this node's part in keeping the map waits: %s", error)
                await asyncio.sleep(RETRY_S)

    def _say(self, text: str, error: Exception) -> None:
        """Log each reason once."""
        if str(error) != self._last_reason:
            self._last_reason = str(error)
            log.warning(text, error)

    async def act_here(self, pool_map: PoolMap) -> None:
        """Do what the map requires of our own member. May be repeated."""
        keeper = self._keeper
        if not keeper.is_in_etcd:
            return
        if not pool_map.etcd:  # the etcd is the operator's own
            if keeper.external and self.node in etcd_membership.lets_in(pool_map):
                await self._have_keys(pool_map)
            return
        keeper.use(etcd_membership.clients(pool_map))
        entry, own = of_node(pool_map, self.node), keeper.own
        if entry is None or entry.state == "lost":
            # A member with a newer generation comes from `recover`.
            if own is not None and not own.alone and own.generation < pool_map.epoch:
                log.info("this node keeps the pool map no more")
                await keeper.give_place_up()
            if self.node in etcd_membership.lets_in(pool_map):
                await self._have_keys(pool_map)
            elif any(one.state == "up" for one in pool_map.etcd):
                self._drop_keys()
            return
        if entry.state == "wanted":
            own = await keeper.take_place(entry.generation)
            await self._put(entry, state="ready", client=own.client, peer=own.peer)
        elif own is None or own.generation != entry.generation or keeper.own_data_is_lost:
            log.error(
                "the data of this node's member of etcd is lost; the node joins etcd again as another member"
            )
            await self._put(entry, state="lost")
        elif entry.state != "ready":
            if entry.state != "leaving":
                await self._have_keys(pool_map)
            keeper.begin(tuple((one.node, one.peer) for one in pool_map.etcd if one.id))
            await self.hang_up(pool_map, entry)

    async def hang_up(self, pool_map: PoolMap, entry: EtcdMember) -> None:
        """Close etcd's connections of removed nodes: write the revocation list and restart our member.

        etcd checks a certificate only when a connection begins. The members restart one after the other, so
        that the others keep the quorum. No restart while a lost node still counts as a member: without its
        member and ours the quorum might be lost, and the next leader would wait for the silent targets from
        the beginning.
        """
        removed = etcd_membership.last_revoked(pool_map)
        if removed != self._revoked:
            self._keeper.write_revoked()
            self._revoked = removed
        here = self._here(pool_map)
        if (
            entry.state != "up"
            or entry.revoked >= removed
            or self._scheme == "http"
            or still_counted_on(pool_map)
            or any(
                one.node < entry.node and one.state == "up" and one.revoked < removed and one.node in here
                for one in pool_map.etcd
            )
        ):
            return
        if self._hung_up != removed:  # once: if only the map cannot be changed, only that change is retried
            log.info("this node's member of etcd is started again, to hang up on a node that was removed")
            await self._keeper.start_again()
            self._hung_up = removed
        until_s = SYSTEM_CLOCK.boottime_s() + _LEAVE_S
        while not await answers_alone(entry.client, self._keeper.certificates(), LOOK_S):
            if SYSTEM_CLOCK.boottime_s() > until_s:
                raise Unavailable("this node's member of etcd does not come back")
            await asyncio.sleep(0.1)
        await self._put(entry, revoked=removed)

    async def _put(self, entry: EtcdMember, **fields) -> None:
        await self._leading.change(
            lambda newest: etcd_membership.put(newest, entry.node, entry.generation, **fields)
        )

    def _key_files(self):
        return [self._directory.secret / below / AUTHORITY_KEY_FILE for below in ("", ETCD_SECRET)]

    def _drop_keys(self) -> None:
        for path in self._key_files():
            path.unlink(missing_ok=True)

    async def _have_keys(self, pool_map: PoolMap) -> None:
        """Get the CAs' keys, so that this node can admit members. Unavailable."""
        if all(path.exists() for path in self._key_files()):
            return
        right = ServiceRight(SYSTEM_CLOCK, read_grant_key(self._directory), self.node)()
        request = pool_pb2.KeysRequest(right=right, node=self.node).SerializeToString()
        reason = "no other node has them"
        for node in [
            pool_map.node_by_id[number] for number in sorted(etcd_membership.lets_in(pool_map) - {self.node})
        ]:
            try:
                reply = await self._dialer.call(
                    away(node.endpoints),
                    wire_pb2.POOL_KEYS,
                    request,
                    deadline_s=SYSTEM_CLOCK.boottime_s() + ASK_S,
                )
                keys = decoded(pool_pb2.KeysReply, reply.message)
            except NvpoolError as error:
                reason = str(error)
                continue
            for path, key in zip(self._key_files(), (keys.authority, keys.etcd_authority), strict=True):
                write_whole(path, key, 0o600)
            log.info("this node has the keys of the pool's authorities now, and lets others in")
            return
        raise Unavailable(f"the keys of the pool's authorities cannot be had: {reason}")

    async def learn(self) -> None:
        """While etcd is unreachable, ask the other nodes for the map.

        A newer map names etcd's present members."""
        while True:
            await asyncio.sleep(RETRY_S)
            held = self._keeper.relay.inner
            if not self._keeper.is_in_etcd or not isinstance(held, LastKnownMap):
                continue
            try:
                newer = await newest_elsewhere(held.pool_map, self.node, self._dialer)
                self._turned_away = False
            except StaleIdentity as error:
                self._say("the other nodes do not know this one: %s", error)
                self._turned_away = True
                continue
            if newer is not None:
                self._keeper.learn(newer)

    # -- changes while this node leads -----------------------------------------------------------------------

    async def _lead(self) -> None:
        epoch = -1
        while True:
            newest = await self._keeper.relay.watch(epoch, LOOK_S)
            epoch = newest.epoch if newest is not None else epoch
            if self._leading.manager is None or self.etcd is None:
                self._last_here.clear()
                continue
            try:
                while await self.step():
                    pass
            except (NvpoolError, OSError) as error:
                self._say("who keeps the pool map stays as it is for now: %s", error)
                await asyncio.sleep(RETRY_S)

    async def step(self) -> bool:
        """Make one step towards the required members; return whether there was one to make."""
        etcd = self.etcd
        pool_map = self._keeper.relay.pool_map
        if etcd is None or not pool_map.etcd:
            return False
        found = await etcd.members()
        now_s = SYSTEM_CLOCK.boottime_s()
        here = self._here(pool_map)
        for node in pool_map.nodes:
            if node.id in here or node.id not in self._last_here:
                self._last_here[node.id] = now_s
        gone = {
            node.id for node in pool_map.nodes if now_s - self._last_here[node.id] > self._replace_after_s
        }
        step = etcd_membership.next_step(pool_map, found, here, gone)
        if step is None:
            return False
        if isinstance(step, MapChange):
            return await self._leading.change_as_leader(step.decide) is not pool_map
        if self._leading.manager is None or etcd is not self.etcd or etcd.pool_map is not pool_map:
            raise StaleLease("another one may lead by now")
        log.info("etcd: %s", step)
        await etcd.change_members(step, self._scheme)
        if isinstance(step, Remove):
            log.info("the pool map is kept by %d members of etcd now", len(found) - 1)
        return True

    async def leave(self, node: int) -> None:
        """Remove that node's etcd member; on return it has none.

        InvalidRequest: no other node can replace it. Unavailable: the removal is in progress; call again to
        continue.
        """
        pool_map = self._keeper.relay.pool_map
        if of_node(pool_map, node) is None:
            return
        here = self._here(pool_map)
        if not any(one.id != node and one.id in here for one in pool_map.nodes):
            raise InvalidRequest(
                f"node {node} keeps the pool map (etcd), and no other node is there that could: install etcd "
                f"(Debian: etcd-server) on another one"
            )
        await self._leading.change(lambda newest: etcd_membership.leaving(newest, node))
        until_s = SYSTEM_CLOCK.boottime_s() + _LEAVE_S
        epoch = -1
        while of_node(self._keeper.relay.pool_map, node) is not None:
            if SYSTEM_CLOCK.boottime_s() > until_s:
                raise Unavailable(
                    f"node {node} has not left etcd yet: {self._last_reason or 'another has to come first'}; the same "
                    f"command goes on"
                )
            newest = await self._keeper.relay.watch(epoch, min(LOOK_S, WATCH_S_MAX))
            epoch = newest.epoch if newest is not None else epoch

    @property
    def verbs(self):
        """Admin commands of this class."""
        return {"etcd-recover": self._change_recover}

    async def _change_recover(self, arguments: dict) -> dict:
        if arguments.get("yes") is not True:
            raise InvalidRequest("to recover etcd wants to be confirmed")
        try:
            lost = {int(number) for number in arguments.get("lost", ())}
        except (TypeError, ValueError):
            raise InvalidRequest("to recover etcd wants numbers of nodes that are lost") from None
        if self._keeper.own is None and (answering := await self._answering(lost)):
            raise Refused(f"node {', '.join(map(str, answering))} answers, so it is not lost")
        new = await self._keeper.recover(lost)
        return {"node": self.node, "epoch": new.epoch}

    async def _answering(self, nodes: set[int]) -> list[int]:
        """Those of the nodes that answer."""

        async def answers(node: Node) -> bool:
            request = pool_pb2.MapRequest().SerializeToString()
            try:
                await self._dialer.call(
                    away(node.endpoints),
                    wire_pb2.POOL_MAP,
                    request,
                    deadline_s=SYSTEM_CLOCK.boottime_s() + ASK_S,
                )
            except NvpoolError:
                return False
            return True

        known = [
            node for node in self._keeper.relay.pool_map.nodes if node.id in nodes and node.id != self.node
        ]
        return [
            node.id
            for node, answered in zip(known, await asyncio.gather(*map(answers, known)), strict=True)
            if answered
        ]

    # -- status ----------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Problems of the map's etcd, as sentences for `nvpool status`."""
        pool_map, etcd = self._keeper.relay.pool_map, self.etcd
        if self.node not in pool_map.node_by_id or (self._turned_away and etcd is None):
            return [
                "this node was removed from the pool, and serves nothing: end its daemon (nvpoold); what else is shown "
                "here may be old. To be a node again it joins with another directory: nvpool node join HOST:PORT "
                "--dir DIR"
            ]
        where = ", ".join(etcd_membership.clients(pool_map) or self._keeper.members)
        if self._keeper.own_data_is_lost and etcd is None:
            return [
                f"the data of etcd on this node is lost; the pool map cannot be changed before most members of etcd are "
                f"there ({where}; lost for good: nvpool node recover-etcd POOL)"
            ]
        if self._keeper.is_in_etcd and (etcd is None or etcd.is_silent):
            return [
                f"the pool map cannot be changed: most members of etcd do not answer ({where}); what has a single copy is "
                f"served, what has several (replicas, standbys) waits with all changes until they are back"
                + ("" if self._keeper.external else " (lost for good: nvpool node recover-etcd POOL)")
            ]
        if etcd is None:
            return []
        up, here = [one.node for one in pool_map.etcd if one.state == "up"], self._here(pool_map)
        since_s = SYSTEM_CLOCK.boottime_s() - SILENT_S
        found = [
            f"etcd on node {node} does not answer"
            for node in up
            if node not in here and self._silent_since.get(node, inf) <= since_s
        ]
        wanted = etcd_membership.members_wanted(pool_map)
        if up and len(up) < wanted:
            able = len(here | set(up))
            found.append(
                f"the pool map is kept by {len(up)} of {wanted} members of etcd"
                + (": install etcd (Debian: etcd-server) on more nodes" if able < wanted else "")
            )
        return found
