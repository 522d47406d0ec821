"""Fast path for writes to stores: sends immediately and completes in the reply callback.

No task is created. `WriteSubmitter` is a part of the chunk client, for the writer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from nvpool.client.data.unstable_writes import UnstableWrites, WrittenAt
from nvpool.client.state.dirty_file import DirtyExtent, prepared
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.core import errors, primitives
from nvpool.core.errors import CorruptFrame, StaleEpoch, Unavailable
from nvpool.core.primitives import ByteWriter
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.rpc.messages.read_write_codec import WRITE_REPLY_BYTES, decode_write_reply
from nvpool.rpc.transports import request_submission
from nvpool.rpc.transports.request_submission import PAYLOAD_MAX
from nvpool.rpc.v1.wire_pb2 import DATA_WRITE

if TYPE_CHECKING:
    from nvpool.poolmap.model import Chain
    from nvpool.rpc.api import Reply

_METHOD = DATA_WRITE
_PAYLOAD_MAX, _REPLY_BYTES = PAYLOAD_MAX, WRITE_REPLY_BYTES
_out = ByteWriter()


def is_alone(chain: Chain) -> bool:
    """Whether the chain has one target, which no other target can replace without its consent."""
    return len(chain.targets) == 1 and not chain.joining


class SubmittedWrite:
    """A submitted write. A derived class handles its end in `ended`.

    After an error that is not a cancellation, the write keeps its request id (`slot` and `sequence`) and
    continues in ChunkClient.write. Made by `__new__` and begun by `WriteSubmitter.begin`.
    """

    __slots__ = (
        "slot",
        "sequence",
        "cut",
        "error",
        "number",
        "is_watched",
        "_submitter",
        "_file",
        "_index",
        "_place",
        "_epoch",
        "_connection",
        "_ended",
    )

    def begin(
        self,
        submitter: WriteSubmitter,
        file: OpenInode,
        index: int,
        place: WrittenAt,
        epoch: int,
        connection: Any,
        slot: int,
        sequence: int,
        cut: int,
    ) -> None:
        """Begin a write of chunk `index`, in the chain `place` with its `epoch`, that is sent now.

        The sender sets `number`, the number of the request, and `is_watched` if HeadWatch has the write.
        """
        self._submitter, self._file, self._index = submitter, file, index
        self._place, self._epoch, self._connection = place, epoch, connection
        self.slot, self.sequence, self.cut = slot, sequence, cut
        self.error = None
        self.number = 0
        self.is_watched = self._ended = False

    def ended(self, error: BaseException | None) -> None:
        """Handle the end of the write; called once. Without an error `note_stored` must be called."""

    def cancel(self) -> None:
        """End with CancelledError now. The store may execute the write all the same."""
        self.fail(asyncio.CancelledError())

    def fail(self, error: BaseException) -> None:
        """As SentToHead.fail."""
        if not self._ended:
            self._connection.give_up(self.number)
            self._end(error)

    def note_stored(self, unstable: UnstableWrites) -> None:
        """Note the unstable write to commit, after the write has succeeded."""
        file = self._file
        self._submitter.short.forget_chunk(file, self._index)
        unstable.note_at(file.inode, self._place, self._epoch)

    def __call__(self, reply: Reply | None, error: BaseException | None) -> None:
        """Handle the store's reply."""
        if self._ended:
            return
        if error is None and not is_success(reply.message):
            try:
                results = decode_write_reply(reply.message)
            except CorruptFrame as corrupt:
                error = corrupt
            else:
                status = results[0] | results[1] << 8 if len(results) == 16 else -1
                if status < 0:
                    error = CorruptFrame("a store's answer to a write does not fit the question")
                elif status:
                    error = errors.BY_WIRE_CODE.get(status, Unavailable)()
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._ended = True
        self.error = error
        submitter: WriteSubmitter = self._submitter
        if self.is_watched:
            submitter.chunks.heads.remove(self)
        self.ended(error)
        if error is None or isinstance(error, asyncio.CancelledError):
            submitter.leave(self)


def is_success(message: Any) -> bool:
    """Whether the reply to one write reports success, in the form that stores send."""
    if type(message) is not bytes or len(message) != _REPLY_BYTES:
        return False
    raw: bytes = message
    return raw[0] == 0x09 and raw[9] == 0x12 and raw[10] == 16 and not raw[11] and not raw[12]


class WriteSubmitter:
    """Submits writes to the heads of their chains, for the chunk client `chunks`.

    It uses the request ids and the targets of that client.
    """

    def __init__(self, chunks: Any) -> None:
        self.chunks = chunks
        self.short = chunks.short
        self._slots: list[int] = chunks.slots
        self._lanes: dict[int, Any] = chunks.lanes
        self._counters: dict[str, int] = chunks.counters
        self._view = chunks.view
        self._dialer = chunks.dialer

    def leave(self, writing: SubmittedWrite) -> None:
        """Release the request id of the write."""
        self._slots.append(writing.slot)
        if self.chunks.slot_waiters:
            self.chunks.wake_slot_waiter()

    def begin(
        self, writing: SubmittedWrite, file: OpenInode, extent: DirtyExtent, deadline_s: float, now_s: float
    ) -> bool:
        """Send an extent, which lies in one chunk, if the write need not wait; return whether it was sent.

        False: there was no side effect. The parts of the extent must not change before the write has ended.
        """
        chunks: Any = self.chunks
        slots = self._slots
        if not slots or chunks.slot_waiters or file.encrypted:
            return False
        table_number: Any = file.layout.table
        table: Any = self._view.map.table_by_id.get(table_number)
        if table is None:
            return False
        start, length, inode = extent.start, extent.end - extent.start, file.inode
        index = start >> file.chunk_bits
        number: Any = primitives.chunk_hash(inode, index)
        number %= CHAINS_PER_TABLE  # not as a C number: simulations have fewer chains
        chain: Any = table.chains[number]
        targets: Any = chain.targets
        lane = self._lanes.get(targets[0])
        if lane is None:
            try:
                lane = chunks.lane(targets[0])
            except StaleEpoch:
                return False
        connection: Any = self._dialer.by_endpoints.get(lane.endpoints)
        if connection is None or connection.closed:
            return False
        # From here on the write is submitted.
        self._counters["writes"] += 1
        sequence: int = chunks.sequence + 1
        chunks.sequence = sequence
        file.grant_used = True
        cut: int = file.cut
        slot: int = slots.pop()
        writing.begin(self, file, index, (table_number, number), chain.epoch, connection, slot, sequence, cut)
        parts = extent.parts
        is_whole = length <= _PAYLOAD_MAX and len(parts) == 1
        checksums = b""
        if not is_whole:
            parts, checksums = prepared(extent)
        out = _out
        out.begin()
        out.fixed(0x09, chunks.epoch)
        out.number(0x10, lane.target)
        out.blob(0x1A, file.grant)
        mark = out.open(0x22)
        out.u64(inode)
        out.u64(cut)
        out.u64(sequence)
        out.u32(index)
        out.u32(start & (1 << file.chunk_bits) - 1)
        out.u32(length)
        out.u32(0)
        out.close(mark)
        if is_whole:
            mark = out.open(0x2A)
            out.piece_crcs(parts[0], start)
            out.close(mark)
        else:
            out.blob(0x2A, checksums)
        out.fixed(0x31, file.grant_session)
        out.number(0x38, slot)
        if is_whole:
            writing.number = request_submission.submit(
                connection, _METHOD, out.take(), parts[0], deadline_s, now_s, writing
            )
        else:
            writing.number = connection.submit(
                _METHOD, out.take(), parts, deadline_s=deadline_s, on_done=writing
            )
        if len(targets) > 1 or chain.joining:  # as is_alone
            writing.is_watched = True
            chunks.heads.add(writing, file, index, lane.target)
        return True
