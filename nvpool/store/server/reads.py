"""Reads of a store from request frame to reply frame.

A 4 KiB read over TCP needs two dozen small decisions. Here they are made in one step, without an object for the
request, and the kernel reads the blocks into the frame of the reply.

A request is answered here under all of these conditions:

* The frame is complete, with one read of whole blocks, by one grant of that inode that was verified before, with
  the current map epoch. Grants of services are left to the service, which knows the caller.
* The read has up to BLOCKS_MAX blocks, or up to LARGE_BLOCKS_MAX if the connection can send a reply later.
* The chunk and the segment are in the index cache, without a hole, a damaged block, lost data, or a write
  that the chain has not decided yet.
* No client watches the I/O statistics.

Any other request is left to the batched reads of the service (store/server/service), which also report errors;
here none is reported. They give the same answers with the same bytes and the same counts.

Blocks that are not in the page cache are left too, unless the device reads with io_uring: then the drive writes them
into the reply frame, and the frame is sent on completion. The reads of a burst are submitted to the drive
together, and completed reads are answered a few at a time. Until then the read is in the connection's table, as a
call would be. If the map, the serving lease or the watching of statistics has changed by then, or the drive has
failed, the request is left to the service. From 64 KiB on, reads of clients with a cache of their own bypass the page
cache, as in the service.

A device without a file descriptor, such as a simulated drive, fills the reply frame by its `read_now`.

`store/server/service` creates the reads of its store. A listener of the stream transports calls them through the
handler's `fast_path` (rpc/api).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from nvpool.blockio import uring_reader
from nvpool.blockio.reader import cached_pages
from nvpool.blockio.uring_reader import AGAIN_S, RING_ENTRIES
from nvpool.core import primitives
from nvpool.core.clock import SystemClock, stopwatch_s
from nvpool.core.grants import CLOCK_SKEW_S, READ, SERVICE
from nvpool.core.primitives import ByteReader, ByteWriter, PayloadFrame, RequestFrames
from nvpool.core.units import BLOCK_BYTES
from nvpool.rpc.api import IN_FLIGHT_MAX
from nvpool.rpc.messages.read_write_codec import CLIENT_CACHES, READ_REQUEST_BYTES
from nvpool.rpc.transports.frame import EMPTY, HEADER_BYTES
from nvpool.rpc.v1.wire_pb2 import DATA_READ
from nvpool.store.chunks.api import UNCHECKED, ChunkStore
from nvpool.store.chunks.block_store import BlockChunkStore
from nvpool.store.disk.device import FileDevice
from nvpool.store.disk.index_records import SEGMENT_BITS, SEGMENT_MASK

if TYPE_CHECKING:
    from nvpool.core.clock import Clock
    from nvpool.core.grants import Grant
    from nvpool.rpc.stats import ReplyStats
    from nvpool.store.server.io_stats import IoStats
    from nvpool.store.server.serving_lease import ServingLease

BLOCKS_MAX = 8
"""Largest read in blocks that is only answered immediately."""
LARGE_BLOCKS_MAX = 32
"""Largest read in blocks if it can be answered later."""
OUT_BYTES_MAX = 256 << 10
"""Limit of the replies to frames that arrived together; the remaining frames are left to the service."""
FRAME_BYTES = HEADER_BYTES + READ_REQUEST_BYTES
"""Length of the frame of one read with one grant, as `encode_read_request` makes its message."""
REAP_MAX = 8
"""Completed reads that are answered before the next ones are taken, so that clients get the first answers early."""

_uring: Any = uring_reader.compiled
_BLOCKS_MAX, _LARGE_BLOCKS_MAX, _OUT_BYTES_MAX = BLOCKS_MAX, LARGE_BLOCKS_MAX, OUT_BYTES_MAX
_FRAME_BYTES, _REQUEST_BYTES, _REAP_MAX = FRAME_BYTES, READ_REQUEST_BYTES, REAP_MAX
_IN_FLIGHT_MAX, _RING_ENTRIES, _BLOCK_MASK = IN_FLIGHT_MAX, RING_ENTRIES, BLOCK_BYTES - 1
_SEGMENT_BITS, _SEGMENT_MASK = SEGMENT_BITS, SEGMENT_MASK
_METHOD, _CLIENT_CACHES, _UNCHECKED, _READ, _SERVICE = DATA_READ, CLIENT_CACHES, UNCHECKED, READ, SERVICE
_SKEW_MS = int(CLOCK_SKEW_S * 1000)


class ColdRead:
    """Read that waits for the drive, in place of an InboundCall in its connection's table.

    It keeps the memory that the kernel writes to, even if the client has gone by then.
    """

    __slots__ = (
        "method",
        "side",
        "cancelled",
        "byte_count",
        "since_s",
        "reading",
        "frame",
        "message",
        "epoch",
        "number",
        "deadline_ms",
        "length",
        "is_direct",
    )

    def begin(
        self,
        side: Any,
        frame: PayloadFrame,
        message: bytes,
        number: int,
        deadline_ms: int,
        length: int,
        epoch: int,
        since_s: float,
        is_direct: bool,
    ) -> None:
        """Set what is needed to answer the request `number` of `side`, or to leave it to the service.

        `is_direct`: the descriptor of the read bypasses the page cache.
        """
        self.method = _METHOD
        self.side, self.frame, self.message = side, frame, message
        self.number, self.deadline_ms, self.length, self.epoch = number, deadline_ms, length, epoch
        self.since_s, self.is_direct = since_s, is_direct
        self.byte_count = self.reading = 0
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel: the client has gone or no longer wants the read; its connection has dropped it."""
        self.cancelled = True


class Reads:
    """Reads of one target that are answered from frame to frame.

    `epoch` is that of the served map, 0 while nothing must be answered here. `open` is True until the service is
    closed. `writes` handles the frames of writes (store/server/writes), or is None.
    """

    def __init__(
        self,
        target: int,
        grants: dict[bytes, Grant],
        store: BlockChunkStore,
        pending: dict[tuple[int, int], Any],
        serving_lease: ServingLease,
        use: IoStats,
        clock: Clock,
    ) -> None:
        """Create the reads of one target.

        `grants` has the verified grants by their bytes. `pending` has the chunks with an undecided write.
        """
        self.epoch = 0
        self.open = True
        self.writes: Any = None
        self._target = target
        self._grants, self._pending = grants, pending
        self._store, self._index, self._quarantine = store, store.index, store.quarantine
        self._reader, self._readings, self._device = store.reader, store.readings, store.device
        self._serving_lease, self._use, self._clock = serving_lease, use, clock
        self._is_system = type(clock) is SystemClock
        self._fd = -1
        self._direct_reads: Any = None
        self._has_ring = False
        device: Any = store.device
        if type(device) is FileDevice:
            self._fd, self._direct_reads = device.fd, device.direct_reads
            self._has_ring = device.read_path == "io_uring"
        self._frames, self._source, self._message = RequestFrames(), ByteReader(), ByteWriter()
        self._ring: Any = None
        self._loop: Any = None
        self._inside = self._prepared = 0
        self._is_sent_again = self._is_cold = False
        self._waits: dict[ColdRead, None] = {}

    @property
    def waiting(self) -> int:
        """Reads that the drive has not completed."""
        return self._inside

    def _now_s(self) -> float:
        return primitives.boottime_s() if self._is_system else self._clock.boottime_s()

    def answer(
        self,
        buffer: bytearray,
        end: int,
        in_work: dict[int, Any],
        reply_stats: ReplyStats,
        out: list[Any],
        side: Any = None,
    ) -> int:
        """Answer the frames at the beginning of `buffer`, as far as this is possible here.

        `end` bytes of the buffer are valid. Appends a reply frame for each frame that is answered now to `out`, and
        returns the number of bytes that the taken frames have. `in_work` has the requests in progress by their
        numbers. `side` is the answering end of the connection, which accepts later answers; without `side` no
        read from the drive is started.
        """
        if end > len(buffer):
            raise ValueError("frames lie outside of their buffer")
        store = self._store
        if (
            not self.open
            or not self.epoch
            or len(in_work) >= _IN_FLIGHT_MAX
            or store.fenced_because
            or store.closed
            or not self._serving_lease.vouched
            or self._use.on
        ):
            return 0
        at = total = 0
        while end - at >= _FRAME_BYTES and total < _OUT_BYTES_MAX:
            since_s = self._now_s()
            message = self._frames.take(buffer, at, end, _REQUEST_BYTES)
            if message is None:
                if self.writes is None:
                    break
                count = len(out)
                length = self.writes.answer(buffer, at, end, in_work, reply_stats, out, side)
                if not length:
                    break
                at += length
                if len(out) > count:  # otherwise it is answered later
                    total += len(out[count])
                continue
            found = self._reply(message, in_work, side, since_s)
            if found is None:
                break
            at += _FRAME_BYTES
            reply_stats.begun += 1
            if isinstance(found, ColdRead):
                continue
            frame = found
            out.append(frame.take())
            total += frame.size
            self._count(reply_stats, self._length, since_s)
        if self._prepared:
            self.submit()
        return at

    def _count(self, reply_stats: ReplyStats, length: int, since_s: float) -> None:
        self._reader.read_count += 1
        self._reader.read_bytes += length
        reply_stats.answered(_METHOD, self._now_s() - since_s, 0, 0, length)

    def _reply(
        self, message: bytes, in_work: dict[int, Any], side: Any, since_s: float
    ) -> PayloadFrame | ColdRead | None:
        """Reply frame to the request that was taken last, or its read that has been begun; None: neither."""
        frames, source = self._frames, self._source
        if (
            frames.method != _METHOD
            or not frames.deadline_ms
            or frames.frame_bytes != _FRAME_BYTES
            or (in_work and (len(in_work) >= _IN_FLIGHT_MAX or frames.number in in_work))
        ):
            return None
        # One grant and one read, as read_write_codec.encode_read_request packs them: tags, lengths and values.
        source.open(message)
        if (
            source.u8() != 0x09
            or source.u64() != self.epoch
            or source.u8() != 0x10
            or source.u8() != self._target
            or source.u16() != 0x3C1A
        ):
            return None
        raw = source.raw(60)
        if source.u16() != 0x1822:
            return None
        inode = source.u64()
        index = source.u32()
        offset = source.u32()
        length = source.u32()
        place = source.u16()
        flags = source.u16()
        most = _BLOCKS_MAX if side is None else _LARGE_BLOCKS_MAX
        if (offset | length) & _BLOCK_MASK or not 0 < length <= most << 12 or place:
            return None
        grant = self._grants.get(raw)
        if grant is None:
            return None
        rights, owner = grant.rights, grant.inode
        if not rights & _READ or rights & _SERVICE or owner != inode:
            return None
        ends_ms = grant.ends_ms
        now_ms = (primitives.wall_ns() if self._is_system else self._clock.wall_ns()) // 1_000_000
        if now_ms > _SKEW_MS and ends_ms < now_ms - _SKEW_MS:
            return None
        name = (inode, index)
        if self._pending and name in self._pending:
            return None
        if self._quarantine.chunks and name in self._quarantine.chunks:
            return None
        chunk = self._index.young.get(name)
        if chunk is None:
            return None
        block, count = offset >> 12, length >> 12
        number = block >> _SEGMENT_BITS
        if number >= len(chunk.segments):
            return None
        segment = chunk.segments[number]
        if segment is None:
            return None
        within = block & _SEGMENT_MASK
        begin = segment.run(within, count) << 12
        if not begin:
            return None
        # As read_write_codec.encode_read_reply packs one result.
        said = self._message
        said.begin()
        said.u8(0x09)
        said.u64(self.epoch)
        said.u16(0x1012)
        said.u16(0)
        said.u16(_UNCHECKED)
        said.u32(length)
        said.u64(chunk.version)
        said.u8(0x1A)
        said.varint(count << 2)
        said.part(segment.crcs, within << 2, count << 2)
        frame: PayloadFrame = PayloadFrame.__new__(PayloadFrame)
        frame.begin(frames.number, said, length)
        self._length = length
        may_wait = side is not None and self._has_ring and self._inside < _RING_ENTRIES
        fd = -1
        if count > _BLOCKS_MAX and flags & _CLIENT_CACHES and may_wait:
            fd = self._direct_reads.descriptor_for(begin, length)
        # A trial read makes the drive start each read by itself. After a trial that missed the page cache,
        # the ring submits all reads together.
        is_cold = fd >= 0 or (
            self._is_cold and may_wait and 0 <= cached_pages(self._fd, begin, length) < count
        )
        if not is_cold:
            if self._fd >= 0:
                is_cold = not frame.fill(self._fd, begin)
            else:
                is_cold = bool(
                    self._device.read_now(
                        [begin], [length], [0], frame.payload(), flags & _CLIENT_CACHES != 0
                    )
                )
        self._is_cold = is_cold
        if is_cold:
            if not may_wait or not self._has_opened():
                return None
            return self._begin(in_work, side, message, frame, self._fd if fd < 0 else fd, begin, since_s)
        if self._serving_lease.shared and not self._serving_lease.holds():
            return None
        return frame

    # -- reads from the drive ----------------------------------------------------------------------------------------

    def _has_opened(self) -> bool:
        """Whether there is a ring whose completions the event loop watches."""
        if self._ring is None:
            try:
                self._ring = _uring.Ring(_RING_ENTRIES)
            except OSError:  # nor later
                self._has_ring = False
                return False
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._ring.fileno, self.reap)
        return True

    def _begin(
        self,
        in_work: dict[int, Any],
        side: Any,
        message: bytes,
        frame: PayloadFrame,
        fd: int,
        begin: int,
        since_s: float,
    ) -> ColdRead:
        one: ColdRead = ColdRead.__new__(ColdRead)
        one.begin(
            side,
            frame,
            message,
            self._frames.number,
            self._frames.deadline_ms,
            self._length,
            self.epoch,
            since_s,
            fd != self._fd,
        )
        self._ring.begin(fd, frame, begin, one)
        self._inside += 1
        self._prepared += 1
        one.reading = self._readings.begin(self._store.kv.sequence)
        in_work[one.number] = one
        self._waits[one] = None
        if self._inside == 1:  # the drive is idle
            self.submit()
        return one

    def submit(self) -> None:
        """Submit the prepared reads to the drive; retry soon if the kernel has no memory for them now."""
        if not self._prepared or self._ring is None:
            return
        try:
            self._prepared = self._ring.send()
        except OSError:
            pass
        if self._prepared and not self._is_sent_again:
            self._is_sent_again = True
            self._loop.call_later(AGAIN_S, self._submit_again)

    def _submit_again(self) -> None:
        self._is_sent_again = False
        self.submit()

    def reap(self) -> None:
        """Answer completed reads, a few at a time."""
        while self._ring is not None:
            found = self._ring.ended(_REAP_MAX)
            total = 0
            sides: list[Any] = []
            for done, result in found:
                one: ColdRead = done
                self._inside -= 1
                self._readings.end(one.reading)
                if one not in self._waits:
                    continue
                del self._waits[one]
                if one.cancelled:
                    continue
                try:
                    self._end(one, result, sides)
                except Exception as error:  # a bug: other waiting reads must still be answered
                    self._loop.call_exception_handler(
                        {"message": "a read of a store has failed", "exception": error}
                    )
                total += one.length
                if total >= _OUT_BYTES_MAX:
                    total = 0
                    _flush(sides)
                    sides = []
            _flush(sides)
            if len(found) < _REAP_MAX:
                return

    def _end(self, one: ColdRead, result: int, sides: list[Any]) -> None:
        side = one.side
        del side.in_work[one.number]
        if side not in sides:
            sides.append(side)
        is_whole = result == one.length
        if (
            not is_whole
            or one.epoch != self.epoch
            or self._store.fenced_because
            or self._store.closed
            or self._use.on
            or (self._serving_lease.shared and not self._serving_lease.holds())
        ):
            if not is_whole and one.is_direct:
                self._direct_reads.refused()
            self._leave(one)
            return
        self._reader.missed_count += 1
        self._count(side.reply_stats, one.length, one.since_s)
        side.frames.out.append(one.frame.take())
        side.frames.out_bytes += one.frame.size

    def _leave(self, one: ColdRead) -> None:
        """Leave the read to the service as if it arrived now; the service reports any error."""
        left_s = one.since_s + one.deadline_ms / 1000 - self._now_s()
        one.side.reply_stats.begun -= 1
        one.side.arrived(one.number, _METHOD, max(0, int(left_s * 1000)), one.message, EMPTY)

    def give_up(self) -> None:
        """Leave all waiting requests to the service, which refuses them.

        Data that arrives for reads is dropped.
        """
        waits, self._waits = self._waits, {}
        for one in waits:
            if not one.cancelled:
                del one.side.in_work[one.number]
                self._leave(one)

    def close(self) -> None:
        """Release the ring. Call when no read waits any more."""
        if self._ring is not None:
            self._loop.remove_reader(self._ring.fileno)
            self._ring.close()
            self._ring, self._has_ring = None, False


def _flush(sides: list[Any]) -> None:
    for side in sides:
        if side.frames.out:
            side.frames.flush()
        if side.on_idle is not None and not side.in_work:
            side.on_idle()


async def close_reads(reads: Reads, drain_s: float) -> None:
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


def open_reads(
    target: int,
    grants: dict[bytes, Grant],
    store: ChunkStore,
    pending: dict[tuple[int, int], Any],
    serving_lease: ServingLease,
    use: IoStats,
    clock: Clock,
) -> Reads | None:
    """Create the reads of a store, or return None: stores in memory and stores with O_DIRECT do not support them."""
    if not isinstance(store, BlockChunkStore) or store.device.direct or not 0 < target < 128:
        return None
    return Reads(target, grants, store, pending, serving_lease, use, clock)
