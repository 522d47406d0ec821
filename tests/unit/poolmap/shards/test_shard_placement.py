"""Placement of shard members, step by step."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.poolmap.chains.transitions import retired, with_desired_state
from nvpool.poolmap.model import (
    MAP_FORMAT,
    Drive,
    Node,
    PoolMap,
    PoolSettings,
    Shard,
    StandbyMember,
    Target,
    check_map,
)
from nvpool.poolmap.shards import members as shard_members
from nvpool.poolmap.shards import placement as shard_placement
from nvpool.poolmap.shards.placement import ShardLocation

BIG = 1 << 30


def a_map(*drives_of, racks=(), standbys=(), wanted=None):
    """One node for each of `drives_of`, with so many drives; shard 1 is in the pool's directory of node 1."""
    racks = racks or [""] * len(drives_of)
    nodes = tuple(Node(n, f"n{n}", "", (), rack) for n, rack in enumerate(racks, 1))
    places = [node for node, count in enumerate(drives_of, 1) for _ in range(count)]
    drives = tuple(Drive(n, node, f"/d{n}/store", BIG) for n, node in enumerate(places, 1))
    targets = tuple(Target(n, n, node, BIG, ()) for n, node in enumerate(places, 1))
    shard = Shard(1, 1, ("stream://h:1",), standbys=standbys, standbys_wanted=wanted)
    return PoolMap(MAP_FORMAT, "p", "p", 1, PoolSettings(), nodes, drives, targets, shards=(shard,))


def standby(member, node, drive, state="up"):
    return StandbyMember(
        member, node, (f"stream://h:{10 + member}",), state, f"/d{drive}/nvpool-p-meta-1.{member}"
    )


def after_all_steps(pool_map, serving=None, steps_max=60):
    """The map after all steps: each new standby created and up, each primary handed over."""
    for _ in range(steps_max):
        shard = pool_map.shards[0]
        for one in shard.standbys:
            if not one.endpoints:
                drive = next(drive for drive in pool_map.drives if drive.path == one.path)
                pool_map = shard_members.standby_made(
                    pool_map,
                    1,
                    one.member,
                    f"/d{drive.id}/nvpool-p-meta-1.{one.member}",
                    (f"stream://h:{10 + one.member}",),
                )
        for one in pool_map.shards[0].standbys:
            if one.state != "up":
                now = pool_map.shards[0]
                pool_map = shard_members.standby_up(pool_map, 1, one.member, now.term, now.epoch)
        if shard_placement.hands_over(pool_map, pool_map.shards[0]):
            pool_map = shard_members.primary_lost(pool_map, 1)
            continue
        new = shard_placement.next_step(pool_map, serving)
        if new is pool_map:
            return pool_map
        assert check_map(new) == []
        pool_map = new
    raise AssertionError(f"no end: {pool_map.shards}")


def where(pool_map):
    shard = pool_map.shards[0]
    return [
        tuple(shard_placement.place_of(pool_map, shard, member)) for member in shard_members.members(shard)
    ]


def test_standby_moves_to_a_second_node_with_a_serving_drive():
    there = a_map(2, 1, standbys=(standby(1, 1, 2),))
    assert shard_placement.next_step(there, serving={1, 2}) is there
    step = shard_placement.next_step(there, serving={1, 2, 3}).shards[0]
    assert step.standbys[0].state == "up" and step.standbys[1] == StandbyMember(
        2, 2, (), "syncing", "/d3/store"
    )
    assert where(after_all_steps(there)) == [(1, 0), (2, 3)]


def test_old_standby_is_removed_only_when_the_new_one_is_up():
    there = a_map(2, 1, standbys=(standby(1, 1, 2), standby(2, 2, 3, "syncing")), wanted=1)
    assert shard_placement.next_step(there) is there
    up = shard_members.standby_up(there, 1, 2, 1, 1)
    assert [one.member for one in shard_placement.next_step(up).shards[0].standbys] == [2]


def test_other_racks_are_preferred_to_other_nodes():
    there = a_map(1, 1, 1, racks=("a", "a", "b"), wanted=1)
    assert where(after_all_steps(there)) == [(1, 0), (3, 3)]
    there = a_map(1, 1, 1, racks=("a", "a", "b"), standbys=(standby(1, 2, 2),))
    assert where(after_all_steps(there)) == [(1, 0), (3, 3)]


def test_members_stay_where_a_move_has_no_benefit():
    spread = a_map(2, 2, 2, standbys=(standby(1, 2, 3), standby(2, 3, 5)))
    for there in (a_map(2), spread, a_map(3, standbys=(standby(1, 1, 2),))):
        assert shard_placement.next_step(there) is there


def test_drained_node_loses_its_primary_and_standbys():
    there = shard_placement.with_node(a_map(1, 1, 1, standbys=(standby(1, 2, 2),)), 1, desired_state="drain")
    done = after_all_steps(there)
    assert shard_placement.moved_off(done, 1) and sorted(node for node, _ in where(done)) == [2, 3]
    alone = after_all_steps(shard_placement.with_node(a_map(1, 1), 1, desired_state="drain"))
    assert where(alone) == [(2, 2)]


def test_standby_on_a_drained_or_lost_drive_moves():
    there = a_map(1, 2, standbys=(standby(1, 2, 2),))
    for request in ("drain", "remove", "lost"):
        targets = tuple(replace(one, desired_state=request) if one.id == 2 else one for one in there.targets)
        assert where(after_all_steps(replace(there, targets=targets))) == [(1, 0), (2, 3)]


def test_stuck_standby_is_replaced_on_another_drive():
    there = a_map(1, 1, 1, standbys=(standby(1, 2, 2, "syncing"),))
    assert shard_placement.next_step(there) is there, "the standby may still complete"
    added = shard_placement.next_step(there, stuck={(1, 1)})
    assert where(added)[1:] == [(2, 2), (3, 3)] and added.shards[0].standbys_wanted == 1
    assert shard_placement.next_step(added, stuck={(1, 1)}) is added, (
        "the old standby stays until the new one is up"
    )
    made = shard_members.standby_made(added, 1, 2, "/d3/nvpool-p-meta-1.2", ("stream://h:12",))
    now = made.shards[0]
    up = shard_members.standby_up(made, 1, 2, now.term, now.epoch)
    assert where(shard_placement.next_step(up, stuck={(1, 1)}))[1:] == [(3, 3)]


def test_stuck_standby_stays_without_another_drive():
    there = a_map(1, 1, standbys=(standby(1, 2, 2, "syncing"),))
    full = a_map(0, 1, standbys=(standby(1, 2, 1, "syncing"),))
    assert shard_placement.next_step(full, stuck={(1, 1)}) is full
    assert where(shard_placement.next_step(there, stuck={(1, 1)}))[1:] == [(2, 2), (1, 1)]
    up = a_map(1, 1, 1, standbys=(standby(1, 2, 2, "up"),))
    assert shard_placement.next_step(up, stuck={(1, 1)}) is up, "a member that is up is never replaced"


def test_drive_is_retired_when_its_metadata_has_another_copy():
    there = a_map(1, 2, standbys=(standby(1, 2, 2),))
    there = shard_members.primary_lost(there, 1)
    assert (
        where(there)[0] == (2, 2)
        and shard_placement.beside(there, 2) == [1]
        and shard_placement.only_beside(there, 2) == [1]
    )
    removed = with_desired_state(there, 2, "remove")
    assert retired(removed) is removed, "removing the drive would remove the only copy"
    done = after_all_steps(removed)
    assert shard_placement.beside(done, 2) == [] and retired(done).target_by_id[2].state == "gone"
    whole = shard_members.standby_added(there, 1, standby(3, 2, 3))
    assert shard_placement.only_beside(whole, 2) == [1], "it is not complete yet"
    whole = shard_members.standby_up(whole, 1, 3, whole.shards[0].term, whole.shards[0].epoch)
    assert shard_placement.only_beside(whole, 2) == []
    assert retired(with_desired_state(whole, 2, "lost")).target_by_id[2].state == "gone", (
        "nothing reads it any more"
    )


def test_request_without_space_is_refused_with_the_remedy():
    there = shard_placement.with_node(a_map(1, 1, standbys=(standby(1, 2, 2),)), 1, desired_state="drain")
    with pytest.raises(InvalidRequest, match=r"add a drive, or have fewer: nvpool shard standbys POOL 1 0"):
        shard_placement.check_places(there)
    fine = shard_placement.with_node(a_map(1, 2, standbys=(standby(1, 2, 2),)), 1, desired_state="drain")
    shard_placement.check_places(fine)
    with pytest.raises(InvalidRequest, match="3 that can be used"):
        shard_placement.check_room_for(a_map(1, 1), a_map(1, 1).shards[0], 3)


@given(drives=st.lists(st.integers(1, 3), min_size=1, max_size=4), wanted=st.integers(0, 4), data=st.data())
def test_each_shard_gets_the_desired_standbys_on_own_drives(drives, wanted, data):
    racks = data.draw(st.lists(st.sampled_from(["", "a", "b"]), min_size=len(drives), max_size=len(drives)))
    there = after_all_steps(a_map(*drives, racks=racks, wanted=wanted))
    for number in data.draw(st.lists(st.integers(1, len(drives)), max_size=3)):
        request = data.draw(st.sampled_from(["drain", "share"]))
        requested = shard_placement.with_node(there, number, desired_state=request)
        if any(node.desired_state == "share" for node in requested.nodes):
            there = after_all_steps(requested)
    shard, places = there.shards[0], [ShardLocation(*place) for place in where(there)]
    free = shard_placement.good_places(there)
    assert len(set(places)) == len(places)
    assert len(shard.standbys) == min(
        wanted, len(set(free) | {p for p in places if p.drive == 0}) - 1
    ) or shard_placement.misplaced(there, shard)
    stay = {node.id for node in there.nodes if node.desired_state == "share"}
    assert places[0].node in stay or not free or len(free) <= len(places)
    if not shard_placement.misplaced(there, shard) and len(places) > 1:
        racks = {there.node_by_id[place.node].rack or place.node for place in {*free, places[0]}}
        assert len({there.node_by_id[place.node].rack or place.node for place in places}) == min(
            len(places), len(racks)
        )


def primaries_after(pool_map):
    """Number of primaries of each node after all handovers, when the former primaries are up again."""
    for _ in range(20):
        handing = [shard for shard in pool_map.shards if shard_placement.hands_over(pool_map, shard)]
        if not handing:
            return Counter(shard.node for shard in pool_map.shards)
        assert len(handing) == 1, "one after the other"
        pool_map = shard_members.primary_lost(pool_map, handing[0].id)
        assert not any(shard_placement.hands_over(pool_map, shard) for shard in pool_map.shards), (
            "not while a member resynchronizes"
        )
        for shard in pool_map.shards:
            for one in shard.standbys:
                if one.state != "up":
                    now = pool_map.shard_by_id[shard.id]
                    pool_map = shard_members.standby_up(pool_map, shard.id, one.member, now.term, now.epoch)
    raise AssertionError("the steps do not end")


@given(st.lists(st.permutations([1, 2, 3]), min_size=1, max_size=9))
def test_primaries_are_spread_over_nodes_and_then_stay(places):
    pool_map = a_map(1, 1, 1)
    pool_map = replace(
        pool_map,
        shards=tuple(
            Shard(
                number,
                first,
                (f"stream://h:{number}",),
                path=f"/d{first}/nvpool-p-meta-{number}",
                standbys=(
                    StandbyMember(
                        1,
                        second,
                        (f"stream://h:{100 + number}",),
                        "up",
                        f"/d{second}/nvpool-p-meta-{number}.1",
                    ),
                ),
            )
            for number, (first, second, _) in enumerate(places, 1)
        ),
    )
    before = Counter(shard.node for shard in pool_map.shards)
    after = primaries_after(pool_map)
    assert sum(count**2 for count in after.values()) <= sum(count**2 for count in before.values())
    if all(first == 1 for first, *_ in places) and {second for _, second, _ in places} == {2}:
        assert after[1] - after[2] in (0, 1)
