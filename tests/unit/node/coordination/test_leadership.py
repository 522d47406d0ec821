"""Requests to the leader from a node that does not lead, during a change of leadership."""

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nvpool.cluster.chain_manager import LEASE_S
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import (
    AccessDenied,
    DeadlineExceeded,
    Fenced,
    NotLeader,
    StaleEpoch,
    Unavailable,
    Unreachable,
)
from nvpool.node.coordination.leadership import Leading
from nvpool.poolmap.model import changed
from nvpool.rpc.v1.meta_pb2 import ShardAliveRequest
from nvpool.rpc.v1.pool_pb2 import AliveReply, AliveRequest, Forwardable, Forwarded
from nvpool.rpc.v1.wire_pb2 import META_ALIVE, POOL_ALIVE
from nvpool.testing.fakes.meta_shard import DirectCall
from tests.unit.poolmap.chains.test_chain_placement import a_pool


class Others:
    """A fake of the coordinator and the other nodes: those in `silent` never reply."""

    def __init__(self):
        found = a_pool((4, 4, 4), 2, nodes=3)
        self.pool_map = replace(
            found,
            nodes=tuple(
                replace(node, endpoints=(f"inproc://{node.id}",), member=f"node/n{node.id}")
                for node in found.nodes
            ),
        )
        self.leads, self.silent, self.asked, self.messages = "2", {2}, [], []

    async def newest(self):
        return self.pool_map

    def leader(self):
        return self.leads

    async def call(self, endpoints, method, message, *, deadline_s):
        node = int(endpoints[0].rpartition("/")[2])
        self.asked.append(node)
        self.messages.append(message)
        if node in self.silent:
            await asyncio.sleep(deadline_s - SYSTEM_CLOCK.boottime_s())
            raise DeadlineExceeded
        return SimpleNamespace(message=b"from %d" % node)


def asking(check):
    async def main():
        others = Others()
        leading = Leading(others, 1, others, lambda target: None)
        seeing = asyncio.ensure_future(leading.watch_leader())
        call = DirectCall(META_ALIVE, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 600)
        call.peer = call.peer._replace(member="")
        question = asyncio.ensure_future(leading.ask_leader(call))
        while not others.asked:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        try:
            await asyncio.wait_for(check(others, leading, question), 120)
        finally:
            seeing.cancel()

    asyncio.run(main())


def test_request_to_a_silent_leader_goes_to_the_next_one():
    async def check(others, leading, question):
        others.leads = "3"
        assert await question == b"from 3" and others.asked == [2, 3]

    asking(check)


def test_request_fails_when_the_silent_leader_has_no_successor():
    async def check(others, leading, question):
        others.leads = None
        with pytest.raises(Unavailable):
            await question

    asking(check)


def test_request_is_answered_here_when_this_node_leads():
    async def check(others, leading, question):
        leading.manager = object()
        others.leads = "1"
        assert await question is None

    asking(check)


@pytest.mark.parametrize("serves_again", [False, True])
def test_late_death_report_does_not_hit_the_next_process(serves_again):
    """The leader gives the new process leases: for a moment it would not know that other targets continue without it."""

    class Coordinator(Others):
        async def replace(self, new, leader=None):
            if self.pool_map.epoch == before:  # another change came first
                self.pool_map = changed(self.pool_map)
                pids[1] = 8 if serves_again else 7
                raise StaleEpoch
            self.pool_map = new

    async def main():
        others = Coordinator()
        leading = Leading(others, 1, others, pids.get)
        leading.died(1, 7)
        await asyncio.gather(*leading.forwarding)
        assert any(1 in chain.targets for chain in others.pool_map.tables[-1].chains) == serves_again

    pids = {1: 7}
    before = Others().pool_map.epoch
    asyncio.run(main())


def passing(check, *, silent=(), member="", method=META_ALIVE, request=None):
    """Run `check(others, leading, call)` on node 1, for a `request` of `member`; process 7 serves target 1."""

    async def main():
        others = Others()
        others.silent = set(silent)
        leading = Leading(others, 1, others, {1: 7}.get)
        asked = request if request is not None else ShardAliveRequest(shard=1, member=2, term=3)
        call = DirectCall(method, asked.SerializeToString(), deadline_s=SYSTEM_CLOCK.boottime_s() + 600)
        call.peer = call.peer._replace(member=member)
        try:
            await asyncio.wait_for(check(others, leading, call), 120)
        finally:
            await leading.close()

    asyncio.run(main())


@pytest.mark.parametrize("member", ["", "node/n1"])
def test_request_of_an_own_shard_process_is_forwarded(member):
    async def check(others, leading, call):
        assert await leading.ask_leader(call) == b"from 2" and others.asked == [2]
        passed_on = ShardAliveRequest.FromString(others.messages[0])
        assert (passed_on.forwarded.node, passed_on.forwarded.hops) == (1, 1)
        assert (passed_on.shard, passed_on.member, passed_on.term) == (1, 2, 3)

    passing(check, member=member)


@pytest.mark.parametrize("member", ["", "node/n1"])
def test_request_of_an_own_target_is_forwarded(member):
    async def check(others, leading, call):
        leading.alive(call)
        await asyncio.gather(*leading.forwarding)
        assert call.answer == (b"from 2", b"")
        passed_on = AliveRequest.FromString(others.messages[0])
        assert (passed_on.forwarded.node, passed_on.forwarded.hops, passed_on.target, passed_on.pid) == (
            1,
            1,
            1,
            7,
        )

    passing(check, member=member, method=POOL_ALIVE, request=AliveRequest(target=1, pid=7))


@pytest.mark.parametrize(
    "member, forwarded",
    [
        ("node/n3", Forwarded(node=3, hops=1)),
        ("", Forwarded(node=3, hops=1)),  # plain text shows no certificate
        ("node/n3", Forwarded()),  # a supervisor of a version without this field
    ],
)
def test_forwarded_request_is_not_forwarded_again(member, forwarded):
    async def check(others, leading, call):
        with pytest.raises(NotLeader) as caught:
            await leading.ask_leader(call)
        assert not others.asked and not caught.value.may_be_applied

    passing(check, member=member, request=ShardAliveRequest(shard=1, forwarded=forwarded))


def test_unreachable_leader_is_asked_through_another_node():
    async def check(others, leading, call):
        assert await leading.ask_leader(call) == b"from 3" and others.asked == [2, 3]
        direct, relayed = (ShardAliveRequest.FromString(message) for message in others.messages)
        assert direct.forwarded == Forwarded(node=1, hops=1)
        assert relayed.forwarded == Forwarded(node=1, hops=1, relay=True) and relayed.term == 3
        others.silent = {3}
        assert await leading.ask_leader(call) == b"from 2" and others.asked == [2, 3, 2, 3], "in parallel"
        assert await leading.ask_leader(call) == b"from 2" and others.asked == [2, 3, 2, 3, 2], (
            "the leader is reachable again"
        )

    passing(check, silent=(2,))


def test_heartbeat_of_a_target_is_not_relayed():
    async def check(others, leading, call):
        leading.alive(call)
        await asyncio.gather(*leading.forwarding)
        assert isinstance(call.answer, DeadlineExceeded) and others.asked == [2]
        assert AliveRequest.FromString(others.messages[0]).forwarded == Forwarded(node=1, hops=1)

    passing(check, silent=(2,), method=POOL_ALIVE, request=AliveRequest(target=1, pid=7))


@pytest.mark.parametrize("leader", [Unreachable("no route"), None], ids=["unreachable", "silent"])
@pytest.mark.parametrize(
    "relay, raised",
    [
        (AccessDenied("not yours"), AccessDenied),
        (Fenced("over"), Fenced),
        (NotLeader("nor do I reach it"), NotLeader),
    ],
)
def test_refusal_of_the_leader_comes_through_the_relay(leader, relay, raised):
    async def check(others, leading, call):
        async def answer(endpoints, method, message, *, deadline_s):
            if endpoints == others.pool_map.node_by_id[3].endpoints:
                raise relay
            if leader is None:
                await asyncio.sleep(1.0)
                raise NotLeader("too late")
            raise leader

        others.call = answer
        with pytest.raises(raised) as caught:
            await leading.ask_leader(call)
        if raised is not NotLeader:
            assert caught.value is relay

    passing(check)


@pytest.mark.parametrize("relays", [True, False])
def test_relayed_request_goes_only_to_the_leader(relays):
    async def check(others, leading, call):
        if not relays:  # the request was relayed already
            with pytest.raises(NotLeader):
                await leading.ask_leader(call)
            assert not others.asked
            return
        assert await leading.ask_leader(call) == b"from 2" and others.asked == [2]
        forwarded = ShardAliveRequest.FromString(others.messages[0]).forwarded
        assert (forwarded.node, forwarded.hops) == (1, 2)

    forwarded = Forwarded(node=3, hops=1, relay=True) if relays else Forwarded(node=3, hops=2, relay=True)
    passing(check, member="node/n3", request=ShardAliveRequest(shard=1, forwarded=forwarded))


@pytest.mark.parametrize(
    "member, forwarded",
    [
        ("client/c", Forwarded()),
        ("bridge/b", Forwarded(node=1, hops=1)),  # not a node
        ("node/n3", Forwarded(node=2, hops=1)),  # as another node
        ("node/n3", Forwarded(node=9, hops=1)),  # as a node that is not in the pool
    ],
)
@pytest.mark.parametrize("leads", [False, True])
def test_forwarding_as_another_node_is_denied(member, forwarded, leads):
    async def check(others, leading, call):
        leading.manager = object() if leads else None
        with pytest.raises(AccessDenied):
            await leading.ask_leader(call)
        alive = DirectCall(POOL_ALIVE, AliveRequest(target=1, pid=7, forwarded=forwarded).SerializeToString())
        alive.peer = call.peer
        with pytest.raises(AccessDenied):
            leading.alive(alive)

    passing(check, member=member, request=ShardAliveRequest(shard=1, forwarded=forwarded))


@pytest.mark.parametrize("forwarded", [Forwarded(), Forwarded(node=3, hops=1)], ids=["older", "today"])
def test_leader_accepts_heartbeats_that_supervisors_forward(forwarded):
    """Heartbeats of a supervisor of an older version, without the field `forwarded`, are accepted."""

    async def check(others, leading, call):
        leading.manager = SimpleNamespace(alive=lambda request: AliveReply(epoch=request.target))
        leading.alive(call)
        assert AliveReply.FromString(call.answer[0]).epoch == target
        shard = DirectCall(META_ALIVE, ShardAliveRequest(shard=1, forwarded=forwarded).SerializeToString())
        shard.peer = call.peer
        assert await leading.ask_leader(shard) is None  # answer it here

    target = next(target.id for target in Others().pool_map.targets if target.node == 3)
    passing(
        check,
        member="node/n3",
        method=POOL_ALIVE,
        request=AliveRequest(target=target, pid=9, forwarded=forwarded),
    )


def test_node_forwards_only_for_its_own_targets():
    async def check(others, leading, call):
        assert others.pool_map.target_by_id[1].node == 1
        leading.manager = object()
        with pytest.raises(AccessDenied, match="target 1 of node 1"):
            leading.alive(call)

    passing(
        check,
        member="node/n3",
        method=POOL_ALIVE,
        request=AliveRequest(target=1, pid=7, forwarded=Forwarded(node=3, hops=1)),
    )


def test_forwarded_requests_share_one_field_number():
    from nvpool.node.coordination.shard_failover import ShardFailover
    from nvpool.rpc.v1 import meta_pb2, moving_pb2, wire_pb2

    kinds = {
        wire_pb2.META_ALIVE: meta_pb2.ShardAliveRequest,
        wire_pb2.META_STANDBY: meta_pb2.StandbyRequest,
        wire_pb2.META_MOVED: moving_pb2.MovedRequest,
        wire_pb2.META_TAKE_RIGHT: meta_pb2.TakeRightRequest,
    }
    assert set(kinds) == ShardFailover.METHODS
    for kind in (*kinds.values(), AliveRequest):
        made = kind(forwarded=Forwarded(node=4, hops=2)).SerializeToString()
        assert Forwardable.FromString(made).forwarded == Forwarded(node=4, hops=2)
        assert made == bytes.fromhex("a2060408041002")  # the bytes that other versions of nvpool read


def test_reply_after_a_leader_change_may_be_applied():
    class Refusing(Others):
        async def call(self, endpoints, method, message, *, deadline_s):
            reply = await super().call(endpoints, method, message, deadline_s=deadline_s)
            raise Unreachable(f"nobody there, {reply.message}")

    async def main():
        others = Refusing()
        leading = Leading(others, 1, others, lambda target: None)
        seeing = asyncio.ensure_future(leading.watch_leader())
        call = DirectCall(META_ALIVE, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 600)
        question = asyncio.ensure_future(leading.ask_leader(call))
        while not others.asked:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        others.leads = "3"
        with pytest.raises(NotLeader) as caught:
            await question
        assert others.asked == [2, 3, 2] and caught.value.may_be_applied  # node 2 may have executed it
        seeing.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    "former, led_s, bounded",
    [("2", LEASE_S + 0.1, True), ("2", LEASE_S, False), ("2", 0.0, False), (None, 9.0, False)],
)
def test_rights_of_the_former_leader_have_expired(former, led_s, bounded):
    """Also for a supervisor that was started just now: it has not seen how long another node led."""

    async def main():
        leading = Leading(Others(), 1, Others(), {}.get)
        term = leading.begin_term(SimpleNamespace(former=former, former_led_s=led_s, left_s=2.0, holds=True))
        assert (term.bounded, term.gone) == (bounded, 2 if bounded else None)

    asyncio.run(main())
