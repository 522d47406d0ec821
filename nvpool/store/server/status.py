"""Status of a store: its state, contents, I/O statistics and metrics.

A part of `store/server/service`, which owns all objects used here. Nothing is computed before a request asks
for it.
"""

from __future__ import annotations

import math
import os
import struct

from nvpool.core import grants
from nvpool.kv.metrics import measure_engine
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import Call
from nvpool.rpc.peer_roles import Role
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.store.server.io_stats import IoStats

CHUNKS_DESCRIBED_MAX, INODES_LISTED_MAX = 4096, 65_536


class StatusHandlers:
    use: IoStats
    _callers: Callers

    def _status(self, call: Call) -> None:
        """Report the space of the target to every caller.

        Nodes also get the activity here and the bad blocks by inode.
        """
        self._parse(pb.DataStatusRequest, call)
        status = self.store.status()
        if self._callers.of(call.peer).role != Role.NODE:
            room = {name: status[name] for name in ("state", "kind", "capacity_bytes", "used_bytes")}
            call.reply(pb.DataStatusReply(target=self.target, **room).SerializeToString())
            return
        if self._draining:
            status["state"] = "draining"
        status["chunks"] = max(0, status["chunks"])
        status["refused"] = self.serving_lease.refused
        if self.upkeep is not None:
            status["counters"] |= self.upkeep.counters()
            status["scrubbing"] = self.upkeep.rounds.status()
            status["lacks_room"] = self.upkeep.resync.progress.lacks_room
            status["resync_wait"] = self.upkeep.resync.progress.waits_for
            orphan_chunks = self.upkeep.orphan_chunks
            status["strays_left"], status["strays_wait"] = orphan_chunks.left_chunks, orphan_chunks.waits_for
        reply = pb.DataStatusReply(
            target=self.target,
            pid=os.getpid(),
            **status,
            bad=[pb.BadBlock(**one._asdict()) for one in self.store.bad_blocks()],
        )
        call.reply(reply.SerializeToString())

    def _report_use(self, call: Call) -> None:
        call.reply(self.use.report(self._parse(pb.UseRequest, call)).SerializeToString())

    def _describe(self, call: Call) -> None:
        """List the chunks of an inode.

        Permitted for callers with a right to the inode and for nodes.
        """
        request = self._parse(pb.DescribeRequest, call)
        if self._callers.of(call.peer).role != Role.NODE:
            self._check_right(call, request.grant, request.inode, grants.READ | grants.WRITE)
        limit = max(1, min(request.limit or 1024, CHUNKS_DESCRIBED_MAX))
        found, more = self.store.describe(request.inode, request.first, limit)
        chunks = [
            pb.ChunkDescription(leaving=self._leaves(request.inode, one.index), **one._asdict())
            for one in found
        ]
        self.serving_lease.check()
        call.reply(pb.DescribeReply(chunks=chunks, more=more, map_epoch=self._epoch).SerializeToString())

    def _leaves(self, inode: int, index: int) -> bool:
        chain = self.store.table_of(inode, index), chain_of(inode, index)
        return self.upkeep is not None and self.upkeep.orphan_chunks.leaves(chain)

    def _list(self, call: Call) -> None:
        request = self._parse(pb.ListRequest, call)
        found, more = self.store.inodes(request.after, max(1, min(request.limit or 1024, INODES_LISTED_MAX)))
        call.reply(
            pb.ListReply(
                inodes=struct.pack(f"<{len(found)}Q", *found), more=more, map_epoch=self._epoch
            ).SerializeToString()
        )

    def measure(self, page: Page) -> None:
        _measure(self, page)


def _measure(service, page: Page) -> None:
    status = service.store.status()
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
    page.set(metrics.STORE_WAITING, service.waiting_count)
    page.set(metrics.STORE_SHORT_CIRCUIT_READS, service.use.past_reads)
    page.set(metrics.STORE_SHORT_CIRCUIT_BYTES, service.use.past_bytes)
    serving_lease = service.serving_lease
    if serving_lease.shared and math.isfinite(serving_lease.until_s):
        page.set(metrics.STORE_LEASE, max(0.0, serving_lease.until_s - service.clock.boottime_s()))
    measure_engine(
        {name.removeprefix("index_"): value for name, value in counters.items() if name.startswith("index_")},
        page,
    )
    upkeep = service.upkeep
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
