"""Status of a store: its state, contents, I/O statistics and metrics.

Made by `store/server/service`. Nothing is computed before a request asks
for it.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from typing import Any

from nvpool.core import grants
from nvpool.core.clock import Clock
from nvpool.kv.metrics import measure_engine
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import Call
from nvpool.rpc.peer_roles import Role
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.store.chunks.api import ChunkStore
from nvpool.store.maintenance.background import BackgroundWork
from nvpool.store.server.io_stats import IoStats
from nvpool.store.server.map_state import MapState
from nvpool.store.server.serving_lease import ServingLease

CHUNKS_DESCRIBED_MAX, INODES_LISTED_MAX = 4096, 65_536


class StatusHandlers:
    """Requests for the status and the contents of a target, and its metrics."""

    def __init__(
        self,
        target: int,
        store: ChunkStore,
        callers: Callers,
        map_state: MapState,
        *,
        use: IoStats,
        serving_lease: ServingLease,
        upkeep: BackgroundWork | None,
        clock: Clock,
        parse: Callable[[Any, Call], Any],
        check_right: Callable[[Call, bytes, int, int], grants.Grant],
        is_draining: Callable[[], bool],
        waiting_count: Callable[[], int],
    ) -> None:
        """`parse` and `check_right` raise the errors of the service; the latter checks a caller's grant."""
        self._target = target
        self._store = store
        self._callers = callers
        self._map_state = map_state
        self._use = use
        self._serving_lease = serving_lease
        self._upkeep = upkeep
        self._clock = clock
        self._parse = parse
        self._check_right = check_right
        self._is_draining = is_draining
        self._waiting_count = waiting_count

    def report(self, call: Call) -> None:
        """Report the space of the target to every caller.

        Nodes also get the activity here and the bad blocks by inode.
        """
        self._parse(pb.DataStatusRequest, call)
        status = self._store.status()
        if self._callers.of(call.peer).role != Role.NODE:
            room = {name: status[name] for name in ("state", "kind", "capacity_bytes", "used_bytes")}
            call.reply(pb.DataStatusReply(target=self._target, **room).SerializeToString())
            return
        if self._is_draining():
            status["state"] = "draining"
        status["chunks"] = max(0, status["chunks"])
        status["refused"] = self._serving_lease.refused
        if self._upkeep is not None:
            status["counters"] |= self._upkeep.counters()
            status["scrubbing"] = self._upkeep.rounds.status()
            status["lacks_room"] = self._upkeep.resync.progress.lacks_room
            status["resync_wait"] = self._upkeep.resync.progress.waits_for
            orphan_chunks = self._upkeep.orphan_chunks
            status["strays_left"], status["strays_wait"] = orphan_chunks.left_chunks, orphan_chunks.waits_for
        reply = pb.DataStatusReply(
            target=self._target,
            pid=os.getpid(),
            **status,
            bad=[pb.BadBlock(**one._asdict()) for one in self._store.bad_blocks()],
        )
        call.reply(reply.SerializeToString())

    def report_use(self, call: Call) -> None:
        """Report I/O statistics to a client that watches them."""
        call.reply(self._use.report(self._parse(pb.UseRequest, call)).SerializeToString())

    def describe(self, call: Call) -> None:
        """List the chunks of an inode.

        Permitted for callers with a right to the inode and for nodes.
        """
        request = self._parse(pb.DescribeRequest, call)
        if self._callers.of(call.peer).role != Role.NODE:
            self._check_right(call, request.grant, request.inode, grants.READ | grants.WRITE)
        limit = max(1, min(request.limit or 1024, CHUNKS_DESCRIBED_MAX))
        found, more = self._store.describe(request.inode, request.first, limit)
        chunks = [
            pb.ChunkDescription(leaving=self._leaves(request.inode, one.index), **one._asdict())
            for one in found
        ]
        self._serving_lease.check()
        call.reply(
            pb.DescribeReply(chunks=chunks, more=more, map_epoch=self._map_state.epoch).SerializeToString()
        )

    def _leaves(self, inode: int, index: int) -> bool:
        chain = self._store.table_of(inode, index), chain_of(inode, index)
        return self._upkeep is not None and self._upkeep.orphan_chunks.leaves(chain)

    def list_inodes(self, call: Call) -> None:
        """List the inodes that have chunks here."""
        request = self._parse(pb.ListRequest, call)
        found, more = self._store.inodes(request.after, max(1, min(request.limit or 1024, INODES_LISTED_MAX)))
        call.reply(
            pb.ListReply(
                inodes=struct.pack(f"<{len(found)}Q", *found), more=more, map_epoch=self._map_state.epoch
            ).SerializeToString()
        )

    def measure(self, page: Page) -> None:
        """Add the metrics of this target."""
        status = self._store.status()
        counters = status["counters"]
        for metric, name in (
            (metrics.STORE_READS, "reads"),
            (metrics.STORE_READ_BYTES, "read_bytes"),
            (metrics.STORE_READS_WAITED, "reads_waited"),
            (metrics.STORE_WRITES, "writes"),
            (metrics.STORE_FLUSHES, "flushes"),
            (metrics.STORE_BAD_BLOCKS, "bad_blocks"),
        ):
            page.set(metric, counters.get(name, 0.0))
        page.set(metrics.STORE_CAPACITY, status["capacity_bytes"])
        page.set(metrics.STORE_USED, status["used_bytes"])
        page.set(metrics.STORE_FENCED, status["state"] == "fenced")
        page.set(metrics.STORE_WAITING, self._waiting_count())
        page.set(metrics.STORE_SHORT_CIRCUIT_READS, self._use.past_reads)
        page.set(metrics.STORE_SHORT_CIRCUIT_BYTES, self._use.past_bytes)
        serving_lease = self._serving_lease
        if serving_lease.shared and math.isfinite(serving_lease.until_s):
            page.set(metrics.STORE_LEASE, max(0.0, serving_lease.until_s - self._clock.boottime_s()))
        measure_engine(
            {
                name.removeprefix("index_"): value
                for name, value in counters.items()
                if name.startswith("index_")
            },
            page,
        )
        upkeep = self._upkeep
        if upkeep is None:
            return
        page.set(metrics.STORE_REPAIRED, upkeep.repair.repaired_blocks)
        page.set(metrics.STORE_REBUILT, upkeep.repair.rebuilt_chunks)
        page.set(metrics.STORE_ORPHAN_CHUNKS_REMOVED, upkeep.orphan_chunks.removed_chunks)
        page.set(metrics.STORE_ORPHAN_CHUNKS_LEFT, upkeep.orphan_chunks.left_chunks)
        progress = upkeep.resync.progress
        page.set(metrics.RESYNC_CHAINS, progress.chains_equal, state="equal")
        page.set(metrics.RESYNC_CHAINS, progress.chains - progress.chains_equal, state="behind")
        page.set(metrics.RESYNC_COPIED, progress.bytes_copied)
        page.set(metrics.RESYNC_LEFT, progress.bytes_left)
        scrub = upkeep.rounds.status()
        runs = scrub.state == "running"
        page.set(metrics.SCRUB_RUNNING, runs)
        page.set(metrics.SCRUB_BLOCKS, scrub.blocks, state="read")
        page.set(metrics.SCRUB_BLOCKS, max(0, scrub.blocks_total - scrub.blocks), state="left")
        page.set(metrics.SCRUB_BAD, scrub.bad if scrub.began_ms else scrub.last_bad)
        page.set(metrics.SCRUB_ENDED, scrub.last_ended_ms / 1000)
