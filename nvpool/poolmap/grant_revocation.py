"""Revocation of rights to volumes: which grants stores refuse before they end.

A grant is a signed right that a store checks without asking anybody, and lives for minutes. When a right to a volume is taken
back, the pool map gets an entry (`RightTaken`); a store that has this map refuses grants of the volume, and of the member, that
were given under an older one. Their holders ask the metadata service for new ones, which those with a right get. An entry is
dropped when each grant from before it has ended. There are at most TAKEN_MAX: beyond that one entry stands for all volumes.

Pure functions of a map, the time and a request; called by node/coordination/shard_failover and cluster/manager, and by
store/server/service.
"""

from __future__ import annotations

from msgspec.structs import replace

from nvpool.core.errors import InvalidRequest
from nvpool.core.grants import EPOCH_MASK, READ, WRITE, Grant, member_tag, volume_tag
from nvpool.core.member_names import check_member
from nvpool.poolmap.model import PoolMap, RightTaken

TAKEN_MAX = 256
"""Of entries: each process holds the whole map, 100 bytes an entry."""
LIFE_MS_MAX = 24 * 3600 * 1000
"""Of an entry: a mistake in a configuration must not leave it for years."""
_HALF = EPOCH_MASK + 1 >> 1
"""Epochs are compared by their lower bits: the map changes far less often in the life of a grant."""
ALL = READ | WRITE


def taken(pool_map: PoolMap, volume: int, member: str, rights: int, now_ms: int, life_ms: int) -> PoolMap:
    """The next map, with which stores refuse grants of these `rights` to the volume from before it. `member`: whose; empty:
    everybody's. `life_ms`: how long a grant that was given a moment ago lives. InvalidRequest."""
    if volume < 0 or not rights or rights & ~ALL or not 0 < life_ms <= LIFE_MS_MAX:
        raise InvalidRequest(f"rights {rights} to volume {volume} can not be taken for {life_ms} ms")
    if member:
        check_member(member)
    new = RightTaken(volume, member, rights, pool_map.epoch + 1, now_ms + life_ms)
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
        entries = [RightTaken(0, "", ALL, new.epoch, max(one.until_ms for one in entries))]
    return replace(pool_map, epoch=pool_map.epoch + 1, rights_taken=tuple(entries))


def without_ended(pool_map: PoolMap, now_ms: int) -> PoolMap:
    """The map without entries whose time is over; the same one, of the same epoch, where there are none."""
    if all(one.until_ms > now_ms for one in pool_map.rights_taken):
        return pool_map
    return replace(pool_map, rights_taken=tuple(one for one in pool_map.rights_taken if one.until_ms > now_ms))


class RightsTaken:
    """What a store looks a grant up in, once, when it verifies it. False where nothing is taken back."""

    def __init__(self, entries: tuple[RightTaken, ...] = (), now_ms: int = 0) -> None:
        """Of the entries whose time is not over at `now_ms`."""
        self._entries: dict[tuple[int, int], list[RightTaken]] = {}
        self.until_ms = 0
        """When the first of them is over; 0: there is none."""
        for one in entries:
            if one.until_ms > now_ms:
                self._entries.setdefault((volume_tag(one.volume), member_tag(one.member)), []).append(one)
                self.until_ms = min(self.until_ms or one.until_ms, one.until_ms)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def refuses(self, grant: Grant) -> bool:
        """Whether the grant is of a right that was taken back after it was given."""
        if not grant.volume or not self._entries:
            return False
        names = {(volume, member) for volume in (grant.volume, 0) for member in (grant.member, 0)}
        return any(one.rights & grant.rights and 0 < one.epoch - grant.epoch & EPOCH_MASK < _HALF
                   for name in names for one in self._entries.get(name, ()))
