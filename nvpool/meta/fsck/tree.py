"""Whether every directory is below the root: climbs from each, until one comes to what is known to be.

A loop of one shard's directories is seen by its climb. A climb that comes to a directory of another shard is gone on with by
whoever asks all shards (`sdk/fsck/tree`), from shard to shard. All is read as it is now: a climb of one step of one shard
is of one moment, one over several is not, so what looks like a loop there is traced twice.

Used by `meta/fsck/walker` and `meta/server/admin_handlers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from nvpool.core.errors import InvalidRequest
from nvpool.core.ids import ROOT_INODE, is_inode_number, partition_of
from nvpool.core.units import PARTITION_COUNT
from nvpool.kv.api import Kv
from nvpool.meta.fsck.repair import loosened
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.rpc.messages.fsck_sums import pack_numbers, unpack_numbers
from nvpool.rpc.v1 import meta_pb2 as pb

ROOTED_MAX = 1_000_000
"""Directories remembered as being below the root, or as below one of another shard, so that a climb is short."""
CLIMBS_MAX = 1000
NAMES_A_STEP = 1000


class Tree:
    def __init__(self, current: Callable[[int], Inode | None], is_here: Callable[[int], bool]) -> None:
        """`current(inode)`: as it is now, None where it is not here."""
        self._current = current
        self._is_here = is_here
        self._rooted: dict[int, int] = {}
        """Directory -> that of another shard above it, 0 for none."""
        self._above: set[int] = set()
        self._told: set[int] = set()

    def moved(self, number: int) -> None:
        """It has another parent."""
        self._rooted.pop(number, None)

    def take_above(self) -> list[int]:
        """Directories of other shards to which climbs have come since the last call; each is told once, or seldom again."""
        above = sorted(self._above)
        self._above.clear()
        return above

    def is_loop(self, number: int) -> bool:
        """Climb from the directory; whether it is below itself."""
        try:
            above = self.climb(number)
        except _Loop:
            return True
        if above and above not in self._told:
            if len(self._told) >= ROOTED_MAX:
                self._told.clear()
            self._told.add(above)
            self._above.add(above)
        return False

    def above(self, number: int) -> int:
        """The first directory on the way up from this one, itself too, that is not here; 0: the root, or nothing, or a loop, of
        which the shard's own walk tells."""
        try:
            return self.climb(number)
        except _Loop:
            return 0

    def climb(self, number: int, way: list[Inode] | None = None) -> int:
        """As `above`; `way` gets what was climbed over. _Loop."""
        path: list[int] = []
        seen: set[int] = set()
        at, found = number, 0
        while at != ROOT_INODE:
            if way is None and (known := self._rooted.get(at)) is not None:
                found = known
                break
            if not self._is_here(partition_of(at)):
                found = at
                break
            inode = self._current(at)
            if inode is None or not inode.is_directory or not inode.links:
                return 0  # what has no name, or a directory that is not there, is told of by the sums
            if at in seen:
                raise _Loop
            seen.add(at)
            path.append(at)
            if way is not None:
                way.append(inode)
            at = inode.parent
        if len(self._rooted) > ROOTED_MAX:
            self._rooted.clear()
        self._rooted.update(dict.fromkeys(path, found))
        return found


class _Loop(Exception):
    """For this module only."""


async def climb(request: pb.FsckClimbRequest, tree: Tree, kv: Kv, is_here: Callable[[int], bool],
                carry: Callable[[Any], Awaitable[None]]) -> pb.FsckClimbReply:
    """What a request about climbs is answered with. `carry` as for all that a check mends."""
    if request.loose:
        if not is_inode_number(request.parent):
            raise InvalidRequest(f"no directory has the number {request.parent}")
        key = await _name_of(request.loose, request.parent, kv, is_here)
        if key is not None:
            await carry(partial(loosened, number=request.loose, key=key))
        return pb.FsckClimbReply(loosened=key is not None)
    numbers = unpack_numbers(request.inodes)
    if len(numbers) > (1 if request.trace else CLIMBS_MAX) or (request.trace and not numbers):
        raise InvalidRequest(f"{CLIMBS_MAX} climbs at most at once, or one that is traced")
    if not request.trace:
        return pb.FsckClimbReply(above=pack_numbers([tree.above(number) for number in numbers]))
    way: list[Inode] = []
    try:
        above = tree.climb(numbers[0], way)
    except _Loop:
        above = 0
    return pb.FsckClimbReply(above=pack_numbers([above]),
                             way=pack_numbers([number for one in way for number in (one.number, one.parent, one.change)]))


async def _name_of(number: int, parent: int, kv: Kv, is_here: Callable[[int], bool]) -> bytes | None:
    """The key of a name that the directory has in the other one, in the partitions of this shard."""
    home = partition_of(parent)
    for partition in (home, *(other for other in range(PARTITION_COUNT) if other != home)):
        first, end = records.dentry_range(partition, parent)
        while is_here(partition) and (pairs := kv.scan(first, end, NAMES_A_STEP)):
            for key, raw in pairs:
                if records.decode_dentry(partition, raw)[0] == number:
                    return key
            first = pairs[-1][0] + b"\0"
            await asyncio.sleep(0)
    return None
