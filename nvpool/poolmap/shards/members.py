"""Members of a metadata shard: changes of primary and standbys in the pool map.

Pure functions from a map to the next one. The primary of a term requests that a complete standby becomes
"up", and that a silent standby is not "up" any more. node/coordination/shard_failover watches the leases and
requests a new primary when the primary has been silent for its whole lease or its process has ended. Together
with kv/replication/primary they guarantee two things: of two primaries, only the later one can acknowledge a
change; and every member that is "up" has all acknowledged changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import msgspec

from nvpool.core.errors import InvalidRequest, StaleMember, StaleTerm, Unavailable
from nvpool.core.units import PARTITION_COUNT
from nvpool.poolmap.model import PartitionRange, PoolMap, Shard, StandbyMember, changed

STANDBYS_MAX = 4
SHARDS_MAX = 64
"""Maximum number of shards of a new pool: as many processes, which use one core each."""


def dealt(count: int) -> tuple[PartitionRange, ...]:
    """Divide the partitions over `count` new shards, numbered 1 to `count`: equal shares, one range each."""
    firsts = [number * PARTITION_COUNT // count for number in range(count + 1)]
    return tuple(
        PartitionRange(first, behind - first, number)
        for number, (first, behind) in enumerate(itertools.pairwise(firsts), 1)
    )


_MEMBERS_MAX = 8
"""Maximum number of standbys, including those that move to another place."""


def members(shard: Shard) -> tuple[int, ...]:
    """Return the members of a shard, the primary first."""
    return (shard.member, *(standby.member for standby in shard.standbys))


def process_name(shard: int, member: int) -> str:
    """Return the name of a member's daemon, lock, log and socket."""
    return f"meta-{shard}.{member}" if member else f"meta-{shard}"


def node_and_path(shard: Shard, member: int) -> tuple[int, str]:
    """Return node and path of a member's records; an empty path means the pool directory.

    InvalidRequest: the shard has no such member.
    """
    found = _standby(shard, member)
    if member == shard.member:
        return shard.node, shard.path
    if found is None:
        raise InvalidRequest(f"shard {shard.id} has no member {member}")
    return found.node, found.path


def endpoints_of(shard: Shard, member: int) -> tuple[str, ...]:
    """Return the endpoints of a member; empty if the shard has no such member."""
    found = _standby(shard, member)
    return shard.endpoints if member == shard.member else found.endpoints if found is not None else ()


def standby_added(pool_map: PoolMap, shard_id: int, standby: StandbyMember) -> PoolMap:
    """Add a standby without records; InvalidRequest if it exists already, or there are too many."""
    shard = shard_of(pool_map, shard_id)
    if standby.member in members(shard) or len(shard.standbys) >= _MEMBERS_MAX:
        raise InvalidRequest(
            f"shard {shard_id} has member {standby.member} already, or {_MEMBERS_MAX} standbys"
        )
    standby = msgspec.structs.replace(standby, state="syncing")
    return _with(pool_map, shard, standbys=(*shard.standbys, standby))


def standby_removed(pool_map: PoolMap, shard_id: int, member: int) -> PoolMap:
    """Remove a standby; InvalidRequest if the shard has no such standby."""
    shard = shard_of(pool_map, shard_id)
    if _standby(shard, member) is None:
        raise InvalidRequest(f"shard {shard_id} has no standby {member}")
    return _with(pool_map, shard, standbys=tuple(other for other in shard.standbys if other.member != member))


def standby_made(
    pool_map: PoolMap, shard_id: int, member: int, path: str, endpoints: tuple[str, ...]
) -> PoolMap:
    """Record path and endpoints of a standby that its node creates.

    InvalidRequest: the standby is unknown or was created before.
    """
    shard = shard_of(pool_map, shard_id)
    found = _standby(shard, member)
    if found is None or found.endpoints:
        raise InvalidRequest(f"standby {member} of shard {shard_id} is not to be made")
    made = msgspec.structs.replace(found, path=path, endpoints=endpoints)
    return _with(
        pool_map, shard, standbys=tuple(made if other is found else other for other in shard.standbys)
    )


def standbys_wanted(pool_map: PoolMap, shard_id: int, count: int) -> PoolMap:
    """Set the desired number of standbys.

    poolmap/shards/placement chooses their places. InvalidRequest: the number is out of bounds.
    """
    shard = shard_of(pool_map, shard_id)
    if not 0 <= count <= STANDBYS_MAX:
        raise InvalidRequest(f"a shard has 0 to {STANDBYS_MAX} standbys, not {count}")
    return pool_map if shard.standbys_wanted == count else _with(pool_map, shard, standbys_wanted=count)


def standby_up(pool_map: PoolMap, shard_id: int, member: int, term: int, epoch: int) -> PoolMap:
    """Mark a standby as up, at the request of the primary of `term`.

    The primary confirms that the standby has everything, and from then on waits for the standby with each
    reply. `epoch` is the shard's epoch at the time of the request: later requests of the primary take
    precedence.

    StaleTerm, Unavailable: as in `check_term`. StaleMember: the shard has changed since.
    """
    shard = _in_term(pool_map, shard_id, term)
    if shard.epoch != epoch:
        raise StaleMember(f"shard {shard_id} has epoch {shard.epoch}, not {epoch}, by now")
    return _with_state(pool_map, shard, member, "up")


def standby_out(pool_map: PoolMap, shard_id: int, member: int, term: int) -> PoolMap:
    """Mark a standby as syncing, because the primary of `term` waits for it no longer.

    The epoch grows in any case, so that an earlier request to mark the standby as up is rejected. StaleTerm,
    Unavailable: as in `check_term`.
    """
    return _with_state(pool_map, _in_term(pool_map, shard_id, term), member, "syncing")


def up_standbys(shard: Shard) -> frozenset[int]:
    """Return the standbys that have every acknowledged change, by the map."""
    return frozenset(standby.member for standby in shard.standbys if standby.state == "up")


def records_lost(pool_map: PoolMap, shard_id: int, lost: Collection[int]) -> PoolMap:
    """Demote standbys that have lost their records: they must never be promoted, and are filled like new
    ones."""
    for member in up_standbys(shard_of(pool_map, shard_id)) & set(lost):
        pool_map = _with_state(pool_map, shard_of(pool_map, shard_id), member, "syncing")
    return pool_map


def primary_lost(pool_map: PoolMap, shard_id: int, heirs: Collection[int] | None = None) -> PoolMap | None:
    """Promote a standby, because the primary has ended or has been silent for its whole lease.

    The first standby that is up becomes primary of the next term; standbys on nodes that stay are preferred.
    The old primary becomes a standby that has to catch up. Returns None if no standby is up: only the old
    primary has everything. `heirs` are standbys that were verified to have their records; None: all.
    """
    shard = shard_of(pool_map, shard_id)
    up = [
        standby
        for standby in shard.standbys
        if standby.state == "up" and (heirs is None or standby.member in heirs)
    ]
    heir = min(
        up, key=lambda standby: pool_map.node_by_id[standby.node].desired_state != "share", default=None
    )
    if heir is None:
        return None
    former = StandbyMember(shard.member, shard.node, shard.endpoints, "syncing", shard.path)
    return _with(
        pool_map,
        shard,
        term=shard.term + 1,
        member=heir.member,
        node=heir.node,
        endpoints=heir.endpoints,
        path=heir.path,
        standbys=(*(other for other in shard.standbys if other is not heir), former),
    )


def primary_began(
    pool_map: PoolMap,
    shard_id: int,
    member: int,
    heirs: Collection[int] | None = None,
    lost: Collection[int] = (),
    whole_term: int = 0,
) -> PoolMap:
    """Start a term for a new process of the primary.

    The drive of the process may have lost unsynced changes. A standby that is up has these changes and is
    promoted; if there is none, the same member begins another term.

    `heirs` are standbys that were verified to have their records (None: all that are up); `lost` are standbys
    without records. `whole_term`: the process has proof of having every change that was acknowledged up to
    and in this term. If that term is the current one, the process does not wait for standbys that were not
    found: they are marked as not up, so they cannot be promoted without the later changes.

    StaleTerm: the member is not the primary.
    Unavailable: a standby that is up may have more changes, and was not found.
    """
    shard = shard_of(pool_map, shard_id)
    if member != shard.member:
        raise StaleTerm(f"member {shard.member} is the primary of shard {shard_id}, {member} is not")
    pool_map = records_lost(pool_map, shard_id, lost)
    shard = shard_of(pool_map, shard_id)
    if (new := primary_lost(pool_map, shard_id, heirs)) is not None:
        return new
    if whole_term and whole_term == shard.term:
        pool_map = records_lost(pool_map, shard_id, up_standbys(shard))
        shard = shard_of(pool_map, shard_id)
    if missing := [standby for standby in shard.standbys if standby.state == "up"]:
        names = " and ".join(
            f"{process_name(shard_id, standby.member)} on node {standby.node}" for standby in missing
        )
        raise Unavailable(
            f"{names} may have changes that {process_name(shard_id, member)} lacks, and does not answer; "
            f"start it, or go on without what it has: nvpool shard standbys POOL {shard_id} "
            f"{len(shard.standbys) - len(missing)}",
            retry_after_s=0.5,
        )
    return _with(pool_map, shard, term=shard.term + 1)


def shard_of(pool_map: PoolMap, shard_id: int) -> Shard:
    """Return a shard by its number; InvalidRequest if there is none."""
    shard = pool_map.shard_by_id.get(shard_id)
    if shard is None:
        raise InvalidRequest(f"the pool has no shard {shard_id}; `nvpool shard ls POOL` lists them")
    return shard


def _standby(shard: Shard, member: int) -> StandbyMember | None:
    return next((standby for standby in shard.standbys if standby.member == member), None)


def _in_term(pool_map: PoolMap, shard_id: int, term: int) -> Shard:
    shard = shard_of(pool_map, shard_id)
    check_term(shard, term)
    return shard


def check_term(shard: Shard, term: int) -> None:
    """Verify the term of a request.

    StaleTerm: there is a later primary.
    Unavailable: this map is older than the map that began the term.
    """
    if term < shard.term:
        raise StaleTerm(f"shard {shard.id} is in term {shard.term}, not {term}")
    if term > shard.term:
        raise Unavailable(
            f"shard {shard.id} is in term {shard.term} here, nobody has heard of {term} yet",
            retry_after_s=0.1,
        )


def _with_state(pool_map: PoolMap, shard: Shard, member: int, state: str) -> PoolMap:
    if _standby(shard, member) is None:
        raise InvalidRequest(f"shard {shard.id} has no standby {member}")
    return _with(
        pool_map,
        shard,
        standbys=tuple(
            msgspec.structs.replace(other, state=state) if other.member == member else other
            for other in shard.standbys
        ),
    )


def _with(pool_map: PoolMap, shard: Shard, **fields: Any) -> PoolMap:
    new = msgspec.structs.replace(shard, epoch=shard.epoch + 1, **fields)
    return changed(
        pool_map, shards=tuple(new if other.id == shard.id else other for other in pool_map.shards)
    )
