"""Search for directory loops that cross shards.

A shard walks from its directories up towards the root (meta/fsck/directory_connectivity). If such a walk leaves the shard, it
continues from here, many at a time, each directory once. Directories that are known to be below the root are
remembered, up to a million.

A walk over several shards does not see one point in time: a rename during the walk can make a path meet
itself. So a suspected loop is traced twice. If every directory of the loop has the same change counter both
times, the whole loop existed at the point in time between the two traces.

sdk/fsck/metadata uses this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from nvpool.core.errors import NotFound, NvpoolError
from nvpool.core.ids import partition_of
from nvpool.rpc.messages.fsck_sums import pack_numbers, unpack_numbers
from nvpool.rpc.v1 import wire_pb2
from nvpool.rpc.v1.meta_pb2 import FsckClimbReply, FsckClimbRequest
from nvpool.sdk.admin.daemon_calls import AdminCalls
from nvpool.sdk.fsck.report import PoolProblem

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client

CLIMBS_A_STEP = 1000
ROOTED_MAX = 1_000_000
ROUNDS_MAX = 100_000
"""Rounds of queries; no path is deeper than this."""
TRACES_MAX = 10
PAUSE_S = 0.05

Step = tuple[int, int, int]  # directory, parent, counter of changes


class DirectoryLoops:
    def __init__(self, client: Client, asking: AdminCalls) -> None:
        self._client = client
        self._asking = asking
        self._waiting: set[int] = set()
        self._rooted: set[int] = set()

    def add(self, directories: Iterable[int]) -> None:
        """Add directories from which the next `loops` walks upwards."""
        self._waiting.update(one for one in directories if one not in self._rooted)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def loops(self, repair: bool) -> AsyncIterator[PoolProblem]:
        """Walk upwards from all added directories, and iterate over the loops found."""
        above = await self.climb()
        for start in _met_again(above):
            way = await self._confirmed(start)
            if way:
                yield await self._loop_problem(way, repair)
        if len(self._rooted) > ROOTED_MAX:
            self._rooted.clear()
        self._rooted.update(above)

    async def climb(self) -> dict[int, int]:
        """Map each directory to the next directory above it on another shard. 0: it is below the root, or
        below nothing."""
        above: dict[int, int] = {}
        now, self._waiting = self._waiting, set()
        for _ in range(ROUNDS_MAX):
            if not now:
                break
            then: set[int] = set()
            by_shard: dict[int, list[int]] = {}
            for one in now:
                by_shard.setdefault(self._holder(one), []).append(one)
            moved = False
            for shard, all_of_it in by_shard.items():
                for first in range(0, len(all_of_it), CLIMBS_A_STEP):
                    some = all_of_it[first : first + CLIMBS_A_STEP]
                    found = await self._above(shard, some)
                    for one, next_one in zip(some, found, strict=True):
                        if one == next_one:
                            moved = True
                            then.add(one)
                        else:
                            above[one] = next_one
                            if next_one and next_one not in self._rooted:
                                then.add(next_one)
            if moved:
                await asyncio.sleep(PAUSE_S)
                await self._client.refresh_map()
            now = then - above.keys()
        return above

    async def _above(self, shard: int, some: list[int]) -> tuple[int, ...] | list[int]:
        try:
            reply = await self._asking.any_primary(
                shard, wire_pb2.META_FSCK_CLIMB, FsckClimbRequest(inodes=pack_numbers(some)), FsckClimbReply
            )
        except NotFound:  # the shard has left the pool
            return some
        return unpack_numbers(reply.above)

    def _holder(self, directory: int) -> int:
        now = self._client.pool_map
        place = partition_of(directory)
        return (
            now.shard_of_partition[place]
            if now.partitions and place < len(now.shard_of_partition)
            else now.shards[0].id
        )

    async def _confirmed(self, start: int) -> list[Step]:
        """Directories of the loop that contains `start`; empty if there is none."""
        for _ in range(TRACES_MAX):
            way = await self._traced(start)
            if not way or way == await self._traced(start):
                return way
        return []

    async def _traced(self, start: int) -> list[Step]:
        """Directories from `start` upwards until the path returns to it; empty if it does not."""
        way: list[Step] = []
        at, seen = start, set()
        for _ in range(ROUNDS_MAX):
            request = FsckClimbRequest(inodes=pack_numbers([at]), trace=True)
            try:
                reply = await self._asking.any_primary(
                    self._holder(at), wire_pb2.META_FSCK_CLIMB, request, FsckClimbReply
                )
                found, numbers = unpack_numbers(reply.above)[0], unpack_numbers(reply.way)
            except NotFound:
                found, numbers = at, ()
            if found == at and not numbers:  # its partition has moved
                await asyncio.sleep(PAUSE_S)
                await self._client.refresh_map()
                continue
            way += zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
            seen.add(at)
            if found == start:
                return way
            if not found or found in seen:
                break
            at = found
        return []

    async def _loop_problem(self, way: list[Step], repair: bool) -> PoolProblem:
        directory, parent, _ = min(way)
        text, repaired = f"directory {directory} is below itself, over several shards", False
        if repair:
            try:
                repaired = await self._loosened(directory, parent)
            except NvpoolError as error:
                text = f"{text}; not repaired: {error}"
        return PoolProblem("loop", f"{len(way)} directories", text, repaired)

    async def _loosened(self, directory: int, parent: int) -> bool:
        """Move the directory to /lost+found; the shard with its name does that. The name of an entry of a
        striped directory may be on any shard, so the other shards are asked next."""
        first = self._holder(parent)
        for shard in (first, *(other.id for other in self._client.pool_map.shards if other.id != first)):
            request = FsckClimbRequest(loose=directory, parent=parent)
            reply = await self._asking.any_primary(shard, wire_pb2.META_FSCK_CLIMB, request, FsckClimbReply)
            if reply.loosened:
                return True
        return False


def _met_again(above: dict[int, int]) -> list[int]:
    """One directory of each loop in `above`."""
    done: set[int] = set()
    found = []
    for start in above:
        path: set[int] = set()
        at = start
        while at in above and at not in done and at not in path:
            path.add(at)
            at = above[at]
        if at in path:
            found.append(at)
        done |= path
    return sorted(found)
