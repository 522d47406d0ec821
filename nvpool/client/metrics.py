"""The Prometheus metrics of a mounted client. Called by mountd/server and mountd/read_worker at each scrape."""

from __future__ import annotations

from nvpool.client.vfs.filesystem import Vfs
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page


def measure_client(vfs: Vfs, page: Page) -> None:
    chunks, meta, short = vfs.chunks.counters, vfs.meta.counters, vfs.chunks.short.counters
    for way, count in (
        ("store", chunks["reads"]),
        ("short_cut", short["hits"]),
        ("kept", vfs.reader.kept_count),
        ("read_ahead", vfs.reader.counters["ahead_hits"]),
    ):
        page.set(metrics.CLIENT_READS, count, way=way)
    page.set(metrics.CLIENT_MESSAGES, chunks["messages"])
    page.set(metrics.CLIENT_WRITES, chunks["writes"])
    page.set(metrics.CLIENT_UNSTORED, vfs.writer.held_bytes())
    for shard, silent_s in vfs.meta.primaries.silent_s().items():
        page.set(metrics.CLIENT_PRIMARY_SILENT, silent_s, shard=shard)
    page.set(metrics.CLIENT_REPEATS, chunks["repeats"], service="store")
    page.set(metrics.CLIENT_REPEATS, meta["repeats"], service="meta")
    page.set(metrics.CLIENT_HEDGED, vfs.chunks.hedging.counters["hedged"])
    page.set(metrics.CLIENT_MISMATCHES, chunks["mismatches"], way="store")
    page.set(metrics.CLIENT_MISMATCHES, short["mismatches"], way="short_cut")
    page.set(metrics.CLIENT_QUESTIONS, meta["questions"], kind="look")
    page.set(metrics.CLIENT_QUESTIONS, meta["changes"], kind="change")
