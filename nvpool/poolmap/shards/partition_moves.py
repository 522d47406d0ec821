"""Which partitions move between metadata shards, and how the pool map changes while they do: pure functions from a map to the
next one.

The map's `partitions` alone say who holds a partition; `moves` are goals: who is to hold it. A partition with a goal is served
by its holder until a single change of the map makes the other one its holder and takes the goal away. That change is asked for
by the holder, in its term, when the other has everything durably: so whoever asks in an older term, or after goals have
changed, changes nothing. Also where they have changed back since: the other may have thrown away what was no more to come.

Each function returns a map of the same epoch with what changed; `poolmap/chains/transitions.sealed` gives it the next one.
Called by `node/admin/shards` (wishes) and `node/coordination/shard_failover` (moves); no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from nvpool.core.errors import InUse, InvalidRequest, StaleEpoch
from nvpool.core.units import PARTITION_COUNT
from nvpool.poolmap.model import PartitionRange, PoolMap, Shard, ShardWanted
from nvpool.poolmap.shards.members import check_term, members, node_and_path, shard_of

BATCH_MAX = 128
"""Partitions that are handed over by one change of the map: a pool of one shard gets a second one in sixteen changes."""


def ranges_of(owners: Iterable[int]) -> tuple[PartitionRange, ...]:
    """Runs of partitions with the same owner; those of owner 0 are left out."""
    found: list[PartitionRange] = []
    for partition, owner in enumerate(owners):
        last = found[-1] if found else None
        if last is not None and last.shard == owner and last.first + last.count == partition:
            found[-1] = PartitionRange(last.first, last.count + 1, owner)
        elif owner:
            found.append(PartitionRange(partition, 1, owner))
    return tuple(found)


def goals(pool_map: PoolMap) -> list[int]:
    """Who is to hold each partition: its holder, where it does not move."""
    wanted = list(pool_map.shard_of_partition)
    for part in pool_map.moves:
        wanted[part.first:part.first + part.count] = [part.shard] * part.count
    return wanted


def planned(pool_map: PoolMap) -> PoolMap:
    """The map with goals by which every shard that stays holds an even share and those that leave hold nothing; the fewest
    partitions move that make it so. Goals that fit are kept, and what moves from one shard to another is in few runs.

    InvalidRequest: no shard stays.
    """
    staying = [shard.id for shard in pool_map.shards if shard.wish == "share"]
    if not staying:
        raise InvalidRequest("the last shard of a pool can not leave it")
    holders = pool_map.shard_of_partition
    held = Counter(holders)
    # Who has most already keeps the partition that does not divide: so nothing moves that need not.
    fullest = sorted(staying, key=lambda shard: (-held[shard], shard))
    each, over = divmod(PARTITION_COUNT, len(staying))
    quota = {shard: each + (place < over) for place, shard in enumerate(fullest)}
    room = {shard: max(0, quota[shard] - held[shard]) for shard in staying}
    surplus = {shard: held[shard] - quota.get(shard, 0) for shard in held if held[shard] > quota.get(shard, 0)}
    wanted = list(holders)
    for partition, goal in enumerate(goals(pool_map)):  # what is decided already, as far as it fits
        holder = holders[partition]
        if goal != holder and surplus.get(holder, 0) and room.get(goal, 0):
            wanted[partition] = goal
            surplus[holder] -= 1
            room[goal] -= 1
    takers = [shard for shard in sorted(room) if room[shard]]
    for partition in range(PARTITION_COUNT - 1, -1, -1):  # from the end: the root's partition moves only where it must
        holder = holders[partition]
        if wanted[partition] == holder and surplus.get(holder, 0):
            taker = takers[-1]
            wanted[partition] = taker
            surplus[holder] -= 1
            room[taker] -= 1
            if not room[taker]:
                takers.pop()
    moves = ranges_of(goal if goal != holder else 0 for goal, holder in zip(wanted, holders, strict=True))
    return pool_map if moves == pool_map.moves else replace(pool_map, moves=moves, moves_since=pool_map.epoch + 1)


def shard_added(pool_map: PoolMap, shard: Shard) -> PoolMap:
    """A new shard, which holds nothing yet, with goals that give it its share. InvalidRequest: the number is in use."""
    if shard.id in pool_map.shard_by_id:
        raise InvalidRequest(f"the pool has a shard {shard.id} already")
    wanted = tuple(one for one in pool_map.shards_wanted if one.id != shard.id)
    return planned(replace(pool_map, shards=(*pool_map.shards, shard), shards_wanted=wanted))


def node_for_shard(pool_map: PoolMap, own: int) -> int:
    """The node where a new shard is best: it has the fewest primaries, then the fewest members of shards; of equals `own`, or
    the first. Only nodes that stay and of which a target is up."""
    primaries = Counter(shard.node for shard in pool_map.shards) + Counter(one.node for one in pool_map.shards_wanted)
    everyone = Counter(node_and_path(shard, member)[0] for shard in pool_map.shards for member in members(shard))
    up = {target.node for target in pool_map.targets if target.state == "up" and not target.is_over}
    can = [node.id for node in pool_map.nodes if node.wish == "share" and node.id in up]
    return min(can, key=lambda node: (primaries[node], everyone[node], node != own, node), default=own)


def shard_wanted(pool_map: PoolMap, wanted: ShardWanted) -> PoolMap:
    """A shard more, which its node is to make. InvalidRequest: there is no such node, or it is to hold nothing."""
    node = pool_map.node_by_id.get(wanted.node)
    if node is None or node.wish != "share":
        raise InvalidRequest(f"node {wanted.node} {'is not in the pool' if node is None else 'is to hold nothing'}; "
                             f"`nvpool node ls POOL` lists them")
    if wanted.id <= shards_given(pool_map):
        raise InvalidRequest(f"a number {wanted.id} was given to a shard already")
    return replace(pool_map, shards_wanted=(*pool_map.shards_wanted, wanted))


def not_wanted(pool_map: PoolMap, shard_id: int) -> PoolMap:
    """Without the shard that was still to be made; its number is not given again."""
    wanted = tuple(one for one in pool_map.shards_wanted if one.id != shard_id)
    return replace(pool_map, shards_wanted=wanted, shards_given=shards_given(pool_map))


def wished(pool_map: PoolMap, shard_id: int, wish: str) -> PoolMap:
    """The shard is to leave the pool, or to stay after all, with goals for that. InvalidRequest: there is none, or it is the
    last."""
    shard = shard_of(pool_map, shard_id)
    if shard.wish == wish:
        return pool_map
    shards = tuple(replace(one, wish=wish) if one.id == shard_id else one for one in pool_map.shards)
    return planned(replace(pool_map, shards=shards))


def shard_removed(pool_map: PoolMap, shard_id: int) -> PoolMap:
    """The map without the shard; the same where it is gone already. InUse: it holds partitions, or was not to leave."""
    shard = pool_map.shard_by_id.get(shard_id)
    if shard is None:
        return pool_map
    if shard.wish != "remove" or not is_empty(pool_map, shard_id):
        raise InUse(f"shard {shard_id} holds partitions, or is not to leave the pool")
    return replace(pool_map, shards=tuple(one for one in pool_map.shards if one.id != shard_id),
                   shards_given=max(shards_given(pool_map), shard_id))


def shards_given(pool_map: PoolMap) -> int:
    """The highest number that a shard of the pool ever had: session numbers carry it, so none is given twice."""
    return max(pool_map.shards_given, *(shard.id for shard in (*pool_map.shards, *pool_map.shards_wanted)))


def is_empty(pool_map: PoolMap, shard_id: int) -> bool:
    """Whether it holds no partition and is to get none."""
    return not any(part.shard == shard_id for part in (*pool_map.partitions, *pool_map.moves))


def next_batch(pool_map: PoolMap, giver: int, not_yet: Collection[int] = (),
               count_max: int = BATCH_MAX) -> tuple[int, tuple[int, ...]]:
    """(taker, partitions) that the shard is to hand over next, all to one taker; (0, ()) when there are none. `not_yet`:
    partitions that have to wait."""
    holders = pool_map.shard_of_partition
    for part in pool_map.moves:
        found = [partition for partition in range(part.first, part.first + part.count)
                 if holders[partition] == giver and partition not in not_yet]
        if found:
            return part.shard, tuple(found[:count_max])
    return 0, ()


def left(pool_map: PoolMap, shard_id: int = 0) -> int:
    """Partitions that are to move: all, or those from and to one shard."""
    holders = pool_map.shard_of_partition
    return sum(shard_id in (0, part.shard, holders[partition])
               for part in pool_map.moves for partition in range(part.first, part.first + part.count))


def moved(pool_map: PoolMap, giver: int, term: int, taker: int, partitions: Collection[int], epoch: int = 0) -> PoolMap:
    """These partitions are the taker's from here on: it has all that is in them, durably. The same map where they are already
    and are not to move on. `epoch`: of the map by which the hand-over was begun; 0 where the giver is of a version that does
    not tell.

    StaleTerm   the giver's primary is another by now: what it changed since nobody has copied
    Unavailable this map does not know its term yet
    StaleEpoch  they are not the giver's to give, or not the taker's to get, or were not for a while: fetch the map
    """
    holders, wanted = list(pool_map.shard_of_partition), goals(pool_map)
    if taker in pool_map.shard_by_id and all(holders[p] == wanted[p] == taker for p in partitions):
        return pool_map
    shard = shard_of(pool_map, giver)
    check_term(shard, term)
    if taker not in pool_map.shard_by_id or any(holders[p] != giver or wanted[p] != taker for p in partitions):
        raise StaleEpoch(f"the partitions are not to move from shard {giver} to shard {taker}")
    if epoch and epoch < pool_map.moves_since:
        raise StaleEpoch(f"what was begun by map {epoch} may have been given up: moves are those of {pool_map.moves_since}")
    for partition in partitions:
        holders[partition] = taker
    return replace(pool_map, partitions=ranges_of(holders),
                   moves=ranges_of(goal if goal != holder else 0 for goal, holder in zip(wanted, holders, strict=True)))
