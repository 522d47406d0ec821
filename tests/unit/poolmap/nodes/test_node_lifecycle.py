"""Maps of nodes that are drained, removed, lost and assigned to racks."""

import pytest
from msgspec.structs import replace

from nvpool.core.errors import InUse, InvalidRequest
from nvpool.node.admin.drives import waits_for
from nvpool.poolmap.chains import transitions
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.chains.rebalance import given_up, next_steps, taken_back
from nvpool.poolmap.model import (
    MAP_FORMAT,
    Drive,
    EtcdMember,
    Node,
    PartitionRange,
    PoolMap,
    PoolSettings,
    Shard,
    ShardWanted,
    StandbyMember,
    Target,
    check_map,
    decode_map,
    encode_map,
)
from nvpool.poolmap.nodes import lifecycle as node_lifecycle
from nvpool.poolmap.shards import members as shard_members
from nvpool.poolmap.shards import placement as shard_placement

BIG = 1 << 30


def a_map(count=3, replicas=2, standbys=((1, 2),)):
    """One drive per node; shard 1 on node 1, its standbys as (member, node) on drives."""
    numbers = range(1, count + 1)
    targets = tuple(Target(n, n, n, BIG, ()) for n in numbers)
    shard = Shard(
        1,
        1,
        ("stream://h:1",),
        standbys=tuple(StandbyMember(m, n, (f"stream://h:{m}0",), "up", f"/d{n}/x") for m, n in standbys),
        standbys_wanted=len(standbys),
    )
    return PoolMap(
        MAP_FORMAT,
        "p",
        "p",
        1,
        PoolSettings(replicas=replicas),
        tuple(Node(n, f"n{n}", "", (), member=f"node/{n}") for n in numbers),
        tuple(Drive(n, n, f"/d{n}/store", BIG) for n in numbers),
        targets,
        (build_table(targets, replicas),),
        (shard,),
        (PartitionRange(0, 4096, 1),),
        members=tuple(f"node/{n}" for n in numbers),
    )


def moved(pool_map):
    """The map after all operator requests have been carried out, with all nodes alive."""
    serving = frozenset(target.id for target in pool_map.targets if not target.is_over)
    for _ in range(10_000):
        before = pool_map
        pool_map = nodes_step(pool_map, serving)
        pool_map = transitions.sealed(before, pool_map) or before
        assert check_map(pool_map) == []
        if pool_map is before:
            return pool_map
    raise AssertionError("no end")


def nodes_step(pool_map, serving):
    lost = {target.id for target in pool_map.targets if target.desired_state == "lost"}
    pool_map = next_steps(
        transitions.died(pool_map, lost), serving=serving, joining_max=4096, of_target_max=4096
    )
    for target in serving:
        joining = [
            (table.id, number, chain.epoch)
            for table in pool_map.tables
            for number, chain in enumerate(table.chains)
            if target in chain.joining
        ]
        pool_map = transitions.joined(pool_map, target, joining)
    pool_map = transitions.retired(transitions.departed(pool_map, lambda name, target: True))
    for shard in pool_map.shards:
        for standby in shard.standbys:
            if not standby.endpoints:
                pool_map = shard_members.standby_made(
                    pool_map, 1, standby.member, standby.path.replace("store", f"m{standby.member}"), ("x",)
                )
            if standby.state != "up" and pool_map.node_by_id[standby.node].desired_state != "lost":
                now = pool_map.shards[0]
                pool_map = shard_members.standby_up(pool_map, 1, standby.member, now.term, now.epoch)
        if shard_placement.hands_over(pool_map, pool_map.shards[0]):
            pool_map = shard_members.primary_lost(pool_map, 1)
    return node_lifecycle.settled(shard_placement.next_step(pool_map, serving), 1000)


def test_drained_node_is_removed_and_its_numbers_not_reused():
    there = a_map()
    requested = node_lifecycle.drained(there, 1, {})
    assert [target.desired_state for target in requested.targets] == ["drain", "share", "share"]
    assert node_lifecycle.drained(requested, 1, {}) == requested
    with pytest.raises(InUse, match="nvpool node drain POOL 1 --wait"):
        node_lifecycle.removed(requested, 1, 1000)
    done = moved(requested)
    assert node_lifecycle.left_on(done, 1).nothing and {1} == {
        node.id for node in done.nodes if node.desired_state == "drain"
    }
    gone = node_lifecycle.removed(done, 1, 1000)
    assert check_map(gone) == [] and decode_map(encode_map(gone)) == gone
    assert [node.id for node in gone.nodes] == [2, 3] and gone.members == ("node/2", "node/3")
    assert [(target.id, target.state) for target in gone.targets] == [(1, "gone"), (2, "up"), (3, "up")]
    assert [node_lifecycle.has_left(gone, number) for number in (1, 2, 4)] == [True, False, False]


def test_drain_can_be_cancelled():
    requested = node_lifecycle.drained(a_map(), 2, {}, stop=True)
    assert requested.node_by_id[2].desired_state == "stop"
    again = node_lifecycle.shares_again(requested, 2)
    assert [target.desired_state for target in again.targets] == ["share"] * 3 and again.node_by_id[
        2
    ].desired_state == "share"
    assert not any(chain.goal for table in moved(again).tables for chain in table.chains)


def test_returning_drive_does_not_fill_a_draining_node():
    away = given_up(transitions.died(a_map(4), {2}), {2}, {})
    assert away.target_by_id[2].desired_state == "away"
    back = taken_back(transitions.returned(node_lifecycle.drained(away, 2, {}), {2}), {2})
    assert back.target_by_id[2].desired_state == "drain" and not node_lifecycle.left_on(moved(back), 2).chains


def test_removed_node_cancels_its_wanted_shard():
    wanted = replace(a_map(), shards_wanted=(ShardWanted(2, 2), ShardWanted(3, 3)))
    gone = node_lifecycle.removed(moved(node_lifecycle.drained(wanted, 2, {})), 2, 1000)
    assert gone.shards_wanted == (ShardWanted(3, 3),) and gone.shards_given == 3 and check_map(gone) == []


def test_drain_without_enough_space_is_refused_with_a_remedy():
    with pytest.raises(InvalidRequest, match="add a drive first"):
        node_lifecycle.drained(a_map(2), 2, {})
    with pytest.raises(InvalidRequest, match="have room for"):
        node_lifecycle.drained(a_map(3), 2, {1: BIG, 2: BIG, 3: BIG})
    with pytest.raises(InvalidRequest, match="no other node"):
        node_lifecycle.drained(a_map(1, 1, ()), 1, {})
    with pytest.raises(InvalidRequest, match="nvpool shard standbys POOL 1 1"):
        node_lifecycle.drained(a_map(3, standbys=((1, 2), (2, 3))), 1, {})  # one member per drive
    with pytest.raises(InvalidRequest, match="no node 7"):
        node_lifecycle.drained(a_map(), 7, {})


def test_drain_names_the_drive_it_waits_for():
    assert waits_for(node_lifecycle.drained(a_map(), 3, {})) == []
    down = transitions.died(a_map(), {2})
    assert waits_for(node_lifecycle.drained(down, 3, {})) == [2]


def test_lost_node_is_removed_when_its_data_is_restored():
    there = a_map()
    lost = node_lifecycle.lost(there, 2, {}, 1000)
    assert lost.members == ("node/1", "node/3") and lost.node_by_id[2].desired_state == "lost"
    done = moved(lost)
    assert [node.id for node in done.nodes] == [1, 3] and done.target_by_id[2].desired_state == "lost"
    assert [one.node for one in done.shards[0].standbys] == [3]
    assert all(set(chain.targets) == {1, 3} for chain in done.table_by_id[2].chains)


def test_losing_a_node_with_the_only_copy_is_refused():
    there = a_map(3, 1)
    with pytest.raises(InvalidRequest, match="--give-up"):
        node_lifecycle.lost(there, 2, {}, 1000)
    accepted = node_lifecycle.lost(there, 2, {}, 1000, give_up=True)
    assert accepted.node_by_id[2].desired_state == "lost" and accepted.target_by_id[2].desired_state == "lost"
    with pytest.raises(InvalidRequest, match="try again then"):
        node_lifecycle.lost(a_map(), 1, {}, 1000)
    with pytest.raises(InvalidRequest, match="only whole copy of the metadata"):
        node_lifecycle.lost(a_map(standbys=()), 1, {}, 1000)


def test_chains_are_spread_over_racks():
    there = replace(
        a_map(4), nodes=tuple(replace(node, rack="a" if node.id < 3 else "b") for node in a_map(4).nodes)
    )
    there = moved(node_lifecycle.in_rack(there, 2, "b"))
    rack = {node.id: node.rack for node in there.nodes}
    assert rack[2] == "b" and node_lifecycle.in_rack(there, 2, "b") is there
    assert all(
        len({rack[there.target_by_id[target].node] for target in chain.targets}) == 2
        for chain in there.table_by_id[2].chains
    )
    with pytest.raises(InvalidRequest):
        node_lifecycle.in_rack(there, 2, "x" * 65)


def test_new_host_of_a_node_changes_no_other_node():
    before = node_lifecycle.in_rack(a_map(), 2, "left")
    after = node_lifecycle.on_host(before, 1, "there")
    assert [(node.id, node.host_id, node.rack) for node in after.nodes] == [
        (node.id, "there" if node.id == 1 else node.host_id, node.rack) for node in before.nodes
    ]


def test_lost_node_counts_until_etcd_and_chains_drop_it():
    before = replace(a_map(), etcd=tuple(EtcdMember(n, f"h{n}:1", f"h{n}:2") for n in (1, 2, 3)))
    assert not node_lifecycle.still_counted_on(before)
    lost = node_lifecycle.lost(before, 3, {}, 1000)
    assert node_lifecycle.still_counted_on(lost)
    chains_only = replace(lost, etcd=lost.etcd[:2])
    assert node_lifecycle.still_counted_on(chains_only)
    died = transitions.died(chains_only, {3})
    assert not node_lifecycle.still_counted_on(died) and node_lifecycle.still_counted_on(
        replace(died, etcd=lost.etcd)
    )
    assert died.node_by_id[3].desired_state == "lost", "the node is still listed"
    alone = transitions.died(node_lifecycle.lost(a_map(replicas=1), 3, {}, 1000, give_up=True), {3})
    assert not node_lifecycle.still_counted_on(alone), "chains without another copy may wait for ever"


def test_removed_endpoints_belong_to_one_node():
    def at(name):
        return f"stream+unix:///{name}.sock", f"stream://127.0.0.1:{name}"

    before = a_map()
    before = replace(
        before,
        nodes=tuple(replace(node, endpoints=at(f"1{node.id}")) for node in before.nodes),
        targets=tuple(replace(target, endpoints=at(f"2{target.id}")) for target in before.targets),
        shards=(
            replace(
                before.shards[0],
                endpoints=at("31"),
                standbys=(replace(before.shards[0].standbys[0], endpoints=at("32")),),
            ),
        ),
    )
    after = node_lifecycle.listening_at(before, 1, lambda endpoint: "+unix" in endpoint)
    assert [len(one.endpoints) for one in (*after.nodes, *after.targets)] == [1, 2, 2, 1, 2, 2]
    assert after.shards[0].endpoints == at("31")[:1] and after.shards[0].standbys[0].endpoints == at("32")
    assert (
        node_lifecycle.listening_at(before, 2, lambda endpoint: "+unix" in endpoint)
        .shards[0]
        .standbys[0]
        .endpoints
        == at("32")[:1]
    )
    assert node_lifecycle.listening_at(after, 1, lambda endpoint: "+unix" in endpoint) is after
