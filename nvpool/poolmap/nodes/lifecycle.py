"""What the operator wishes of a whole node, as maps: drained, removed, given up for lost, put into a rack.

Pure functions from a map to the next, called by node/admin/nodes. What follows from a wish is done by others, each in its own
time: chains by the manager (rebalance), members of shards by poolmap/shards/placement, members of etcd by who keeps etcd; how
far they are is in the map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from nvpool.core.errors import InUse, InvalidRequest
from nvpool.poolmap.chains import transitions
from nvpool.poolmap.chains.rebalance import check_room, with_goals
from nvpool.poolmap.model import Node, NodeWish, PoolMap, Shard, Standby, Target
from nvpool.poolmap.nodes.membership import node_removed, node_revoked
from nvpool.poolmap.shards.members import members, node_and_path
from nvpool.poolmap.shards.placement import check_places

S = TypeVar("S", Target, Shard, Standby)
"""A process of the pool: what has a node and endpoints."""


class Left(NamedTuple):
    """What is still on a node, and has to go before it can."""

    chains: int
    """That targets of it hold, join, or shall hold."""
    members: tuple[int, ...]
    """Shards that have a member on it."""
    etcd: bool

    @property
    def nothing(self) -> bool:
        return not self.chains and not self.members and not self.etcd


def node_of(pool_map: PoolMap, number: int) -> Node:
    """InvalidRequest: there is none."""
    node = pool_map.node_by_id.get(number)
    if node is None:
        raise InvalidRequest(f"there is no node {number}; `nvpool node ls POOL` lists them")
    return node


def has_left(pool_map: PoolMap, number: int) -> bool:
    """There was such a node, with a drive, and it was removed."""
    return number not in pool_map.node_by_id and any(target.node == number for target in pool_map.targets)


def targets_of(pool_map: PoolMap, number: int) -> list[Target]:
    """Those that are in the pool."""
    return [target for target in transitions.remaining(pool_map) if target.node == number]


def left_on(pool_map: PoolMap, number: int) -> Left:
    here = {target.id for target in pool_map.targets if target.node == number}
    chains = sum(bool(here & {*chain.targets, *chain.joining, *chain.goal})
                 for table in pool_map.tables for chain in table.chains)
    return Left(chains, tuple(shard.id for shard in pool_map.shards for member in members(shard)
                              if node_and_path(shard, member)[0] == number), any(one.node == number for one in pool_map.etcd))


def _with(pool_map: PoolMap, number: int, **fields: Any) -> PoolMap:
    return replace(pool_map, nodes=tuple(replace(node, **fields) if node.id == number else node for node in pool_map.nodes))


def _wished(pool_map: PoolMap, targets: list[Target], wish: str) -> PoolMap:
    for target in targets:
        pool_map = transitions.wished(pool_map, target.id, wish)
    return pool_map


def drained(pool_map: PoolMap, number: int, used_bytes: dict[int, int], *, stop: bool = False) -> PoolMap:
    """The map in which the node is to hold nothing, and with `stop` to end its processes then. InvalidRequest, with the remedy,
    where the others have no room for what is on it. May be repeated."""
    node = node_of(pool_map, number)
    if node.wish == "lost":
        raise InvalidRequest(f"node {number} is given up for lost; it is being taken out of the pool")
    if not any(other.id != number and other.wish == "share" for other in pool_map.nodes):
        raise InvalidRequest(f"there is no other node that could take what node {number} has; let one join first: nvpool node "
                             f"token POOL")
    wish: NodeWish = "stop" if stop else "drain"
    wanted = _with(pool_map, number, wish=wish)
    sharing = [target for target in targets_of(pool_map, number) if target.wish in ("share", "away")]
    wanted = _wished(wanted, sharing, "drain")
    if sharing:
        check_room(wanted, used_bytes)
        wanted = with_goals(wanted)
    check_places(wanted)
    return wanted


def shares_again(pool_map: PoolMap, number: int) -> PoolMap:
    """The map in which the node, and its drives, hold their share. InvalidRequest for one that is lost."""
    node = node_of(pool_map, number)
    if node.wish == "lost":
        raise InvalidRequest(f"node {number} is given up for lost, and has no certificate any more; it may join as a new one")
    draining = [target for target in targets_of(pool_map, number) if target.wish == "drain"]
    if node.wish == "share" and not draining:
        return pool_map
    return with_goals(_wished(_with(pool_map, number, wish="share"), draining, "share"))


def check_empty(pool_map: PoolMap, number: int) -> None:
    """InUse, with the remedy, while chunks or metadata are on the node."""
    node_of(pool_map, number)
    left = left_on(pool_map, number)
    if left.chains or left.members:
        what = f"{left.chains} chains of chunks" if left.chains else f"metadata (shard {', '.join(map(str, left.members))})"
        raise InUse(f"node {number} holds {what}; first: nvpool node drain POOL {number} --wait   or, when it will not come "
                    f"back: nvpool node remove POOL {number} --lost")


def removed(pool_map: PoolMap, number: int, now_ms: int) -> PoolMap:
    """Without the node, whose drives are empty. InvalidRequest, InUse while anything of the pool is on it."""
    check_empty(pool_map, number)
    empty = _wished(pool_map, targets_of(pool_map, number), "remove")
    return node_removed(transitions.retired(empty), number, now_ms)


def lost(pool_map: PoolMap, number: int, used_bytes: dict[int, int], now_ms: int, *, give_up: bool = False) -> PoolMap:
    """The map in which the node does not come back: its certificate is worth nothing, what it held is made again from other
    copies, and it leaves the map when nothing names it any more. InvalidRequest where it has the only copy of anything, unless
    the loss of chunks is accepted: chains that no other target has stay with it, and what they hold can not be read."""
    node_of(pool_map, number)
    here = targets_of(pool_map, number)
    for shard in pool_map.shards:
        if shard.node == number:
            if any(one.state == "up" and one.node != number for one in shard.standbys):
                raise InvalidRequest(f"the primary of shard {shard.id} is on node {number}; a standby follows it when it has "
                                     f"been silent for some seconds: try again then")
            raise InvalidRequest(f"node {number} has the only whole copy of the metadata of shard {shard.id}; bring it back, "
                                 f"or load a dump into a new pool")
    gone = transitions.died(pool_map, {target.id for target in here})
    only = sum(transitions.only_copies(gone, target.id) for target in here)
    if only and not give_up:
        raise InvalidRequest(f"node {number} has the only copy of {only} chains; without it what they hold can not be read. "
                             f"Bring it back, or say --give-up")
    wanted = _wished(_with(pool_map, number, wish="lost"), here, "lost")
    check_room(wanted, {target: count for target, count in used_bytes.items() if target not in {one.id for one in here}})
    return transitions.retired(with_goals(node_revoked(wanted, number, now_ms)))


def settled(pool_map: PoolMap, now_ms: int) -> PoolMap:
    """Without lost nodes of which all has been made again that can be; the same map where there is none. Their targets that
    are the only ones of a chain stay named by it."""
    for node in pool_map.nodes:
        if node.wish == "lost":
            left = left_on(pool_map, node.id)
            here = {target.id for target in targets_of(pool_map, node.id)}
            if not left.members and not left.etcd and not any(
                    here & {*chain.targets, *chain.joining, *chain.goal} and not here >= {*chain.targets, *chain.goal}
                    for table in pool_map.tables for chain in table.chains):
                return node_removed(pool_map, node.id, now_ms)
    return pool_map


def on_host(pool_map: PoolMap, number: int, host_id: str) -> PoolMap:
    """The map in which the node runs on that host."""
    return _with(pool_map, number, host_id=host_id)


def listening_at(pool_map: PoolMap, number: int, keep: Callable[[str], bool]) -> PoolMap:
    """The map in which the processes of the node listen only at those endpoints that `keep` says; the same map when that is so.
    """
    def kept(one: S) -> S:
        if one.node != number or all(map(keep, one.endpoints)):
            return one
        return replace(one, endpoints=tuple(filter(keep, one.endpoints)))

    nodes = tuple(replace(node, endpoints=tuple(filter(keep, node.endpoints))) if node.id == number else node
                  for node in pool_map.nodes)
    targets = tuple(map(kept, pool_map.targets))
    shards = tuple(kept(replace(shard, standbys=tuple(map(kept, shard.standbys)))) for shard in pool_map.shards)
    if (nodes, targets, shards) == (pool_map.nodes, pool_map.targets, pool_map.shards):
        return pool_map
    return replace(pool_map, nodes=nodes, targets=targets, shards=shards)


def still_counted_on(pool_map: PoolMap) -> bool:
    """Whether a lost node is a member of etcd yet, or of a chain that others hold too: seconds, while etcd has most members."""
    for node in pool_map.nodes:
        if node.wish == "lost":
            here = {target.id for target in targets_of(pool_map, node.id)}
            if any(one.node == node.id for one in pool_map.etcd) or any(
                    here & {*chain.targets, *chain.joining} and not here >= set(chain.targets)
                    for table in pool_map.tables for chain in table.chains):
                return True
    return False


def in_rack(pool_map: PoolMap, number: int, rack: str) -> PoolMap:
    """The map in which the node stands in that rack (empty: in one of its own), and chains go where that wants them."""
    if len(rack) > 64 or not rack.isprintable():
        raise InvalidRequest("the name of a rack has at most 64 printable characters")
    if node_of(pool_map, number).rack == rack:
        return pool_map
    return with_goals(_with(pool_map, number, rack=rack))
