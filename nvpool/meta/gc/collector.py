"""Garbage collector: deletes unlinked inodes when no session has them open, then their chunks on all targets.

There are two durable steps, because the removal of the last name must survive a power loss before bytes are
deleted:

    orphan    inode without links. It is ripe when no session has it open, its truncation is done, and it was
              unlinked longer ago than `linger_s` (clients report opens without a request within that time),
              or, if a dead session had it open, when that session's grants have expired. After a restart
              nothing is ripe for one lease time, in which clients report their open files.
    collect   the inode is deleted; its chunks wait. The records are synced first, then DATA_REMOVE is sent to
              every target of its table, then the entry is deleted. If a target does not answer, the entry
              stays in the queue; a repeated removal is harmless.

Owned by `meta/server/service`, which runs `run_once` about every second and on META_COLLECT, and sweeps all
targets at a longer interval.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Iterable

from nvpool.core.clock import Clock
from nvpool.core.errors import CorruptRecord, NvpoolError
from nvpool.core.ids import counter_of, partition_of
from nvpool.core.units import PARTITION_COUNT
from nvpool.kv.api import Kv
from nvpool.meta.operations.xattr import XATTRS_MAX
from nvpool.meta.state import records
from nvpool.meta.state.quota import QuotaAccount, account
from nvpool.meta.state.record_locks import LockedRecord
from nvpool.meta.state.transaction import View
from nvpool.meta.state.volume_records import VOLUME, volume_key
from nvpool.meta.store_client import Targets
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import data_pb2, wire_pb2

_log = logging.getLogger(__name__)

BATCH = 1024
"""Inodes in one DATA_REMOVE, and in one scan step."""
APPLY_BATCH = 128
"""Orphans deleted in one change: about half a millisecond of the event loop."""


async def partitions_with_remains(kv: Kv) -> list[int]:
    """Partitions that have orphans, a collect queue, intents or locks; used at a start.

    These kinds lie next to each other in the key order. Empty partitions are skipped: one scan for each other
    partition, 4,096 at most.
    """
    found, partition = [], 0
    while partition < PARTITION_COUNT:
        pairs = kv.scan(records.prefix(partition, records.ORPHAN), records.IDENTITY_KEY, 1)
        if not pairs:
            break
        owner, kind = records.partition_of_key(pairs[0][0]), records.kind_of(pairs[0][0])
        if kind in (records.ORPHAN, records.COLLECT, records.INTENT, records.LOCK):
            found.append(owner)
            partition = owner + 1
        else:
            partition = owner if owner > partition and kind < records.ORPHAN else owner + 1
        if not partition % 64:
            await asyncio.sleep(0)
    return found


class Collector:
    """Garbage collector of one shard."""

    def __init__(
        self,
        kv: Kv,
        view: View,
        targets: Targets,
        clock: Clock,
        linger_s: float,
        is_open: Callable[[int], bool],
    ) -> None:
        self._kv = kv
        self._view = view
        self._targets = targets
        self._clock = clock
        self._linger_s = linger_s
        self.is_open = is_open
        self._running = asyncio.Lock()
        self.grace_until_s = 0.0
        self.orphans: dict[int, float] = {}
        """Inode -> earliest time at which it is ripe, on boottime."""
        self.kept: list[int] = []
        """Ripe orphans that a session had open at the last run."""
        self.queued: set[int] = set()
        """Partitions that may have entries in their collect queue."""
        self.collected = 0
        self.queue_length = 0
        """Entries left by the last run."""

    def add(self, inode: int) -> None:
        """Add an inode that has just lost its last name."""
        self.orphans[inode] = self._clock.boottime_s() + self._linger_s

    def hold(self, inodes: list[int], until_s: float) -> None:
        """Keep orphans that a dead session had open until its grants expire."""
        for inode in inodes:
            if inode in self.orphans:
                self.orphans[inode] = max(self.orphans[inode], until_s)

    def load(self, partitions: list[int]) -> None:
        """Load the orphans that a restart left in these partitions; all of them may have a queue."""
        self.orphans.clear()
        self.queued.clear()
        self.take(partitions, 0.0)

    def take(self, partitions: Iterable[int], wait_s: float) -> None:
        """Add partitions that are ours from here on; their orphans are kept for `wait_s` at least."""
        ripe_s = self._clock.boottime_s() + wait_s
        for partition in partitions:
            first, end = records.prefix(partition, records.ORPHAN), records.prefix(partition, records.COLLECT)
            while pairs := self._kv.scan(first, end, BATCH):
                self.orphans.update((records.inode_of_key(key), ripe_s) for key, _ in pairs)
                first = pairs[-1][0] + b"\0"
            self.queued.add(partition)

    def forget(self, partitions: frozenset[int]) -> None:
        """Forget partitions that belong to another shard now."""
        for inode in [inode for inode in self.orphans if partition_of(inode) in partitions]:
            del self.orphans[inode]
        self.queued -= partitions

    def waits_s(self, partitions: frozenset[int]) -> float:
        """Seconds for which the last of the orphans in these partitions must still be kept."""
        now_s = self._clock.boottime_s()
        ripe_s = max(
            (ripe_s for inode, ripe_s in self.orphans.items() if partition_of(inode) in partitions),
            default=now_s,
        )
        return max(self._linger_s, ripe_s - now_s, self.grace_until_s - now_s)

    async def run_once(self) -> tuple[int, int]:
        """Run once: (inodes whose chunks were removed, orphans and queue entries left as far as known).

        There is one run at a time; other callers wait for it.
        """
        async with self._running:
            await self._bury()
            removed, left = await self._empty_queues()
            self.collected += removed
            self.queue_length = left
            return removed, left + len(self.orphans)

    async def _bury(self) -> None:
        """Turn ripe orphans into entries of the collect queue."""
        now_s = self._clock.boottime_s()
        if now_s < self.grace_until_s:
            return
        ripe = [inode for inode, ripe_s in self.orphans.items() if ripe_s <= now_s]
        self.kept = [inode for inode in ripe if self.is_open(inode)]
        ripe = [inode for inode in ripe if self._may_go(inode)]
        for at in range(0, len(ripe), APPLY_BATCH):
            while self._kv.full:
                await self._kv.room()
            self._bury_batch(ripe[at : at + APPLY_BATCH])
            await asyncio.sleep(0)

    def _may_go(self, inode: int) -> bool:
        return (
            inode in self.orphans
            and not self.is_open(inode)
            and inode not in self._view.cutting
            and self._view.serves(partition_of(inode))
        )

    def _bury_batch(self, inodes: list[int]) -> None:
        # From here to the apply nothing may wait: an inode that is opened meanwhile must not go.
        effects: list[tuple[bytes, bytes | None]] = []
        buried, queued = [], set()
        count = self._view.inode_count
        counted: dict[int, QuotaAccount] = {}
        for number in inodes:
            if not self._may_go(number):
                continue
            buried.append(number)
            orphan = records.numbered_key(records.ORPHAN, number)
            if self._kv.get(orphan) is None:
                continue  # an inode that was created without a name has got one
            effects.append((orphan, None))
            key = records.inode_key(number)
            raw = self._kv.get(key)
            if raw is None:
                continue
            try:
                inode = records.decode_inode(number, raw)
            except CorruptRecord as error:
                _log.error("orphan %d is left to fsck: %s", number, error)
                effects.pop()
                continue
            if inode.volume and not self._uncount(inode, counted):
                effects.pop()
                buried.pop()
                continue
            if inode.links:
                _log.error(
                    "inode %d is among the orphans and has %d names; left to fsck", number, inode.links
                )
                effects.pop()
                continue
            effects.append((key, None))
            count -= 1
            if inode.flags & records.HAS_XATTRS:
                effects += [
                    (xattr, None) for xattr, _ in self._kv.scan(*records.xattr_range(number), XATTRS_MAX)
                ]
            if inode.is_file and inode.flags & records.TOUCHED:
                entry = records.Collect(inode.table, inode.chunk_bits)
                effects.append((records.numbered_key(records.COLLECT, number), records.encode_collect(entry)))
                queued.add(partition_of(number))
        effects += [found.effect() for found in counted.values()]
        if effects:
            effects.append((records.COUNTS_KEY, records.encode_counts(count)))
            self._kv.apply(effects, reclaims=True)
        self._view.inode_count = count
        self.queued |= queued
        for number in buried:
            del self.orphans[number]

    def closed(self, inode: int) -> None:
        """Handle the last close of an inode: without a name it does not count in its volume any longer."""
        if inode not in self.orphans:
            return
        key = records.numbered_key(records.ORPHAN, inode)
        if not self._view.serves(partition_of(inode)) or self._kv.get(key) != records.ORPHAN_COUNTED:
            return
        raw = self._kv.get(records.inode_key(inode))
        effects: list[tuple[bytes, bytes | None]] = [(key, records.ORPHAN_VALUE)]
        counted: dict[int, QuotaAccount] = {}
        try:
            uncounted = raw is None or self._uncount(records.decode_inode(inode, raw), counted)
            if uncounted and not self._kv.full:  # otherwise it counts until it is deleted
                self._kv.apply(effects + [found.effect() for found in counted.values()], reclaims=True)
        except CorruptRecord:
            pass  # left to fsck

    def _uncount(self, inode: records.Inode, counted: dict[int, QuotaAccount]) -> bool:
        """Remove an inode from the usage of its volume.

        False: it cannot be deleted yet, because it is the root of an existing volume, or because a
        cross-shard transaction has locked the usage.
        """
        if inode.number == inode.volume:
            return self._kv.get(volume_key(VOLUME, inode.number)) is None
        if self._kv.get(records.numbered_key(records.ORPHAN, inode.number)) != records.ORPHAN_COUNTED:
            return True
        if inode.volume not in counted:
            try:
                found = account(self._view, inode.volume)
            except LockedRecord:
                return False
            if found is None or found.record is None:
                return True
            counted[inode.volume] = found
        counted[inode.volume].use.files -= 1
        counted[inode.volume].use.bytes -= inode.size if inode.is_file else 0
        return True

    async def _empty_queues(self) -> tuple[int, int]:
        """Process the queues of all partitions as far as the targets answer: (removed, left)."""
        removed = left = 0
        away: set[int] = set()
        batch: list[tuple[bytes, bytes]] = []
        partitions = sorted(self.queued)
        for partition in partitions:
            if not self._view.serves(partition):
                continue
            first, end = (
                records.prefix(partition, records.COLLECT),
                records.prefix(partition, records.COLLECT + 1),
            )
            while pairs := self._kv.scan(first, end, BATCH - len(batch)):
                first = pairs[-1][0] + b"\0"
                batch += pairs
                if len(batch) == BATCH:
                    gone = await self._remove(batch, away)
                    removed, left = removed + gone, left + len(batch) - gone
                    batch = []
                    if not gone:
                        return removed, left  # no target answers; the rest is left to a later run
        if batch:
            gone = await self._remove(batch, away)
            removed, left = removed + gone, left + len(batch) - gone
        for partition in partitions:
            if not self._kv.scan(
                records.prefix(partition, records.COLLECT), records.prefix(partition, records.COLLECT + 1), 1
            ):
                self.queued.discard(partition)
        return removed, left

    async def _remove(self, batch: list[tuple[bytes, bytes]], away: set[int]) -> int:
        """Remove the chunks of these queue entries; return how many are done.

        Tables in `away` do not answer now.
        """
        await self._kv.sync()
        by_table: dict[int, list[bytes]] = {}
        for key, raw in batch:
            try:
                by_table.setdefault(records.decode_collect(raw).table, []).append(key)
            except CorruptRecord as error:
                _log.error("an entry of the collect queue is left to fsck: %s", error)
        removed = 0
        for table, keys in by_table.items():
            if table in away or not await self._remove_chunks(table, keys):
                away.add(table)
                continue
            while self._kv.full:
                await self._kv.room()
            self._kv.apply(
                [(key, None) for key in keys if self._view.serves(records.partition_of_key(key))],
                reclaims=True,
            )
            removed += len(keys)
        return removed

    async def _remove_chunks(self, table: int, keys: list[bytes]) -> bool:
        targets = await self._targets.of_table(table)
        inodes = struct.pack(f"<{len(keys)}Q", *map(records.inode_of_key, keys))
        failed: dict[int, NvpoolError] = await self._targets.broadcast(
            targets, wire_pb2.DATA_REMOVE, data_pb2.RemoveRequest(inodes=inodes)
        )
        if failed:
            _log.debug(
                "chunks of %d inodes wait for targets %s: %s",
                len(keys),
                sorted(failed),
                next(iter(failed.values())),
            )
        return not failed

    async def sweep_all(self) -> int:
        """Call `sweep` for every target that answers; return the number of inodes."""
        swept = 0
        for target in sorted(self._targets.all()):
            try:
                swept += await self.sweep(target)
            except NvpoolError as error:
                _log.info("target %d is not swept this time: %s", target, error)
        return swept

    async def sweep(self, target: int) -> int:
        """Remove a target's orphan chunks: chunks of inodes that are deleted and in no queue.

        They come from a write that was in progress when the inode's chunks were removed. Returns the number
        of such inodes. An inode counts as deleted if its number was given before the sweep began, and the
        synced shard does not know it. Raises the target's errors; may be repeated.
        """
        bound, after, swept = self._view.next_number, 0, 0
        while True:
            answer = await self._targets.ask(
                target, wire_pb2.DATA_LIST, data_pb2.ListRequest(after=after, limit=BATCH)
            )
            reply = decoded(data_pb2.ListReply, answer.message)
            listed = struct.unpack(f"<{len(reply.inodes) // 8}Q", reply.inodes)
            gone = [inode for inode in listed if self._is_gone(inode, bound)]
            if gone:
                await self._kv.sync()
                inodes = struct.pack(f"<{len(gone)}Q", *gone)
                await self._targets.ask(target, wire_pb2.DATA_REMOVE, data_pb2.RemoveRequest(inodes=inodes))
                _log.info("target %d had chunks of %d inodes that are gone", target, len(gone))
                swept += len(gone)
            if not reply.more or not listed:
                return swept
            after = listed[-1]

    def _is_gone(self, inode: int, bound: int) -> bool:
        owners, partition = self._view.owners, partition_of(inode)
        return (
            counter_of(inode) < bound
            and partition < PARTITION_COUNT
            and (not owners or owners[partition] == self._view.shard)
            and self._kv.get(records.inode_key(inode)) is None
            and self._kv.get(records.numbered_key(records.COLLECT, inode)) is None
        )
