"""Placement of shard members: on another node first, in another rack first, on another drive.

Pure functions from a map to the next one. `next_step` brings each shard one step closer to the desired number
of standbys in good places. A place is good while node and drive should hold their share (desired state
"share"). A new standby is added before an old one is removed, and an old one is removed only when all
remaining ones are up. So redundancy is never reduced on the way, and after an interruption the next call
continues. Called by node/coordination/shard_members on the pool's leader.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.poolmap.model import Drive, PoolMap, Shard, StandbyMember, changed
from nvpool.poolmap.shards import members as shard_members
from nvpool.poolmap.shards.members import members, node_and_path, shard_of, standby_added, standby_removed


class ShardLocation(NamedTuple):
    """A drive of a node; drive 0 is the pool directory of the node."""

    node: int
    drive: int


def place_of(pool_map: PoolMap, shard: Shard, member: int) -> ShardLocation:
    """Return the place of a member: beside the store of a drive, or in the pool directory of its node."""
    node, path = node_and_path(shard, member)
    # Of several drives with one path, only the last may still be present.
    for drive in reversed(pool_map.drives):
        if (
            path
            and drive.node == node
            and (path == drive.path or os.path.dirname(path) == os.path.dirname(drive.path))
        ):
            return ShardLocation(node, drive.id)
    return ShardLocation(node, 0)


def store_beside(pool_map: PoolMap, shard: Shard, member: int) -> str:
    """Return the path of the store beside which a member's records are.

    The path is empty if the records are in the pool directory.
    """
    drive = place_of(pool_map, shard, member).drive
    path = node_and_path(shard, member)[1]
    found = _drive(pool_map, drive).path if drive else ""
    return found if found and os.path.dirname(found) == os.path.dirname(path) else ""


def beside(pool_map: PoolMap, drive: int) -> list[int]:
    """Return the shards with a member on the drive."""
    return [
        shard.id
        for shard in pool_map.shards
        if any(place_of(pool_map, shard, member).drive == drive for member in members(shard))
    ]


def only_beside(pool_map: PoolMap, drive: int) -> list[int]:
    """Return the shards whose complete members are all on the drive."""
    return [
        shard.id
        for shard in pool_map.shards
        if all(
            place_of(pool_map, shard, member).drive == drive
            for member in (
                shard.member,
                *(standby.member for standby in shard.standbys if standby.state == "up"),
            )
        )
    ]


def good_places(pool_map: PoolMap, serving: Collection[int] | None = None) -> list[ShardLocation]:
    """Return the drives beside which a standby may be created.

    Their nodes stay, and their targets are up and, if `serving` is given, serving.
    """
    stays = {node.id for node in pool_map.nodes if node.desired_state == "share"}
    return [
        ShardLocation(target.node, target.drive)
        for target in pool_map.targets
        if target.node in stays
        and target.desired_state == "share"
        and target.state == "up"
        and (serving is None or target.id in serving)
    ]


def misplaced(pool_map: PoolMap, shard: Shard) -> list[int]:
    """Return the members on a node or drive that should be emptied, or is lost."""
    return [member for member in members(shard) if not _stays(pool_map, place_of(pool_map, shard, member))]


def _stays(pool_map: PoolMap, place: ShardLocation) -> bool:
    if pool_map.node_by_id[place.node].desired_state != "share":
        return False
    targets = [target for target in pool_map.targets if target.node == place.node and target.state != "gone"]
    if place.drive:
        return any(target.drive == place.drive and target.desired_state == "share" for target in targets)
    return not targets or not all(target.is_over or target.desired_state == "away" for target in targets)


def wanted(shard: Shard) -> int:
    return len(shard.standbys) if shard.standbys_wanted is None else shard.standbys_wanted


def hands_over(pool_map: PoolMap, shard: Shard) -> bool:
    """Return whether the primary should stop so that a standby takes over.

    This is the case if the primary has to leave its place and a well-placed standby is up, or if the
    primary's node has at least two primaries more than the node of the next primary.
    """
    bad = misplaced(pool_map, shard)
    if shard.member in bad:
        return any(standby.state == "up" and standby.member not in bad for standby in shard.standbys)
    return shard.id == _to_spread(pool_map)


def _to_spread(pool_map: PoolMap) -> int:
    """Return the shard whose primary should move next to even out primaries over nodes; 0 for none.

    Nothing moves while another change is in progress. One primary moves at a time, and each move makes the
    distribution more even, so the process ends.
    """
    if pool_map.moves or any(
        misplaced(pool_map, shard) or any(standby.state != "up" for standby in shard.standbys)
        for shard in pool_map.shards
    ):
        return 0
    primaries = Counter(shard.node for shard in pool_map.shards)
    for shard in sorted(pool_map.shards, key=lambda shard: (-primaries[shard.node], shard.id)):
        if shard.standbys and (promoted := shard_members.primary_lost(pool_map, shard.id)) is not None:
            follower = shard_of(promoted, shard.id)
            if primaries[follower.node] + 2 <= primaries[shard.node]:
                return shard.id
    return 0


def next_step(
    pool_map: PoolMap, serving: Collection[int] | None = None, stuck: Collection[tuple[int, int]] = ()
) -> PoolMap:
    """Return the map in which one shard is a step closer to its desired state; the same map if nothing can be
    done.

    `serving` are targets that are known to serve. `stuck` are (shard, member) of standbys that cannot be
    filled at their place; each is replaced like a standby on a lost drive, as long as there is another place.
    """
    places = good_places(pool_map, serving)
    for shard in pool_map.shards:
        new = _step(
            pool_map,
            shard,
            places,
            {
                standby.member
                for standby in shard.standbys
                if standby.state == "syncing" and (shard.id, standby.member) in stuck
            },
        )
        if new is not pool_map:
            # The first step fixes the desired number at the current one.
            return shard_members.standbys_wanted(new, shard.id, wanted(shard))
    return pool_map


def _step(
    pool_map: PoolMap, shard: Shard, places: list[ShardLocation], stuck: Collection[int] = ()
) -> PoolMap:
    bad = {*misplaced(pool_map, shard), *stuck}
    staying = [standby for standby in shard.standbys if standby.member not in bad]
    leaving = [standby for standby in shard.standbys if standby.member in bad]
    need = max(wanted(shard), int(shard.member in bad))
    if len(staying) < need:
        return _added(pool_map, shard, places)
    if any(standby.state != "up" for standby in staying):
        if len(staying) > need and not leaving:
            return _lessened(pool_map, shard, staying)
        return pool_map
    if shard.member in bad:
        return pool_map  # the primary hands over next
    if leaving:
        return standby_removed(pool_map, shard.id, leaving[0].member)
    if len(staying) > need:
        return _lessened(pool_map, shard, staying)
    return _improved(pool_map, shard, places)


def _spread(pool_map: PoolMap, places: Iterable[ShardLocation]) -> tuple[int, int]:
    nodes = {place.node for place in places}
    return len({_rack(pool_map, node) for node in nodes}), len(nodes)


def _rack(pool_map: PoolMap, node: int) -> str:
    return pool_map.node_by_id[node].rack or f"node {node}"


def _chosen(pool_map: PoolMap, shard: Shard, places: list[ShardLocation]) -> ShardLocation | None:
    """Return the best place for one more member: the widest spread, then the fewest members of any shard."""
    taken = [place_of(pool_map, shard, member) for member in members(shard)]
    everywhere = Counter(
        place_of(pool_map, one, member) for one in pool_map.shards for member in members(one)
    )
    on_node: Counter[int] = Counter()
    for place, count in everywhere.items():
        on_node[place.node] += count
    bad = set(misplaced(pool_map, shard))
    good = [place_of(pool_map, shard, member) for member in members(shard) if member not in bad]

    def rank(place: ShardLocation) -> tuple[int, int, int, int, ShardLocation]:
        racks, nodes = _spread(pool_map, [*good, place])
        return -racks, -nodes, on_node[place.node], everywhere[place], place

    return min((place for place in places if place not in taken), key=rank, default=None)


def _added(pool_map: PoolMap, shard: Shard, places: list[ShardLocation]) -> PoolMap:
    place = _chosen(pool_map, shard, places)
    if place is None:
        return pool_map
    return standby_added(
        pool_map,
        shard.id,
        StandbyMember(max(members(shard)) + 1, place.node, (), path=_drive(pool_map, place.drive).path),
    )


def _drive(pool_map: PoolMap, number: int) -> Drive:
    return next(drive for drive in pool_map.drives if drive.id == number)


def _lessened(pool_map: PoolMap, shard: Shard, staying: list[StandbyMember]) -> PoolMap:
    """Remove the standby that adds least to the spread.

    The standby stays while it is up and another remaining standby is not.
    """

    def left(without: StandbyMember) -> list[StandbyMember]:
        return [standby for standby in staying if standby is not without]

    def rank(standby: StandbyMember) -> tuple[tuple[int, int], bool, int]:
        places = [
            place_of(pool_map, shard, member)
            for member in (shard.member, *(one.member for one in left(standby)))
        ]
        return _spread(pool_map, places), standby.state != "up", standby.member

    going = max(staying, key=rank)
    if going.state == "up" and any(standby.state != "up" for standby in left(going)):
        return pool_map
    return standby_removed(pool_map, shard.id, going.member)


def _improved(pool_map: PoolMap, shard: Shard, places: list[ShardLocation]) -> PoolMap:
    """Add a standby if this lets the members spread over more racks or nodes.

    A later step removes another standby when the new one is up.
    """
    place = _chosen(pool_map, shard, places)
    if place is None or not shard.standbys:
        return pool_map
    now = [place_of(pool_map, shard, member) for member in members(shard)]
    best = max(
        _spread(pool_map, [*(one for at, one in enumerate(now) if at != gone), place])
        for gone in range(1, len(now))
    )
    return _added(pool_map, shard, places) if best > _spread(pool_map, now) else pool_map


# -- admin commands --------------------------------------------------------------------------------------


def check_places(pool_map: PoolMap, serving: Collection[int] | None = None) -> None:
    """Raise InvalidRequest, with the remedy, if a shard loses places that it needs."""
    for shard in pool_map.shards:
        if misplaced(pool_map, shard):
            check_room_for(pool_map, shard, wanted(shard), serving)


def check_room_for(
    pool_map: PoolMap, shard: Shard, count: int, serving: Collection[int] | None = None
) -> None:
    """Raise InvalidRequest, with the remedy, if there are too few places: each member needs its own drive."""
    bad = misplaced(pool_map, shard)
    here = {place_of(pool_map, shard, member) for member in members(shard) if member not in bad}
    most = len(here | set(good_places(pool_map, serving))) - 1
    if count > most:
        remedy = f", or have fewer: nvpool shard standbys POOL {shard.id} {most}" if most >= 0 else ""
        raise InvalidRequest(
            f"shard {shard.id} cannot have {count} standby{'' if count == 1 else 's'}: each of its members "
            f"has a drive of its own, and there are {most + 1} that can be used; add a drive{remedy}"
        )


def moved_off(pool_map: PoolMap, node: int) -> bool:
    """Return whether no member of any shard is on the node."""
    return not any(
        node_and_path(shard, member)[0] == node for shard in pool_map.shards for member in members(shard)
    )


def without_member(pool_map: PoolMap, shard_id: int, node: int) -> PoolMap:
    """Remove the standbys of the shard on a lost node."""
    for standby in shard_of(pool_map, shard_id).standbys:
        if standby.node == node:
            pool_map = standby_removed(pool_map, shard_id, standby.member)
    return pool_map


def with_node(pool_map: PoolMap, number: int, **fields: Any) -> PoolMap:
    """Return the map with `fields` of the node replaced; InvalidRequest if there is no such node."""
    if number not in pool_map.node_by_id:
        raise InvalidRequest(f"there is no node {number}; `nvpool node ls POOL` lists them")
    return changed(
        pool_map,
        nodes=tuple(replace(node, **fields) if node.id == number else node for node in pool_map.nodes),
    )
