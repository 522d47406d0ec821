"""Read plan of a mount: decodes a READ of the kernel and passes it to the source of its bytes.

A READ becomes a `KernelRead` (fuse/fast_path/kernel_reads), which its source ends: with the blocks of a store's
reply, straight from the connection's receive buffer to the kernel; after a retry or from another replica with bytes;
or with an error. No task and no future is made for it. Each read over a connection is a message of its own; the
frames of a burst are sent together, but a read whose store is idle is sent immediately (client/data/store_reads).
Replies that arrive together are passed on a few at a time, and requests that arrive meanwhile are taken in between.

The plan covers up to LARGE_BYTES of one chunk of a file with no unstored writes here, at an offset that does not
continue where the handle has read before. A chunk with a location is read from the drive (fuse/fast_path/local_reads);
another one from its store, in a file above SMALL_BYTES and if the target gives no locations. Any other READ takes the
slow path (fuse/dispatch to client/read/reader), whose reads of stores are the same.

ReadFastPath is the part of fuse/kernel/connection that uses this, on its loop (see fuse/fast_path/paths).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvpool.client.data.local_drive import BlockLocations
from nvpool.client.data.store_reads import StoreReads
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.small_file_cache import SMALL_BYTES
from nvpool.client.state.vfs_types import FileHandle
from nvpool.core.errors import Stale
from nvpool.core.primitives import ByteReader
from nvpool.core.units import BLOCK_BYTES, KIB
from nvpool.fuse.fast_path.kernel_reads import LARGE_BYTES, TURN, KernelRead, KernelReads
from nvpool.fuse.fast_path.local_reads import LocalReads
from nvpool.fuse.fast_path.read_fallback import ReadFallback
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.pending_requests import IN_WORK_MAX
from nvpool.fuse.protocol.constants import Op
from nvpool.fuse.reply_sender import ReplySender
from nvpool.fuse.request_state import FIRST, RequestState

LARGE_TURN = 2
"""As TURN, for reads of more than WIDE_BYTES."""
WIDE_BYTES = 64 * KIB

_REQUEST_BYTES = 80  # of a READ, as in protocol/requests
_OPCODE, _FIRST, _OFFSET_END = int(Op.READ), FIRST, 1 << 62
_BLOCK_MASK, _LARGE_BYTES, _SMALL_BYTES, _WIDE_BYTES = BLOCK_BYTES - 1, LARGE_BYTES, SMALL_BYTES, WIDE_BYTES
_TURN, _LARGE_TURN = TURN, LARGE_TURN


class ReadPlan:
    """The decoding of READs of one mount. `path.requests` has the request in its buffer.

    The attributes `unique` to `span` describe the READ that was decoded last.
    """

    def __init__(self, path: ReadFastPath, ops: FuseOps, chunks: Any, in_work_max: int) -> None:
        requests = path.requests
        self.path = path
        self.reads = KernelReads(path)
        self._buffer: Any = requests.buffer
        self._requests: Any = requests
        self._in_work_max = in_work_max
        self._files, self._pages, self._paged = ops.files.by_handle, ops.cached_pages, ops.cached_pages.paged
        self._chunks, self._short = chunks, chunks.short
        self._stores: StoreReads = chunks.reads
        self._source = ByteReader()
        self.local: LocalReads | None = None
        if ops.short_circuit is not None and ops.short_circuit.on:
            self.local = LocalReads(self.reads, self._stores, ops.short_circuit)

    def _decode(self, count: int) -> bool:
        """Decode a READ from `count` bytes in the buffer; False: they are something else.

        A longer read, and one that the kernel has resent, are declined too.
        """
        if count != _REQUEST_BYTES:
            return False
        source = self._source
        source.open_part(self._buffer, 0, count)
        if source.u32() != _REQUEST_BYTES or source.u32() != _OPCODE:
            return False
        self.unique = source.u64()
        source.u64()
        source.u64()
        self.pid = source.u32()
        source.u32()
        self.handle = source.u64()
        self.offset = source.u64()
        self.size = source.u32()
        return self.unique <= _FIRST and 0 < self.size <= _LARGE_BYTES and self.offset < _OFFSET_END

    def take(self, count: int) -> bool:
        """Start the READ of `count` bytes in the buffer.

        True: it is in the table of pending requests. False: nothing has happened.
        """
        if not self._decode(count):
            return False
        requests: Any = self._requests
        if requests.forwarded or len(self.reads.work) >= self._in_work_max:
            return False
        opened: FileHandle | None = self._files.get(self.handle)
        if opened is None or not opened.readable or opened.closed:
            return False
        file = opened.file
        if file.lost or file.unreported or (self._pages.guards_pages and file.inode not in self._paged):
            return False
        offset, ahead = self.offset, opened.ahead
        if ahead.next == offset or ahead.units:
            return False
        written: Any = file.written
        if written is None:
            file_bytes = file.attr.size
        elif written.dirty or written.sending:  # the stores do not have all written bytes yet
            return False
        else:
            file_bytes = file.size
        end = offset + self.size
        if end > file_bytes:
            return False
        bits = file.chunk_bits
        index = offset >> bits
        self.skip = offset & _BLOCK_MASK
        self.within = (offset & ((1 << bits) - 1)) - self.skip
        self.span = (self.skip + self.size + _BLOCK_MASK) & ~_BLOCK_MASK
        if (end - 1) >> bits != index or index >> 32 or self.span > _LARGE_BYTES:
            return False
        key: Any = index
        located: Any = file.located.get(key) if file.located else None
        if located is not None:
            if not self._read_from_drive(located):
                return False
            ahead.run = ahead.reads = 0
            ahead.next = end
            return True
        if file_bytes <= _SMALL_BYTES:
            return False
        if self._short.on and self._may_be_local(file, key):
            return False
        self._read_from_store(file, key)
        ahead.run = ahead.reads = 0
        ahead.next = end
        return True

    def _may_be_local(self, file: OpenInode, index: Any) -> bool:
        """Whether the chunk may get a location for short-circuit reads, or its target is unknown."""
        lane = file.lanes.get(index)
        if lane is None:
            try:
                lane = self._chunks.find_lane(file, index)
            except Stale:
                return True
        return bool(self._short.may_serve(lane.target))

    def _read_from_drive(self, located: BlockLocations) -> bool:
        local = self.local
        return local is not None and local.begin(
            located,
            self.unique,
            self.pid,
            self.handle,
            self.offset,
            self.size,
            self.within,
            self.skip,
            self.span,
        )

    def _read_from_store(self, file: OpenInode, index: Any) -> None:
        one: KernelRead = KernelRead.__new__(KernelRead)
        now_s = self._stores.now_s()
        one.begin(file, index, self.within, self.span, now_s + self._stores.patience_s)
        reads = self.reads
        one.start(reads, self.unique, self.skip, self.size, self._requests.since_s)
        reads.turn = _LARGE_TURN if self.span > _WIDE_BYTES else _TURN
        reads.add(one, self.pid)
        try:
            self._stores.begin(one, True, True, now_s)
        except Exception:  # a bug, which our caller reports
            reads.take_back(one)
            raise

    def send(self) -> None:
        """Send or submit the collected reads."""
        if self.local is not None:
            self.local.submit()
        self._stores.send_collected()


class ReadFastPath:
    """Has `plan`, which takes a READ in the buffer if it can; None: the layer below queries no stores.

    `take_requests` reads and answers the requests that wait.
    """

    def __init__(
        self,
        requests: RequestState,
        ops: FuseOps,
        replies: ReplySender,
        fallback: ReadFallback,
        some_ended: Callable[[], None],
        take_requests: Callable[[], None],
    ) -> None:
        self.requests = requests
        self._ops = ops
        self.plan: ReadPlan | None = None
        # called by the plan
        self.read_ended = fallback.read_ended
        self.read_done = fallback.read_done
        self.read_otherwise = fallback.read_otherwise
        self.answer_refused = replies.answer_refused
        self.some_ended = some_ended
        self.take_requests = take_requests

    def start(self) -> None:
        """Take requests from now on, if that is possible here."""
        chunks = self._ops.chunks
        if chunks is not None:
            self.plan = ReadPlan(self, self._ops, chunks, IN_WORK_MAX)

    @property
    def read_bytes(self) -> int:
        """Bytes read since `start`; 0 after `stop`, which counts them in the state."""
        return self.plan.reads.read_bytes if self.plan is not None else 0

    def submit(self) -> None:
        """Send the collected reads."""
        if self.plan is not None:
            self.plan.send()

    async def stop(self) -> None:
        """Take no more requests, send what is collected, and wait for the drive's reads.

        Reads that wait for stores are answered later.
        """
        plan, self.plan = self.plan, None
        if plan is None:
            return
        plan.send()
        if plan.local is not None:
            await plan.local.close(lambda: self.requests.leaving)
        self.requests.read_bytes += plan.reads.read_bytes
