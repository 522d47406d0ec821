"""Revocation of rights to volumes: lets stores refuse access tokens (grants) before they expire.

A grant is a signed right that a store verifies without a query, and it lives for minutes. When a right to a
volume is revoked, the pool map gets an entry (`RevokedRight`). A store with this map refuses grants of the
volume and member that were issued under an older map. Clients with a refused grant request a new one from the
metadata service, which issues one only to clients that still have the right. An entry is removed when all
older grants have expired. There are at most TAKEN_MAX entries; beyond that, one entry covers all volumes.

Pure functions of a map, the time and a request. Used by node/coordination/shard_failover, cluster/chain_manager and
store/server/service.
"""

from __future__ import annotations

from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.core.grants import EPOCH_MASK, READ, WRITE, Grant, member_tag, volume_tag
from nvpool.core.names import check_member
from nvpool.poolmap.model import PoolMap, RevokedRight

TAKEN_MAX = 256
"""Maximum number of entries: each process stores the whole map, and an entry has 100 bytes."""
LIFE_MS_MAX = 24 * 3600 * 1000
"""Maximum life of an entry, so that a wrong configuration cannot keep one for years."""
_HALF = EPOCH_MASK + 1 >> 1
"""Epochs are compared by their lower bits only: during the life of a grant, the map changes far fewer times
than this."""
ALL = READ | WRITE


def taken(pool_map: PoolMap, volume: int, member: str, rights: int, now_ms: int, life_ms: int) -> PoolMap:
    """Return the next map, with which stores refuse older grants of these `rights` to the volume.

    `member` is the member whose grants are refused; empty: all members. `life_ms` is the remaining life of a
    grant issued just now. InvalidRequest: rights, volume, member or life are invalid.
    """
    if volume < 0 or not rights or rights & ~ALL or not 0 < life_ms <= LIFE_MS_MAX:
        raise InvalidRequest(f"rights {rights} to volume {volume} cannot be taken for {life_ms} ms")
    if member:
        check_member(member)
    new = RevokedRight(volume, member, rights, pool_map.epoch + 1, now_ms + life_ms)
    entries = []
    for one in pool_map.rights_taken:
        if one.until_ms <= now_ms:
            continue
        if (one.volume, one.member) == (volume, member):
            new = replace(new, rights=new.rights | one.rights, until_ms=max(new.until_ms, one.until_ms))
        else:
            entries.append(one)
    entries.append(new)
    if len(entries) > TAKEN_MAX:
        entries = [RevokedRight(0, "", ALL, new.epoch, max(one.until_ms for one in entries))]
    return replace(pool_map, epoch=pool_map.epoch + 1, rights_taken=tuple(entries))


def without_ended(pool_map: PoolMap, now_ms: int) -> PoolMap:
    """Return the map without expired entries.

    The result is the same object if no entry has expired. The epoch does not change.
    """
    if all(one.until_ms > now_ms for one in pool_map.rights_taken):
        return pool_map
    return replace(
        pool_map, rights_taken=tuple(one for one in pool_map.rights_taken if one.until_ms > now_ms)
    )


class RevokedRights:
    """Revocations as a store uses them, once for each grant that it verifies. False if there are none."""

    def __init__(self, entries: tuple[RevokedRight, ...] = (), now_ms: int = 0) -> None:
        """Keep the entries that have not expired at `now_ms`."""
        self._entries: dict[tuple[int, int], list[RevokedRight]] = {}
        self.until_ms = 0
        """Earliest expiry of an entry; 0 if there are no entries."""
        for one in entries:
            if one.until_ms > now_ms:
                self._entries.setdefault((volume_tag(one.volume), member_tag(one.member)), []).append(one)
                self.until_ms = min(self.until_ms or one.until_ms, one.until_ms)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def refuses(self, grant: Grant) -> bool:
        """Return whether the grant's right was revoked after the grant was issued."""
        if not grant.volume or not self._entries:
            return False
        names = {(volume, member) for volume in (grant.volume, 0) for member in (grant.member, 0)}
        return any(
            one.rights & grant.rights and 0 < one.epoch - grant.epoch & EPOCH_MASK < _HALF
            for name in names
            for one in self._entries.get(name, ())
        )
