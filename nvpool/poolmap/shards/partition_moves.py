"""Partition migration between metadata shards: goals, and the hand-over in the pool map.

Pure functions from a map to the next one. Only `partitions` in the map defines the owner of a partition;
`moves` are goals that name the destination. The owner serves a partition until a single map change makes the
destination the owner and removes the goal. The source requests that change, in its current term, when the
destination has all records durably. A request from an older term, or from before the goals last changed,
changes nothing. This is true even if the goals have been restored since: the destination may have discarded
the records in between.

Each function returns a map of the same epoch with the changes; `poolmap/chains/transitions.sealed` assigns
the next epoch. Used by `node/admin/shards` (admin commands) and `node/coordination/shard_failover`
(hand-overs); no I/O, no clock.
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
"""Partitions handed over by one map change: a one-shard pool fills its second shard with sixteen changes."""


def ranges_of(owners: Iterable[int]) -> tuple[PartitionRange, ...]:
    """Return runs of partitions with the same owner, without those of owner 0."""
    found: list[PartitionRange] = []
    for partition, owner in enumerate(owners):
        last = found[-1] if found else None
        if last is not None and last.shard == owner and last.first + last.count == partition:
            found[-1] = PartitionRange(last.first, last.count + 1, owner)
        elif owner:
            found.append(PartitionRange(partition, 1, owner))
    return tuple(found)


def goals(pool_map: PoolMap) -> list[int]:
    """Return the desired owner of each partition: the current owner if the partition does not migrate."""
    wanted = list(pool_map.shard_of_partition)
    for part in pool_map.moves:
        wanted[part.first : part.first + part.count] = [part.shard] * part.count
    return wanted


def planned(pool_map: PoolMap) -> PoolMap:
    """Return the map with new goals: an even share for each staying shard, nothing for leaving ones.

    The number of migrated partitions is minimal. Existing goals are kept if they fit, and the partitions that
    migrate between two shards form few runs.

    InvalidRequest: no shard stays.
    """
    staying = [shard.id for shard in pool_map.shards if shard.desired_state == "share"]
    if not staying:
        raise InvalidRequest("the last shard of a pool cannot leave it")
    holders = pool_map.shard_of_partition
    held = Counter(holders)
    # The fullest shards get the remainder of the division, so nothing migrates without need.
    fullest = sorted(staying, key=lambda shard: (-held[shard], shard))
    each, over = divmod(PARTITION_COUNT, len(staying))
    quota = {shard: each + (place < over) for place, shard in enumerate(fullest)}
    room = {shard: max(0, quota[shard] - held[shard]) for shard in staying}
    surplus = {
        shard: held[shard] - quota.get(shard, 0) for shard in held if held[shard] > quota.get(shard, 0)
    }
    wanted = list(holders)
    for partition, goal in enumerate(goals(pool_map)):  # keep existing goals that fit
        holder = holders[partition]
        if goal != holder and surplus.get(holder, 0) and room.get(goal, 0):
            wanted[partition] = goal
            surplus[holder] -= 1
            room[goal] -= 1
    destinations = [shard for shard in sorted(room) if room[shard]]
    # From the end, so that the root's partition migrates only if necessary.
    for partition in range(PARTITION_COUNT - 1, -1, -1):
        holder = holders[partition]
        if wanted[partition] == holder and surplus.get(holder, 0):
            destination = destinations[-1]
            wanted[partition] = destination
            surplus[holder] -= 1
            room[destination] -= 1
            if not room[destination]:
                destinations.pop()
    moves = ranges_of(goal if goal != holder else 0 for goal, holder in zip(wanted, holders, strict=True))
    return (
        pool_map
        if moves == pool_map.moves
        else replace(pool_map, moves=moves, moves_since=pool_map.epoch + 1)
    )


def shard_added(pool_map: PoolMap, shard: Shard) -> PoolMap:
    """Add a shard without partitions, and set goals that give it its share.

    InvalidRequest: the shard number is in use.
    """
    if shard.id in pool_map.shard_by_id:
        raise InvalidRequest(f"the pool has a shard {shard.id} already")
    wanted = tuple(one for one in pool_map.shards_wanted if one.id != shard.id)
    return planned(replace(pool_map, shards=(*pool_map.shards, shard), shards_wanted=wanted))


def node_for_shard(pool_map: PoolMap, own: int) -> int:
    """Return the best node for a new shard.

    Candidates are nodes that stay and have a target that is up. The best one has the fewest primaries, then
    the fewest shard members; of equals `own`, or the lowest number.
    """
    primaries = Counter(shard.node for shard in pool_map.shards) + Counter(
        one.node for one in pool_map.shards_wanted
    )
    everyone = Counter(
        node_and_path(shard, member)[0] for shard in pool_map.shards for member in members(shard)
    )
    up = {target.node for target in pool_map.targets if target.state == "up" and not target.is_over}
    can = [node.id for node in pool_map.nodes if node.desired_state == "share" and node.id in up]
    return min(can, key=lambda node: (primaries[node], everyone[node], node != own, node), default=own)


def shard_wanted(pool_map: PoolMap, wanted: ShardWanted) -> PoolMap:
    """Add a shard that its node has to create.

    InvalidRequest: the node does not exist or should hold nothing, or the shard number was used before.
    """
    node = pool_map.node_by_id.get(wanted.node)
    if node is None or node.desired_state != "share":
        raise InvalidRequest(
            f"node {wanted.node} {'is not in the pool' if node is None else 'is to hold nothing'}; "
            f"`nvpool node ls POOL` lists them"
        )
    if wanted.id <= shards_given(pool_map):
        raise InvalidRequest(f"a number {wanted.id} was given to a shard already")
    return replace(pool_map, shards_wanted=(*pool_map.shards_wanted, wanted))


def not_wanted(pool_map: PoolMap, shard_id: int) -> PoolMap:
    """Cancel a shard that was not created yet; its number is not reused."""
    wanted = tuple(one for one in pool_map.shards_wanted if one.id != shard_id)
    return replace(pool_map, shards_wanted=wanted, shards_given=shards_given(pool_map))


def with_desired_state(pool_map: PoolMap, shard_id: int, desired_state: str) -> PoolMap:
    """Set whether the shard leaves the pool, and set the goals.

    InvalidRequest: the shard is unknown or the last one.
    """
    shard = shard_of(pool_map, shard_id)
    if shard.desired_state == desired_state:
        return pool_map
    shards = tuple(
        replace(one, desired_state=desired_state) if one.id == shard_id else one for one in pool_map.shards
    )
    return planned(replace(pool_map, shards=shards))


def shard_removed(pool_map: PoolMap, shard_id: int) -> PoolMap:
    """Remove a shard; return the same map if it is gone already.

    InUse: the shard owns partitions, or should not leave.
    """
    shard = pool_map.shard_by_id.get(shard_id)
    if shard is None:
        return pool_map
    if shard.desired_state != "remove" or not is_empty(pool_map, shard_id):
        raise InUse(f"shard {shard_id} holds partitions, or is not to leave the pool")
    return replace(
        pool_map,
        shards=tuple(one for one in pool_map.shards if one.id != shard_id),
        shards_given=max(shards_given(pool_map), shard_id),
    )


def shards_given(pool_map: PoolMap) -> int:
    """Return the highest shard number ever used: session numbers contain it, so shard numbers are not
    reused."""
    return max(
        pool_map.shards_given,
        *(shard.id for shard in pool_map.shards),
        *(shard.id for shard in pool_map.shards_wanted),
    )


def is_empty(pool_map: PoolMap, shard_id: int) -> bool:
    """Return whether the shard owns no partition and will get none."""
    return not any(part.shard == shard_id for part in (*pool_map.partitions, *pool_map.moves))


def next_batch(
    pool_map: PoolMap, source: int, not_yet: Collection[int] = (), count_max: int = BATCH_MAX
) -> tuple[int, tuple[int, ...]]:
    """Return (destination, partitions) that the source hands over next, all to one destination.

    Returns (0, ()) if there are none. Partitions in `not_yet` have to wait.
    """
    holders = pool_map.shard_of_partition
    for part in pool_map.moves:
        found = [
            partition
            for partition in range(part.first, part.first + part.count)
            if holders[partition] == source and partition not in not_yet
        ]
        if found:
            return part.shard, tuple(found[:count_max])
    return 0, ()


def left(pool_map: PoolMap, shard_id: int = 0) -> int:
    """Return the number of partitions still to migrate: all, or those from and to one shard."""
    holders = pool_map.shard_of_partition
    return sum(
        shard_id in (0, part.shard, holders[partition])
        for part in pool_map.moves
        for partition in range(part.first, part.first + part.count)
    )


def moved(
    pool_map: PoolMap, source: int, term: int, destination: int, partitions: Collection[int], epoch: int = 0
) -> PoolMap:
    """Make the destination the owner of these partitions, of which it has all records durably.

    Returns the same map if the destination owns them already and they have no other goal. `epoch` is the
    epoch of the map under which the hand-over began; 0 if the source runs a version that does not report it.

    StaleTerm: the source has another primary, whose changes have not been copied.
    Unavailable: this map does not know the term yet.
    StaleEpoch: the source is not the owner, the destination is not the goal, or the goals have changed; fetch
    the map.
    """
    holders, wanted = list(pool_map.shard_of_partition), goals(pool_map)
    if destination in pool_map.shard_by_id and all(
        holders[p] == wanted[p] == destination for p in partitions
    ):
        return pool_map
    shard = shard_of(pool_map, source)
    check_term(shard, term)
    if destination not in pool_map.shard_by_id or any(
        holders[p] != source or wanted[p] != destination for p in partitions
    ):
        raise StaleEpoch(f"the partitions are not to move from shard {source} to shard {destination}")
    if epoch and epoch < pool_map.moves_since:
        raise StaleEpoch(
            f"what was begun by map {epoch} may have been given up: moves are those of {pool_map.moves_since}"
        )
    for partition in partitions:
        holders[partition] = destination
    return replace(
        pool_map,
        partitions=ranges_of(holders),
        moves=ranges_of(goal if goal != holder else 0 for goal, holder in zip(wanted, holders, strict=True)),
    )
