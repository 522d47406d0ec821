"""Directory tree check: climbs from each directory to see whether it is below the root.

A climb ends at a directory that is known to be below the root. It finds a loop if all directories of the loop
are in this shard. A climb that reaches a directory of another shard is continued by the client of all shards
(`sdk/fsck/directory_loops`), from shard to shard. All records are read as they are now. So one step of a climb in one
shard is consistent, but a climb over several shards is not; therefore an apparent loop there is traced twice.

Used by `meta/fsck/walker` and `meta/requests/admin_handlers`.
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
"""Directories known to be below the root, or below a directory of another shard; cached so that climbs are
short."""
CLIMBS_MAX = 1000
NAMES_A_STEP = 1000


class Tree:
    """Climbs of one check, with a cache of their results."""

    def __init__(self, current: Callable[[int], Inode | None], is_here: Callable[[int], bool]) -> None:
        """`current(inode)`: the inode's present record, None if it is not here."""
        self._current = current
        self._is_here = is_here
        self._rooted: dict[int, int] = {}
        """Directory -> first directory of another shard above it, 0 for none."""
        self._above: set[int] = set()
        self._reported: set[int] = set()

    def moved(self, number: int) -> None:
        """Forget what is cached of a directory that has another parent now."""
        self._rooted.pop(number, None)

    def take_above(self) -> list[int]:
        """Directories of other shards that climbs have reached since the last call.

        Each is returned once, rarely again.
        """
        above = sorted(self._above)
        self._above.clear()
        return above

    def is_loop(self, number: int) -> bool:
        """Climb from the directory; return whether it is below itself."""
        try:
            above = self.climb(number)
        except _DirectoryCycle:
            return True
        if above and above not in self._reported:
            if len(self._reported) >= ROOTED_MAX:
                self._reported.clear()
            self._reported.add(above)
            self._above.add(above)
        return False

    def above(self, number: int) -> int:
        """First directory on the way up, including `number`, that is not in this shard.

        0: the climb reaches the root, a missing directory, or a loop, which the shard's own walk reports.
        """
        try:
            return self.climb(number)
        except _DirectoryCycle:
            return 0

    def climb(self, number: int, way: list[Inode] | None = None) -> int:
        """As `above`; appends the inodes on the way to `way`. Raises _Loop."""
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
                return 0  # the sums report an inode without a name, and a missing directory
            if at in seen:
                raise _DirectoryCycle
            seen.add(at)
            path.append(at)
            if way is not None:
                way.append(inode)
            at = inode.parent
        if len(self._rooted) > ROOTED_MAX:
            self._rooted.clear()
        self._rooted.update(dict.fromkeys(path, found))
        return found


class _DirectoryCycle(Exception):
    """The climb has met a directory twice. For this module only."""


async def climb(
    request: pb.FsckClimbRequest,
    tree: Tree,
    kv: Kv,
    is_here: Callable[[int], bool],
    carry: Callable[[Any], Awaitable[None]],
) -> pb.FsckClimbReply:
    """Handle a request about climbs. `carry` is as for all repairs of a check."""
    if request.loose:
        if not is_inode_number(request.parent):
            raise InvalidRequest(f"no directory has the number {request.parent}")
        key = await _name_of(request.loose, request.parent, kv, is_here)
        if key is not None:
            await carry(partial(loosened, number=request.loose, key=key))
        return pb.FsckClimbReply(loosened=key is not None)
    numbers = unpack_numbers(request.inodes)
    if len(numbers) > (1 if request.trace else CLIMBS_MAX) or (request.trace and not numbers):
        raise InvalidRequest(f"{CLIMBS_MAX} climbs at most at the same time, or one that is traced")
    if not request.trace:
        return pb.FsckClimbReply(above=pack_numbers([tree.above(number) for number in numbers]))
    way: list[Inode] = []
    try:
        above = tree.climb(numbers[0], way)
    except _DirectoryCycle:
        above = 0
    return pb.FsckClimbReply(
        above=pack_numbers([above]),
        way=pack_numbers([number for one in way for number in (one.number, one.parent, one.change)]),
    )


async def _name_of(number: int, parent: int, kv: Kv, is_here: Callable[[int], bool]) -> bytes | None:
    """Key of a name that the directory has in `parent`, searched in the partitions of this shard."""
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
