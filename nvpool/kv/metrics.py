"""Prometheus metrics of an engine, from its statistics. Called by meta and store."""

from __future__ import annotations

from collections.abc import Mapping

from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page


def measure_engine(statistics: Mapping[str, float], page: Page) -> None:
    """Add the metrics of an engine to `page`; do nothing for an engine without such statistics
    (`MemoryKv`)."""
    if "journal_bytes" not in statistics:
        return
    for metric, name in (
        (metrics.KV_ENTRIES, "entries"),
        (metrics.KV_USED, "used_bytes"),
        (metrics.KV_MAP_MAX, "map_bytes_max"),
        (metrics.KV_JOURNAL, "journal_bytes"),
        (metrics.KV_CHECKPOINTS, "checkpoints"),
        (metrics.KV_SYNCS, "syncs"),
        (metrics.KV_CHANGES, "sequence"),
        (metrics.KV_DRIVE_FULL, "drive_full"),
    ):
        page.set(metric, statistics.get(name, 0.0))
    page.set(metrics.KV_WAITING, statistics.get("layer_entries", 0.0) + statistics.get("frozen_entries", 0.0))
    page.set(
        metrics.KV_UNSYNCED,
        max(0.0, statistics.get("sequence", 0.0) - statistics.get("synced_sequence", 0.0)),
    )
