"""This node's part in managing the pool: one node leads and has the manager; the others pass their targets' signs of life on.

Called by node/supervisor. A supervisor that can not ask the coordinator leads nothing: the leases of its targets end, and what
others hold too is served there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import isinf

from google.protobuf.message import DecodeError

from nvpool.cluster.api import LEASE_S_MIN, WATCH_S_MAX, Coordinator, Lease
from nvpool.cluster.manager import LEASE_S, Manager, change
from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import (
    AccessDenied,
    Bug,
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    NotLeader,
    NvpoolError,
    Unavailable,
    Unreachable,
)
from nvpool.core.futures import abandon
from nvpool.poolmap.chains.transitions import died
from nvpool.poolmap.model import Node, PoolMap
from nvpool.rpc.api import Call
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.v1.pool_pb2 import AliveRequest, Forwardable, Forwarded

_LEAD_S = LEASE_S_MIN
"""Of a sign of life, one comes each fifth of it: so soon another node leads when this one is gone, which all wait for that lay
on it. On two busy cores a sign takes up to half a second; the next ones do not wait for it."""
_RETRY_S = 0.5
_PASSED_ON_MAX = 1024
PASSED_ON_S = LEASE_S / 3
"""For the leader to answer a request that was passed on to it: a lease bears two that are lost."""
_RELAYED_AFTER_S = PASSED_ON_S / 2
"""A leader that has not answered for so long may be cut off from this node alone: other nodes are asked to ask it."""
_RELAYS_MAX = 2
_HOPS_MAX = 1
"""A supervisor passes on what a process of its own node asks, and what another one asks it to relay; nothing else that another
one has passed on: two nodes that each take the other for the leader would send it in a circle."""
_SEEN_S = 0.1
_NODE = "node/"
"""What the name of a node's certificate begins with."""

log = logging.getLogger("nvpool.node.coordination.leadership")


@dataclass(frozen=True, slots=True, eq=False)
class Reign:
    """The time for which a node leads the pool without a pause."""

    lease: Lease
    bounded: bool = False
    """Whether all rights that were given before it have ended: they are given for no longer than who leads leads for certain,
    and the former one has led for longer than any other right lasts: this node has seen it, or its last sign says so."""
    gone: int | None = None
    """The node that led before, where that was another one: nobody has heard of it since."""

    def left_s(self) -> float:
        return self.lease.left_s


class Leading:
    """`manager` while this node leads."""

    def __init__(self, coordinator: Coordinator, node: int, dialer: Dialer, pid_of: Callable[[int], int | None],
                 replace_after_s: float = 0.0, clock: Clock = SYSTEM_CLOCK):
        """`pid_of`: the process that serves one of our targets, 0 for none, None where the target is not ours.
        `replace_after_s`: see Manager."""
        self._clock = clock
        self._replace_after_s = replace_after_s
        self._coordinator = coordinator
        self._node = node
        self._dialer = dialer
        self._pid_of = pid_of
        self._passing: set[asyncio.Task[None]] = set()
        self.manager: Manager | None = None
        self._reign: Reign | None = None
        self._since_s: dict[str, float] = {}
        """Who was seen to lead -> since when, the last time."""
        self._another: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when another one leads than before, or nobody; then there is a new one."""
        self._cut_off_from = 0
        """The leader that did not answer us the last time; others are asked at once to ask it."""
        self._unbounded = False
        self.grace_s = LEASE_S
        """Of the first manager: see Manager."""

    async def run(self) -> None:
        """Lead whenever nobody else does, until cancelled."""
        seeing = asyncio.ensure_future(self._see())
        try:
            await self._lead()
        finally:
            seeing.cancel()

    async def _see(self) -> None:
        known = last = None
        while True:
            leader = self._coordinator.leader()
            if leader not in (None, last):
                last = leader
                self._since_s[leader] = self._clock.boottime_s()
            if leader != known:
                known = leader
                self._tell_of_another()
            await asyncio.sleep(_SEEN_S)

    def _tell_of_another(self) -> None:
        told, self._another = self._another, asyncio.get_running_loop().create_future()
        told.set_result(None)

    def _begun(self, lease: Lease) -> Reign:
        former, now_s = lease.former, self._clock.boottime_s()
        seen_s = now_s - self._since_s.get(former, now_s) if former is not None else 0.0
        bounded = not self._unbounded and former is not None and max(seen_s, lease.former_led_s) > LEASE_S
        self._unbounded = isinf(lease.left_s)
        return Reign(lease, bounded, int(former) if bounded and former != str(self._node) else None)

    @property
    def reign(self) -> Reign | None:
        """While this node leads, and for certain."""
        return self._reign if self._reign is not None and self._reign.lease.holds else None

    def _stands_back(self) -> bool:
        """Whether this node is to be given up, and another one may lead."""
        nodes = self._coordinator.pool_map.nodes
        return any(node.id == self._node and node.wish != "share" for node in nodes) \
            and any(node.id != self._node and node.wish == "share" for node in nodes)

    async def _lead(self) -> None:
        while True:
            if self._stands_back():
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                lease = await self._coordinator.lead(str(self._node), _LEAD_S, WATCH_S_MAX)
            except Unavailable:
                lease = None
                await asyncio.sleep(_RETRY_S)
            if lease is None:
                continue
            self._reign = self._begun(lease)
            gone = self._reign.gone
            log.info("this node leads the pool%s", f"; node {gone} did before, and is silent" if gone is not None else "")
            self.manager = manager = Manager(self._coordinator, clock=self._clock, leader=lease, grace_s=self.grace_s,
                                             gone=gone, replace_after_s=self._replace_after_s)
            self.grace_s = LEASE_S
            self._tell_of_another()
            deciding = asyncio.ensure_future(manager.run())
            following = asyncio.ensure_future(self._follow(manager))
            try:
                while not (deciding.done() or following.done() or lease.lost.done() or self._stands_back()):
                    await asyncio.wait([deciding, following, lease.lost], timeout=_RETRY_S,
                                       return_when=asyncio.FIRST_COMPLETED)
                for task in (deciding, following):
                    if task.done():
                        task.result()
                        raise Bug("nobody manages the pool any more")
                if not lease.lost.done():
                    await lease.release()
                log.warning("this node does not lead the pool any more")
            finally:
                self.manager = self._reign = None
                deciding.cancel()
                following.cancel()

    async def _follow(self, manager: Manager) -> None:
        epoch = -1
        while True:
            newest = await self._coordinator.watch(epoch, WATCH_S_MAX)
            if newest is not None:
                epoch = newest.epoch
                manager.look()

    @property
    def pool_map(self) -> PoolMap:
        """The newest."""
        return self._coordinator.pool_map

    def leader(self) -> int | None:
        """The node that leads, as far as this one knows."""
        name = self._coordinator.leader()
        return int(name) if name is not None else None

    async def change(self, decide: Callable[[PoolMap], PoolMap]) -> PoolMap:
        """See cluster/manager.change; from any node. What is so already is so for certain: this node may be behind."""
        return await change(self._coordinator, decide, certain=True)

    async def change_as_leader(self, decide: Callable[[PoolMap], PoolMap]) -> PoolMap:
        """As `change`, only while this node leads. Unavailable when it does not; StaleLease when it no longer did."""
        if self._reign is None:
            raise Unavailable("this node does not lead the pool", retry_after_s=0.1)
        return await change(self._coordinator, decide, self._reign.lease)

    def unaware(self, epoch: int) -> list[int]:
        """Targets that serve and do not know the map of this epoch yet. Unavailable when this node does not lead."""
        if self.manager is None:
            raise Unavailable("this node does not lead the pool", retry_after_s=0.1)
        return self.manager.unaware(epoch)

    def died(self, target: int, pid: int) -> None:
        """The process of one of our targets has ended: its place is taken at once, by us where nobody leads."""
        if self.manager is not None:
            self.manager.died({target: pid})
        else:
            self._own(self._tell_death(target, pid))

    async def _tell_death(self, target: int, pid: int) -> None:
        def decide(newest: PoolMap) -> PoolMap:
            return died(newest, {target}) if self._pid_of(target) in (0, pid) else newest  # else another process serves it

        try:
            await self.change(decide)
        except NvpoolError as error:  # who leads will miss its signs of life
            log.warning("the map does not know yet that target %d has died: %s", target, error)

    def alive(self, call: Call) -> None:
        """Answer a target's sign of life, or pass it on to the node that leads.

        AccessDenied   neither from a process of this node nor passed on by the supervisor of the target's node
        Fenced         another process serves the target by now
        NotLeader      passed on already, or not about a target of this node, and this node does not lead
        """
        try:
            request = AliveRequest.FromString(bytes(call.message))
        except DecodeError:
            raise InvalidRequest("not an AliveRequest") from None
        hops = self._hops(call, request.forwarded)
        known = self._coordinator.pool_map.target_by_id.get(request.target)
        if request.forwarded.hops and call.peer.member and known is not None and known.node != request.forwarded.node:
            raise AccessDenied(f"node {request.forwarded.node} speaks for target {request.target} of node {known.node}")
        pid = self._pid_of(request.target)
        if pid is not None and pid != request.pid:
            raise Fenced(f"process {request.pid} does not serve target {request.target} any more")
        if self.manager is not None:
            call.reply(self.manager.alive(request).SerializeToString())
        elif pid is None or hops >= _HOPS_MAX:
            raise NotLeader("this node does not lead the pool")
        elif len(self._passing) < _PASSED_ON_MAX:
            self._own(self._pass_on(call, request))
        else:
            raise Unavailable("too many signs of life are on their way to the node that leads the pool")

    async def _pass_on(self, call: Call, request: AliveRequest) -> None:
        try:
            answer = await self.ask_leader(call)
            call.reply(answer if answer is not None else self.manager.alive(request).SerializeToString())
        except NvpoolError as error:
            call.fail(error)

    def _hops(self, call: Call, forwarded: Forwarded) -> int:
        """How many supervisors have passed the request on, by what it says itself. AccessDenied where its certificate says
        otherwise.

        The certificate alone does not tell: over TCP the processes of this node show the same one as its supervisor does.
        """
        member = call.peer.member
        if not member:
            return forwarded.hops
        if not member.startswith(_NODE):
            raise AccessDenied(f"{member} is no node, and only nodes speak for their daemons")
        nodes = self._coordinator.pool_map.node_by_id
        speaks = nodes.get(forwarded.node if forwarded.hops else self._node)
        if speaks is not None and speaks.member == member:
            return forwarded.hops
        if forwarded.hops:
            raise AccessDenied(f"{member} passes a request on in the name of node {forwarded.node}, which it is not")
        return 1  # another node's supervisor of version 0.1.0 or before, which does not say that it has passed it on

    async def ask_leader(self, call: Call) -> bytes | None:
        """The answer of the node that leads to this call of a process of this node; None where this node leads.

        The request says itself whether it was passed on (`Forwarded`). AccessDenied: its certificate says otherwise. NotLeader:
        no node leads or it can not be reached, or the call was passed on already; `may_be_applied` where a node was asked that
        led until then.
        """
        message = bytes(call.message)
        try:
            forwarded = Forwardable.FromString(message).forwarded
        except DecodeError:
            raise InvalidRequest(f"the message of method {call.method} can not be read") from None
        hops = self._hops(call, forwarded)
        if self.manager is not None:
            return None
        relays = hops == 1 and forwarded.relay
        if hops >= _HOPS_MAX and not relays:
            raise NotLeader("this node does not lead the pool")
        until_s = min(call.deadline_s, self._clock.boottime_s() + PASSED_ON_S)
        was_sent = False
        while True:
            leader, another = self._coordinator.leader(), self._another
            node = self._coordinator.pool_map.node_by_id.get(int(leader)) if leader is not None else None
            if self.manager is not None:
                return None
            if node is None or node.id == self._node:
                raise NotLeader("no node leads the pool at the moment", may_be_applied=was_sent)
            # Of two parts with the same field the later one counts, in whatever message it is; `relay` stays, and is over.
            passed_on = message + Forwardable(forwarded=Forwarded(node=self._node, hops=hops + 1)).SerializeToString()
            asking = asyncio.ensure_future(self._ask(node, call.method, passed_on, until_s) if relays else
                                           self._ask_or_relay(node, call.method, message, passed_on, until_s))
            try:
                # One that is cut off answers nothing: who follows it is asked at once.
                await asyncio.wait([asking, another], return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
            except Unreachable as error:
                raise NotLeader(f"node {node.id}, which leads the pool, can not be reached: {error}",
                                may_be_applied=was_sent or error.may_be_applied) from None
            except NvpoolError as error:
                error.may_be_applied |= was_sent
                raise
            finally:
                abandon(asking)
            was_sent = True

    async def _ask(self, node: Node, method: int, message: bytes, until_s: float) -> bytes:
        return bytes((await self._dialer.call(node.endpoints, method, message, deadline_s=until_s)).message)

    async def _ask_or_relay(self, leader: Node, method: int, message: bytes, passed_on: bytes,
                            until_s: float) -> bytes:
        """The answer of the leader, to us or to a node that asks it for us: the first that comes. An error is the leader's.

        A link between two nodes may be cut while a third one reaches both. What is asked twice is decided by the map as it is
        then, so that the second decision changes nothing.
        """
        asking = {asyncio.ensure_future(self._ask(leader, method, passed_on, until_s))}
        direct, = asking
        try:
            if self._cut_off_from != leader.id:
                await asyncio.wait(asking, timeout=_RELAYED_AFTER_S)
            if direct.done() and not isinstance(direct.exception(), Unreachable | DeadlineExceeded):
                self._cut_off_from = 0
                return direct.result()
            self._cut_off_from = leader.id
            relayed = message + Forwardable(forwarded=Forwarded(node=self._node, hops=1, relay=True)).SerializeToString()
            for node in self._relays(leader.id):
                asking.add(asyncio.ensure_future(self._ask(node, method, relayed, until_s)))
            return await self._first_answer(asking, direct)
        finally:
            for task in asking:
                abandon(task)

    async def _first_answer(self, asking: set[asyncio.Future[bytes]], direct: asyncio.Future[bytes]) -> bytes:
        left, may_be_applied = set(asking), False
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if direct in done and not isinstance(direct.exception(), Unreachable | DeadlineExceeded):
                self._cut_off_from = 0
                return direct.result()
            for answered in done - {direct}:
                error = answered.exception()
                if error is None:
                    return answered.result()
                if isinstance(error, Fenced) or not isinstance(error, Unavailable):  # the leader's refusal, and not the relay's
                    raise error
                may_be_applied |= error.may_be_applied
        error = direct.exception()
        assert isinstance(error, NvpoolError)
        error.may_be_applied |= may_be_applied
        raise error

    def _relays(self, leader: int) -> list[Node]:
        """Nodes to ask instead of the leader, those that follow this one first."""
        others = [node for node in self._coordinator.pool_map.nodes if node.id not in (leader, self._node)]
        others.sort(key=lambda node: (node.id < self._node, node.id))
        return others[:_RELAYS_MAX]

    def _own(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def close(self) -> None:
        passing = list(self._passing)
        for task in passing:
            task.cancel()
        if passing:
            await asyncio.wait(passing, timeout=_RETRY_S)
