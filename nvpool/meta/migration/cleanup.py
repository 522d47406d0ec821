"""Cleanup after a migration: forgets partitions that another shard owns now, and removes their records.

The state in memory is forgotten immediately; the records are removed in steps. Before that, a record is
written that says that the partitions have left, with the epoch of the map that moved them; a start with an
older map is refused. Owned by `meta/server/service`; `run_once` is called by `source`, and `remove` by
`destination` for partitions that come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from nvpool.core.errors import StaleEpoch
from nvpool.core.units import PARTITION_COUNT
from nvpool.kv.api import Effect, Kv
from nvpool.meta.migration.shard_context import ShardContext
from nvpool.meta.state import records
from nvpool.meta.state.migration_records import (
    GONE_RANGE,
    GONE_VALUE,
    SEEN_KEY,
    decode_seen,
    encode_seen,
    gone_key,
    partition_of_gone_key,
)
from nvpool.poolmap.model import PoolMap

STEP_KEYS = 500
PAUSE_S = 0.002
"""Pause between two steps: requests have priority."""

log = logging.getLogger(__name__)


class PartitionCleanup:
    """Removes partitions that have left this shard: those in `gone` of PartitionOwnership."""

    def __init__(self, inside: ShardContext) -> None:
        self._inside = inside
        self._gone = inside.ranges.gone
        self._unmarked: set[int] = set()
        """Those of `_gone` that are not recorded as such. No record of them may be removed yet."""
        self._epoch = 0

    @property
    def waiting(self) -> int:
        """Number of partitions that may have records left."""
        return len(self._gone)

    def begin(self, pool_map: PoolMap, kept: Collection[int]) -> None:
        """Find at a start the partitions that are here and not ours by the map.

        `kept`: partitions that are arriving. StaleEpoch: the map is older than the last migration; start with
        a newer one.
        """
        kv = self._inside.kv
        self._epoch = seen_epoch(kv)
        if pool_map.epoch < self._epoch:
            raise StaleEpoch(
                f"shard {self._inside.shard} has given or taken partitions by map {self._epoch}, this one has "
                f"epoch {pool_map.epoch}"
            )
        marked = {partition_of_gone_key(key) for key, _ in kv.scan(*GONE_RANGE, PARTITION_COUNT)}
        owners = pool_map.shard_of_partition
        there = {
            partition
            for partition in range(PARTITION_COUNT)
            if owners[partition] != self._inside.shard
            and partition not in kept
            and kv.scan(records.prefix(partition, 0), records.prefix(partition + 1, 0), 1)
        }
        self._unmarked = there - marked
        self._gone.clear()
        self._gone.update(marked - set(kept), self._unmarked)
        self._inside.ranges.set_foreign(self._gone, True)

    def forget(self, pool_map: PoolMap, partitions: Collection[int]) -> None:
        """Forget partitions that this map gives to another shard.

        On return no state in memory refers to them.
        """
        inside = self._inside
        inside.ranges.set_foreign(partitions, True)
        self._unmarked.update(partitions)
        self._gone.update(partitions)
        self._epoch = max(self._epoch, pool_map.epoch)
        gone = frozenset(partitions)
        inside.collector.forget(gone)
        inside.locks.forget(gone)
        inside.appends.forget(gone)
        inside.sessions.forget(gone)
        inside.forget_volumes(gone)
        inside.ranges.open(partitions)

    async def run_once(self) -> int:
        """Remove the records of partitions that have left; return how many. Waits for the engine only."""
        removed = 0
        while self._gone:
            if self._unmarked:
                await self.mark_partitions()
            partition = next(iter(self._gone - self._unmarked), None)
            if partition is not None:
                removed += await self.remove(partition)
        return removed

    async def mark_partitions(self) -> None:
        """Record durably which partitions have left. Their records may be removed from then on."""
        kv = self._inside.kv
        while kv.full:
            await kv.room()
        kv.apply(
            [
                *((gone_key(partition), GONE_VALUE) for partition in sorted(self._unmarked)),
                seen_effect(kv, self._epoch),
            ],
            reclaims=True,
        )
        self._unmarked = set()

    async def remove(self, partition: int) -> int:
        """Remove the remaining records of a partition that has left; nothing if it has not."""
        if partition in self._unmarked:
            await self.mark_partitions()
        inside, removed = self._inside, 0
        kv = inside.kv
        first, end = records.prefix(partition, 0), records.prefix(partition + 1, 0)
        while partition in self._gone and partition not in self._unmarked:
            if kv.full:
                await kv.room()
                continue  # another task may have removed the partition, and it may be arriving again
            # From here to the apply nothing may wait: the count is the shard's.
            pairs = kv.scan(first, end, STEP_KEYS)
            effects: list[Effect] = [(key, None) for key, _ in pairs]
            inodes = sum(records.kind_of(key) == records.INODE for key, _ in pairs)
            if inodes:
                effects.append((records.COUNTS_KEY, records.encode_counts(inside.view.inode_count - inodes)))
            if len(pairs) < STEP_KEYS:
                effects.append((gone_key(partition), None))
            kv.apply(effects, reclaims=True)
            inside.view.inode_count -= inodes
            removed += len(pairs)
            if len(pairs) < STEP_KEYS:
                self._gone.discard(partition)
                inside.ranges.set_foreign((partition,), False)
            else:
                await asyncio.sleep(PAUSE_S)
        return removed


def seen_epoch(kv: Kv) -> int:
    raw = kv.get(SEEN_KEY)
    return decode_seen(raw) if raw is not None else 0


def seen_effect(kv: Kv, epoch: int) -> Effect:
    """Effect that stores this epoch; applied together with a change that the map of this epoch causes."""
    return SEEN_KEY, encode_seen(max(epoch, seen_epoch(kv)))
