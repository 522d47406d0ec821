"""Choice of the replica to read: targets that answer, then the nearest, then the least busy."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nvpool.client.data.hedged_reads import CREDIT_MAX, DELAY_S_MAX, LATE_S, SHARE, Hedging
from nvpool.client.data.read_queue import ReadQueue
from nvpool.client.data.replica_choice import BUSIER, ELSEWHERE, HERE, SAME_RACK, SHUN_S, SLOW_S_MIN, Replicas
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.poolmap.chains.transitions import died
from nvpool.poolmap.file_layout import Layout, chain_of
from nvpool.poolmap.model import Node, PoolMap
from nvpool.testing.fakes.in_process_pool import InProcessPool

RACKS = {1: "a", 2: "a", 3: "b", 4: ""}


def pool_of() -> PoolMap:
    """Targets 1 to 4 on nodes 1 to 4."""
    base = InProcessPool(capacities=(64 << 20,) * 4, replicas=2).pool_map
    nodes = tuple(Node(number, f"n{number}", f"host-{number}", (), rack) for number, rack in RACKS.items())
    return replace(base, nodes=nodes, targets=tuple(replace(one, node=one.id) for one in base.targets))


class Reader:
    def __init__(self, host_id: str, rack: str = ""):
        self.now_s = SYSTEM_CLOCK.boottime_s()
        self.view = SimpleNamespace(map=pool_of())
        self.lanes: dict[int, ReadQueue] = {}
        self.replicas = Replicas(
            self.view, SimpleNamespace(boottime_s=lambda: self.now_s), host_id, rack, self.lane
        )

    def lane(self, target: int) -> ReadQueue:
        if target not in self.lanes:
            self.lanes[target] = ReadQueue(
                target, (), self.replicas.distance(self.view.map.target_by_id[target])
            )
        return self.lanes[target]

    def use_map(self, pool_map: PoolMap) -> None:
        self.view.map = pool_map
        self.replicas.use_map(pool_map)

    def chosen(self, inode: int = 7) -> int:
        """The target chosen for the first chunk, twice: from the map and from the cache."""
        file = SimpleNamespace(inode=inode, layout=Layout(2))
        first, second = (self.replicas.choose(file, 0) for _ in range(2))
        assert first is second
        return first.target

    def members(self, inode: int = 7) -> tuple[int, ...]:
        return self.view.map.chain(2, chain_of(inode, 0)).targets

    def order(self, *targets: int, turn: int = 0) -> list[int]:
        tried: list[ReadQueue] = []
        while len(tried) < len(targets):
            tried.append(self.replicas.best(targets, tried, turn))
        return [lane.target for lane in tried]


@pytest.mark.parametrize("turn", range(4))
def test_replica_order_is_host_then_rack_then_others(turn):
    assert Reader("host-1").order(4, 3, 2, 1, turn=turn)[:2] == [1, 2]
    assert Reader("host-2").order(1, 3, 2, turn=turn) == [2, 1, 3]
    assert Reader("host-3").order(1, 3, 2, turn=turn)[0] == 3


def test_client_rack_comes_from_the_map_or_its_option():
    assert Reader("elsewhere", "b").order(1, 2, 3)[0] == 3
    other_rack = Reader("host-1", "b")
    assert [other_rack.lane(target).distance for target in (1, 2, 3, 4)] == [
        HERE,
        SAME_RACK,
        ELSEWHERE,
        ELSEWHERE,
    ]
    # a node without a label is in no rack, as is a client without one
    assert {Reader("elsewhere").lane(target).distance for target in RACKS} == {ELSEWHERE}


def test_new_rack_label_applies_with_its_map():
    reader = Reader("host-1")
    nodes = tuple(
        replace(node, rack="a" if node.id == 3 else "b" if node.id == 2 else node.rack)
        for node in reader.view.map.nodes
    )
    reader.view.map = replace(reader.view.map, nodes=nodes)
    reader.replicas.use_map(reader.view.map)
    assert reader.order(2, 3) == [3, 2]


def test_equally_near_replicas_are_chosen_by_reads_in_flight():
    reader = Reader("elsewhere")
    assert {reader.order(1, 2, turn=turn)[0] for turn in range(2)} == {1, 2}
    reader.lane(1).in_flight = BUSIER
    assert {reader.order(1, 2, turn=turn)[0] for turn in range(2)} == {2}
    reader.lane(2).in_flight = 1  # a small difference does not justify reading the chunk from a second drive
    assert {reader.order(1, 2, turn=turn)[0] for turn in range(2)} == {1, 2}
    near = Reader("host-1")
    near.lane(2).in_flight = BUSIER
    assert near.order(3, 2) == [2, 3]


def test_silent_or_slow_replica_is_avoided_for_a_time():
    reader = Reader("host-1")
    reader.lane(1).took_s, reader.lane(3).took_s = 5 * SLOW_S_MIN, SLOW_S_MIN / 10
    assert reader.replicas.shun_slow(reader.lanes.values()) and not reader.replicas.shun_slow(
        reader.lanes.values()
    )
    assert reader.order(1, 3) == [3, 1]
    reader.now_s += SHUN_S + 1
    assert not reader.replicas.shun_slow(reader.lanes.values()), "the target got no request since"
    assert reader.order(1, 3) == [1, 3]
    assert reader.replicas.failed(reader.lane(1)) and not reader.replicas.failed(reader.lane(1))
    assert reader.order(1, 3) == [3, 1]


def test_refusals_do_not_count_as_read_latency():
    async def main() -> list[float]:
        lanes = ReadQueue(1, ()), ReadQueue(2, ())
        hedging = Hedging(SYSTEM_CLOCK, lambda lane: None, lambda: None, lambda: 0)
        for lane, good in zip(lanes, (False, True), strict=True):
            hedging.came(hedging.watch(lane, (), lambda sent: None, 1.0), good)
        hedging.close()
        return [lane.took_s for lane in lanes]

    refused_s, answered_s = asyncio.run(main())
    assert refused_s == 0.0 < answered_s


def test_equally_slow_or_fast_replicas_are_not_avoided():
    reader = Reader("elsewhere")
    for target, took_s in ((1, 10 * SLOW_S_MIN), (2, 20 * SLOW_S_MIN)):
        reader.lane(target).took_s = took_s
    assert not reader.replicas.shun_slow(reader.lanes.values())
    reader.lane(1).took_s, reader.lane(2).took_s = SLOW_S_MIN / 100, SLOW_S_MIN / 2
    assert not reader.replicas.shun_slow(reader.lanes.values())


def test_choice_for_chunks_spreads_over_the_members():
    reader = Reader("elsewhere")
    for inode in range(1, 200):
        members = reader.members(inode)
        assert reader.chosen(inode) == members[inode % 2] == reader.order(*members, turn=inode)[0]


def test_cached_choice_follows_the_load():
    reader = Reader("elsewhere")
    first = reader.chosen()
    (other,) = {*reader.members()} - {first}
    reader.lane(first).in_flight = BUSIER
    assert reader.chosen() == other
    reader.lane(other).in_flight = 1
    assert reader.chosen() == first
    reader.lane(first).pending = [None] * 2
    assert reader.chosen() == other


def test_cached_choice_ends_with_a_silence_and_returns_after_it():
    reader = Reader("elsewhere")
    first = reader.chosen()
    (other,) = {*reader.members()} - {first}
    assert reader.replicas.failed(reader.lane(first))
    assert reader.chosen() == other
    reader.now_s += SHUN_S - 0.1
    assert not reader.replicas.failed(reader.lane(first)), "it is known"
    reader.now_s += 0.2
    assert reader.chosen() == other, "silent once more"
    reader.now_s += SHUN_S
    assert reader.chosen() == first


def test_cached_choice_ends_with_its_map():
    reader = Reader("elsewhere")
    first = reader.chosen()
    (other,) = {*reader.members()} - {first}
    reader.use_map(died(reader.view.map, {first}))
    assert reader.chosen() == other


class Watched:
    """A hedging watch on a clock of its own, and the messages that it sent again."""

    def __init__(self) -> None:
        self.now_s, self.read_count = 100.0, 0
        self.late: list[int] = []
        self.again: list[int] = []
        self.lane = ReadQueue(1, ())
        self.hedging = Hedging(
            SimpleNamespace(boottime_s=lambda: self.now_s),
            lambda lane: self.late.append(lane.target),
            lambda: None,
            lambda: self.read_count,
        )

    def send(self, count: int):
        self.read_count += count
        return self.hedging.watch(
            self.lane, [None] * count, lambda sent: self.again.append(len(sent.jobs)), cost=count
        )

    def look(self, age_s: float) -> None:
        """Look `age_s` after the messages were sent."""
        self.now_s += age_s
        self.hedging.timer.cancel()
        self.hedging.look()


def without_credit() -> Watched:
    """A watch with five reads in flight that were not sent again, because the credit is spent."""
    watched = Watched()
    for _ in range(int(CREDIT_MAX) + 5):
        watched.send(1)
    watched.look(DELAY_S_MAX)
    assert watched.again == [1] * int(CREDIT_MAX)
    return watched


def test_few_reads_are_sent_twice_and_late_ones_always():
    async def main() -> None:
        watched = without_credit()
        watched.read_count += int(3 / SHARE)  # of others, answered immediately: they allow three more
        watched.look(0.001)
        assert watched.again == [1] * (int(CREDIT_MAX) + 3) and not watched.late
        watched.look(LATE_S)
        assert watched.again == [1] * (int(CREDIT_MAX) + 5) and set(watched.late) == {1}
        assert watched.hedging.timer is None, "nothing is in flight that has not been sent twice"
        watched.hedging.close()

    asyncio.run(main())


def test_reads_of_batches_earn_no_second_requests():
    async def main() -> None:
        watched = without_credit()
        watched.read_count += int(3 / SHARE)
        watched.hedging.leave_out(int(3 / SHARE))
        watched.look(0.001)
        assert watched.again == [1] * int(CREDIT_MAX)
        watched.hedging.close()

    asyncio.run(main())


def test_message_that_ends_meanwhile_is_not_sent_again():
    async def main() -> None:
        watched = Watched()
        first, second = watched.send(1), watched.send(2)
        first.again = lambda sent: watched.hedging.came(second, True)
        watched.look(LATE_S)
        assert first.is_hedged and not second.is_hedged and not watched.again
        watched.hedging.close()

    asyncio.run(main())
