"""Partition ownership: partitions that a shard does not serve although their records are here.

Such a partition is closed for its migration, is arriving, or has left and is being removed. Requests read
through this module. Without such partitions they read the engine directly, at no cost. Otherwise each key is
checked: records of a closed partition are locked (`meta/state/record_locks`) until its owner is known, and
other shards' records are refused. Owned by `meta/server/service`; changed by `source` and `destination`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from nvpool.core.errors import Unavailable, WrongShard
from nvpool.core.units import PARTITION_COUNT
from nvpool.kv.api import Kv
from nvpool.kv.snapshot import EngineSnapshot
from nvpool.meta.state.migration_records import COMING, SEEN
from nvpool.meta.state.record_locks import Hold, LockedRecord
from nvpool.meta.state.records import INODE, SHARD, kind_of
from nvpool.meta.state.transaction import View
from nvpool.meta.state.transaction_records import TURN_KEY, TransactionId, partition_of_held

REPEAT_S = 0.02
"""Retry delay for a client that knows a newer map than this shard."""


class _ClosedPartitions(Hold):
    """Lock of whole partitions for a migration. A transaction that meets it releases its locks and waits."""

    def __init__(self, shard: int) -> None:
        super().__init__(TransactionId(shard, 0, 0), 0, 0.0)

    def gives_way_to(self, order: int, span: TransactionId) -> bool:
        return False


class PartitionOwnership:
    """`get`, `get_many` and `scan` are the engine's reads for requests.

    They may be replaced; after that each listener in `changed` is called.
    """

    def __init__(self, kv: Kv, view: View) -> None:
        self._kv = kv
        self._view = view
        self._closed: dict[int, _ClosedPartitions] = {}
        self.foreign: set[int] = set()
        """Partitions whose records are here but not ours: arriving, or left."""
        self.gone: set[int] = set()
        """Those of `foreign` that have left and are not removed yet; until then their inodes count as ours."""
        self.get, self.get_many, self.scan = kv.get, kv.get_many, kv.scan
        self.changed: list[Callable[[], None]] = []
        view.serves, view.snapshot = self.serves, self.snapshot

    def check(self, key: bytes) -> None:
        """Check that the key may be read.

        Held: its partition is closed. WrongShard: the partition is not ours. Unavailable: the map says
        already that we have it, but it is still being taken up.
        """
        if key[0] < SHARD >> 8 or key == TURN_KEY:
            self.check_partition(partition_of_held(key))

    def check_partition(self, partition: int) -> None:
        closed = self._closed.get(partition)
        if closed is not None:
            raise LockedRecord(closed)
        if partition in self.foreign:
            owners = self._view.owners
            if owners and owners[partition] == self._view.shard:
                raise Unavailable(
                    f"partition {partition} is being taken up", may_be_applied=False, retry_after_s=REPEAT_S
                )
            raise WrongShard(f"partition {partition} belongs to another shard")

    def closed(self, partition: int) -> Hold | None:
        return self._closed.get(partition)

    def serves(self, partition: int) -> bool:
        """Whether background work may change records of the partition."""
        return partition not in self._closed and partition not in self.foreign

    def ours(self) -> list[int]:
        """Partitions that this shard owns now, including those that are being migrated away."""
        return [
            partition
            for partition in range(PARTITION_COUNT)
            if not self._view.is_elsewhere(partition) and partition not in self.foreign
        ]

    def snapshot(self) -> OurSnapshot:
        return OurSnapshot(self._kv.snapshot(), frozenset(self.foreign), frozenset(self.gone))

    def close(self, partitions: Collection[int]) -> None:
        """Stop all reads and changes of the partitions until `open`."""
        self._closed.update(dict.fromkeys(partitions, _ClosedPartitions(self._view.shard)))
        self.choose_readers()

    def open(self, partitions: Collection[int]) -> None:
        """Reopen the partitions after their owner is decided: waiting requests are tried again, here or
        elsewhere."""
        waiting = {self._closed.pop(partition) for partition in partitions if partition in self._closed}
        self.choose_readers()
        for closed in waiting:
            closed.done.set_result(None)

    def set_foreign(self, partitions: Iterable[int], foreign: bool) -> None:
        if foreign:
            self.foreign.update(partitions)
        else:
            self.foreign.difference_update(partitions)
        self.choose_readers()

    def choose_readers(self) -> None:
        """Let reads go to the engine directly while no partition is closed or foreign."""
        kv = self._kv
        if self._closed or self.foreign:
            self.get, self.get_many, self.scan = self._get, self._get_many, self._scan
            self._view.check_partition = self.check_partition
        else:
            self.get, self.get_many, self.scan = kv.get, kv.get_many, kv.scan
            self._view.check_partition = None
        for listener in self.changed:
            listener()

    def _get(self, key: bytes) -> bytes | None:
        self.check(key)
        return self._kv.get(key)

    def _get_many(self, keys: list[bytes]) -> list[bytes | None]:
        for key in keys:
            self.check(key)
        return self._kv.get_many(keys)

    def _scan(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        self.check(first)  # a request scans only within one partition
        return self._kv.scan(first, end, limit)


class OurSnapshot:
    """Snapshot (kv/api) without partitions that were not ours when it was taken, and without migration
    records."""

    def __init__(self, snapshot: EngineSnapshot, foreign: frozenset[int], gone: frozenset[int]) -> None:
        self._snapshot = snapshot
        self._foreign = foreign
        self._gone = gone
        self.inodes_gone = 0
        """Inodes skipped so far that were counted as this shard's."""
        self.sequence = snapshot.sequence
        self.skip, self.close = snapshot.skip, snapshot.close

    @property
    def done(self) -> bool:
        return self._snapshot.done

    def step(self, limit: int) -> list[tuple[bytes, bytes]]:
        return [(key, raw) for key, raw in self._snapshot.step(limit) if self._is_ours(key)]

    def _is_ours(self, key: bytes) -> bool:
        head = key[0] << 8 | key[1] if len(key) > 1 else SHARD
        if head & SHARD:
            return not COMING <= head <= SEEN
        if not self._foreign or head >> 3 not in self._foreign:
            return True
        self.inodes_gone += kind_of(key) == INODE and head >> 3 in self._gone
        return False
