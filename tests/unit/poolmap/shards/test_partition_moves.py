"""Plans of partition migration between shards, and the resulting maps (poolmap/shards/partition_moves)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nvpool.core.errors import InUse, InvalidRequest, StaleEpoch, StaleTerm
from nvpool.core.units import PARTITION_COUNT
from nvpool.poolmap.chains.transitions import sealed
from nvpool.poolmap.model import (
    Drive,
    Node,
    PartitionRange,
    PoolMap,
    Shard,
    ShardWanted,
    StandbyMember,
    Target,
    check_map,
    decode_map,
    encode_map,
)
from nvpool.poolmap.shards import partition_moves
from nvpool.testing.fakes.meta_shard import small_map


def shard(number: int, **fields) -> Shard:
    return Shard(number, 1, (f"inproc://shard-{number}",), **fields)


def pool_of(count: int) -> PoolMap:
    pool_map = small_map()
    for number in range(2, count + 1):
        pool_map = finished(partition_moves.shard_added(pool_map, shard(number)))
    return pool_map


def held(pool_map: PoolMap) -> Counter[int]:
    return Counter(pool_map.shard_of_partition)


def step(pool_map: PoolMap, source: int, count_max: int = partition_moves.BATCH_MAX) -> PoolMap | None:
    destination, partitions = partition_moves.next_batch(pool_map, source, count_max=count_max)
    if not destination:
        return None
    return partition_moves.moved(pool_map, source, pool_map.shard_by_id[source].term, destination, partitions)


def finished(pool_map: PoolMap) -> PoolMap:
    for one in pool_map.shards:
        while (new := step(pool_map, one.id)) is not None:
            pool_map = new
    return pool_map


def least(pool_map: PoolMap) -> int:
    """Minimal number of partitions to move, computed another way: what exceeds the largest possible shares."""
    staying = [one.id for one in pool_map.shards if one.desired_state == "share"]
    counts = held(pool_map)
    each, over = divmod(PARTITION_COUNT, len(staying))
    kept = sum(min(counts[one], each) for one in staying)
    return PARTITION_COUNT - kept - min(over, sum(counts[one] > each for one in staying))


@st.composite
def histories(draw):
    """A map after random operator requests, each followed by some of the moves that it causes."""
    pool_map = small_map()
    for _ in range(draw(st.integers(1, 7))):
        ids = sorted(pool_map.shard_by_id)
        what = draw(st.sampled_from(["add", "add", "remove", "share", "move", "gone"]))
        one = draw(st.sampled_from(ids))
        if what == "add" and len(ids) < 8:
            pool_map = partition_moves.shard_added(
                pool_map, shard(partition_moves.shards_given(pool_map) + 1)
            )
        elif what in ("remove", "share"):
            try:
                pool_map = partition_moves.with_desired_state(pool_map, one, what)
            except InvalidRequest:
                assert [s.desired_state for s in pool_map.shards if s.id != one].count("share") == 0
        elif what == "gone":
            try:
                pool_map = partition_moves.shard_removed(pool_map, one)
            except InUse:
                pass
        for _ in range(draw(st.integers(0, 6))):
            new = step(
                pool_map, draw(st.sampled_from(sorted(pool_map.shard_by_id))), draw(st.integers(1, 900))
            )
            pool_map = new if new is not None else pool_map
    return pool_map


@pytest.mark.t3
@settings(max_examples=150, deadline=None)
@given(histories())
def test_plan_is_even_minimal_and_stable(pool_map):
    planned = partition_moves.planned(pool_map)
    assert check_map(planned) == []
    assert planned.partitions == pool_map.partitions, "a goal alone moves no partition"
    assert partition_moves.planned(planned) == planned
    assert partition_moves.left(planned) == least(pool_map)
    done = finished(planned)
    counts = held(done)
    staying = [one.id for one in done.shards if one.desired_state == "share"]
    assert not done.moves and check_map(done) == []
    assert {counts[one] for one in staying} <= {
        PARTITION_COUNT // len(staying),
        -(-PARTITION_COUNT // len(staying)),
    }
    assert all(partition_moves.is_empty(done, one.id) for one in done.shards if one.desired_state == "remove")
    assert partition_moves.planned(done) == done


@settings(max_examples=30, deadline=None)
@given(histories())
def test_moves_under_way_survive_another_request(pool_map):
    moves_survive_another_request(pool_map)


@pytest.mark.few(0)
@settings(max_examples=100, deadline=None)
@given(histories())
def test_moves_under_way_survive_in_more_histories(pool_map):
    moves_survive_another_request(pool_map)


def moves_survive_another_request(pool_map):
    pool_map = partition_moves.planned(pool_map)
    new = partition_moves.shard_added(pool_map, shard(partition_moves.shards_given(pool_map) + 1))
    assert partition_moves.left(new) == least(new)
    before, after = partition_moves.goals(pool_map), partition_moves.goals(new)
    kept = {
        p
        for p in range(PARTITION_COUNT)
        if before[p] != pool_map.shard_of_partition[p] and before[p] == after[p]
    }
    quota = Counter(after)
    for p in range(PARTITION_COUNT):
        holder = pool_map.shard_of_partition[p]
        if before[p] != holder and p not in kept:
            # Another goal only if the first destination has enough by the new plan, or if the present shard keeps it.
            assert after[p] == holder or quota[before[p]] >= PARTITION_COUNT // len(new.shards)


@settings(max_examples=60, deadline=None)
@given(histories())
def test_map_with_moves_is_equal_after_encoding(pool_map):
    assert decode_map(encode_map(pool_map)) == pool_map


def test_second_shard_gets_half_in_sixteen_changes():
    pool_map = partition_moves.shard_added(small_map(), shard(2))
    assert partition_moves.left(pool_map) == partition_moves.left(pool_map, 2) == 2048
    changes = 0
    while (new := step(pool_map, 1)) is not None:
        pool_map, changes = new, changes + 1
    assert changes == 16
    assert pool_map.partitions == (PartitionRange(0, 2048, 1), PartitionRange(2048, 2048, 2))


def test_root_leaves_its_shard_only_when_that_is_removed():
    pool_map = pool_of(5)
    assert pool_map.shard_of_partition[0] == 1
    gone = finished(partition_moves.with_desired_state(pool_map, 1, "remove"))
    assert gone.shard_of_partition[0] != 1
    without = partition_moves.shard_removed(gone, 1)
    assert 1 not in without.shard_by_id and partition_moves.shards_given(without) == 5


def test_shard_with_partitions_and_last_shard_are_not_removed():
    pool_map = pool_of(2)
    with pytest.raises(InUse):
        partition_moves.shard_removed(pool_map, 2)
    leaving = partition_moves.with_desired_state(pool_map, 2, "remove")
    with pytest.raises(InUse):
        partition_moves.shard_removed(leaving, 2)
    with pytest.raises(InvalidRequest):
        partition_moves.with_desired_state(leaving, 1, "remove")
    assert partition_moves.with_desired_state(leaving, 2, "share").moves == ()
    assert partition_moves.shard_removed(
        partition_moves.shard_removed(finished(leaving), 2), 2
    ).shard_by_id.keys() == {1}


def test_number_of_a_removed_shard_is_never_reused():
    pool_map = partition_moves.shard_removed(
        finished(partition_moves.with_desired_state(pool_of(3), 3, "remove")), 3
    )
    assert partition_moves.shards_given(pool_map) == 3
    pool_map = partition_moves.shard_added(pool_map, shard(4))
    assert partition_moves.shards_given(pool_map) == 4


def test_handover_of_an_old_term_or_goal_is_refused():
    pool_map = partition_moves.shard_added(small_map(), shard(2))
    destination, batch = partition_moves.next_batch(pool_map, 1)
    later = replace(pool_map, shards=tuple(replace(one, term=one.term + 1) for one in pool_map.shards))
    with pytest.raises(StaleTerm):
        partition_moves.moved(later, 1, 1, destination, batch)
    with pytest.raises(StaleEpoch):
        partition_moves.moved(
            partition_moves.with_desired_state(pool_map, 2, "remove"), 1, 1, destination, batch
        )
    with pytest.raises(StaleEpoch):
        partition_moves.moved(pool_map, 1, 1, 3, batch)
    with pytest.raises(StaleEpoch):
        partition_moves.moved(pool_map, 2, 1, destination, batch)
    done = partition_moves.moved(pool_map, 1, 1, destination, batch)
    assert partition_moves.moved(done, 1, 1, destination, batch) is done, "the same request may come twice"
    assert sealed(pool_map, done).epoch == pool_map.epoch + 1
    back = partition_moves.with_desired_state(done, 2, "remove")
    with pytest.raises(StaleEpoch):
        partition_moves.moved(back, 1, 1, destination, batch)


def test_withdrawn_and_renewed_goal_is_another_goal():
    pool_map = sealed(small_map(), partition_moves.shard_added(small_map(), shard(2)))
    destination, batch = partition_moves.next_batch(pool_map, 1)
    gone = sealed(pool_map, partition_moves.with_desired_state(pool_map, 2, "remove"))
    back = sealed(gone, partition_moves.with_desired_state(gone, 2, "share"))
    assert partition_moves.next_batch(back, 1) == (destination, batch)
    with pytest.raises(StaleEpoch):  # meanwhile the destination may have removed what it had received
        partition_moves.moved(back, 1, 1, destination, batch, pool_map.epoch)
    assert (
        partition_moves.moved(back, 1, 1, destination, batch, back.epoch).shard_of_partition[batch[0]]
        == destination
    )
    some = sealed(pool_map, partition_moves.moved(pool_map, 1, 1, destination, batch[:1], pool_map.epoch))
    assert partition_moves.moved(some, 1, 1, destination, batch[1:], pool_map.epoch) is not some, (
        "a batch that was moved changes no goal"
    )


def test_batch_omits_partitions_that_must_wait():
    pool_map = partition_moves.shard_added(small_map(), shard(2))
    _, batch = partition_moves.next_batch(pool_map, 1, not_yet={2048, 2050}, count_max=3)
    assert batch == (2049, 2051, 2052)


def nodes_and_shards(*primaries: int, nodes: int = 3) -> PoolMap:
    """Shards with their primaries on these nodes; each node has a drive."""
    return replace(
        small_map(),
        nodes=tuple(Node(number, f"n{number}", "", ()) for number in range(1, nodes + 1)),
        drives=tuple(Drive(number, number, f"/d{number}", 1) for number in range(1, nodes + 1)),
        targets=tuple(Target(number, number, number, 1, ()) for number in range(1, nodes + 1)),
        shards=tuple(replace(shard(number), node=node) for number, node in enumerate(primaries, 1)),
    )


def test_new_shard_goes_to_the_node_with_the_fewest():
    assert (
        partition_moves.node_for_shard(nodes_and_shards(1), 1) == 2
        and partition_moves.node_for_shard(nodes_and_shards(1), 3) == 3
    )
    assert partition_moves.node_for_shard(nodes_and_shards(1, 2, 3), 3) == 3, (
        "of equal nodes the requested one"
    )
    busy = nodes_and_shards(1, 1)
    busy = replace(
        busy, shards=(replace(busy.shards[0], standbys=(StandbyMember(1, 2, ()),)), busy.shards[1])
    )
    assert partition_moves.node_for_shard(busy, 1) == 3, "the node without a primary or a standby"
    drained = replace(busy, nodes=(*busy.nodes[:2], replace(busy.nodes[2], desired_state="drain")))
    assert partition_moves.node_for_shard(drained, 1) == 2
    down = replace(busy, targets=(*busy.targets[:2], replace(busy.targets[2], state="down")))
    assert partition_moves.node_for_shard(down, 1) == 2


def test_shard_wanted_on_another_node_gets_its_number_early():
    pool_map = partition_moves.shard_wanted(nodes_and_shards(1), ShardWanted(2, 2))
    assert (
        partition_moves.node_for_shard(pool_map, 1) == 3
        and partition_moves.shards_given(pool_map) == 2
        and not check_map(pool_map)
    )
    assert decode_map(encode_map(pool_map)) == pool_map
    for wanted, why in ((ShardWanted(2, 3), "was given"), (ShardWanted(3, 9), "not in the pool")):
        with pytest.raises(InvalidRequest, match=why):
            partition_moves.shard_wanted(pool_map, wanted)
    made = partition_moves.shard_added(pool_map, replace(shard(2), node=2))
    assert not made.shards_wanted and partition_moves.left(made, 2) == PARTITION_COUNT // 2
    without = partition_moves.not_wanted(pool_map, 2)
    assert not without.shards_wanted and partition_moves.shards_given(without) == 2
