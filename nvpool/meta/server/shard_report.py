"""Status, counters and metrics of a shard that has started. Made by `meta/server/service`."""

from __future__ import annotations

from nvpool.kv.metrics import measure_engine
from nvpool.meta.migration.service import MigrationService
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.meta.state import records
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.rpc.v1 import meta_pb2 as pb

PARTS_COUNTED_MAX = 1000


class ShardReport:
    """Figures of all parts of a shard."""

    def __init__(self, parts: ShardParts, moving: MigrationService) -> None:
        self._shard = parts.shard
        self._status = parts.status
        self._kv = parts.kv
        self._view = parts.view
        self._sessions = parts.sessions
        self._collector = parts.collector
        self._locks = parts.locks
        self._watches = parts.watches
        self._cross_shard = parts.cross_shard
        self._runs = parts.runs
        self._waits = parts.waits
        self._moving = moving

    def fill(self, reply: pb.MetaStatusReply) -> None:
        """Add the counts of the shard to its status."""
        reply.inodes = self._view.inode_count
        reply.sessions = len(self._sessions.by_number)
        reply.next_counter = self._view.next_number
        reply.orphans = len(self._collector.orphans)
        reply.to_collect = self._collector.queue_length
        reply.counters.update(self.figures())

    def figures(self) -> dict[str, float]:
        """Counters of the service for its status and its metrics."""
        counters = dict(
            self._status.counters,
            cutting=len(self._view.cutting),
            collected=self._collector.collected,
            open_inodes=len(self._sessions.holders),
            waiting=len(self._waits.tasks),
            waited=self._waits.waited,
            **self._locks.counters(),
            **self._watches.counters(),
            **self._cross_shard.counters(),
            **self._moving.counters(),
            walks=self._runs.under_way(),
            parts=len(self._kv.scan(*records.part_range(), PARTS_COUNTED_MAX)),
        )
        counters.update((f"kv_{name}", value) for name, value in self._kv.statistics().items())
        return counters

    def measure(self, page: Page, *, may_answer: bool) -> None:
        """Add the metrics of this shard.

        `may_answer`: whether the primary lease is valid, if one is needed.
        """
        shard, figures = self._shard, self.figures()
        for metric, name in (
            (metrics.META_OPEN, "open_inodes"),
            (metrics.META_LEASES, "watches"),
            (metrics.META_RECALLS, "recalls"),
            (metrics.META_RECALLS_LATE, "recalls_waited_out"),
            (metrics.META_LOCKS, "locks"),
            (metrics.META_LOCK_WAITERS, "lock_waiters"),
            (metrics.META_WAITING, "waiting"),
            (metrics.META_CHANGES, "changes"),
            (metrics.META_REPEATED, "repeated"),
            (metrics.META_REFUSED, "refused"),
            (metrics.META_SPANS, "spans"),
            (metrics.META_COLLECTED, "collected"),
        ):
            page.set(metric, figures[name], shard=shard)
        page.set(metrics.META_SERVING, self._status.state == "serving" and may_answer, shard=shard)
        page.set(metrics.META_INODES, self._view.inode_count, shard=shard)
        page.set(metrics.META_SESSIONS, len(self._sessions.by_number), shard=shard)
        page.set(metrics.META_ORPHANS, len(self._collector.orphans), shard=shard)
        page.set(metrics.META_TO_COLLECT, self._collector.queue_length, shard=shard)
        measure_engine(self._kv.statistics(), page)
