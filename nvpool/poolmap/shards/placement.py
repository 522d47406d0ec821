"""Where the members of a shard shall lie: another node first, another rack first, another drive.

Pure functions from a map to the next. `next_step` brings each shard one step nearer to what is wanted of it: so many standbys
in good places. A place is good while nothing is wished of its node and drive but their share. A new standby is added before an
old one goes, and an old one goes only when all that stay are up; so what is protected stays so on the way, and whatever
interrupts it, the next look at the map goes on. Who asks: node/coordination/shard_members, for who leads the pool.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.poolmap.model import Drive, PoolMap, Shard, Standby, changed
from nvpool.poolmap.shards import members as shard_members
from nvpool.poolmap.shards.members import members, node_and_path, shard_of, standby_added, standby_removed


class Place(NamedTuple):
    """A drive of a node; 0: the pool's directory there."""

    node: int
    drive: int


def place_of(pool_map: PoolMap, shard: Shard, member: int) -> Place:
    """Where a member lies. Beside the store of a drive, or in the pool's directory of its node."""
    node, path = node_and_path(shard, member)
    for drive in reversed(pool_map.drives):  # of several at a path the last is the one that may be there still
        if path and drive.node == node and (path == drive.path or os.path.dirname(path) == os.path.dirname(drive.path)):
            return Place(node, drive.id)
    return Place(node, 0)


def store_beside(pool_map: PoolMap, shard: Shard, member: int) -> str:
    """Path of the store beside which a member's records lie; empty: they are in the pool's directory."""
    drive = place_of(pool_map, shard, member).drive
    path = node_and_path(shard, member)[1]
    found = _drive(pool_map, drive).path if drive else ""
    return found if found and os.path.dirname(found) == os.path.dirname(path) else ""


def beside(pool_map: PoolMap, drive: int) -> list[int]:
    """Shards of which a member lies on the drive."""
    return [shard.id for shard in pool_map.shards
            if any(place_of(pool_map, shard, member).drive == drive for member in members(shard))]


def only_beside(pool_map: PoolMap, drive: int) -> list[int]:
    """Shards of which no member that has everything lies anywhere else."""
    return [shard.id for shard in pool_map.shards if all(
        place_of(pool_map, shard, member).drive == drive
        for member in (shard.member, *(standby.member for standby in shard.standbys if standby.state == "up")))]


def good_places(pool_map: PoolMap, serving: Collection[int] | None = None) -> list[Place]:
    """Drives beside which a standby may be made: of nodes that stay, their target up and, where that is known, serving."""
    stays = {node.id for node in pool_map.nodes if node.wish == "share"}
    return [Place(target.node, target.drive) for target in pool_map.targets
            if target.node in stays and target.wish == "share" and target.state == "up"
            and (serving is None or target.id in serving)]


def misplaced(pool_map: PoolMap, shard: Shard) -> list[int]:
    """Members whose node or drive is to be given up, or is given up for lost."""
    return [member for member in members(shard) if not _stays(pool_map, place_of(pool_map, shard, member))]


def _stays(pool_map: PoolMap, place: Place) -> bool:
    if pool_map.node_by_id[place.node].wish != "share":
        return False
    targets = [target for target in pool_map.targets if target.node == place.node and target.state != "gone"]
    if place.drive:
        return any(target.drive == place.drive and target.wish == "share" for target in targets)
    return not targets or not all(target.is_over or target.wish == "away" for target in targets)


def wanted(shard: Shard) -> int:
    return len(shard.standbys) if shard.standbys_wanted is None else shard.standbys_wanted


def hands_over(pool_map: PoolMap, shard: Shard) -> bool:
    """Whether the primary shall end so that a standby follows it: it is where it shall not stay, and one is up where it may; or
    its node has two primaries more than that of who follows."""
    bad = misplaced(pool_map, shard)
    if shard.member in bad:
        return any(standby.state == "up" and standby.member not in bad for standby in shard.standbys)
    return shard.id == _to_spread(pool_map)


def _to_spread(pool_map: PoolMap) -> int:
    """The shard whose primary hands over next so that nodes have as many primaries as one another; 0: none, or not while
    anything else is under way. One after the other, and each makes it more even: it ends."""
    if pool_map.moves or any(misplaced(pool_map, shard) or any(standby.state != "up" for standby in shard.standbys)
                             for shard in pool_map.shards):
        return 0
    primaries = Counter(shard.node for shard in pool_map.shards)
    for shard in sorted(pool_map.shards, key=lambda shard: (-primaries[shard.node], shard.id)):
        if shard.standbys:
            follower = shard_of(shard_members.primary_lost(pool_map, shard.id), shard.id)
            if primaries[follower.node] + 2 <= primaries[shard.node]:
                return shard.id
    return 0


def next_step(pool_map: PoolMap, serving: Collection[int] | None = None,
              stuck: Collection[tuple[int, int]] = ()) -> PoolMap:
    """The map in which one shard is a step nearer to what it shall have; the same where all are, or have to wait. `serving`:
    targets that are known to. `stuck`: (shard, member) of standbys that can not be filled where they are; each is replaced like
    one on a drive that is lost, as long as there is another place."""
    places = good_places(pool_map, serving)
    for shard in pool_map.shards:
        new = _step(pool_map, shard, places, {standby.member for standby in shard.standbys if standby.state == "syncing"
                                              and (shard.id, standby.member) in stuck})
        if new is not pool_map:
            return shard_members.standbys_wanted(new, shard.id, wanted(shard))  # before the first step: as many as there were
    return pool_map


def _step(pool_map: PoolMap, shard: Shard, places: list[Place], stuck: Collection[int] = ()) -> PoolMap:
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
        return pool_map  # it hands over next
    if leaving:
        return standby_removed(pool_map, shard.id, leaving[0].member)
    if len(staying) > need:
        return _lessened(pool_map, shard, staying)
    return _improved(pool_map, shard, places)


def _spread(pool_map: PoolMap, places: Iterable[Place]) -> tuple[int, int]:
    nodes = {place.node for place in places}
    return len({_rack(pool_map, node) for node in nodes}), len(nodes)


def _rack(pool_map: PoolMap, node: int) -> str:
    return pool_map.node_by_id[node].rack or f"node {node}"


def _chosen(pool_map: PoolMap, shard: Shard, places: list[Place]) -> Place | None:
    """The best place for one more member: where it spreads them most, then where there are fewest of any shard."""
    taken = [place_of(pool_map, shard, member) for member in members(shard)]
    everywhere = Counter(place_of(pool_map, one, member) for one in pool_map.shards for member in members(one))
    on_node = Counter()
    for place, count in everywhere.items():
        on_node[place.node] += count
    bad = set(misplaced(pool_map, shard))
    good = [place_of(pool_map, shard, member) for member in members(shard) if member not in bad]

    def rank(place: Place):
        racks, nodes = _spread(pool_map, [*good, place])
        return -racks, -nodes, on_node[place.node], everywhere[place], place

    return min((place for place in places if place not in taken), key=rank, default=None)


def _added(pool_map: PoolMap, shard: Shard, places: list[Place]) -> PoolMap:
    place = _chosen(pool_map, shard, places)
    if place is None:
        return pool_map
    return standby_added(pool_map, shard.id, Standby(max(members(shard)) + 1, place.node, (),
                                                     path=_drive(pool_map, place.drive).path))


def _drive(pool_map: PoolMap, number: int) -> Drive:
    return next(drive for drive in pool_map.drives if drive.id == number)


def _lessened(pool_map: PoolMap, shard: Shard, staying: list[Standby]) -> PoolMap:
    """Without the standby that adds least to the spread. Where it is needed until another is up, not yet."""
    def left(without: Standby) -> list[Standby]:
        return [standby for standby in staying if standby is not without]

    def rank(standby: Standby):
        places = [place_of(pool_map, shard, member) for member in (shard.member, *(one.member for one in left(standby)))]
        return _spread(pool_map, places), standby.state != "up", standby.member

    going = max(staying, key=rank)
    if going.state == "up" and any(standby.state != "up" for standby in left(going)):
        return pool_map
    return standby_removed(pool_map, shard.id, going.member)


def _improved(pool_map: PoolMap, shard: Shard, places: list[Place]) -> PoolMap:
    """With a standby more where the members could be on more racks or nodes than they are: another goes when it is up."""
    place = _chosen(pool_map, shard, places)
    if place is None or not shard.standbys:
        return pool_map
    now = [place_of(pool_map, shard, member) for member in members(shard)]
    best = max(_spread(pool_map, [*(one for at, one in enumerate(now) if at != gone), place]) for gone in range(1, len(now)))
    return _added(pool_map, shard, places) if best > _spread(pool_map, now) else pool_map


# -- wishes ----------------------------------------------------------------------------------------------------------------


def check_places(pool_map: PoolMap, serving: Collection[int] | None = None) -> None:
    """InvalidRequest, with the remedy, where a shard can not have what is wanted of it because some of its places are to go."""
    for shard in pool_map.shards:
        if misplaced(pool_map, shard):
            check_room_for(pool_map, shard, wanted(shard), serving)


def check_room_for(pool_map: PoolMap, shard: Shard, count: int, serving: Collection[int] | None = None) -> None:
    """InvalidRequest, with the remedy, where there is no place for so many standbys: one member lies on a drive."""
    bad = misplaced(pool_map, shard)
    here = {place_of(pool_map, shard, member) for member in members(shard) if member not in bad}
    most = len(here | set(good_places(pool_map, serving))) - 1
    if count > most:
        remedy = f", or have fewer: nvpool shard standbys POOL {shard.id} {most}" if most >= 0 else ""
        raise InvalidRequest(f"shard {shard.id} can not have {count} standby{'' if count == 1 else 's'}: each of its members "
                             f"has a drive of its own, and there are {most + 1} that can be used; add a drive{remedy}")


def moved_off(pool_map: PoolMap, node: int) -> bool:
    """Whether no member of any shard is on the node."""
    return not any(node_and_path(shard, member)[0] == node for shard in pool_map.shards for member in members(shard))


def without_member(pool_map: PoolMap, shard_id: int, node: int) -> PoolMap:
    """Without the standbys of the shard on a node that is lost."""
    for standby in shard_of(pool_map, shard_id).standbys:
        if standby.node == node:
            pool_map = standby_removed(pool_map, shard_id, standby.member)
    return pool_map


def with_node(pool_map: PoolMap, number: int, **fields) -> PoolMap:
    """`fields` of the node replaced. InvalidRequest: there is none."""
    if number not in pool_map.node_by_id:
        raise InvalidRequest(f"there is no node {number}; `nvpool node ls POOL` lists them")
    return changed(pool_map, nodes=tuple(replace(node, **fields) if node.id == number else node for node in pool_map.nodes))
