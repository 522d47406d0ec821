"""Jobs of fsck, dump and load: runs in progress, identified by cursors, with one bounded step per request.

A cursor contains a run's number and its count of steps; a step whose reply was lost may be requested again.
Runs are in memory only: after a restart of the shard they must be started again (StaleCursor). Owned by
`meta/server/service`.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from nvpool.core.clock import Clock
from nvpool.core.errors import InUse, InvalidRequest, NvpoolError, StaleCursor
from nvpool.core.ids import ROOT_INODE, partition_of
from nvpool.core.units import PARTITION_COUNT
from nvpool.kv.api import Kv
from nvpool.meta import dump
from nvpool.meta.fsck.findings import Mend, ShardProblem
from nvpool.meta.fsck.walker import Fsck
from nvpool.meta.state import records
from nvpool.meta.state.id_allocation import Numbers
from nvpool.meta.state.striped_dirs import StripeCounts, decode_part, take_in
from nvpool.meta.state.transaction import View
from nvpool.rpc.messages.fsck_sums import (
    pack_copies,
    pack_numbers,
    pack_partitions,
    pack_sums,
    unpack_numbers,
    unpack_partitions,
    unpack_sums,
)
from nvpool.rpc.v1 import meta_pb2 as pb

RUNS_MAX = 3
"""Limit of concurrent runs: the engine reads at most four snapshots at the same time."""
IDLE_S = 120.0
"""Time without a request after which a run may be replaced by another."""
LOAD_BATCH = 500
_CURSOR = struct.Struct("<QI")


class JobReply(NamedTuple):
    """Reply message and payload."""

    message: Any
    payload: bytes = b""


class _Run:
    """State of one check or dump between two requests."""

    def __init__(self, work: Fsck | dump.Dump) -> None:
        self.work = work
        self.steps = 0
        self.used_s = 0.0
        self.last: JobReply | None = None


class AdminJobs:
    """Checks and dumps in progress."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._runs: dict[int, _Run] = {}

    def begin(self, work: Fsck | dump.Dump) -> tuple[int, _Run]:
        number = int.from_bytes(self._clock.secret(8), "little")
        run = self._runs[number] = _Run(work)
        run.used_s = self._clock.boottime_s()
        return number, run

    def make_room(self) -> None:
        """Drop idle runs; to be called before the work of a new run is created.

        InUse: too many runs are in progress.
        """
        now_s = self._clock.boottime_s()
        for number in [n for n, run in self._runs.items() if now_s - run.used_s > IDLE_S]:
            self._end(number)
        if len(self._runs) >= RUNS_MAX:
            raise InUse(f"{RUNS_MAX} checks or dumps are under way; wait for one to end")

    def cursor(self, work: Fsck | dump.Dump) -> bytes:
        """Start a run; return the cursor of its first step."""
        return _CURSOR.pack(self.begin(work)[0], 0)

    def under_way(self) -> int:
        """Number of runs that are not idle."""
        since_s = self._clock.boottime_s() - IDLE_S
        return sum(run.used_s > since_s for run in self._runs.values())

    def drop(self, cursor: bytes) -> None:
        """End the run of this cursor, which the client no longer needs."""
        if len(cursor) == _CURSOR.size and (number := _CURSOR.unpack(cursor)[0]) in self._runs:
            self._end(number)

    def find(self, cursor: bytes, kind: type) -> tuple[int, _Run, bool]:
        """(number, run, whether the run's last step is requested again)."""
        if len(cursor) != _CURSOR.size:
            raise StaleCursor("this is not a cursor of a check or dump")
        number, steps = _CURSOR.unpack(cursor)
        run = self._runs.get(number)
        if run is None or not isinstance(run.work, kind) or steps not in (run.steps, run.steps - 1):
            raise StaleCursor("this check or dump has ended; begin it again")
        run.used_s = self._clock.boottime_s()
        return number, run, steps == run.steps - 1

    def stepped(self, number: int, run: _Run, answer: JobReply, done: bool) -> JobReply:
        run.steps += 1
        answer.message.cursor = _CURSOR.pack(number, run.steps)
        answer.message.done = done
        run.last = answer
        if done:
            # The last reply is kept until its place is needed, because it may be requested again.
            run.work.close()
            run.used_s -= IDLE_S
        return answer

    def _end(self, number: int) -> None:
        self._runs.pop(number).work.close()

    def end_all(self) -> None:
        for number in list(self._runs):
            self._end(number)


Carry = Callable[[Mend], Awaitable[None]]
"""Carries out a repair that needs other shards; any NvpoolError."""


async def fsck_step(
    runs: AdminJobs, request: pb.FsckRequest, kv: Kv, view: View, numbers: Numbers, make: Any, carry: Carry
) -> JobReply:
    while kv.full:
        await kv.room()
    if request.cursor:
        number, run, again = runs.find(request.cursor, Fsck)
        if again:
            return run.last
    else:
        runs.make_room()
        number, run = runs.begin(make(request.repair, _partitions(request.partitions)))
    work = run.work
    if work.done:
        raise StaleCursor("this check has ended; begin it again")
    problems = work.step(request.limit)
    if work.counter_max and request.repair:
        counter, work.counter_max = work.counter_max, 0
        view.next_number = max(view.next_number, counter + 1)
        await numbers.raise_above(counter)
    reply = pb.FsckReply(
        checked=work.checked,
        sums=pack_sums(work.sums),
        above=pack_numbers(work.tree.take_above()),
        copies=pack_copies(work.copies),
        passed=pack_partitions(work.passed),
    )
    await _report_problems(reply, work, problems, carry)
    return runs.stepped(number, run, JobReply(reply), work.done)


async def settle_sums(request: pb.FsckSumsRequest, kv: Kv, work: Fsck, carry: Carry) -> JobReply:
    """Check inodes of this shard by the sums that all shards together have of them."""
    sums = unpack_sums(request.sums)
    while kv.full:
        await kv.room()
    uneven = unpack_numbers(request.uneven)
    problems = work.settle_sums(sums, uneven)
    reply = pb.FsckReply(done=True, passed=pack_partitions(work.passed))
    await _report_problems(reply, work, problems, carry)
    return JobReply(reply)


def _partitions(raw: bytes) -> tuple[int, ...] | None:
    """Partitions to check; None: all."""
    if not raw:
        return None
    partitions = unpack_partitions(raw)
    if any(partition >= PARTITION_COUNT for partition in partitions):
        raise InvalidRequest("a partition that does not exist")
    return partitions


async def _report_problems(
    reply: pb.FsckReply, work: Fsck, problems: list[ShardProblem], carry: Carry
) -> None:
    for at, decide in work.pending:
        problem = problems[at]
        try:
            await carry(decide)
        except NvpoolError as error:
            problems[at] = problem._replace(repaired=False, text=f"{problem.text}; not repaired: {error}")
    for problem in problems:
        reply.problems.add(
            kind=problem.kind, text=problem.text[:1000], repaired=problem.repaired, inode=problem.inode
        )


def dump_step(runs: AdminJobs, request: pb.DumpRequest, view: View, shard: int) -> JobReply:
    if request.cursor:
        number, run, again = runs.find(request.cursor, dump.Dump)
        if again:
            return run.last
    else:
        runs.make_room()
        number, run = runs.begin(dump.Dump(view, shard))
    if run.work.done:
        raise StaleCursor("this dump has ended; begin it again")
    lines, count = run.work.step(request.limit)
    return runs.stepped(number, run, JobReply(pb.DumpReply(records=count), lines), run.work.done)


class Load:
    """A load in progress; until it ends, the shard has no valid contents.

    Each shard of a pool is given a complete dump, of any number of shards, or its own part of a dump with the
    same partitions. It keeps the records of its own partitions.
    """

    def __init__(self, kv: Kv, identity: records.ShardIdentity, view: View, has_root: bool) -> None:
        self._kv = kv
        self._identity = identity
        self._view = view
        self._has_root = has_root
        self._inodes = 0
        self._counted: int | None = None
        self._bounds = records.IssuedNumbers(0, 0)
        self._parts: dict[int, list[StripeCounts]] = {}
        self.records = 0

    async def begin(self) -> None:
        """Mark the shard as loading, and delete its first records, or those of an unfinished load."""
        raw = self._kv.get(records.BOUNDS_KEY)
        self._bounds = records.decode_bounds(raw) if raw is not None else self._bounds
        await self._apply(
            [(records.IDENTITY_KEY, records.encode_identity(self._identity._replace(loading=True)))]
        )
        first = b"\0"
        while pairs := self._kv.scan(first, records.END_OF_KEYS, LOAD_BATCH):
            await self._apply(
                [(key, None) for key, _ in pairs if key not in (records.IDENTITY_KEY, records.BOUNDS_KEY)]
            )
            first = pairs[-1][0] + b"\0"

    async def take(self, payload: bytes, first: bool) -> None:
        batch: list[tuple[bytes, bytes | None]] = []
        for key, raw in dump.parse(payload, first):
            if not key[0] & 0x80:
                if self._view.is_elsewhere(records.partition_of_key(key)):
                    continue
                self._inodes += records.kind_of(key) == records.INODE
            self.records += 1
            if key == records.IDENTITY_KEY:
                found = records.decode_identity(raw)
                self._identity = records.ShardIdentity(self._identity.shard, found.name_key, True)
            elif records.is_part_key(key):
                part = decode_part(key, raw)
                if not self._view.is_elsewhere(partition_of(part.number)):
                    self._parts.setdefault(part.number, []).append(part.counts)
            elif key == records.BOUNDS_KEY:
                found_bounds = records.decode_bounds(raw)
                self._bounds = records.IssuedNumbers(
                    max(self._bounds.inode, found_bounds.inode),
                    max(self._bounds.session, found_bounds.session),
                )
            else:
                if key == records.COUNTS_KEY:
                    self._counted = (self._counted or 0) + records.decode_counts(raw)
                    continue  # summed up: there is one for each dumped shard
                if (kind := records.kind_of(key)) >= records.SHARD and kind != records.DAMAGED:
                    raise InvalidRequest(f"a dump has no record with the key {key.hex()}")
                batch.append((key, raw))
                if len(batch) >= LOAD_BATCH:
                    await self._apply(batch)
                    batch = []
        await self._apply(batch)

    async def end(self) -> None:
        """Complete the load, durably. Numbers continue above those of the dump and of this shard.

        The consistency of the records is left to fsck, which the caller of a load runs next: it needs all
        records, and more time than a request has.
        """
        raw = self._kv.get(records.inode_key(ROOT_INODE))
        root = records.decode_inode(ROOT_INODE, raw) if raw is not None else None
        if self._has_root and (root is None or not root.is_directory or root.links < 2):
            raise InvalidRequest("the dump has no root directory; it is not whole")
        counted = self._inodes if self._view.owners else self._counted
        if counted is not None:
            await self._apply([(records.COUNTS_KEY, records.encode_counts(counted))])
        for number, parts in self._parts.items():
            await self._take_parts(number, parts)
        await self._apply(
            [
                (records.BOUNDS_KEY, records.encode_bounds(self._bounds)),
                (records.IDENTITY_KEY, records.encode_identity(self._identity._replace(loading=False))),
            ]
        )
        await self._kv.sync()

    async def _take_parts(self, number: int, parts: list[StripeCounts]) -> None:
        """Merge the stripes of a directory into its record.

        The directory starts undivided, however many shards the pool has now.
        """
        key = records.inode_key(number)
        raw = self._kv.get(key)
        if raw is None:
            return
        directory = records.decode_inode(number, raw)
        for counts in parts:
            take_in(directory, counts)
        directory.size, directory.links = max(0, directory.size), max(2, directory.links)
        directory.flags &= ~records.DIVIDED
        await self._apply([(key, records.encode_inode(directory))])

    async def _apply(self, effects: list) -> None:
        while self._kv.full:
            await self._kv.room()
        if effects:
            self._kv.apply(dict(effects))
