"""Membership of the pool's own etcd: the current members, and the next step towards the desired ones.

Pure functions of the map, of etcd's member list and of the available nodes. node/coordination/etcd_members
calls them: the leader for the steps, and each node for its own entry. The leader performs one step at a time.
Each step changes the map or etcd and may be repeated, so a new leader continues where the previous one
stopped. A new member first joins as a learner: it has no vote, so nothing is lost while it is filled. A
member that is replaced leaves before its replacement is added, unless the remaining members could not decide
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from msgspec.structs import replace

from nvpool.poolmap.model import EtcdMember, PoolMap, changed

MEMBERS = 3
"""Number of members; one of them may fail. With two nodes there is one member: two members tolerate no
failure, but can fail twice as often."""


class Found(NamedTuple):
    """A member as etcd knows it. `peers` are addresses without a scheme."""

    id: str
    peers: tuple[str, ...]
    learns: bool
    started: bool


class Add(NamedTuple):
    """Step: add a member as a learner."""

    peer: str


class Promote(NamedTuple):
    id: str


class Remove(NamedTuple):
    id: str


class MapChange(NamedTuple):
    """Step: change the map with `decide`, which returns the same map if the change no longer applies."""

    decide: Callable[[PoolMap], PoolMap]


Step = Add | Promote | Remove | MapChange


def of_node(pool_map: PoolMap, node: int) -> EtcdMember | None:
    return next((one for one in pool_map.etcd if one.node == node), None)


def clients(pool_map: PoolMap) -> tuple[str, ...]:
    """Return etcd's client addresses: those of members that vote, or will vote again."""
    return tuple(one.client for one in pool_map.etcd if one.client and one.state in ("up", "leaving"))


def lets_in(pool_map: PoolMap) -> frozenset[int]:
    """Return the nodes that should have the private keys of the pool's CAs.

    These are the nodes that store the map or, if none does, the first nodes. If a single node stores the map,
    the first other node is included too: it can take over the map when the single node is lost permanently.
    """
    if not pool_map.etcd:
        return frozenset(sorted(pool_map.node_by_id)[:MEMBERS])
    others = sorted(
        node.id
        for node in pool_map.nodes
        if node.desired_state == "share" and node.id != pool_map.etcd[0].node
    )
    keeping = {one.node for one in pool_map.etcd if one.state in ("added", "up")}
    return frozenset(
        (keeping & pool_map.node_by_id.keys()) | set(others[:1] if len(pool_map.etcd) == 1 else ())
    )


def last_revoked(pool_map: PoolMap) -> int:
    """Return the epoch of the last node removal.

    The result is 0 if no removed node can hold a valid certificate any more.
    """
    return max((one.epoch for one in pool_map.revoked), default=0)


def members_wanted(pool_map: PoolMap, going: Collection[int] = ()) -> int:
    """Return the desired number of members on staying nodes, without nodes whose member is `going`."""
    willing = {node.id for node in pool_map.nodes if node.desired_state == "share"}
    return MEMBERS if len(willing.difference(going)) >= MEMBERS else 1


def put(pool_map: PoolMap, node: int, generation: int, **fields: Any) -> PoolMap:
    """Set `fields` of a node's member; return the same map if there is no such member or nothing changes."""
    old = of_node(pool_map, node)
    if old is None or old.generation != generation:
        return pool_map
    new = replace(old, **fields)
    return (
        pool_map
        if new == old
        else changed(pool_map, etcd=tuple(new if one is old else one for one in pool_map.etcd))
    )


def wanted(pool_map: PoolMap, node: int) -> PoolMap:
    if of_node(pool_map, node) is not None or node not in pool_map.node_by_id:
        return pool_map
    # No removed node has a connection to the new member yet.
    new = EtcdMember(node, "", "", "wanted", pool_map.epoch + 1, revoked=last_revoked(pool_map))
    return changed(pool_map, etcd=(*pool_map.etcd, new))


def leaving(pool_map: PoolMap, node: int) -> PoolMap:
    """Mark a node's member as leaving; return the same map if it has none."""
    old = of_node(pool_map, node)
    if old is None or old.state in ("leaving", "lost"):
        return pool_map
    return put(pool_map, node, old.generation, state="leaving")


def without(pool_map: PoolMap, node: int, generation: int) -> PoolMap:
    etcd = tuple(one for one in pool_map.etcd if (one.node, one.generation) != (node, generation))
    return pool_map if etcd == pool_map.etcd else changed(pool_map, etcd=etcd)


def next_step(
    pool_map: PoolMap, found: Collection[Found], here: Collection[int], away: Collection[int]
) -> Step | None:
    """Return the next step; None if the membership is as desired, or nothing can be done now.

    `found` is etcd's member list, not older than the map. `here` are nodes that could have a member, or have
    a responding one. `away` are nodes that have been absent, or whose member has not responded, for longer
    than the pool waits for them.
    """
    entries = pool_map.etcd
    if not entries:
        return None  # the embedded coordinator, or an external etcd
    known = {(one.node, one.generation): _match(one, found) for one in entries}
    matched = {one.id for one in known.values() if one is not None}
    for one in found:
        if one.id not in matched:
            return Remove(one.id)
    voters = {
        entry.node for entry in entries if (it := known[entry.node, entry.generation]) and not it.learns
    }
    stuck = False
    for entry in entries:
        it = known[entry.node, entry.generation]
        step = _step_of(entry, it, pool_map, here, away)
        if (
            isinstance(step, Remove)
            and it is not None
            and not it.learns
            and not _may_go(entry.node, voters, here)
        ):
            stuck = True  # a replacement must be added first
            continue
        if step is not None:
            return step
    if any(entry.state in ("wanted", "ready", "added") for entry in entries):
        return None  # one member at a time; the next step follows when that node has done its part
    return _who_else(pool_map, entries, here, away, stuck)


def _match(entry: EtcdMember, found: Collection[Found]) -> Found | None:
    if entry.id:
        return next((one for one in found if one.id == entry.id), None)
    return next((one for one in found if entry.peer and entry.peer in one.peers), None)


def _step_of(
    entry: EtcdMember, it: Found | None, pool_map: PoolMap, here: Collection[int], away: Collection[int]
) -> Step | None:
    node, generation = entry.node, entry.generation
    if entry.state in ("leaving", "lost") or node not in pool_map.node_by_id:
        if it is not None:
            return Remove(it.id)
        return MapChange(lambda newest: without(newest, node, generation))
    if entry.state == "up":
        if it is None:
            return MapChange(lambda newest: without(newest, node, generation))
        return None if entry.id else MapChange(lambda newest: put(newest, node, generation, id=it.id))
    if node in away:
        return MapChange(lambda newest: put(newest, node, generation, state="leaving"))
    if entry.state == "ready":
        if it is None:
            return Add(entry.peer)
        return MapChange(lambda newest: put(newest, node, generation, state="added", id=it.id))
    if entry.state == "added":
        if it is None:
            return MapChange(lambda newest: without(newest, node, generation))
        if not it.learns:
            return MapChange(lambda newest: put(newest, node, generation, state="up"))
        return Promote(it.id) if it.started and node in here else None
    return None


def _may_go(node: int, voters: set[int], here: Collection[int]) -> bool:
    """Return whether the other members have a majority without this one."""
    rest = voters - {node}
    return len(rest & set(here)) > len(rest) // 2


def _who_else(
    pool_map: PoolMap,
    entries: tuple[EtcdMember, ...],
    here: Collection[int],
    away: Collection[int],
    stuck: bool,
) -> Step | None:
    staying = [entry.node for entry in entries if entry.state == "up" and entry.node in pool_map.node_by_id]
    going = {entry.node for entry in entries} - set(staying)
    willing = {node.id for node in pool_map.nodes if node.desired_state == "share" and node.id not in going}
    count = members_wanted(pool_map, going)
    # A member that has lost its data may be filled again on the same node; by then it is not in the list any
    # more.
    others = [
        node for node in pool_map.nodes if node.id in here and node.id not in staying and node.id in willing
    ]
    racks = {pool_map.node_by_id[node].rack for node in staying}
    others.sort(key=lambda node: (bool(node.rack) and node.rack in racks, node.id))
    if len(staying) < count and others and (stuck or len(staying) + len(others) >= count):
        new = others[0].id
        return MapChange(lambda newest: wanted(newest, new))
    lost = [node for node in staying if node in away]
    if lost and (others or len(staying) > count) and _may_go(lost[0], set(staying), here):
        return MapChange(lambda newest: leaving(newest, lost[0]))
    drained = [node for node in staying if node not in willing]
    if drained and (others or len(staying) > count):
        if _may_go(drained[0], set(staying), here):
            return MapChange(lambda newest: leaving(newest, drained[0]))
        if others:
            return MapChange(lambda newest: wanted(newest, others[0].id))
    if len(staying) > count:
        last = max(staying, key=lambda node: (node not in here, node))
        if _may_go(last, set(staying), here):
            return MapChange(lambda newest: leaving(newest, last))
    return None
