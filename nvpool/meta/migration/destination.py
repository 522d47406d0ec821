"""Destination of a partition migration: receives partitions from another shard.

Arriving records are stored at their final keys, but are not visible to requests until the map says that they
are ours. An attempt is identified by the source's term and its number in it; an older attempt than the
current one is refused, and a new one starts from nothing.

When all records have arrived durably (on standbys too: the answer waits for them), only the map decides. If
it makes us the owner, the partitions are loaded as a shard loads its records at a start. If they are no
longer to come, their records are removed here. After a crash the stored records show how far the migration
was.

Owned by `meta/server/service`.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Iterable

from nvpool.core.errors import Bug, Busy, CorruptFrame, InvalidRequest, StaleEpoch, StaleTerm
from nvpool.kv.api import Effect
from nvpool.kv.journal_record import decode
from nvpool.meta.migration.cleanup import PartitionCleanup, seen_effect
from nvpool.meta.migration.sessions import bring_all
from nvpool.meta.migration.shard_context import ShardContext
from nvpool.meta.sessions.table import inodes_of
from nvpool.meta.state import records
from nvpool.meta.state.migration_records import (
    COMING_RANGE,
    IncomingMigration,
    arrived_key,
    arrived_range,
    arrived_session_of_key,
    coming_key,
    decode_coming,
    encode_coming,
    source_of_key,
)
from nvpool.meta.state.session_records import decode_session, encode_session
from nvpool.poolmap.model import PoolMap, decode_map
from nvpool.poolmap.shards.partition_moves import goals
from nvpool.rpc.v1.moving_pb2 import MoveReply, MoveRequest

SOURCES_MAX = 1000
STEP_KEYS = 500
SESSIONS_MAX = 100_000
RETRY_S = 0.05

log = logging.getLogger(__name__)


class MigrationDestination:
    """Destination side of migrations; there may be one from each source."""

    def __init__(self, inside: ShardContext, leaving: PartitionCleanup) -> None:
        self._inside = inside
        self._leaving = leaving
        self._map: PoolMap | None = None
        self._coming: dict[int, IncomingMigration] = {}
        self._opened: dict[int, dict[int, list[int]]] = {}
        """Source -> session -> its open inodes, once for each handle. In memory only, like all open files."""
        self._waits_s: dict[int, float] = {}
        self._at_work: dict[int, asyncio.Lock] = {}
        self._woken = asyncio.Event()
        self.taken = 0

    @property
    def coming(self) -> int:
        """Number of arriving partitions, which are not ours yet."""
        return sum(len(one.partitions) for one in self._coming.values())

    def begin(self) -> set[int]:
        """Load the state of migrations at a start; return the partitions that are arriving."""
        for key, raw in self._inside.kv.scan(*COMING_RANGE, SOURCES_MAX):
            self._coming[source_of_key(key)] = decode_coming(raw)
        coming = {partition for one in self._coming.values() for partition in one.partitions}
        self._inside.ranges.set_foreign(coming, True)
        return coming

    def use_map(self, pool_map: PoolMap) -> None:
        self._map = pool_map
        if self._coming:
            self._woken.set()

    async def run(self) -> None:
        """Take up partitions that the map has made ours, and remove those that no longer come, until
        cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                await self.run_once()
            except Busy as error:
                log.info("what has come is not taken up yet: %s", error)
                await asyncio.sleep(RETRY_S)
                self._woken.set()

    async def run_once(self) -> None:
        """Act on the newest map for all migrations to this shard. Waits for the engine only. Busy: repeat."""
        for source in list(self._coming):
            async with self._lock(source):
                if source in self._coming and (
                    self._is_ours(self._coming[source]) or not self._is_wanted(source)
                ):
                    await self._settle(source)
        bring_all(self._inside)

    def _lock(self, source: int) -> asyncio.Lock:
        return self._at_work.setdefault(source, asyncio.Lock())

    def _is_ours(self, coming: IncomingMigration) -> bool:
        owners, shard = self._map.shard_of_partition, self._inside.shard
        ours = [owners[partition] == shard for partition in coming.partitions]
        if any(ours) and not (all(ours) and coming.whole):
            raise Bug(f"the map gives shard {shard} partitions that have not come")
        return all(ours)

    def _is_wanted(self, source: int) -> bool:
        """Whether the partitions that come from this source may still become ours."""
        owners, wanted = self._map.shard_of_partition, goals(self._map)
        return all(
            owners[partition] == source and wanted[partition] == self._inside.shard
            for partition in self._coming[source].partitions
        )

    async def _settle(self, source: int) -> None:
        """End an earlier attempt: take its partitions up if the map makes them ours, else remove them."""
        while self._inside.kv.full:
            await self._inside.kv.room()
        coming = self._coming.get(source)
        if coming is not None and self._is_ours(coming):
            self._take_up(source, coming)
        elif coming is not None:
            await self._remove(source)

    # -- messages ----------------------------------------------------------------------------------------------------

    async def take(self, request: MoveRequest, payload: bytes | memoryview) -> MoveReply:
        """Process one message of a source. On return its contents are in the records; after the last all are
        durable.

        StaleEpoch, StaleTerm  the partitions do not come from this source (any more), or there was a later
                               attempt
        NoSpace, Fenced        as raised by the engine
        """
        if request.destination != self._inside.shard:
            raise StaleEpoch(f"this is shard {self._inside.shard}, not {request.destination}")
        async with self._lock(request.source):
            if request.step == MoveRequest.BEGIN:
                return await self._begin(request)
            coming = self._coming.get(request.source)
            if coming is None or (coming.term, coming.attempt) != (request.term, request.attempt):
                raise StaleEpoch("there was another attempt, or this one is over")
            if request.number not in (coming.number, coming.number + 1) or (
                coming.whole and request.number > coming.number
            ):
                raise InvalidRequest(f"message {request.number} cannot follow {coming.number}")
            if request.number == coming.number + 1:
                await self._lay(request, coming, payload)
            if request.step == MoveRequest.END:
                await self._begin_numbers_at(request.inode_bound)
                await self._inside.kv.sync()
            return MoveReply(inodes=self._coming[request.source].inodes)

    async def _begin_numbers_at(self, bound: int) -> None:
        """Skip the inode numbers below `bound`, which the source may have given.

        This process and the next give none of them.
        """
        numbers, view = self._inside.numbers, self._inside.view
        if view.next_number < bound:
            if numbers.bounds.inode < bound:
                await numbers.raise_above(bound)
            view.next_number = max(view.next_number, bound)

    def _check_map(self, request: MoveRequest, partitions: tuple[int, ...]) -> None:
        received = decode_map(request.map)
        if self._map is None or received.epoch > self._map.epoch:
            self._inside.use_map(received)
        now = self._map
        source, wanted = now.shard_by_id.get(request.source), goals(now)
        if source is None or source.term != request.term:
            raise StaleTerm(f"shard {request.source} is not in term {request.term}")
        if not partitions or any(
            now.shard_of_partition[p] != source.id or wanted[p] != self._inside.shard for p in partitions
        ):
            raise StaleEpoch("these partitions are not to move here from there")

    async def _begin(self, request: MoveRequest) -> MoveReply:
        if len(request.partitions) % 2:
            raise InvalidRequest("partitions are 2 bytes each")
        partitions = struct.unpack(f"<{len(request.partitions) // 2}H", request.partitions)
        if any(partition >> 12 for partition in partitions) or len(set(partitions)) != len(partitions):
            raise InvalidRequest("a partition that does not exist, or one twice")
        self._check_map(request, partitions)
        source, before = request.source, self._coming.get(request.source)
        if before is not None and (before.term, before.attempt) >= (request.term, request.attempt):
            raise StaleEpoch(f"attempt {before.attempt} of term {before.term} was begun already")
        if before is not None:  # the source knows its outcome, so it shows in the source's map, and in ours
            await self._settle(source)
        for other, one in list(self._coming.items()):  # from sources that have given them up
            if not set(one.partitions).isdisjoint(partitions):
                await self._settle(other)
        for partition in partitions:
            await self._leaving.remove(partition)
        self._inside.ranges.set_foreign(partitions, True)
        coming = IncomingMigration(request.term, request.attempt, 0, 0, False, partitions)
        await self._apply([(coming_key(source), encode_coming(coming))])
        self._coming[source], self._opened[source] = coming, {}
        return MoveReply()

    async def _apply(self, effects: list[Effect], reclaims: bool = False) -> None:
        kv = self._inside.kv
        while kv.full:
            await kv.room()
        kv.apply(effects, reclaims=reclaims)

    async def _lay(
        self, request: MoveRequest, coming: IncomingMigration, payload: bytes | memoryview
    ) -> None:
        kv, source, effects, inodes = self._inside.kv, request.source, [], coming.inodes
        if len(payload):
            record = decode(memoryview(payload), 0)
            if record is None or record.length != len(payload):
                raise CorruptFrame("the records of a moving partition are not sound")
            wanted = set(coming.partitions)
            for key, value in record.effects:
                if records.kind_of(key) & records.SHARD or records.partition_of_key(key) not in wanted:
                    raise InvalidRequest("a record of another partition")
                if records.kind_of(key) == records.INODE:
                    inodes += (value is not None) - (kv.get(key) is not None)
                effects.append((key, value))
        for session in request.sessions:
            decode_session(session.record)
            effects.append((arrived_key(source, session.session), session.record))
        for key, value in effects:
            if value is not None and len(key) < 2:
                raise InvalidRequest("a key without a kind")
        coming = coming._replace(number=request.number, inodes=inodes, whole=request.step == MoveRequest.END)
        effects.append((coming_key(source), encode_coming(coming)))
        await self._apply(list(dict(effects).items()), reclaims=coming.whole)
        self._coming[source] = coming
        opened = self._opened.setdefault(source, {})
        for session in request.sessions:
            opened.setdefault(session.session, []).extend(inodes_of(session.opened))
        self._waits_s[source] = request.orphans_wait_ms / 1000

    # -- the end ---------------------------------------------------------------------------------------------------------

    def _take_up(self, source: int, coming: IncomingMigration) -> None:
        """Take up the partitions, which are ours now, in one step: nothing here waits."""
        inside, kv = self._inside, self._inside.kv
        arrived = kv.scan(*arrived_range(source), SESSIONS_MAX)
        effects: list[Effect] = [(coming_key(source), None), *((key, None) for key, _ in arrived)]
        if coming.inodes:
            effects.append(
                (records.COUNTS_KEY, records.encode_counts(inside.view.inode_count + coming.inodes))
            )
        effects.append(seen_effect(kv, self._map.epoch))
        sessions = {arrived_session_of_key(key): decode_session(raw) for key, raw in arrived}
        effects += [
            (records.session_key(number), encode_session(record))
            for number, record in sessions.items()
            if number not in inside.sessions.by_number
        ]
        kv.apply(effects, reclaims=True)
        inside.view.inode_count += coming.inodes
        # If an earlier process received the open files and the orphans' delay, clients have a lease time to
        # report again.
        opened, wait_s = self._opened.pop(source, {}), self._waits_s.pop(source, inside.sessions.lease_s)
        for number, record in sessions.items():
            inside.sessions.arrive(number, record, opened.get(number, ()), inside.clock.boottime_s())
        inside.collector.take(coming.partitions, wait_s)
        inside.take_volumes(coming.partitions, True)
        inside.cuts.resume(list(coming.partitions))
        inside.locks.load(coming.partitions, inside.sessions.by_number)
        del self._coming[source]
        inside.ranges.set_foreign(coming.partitions, False)
        self.taken += len(coming.partitions)
        log.info(
            "%d partitions from %d on have come from shard %d, with %d inodes and %d sessions",
            len(coming.partitions),
            coming.partitions[0],
            source,
            coming.inodes,
            len(sessions),
        )
        try:
            bring_all(inside)
        except Busy:
            self._woken.set()

    async def _remove(self, source: int) -> None:
        """Remove arrived records that are not to stay.

        The migration's own record goes last, so a crash does not stop this.
        """
        coming = self._coming.get(source)
        if coming is None:
            return
        for first, end in (*_ranges(coming.partitions), arrived_range(source)):
            while pairs := self._inside.kv.scan(first, end, STEP_KEYS):
                await self._apply([(key, None) for key, _ in pairs], reclaims=True)
                await asyncio.sleep(0)
        await self._apply([(coming_key(source), None)], reclaims=True)
        self._coming.pop(source, None)
        self._opened.pop(source, None)
        self._inside.ranges.set_foreign(coming.partitions, False)


def _ranges(partitions: Iterable[int]) -> Iterable[tuple[bytes, bytes]]:
    for partition in partitions:
        yield records.prefix(partition, 0), records.prefix(partition + 1, 0)
