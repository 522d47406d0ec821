"""The manager and a target's serving lease, with a manual clock."""

import asyncio
import math

import pytest
from msgspec.structs import replace

from nvpool.cluster.chain_manager import EQUAL, LEASE_S, OUTLIVES_S, SENT_LEASE_S, Manager, change
from nvpool.cluster.embedded_coordinator import EmbeddedCoordinator
from nvpool.core.clock import ManualClock
from nvpool.core.errors import Fenced, StaleTenure, Unavailable, WrongTarget
from nvpool.kv.memory_engine import MemoryKv
from nvpool.poolmap.grant_revocation import taken
from nvpool.poolmap.model import Chain, PartitionRange, Shard
from nvpool.rpc.v1.pool_pb2 import AliveRequest
from nvpool.store.server.serving_lease import ServingLease
from tests.unit.poolmap.chains.test_chain_placement import a_pool


def with_manager(run, pool_map=None, leader=False):
    async def main():
        now = pool_map or replace(
            a_pool((4, 4, 4), 2),
            shards=(Shard(1, 1, ("inproc://m",)),),
            partitions=(PartitionRange(0, 4096, 1),),
        )
        coordinator = await EmbeddedCoordinator.found(MemoryKv(), now)
        clock = ManualClock()
        lease = await coordinator.lead("1", 3.0, 1.0) if leader else None
        manager = Manager(coordinator, clock=clock, leader=lease)
        await run(coordinator, manager, clock, *([lease] if leader else []))
        await coordinator.close()

    asyncio.run(main())


def beat(manager, target, epoch=1, pid=None, equal=(), verifier=0, unreachable=()):
    return manager.alive(
        AliveRequest(
            target=target,
            pid=pid or 100 + target,
            epoch=epoch,
            verifier=verifier,
            unreachable=unreachable,
            equal=b"".join(EQUAL.pack(*one) for one in equal),
        )
    )


def holds(pool_map, target):
    return sum(target in chain.targets for chain in pool_map.table_by_id[2].chains)


def test_silent_target_is_replaced_after_its_lease():
    async def run(coordinator, manager, clock):
        for _ in range(4):
            clock.advance(1.0)
            for target in (1, 2):
                assert beat(manager, target).lease_s == SENT_LEASE_S
            assert not await manager.run_once() or clock.now_s > 1000 + LEASE_S
        now = coordinator.pool_map
        assert not holds(now, 3) and now.target_by_id[3].state == "down"
        answer = beat(manager, 3)
        assert answer.epoch_min == now.epoch == answer.epoch
        assert await manager.run_once() and coordinator.pool_map.target_by_id[3].state == "up"
        assert all(3 in c.joining for c in coordinator.pool_map.table_by_id[2].chains if 3 in c.goal)

    with_manager(run)


def test_target_behind_a_broken_link_leaves_after_its_lease():
    async def run(coordinator, manager, clock):
        async def beats(seconds, unreachable):
            answers = []
            for _ in range(round(seconds / 0.5)):
                clock.advance(0.5)
                epoch = coordinator.pool_map.epoch
                answers = [
                    beat(manager, 1, epoch),
                    beat(manager, 2, epoch, unreachable=unreachable),
                    beat(manager, 3, epoch),
                ]
                await manager.run_once()
            return answers

        assert [answer.lease_s for answer in await beats(1.0, ())] == [SENT_LEASE_S] * 3
        await beats(0.5, (3,))
        assert [answer.lease_s for answer in await beats(LEASE_S - 0.6, (3,))] == [
            SENT_LEASE_S,
            SENT_LEASE_S,
            0.0,
        ]
        assert holds(coordinator.pool_map, 3)  # its earlier lease still allows it to serve
        answers = await beats(2.0, (3,))
        now = coordinator.pool_map
        assert not holds(now, 3) and now.target_by_id[3].state == "down"
        assert all(3 not in chain.joining for chain in now.table_by_id[2].chains)
        assert answers[2].left_out and not answers[1].left_out
        await beats(1.0, ())
        assert coordinator.pool_map.target_by_id[3].state == "up"
        assert any(3 in chain.joining for chain in coordinator.pool_map.table_by_id[2].chains)

    with_manager(run, three_nodes())


@pytest.mark.parametrize("turns", range(6))
def test_manager_cancelled_during_news_ends(turns):
    async def run(coordinator, manager, clock):
        deciding = asyncio.ensure_future(manager.run())
        await asyncio.sleep(0.01)
        manager.look()
        for _ in range(turns):  # of the loop, between the news and the cancellation
            await asyncio.sleep(0)
        deciding.cancel()
        await asyncio.wait([deciding], timeout=5)
        assert deciding.cancelled()

    with_manager(run)


def test_dead_process_is_ignored_and_its_successor_is_not():
    async def run(coordinator, manager, clock):
        for target in (1, 2, 3):
            beat(manager, target)
        manager.died({2: 102})
        assert await manager.run_once() and not holds(coordinator.pool_map, 2)
        with pytest.raises(Fenced):
            beat(manager, 2)
        beat(manager, 2, pid=7)
        assert await manager.run_once() and coordinator.pool_map.target_by_id[2].state == "up"
        with pytest.raises(WrongTarget):
            beat(manager, 9)

    with_manager(run)


def test_target_joins_or_leaves_when_others_know_the_map():
    def changed(pool_map):
        chain = Chain(5, (1, 2), (3,), (2, 3))
        table = replace(pool_map.table_by_id[2], chains=(chain, *pool_map.table_by_id[2].chains[1:]))
        return replace(
            pool_map,
            tables=(pool_map.tables[0], table),
            shards=(Shard(1, 1, ("inproc://m",)),),
            partitions=(PartitionRange(0, 4096, 1),),
        )

    async def run(coordinator, manager, clock):
        beat(manager, 1, epoch=0)
        beat(manager, 2)
        beat(manager, 3, equal=[(2, 0, 5)])
        assert not await manager.run_once(), "target 1 does not know the map yet"
        beat(manager, 1)
        assert await manager.run_once() and coordinator.pool_map.chain(2, 0) == Chain(
            6, (1, 2, 3), (), (2, 3), (1,)
        )
        beat(manager, 1)
        assert not await manager.run_once()
        beat(manager, 1, epoch=coordinator.pool_map.epoch)
        assert await manager.run_once() and coordinator.pool_map.chain(2, 0) == Chain(7, (2, 3))

    with_manager(run, changed(a_pool((4, 4, 4), 2)))


def test_loss_of_a_sole_copy_is_recorded_before_a_join():
    def sole(pool_map):
        chain = Chain(5, (1,), (3,), (1, 3))
        return replace(
            pool_map,
            tables=(
                pool_map.tables[0],
                replace(pool_map.table_by_id[2], chains=(chain, *pool_map.table_by_id[2].chains[1:])),
            ),
            targets=tuple(replace(one, verifier=7) for one in pool_map.targets),
            shards=(Shard(1, 1, ("inproc://m",)),),
            partitions=(PartitionRange(0, 4096, 1),),
        )

    async def run(coordinator, manager, clock):
        for target in (1, 2, 3):
            beat(manager, target, verifier=7)
        assert not await manager.run_once()
        beat(manager, 1, pid=9, verifier=8)
        beat(manager, 3, verifier=7, equal=[(2, 0, 5)])
        assert await manager.run_once()
        now = coordinator.pool_map
        assert [one.verifier for one in now.targets] == [8, 7, 7]
        assert now.chain(2, 0) == Chain(6, (1, 3), intact=5)
        assert all(
            chain.intact == (chain.epoch if 1 in chain.targets else 0)
            for chain in now.table_by_id[2].chains[1:]
        )
        beat(manager, 1, pid=9)  # a store of an older version, without a verifier
        assert not await manager.run_once()

    with_manager(run, sole(a_pool((4, 4, 4), 2)))


def three_nodes():
    return replace(
        a_pool((4, 4, 4), 2, nodes=3),
        shards=(Shard(1, 1, ("inproc://m",)),),
        partitions=(PartitionRange(0, 4096, 1),),
    )


class Bounded:
    """A leadership lease with `left_s` left."""

    former = "3"

    def __init__(self, left_s):
        self.left_s, self.lost = left_s, asyncio.get_running_loop().create_future()
        self.holds = True


def test_leases_end_soon_after_the_leaders():
    async def run(coordinator, manager, clock):
        lease = Bounded(5.0)
        manager = Manager(coordinator, clock=clock, leader=lease)
        assert beat(manager, 1).lease_s == SENT_LEASE_S
        lease.left_s = 0.3
        assert 0.3 < beat(manager, 1).lease_s < 0.3 + OUTLIVES_S
        manager = Manager(coordinator, clock=clock, gone=3)
        clock.advance(OUTLIVES_S)
        assert not await manager.run_once(), "leases of its targets may not have ended"
        clock.advance(0.01)
        assert await manager.run_once() and not holds(coordinator.pool_map, 3)
        assert holds(coordinator.pool_map, 1) and holds(coordinator.pool_map, 2), (
            "their leases run for the full time"
        )
        clock.advance(LEASE_S - OUTLIVES_S)
        assert await manager.run_once() and coordinator.pool_map.target_by_id[2].state == "down"

    with_manager(run, three_nodes())


def test_heard_target_of_the_former_leader_keeps_its_chains():
    async def run(coordinator, manager, clock):
        manager = Manager(coordinator, clock=clock, gone=3)
        beat(manager, 3)
        clock.advance(LEASE_S)
        assert beat(manager, 1) and beat(manager, 2) and not await manager.run_once()
        clock.advance(0.01)
        assert await manager.run_once() and not holds(coordinator.pool_map, 3)

    with_manager(run)


def test_certain_change_is_made_against_the_newest_map():
    class Behind(EmbeddedCoordinator):
        """Has the first map until `newest` is called, like a coordinator that etcd has not notified yet."""

        looked = False

        @property
        def pool_map(self):
            return super().pool_map if self.looked else first

        async def newest(self):
            self.looked = True
            return await super().newest()

    def resumed(now):
        return replace(now, moving=replace(now.moving, paused=False))

    async def main():
        coordinator = await Behind.found(MemoryKv(), first)
        coordinator.looked = True
        await coordinator.replace(
            replace(first, epoch=first.epoch + 1, moving=replace(first.moving, paused=True))
        )
        coordinator.looked = False
        assert await change(coordinator, resumed) is first
        assert not (await change(coordinator, resumed, certain=True)).moving.paused
        assert not coordinator.pool_map.moving.paused and coordinator.pool_map.epoch == first.epoch + 2

    first = replace(
        a_pool((4, 4), 1), shards=(Shard(1, 1, ("inproc://m",)),), partitions=(PartitionRange(0, 4096, 1),)
    )
    asyncio.run(main())


def test_former_leader_gives_no_lease():
    async def run(coordinator, manager, clock, lease):
        assert beat(manager, 1).lease_s == SENT_LEASE_S
        await lease.release()
        with pytest.raises(Unavailable):
            beat(manager, 1)

    with_manager(run, leader=True)


class FakeReaders:
    """A fake of the short-circuit readers that a store notifies."""

    def __init__(self):
        self.until_s, self.changed = None, 0

    def serve_until(self, until_s):
        self.until_s = until_s

    def changing_all(self):
        self.changed += 1


def test_serving_lease_starts_at_sending_and_needs_the_map():
    clock, readers = ManualClock(), FakeReaders()
    serving = ServingLease(1, clock, readers)
    pool_map = a_pool((4, 4, 4), 2)
    alone = replace(pool_map, tables=pool_map.tables[:1])
    serving.update_map(alone)
    assert serving.holds() and readers.until_s == math.inf, (
        "a target that holds its chains alone needs no lease"
    )
    serving.update_map(replace(pool_map, epoch=2))
    assert not serving.holds()
    sent_s = clock.boottime_s()
    clock.advance(1.0)
    serving.renewed(sent_s, LEASE_S, 2)
    assert serving.holds() and readers.until_s == sent_s + LEASE_S
    serving.renewed(sent_s, LEASE_S, 3)
    assert not serving.holds() and readers.until_s == 0.0, "a map that it does not have has taken it out"
    gone = replace(
        pool_map,
        epoch=3,
        tables=(
            pool_map.tables[0],
            replace(
                pool_map.tables[1],
                chains=tuple(
                    replace(c, targets=tuple(t for t in c.targets if t != 1)) if len(c.targets) > 1 else c
                    for c in pool_map.tables[1].chains
                ),
            ),
        ),
    )
    before = readers.changed
    serving.update_map(gone)
    assert readers.changed == before + 1 and not serving.shared and serving.holds()
    serving.update_map(replace(pool_map, epoch=4))
    assert serving.holds()
    clock.advance(LEASE_S)
    with pytest.raises(StaleTenure):
        serving.check()


def given_up_after(run, capacities=(4, 4, 4, 4), replicas=2, replace_after_s=60.0):
    async def main():
        now = replace(
            a_pool(capacities, replicas),
            shards=(Shard(1, 1, ("inproc://m",)),),
            partitions=(PartitionRange(0, 4096, 1),),
        )
        coordinator = await EmbeddedCoordinator.found(MemoryKv(), now)
        clock = ManualClock()
        await run(coordinator, Manager(coordinator, clock=clock, replace_after_s=replace_after_s), clock)
        await coordinator.close()

    asyncio.run(main())


async def seconds(manager, clock, count, *targets):
    for _ in range(count):
        clock.advance(1.0)
        for target in targets:
            beat(manager, target, epoch=10**6)
        await manager.run_once()


def test_absent_target_is_given_up_and_refilled_later():
    async def run(coordinator, manager, clock):
        await seconds(manager, clock, 55, 1, 2, 3)
        away = coordinator.pool_map.target_by_id[4]
        assert (away.state, away.desired_state) == ("down", "share")
        await seconds(manager, clock, 10, 1, 2, 3)
        now = coordinator.pool_map
        assert now.target_by_id[4].desired_state == "away"
        assert not any(4 in chain.goal for chain in now.table_by_id[2].chains)
        assert (
            sum(bool(chain.joining) for chain in now.table_by_id[2].chains) == 256
        )  # the number of chains that start at a time
        await seconds(manager, clock, 2, 1, 2, 3, 4)
        back = coordinator.pool_map
        assert (back.target_by_id[4].state, back.target_by_id[4].desired_state) == ("up", "share")
        assert sum(4 in (chain.goal or chain.targets) for chain in back.table_by_id[2].chains) > 400
        await seconds(manager, clock, 100, 1, 2, 3, 4)
        assert coordinator.pool_map.target_by_id[4].desired_state == "share"

    given_up_after(run)


def test_target_is_not_given_up_without_enough_others():
    async def refused(coordinator, manager, clock):
        await seconds(manager, clock, 200, 1, 2)
        assert [target.desired_state for target in coordinator.pool_map.targets] == ["share"] * 3

    given_up_after(refused, (4, 4, 4), 3)
    given_up_after(refused, (4, 4, 4), 2, replace_after_s=0.0)


def test_manager_knows_which_targets_lack_a_map():
    async def run(coordinator, manager, clock):
        assert manager.unaware(1) == [1, 2, 3]
        beat(manager, 1, epoch=5)
        beat(manager, 2, epoch=4)
        assert manager.unaware(4) == [3] and manager.unaware(5) == [2, 3]
        manager.died({2: 102})
        assert manager.unaware(5) == [3]
        await change(
            coordinator,
            lambda now: replace(
                now,
                targets=tuple(
                    replace(target, state="down") if target.id == 3 else target for target in now.targets
                ),
            ),
        )
        assert manager.unaware(5) == []

    with_manager(run)


def test_manager_drops_revocations_after_their_time():
    async def run(coordinator, manager, clock):
        now_ms = clock.wall_ns() // 1_000_000
        await change(coordinator, lambda now: taken(now, 7, "", 1, now_ms, 5000))
        clock.advance(4.0)
        await manager.run_once()
        assert coordinator.pool_map.rights_taken
        clock.advance(2.0)
        await manager.run_once()
        assert not coordinator.pool_map.rights_taken

    with_manager(run)
