"""Metadata pass of fsck: all shards at one snapshot barrier, with the pool in service.

Each shard walks its own records and reports their problems. A shard also reports facts that it cannot judge
alone:

* sums: they are added up here, and the shards of the inodes judge the totals;
* directories of other shards that its walk upwards has reached: the walk continues from here (sdk/fsck/directory_loops);
* attributes of striped directories and of their stripes: they are compared here.

If a partition moves before its shard has checked it, its new shard checks it, as often as needed.

sdk/fsck/check uses this module. Memory use: a hundred bytes for each inode with a name on another shard, and
for each striped directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, TypeVar

from nvpool.core.errors import NotFound, Stale
from nvpool.core.ids import partition_of
from nvpool.rpc.messages.fsck_sums import (
    DirectoryCopy,
    Sum,
    pack_numbers,
    pack_partitions,
    pack_sums,
    unpack_copies,
    unpack_numbers,
    unpack_partitions,
    unpack_sums,
)
from nvpool.rpc.v1 import meta_pb2, wire_pb2
from nvpool.sdk.admin.daemon_calls import AdminCalls
from nvpool.sdk.admin.snapshot_barrier import BarrierCursors, walk_at_all
from nvpool.sdk.fsck.directory_loops import DirectoryLoops
from nvpool.sdk.fsck.report import PROBLEMS_KEPT_MAX, FsckReport, PoolProblem

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client

_Item = TypeVar("_Item")

RECORDS_A_STEP = 5000
INODES_A_STEP = 1000
CLIMBS_PER_BATCH = 10_000
TURNS_MAX = 1000
"""Queries in a row without progress before a moving partition is given up: some minutes."""
AGAIN_S, AGAIN_S_MAX = 0.02, 0.5
"""Delays before a partition is queried again, while its shard is closed or unknown."""


async def check_names(client: Client, checkup: FsckReport, repair: bool) -> None:
    """Record every metadata problem in `checkup`. Errors: those of `check`; Busy as in `walk_at_all`."""
    await _Names(client, checkup, repair).run()


class _Names:
    def __init__(self, client: Client, checkup: FsckReport, repair: bool) -> None:
        self._client = client
        self._asking = AdminCalls(client)
        self._checkup = checkup
        self._repair = repair
        self._sums: dict[int, Sum] = {}
        self._copies: dict[int, dict[int, DirectoryCopy]] = {}
        """Attributes of striped directories, by shard."""
        self._noted: set[tuple[str, str]] = set()
        self._is_whole = True
        self._climbs = DirectoryLoops(client, self._asking)

    async def run(self) -> None:
        await walk_at_all(self._client, self._walk_all, self._on_restart, repair=self._repair)
        if self._is_whole:  # otherwise the sums are incomplete
            await self._settle([one for one in self._sums.values() if not one.is_even], self._uneven())

    def _on_restart(self, reason: str) -> None:
        """Start the walk again. Problems stay reported, each one once. Sums are dropped, because sums of
        two snapshot barriers do not add up."""
        self._checkup.restarts.append(reason)
        self._checkup.records, self._is_whole = 0, True
        self._sums, self._copies, self._climbs = {}, {}, DirectoryLoops(self._client, self._asking)

    async def _walk_all(self, begun: BarrierCursors) -> None:
        before, passed = self._checkup.records, set()
        for shard, cursor in begun.cursors.items():
            passed |= await self._walk(
                shard, meta_pb2.FsckRequest(cursor=cursor, limit=RECORDS_A_STEP), before
            )
            before = self._checkup.records
        await self._look_again(passed)
        await self._climb()

    def _note(self, problem: PoolProblem) -> None:
        if (problem.kind, problem.text) in self._noted:
            return  # reported by both shards, before and after its partition moved
        if len(self._noted) < PROBLEMS_KEPT_MAX:
            self._noted.add((problem.kind, problem.text))
        self._checkup.note(problem)

    async def _walk(self, shard: int, request: meta_pb2.FsckRequest, before: int | None = None) -> set[int]:
        """Run all steps of one shard's walk; return the partitions it skipped. `before` is the number of
        records counted earlier; with None the records of this walk are not counted."""
        passed: set[int] = set()
        done = False
        while not done:
            reply, _ = await self._asking.shard(shard, wire_pb2.META_FSCK, request, meta_pb2.FsckReply)
            if before is not None:
                self._checkup.records = before + reply.checked  # counted from the start of its walk
            for one in unpack_sums(reply.sums):
                self._sums[one.inode] = one.plus(self._sums[one.inode]) if one.inode in self._sums else one
            for copy in unpack_copies(reply.copies):
                self._copies.setdefault(copy.inode, {})[copy.shard] = copy
            for problem in reply.problems:
                self._is_whole &= problem.kind != "unreadable"
                self._note(PoolProblem(problem.kind, f"shard {shard}", problem.text, problem.repaired))
            passed.update(unpack_partitions(reply.passed))
            self._climbs.add(unpack_numbers(reply.above))
            if self._climbs.waiting >= CLIMBS_PER_BATCH:
                await self._climb()
            request.cursor, done = reply.cursor, reply.done
        return passed

    async def _look_again(self, passed: set[int]) -> None:
        turns = 0
        while passed:
            if turns >= TURNS_MAX:
                self._note(
                    PoolProblem(
                        "moving", "", f"{len(passed)} partitions moved each time they were to be looked at"
                    )
                )
                return
            await self._pause(turns)
            left: set[int] = set()
            for shard, some in self._by_shard(passed, lambda partition: partition).items():
                request = meta_pb2.FsckRequest(
                    limit=RECORDS_A_STEP, repair=self._repair, partitions=pack_partitions(some)
                )
                try:
                    left |= await self._walk(shard, request)
                except (NotFound, Stale):  # the shard has left the pool, or is a new process
                    left.update(some)
            turns = turns + 1 if left == passed else 0
            passed = left

    async def _pause(self, turns: int) -> None:
        await asyncio.sleep(min(AGAIN_S_MAX, AGAIN_S * 2 ** min(turns, 8)))
        await self._client.refresh_map()

    def _by_shard(self, these: Iterable[_Item], partition: Callable[[_Item], int]) -> dict[int, list[_Item]]:
        found: dict[int, list[_Item]] = {}
        owners = self._client.pool_map.shard_of_partition
        only = self._client.pool_map.shards[0].id
        for one in these:
            place = partition(one)
            found.setdefault(owners[place] if place < len(owners) else only, []).append(one)
        return found

    async def _climb(self) -> None:
        async for problem in self._climbs.loops(self._repair):
            self._note(problem)

    def _uneven(self) -> list[int]:
        """Striped directories with stripes that differ from their record."""
        return [
            inode
            for inode, copies in self._copies.items()
            if 0 in copies and any(copy._replace(shard=0) != copies[0] for copy in copies.values())
        ]

    async def _settle(self, sums: Collection[Sum], uneven: Collection[int]) -> None:
        """Let the shards of these inodes judge the sums of all shards. The problems that they find are
        reported."""
        turns = 0
        while (sums or uneven) and turns < TURNS_MAX:
            if turns:
                await self._pause(turns)
            else:
                await self._client.refresh_map()
            turns += 1
            left_sums: list[Sum] = []
            left_uneven: list[int] = []
            by_sum = self._by_shard(sums, lambda one: partition_of(one.inode))
            by_uneven = self._by_shard(uneven, partition_of)
            for shard in sorted(by_sum.keys() | by_uneven.keys()):
                works: list[tuple[list[Sum], list[int]]] = [
                    (some, []) for some in _parted(by_sum.get(shard, []))
                ]
                works += [([], some) for some in _parted(by_uneven.get(shard, []))]
                for some, wide in works:
                    request = meta_pb2.FsckSumsRequest(
                        sums=pack_sums(some), repair=self._repair, uneven=pack_numbers(wide)
                    )
                    try:
                        reply = await self._asking.any_primary(
                            shard, wire_pb2.META_FSCK_SUMS, request, meta_pb2.FsckReply
                        )
                    except NotFound:  # the shard has left the pool
                        left_sums += some
                        left_uneven += wide
                        continue
                    passed = set(unpack_partitions(reply.passed))
                    left_sums += [one for one in some if partition_of(one.inode) in passed]
                    left_uneven += [inode for inode in wide if partition_of(inode) in passed]
                    for problem in reply.problems:
                        self._note(
                            PoolProblem(problem.kind, f"shard {shard}", problem.text, problem.repaired)
                        )
            sums, uneven = left_sums, left_uneven


def _parted(these: list[_Item]) -> list[list[_Item]]:
    return [these[first : first + INODES_A_STEP] for first in range(0, len(these), INODES_A_STEP)]
