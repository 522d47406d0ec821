"""Which replica is read: who answers, then who is nearest, then who has the least to do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nvpool.client.data.hedging import Hedging
from nvpool.client.data.replica_choice import BUSIER, ELSEWHERE, HERE, SAME_RACK, SHUN_S, SLOW_S_MIN, Replicas
from nvpool.client.data.target_queue import Lane
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.poolmap.model import Node, PoolMap
from nvpool.testing.fakes.local_pool import LocalPool

RACKS = {1: "a", 2: "a", 3: "b", 4: ""}


def pool_of() -> PoolMap:
    """Targets 1 to 4 on nodes 1 to 4."""
    base = LocalPool(capacities=(64 << 20,) * 4, replicas=2).pool_map
    nodes = tuple(Node(number, f"n{number}", f"host-{number}", (), rack) for number, rack in RACKS.items())
    return replace(base, nodes=nodes, targets=tuple(replace(one, node=one.id) for one in base.targets))


class Reader:
    def __init__(self, host_id: str, rack: str = ""):
        self.now_s = SYSTEM_CLOCK.boottime_s()
        self.view = SimpleNamespace(map=pool_of())
        self.lanes: dict[int, Lane] = {}
        self.replicas = Replicas(
            self.view, SimpleNamespace(boottime_s=lambda: self.now_s), host_id, rack, self.lane
        )

    def lane(self, target: int) -> Lane:
        if target not in self.lanes:
            self.lanes[target] = Lane(target, (), self.replicas.distance(self.view.map.target_by_id[target]))
        return self.lanes[target]

    def order(self, *targets: int, turn: int = 0) -> list[int]:
        tried: list[Lane] = []
        while len(tried) < len(targets):
            tried.append(self.replicas.best(targets, tried, turn))
        return [lane.target for lane in tried]


@pytest.mark.parametrize("turn", range(4))
def test_this_host_is_asked_first_then_its_rack_then_others(turn):
    assert Reader("host-1").order(4, 3, 2, 1, turn=turn)[:2] == [1, 2]
    assert Reader("host-2").order(1, 3, 2, turn=turn) == [2, 1, 3]
    assert Reader("host-3").order(1, 3, 2, turn=turn)[0] == 3


def test_a_client_on_no_node_stands_in_the_rack_that_it_is_told_and_one_on_a_node_in_that_of_the_map():
    assert Reader("elsewhere", "b").order(1, 2, 3)[0] == 3
    told_otherwise = Reader("host-1", "b")
    assert [told_otherwise.lane(target).distance for target in (1, 2, 3, 4)] == [
        HERE,
        SAME_RACK,
        ELSEWHERE,
        ELSEWHERE,
    ]
    # a node without a label is in no rack, as is a client without one
    assert {Reader("elsewhere").lane(target).distance for target in RACKS} == {ELSEWHERE}


def test_a_new_label_counts_with_the_map_that_brings_it():
    reader = Reader("host-1")
    nodes = tuple(
        replace(node, rack="a" if node.id == 3 else "b" if node.id == 2 else node.rack)
        for node in reader.view.map.nodes
    )
    reader.view.map = replace(reader.view.map, nodes=nodes)
    reader.replicas.use_map(reader.view.map)
    assert reader.order(2, 3) == [3, 2]


def test_of_those_that_are_equally_near_the_one_with_fewer_reads_on_their_way():
    reader = Reader("elsewhere")
    assert {reader.order(1, 2, turn=turn)[0] for turn in range(2)} == {1, 2}
    reader.lane(1).in_flight = BUSIER
    assert {reader.order(1, 2, turn=turn)[0] for turn in range(2)} == {2}
    reader.lane(2).in_flight = 1  # what is chance is not worth reading the chunk from a second drive
    assert {reader.order(1, 2, turn=turn)[0] for turn in range(2)} == {1, 2}
    near = Reader("host-1")
    near.lane(2).in_flight = BUSIER
    assert near.order(3, 2) == [2, 3]


def test_who_is_silent_or_slow_is_asked_last_for_a_while_however_near():
    reader = Reader("host-1")
    reader.lane(1).took_s, reader.lane(3).took_s = 5 * SLOW_S_MIN, SLOW_S_MIN / 10
    assert reader.replicas.shun_slow(reader.lanes.values()) and not reader.replicas.shun_slow(
        reader.lanes.values()
    )
    assert reader.order(1, 3) == [3, 1]
    reader.now_s += SHUN_S + 1
    assert not reader.replicas.shun_slow(reader.lanes.values()), "it was not asked since"
    assert reader.order(1, 3) == [1, 3]
    assert reader.replicas.failed(reader.lane(1)) and not reader.replicas.failed(reader.lane(1))
    assert reader.order(1, 3) == [3, 1]


def test_how_fast_a_target_refuses_is_not_what_a_read_takes_there():
    async def main() -> list[float]:
        lanes = Lane(1, ()), Lane(2, ())
        hedging = Hedging(SYSTEM_CLOCK, lambda lane: None, lambda: None)
        for lane, good in zip(lanes, (False, True), strict=True):
            hedging.came(hedging.watch(lane, (), lambda sent: None, 1.0), good)
        hedging.close()
        return [lane.took_s for lane in lanes]

    refused_s, answered_s = asyncio.run(main())
    assert refused_s == 0.0 < answered_s


def test_all_that_are_slow_alike_or_quick_enough_are_none_to_be_left_alone():
    reader = Reader("elsewhere")
    for target, took_s in ((1, 10 * SLOW_S_MIN), (2, 20 * SLOW_S_MIN)):
        reader.lane(target).took_s = took_s
    assert not reader.replicas.shun_slow(reader.lanes.values())
    reader.lane(1).took_s, reader.lane(2).took_s = SLOW_S_MIN / 100, SLOW_S_MIN / 2
    assert not reader.replicas.shun_slow(reader.lanes.values())
