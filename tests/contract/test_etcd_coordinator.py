"""The coordinator in a real etcd: the contract, and behaviour with several members and several coordinators."""

import asyncio
import ssl
from itertools import count

import msgspec
import pytest

from nvpool.cluster.etcd import client as etcd_client
from nvpool.cluster.etcd import coordinator as etcd_module
from nvpool.cluster.etcd.coordinator import EtcdCoordinator
from nvpool.cluster.etcd.leases import EtcdLease
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import CorruptRecord, InvalidRequest, StaleEpoch, StaleLease, Unavailable
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.model import Drive, Node, Target, changed, encode_map
from nvpool.testing.contracts.coordinator import CHECKS, LEASE_S, first_map, until
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env.tls_probe import agreed_version

pytestmark = pytest.mark.skipif(real_etcd.missing() is not None, reason=str(real_etcd.missing()))

_numbers = count(1)


@pytest.fixture(scope="module")
def one():
    with real_etcd.RealEtcd() as etcd:
        yield etcd


@pytest.fixture
def three():
    with real_etcd.RealEtcd(3) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def three_whole():
    """Three members that no test harms."""
    with real_etcd.RealEtcd(3) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def three_less_one():
    """Three members of which one is dead; a majority is left."""
    with real_etcd.RealEtcd(3) as etcd:
        etcd.kill(0)
        etcd.wait(1)
        yield etcd


def a_pool():
    """The first map of a new pool."""
    return msgspec.structs.replace(first_map(), pool_id=f"pool-{next(_numbers)}")


async def pair(etcd, first=None):
    """Two coordinators of one new pool."""
    first = first or a_pool()
    return await EtcdCoordinator.found(etcd.members, first), await EtcdCoordinator.open(
        etcd.members, first.pool_id
    )


@pytest.mark.parametrize("members", ["one", "three_whole", "three_less_one"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_etcd_coordinator_meets_the_contract(check, members, request, monkeypatch):
    etcd = request.getfixturevalue(members)
    # each check has its own pool, by number: the contract's first map is the same for all
    number = next(_numbers)
    monkeypatch.setattr(etcd_module, "root_key", lambda pool_id: b"nvpool/contract-%d/" % number)

    async def run():
        coordinator = await EtcdCoordinator.found(etcd.members, first_map())
        try:
            await check(coordinator)
        finally:
            await coordinator.close()

    asyncio.run(run())


def test_change_is_seen_by_another_coordinator(one):
    async def run():
        mine, other = await pair(one)
        waiting = asyncio.ensure_future(other.watch(1, 30))
        lease = await mine.announce("node-1", b"here", LEASE_S)
        await mine.replace(changed(mine.pool_map, name="new"))
        assert (await asyncio.wait_for(waiting, 120)).name == "new"
        assert dict(await asyncio.wait_for(other.watch_present({}, 30), 120)) == {"node-1": b"here"}
        await lease.release()
        assert dict(await asyncio.wait_for(other.watch_present({"node-1": b"here"}, 30), 120)) == {}
        await mine.close()
        await other.close()

    asyncio.run(run())


def test_one_of_two_concurrent_changes_is_stale(one):
    async def run():
        both = await pair(one)
        changes = (
            each.replace(changed(each.pool_map, name=name)) for each, name in zip(both, "ab", strict=True)
        )
        results = await asyncio.gather(*changes, return_exceptions=True)
        assert sorted(str(type(result).__name__) for result in results) == ["NoneType", "StaleEpoch"]
        assert both[0].pool_map == both[1].pool_map
        loser = both[next(number for number, result in enumerate(results) if result is not None)]
        await loser.replace(changed(loser.pool_map, name="again"))
        for each in both:
            await each.close()

    asyncio.run(run())


def test_map_overtaken_by_the_next_one_is_not_stale(one):
    async def run():
        mine, other = await pair(one)
        mines = mine.calls.transact

        async def overtaken(request, wait_s):
            answer = await mines(request, wait_s)
            assert await other.watch(1, 60)
            await other.replace(changed(other.pool_map, name="second"))
            return answer

        mine.calls.transact = overtaken
        await mine.replace(changed(mine.pool_map, name="first"))
        mine.calls.transact = mines
        assert (mine.pool_map.epoch, mine.pool_map.name) == (3, "second")
        with pytest.raises(StaleEpoch):
            await mine.replace(msgspec.structs.replace(mine.pool_map, epoch=2, name="third"))
        await mine.close()
        await other.close()

    asyncio.run(run())


@pytest.mark.parametrize("lost", ["transact", "ranges"])
def test_map_seen_by_the_watch_counts_as_committed(one, lost):
    async def run():
        mine, other = await pair(one)
        calls, asked = mine.calls, getattr(mine.calls, lost)
        notified = []

        async def silent(*arguments):
            if lost == "transact":
                await asked(*arguments)
            notified.append(await mine.watch(1, 60))
            raise Unavailable("etcd does not answer")

        setattr(calls, lost, silent)
        await mine.replace(changed(mine.pool_map, name="made"))
        assert notified[0] is mine.pool_map and mine.pool_map.name == "made"

        async def refused(*arguments):
            raise Unavailable("etcd does not answer")

        calls.transact = refused
        with pytest.raises(Unavailable):
            await mine.replace(changed(mine.pool_map, name="not made"))
        await mine.close()
        assert await other.watch(1, 60) and other.pool_map.name == "made"
        await other.close()

    asyncio.run(run())


def test_announcement_with_an_expired_lease_can_be_retried(one, monkeypatch):
    async def run():
        mine, other = await pair(one)
        take = EtcdLease.take

        async def slow(*arguments):
            lease = await take(*arguments)
            await other.calls.revoke_lease(lease.number, 10)
            return lease

        monkeypatch.setattr(EtcdLease, "take", slow)
        with pytest.raises(Unavailable, match="lease"):
            await mine.announce("node-1", b"here", LEASE_S)
        monkeypatch.undo()
        await mine.announce("node-1", b"here", LEASE_S)
        await mine.close()
        await other.close()

    asyncio.run(run())


def test_pool_is_founded_once_and_must_exist_to_open(one):
    async def run():
        first = a_pool()
        await (await EtcdCoordinator.found(one.members, first)).close()
        with pytest.raises(InvalidRequest):
            await EtcdCoordinator.found(one.members, first)
        with pytest.raises(CorruptRecord):
            await EtcdCoordinator.open(one.members, "no such pool")

    asyncio.run(run())


def test_each_map_is_published_and_few_are_kept(one, monkeypatch):
    monkeypatch.setattr(etcd_module, "KEPT_MAPS", 5)

    async def run():
        seen = []
        mine, other = await pair(one)
        await other.close()
        other = await EtcdCoordinator.open(one.members, mine.pool_map.pool_id, seen.append)
        for number in range(12):
            await mine.replace(changed(mine.pool_map, name=f"n{number}"))
        assert (await other.watch(12, 10)).epoch == 13
        assert len(seen) >= 2
        maps = etcd_module.rpc.RangeRequest(key=mine.root + b"maps/", range_end=mine.root + b"maps0")
        found = await mine.calls.range(maps, 5)
        assert [int(kv.key[-20:]) for kv in found.kvs] == [9, 10, 11, 12, 13]
        await mine.close()
        await other.close()

    asyncio.run(run())


@pytest.mark.t3
def test_large_maps_exceed_no_message_limit(one):
    async def run():
        targets = tuple(Target(n, n, 1, 1 << 30, (f"inproc://target-{n}",)) for n in range(1, 7))
        tables = tuple(build_table(targets, replicas) for replicas in (1, 2, 3))
        large = msgspec.structs.replace(
            a_pool(),
            targets=targets,
            tables=tables,
            drives=tuple(Drive(n, 1, f"/drive/{n}", 1 << 30) for n in range(1, 7)),
        )
        assert len(encode_map(large)) * etcd_module.KEPT_MAPS > 4 << 20, "more than gRPC accepts in one reply"
        mine, other = await pair(one, large)
        other.following.cancel()
        began = (await mine.calls.range(etcd_module.rpc.RangeRequest(key=b"x"), 5)).header.revision
        for number in range(etcd_module.KEPT_MAPS):
            await mine.replace(changed(mine.pool_map, name=f"map-{number}"))
        stream = asyncio.ensure_future(
            other.follow_stream(began + 1)
        )  # the whole history arrives in one burst
        await asyncio.wait_for(reached(other, mine.pool_map.epoch), 120)
        assert not stream.done()
        stream.cancel()
        late = await EtcdCoordinator.open(one.members, large.pool_id)
        await late.replace(changed(late.pool_map, name="late"))
        await asyncio.wait_for(reached(mine, late.pool_map.epoch), 120)
        for coordinator in (mine, other, late):
            await coordinator.close()

    async def reached(coordinator, epoch):
        while coordinator.pool_map.epoch < epoch:
            await coordinator.watch(coordinator.pool_map.epoch, 60)

    asyncio.run(run())


async def led_by(coordinator, name):
    """The watch of the leader may report later than the watch of present nodes: they are two watches of one stream."""
    while coordinator.leader() != name:
        await coordinator.watch_present({"node-1": b"here"}, 0.01)


def test_unrenewed_lease_ends_first_for_its_holder(one):
    async def run():
        mine, other = await pair(one)
        leader = await mine.lead("mine", LEASE_S, 10)
        announced = await mine.announce("node-1", b"here", LEASE_S)
        await other.watch_present({}, 10)
        await asyncio.wait_for(led_by(other, "mine"), 60)
        for lease in (leader, announced):
            lease.renewing.cancel()
            lease.renewing = asyncio.ensure_future(asyncio.sleep(1000))  # as if the process were stopped
            lease.lost = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(other.lead("other", LEASE_S, 30))
        while leader.holds:
            assert not waiting.done() and other.leader() == "mine"
            await asyncio.sleep(0.02)
        assert leader.in_doubt
        assert await asyncio.wait_for(waiting, 15)
        assert "node-1" not in await other.watch_present({"node-1": b"here"}, 10)
        with pytest.raises(StaleLease):
            await mine.replace(changed(mine.pool_map, name="of the past"), leader)
        leader.__class__ = type("Sure", (leader.__class__,), {"holds": True})  # a stopped clock
        with pytest.raises(StaleLease):
            await mine.replace(changed(mine.pool_map, name="of the past"), leader)
        assert mine.pool_map.epoch == 1
        await mine.close()
        await other.close()

    asyncio.run(run())


def stop_renewal(leadership):
    """As if the leader's process were stopped, while its clock runs on."""
    leadership.renewing.cancel()
    leadership.lost = asyncio.get_running_loop().create_future()


async def led_pair(etcd, lease_s=LEASE_S):
    mine, other = await pair(etcd)
    return mine, other, await mine.lead("mine", lease_s, 10)


def test_next_leader_knows_whether_the_former_lease_ended(one):
    async def run():
        mine, other, first = await led_pair(one)
        assert first.former is None
        await first.release()
        second = await other.lead("other", LEASE_S, 30)
        assert second.former is None, "leases that the first leader granted may still run"
        await asyncio.sleep(LEASE_S)
        stop_renewal(second)
        third = await mine.lead("mine", LEASE_S, 30)
        assert third.former == "other" and not second.holds
        assert LEASE_S / 2 < third.former_led_s < 30 and second.former_led_s == 0
        await mine.close()
        await other.close()

    asyncio.run(run())


def test_leader_need_not_wait_for_its_own_expired_lease(one):
    async def run():
        mine, other, first = await led_pair(one, 3.0)
        first.lease_s = 0.0  # it has expired, others wait for it
        await first.lost
        assert (await mine.lead("mine", 60.0, 30)).former == "mine"
        assert await other.lead("other", LEASE_S, 0.5) is None
        await mine.close()
        await other.close()

    asyncio.run(run())


def test_restarted_leader_leads_and_fences_its_predecessor(one):
    async def run():
        mine, other = await pair(one)
        killed = await EtcdCoordinator.open(one.members, mine.pool_map.pool_id, only="1")
        leadership = await killed.lead("1", 60.0, 10)
        leadership.renewing.cancel()  # it renews no more
        assert await other.lead("2", LEASE_S, 0.5) is None
        again = await EtcdCoordinator.open(one.members, mine.pool_map.pool_id, only="1")
        began_s = SYSTEM_CLOCK.boottime_s()
        taken = await again.lead("1", 60.0, 30)
        assert taken.holds and SYSTEM_CLOCK.boottime_s() - began_s < 20
        assert taken.former is None, "leases that the predecessor granted may still run"
        with pytest.raises(StaleLease):
            await killed.replace(changed(killed.pool_map, name="of the past"), leadership)
        await again.replace(changed(again.pool_map, name="new"), taken)
        assert await other.lead("2", LEASE_S, 0.5) is None
        for coordinator in (again, killed, mine, other):
            await coordinator.close()

    asyncio.run(run())


def test_leadership_with_a_lost_reply_is_taken_again(one):
    async def run():
        mine, other = await pair(one)
        transact, tries = mine.calls.transact, []

        async def lost(request, wait_s):
            answer = await transact(request, wait_s)
            if not tries:
                tries.append(answer.succeeded)
                raise Unavailable("the answer is lost", may_be_applied=True)
            return answer

        mine.calls.transact = lost
        leadership = await mine.lead("mine", 60.0, 30)
        assert tries == [True] and leadership.holds and leadership.former is None
        await mine.replace(changed(mine.pool_map, name="new"), leadership)
        assert await other.lead("other", LEASE_S, 0.5) is None
        await mine.close()
        await other.close()

    asyncio.run(run())


def test_leader_of_an_older_version_keeps_its_lease(one):
    async def run():
        mine, other = await pair(one)
        number = await mine.calls.grant_lease(600, 10)
        put = etcd_module.rpc.PutRequest(key=mine.root + b"leader", value=b"old", lease=number)
        await mine.calls.transact(
            etcd_module.rpc.TxnRequest(success=[etcd_module.rpc.RequestOp(request_put=put)]), 10
        )
        await until(lambda: other.leader() == "old")
        assert await other.lead("other", 0.1, 0.5) is None
        waiting = asyncio.ensure_future(other.lead("other", LEASE_S, 30))
        await mine.calls.revoke_lease(number, 10)
        assert (await waiting).former is None
        await mine.close()
        await other.close()

    asyncio.run(run())


@pytest.mark.t3
def test_leadership_passes_on_while_members_die(three):
    async def run():
        mine, other = await pair(three)
        for number in range(3):
            leadership = await mine.lead("mine", LEASE_S, 60)
            await until(lambda: other.leader() == "mine")
            waiting = asyncio.ensure_future(other.lead("other", LEASE_S, 60))
            three.kill(number)  # one of them leads etcd
            stop_renewal(leadership)
            while leadership.holds:
                assert not waiting.done()
                await asyncio.sleep(0.01)
            second = await waiting
            assert second.former == "mine"
            with pytest.raises((StaleLease, Unavailable)):
                await mine.replace(changed(mine.pool_map, name="of the past"), leadership)
            three.start(number)
            await asyncio.to_thread(three.wait, number)
            await second.release()
        assert mine.pool_map.epoch == 1
        await mine.close()
        await other.close()

    asyncio.run(run())


def test_silent_member_is_not_waited_for(three, monkeypatch):
    monkeypatch.setattr(etcd_client, "CALL_S", 600.0)

    async def run():
        three.stop(0)
        try:
            for _ in range(2):
                await EtcdCoordinator.answers(three.members, wait_s=120.0)
            calls = etcd_client.EtcdCalls(three.members, SYSTEM_CLOCK)
            await calls.range(etcd_module.rpc.RangeRequest(key=b"x"), 120.0)
            assert calls.at != 0, "the member that answered is called first from then on"
            assert len(await calls.list_members(120.0)) == 3
            await calls.close()
        finally:
            three.go_on(0)

    asyncio.run(run())


@pytest.mark.t3
@pytest.mark.parametrize("harm", ["kill", "stop"])
def test_leases_and_watches_survive_a_lost_member(three, harm):
    async def run():
        mine, other = await pair(three)
        leader = await mine.lead("mine", 12.0, 10)
        lease = await other.announce("node-1", b"here", 12.0)
        for number in range(3):
            getattr(three, harm)(number)
            for turn in range(2):
                epoch = mine.pool_map.epoch
                waiting = asyncio.ensure_future(other.watch(epoch, 60))
                for _ in range(20):
                    try:
                        await mine.replace(changed(mine.pool_map, name=f"{number}-{turn}"), leader)
                        break
                    except Unavailable:
                        if mine.pool_map.epoch > epoch:
                            break
                assert (await asyncio.wait_for(waiting, 120)).epoch > epoch
            assert leader.holds and lease.holds
            if harm == "kill":
                three.start(number)
            else:
                three.go_on(number)
            await asyncio.to_thread(three.wait, number)
        assert dict(mine.present()) == {"node-1": b"here"} and other.leader() == "mine"
        await mine.close()
        await other.close()

    asyncio.run(run())


@pytest.mark.t3
@pytest.mark.parametrize("harm", ["kill", "stop"])
def test_without_a_majority_leases_end_and_maps_stay(three, harm, monkeypatch):
    monkeypatch.setattr(etcd_module, "CHANGE_S", 1.0)

    async def run():
        mine, other = await pair(three)
        leader = await mine.lead("mine", 3.0, 10)
        before = mine.pool_map
        getattr(three, harm)(0)
        getattr(three, harm)(1)
        with pytest.raises(Unavailable):
            await mine.replace(changed(before, name="by few"), leader)
        assert mine.pool_map == before, "the last known map stays"
        await asyncio.wait_for(leader.lost, 15)
        assert not leader.holds
        with pytest.raises(StaleLease):
            await mine.replace(changed(before, name="by nobody"), leader)
        with pytest.raises(Unavailable):
            await mine.announce("node-1", b"", 3.0)
        if harm == "kill":
            three.start(0)
        else:
            three.go_on(0)
        await asyncio.to_thread(three.wait, 0)
        monkeypatch.setattr(etcd_module, "CHANGE_S", 10.0)
        again = await other.lead("other", 3.0, 30)
        for _ in range(10):
            try:
                await other.replace(changed(other.pool_map, name="again"), again)
                break
            except (StaleEpoch, Unavailable):
                continue
        assert (await asyncio.wait_for(mine.watch(before.epoch, 30), 120)).name == "again"
        await mine.close()
        await other.close()

    asyncio.run(run())


def test_watch_behind_compaction_reads_everything_again(one):
    async def run():
        mine, other = await pair(one)
        calls, other.calls = other.calls, mine.calls
        gate, look = asyncio.Event(), other.look

        async def late():
            await gate.wait()
            return await look()

        other.look = late
        other.following.cancel()
        for number in range(5):
            await mine.replace(changed(mine.pool_map, name=f"n{number}"))
        revision = (await mine.calls.range(etcd_module.rpc.RangeRequest(key=b"x"), 5)).header.revision
        await mine.calls.call("kv", "Compact", etcd_module.rpc.CompactionRequest(revision=revision), 5)
        stream = asyncio.ensure_future(other.follow_stream(2))
        with pytest.raises(Unavailable):
            await asyncio.wait_for(stream, 10)
        other.following = asyncio.ensure_future(other.follow())
        gate.set()
        assert (await other.watch(5, 10)).name == "n4"
        other.calls = calls
        await other.close()
        await mine.close()

    asyncio.run(run())


def test_removing_the_last_node_removes_the_pools_keys(one):
    async def run():
        first = a_pool()
        nodes = tuple(Node(number, f"node {number}", "", ()) for number in (1, 2))
        first = msgspec.structs.replace(first, nodes=nodes)
        other = await EtcdCoordinator.found(one.members, a_pool())
        coordinator = await EtcdCoordinator.found(one.members, first)
        await coordinator.close()
        for _ in range(2):  # may be repeated
            assert await EtcdCoordinator.forget(one.members, first.pool_id, 1) == (2,)
        await (await EtcdCoordinator.open(one.members, first.pool_id)).close()
        for _ in range(2):
            assert await EtcdCoordinator.forget(one.members, first.pool_id, 2) == ()
        with pytest.raises(CorruptRecord, match="no map"):
            await EtcdCoordinator.open(one.members, first.pool_id)
        await other.close()
        await (await EtcdCoordinator.open(one.members, other.pool_map.pool_id)).close()

    asyncio.run(run())


def test_calls_after_close_are_unavailable():
    """A coordinator is closed under its callers when the map moves to another one."""

    async def run():
        calls = etcd_client.EtcdCalls(("127.0.0.1:9",), SYSTEM_CLOCK)
        await calls.close()
        with pytest.raises(Unavailable, match="closed"):
            await calls.range(etcd_module.rpc.RangeRequest(key=b"a"), 30.0)
        with pytest.raises(Unavailable, match="closed"):
            await calls.keep_alive(1, 30.0)
        with pytest.raises(Unavailable, match="closed"):
            calls.watch(0)

    asyncio.run(run())


class DeafStub:
    """Calls to etcd that never end, whatever deadline gRPC was given for them."""

    def __init__(self, channel):
        pass

    async def Range(self, request, **limits):
        await asyncio.Event().wait()


def test_calls_end_though_their_deadlines_in_grpc_do_not(monkeypatch):
    monkeypatch.setattr(etcd_module.rpc, "KVStub", DeafStub)
    request = etcd_module.rpc.RangeRequest(key=b"a")

    async def run():
        calls = etcd_client.EtcdCalls(("127.0.0.1:9",), SYSTEM_CLOCK)
        with pytest.raises(Unavailable, match="by their deadlines"):
            await asyncio.wait_for(calls.range(request, 0.1), 20.0)
        assert not await asyncio.wait_for(etcd_client.answers_alone("127.0.0.1:9", None, 0.1), 20.0)

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_etcd_refuses_old_versions_of_tls():
    """etcd 3.4 has no option for a lowest version: its default is 1.2."""
    with real_etcd.RealEtcd(secured=True) as etcd:
        host, port = etcd.members[0].split(":")
        there = host, int(port), etcd.files[0].read_bytes(), *etcd.files[1:]
        assert agreed_version(*there) == "TLSv1.3"
        with pytest.raises(ssl.SSLError):
            agreed_version(*there, ssl.TLSVersion.TLSv1_1)
