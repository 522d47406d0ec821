"""Fast path for reads: from request frame to reply frame in one step.

A 4 KiB read over TCP needs two dozen small decisions. Made one by one in Python, with an object for the
request and one for the answer, they cost the store more than the kernel's work does. This path makes them
together, in compiled code if a compiler was available (`_fast_reads`). `PlainReads` is the reference
implementation in Python and gives the same answers.

The path takes a request only under all of these conditions:

* The frame is complete, with one read of up to BLOCKS_MAX whole blocks, by one grant of that inode that was
  verified before, with the current map epoch. Grants of services take the slow path, which knows the caller.
* The chunk and the segment are in the index cache, without a hole, a damaged block, lost data, or a write
  that the chain has not decided yet.
* No client watches the I/O statistics.

Any other request takes the slow path (store/server/service), which also reports errors; the fast path reports
none. The slow path gives the same answers with the same bytes and the same counts.

Blocks that are not in the page cache also take the slow path. The compiled path with io_uring reads them
instead from the drive directly into the reply frame and sends the frame on completion. The reads of a burst
are submitted to the drive together, and completed reads are answered a few at a time. Until then the read is
in the connection's table, like a read that a Call represents. If the map, the serving lease or the watching
of statistics has changed by then, or the drive has failed, the request takes the slow path.

`store/server/service` creates this path for a store on a file or a drive. A listener of the stream transports
calls it through the handler's `fast_path` (rpc/api).
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from nvpool.core.clock import stopwatch_s
from nvpool.core.compiled_loader import load_compiled
from nvpool.core.errors import CorruptFrame, InvalidRequest
from nvpool.core.grants import CLOCK_SKEW_S, READ, SERVICE
from nvpool.core.units import BLOCK_BYTES
from nvpool.rpc.messages.read_write_codec import (
    READ_ENTRY,
    READ_RESULT,
    decode_read_request,
    encode_read_reply,
)
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX
from nvpool.rpc.transports.frame import HEADER_BYTES, REPLY, REQUEST, pack_head_plain, read_head_plain
from nvpool.rpc.v1.wire_pb2 import DATA_READ
from nvpool.store.chunks.api import UNCHECKED, ChunkStore
from nvpool.store.chunks.block_store import BlockChunkStore
from nvpool.store.disk.device import FileDevice
from nvpool.store.disk.index_records import SEGMENT_BITS, SEGMENT_MASK

if TYPE_CHECKING:
    from nvpool.core import grants
    from nvpool.core.clock import Clock
    from nvpool.rpc.stats import ReplyStats
    from nvpool.store.server.io_stats import IoStats
    from nvpool.store.server.serving_lease import ServingLease

compiled = load_compiled("nvpool.store.server._fast_reads")

IS_COMPILED = compiled is not None

BLOCKS_MAX = 8
"""Largest read in blocks. The compiled path allows four times as many if it can answer later.

From 64 KiB on it then bypasses the page cache, like the slow path.
"""
OUT_BYTES_MAX = 256 << 10
"""Limit of the replies to frames that arrived together; the remaining frames take the slow path."""
REQUEST_BYTES = 99
"""Length of the message of one read with one grant, as `encode_read_request` makes it."""
FRAME_BYTES = HEADER_BYTES + REQUEST_BYTES


class PlainReads:
    """Reference implementation of the fast reads.

    `epoch` is that of the served map, 0 while this path must not answer. `open` is True until the service is
    closed.
    """

    def __init__(
        self,
        target: int,
        grants: dict[bytes, grants.Grant],
        store: BlockChunkStore,
        pending: dict,
        serving_lease: ServingLease,
        use: IoStats,
        clock: Clock,
    ) -> None:
        """Create the fast path of one target.

        `grants` has the verified grants by their bytes. `pending` has the chunks with an undecided write.
        """
        self.epoch = 0
        self.open = True
        self.waiting = 0
        self._target = target
        self._grants = grants
        self._store = store
        self._pending = pending
        self._serving_lease = serving_lease
        self._use = use
        self._clock = clock

    def answer(
        self, buffer: bytearray, end: int, in_work: dict, reply_stats: ReplyStats, out: list, side: Any = None
    ) -> int:
        """Answer the frames at the beginning of `buffer`, as far as this is possible immediately.

        `end` bytes of the buffer are valid. Appends a reply frame for each answered frame to `out`, and
        returns the number of bytes that these frames took. `in_work` has the numbers of pending requests.
        `side` is the answering end of the connection, which accepts later answers; without `side` no read
        from the drive is started.
        """
        store, at, total = self._store, 0, 0
        if (
            not self.open
            or not self.epoch
            or len(in_work) >= IN_FLIGHT_MAX
            or store.fenced_because
            or store.closed
            or not self._serving_lease.vouched
            or self._use.on
        ):
            return 0
        while end - at >= FRAME_BYTES and total < OUT_BYTES_MAX:
            since_s = self._clock.boottime_s()
            found = self._reply(buffer, at, in_work)
            if found is None:
                break
            reply, length = found
            at += FRAME_BYTES
            out.append(reply)
            total += len(reply)
            store.reader.read_count += 1
            store.reader.read_bytes += length
            reply_stats.begun += 1
            reply_stats.answered(DATA_READ, self._clock.boottime_s() - since_s, 0, 0, length)
        return at

    def _reply(self, buffer: bytearray, at: int, in_work: dict) -> tuple[bytes, int] | None:
        try:
            head = read_head_plain(buffer, at, at + FRAME_BYTES, 0)
            if type(head) is int or len(head[4]) != REQUEST_BYTES:
                return None
            kind, method, number, deadline_ms, message, payload_bytes = head
            if (
                kind != REQUEST
                or method != DATA_READ
                or payload_bytes
                or not deadline_ms
                or number in in_work
            ):
                return None
            epoch, target, rights, reads, verify = decode_read_request(message)
        except (CorruptFrame, InvalidRequest):
            return None
        if type(rights) is not tuple or epoch != self.epoch or target != self._target or verify:
            return None
        inode, index, offset, length, place, _ = READ_ENTRY.unpack(reads)
        if (offset | length) & BLOCK_BYTES - 1 or not 0 < length <= BLOCKS_MAX * BLOCK_BYTES or place:
            return None
        grant = self._grants.get(rights[0])
        if grant is None or not grant.rights & READ or grant.rights & SERVICE or grant.inode != inode:
            return None
        if grant.ends_ms + CLOCK_SKEW_S * 1000 < self._clock.wall_ns() // 1_000_000:
            return None
        store, name = self._store, (inode, index)
        if name in self._pending or name in store.quarantine.chunks:
            return None
        chunk = store.index.young.get(name)
        if chunk is None:
            return None
        block, count = offset >> 12, length >> 12
        within = block & SEGMENT_MASK
        segment = (
            chunk.segments[block >> SEGMENT_BITS] if block >> SEGMENT_BITS < len(chunk.segments) else None
        )
        if segment is None or within + count > len(segment.disk):
            return None
        disk = segment.disk[within]
        if not disk or (count > 1 and not segment.base):  # a hole; or blocks in more than one run
            return None
        blocks = bytearray(length)
        try:
            if os.preadv(store.device.fd, [blocks], disk << 12, os.RWF_NOWAIT) != length:
                return None
        except OSError:  # EAGAIN: not in the page cache
            return None
        if self._serving_lease.shared and not self._serving_lease.holds():
            return None
        said = encode_read_reply(
            self.epoch,
            READ_RESULT.pack(0, UNCHECKED, length, chunk.version),
            segment.crcs[within * 4 : (within + count) * 4],
        )
        return pack_head_plain(REPLY, 0, number, 0, said, length) + blocks, length

    def reap(self) -> None:
        """Answer reads that the drive has completed."""

    def give_up(self) -> None:
        """Pass reads that wait for the drive to the slow path, which refuses them."""

    def close(self) -> None:
        """Release the resources. Call when no read waits any more."""


async def close(reads: Any, drain_s: float) -> None:
    """Start no new reads, answer waiting ones within `drain_s`, then refuse the rest.

    On return the drive writes to none of their memory.
    """
    reads.open = False
    until_s = stopwatch_s() + drain_s
    while reads.waiting:
        if stopwatch_s() >= until_s:
            reads.give_up()
        reads.submit()
        reads.reap()
        await asyncio.sleep(0.001)
    reads.close()


Reads = PlainReads if compiled is None else compiled.FastReads


def open_fast_reads(
    target: int,
    grants: dict[bytes, grants.Grant],
    store: ChunkStore,
    pending: dict,
    serving_lease: ServingLease,
    use: IoStats,
    clock: Clock,
) -> Any | None:
    """Create the fast reads of a store, or return None.

    Stores in memory, stores on a test device and stores with O_DIRECT do not support them.
    """
    if (
        type(store) is not BlockChunkStore
        or type(store.device) is not FileDevice
        or store.device.direct
        or not 0 < target < 128
    ):
        return None
    return Reads(target, grants, store, pending, serving_lease, use, clock)
