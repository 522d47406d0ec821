"""Leadership of the pool: the leader runs the manager; other nodes forward their targets' heartbeats to it.

Used by node/supervisor. A supervisor that cannot reach the coordinator does not lead: the leases of its
targets end, and other replicas serve the data of those targets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import isinf

from google.protobuf.message import DecodeError

from nvpool.cluster.chain_manager import LEASE_S, Manager, change
from nvpool.cluster.coordinator_api import LEASE_S_MIN, WATCH_S_MAX, CoordinatorLease, MapCoordinator
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
from nvpool.rpc.v1.wire_pb2 import POOL_ALIVE

_LEAD_S = LEASE_S_MIN
"""Leadership lease; a heartbeat is written each fifth of it.

After this time another node leads if the leader's node has failed, and everything on that node waits for that. On
two busy cores a heartbeat takes up to half a second; the next heartbeats do not wait for it."""
_RETRY_S = 0.5
_PASSED_ON_MAX = 1024
PASSED_ON_S = LEASE_S / 3
"""Time for the leader to answer a forwarded request: a lease survives two that are lost."""
_RELAYED_AFTER_S = PASSED_ON_S / 2
"""Time after which a silent leader may be cut off from this node only: other nodes are then asked to
relay."""
_RELAYS_MAX = 2
_HOPS_MAX = 1
"""Most times that a request may be forwarded.

A supervisor forwards requests of processes of its own node, and requests that another supervisor asks it to
relay. It forwards nothing else: two nodes that each take the other for the leader would send the request in a
circle."""
_SEEN_S = 0.1
_NODE = "node/"
"""Prefix of the member name in a node's certificate."""

log = logging.getLogger("nvpool.node.coordination.leadership")


@dataclass(frozen=True, slots=True, eq=False)
class Leadership:
    """Uninterrupted leadership of one node."""

    lease: CoordinatorLease
    bounded: bool = False
    """Whether all leases that were granted before this leadership have ended.

    Leases never outlast the leader's own certain lease. So it is True if the former leader has led for longer
    than any other lease lasts: this node has seen that, or the former leader's last heartbeat reports it."""
    gone: int | None = None
    """Node that led before, if it was another one. Nothing was heard of that node since."""

    def left_s(self) -> float:
        return self.lease.left_s


class Leading:
    """Leadership of one node. `manager` is set while this node leads."""

    def __init__(
        self,
        coordinator: MapCoordinator,
        node: int,
        dialer: Dialer,
        pid_of: Callable[[int], int | None],
        replace_after_s: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
    ):
        """Create the leadership task of one node.

        `pid_of`: process that serves a target of this node; 0: none; None: the target is on another node.
        `replace_after_s`: see Manager.
        """
        self._clock = clock
        self._replace_after_s = replace_after_s
        self._coordinator = coordinator
        self._node = node
        self._dialer = dialer
        self._pid_of = pid_of
        self.forwarding: set[asyncio.Task[None]] = set()
        self.manager: Manager | None = None
        self._leadership: Leadership | None = None
        self._since_s: dict[str, float] = {}
        """Leader -> since when it was last seen to lead."""
        self._another: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the leadership changes; then replaced by a new future."""
        self._cut_off_from = 0
        """Leader that did not answer us the last time. Other nodes are then asked to relay immediately."""
        self._unbounded = False
        self.grace_s = LEASE_S
        """Grace time of the first manager: see Manager."""

    async def run(self) -> None:
        """Lead whenever no other node does, until cancelled."""
        seeing = asyncio.ensure_future(self.watch_leader())
        try:
            await self._lead()
        finally:
            seeing.cancel()

    async def watch_leader(self) -> None:
        """Note since when which node leads, and wake waiting requests at a change, until cancelled."""
        known = last = None
        while True:
            leader = self._coordinator.leader()
            if leader not in (None, last):
                last = leader
                self._since_s[leader] = self._clock.boottime_s()
            if leader != known:
                known = leader
                self._notify_leader_change()
            await asyncio.sleep(_SEEN_S)

    def _notify_leader_change(self) -> None:
        waiting, self._another = self._another, asyncio.get_running_loop().create_future()
        waiting.set_result(None)

    def begin_term(self, lease: CoordinatorLease) -> Leadership:
        """Make the leadership of a new lease, with what is known of its predecessor."""
        former, now_s = lease.former, self._clock.boottime_s()
        seen_s = now_s - self._since_s.get(former, now_s) if former is not None else 0.0
        bounded = not self._unbounded and former is not None and max(seen_s, lease.former_led_s) > LEASE_S
        self._unbounded = isinf(lease.left_s)
        return Leadership(lease, bounded, int(former) if bounded and former != str(self._node) else None)

    @property
    def leadership(self) -> Leadership | None:
        """Present leadership if this node certainly leads, else None."""
        return self._leadership if self._leadership is not None and self._leadership.lease.holds else None

    def _stands_back(self) -> bool:
        """Whether this node is being removed, and another one can lead."""
        nodes = self._coordinator.pool_map.nodes
        return any(node.id == self._node and node.desired_state != "share" for node in nodes) and any(
            node.id != self._node and node.desired_state == "share" for node in nodes
        )

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
            self._leadership = self.begin_term(lease)
            gone = self._leadership.gone
            log.info(
                "this node leads the pool%s",
                f"; node {gone} did before, and is silent" if gone is not None else "",
            )
            self.manager = manager = Manager(
                self._coordinator,
                clock=self._clock,
                leader=lease,
                grace_s=self.grace_s,
                gone=gone,
                replace_after_s=self._replace_after_s,
            )
            self.grace_s = LEASE_S
            self._notify_leader_change()
            deciding = asyncio.ensure_future(manager.run())
            following = asyncio.ensure_future(self._follow(manager))
            try:
                while not (deciding.done() or following.done() or lease.lost.done() or self._stands_back()):
                    await asyncio.wait(
                        [deciding, following, lease.lost],
                        timeout=_RETRY_S,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                for task in (deciding, following):
                    if task.done():
                        task.result()
                        raise Bug("the cluster manager has stopped")
                if not lease.lost.done():
                    await lease.release()
                log.warning("this node does not lead the pool any more")
            finally:
                self.manager = self._leadership = None
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
        """The newest pool map known here."""
        return self._coordinator.pool_map

    def leader(self) -> int | None:
        """Node that leads, as far as this node knows; None if not known."""
        name = self._coordinator.leader()
        return int(name) if name is not None else None

    async def change(self, decide: Callable[[PoolMap], PoolMap]) -> PoolMap:
        """Change the map as cluster/chain_manager.change does, from any node.

        Before it returns without a change, it reads the newest map, because this node's map may be old.
        """
        return await change(self._coordinator, decide, certain=True)

    async def change_as_leader(self, decide: Callable[[PoolMap], PoolMap]) -> PoolMap:
        """Change the map as `change` does, only while this node leads.

        Unavailable: this node does not lead. StaleLease: it has lost the leadership.
        """
        if self._leadership is None:
            raise Unavailable("this node does not lead the pool", retry_after_s=0.1)
        return await change(self._coordinator, decide, self._leadership.lease)

    def unaware(self, epoch: int) -> list[int]:
        """Targets that serve and do not know the map of this epoch yet.

        Unavailable: this node does not lead.
        """
        if self.manager is None:
            raise Unavailable("this node does not lead the pool", retry_after_s=0.1)
        return self.manager.unaware(epoch)

    def died(self, target: int, pid: int) -> None:
        """Report the end of a process of this node's target, which is replaced immediately.

        Without a leader here, this node changes the map itself.
        """
        if self.manager is not None:
            self.manager.died({target: pid})
        else:
            self._own(self._report_death(target, pid))

    async def _report_death(self, target: int, pid: int) -> None:
        def decide(newest: PoolMap) -> PoolMap:
            # No change if a new process serves the target.
            return died(newest, {target}) if self._pid_of(target) in (0, pid) else newest

        try:
            await self.change(decide)
        except NvpoolError as error:  # the leader notices the missing heartbeats
            log.warning("the death of target %d is not in the pool map yet: %s", target, error)

    def alive(self, call: Call) -> None:
        """Answer a target's heartbeat, or forward it to the leader.

        AccessDenied   sent neither by a process of this node nor by the supervisor of the target's node
        Fenced         another process serves the target now
        NotLeader      forwarded already, or about a target of another node, and this node does not lead
        """
        try:
            request = AliveRequest.FromString(bytes(call.message))
        except DecodeError:
            raise InvalidRequest("not an AliveRequest") from None
        hops = self._hops(call, request.forwarded)
        known = self._coordinator.pool_map.target_by_id.get(request.target)
        if (
            request.forwarded.hops
            and call.peer.member
            and known is not None
            and known.node != request.forwarded.node
        ):
            raise AccessDenied(
                f"node {request.forwarded.node} speaks for target {request.target} of node {known.node}"
            )
        pid = self._pid_of(request.target)
        if pid is not None and pid != request.pid:
            raise Fenced(f"process {request.pid} does not serve target {request.target} any more")
        if self.manager is not None:
            call.reply(self.manager.alive(request).SerializeToString())
        elif pid is None or hops >= _HOPS_MAX:
            raise NotLeader("this node does not lead the pool")
        elif len(self.forwarding) < _PASSED_ON_MAX:
            self._own(self._pass_on(call, request))
        else:
            raise Unavailable("too many heartbeats are on their way to the node that leads the pool")

    async def _pass_on(self, call: Call, request: AliveRequest) -> None:
        try:
            answer = await self.ask_leader(call)
            call.reply(answer if answer is not None else self.manager.alive(request).SerializeToString())
        except NvpoolError as error:
            call.fail(error)

    def _hops(self, call: Call, forwarded: Forwarded) -> int:
        """Number of supervisors that have forwarded the request, as recorded in it.

        AccessDenied: the peer's certificate contradicts the record. The certificate alone is not enough: over TCP
        the processes of this node present the same one as its supervisor.
        """
        member = call.peer.member
        if not member:
            return forwarded.hops
        if not member.startswith(_NODE):
            raise AccessDenied(f"{member} is not a node, and only nodes speak for their daemons")
        nodes = self._coordinator.pool_map.node_by_id
        speaks = nodes.get(forwarded.node if forwarded.hops else self._node)
        if speaks is not None and speaks.member == member:
            return forwarded.hops
        if forwarded.hops:
            raise AccessDenied(
                f"{member} passes a request on in the name of node {forwarded.node}, which it is not"
            )
        # Another node's supervisor of version 0.1.0 or older, which does not mark forwarded requests.
        return 1

    async def ask_leader(self, call: Call) -> bytes | None:
        """Forward a local process's request to the leader and return the answer.

        None: this node leads. The request itself records whether it was forwarded (`Forwarded`). AccessDenied:
        its certificate contradicts. NotLeader: no node leads, the leader is unreachable, or the request was
        already forwarded; `may_be_applied` is set if the request was sent to a node that led until then.

        A heartbeat of a target goes to the leader directly only: a chain whose targets do not reach one another
        has to leave one out.
        """
        message = bytes(call.message)
        try:
            forwarded = Forwardable.FromString(message).forwarded
        except DecodeError:
            raise InvalidRequest(f"the message of method {call.method} cannot be read") from None
        hops = self._hops(call, forwarded)
        if self.manager is not None:
            return None
        relays = hops == 1 and forwarded.relay
        is_direct = relays or call.method == POOL_ALIVE
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
            # Protobuf: of two values of one field the later counts, in any message; `relay` stays set but has
            # no effect.
            passed_on = (
                message + Forwardable(forwarded=Forwarded(node=self._node, hops=hops + 1)).SerializeToString()
            )
            asking = asyncio.ensure_future(
                self._ask(node, call.method, passed_on, until_s)
                if is_direct
                else self._ask_or_relay(node, call.method, message, passed_on, until_s)
            )
            try:
                # A leader that is cut off does not answer: its successor is asked immediately.
                await asyncio.wait([asking, another], return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
            except Unreachable as error:
                raise NotLeader(
                    f"node {node.id}, which leads the pool, cannot be reached: {error}",
                    may_be_applied=was_sent or error.may_be_applied,
                ) from None
            except NvpoolError as error:
                error.may_be_applied |= was_sent
                raise
            finally:
                abandon(asking)
            was_sent = True

    async def _ask(self, node: Node, method: int, message: bytes, until_s: float) -> bytes:
        return bytes((await self._dialer.call(node.endpoints, method, message, deadline_s=until_s)).message)

    async def _ask_or_relay(
        self, leader: Node, method: int, message: bytes, passed_on: bytes, until_s: float
    ) -> bytes:
        """Return the first answer of the leader, sent directly or through a relaying node. Errors are the
        leader's.

        A link between two nodes may be broken while a third one reaches both. A request that arrives twice is
        decided from the map at that time, so that the second decision changes nothing.
        """
        asking = {asyncio.ensure_future(self._ask(leader, method, passed_on, until_s))}
        (direct,) = asking
        try:
            if self._cut_off_from != leader.id:
                await asyncio.wait(asking, timeout=_RELAYED_AFTER_S)
            if direct.done() and not isinstance(direct.exception(), Unreachable | DeadlineExceeded):
                self._cut_off_from = 0
                return direct.result()
            self._cut_off_from = leader.id
            relayed = (
                message
                + Forwardable(forwarded=Forwarded(node=self._node, hops=1, relay=True)).SerializeToString()
            )
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
                # The refusal comes from the leader, not from the relay.
                if isinstance(error, Fenced) or not isinstance(error, Unavailable):
                    raise error
                may_be_applied |= error.may_be_applied
        error = direct.exception()
        assert isinstance(error, NvpoolError)
        error.may_be_applied |= may_be_applied
        raise error

    def _relays(self, leader: int) -> list[Node]:
        """Nodes to use as relays to the leader, beginning with the next higher node numbers."""
        others = [node for node in self._coordinator.pool_map.nodes if node.id not in (leader, self._node)]
        others.sort(key=lambda node: (node.id < self._node, node.id))
        return others[:_RELAYS_MAX]

    def _own(self, work) -> None:
        task = asyncio.ensure_future(work)
        self.forwarding.add(task)
        task.add_done_callback(self.forwarding.discard)

    async def close(self) -> None:
        passing = list(self.forwarding)
        for task in passing:
            task.cancel()
        if passing:
            await asyncio.wait(passing, timeout=_RETRY_S)
