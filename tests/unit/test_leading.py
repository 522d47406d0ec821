"""Whom a node asks that does not lead, while the lead passes on."""

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nvpool.cluster.manager import LEASE_S
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
from tests.unit.test_placement import a_pool


class Others:
    """The coordinator and the other nodes: those in `silent` never answer."""

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
        seeing = asyncio.ensure_future(leading._see())
        call = DirectCall(META_ALIVE, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 600)
        call.peer = call.peer._replace(member="")
        question = asyncio.ensure_future(leading.ask_leader(call))
        while not others.asked:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        try:
            await asyncio.wait_for(check(others, leading, question), 120)
        finally:
            seeing.cancel()

    asyncio.run(main())


def test_who_waits_for_a_leader_that_is_silent_asks_the_next_one():
    async def check(others, leading, question):
        others.leads = "3"
        assert await question == b"from 3" and others.asked == [2, 3]

    asking(check)


def test_who_waits_for_a_leader_that_is_silent_hears_that_nobody_leads():
    async def check(others, leading, question):
        others.leads = None
        with pytest.raises(Unavailable):
            await question

    asking(check)


def test_who_waits_for_a_leader_that_is_silent_and_leads_itself_answers_itself():
    async def check(others, leading, question):
        leading.manager = object()
        others.leads = "1"
        assert await question is None

    asking(check)


@pytest.mark.parametrize("serves_again", [False, True])
def test_a_death_that_is_told_late_is_not_that_of_the_process_that_followed(serves_again):
    """Who leads gives that one leases, and would not know for a moment that others go on without it."""

    class Coordinator(Others):
        async def replace(self, new, leader=None):
            if self.pool_map.epoch == before:  # another one was first
                self.pool_map = changed(self.pool_map)
                pids[1] = 8 if serves_again else 7
                raise StaleEpoch
            self.pool_map = new

    async def main():
        others = Coordinator()
        leading = Leading(others, 1, others, pids.get)
        leading.died(1, 7)
        await asyncio.gather(*leading._passing)
        assert any(1 in chain.targets for chain in others.pool_map.tables[-1].chains) == serves_again

    pids = {1: 7}
    before = Others().pool_map.epoch
    asyncio.run(main())


def passing(check, *, silent=(), member="", method=META_ALIVE, request=None):
    """`check(others, leading, call)` on node 1, where `member` asks for `request`; its target 1 is served by process 7."""

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
def test_own_process_is_passed_on_whatever_certificate_it_shows(member):
    async def check(others, leading, call):
        assert await leading.ask_leader(call) == b"from 2" and others.asked == [2]
        passed_on = ShardAliveRequest.FromString(others.messages[0])
        assert (passed_on.forwarded.node, passed_on.forwarded.hops) == (1, 1)
        assert (passed_on.shard, passed_on.member, passed_on.term) == (1, 2, 3)

    passing(check, member=member)


@pytest.mark.parametrize("member", ["", "node/n1"])
def test_own_target_is_passed_on_whatever_certificate_it_shows(member):
    async def check(others, leading, call):
        leading.alive(call)
        await asyncio.gather(*leading._passing)
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
        ("node/n3", Forwarded()),  # a supervisor that does not say so yet
    ],
)
def test_forwarded_request_is_not_passed_on_again(member, forwarded):
    async def check(others, leading, call):
        with pytest.raises(NotLeader) as caught:
            await leading.ask_leader(call)
        assert not others.asked and not caught.value.may_be_applied

    passing(check, member=member, request=ShardAliveRequest(shard=1, forwarded=forwarded))


def test_leader_that_this_node_does_not_reach_is_asked_through_another():
    async def check(others, leading, call):
        assert await leading.ask_leader(call) == b"from 3" and others.asked == [2, 3]
        direct, relayed = (ShardAliveRequest.FromString(message) for message in others.messages)
        assert direct.forwarded == Forwarded(node=1, hops=1)
        assert relayed.forwarded == Forwarded(node=1, hops=1, relay=True) and relayed.term == 3
        others.silent = {3}
        assert await leading.ask_leader(call) == b"from 2" and others.asked == [2, 3, 2, 3], "both at once"
        assert await leading.ask_leader(call) == b"from 2" and others.asked == [2, 3, 2, 3, 2], (
            "it is reached again"
        )

    passing(check, silent=(2,))


@pytest.mark.parametrize("leader", [Unreachable("no route"), None], ids=["unreachable", "silent"])
@pytest.mark.parametrize(
    "relay, raised",
    [
        (AccessDenied("not yours"), AccessDenied),
        (Fenced("over"), Fenced),
        (NotLeader("nor do I reach it"), NotLeader),
    ],
)
def test_refusals_of_a_leader_come_through_another(leader, relay, raised):
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
def test_relayed_request_goes_to_the_leader_alone(relays):
    async def check(others, leading, call):
        if not relays:  # it was relayed already
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
        ("bridge/b", Forwarded(node=1, hops=1)),  # no node
        ("node/n3", Forwarded(node=2, hops=1)),  # in another node's name
        ("node/n3", Forwarded(node=9, hops=1)),  # in the name of none of the pool
    ],
)
@pytest.mark.parametrize("leads", [False, True])
def test_forwarding_in_the_name_of_others_is_denied(member, forwarded, leads):
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
def test_leader_hears_targets_whose_supervisor_passes_them_on(forwarded):
    """A supervisor of an older version, which does not say that it has passed the sign on, is understood."""

    async def check(others, leading, call):
        leading.manager = SimpleNamespace(alive=lambda request: AliveReply(epoch=request.target))
        leading.alive(call)
        assert AliveReply.FromString(call.answer[0]).epoch == target
        shard = DirectCall(META_ALIVE, ShardAliveRequest(shard=1, forwarded=forwarded).SerializeToString())
        shard.peer = call.peer
        assert await leading.ask_leader(shard) is None  # to be answered here

    target = next(target.id for target in Others().pool_map.targets if target.node == 3)
    passing(
        check,
        member="node/n3",
        method=POOL_ALIVE,
        request=AliveRequest(target=target, pid=9, forwarded=forwarded),
    )


def test_node_speaks_for_its_own_targets_only():
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
    from nvpool.node.coordination.shard_failover import ShardKeeper
    from nvpool.rpc.v1 import meta_pb2, moving_pb2, wire_pb2

    kinds = {
        wire_pb2.META_ALIVE: meta_pb2.ShardAliveRequest,
        wire_pb2.META_STANDBY: meta_pb2.StandbyRequest,
        wire_pb2.META_MOVED: moving_pb2.MovedRequest,
        wire_pb2.META_TAKE_RIGHT: meta_pb2.TakeRightRequest,
    }
    assert set(kinds) == ShardKeeper.METHODS
    for kind in (*kinds.values(), AliveRequest):
        made = kind(forwarded=Forwarded(node=4, hops=2)).SerializeToString()
        assert Forwardable.FromString(made).forwarded == Forwarded(node=4, hops=2)
        assert made == bytes.fromhex("a2060408041002")  # as other versions of nvpool read it


def test_answer_after_a_change_of_leader_may_have_been_applied():
    class Refusing(Others):
        async def call(self, endpoints, method, message, *, deadline_s):
            reply = await super().call(endpoints, method, message, deadline_s=deadline_s)
            raise Unreachable(f"nobody there, {reply.message}")

    async def main():
        others = Refusing()
        leading = Leading(others, 1, others, lambda target: None)
        seeing = asyncio.ensure_future(leading._see())
        call = DirectCall(META_ALIVE, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 600)
        question = asyncio.ensure_future(leading.ask_leader(call))
        while not others.asked:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        others.leads = "3"
        with pytest.raises(NotLeader) as caught:
            await question
        assert others.asked == [2, 3, 2] and caught.value.may_be_applied  # node 2 may have done it
        seeing.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    "former, led_s, bounded",
    [("2", LEASE_S + 0.1, True), ("2", LEASE_S, False), ("2", 0.0, False), (None, 9.0, False)],
)
def test_rights_have_ended_where_the_former_leader_says_so(former, led_s, bounded):
    """Also for a supervisor that has just been started: it has seen no other node lead for long."""

    async def main():
        leading = Leading(Others(), 1, Others(), {}.get)
        reign = leading._begun(SimpleNamespace(former=former, former_led_s=led_s, left_s=2.0, holds=True))
        assert (reign.bounded, reign.gone) == (bounded, 2 if bounded else None)

    asyncio.run(main())
