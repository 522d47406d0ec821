"""Fast path for writes to stores: sends immediately and completes in the reply callback.

No task is created. Made by the chunk client, for the writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from nvpool.client.data.unstable_writes import Stored
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.core import errors
from nvpool.core.errors import CorruptFrame, Unavailable
from nvpool.rpc.api import Reply
from nvpool.rpc.messages.read_write_codec import WRITE_ENTRY, decode_write_reply, encode_write_request
from nvpool.rpc.v1.wire_pb2 import DATA_WRITE

if TYPE_CHECKING:
    from nvpool.client.data.head_watch import HeadWatch
    from nvpool.client.data.read_queue import ReadQueue
    from nvpool.poolmap.model import Chain


class WriteOwner(Protocol):
    """Interface of the chunk client that its submitted writes use."""

    def was_written(self, file: OpenInode, index: int, epoch: int, cut: int) -> Stored:
        """Note that the write succeeded; return the unstable write to commit."""

    def leave(self, writing: SubmittedWrite) -> None:
        """Release the request id of the write."""

    @property
    def heads(self) -> HeadWatch:
        """Watch of writes to chains with several targets."""


def is_alone(chain: Chain) -> bool:
    """Whether the chain has one target, which no other target can replace without its consent."""
    return len(chain.targets) == 1 and not chain.joining


class SubmittedWrite:
    """A submitted write. `on_end` is called once, with this object and None or an error.

    The callback may first do the work that waits for the write, and call `stored()` after that. After an
    error that is not a cancellation, the write keeps its request id (`slot` and `sequence`) and continues in
    ChunkClient.write.
    """

    __slots__ = (
        "slot",
        "sequence",
        "cut",
        "error",
        "_chunks",
        "_file",
        "_index",
        "_epoch",
        "_on_end",
        "_connection",
        "_number",
        "_ended",
        "_watched",
    )

    def __init__(
        self,
        chunks: WriteOwner,
        file: OpenInode,
        index: int,
        epoch: int,
        slot: int,
        sequence: int,
        on_end: Callable[[SubmittedWrite, BaseException | None], None],
    ) -> None:
        self.slot = slot
        self.sequence = sequence
        self.error: BaseException | None = None
        self._chunks = chunks
        self._file = file
        self._index = index
        self._epoch = epoch
        self.cut = file.cut
        self._on_end = on_end
        self._ended = self._watched = False

    def send(
        self,
        way: tuple[Chain, ReadQueue, object],
        map_epoch: int,
        offset: int,
        length: int,
        parts: Sequence,
        checksums: bytes,
        deadline_s: float,
    ) -> None:
        chain, lane, connection = way
        file = self._file
        header = WRITE_ENTRY.pack(file.inode, self.cut, self.sequence, self._index, offset, length, 0, 0)
        self._connection = connection
        self._number = connection.submit(
            DATA_WRITE,
            encode_write_request(
                map_epoch, lane.target, file.grant, header, checksums, file.grant_session, self.slot
            ),
            parts,
            deadline_s=deadline_s,
            on_done=self._done,
        )
        if not is_alone(chain):
            self._watched = True
            self._chunks.heads.add(self, file, self._index, lane.target)

    def cancel(self) -> None:
        """Call the listener with CancelledError now. The store may execute the write all the same."""
        self.fail(asyncio.CancelledError())

    def fail(self, error: BaseException) -> None:
        """As SentToHead.fail."""
        if not self._ended:
            self._connection.give_up(self._number)
            self._end(error)

    def stored(self) -> Stored:
        """The unstable write to commit. Must be called once, after the write has succeeded."""
        return self._chunks.was_written(self._file, self._index, self._epoch, self.cut)

    def _done(self, reply: Reply | None, error: BaseException | None) -> None:
        if self._ended:
            return
        if error is None:
            try:
                results = decode_write_reply(reply.message)
            except CorruptFrame as corrupt:
                error = corrupt
            else:
                status = results[0] | results[1] << 8 if len(results) == 16 else -1
                if not status:
                    self._end(None)
                    return
                error = (
                    CorruptFrame("a store's answer to a write does not fit the question")
                    if status < 0
                    else errors.BY_WIRE_CODE.get(status, Unavailable)()
                )
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._ended = True
        self.error = error
        if self._watched:
            self._chunks.heads.remove(self)
        self._on_end(self, error)
        if error is None or isinstance(error, asyncio.CancelledError):
            self._chunks.leave(self)
