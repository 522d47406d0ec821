"""Background work of a store for its chains: resync, orphan removal, scrub and repair.

The store catches up with chains that it joins, removes the chunks of chains that it left, reads all blocks
from time to time, and has its bad blocks repaired from other members. `store/server/service` creates this
object; the heartbeat code reports its results to the manager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from nvpool.core.clock import Clock
from nvpool.core.units import MIB
from nvpool.poolmap.model import PoolMap
from nvpool.store.chunks.api import ChunkStore
from nvpool.store.maintenance.orphan_chunks import OrphanChunks
from nvpool.store.maintenance.repair import Repair
from nvpool.store.maintenance.scrub_schedule import INTERVAL_S, SCRUB_BYTES_PER_S, ScrubSchedule
from nvpool.store.replication.chain_writes import ReplicaRepairs
from nvpool.store.replication.peer_connections import PeerDialer
from nvpool.store.replication.resync import Resync
from nvpool.store.replication.transfer_client import OtherTargets
from nvpool.store.throttle import Throttle

RESYNC_BYTES_PER_S = 128 * MIB
"""Default rate limit of background work; see [store] resync_bytes_s.

The limit is a fifth of the bytes that one core of a store moves, so that serving keeps its latency.
"""


class BackgroundWork:
    def __init__(
        self,
        store: ChunkStore,
        target: int,
        dialer: PeerDialer,
        secret: bytes,
        clock: Clock,
        *,
        bytes_per_s: float = RESYNC_BYTES_PER_S,
        scrub_interval_s: float = INTERVAL_S,
        scrub_bytes_per_s: float = SCRUB_BYTES_PER_S,
        busy: Callable[[], bool] = bool,
        on_fail: Callable[[str], None] = lambda reason: None,
        is_caught_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the background work.

        `busy` returns whether client requests wait here. `on_fail` is called with a reason when a part of the
        work died of a bug. `is_caught_up`: see OrphanChunks.
        """
        self.others = OtherTargets(dialer, secret, clock)
        self._bytes_per_s = bytes_per_s
        self.throttle = Throttle(bytes_per_s, clock, busy)
        self.resync = Resync(store, target, self.others, clock, self.throttle, on_fail=on_fail)
        self.orphan_chunks = OrphanChunks(
            store, target, clock, self.throttle, on_fail, is_caught_up=is_caught_up
        )
        self.repair = Repair(store, target, self.others, clock, self.throttle, on_fail)
        self.replica_repairs = ReplicaRepairs(self.resync.pull, self.repair.mended, self.repair.rebuilt)
        self.rounds = ScrubSchedule(
            store,
            target,
            self.repair,
            clock,
            busy,
            interval_s=scrub_interval_s,
            bytes_per_s=scrub_bytes_per_s,
            on_fail=on_fail,
        )

    def update_map(self, pool_map: PoolMap) -> None:
        self.others.update_map(pool_map)
        self.throttle.bytes_per_s = pool_map.moving.limit_bytes_s or self._bytes_per_s
        self.resync.update_map(pool_map)
        self.orphan_chunks.update_map(pool_map)
        self.repair.update_map(pool_map)
        self.rounds.start()

    def counters(self) -> dict[str, float]:
        """Return the counters for the status. Resync counters are absent while no chain is joined."""
        progress = self.resync.progress
        found = {
            "repaired_blocks": self.repair.repaired_blocks,
            "rebuilt_chunks": self.repair.rebuilt_chunks,
            "strays_removed": self.orphan_chunks.removed_chunks,
        }
        if progress.chains:
            found |= {
                f"resync_{name}": value
                for name, value in asdict(progress).items()
                if name not in ("waits_for", "lacks_room")
            }
        return {name: float(value) for name, value in found.items()}

    async def close(self) -> None:
        await self.resync.close()
        await self.orphan_chunks.close()
        await self.rounds.close()
        await self.repair.close()
