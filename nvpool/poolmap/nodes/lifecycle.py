"""Node lifecycle: draining, removing, declaring a node lost, and assigning a node to a rack.

Pure functions from a map to the next one, called by node/admin/nodes. They record the desired state; other
modules carry it out at their own pace: the cluster manager moves chains (rebalance), poolmap/shards/placement
moves shard members, and node/coordination/etcd_members changes the members of etcd. The map shows the
progress.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from nvpool.core.errors import InUse, InvalidRequest
from nvpool.poolmap.chains import transitions
from nvpool.poolmap.chains.rebalance import check_room, with_goals
from nvpool.poolmap.model import Node, NodeDesiredState, PoolMap, Shard, StandbyMember, Target
from nvpool.poolmap.nodes.membership import node_removed, node_revoked
from nvpool.poolmap.shards.members import members, node_and_path
from nvpool.poolmap.shards.placement import check_places

S = TypeVar("S", Target, Shard, StandbyMember)
"""A process of the pool: has a node and endpoints."""


class Left(NamedTuple):
    """Data on a node that must be moved before the node can be removed."""

    chains: int
    """Number of chains that targets of the node hold, join, or should hold."""
    members: tuple[int, ...]
    """Shards with a member on the node."""
    etcd: bool

    @property
    def nothing(self) -> bool:
        return not self.chains and not self.members and not self.etcd


def node_of(pool_map: PoolMap, number: int) -> Node:
    """Return a node by its number; InvalidRequest if there is none."""
    node = pool_map.node_by_id.get(number)
    if node is None:
        raise InvalidRequest(f"there is no node {number}; `nvpool node ls POOL` lists them")
    return node


def has_left(pool_map: PoolMap, number: int) -> bool:
    """Return whether a node with this number had a drive and was removed."""
    return number not in pool_map.node_by_id and any(target.node == number for target in pool_map.targets)


def targets_of(pool_map: PoolMap, number: int) -> list[Target]:
    """Return the targets of a node that are in the pool."""
    return [target for target in transitions.remaining(pool_map) if target.node == number]


def left_on(pool_map: PoolMap, number: int) -> Left:
    here = {target.id for target in pool_map.targets if target.node == number}
    chains = sum(
        bool(here & {*chain.targets, *chain.joining, *chain.goal})
        for table in pool_map.tables
        for chain in table.chains
    )
    return Left(
        chains,
        tuple(
            shard.id
            for shard in pool_map.shards
            for member in members(shard)
            if node_and_path(shard, member)[0] == number
        ),
        any(one.node == number for one in pool_map.etcd),
    )


def _with(pool_map: PoolMap, number: int, **fields: Any) -> PoolMap:
    return replace(
        pool_map,
        nodes=tuple(replace(node, **fields) if node.id == number else node for node in pool_map.nodes),
    )


def _with_desired_state(pool_map: PoolMap, targets: list[Target], desired_state: str) -> PoolMap:
    for target in targets:
        pool_map = transitions.with_desired_state(pool_map, target.id, desired_state)
    return pool_map


def drained(pool_map: PoolMap, number: int, used_bytes: dict[int, int], *, stop: bool = False) -> PoolMap:
    """Return the map in which the node should hold nothing and, with `stop`, then stop its processes.

    InvalidRequest: the other nodes have no capacity for its data; the text has the remedy. May be repeated.
    """
    node = node_of(pool_map, number)
    if node.desired_state == "lost":
        raise InvalidRequest(f"node {number} is given up for lost; it is being taken out of the pool")
    if not any(other.id != number and other.desired_state == "share" for other in pool_map.nodes):
        raise InvalidRequest(
            f"there is no other node that could take what node {number} has; let one join first: nvpool node "
            f"token POOL"
        )
    desired_state: NodeDesiredState = "stop" if stop else "drain"
    wanted = _with(pool_map, number, desired_state=desired_state)
    sharing = [target for target in targets_of(pool_map, number) if target.desired_state in ("share", "away")]
    wanted = _with_desired_state(wanted, sharing, "drain")
    if sharing:
        check_room(wanted, used_bytes)
        wanted = with_goals(wanted)
    check_places(wanted)
    return wanted


def shares_again(pool_map: PoolMap, number: int) -> PoolMap:
    """Return the map in which the node and its drives hold their share again.

    InvalidRequest: the node is lost.
    """
    node = node_of(pool_map, number)
    if node.desired_state == "lost":
        raise InvalidRequest(
            f"node {number} is given up for lost, and has no certificate any more; it may join as a new one"
        )
    draining = [target for target in targets_of(pool_map, number) if target.desired_state == "drain"]
    if node.desired_state == "share" and not draining:
        return pool_map
    return with_goals(_with_desired_state(_with(pool_map, number, desired_state="share"), draining, "share"))


def check_empty(pool_map: PoolMap, number: int) -> None:
    """Raise InUse, with the remedy, while chunks or metadata are on the node."""
    node_of(pool_map, number)
    left = left_on(pool_map, number)
    if left.chains or left.members:
        what = (
            f"{left.chains} chains of chunks"
            if left.chains
            else f"metadata (shard {', '.join(map(str, left.members))})"
        )
        raise InUse(
            f"node {number} holds {what}; first: nvpool node drain POOL {number} --wait   or, when it will not come "
            f"back: nvpool node remove POOL {number} --lost"
        )


def removed(pool_map: PoolMap, number: int, now_ms: int) -> PoolMap:
    """Remove a node with empty drives; InUse or InvalidRequest while data of the pool is on it."""
    check_empty(pool_map, number)
    empty = _with_desired_state(pool_map, targets_of(pool_map, number), "remove")
    return node_removed(transitions.retired(empty), number, now_ms)


def lost(
    pool_map: PoolMap, number: int, used_bytes: dict[int, int], now_ms: int, *, give_up: bool = False
) -> PoolMap:
    """Return the map in which the node is declared lost.

    Its certificate is revoked, its data is recreated from other copies, and the node leaves the map when
    nothing refers to it any more. With `give_up`, the loss of chunks is accepted: chains without another
    target stay with the node, and their data is unreadable. InvalidRequest: the node has the only copy of
    metadata, or of chunks without `give_up`.
    """
    node_of(pool_map, number)
    here = targets_of(pool_map, number)
    for shard in pool_map.shards:
        if shard.node == number:
            if any(one.state == "up" and one.node != number for one in shard.standbys):
                raise InvalidRequest(
                    f"the primary of shard {shard.id} is on node {number}; a standby follows it when it has "
                    f"been silent for some seconds: try again then"
                )
            raise InvalidRequest(
                f"node {number} has the only whole copy of the metadata of shard {shard.id}; bring it back, "
                f"or load a dump into a new pool"
            )
    gone = transitions.died(pool_map, {target.id for target in here})
    only = sum(transitions.only_copies(gone, target.id) for target in here)
    if only and not give_up:
        raise InvalidRequest(
            f"node {number} has the only copy of {only} chains; without it what they hold cannot be read. "
            f"Bring it back, or say --give-up"
        )
    wanted = _with_desired_state(_with(pool_map, number, desired_state="lost"), here, "lost")
    check_room(
        wanted,
        {target: count for target, count in used_bytes.items() if target not in {one.id for one in here}},
    )
    return transitions.retired(with_goals(node_revoked(wanted, number, now_ms)))


def settled(pool_map: PoolMap, now_ms: int) -> PoolMap:
    """Remove a lost node whose data has been recreated as far as possible; return the same map if there is
    none.

    A chain whose only target was on the node still refers to that target.
    """
    for node in pool_map.nodes:
        if node.desired_state == "lost":
            left = left_on(pool_map, node.id)
            here = {target.id for target in targets_of(pool_map, node.id)}
            if (
                not left.members
                and not left.etcd
                and not any(
                    here & {*chain.targets, *chain.joining, *chain.goal}
                    and not here >= {*chain.targets, *chain.goal}
                    for table in pool_map.tables
                    for chain in table.chains
                )
            ):
                return node_removed(pool_map, node.id, now_ms)
    return pool_map


def on_host(pool_map: PoolMap, number: int, host_id: str) -> PoolMap:
    """Return the map in which the node runs on this host."""
    return _with(pool_map, number, host_id=host_id)


def listening_at(pool_map: PoolMap, number: int, keep: Callable[[str], bool]) -> PoolMap:
    """Return the map with only those endpoints of the node's processes that `keep` accepts.

    Returns the same map if nothing changes.
    """

    def kept(one: S) -> S:
        if one.node != number or all(map(keep, one.endpoints)):
            return one
        return replace(one, endpoints=tuple(filter(keep, one.endpoints)))

    nodes = tuple(
        replace(node, endpoints=tuple(filter(keep, node.endpoints))) if node.id == number else node
        for node in pool_map.nodes
    )
    targets = tuple(map(kept, pool_map.targets))
    shards = tuple(
        kept(replace(shard, standbys=tuple(map(kept, shard.standbys)))) for shard in pool_map.shards
    )
    if (nodes, targets, shards) == (pool_map.nodes, pool_map.targets, pool_map.shards):
        return pool_map
    return replace(pool_map, nodes=nodes, targets=targets, shards=shards)


def still_counted_on(pool_map: PoolMap) -> bool:
    """Return whether a lost node is still a member of etcd or of a shared chain.

    This state lasts seconds, as long as etcd has a majority.
    """
    for node in pool_map.nodes:
        if node.desired_state == "lost":
            here = {target.id for target in targets_of(pool_map, node.id)}
            if any(one.node == node.id for one in pool_map.etcd) or any(
                here & {*chain.targets, *chain.joining} and not here >= set(chain.targets)
                for table in pool_map.tables
                for chain in table.chains
            ):
                return True
    return False


def in_rack(pool_map: PoolMap, number: int, rack: str) -> PoolMap:
    """Return the map in which the node is in this rack (empty: in its own), with new goals for the chains."""
    if len(rack) > 64 or not rack.isprintable():
        raise InvalidRequest("the name of a rack has at most 64 printable characters")
    if node_of(pool_map, number).rack == rack:
        return pool_map
    return with_goals(_with(pool_map, number, rack=rack))
