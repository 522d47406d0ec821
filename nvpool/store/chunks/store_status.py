"""Status of a block store. The user is `block_store`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvpool.core.units import BLOCK_BYTES

if TYPE_CHECKING:
    from nvpool.store.chunks.block_store import BlockChunkStore


def status(store: BlockChunkStore) -> dict:
    """See ChunkStore.status."""
    allocator = store.allocator
    counters = {
        "reads": store.reader.read_count,
        "read_bytes": store.reader.read_bytes,
        "reads_waited": store.reader.missed_count,
        "writes": store.write_count,
        "flushes": store.flush_count,
        "held_blocks": allocator.held_blocks,
        "bad_blocks": len(store.quarantine),
        "lent": store.location_leases.given,
        "resting_changes": allocator.resting_changes,
    }
    counters |= {f"index_{name}": value for name, value in store.kv.statistics().items()}
    return {
        "state": "fenced" if store.fenced_because else "serving",
        "fenced_because": store.fenced_because,
        "capacity_bytes": (allocator.block_count - allocator.reserve_blocks) * BLOCK_BYTES,
        "used_bytes": (allocator.used_blocks - allocator.fixed_blocks) * BLOCK_BYTES,
        "chunks": -1,
        "device": store.path,
        "kind": store.kind,
        "read_path": store.device.read_path,
        "direct": store.device.direct,
        "writes": store.device.writes,
        "host_full": store.room.full_message,
        "counters": {name: float(value) for name, value in counters.items()},
    }
