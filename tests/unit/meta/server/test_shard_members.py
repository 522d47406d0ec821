"""Shard members and the keeper that elects their primaries, without processes."""

import asyncio
import functools
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nvpool.core.clock import ManualClock
from nvpool.core.errors import AlreadyExists, InvalidRequest, StaleEpoch, StaleGrant, StaleTerm, Unavailable
from nvpool.core.grants import READ, SERVICE, Grant, read, sign
from nvpool.kv.options import LmdbOptions
from nvpool.kv.replication.commit_mark import CommitMark
from nvpool.kv.replication.member_engine import MemberKv
from nvpool.kv.replication.standby import StandbyKv
from nvpool.kv.replication_log import Position, ReplicationHistory
from nvpool.meta.server.commit_gate import CommitGate
from nvpool.meta.server.replication_rpc import PrimaryService, StandbyService
from nvpool.meta.server.shard_member import MemberOptions, ShardMember
from nvpool.meta.service_auth import AuthorityCheck, ServiceRight
from nvpool.node.coordination.leadership import Leadership
from nvpool.node.coordination.shard_failover import HEARD_S, LEASE_S, ShardFailover
from nvpool.poolmap.model import MAP_FORMAT, Node, PoolMap, PoolSettings, Shard, StandbyMember, decode_map
from nvpool.poolmap.shards import members as shard_members
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import DirectCall

SECRET = bytes(range(32))


def in_a_loop(check):
    @functools.wraps(check)
    def run(*arguments, **fixtures):
        async def bounded():
            async with asyncio.timeout(120):
                await check(*arguments, **fixtures)

        asyncio.run(bounded())

    return run


class Bench:
    """A keeper with an in-memory map and a manual clock."""

    def __init__(self, *states):
        standbys = tuple(StandbyMember(number, 1, (), state) for number, state in enumerate(states, 1))
        shard = Shard(1, 1, (), standbys=standbys)
        self.map = PoolMap(MAP_FORMAT, "p", "p", 1, PoolSettings(), (Node(1, "n", "", ()),), shards=(shard,))
        self.clock = ManualClock()
        self.left_s = 100.0
        self.leadership = Leadership(self)
        self.answer = None
        self.records: dict[int, bool | None] = {}
        """Replies of the standbys that are asked: True unless set here."""
        self.keeper = ShardFailover(
            lambda: self.map,
            self.change,
            self.clock,
            lambda: SECRET,
            lambda: self.leadership,
            change_anywhere=self.change_anywhere,
            has_records=self.has_records,
            unaware=lambda epoch: [3] if epoch > 1 else [],
        )
        self.right = ServiceRight(self.clock, SECRET, 1)

    async def has_records(self, shard, member):
        return await self.answer(shard, member) if self.answer is not None else self.records.get(member, True)

    async def change(self, decide):
        assert self.leadership is not None
        return await self.change_anywhere(decide)

    async def change_anywhere(self, decide):
        self.map = decide(self.map)
        return self.map

    @property
    def shard(self):
        return self.map.shards[0]

    async def alive(self, member, term, right=None, whole_term=0):
        request = pb.ShardAliveRequest(
            shard=1,
            member=member,
            term=term,
            map_epoch=self.map.epoch,
            whole_term=whole_term,
            authority=self.right() if right is None else right,
        )
        return pb.ShardAliveReply.FromString(
            await self.keeper.answer(wire.META_ALIVE, request.SerializeToString())
        )

    async def standby(self, member, up, term, epoch):
        request = pb.StandbyRequest(
            shard=1, member=member, up=up, term=term, epoch=epoch, authority=self.right()
        )
        answer = await self.keeper.answer(wire.META_STANDBY, request.SerializeToString())
        return decode_map(pb.StandbyReply.FromString(answer).map)


@in_a_loop
async def test_silent_primary_is_replaced_after_its_whole_lease():
    bench = Bench("up")
    await bench.keeper.run_once()
    for _ in range(10):
        bench.clock.advance(LEASE_S)
        assert (await bench.alive(0, 1)).term == 1
        await bench.keeper.run_once()
    bench.clock.advance(LEASE_S)
    await bench.keeper.run_once()
    assert bench.shard.member == 0
    bench.clock.advance(0.01)
    await bench.keeper.run_once()
    assert (bench.shard.member, bench.shard.term) == (1, 2)
    with pytest.raises(StaleTerm):
        await bench.alive(0, 1)
    assert (await bench.alive(1, 2)).lease_ms == LEASE_S * 1000


@in_a_loop
async def test_ended_primary_is_replaced_only_by_a_member_that_is_up():
    bench = Bench("syncing")
    bench.keeper.member_ended(1, 0)
    await bench.keeper.run_once()
    assert bench.shard.member == 0
    assert (await bench.standby(1, True, 1, 1)).shards[0].standbys[0].state == "up"
    await bench.keeper.run_once()
    assert (bench.shard.member, bench.shard.term) == (1, 2)
    bench.keeper.member_ended(1, 0)  # of a standby
    await bench.standby(0, True, 2, bench.shard.epoch)
    await bench.keeper.run_once()
    assert bench.shard.member == 1


@in_a_loop
async def test_restarted_primary_is_distinguished_from_the_ended_one():
    bench = Bench("syncing")
    bench.keeper.member_ended(1, 0)
    reply = await bench.alive(0, 0)
    assert reply.term == 2 == bench.shard.term
    await bench.standby(1, True, 2, bench.shard.epoch)
    await bench.keeper.run_once()
    assert bench.shard.member == 0
    # it ended and began again unnoticed: the standby that is up has the records that it may have lost
    reply = await bench.alive(0, 0)
    assert reply.term == 0 and decode_map(reply.map).shards[0].member == 1


@in_a_loop
async def test_standby_without_records_is_never_promoted():
    bench = Bench("up", "up")
    bench.records = {1: False}
    bench.keeper.member_ended(1, 0)
    await bench.keeper.run_once()
    assert (bench.shard.member, bench.shard.term) == (2, 2)
    assert {one.member: one.state for one in bench.shard.standbys} == {0: "syncing", 1: "syncing"}


@in_a_loop
async def test_only_standby_without_records_is_demoted():
    bench = Bench("up")
    bench.records = {1: False}
    bench.keeper.member_ended(1, 0)
    for _ in range(3):
        await bench.keeper.run_once()
    assert (bench.shard.member, bench.shard.term, bench.shard.standbys[0].state) == (0, 1, "syncing")
    assert (await bench.alive(0, 0)).term == 2, "the old primary continues"


@in_a_loop
async def test_promotion_waits_for_a_silent_standby():
    bench = Bench("up")
    bench.records = {1: None}
    bench.keeper.member_ended(1, 0)
    await bench.keeper.run_once()
    assert (bench.shard.member, bench.shard.term) == (0, 1)
    with pytest.raises(
        Unavailable, match="meta-1.1 on node 1 may have changes .*nvpool shard standbys POOL 1 0"
    ):
        await bench.alive(0, 0)
    bench.records = {}
    await bench.keeper.run_once()
    assert (bench.shard.member, bench.shard.term) == (1, 2)


@in_a_loop
async def test_proven_primary_continues_without_a_silent_standby():
    bench = Bench("up")
    bench.records = {1: None}
    with pytest.raises(Unavailable, match="may have changes"):
        await bench.alive(0, 0, whole_term=5)
    reply = await bench.alive(0, 0, whole_term=1)
    assert (
        reply.term == 2 and reply.lease_ms and decode_map(reply.map).shards[0].standbys[0].state == "syncing"
    )
    bench.records = {}
    bench.keeper.member_ended(1, 0)  # from now on the standby may lack acknowledged changes
    await bench.keeper.run_once()
    assert bench.shard.member == 0


@in_a_loop
async def test_primary_starts_when_its_standby_lost_records():
    bench = Bench("up")
    bench.records = {1: False}
    assert (await bench.alive(0, 0)).term == 2
    assert (bench.shard.member, bench.shard.standbys[0].state) == (0, "syncing")


@in_a_loop
async def test_primary_that_reports_during_an_election_stays():
    bench = Bench("up")
    await bench.keeper.run_once()
    bench.clock.advance(LEASE_S + 0.1)

    async def heard(shard, member):
        await bench.alive(0, 1)
        return True

    bench.answer = heard
    await bench.keeper.run_once()
    assert (bench.shard.member, bench.shard.term) == (0, 1)


@in_a_loop
async def test_new_leader_waits_a_whole_lease_before_promotion():
    bench = Bench("up")
    await bench.keeper.run_once()
    bench.leadership = None
    bench.clock.advance(100)
    await bench.keeper.run_once()
    bench.leadership = Leadership(bench)
    await bench.keeper.run_once()
    assert bench.shard.member == 0
    bench.clock.advance(LEASE_S + 0.1)
    await bench.keeper.run_once()
    assert bench.shard.member == 1


@in_a_loop
async def test_primary_newer_than_the_map_is_asked_to_retry():
    bench = Bench("up")
    await bench.keeper.run_once()
    with pytest.raises(Unavailable):
        await bench.alive(1, 2)
    for up in (True, False):
        with pytest.raises(Unavailable):
            await bench.standby(0, up, 2, 1)
    bench.map = shard_members.primary_lost(bench.map, 1)
    assert (await bench.alive(1, 2)).lease_ms > 0
    with pytest.raises(StaleTerm):
        await bench.alive(0, 1)


@in_a_loop
async def test_primary_lease_is_bounded_by_leadership():
    bench = Bench("up")
    await bench.keeper.run_once()
    assert (await bench.alive(0, 1)).lease_ms == LEASE_S * 1000
    bench.left_s = 0.7
    assert (await bench.alive(0, 1)).lease_ms == 700
    bench.clock.advance(LEASE_S + 0.1)
    made, bench.change = bench.change, None

    async def lost(decide):
        decide(bench.map)
        lease = await bench.alive(0, 1)  # while the change is in progress, and after its reply was lost
        assert lease.lease_ms == 0
        raise Unavailable("no answer", may_be_applied=True)

    bench.keeper.change = lost
    with pytest.raises(Unavailable):
        await bench.keeper.run_once()
    assert (await bench.alive(0, 1)).lease_ms == 0
    bench.keeper.change = made
    await bench.keeper.run_once()  # its heartbeat has not counted
    assert bench.shard.member == 1 and (await bench.alive(1, 2)).lease_ms == 700


@in_a_loop
async def test_leases_of_an_ended_leadership_are_not_waited_for():
    bench = Bench("up")
    bench.leadership = Leadership(bench, bounded=True, gone=1)
    await bench.keeper.run_once()
    bench.clock.advance(0.01)
    await bench.keeper.run_once()
    assert bench.shard.member == 1
    bench = Bench("up")
    bench.leadership = Leadership(
        bench, bounded=True, gone=2
    )  # the primary is on another node, and has time to report
    await bench.keeper.run_once()
    bench.clock.advance(HEARD_S - 0.1)
    await bench.keeper.run_once()
    assert bench.shard.member == 0 and (await bench.alive(0, 1)).lease_ms == LEASE_S * 1000
    bench.clock.advance(LEASE_S)
    await bench.keeper.run_once()
    assert bench.shard.member == 0
    bench = Bench("up")
    bench.leadership = Leadership(bench, bounded=True)
    await bench.keeper.run_once()
    bench.clock.advance(HEARD_S + 0.1)
    await bench.keeper.run_once()
    assert bench.shard.member == 1


@in_a_loop
async def test_node_replaces_its_own_ended_primary():
    bench = Bench("up")
    bench.leadership = None
    bench.keeper.member_ended(1, 0)
    await bench.keeper.run_once()
    assert (bench.shard.member, bench.shard.term) == (1, 2)
    await bench.keeper.run_once()
    assert bench.shard.term == 2


@in_a_loop
async def test_removed_shard_needs_no_primary():
    bench = Bench("up")
    bench.leadership = None
    left = replace(bench.map, epoch=2, shards=())

    async def change_anywhere(decide):
        bench.map = left
        return decide(left)

    bench.keeper.change_anywhere = change_anywhere
    bench.keeper.member_ended(1, 0)
    await bench.keeper.run_once()
    assert bench.map is left


@in_a_loop
async def test_only_services_of_the_pool_are_accepted():
    bench = Bench("syncing")
    reading = sign(Grant(READ, 0, 1, 0, 0, bench.clock.wall_ns() // 1_000_000 + 10_000), SECRET)
    for wrong in (b"", b"x" * 60, reading, ServiceRight(bench.clock, b"y" * 32, 1)()):
        with pytest.raises(StaleGrant):
            await bench.alive(0, 1, wrong)
    assert bench.map.epoch == 1


def test_service_right_is_valid_until_it_expires():
    clock = ManualClock()
    check, right = AuthorityCheck(clock, SECRET), ServiceRight(clock, SECRET, 1)
    signed = right()
    check(signed)
    clock.advance(290)
    assert right() == signed
    clock.advance(20)
    assert right() != signed
    check(signed)
    clock.advance(600)
    with pytest.raises(StaleGrant):
        check(signed)


def gated(needs_lease=True):
    clock, history = ManualClock(), ReplicationHistory(Position(0, 0))
    history.alone = False
    gate = CommitGate(history, clock, lambda: needs_lease)
    gate.lease_until_s = clock.boottime_s() + 1.0
    return gate, history, clock


def ask(gate, answer):
    call = DirectCall(wire.META_GETATTR, b"")
    gate.handle(answer, call)
    return call.answer


def test_replies_wait_only_for_changes_before_them():
    gate, history, _ = gated()
    answers = []

    def one(number, error=None):
        call = DirectCall(wire.META_GETATTR, b"")
        answers.append(call)
        gate.handle(lambda held: held.fail(error) if error else held.reply(b"%d" % number), call)

    one(0)
    assert answers[0].answer == (b"0", b"")
    history.note(1, 1, b"r")
    one(1)
    one(2, AlreadyExists("made by a change that no standby has yet"))
    history.note(2, 1, b"r")
    one(3)
    assert [call.answer for call in answers[1:]] == [None] * 3
    history.advance(1)
    assert (
        answers[1].answer == (b"1", b"")
        and isinstance(answers[2].answer, AlreadyExists)
        and answers[3].answer is None
    )
    history.end()
    assert isinstance(answers[3].answer, Unavailable) and answers[3].answer.may_be_applied


def test_lease_is_checked_after_the_work():
    gate, history, clock = gated()

    def slow(held):
        clock.advance(2.0)
        held.reply(b"of the past")

    assert isinstance(ask(gate, slow), Unavailable)
    assert isinstance(ask(gate, lambda held: held.reply(b"")), StaleEpoch)
    gate.lease_until_s = clock.boottime_s() + 1.0
    history.note(1, 1, b"r")
    call = DirectCall(wire.META_GETATTR, b"")
    gate.handle(lambda held: held.reply(b"late"), call)
    clock.advance(2.0)
    history.advance(1)
    assert isinstance(call.answer, Unavailable)
    alone, _, clock = gated(needs_lease=False)
    clock.advance(100)
    assert ask(alone, lambda held: held.reply(b"nobody can follow")) == (b"nobody can follow", b"")
    alone.closed = True
    assert isinstance(ask(alone, lambda held: held.reply(b"")), StaleEpoch)


@in_a_loop
async def test_standby_redirects_clients_and_accepts_only_services(tmp_path):
    clock = ManualClock()
    standby = StandbyKv(tmp_path / "kv", LmdbOptions(journal_bytes=1 << 20, map_bytes=1 << 20))
    service = StandbyService(standby, shard=1, member=2, clock=clock, secret=SECRET)
    right = ServiceRight(clock, SECRET, 1)

    async def follow(**fields):
        request = pb.FollowRequest(**({"shard": 1, "member": 2, "term": 1} | fields))
        call = DirectCall(wire.META_FOLLOW, request.SerializeToString())
        service.handle(call)
        return pb.FollowReply.FromString((await call.wait())[0])

    asked = DirectCall(wire.META_GETATTR, b"")
    service.handle(asked)
    assert isinstance(asked.answer, StaleEpoch)
    step = pb.FollowRequest
    with pytest.raises(StaleGrant):
        await follow(step=step.BEGIN)
    for wrong in ({"shard": 2}, {"member": 1}):
        with pytest.raises(StaleEpoch):
            await follow(step=step.BEGIN, authority=right(), **wrong)
    shipped = DirectCall(wire.META_SHIP, pb.ShipRequest(shard=1, member=2, term=1).SerializeToString())
    service.handle(shipped)
    assert isinstance(shipped.answer, StaleGrant)
    reply = await follow(step=step.BEGIN, authority=right())
    assert (reply.stored, reply.stored_term, len(reply.runs)) == (0, 0, 0) and not (tmp_path / "kv").exists()
    await follow(step=step.KEEP, authority=right())
    with pytest.raises(StaleTerm):
        await follow(step=step.SYNC, term=0, authority=right())
    await service.close()
    await standby.close()


def test_deposed_primary_does_not_apply_its_deposing_map(tmp_path):
    """The map may name a primary of a later term."""
    maps, failed = [], []
    first = PoolMap(
        MAP_FORMAT, "p", "p", 1, PoolSettings(), (Node(1, "n", "", ()),), shards=(Shard(1, 1, (), term=2),)
    )
    options = MemberOptions(1, 1, 0, tmp_path, LmdbOptions(), SECRET)
    member = ShardMember(options, first, None, ManualClock(), None, failed.append)
    member.kv, member.term, member.service = (
        SimpleNamespace(),
        2,
        SimpleNamespace(update_map=maps.append, handle=None),
    )
    second = replace(first, epoch=2)
    member.update_map(second)
    member.update_map(replace(first, epoch=3, shards=(replace(first.shards[0], member=1, term=3),)))
    assert maps == [second] and "is not the primary of shard 1 any more" in failed[0] and len(failed) == 1


class Asked:
    """Connection to the keeper of the map: records the requests, and gives no term."""

    def __init__(self):
        self.requests = []
        self.asked = asyncio.Event()

    async def call(self, _endpoints, method, message, *, deadline_s):
        assert method == wire.META_ALIVE
        self.requests.append(pb.ShardAliveRequest.FromString(message))
        self.asked.set()
        raise StaleTerm("ask again")

    def redial(self, _endpoints):
        pass


@in_a_loop
async def test_starting_primary_reports_its_commit_mark(tmp_path):
    path, mark = tmp_path / "kv", tmp_path / "mark"
    path.mkdir()
    options = LmdbOptions(journal_bytes=1 << 20, map_bytes=1 << 20)
    kv = await MemberKv.open_member(path, options)
    kv.apply([(b"a", b"1")])
    CommitMark.begin(mark, path, 2, kv.last.sequence)
    await kv.abandon()
    first = PoolMap(
        MAP_FORMAT,
        "p",
        "p",
        1,
        PoolSettings(),
        (Node(1, "n", "", ()),),
        shards=(Shard(1, 1, (), term=2, standbys=(StandbyMember(1, 1, (), "up"),)),),
    )
    for named, term in ((mark, 2), (None, 0)):
        asked = Asked()
        named_options = MemberOptions(1, 1, 0, path, options, SECRET, mark=named)
        member = ShardMember(named_options, first, asked, ManualClock(), None, None)
        starting = asyncio.ensure_future(member.start())
        await asked.asked.wait()
        starting.cancel()
        await asyncio.wait([starting])
        await member.close()
        assert [(one.term, one.whole_term) for one in asked.requests] == [(0, term)] and mark.exists()
    member = ShardMember(
        MemberOptions(1, 1, 0, path, options, SECRET, mark=mark), first, None, ManualClock(), None, None
    )
    member.kv = await MemberKv.open_member(path, options)
    await member.close()
    assert not mark.exists(), "a primary that ended in order leaves no commit mark"


@pytest.mark.parametrize(
    ("method", "message"), [(wire.META_SHIP, pb.ShipRequest), (wire.META_FOLLOW, pb.FollowRequest)]
)
def test_primary_of_the_later_term_wins(method, message):
    clock, later = ManualClock(), []
    service = PrimaryService(
        shard=1, member=2, term=7, clock=clock, secret=SECRET, on_later=lambda: later.append(True)
    )
    right = ServiceRight(clock, SECRET, 1)()

    def answered(term, authority=right):
        call = DirectCall(
            method, message(shard=1, member=2, term=term, authority=authority).SerializeToString()
        )
        service.handle(call)
        return call.answer

    assert isinstance(answered(6), StaleTerm) and isinstance(answered(7), StaleTerm) and not later
    assert isinstance(answered(9, b"anybody"), StaleGrant) and not later
    assert isinstance(answered(8), Unavailable) and later, "the receiver has become a standby"
    call = DirectCall(method, b"\xff")
    service.handle(call)
    assert isinstance(call.answer, InvalidRequest)


def test_right_belongs_to_a_service():
    clock = ManualClock()

    assert (
        read(ServiceRight(clock, SECRET, 7)()).rights == SERVICE
        and read(ServiceRight(clock, SECRET, 7)()).session == 7
    )


@in_a_loop
async def test_keeper_records_a_revocation_in_the_map():
    bench = Bench()
    request = pb.TakeRightRequest(shard=1, volume=7, member="client/one.0a1b2c3d", rights=1, life_ms=1000)
    with pytest.raises(StaleGrant):
        await bench.keeper.answer(wire.META_TAKE_RIGHT, request.SerializeToString())
    request.authority = bench.right()
    reply = pb.TakeRightReply.FromString(
        await bench.keeper.answer(wire.META_TAKE_RIGHT, request.SerializeToString())
    )
    (entry,) = decode_map(reply.map).rights_taken
    assert (entry.volume, entry.member, entry.epoch) == (7, "client/one.0a1b2c3d", 2) and list(
        reply.unaware
    ) == [3]
    asking = pb.TakeRightRequest(shard=1, known=1, authority=bench.right()).SerializeToString()
    reply = pb.TakeRightReply.FromString(await bench.keeper.answer(wire.META_TAKE_RIGHT, asking))
    assert not reply.map and not reply.unaware and bench.map.epoch == 2
