"""Membership of the pool's own etcd: each step, random steps with failures between them, and invariants."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nvpool.core.config import Config
from nvpool.host.pool_directory import PoolDirectory
from nvpool.node.coordination.etcd_members import EtcdMembers
from nvpool.poolmap.model import (
    MAP_FORMAT,
    EtcdMember,
    Node,
    PoolMap,
    PoolSettings,
    changed,
    decode_map,
    encode_map,
)
from nvpool.poolmap.nodes.etcd_membership import (
    Add,
    Found,
    MapChange,
    Promote,
    Remove,
    clients,
    leaving,
    members_wanted,
    next_step,
    of_node,
    put,
    wanted,
    without,
)


def a_map(nodes: int, *entries: EtcdMember, racks: dict[int, str] | None = None) -> PoolMap:
    return PoolMap(
        MAP_FORMAT,
        "pool",
        "pool",
        1,
        PoolSettings(),
        etcd=entries,
        nodes=tuple(Node(n, f"n{n}", f"h{n}", (), (racks or {}).get(n, "")) for n in range(1, nodes + 1)),
    )


def entry(node: int, state="up", generation: int = 0) -> EtcdMember:
    return EtcdMember(
        node,
        f"c{node}",
        f"p{node}",
        state,
        generation,
        f"{node}" if state in ("up", "added", "leaving") else "",
    )


class Etcd:
    """A model of etcd's membership: one learner at a time; a removal never costs the others their quorum."""

    def __init__(self, *found: Found, here: set[int]):
        self.found = {one.id: one for one in found}
        self.here = here
        self.last = 100

    def do(self, step, nodes_of: dict[str, int]) -> None:
        if isinstance(step, Add):
            if any(one.learns for one in self.found.values()) or any(
                step.peer in one.peers for one in self.found.values()
            ):
                raise ValueError("refused")
            self.last += 1
            self.found[str(self.last)] = Found(str(self.last), (step.peer,), True, False)
        elif isinstance(step, Promote):
            one = self.found[step.id]
            assert one.learns and one.started
            self.found[step.id] = one._replace(learns=False)
        else:
            one = self.found.pop(step.id)
            voters = {nodes_of.get(each.peers[0]) for each in self.found.values() if not each.learns}
            if not one.learns and len(voters & self.here) <= len(voters) // 2:
                self.found[step.id] = one
                raise AssertionError("a removal costs the other members their quorum")


def act(pool_map: PoolMap, node: int) -> PoolMap:
    """What a node does about its own entry of the map."""
    one = of_node(pool_map, node)
    if one is not None and one.state == "wanted":
        return put(
            pool_map,
            node,
            one.generation,
            state="ready",
            client=f"c{node}.{one.generation}",
            peer=f"p{node}.{one.generation}",
        )
    return pool_map


def settle(pool_map: PoolMap, etcd: Etcd, here: set[int], away: set[int]) -> PoolMap:
    for _ in range(100):
        before = pool_map
        for node in here:
            pool_map = act(pool_map, node)
        for one in etcd.found.values():
            if any(e.peer in one.peers and e.state == "added" and e.node in here for e in pool_map.etcd):
                etcd.found[one.id] = one._replace(started=True)
        step = next_step(pool_map, etcd.found.values(), here, away)
        if step is None and pool_map is before:
            return pool_map
        if isinstance(step, MapChange):
            pool_map = step.decide(pool_map)
        elif step is not None:
            etcd.do(step, {e.peer: e.node for e in pool_map.etcd})
    raise AssertionError(f"no end: {pool_map.etcd}, {etcd.found}")


def voters(pool_map: PoolMap) -> set[int]:
    return {one.node for one in pool_map.etcd if one.state == "up"}


def of_one() -> Etcd:
    return Etcd(Found("1", ("p1",), False, True), here={1})


@pytest.mark.parametrize(("nodes", "expected"), [(1, {1}), (2, {1}), (3, {1, 2, 3}), (6, {1, 2, 3})])
def test_pool_has_three_etcd_members_or_one(nodes, expected):
    here = set(range(1, nodes + 1))
    etcd = of_one()
    etcd.here = here
    after = settle(a_map(nodes, EtcdMember(1, "c1", "p1")), etcd, here, set())
    assert voters(after) == expected and len(etcd.found) == len(expected)
    assert all(one.id for one in after.etcd)
    assert decode_map(encode_map(after)) == after and len(clients(after)) == len(expected)


def test_no_member_is_added_until_three_are_possible():
    assert settle(a_map(3, entry(1)), of_one(), {1, 2}, set()).etcd == (entry(1),)


def test_members_are_in_different_racks_if_possible():
    racks = {1: "a", 2: "a", 3: "b", 4: "", 5: "c"}
    etcd = of_one()
    etcd.here = {1, 2, 3, 4, 5}
    assert voters(settle(a_map(5, entry(1), racks=racks), etcd, {1, 2, 3, 4, 5}, set())) == {1, 3, 4}


def of_three(here: set[int]) -> Etcd:
    return Etcd(*(Found(f"{n}", (f"p{n}",), False, True) for n in (1, 2, 3)), here=here)


def test_long_absent_member_is_replaced():
    pool_map = a_map(4, entry(1), entry(2), entry(3))
    assert settle(pool_map, of_three({2, 3, 4}), {2, 3, 4}, set()) is pool_map
    assert voters(settle(pool_map, of_three({2, 3, 4}), {2, 3, 4}, {1})) == {2, 3, 4}


def draining(pool_map: PoolMap, *numbers: int) -> PoolMap:
    nodes = tuple(
        replace(node, desired_state="drain") if node.id in numbers else node for node in pool_map.nodes
    )
    return replace(pool_map, nodes=nodes)


@pytest.mark.parametrize(
    ("nodes", "drained", "expected"), [(4, 1, {2, 3, 4}), (3, 1, 1), (3, 3, 1), (5, 2, {1, 3, 4})]
)
def test_member_on_a_draining_node_is_replaced(nodes, drained, expected):
    here = set(range(1, nodes + 1))
    after = settle(draining(a_map(nodes, entry(1), entry(2), entry(3)), drained), of_three(here), here, set())
    assert drained not in voters(after) and len(voters(after)) == (1 if expected == 1 else 3)
    assert expected == 1 or voters(after) == expected
    assert len(voters(after)) == members_wanted(after), (
        "no member is reported missing that no node will become"
    )


def test_only_member_of_a_draining_node_leaves_after_another():
    etcd = of_one()
    etcd.here = {1, 2}
    assert voters(settle(draining(a_map(2, entry(1)), 1), etcd, {1, 2}, set())) == {2}
    alone = draining(a_map(2, entry(1)), 1)
    assert settle(alone, of_one(), {1}, set()) is alone


def test_absent_member_stays_if_none_can_replace_it():
    pool_map = a_map(3, entry(1), entry(2), entry(3))
    assert settle(pool_map, of_three({2, 3}), {2, 3}, {1}) is pool_map


def test_no_member_is_removed_without_a_quorum():
    pool_map = a_map(4, entry(1), entry(2), entry(3))
    assert settle(pool_map, of_three({3, 4}), {3, 4}, {1, 2}) is pool_map
    gone = leaving(pool_map, 3)
    assert not isinstance(next_step(gone, of_three(set()).found.values(), {3, 4}, {1, 2}), Remove)


def test_member_with_lost_data_joins_as_a_new_member():
    pool_map = put(a_map(3, entry(1), entry(2), entry(3)), 2, 0, state="lost")
    after = settle(pool_map, of_three({1, 2, 3}), {1, 2, 3}, set())
    assert (
        voters(after) == {1, 2, 3}
        and of_node(after, 2).generation > 0
        and of_node(after, 2).id not in ("1", "2", "3")
    )


def test_leaving_only_member_waits_for_another():
    etcd = of_one()
    etcd.here = {1, 2}
    after = settle(leaving(a_map(2, entry(1)), 1), etcd, {1, 2}, set())
    assert voters(after) == {2} and of_node(after, 1) is None


def test_removal_of_the_third_node_leaves_one_member():
    pool_map = replace(a_map(3, entry(1), entry(2), entry(3)), nodes=a_map(2).nodes)
    after = settle(pool_map, of_three({1, 2, 3}), {1, 2}, set())
    assert len(voters(after)) == 1 and voters(after) < {1, 2}


def test_absent_candidate_is_given_up():
    for state in ("wanted", "ready", "added"):
        found = Found("3", ("p3",), True, False)
        etcd = Etcd(*(Found(f"{n}", (f"p{n}",), False, True) for n in (1, 2)), here={1, 2, 4})
        if state == "added":
            etcd.found["3"] = found
        after = settle(a_map(4, entry(1), entry(2), entry(3, state)), etcd, {1, 2, 4}, {3})
        assert voters(after) == {1, 2, 4}


def test_unknown_member_is_removed_from_the_pools_own_etcd():
    unknown = Found("9", ("p9",), False, True)
    assert next_step(a_map(1, entry(1)), [Found("1", ("p1",), False, True), unknown], {1}, set()) == Remove(
        "9"
    )
    assert next_step(a_map(3), [unknown], {1, 2, 3}, set()) is None


def test_change_for_another_generation_is_ignored():
    pool_map = wanted(a_map(3, entry(1)), 2)
    assert put(pool_map, 2, 7, state="ready") is pool_map and put(pool_map, 3, 0, state="up") is pool_map
    assert without(pool_map, 2, 7) is pool_map and wanted(pool_map, 2) is pool_map
    assert of_node(pool_map, 2).generation == pool_map.epoch


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "act", "start", "die", "return", "leave", "lose"]), st.integers(1, 5)
        ),
        max_size=60,
    )
)
def test_random_steps_keep_a_quorum_and_end_with_three(events):
    here, pool_map = {1, 2, 3, 4, 5}, a_map(5, EtcdMember(1, "c1", "p1"))
    etcd = of_one()

    def alive(without: int = 0) -> bool:
        peers = {e.peer: e.node for e in pool_map.etcd}
        voting = {peers.get(one.peers[0], 0) for one in etcd.found.values() if not one.learns}
        return len(voting & (here - {without})) > len(voting) // 2

    for what, node in events:
        etcd.here = here
        if what == "step":
            step = next_step(pool_map, list(etcd.found.values()), here, {1, 2, 3, 4, 5} - here)
            if isinstance(step, MapChange):
                pool_map = step.decide(pool_map)
            elif step is not None:
                try:
                    etcd.do(step, {e.peer: e.node for e in pool_map.etcd})
                except ValueError:
                    pass
        elif what == "act" and node in here:
            pool_map = act(pool_map, node)
        elif what == "start" and node in here:
            for one in list(etcd.found.values()):
                if any(e.peer in one.peers and e.state == "added" and e.node == node for e in pool_map.etcd):
                    etcd.found[one.id] = one._replace(started=True)
        elif what == "die" and alive(node):
            here = here - {node}
        elif what == "return":
            here = here | {node}
        elif what == "leave":
            pool_map = leaving(pool_map, node)
        elif what == "lose" and (one := of_node(pool_map, node)) and one.state == "up" and alive(node):
            pool_map = put(pool_map, node, one.generation, state="lost")
            here = here - {node}
        assert alive(), (what, pool_map.etcd)
    here = {1, 2, 3, 4, 5}
    etcd.here = here
    after = settle(pool_map, etcd, here, set())
    assert len(voters(after)) == 3 and len(etcd.found) == 3 == len(after.etcd)
    assert changed(after).etcd == after.etcd


@pytest.mark.parametrize(
    ("drained", "here", "expected"),
    [
        ((), {1, 2, 3}, ["the pool map is kept by 1 of 3 members of etcd"]),
        (
            (),
            {1},
            [
                "the pool map is kept by 1 of 3 members of etcd: install etcd (Debian: etcd-server) on more nodes"
            ],
        ),
        ((3,), {1, 2, 3}, []),
        ((3,), {1}, []),
    ],
)
def test_missing_etcd_members_are_reported(tmp_path, monkeypatch, drained, here, expected):
    pool_map = draining(a_map(3, entry(1)), *drained)
    present = {f"etcd/{node}": '{"able": true, "answers": true}' for node in here}
    keeper = SimpleNamespace(
        relay=SimpleNamespace(pool_map=pool_map, present=lambda: present),
        members=(),
        is_in_etcd=True,
        own_data_is_lost=False,
        external=False,
    )
    monkeypatch.setattr(EtcdMembers, "etcd", SimpleNamespace(is_silent=False))
    assert (
        EtcdMembers(PoolDirectory(tmp_path), Config(), keeper, SimpleNamespace(node=1), None).problems()
        == expected
    )
