"""Fast path for received frames: they are answered or dispatched without creating a Call.

A client dispatches successful replies in one compiled step. A server lets the handler answer the frames that
have just arrived, from bytes to bytes; this requires that all earlier bytes were processed, responses are not
blocked, the greeting is complete and the connection is not draining. From the first frame that the handler
does not answer, the bytes take the slow path. See Handler in rpc/api.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from nvpool.core.compiled_loader import load_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvpool.rpc.api import Buffer
    from nvpool.rpc.multiplexer import InboundCall
    from nvpool.rpc.peer_limits import Share
    from nvpool.rpc.stats import ReplyStats
    from nvpool.rpc.transports.frame_stream import FrameStream

    FastPath = Callable[[bytearray, int, dict[int, InboundCall], ReplyStats, list[Buffer], Any], int]
    """Attribute `fast_path` of a handler; see Handler in rpc/api."""

compiled = load_compiled("nvpool.rpc.transports._frame")


class ReplyConnection(Protocol):
    """Client connection with the request table of rpc/multiplexer.ClientConnection."""

    upgraded: bool
    """Whether replies may arrive by another path than these frames; see rpc/transports/rdma."""


class RequestReceiver(Protocol):
    """Server connection with the request table of rpc/multiplexer.ServerConnection."""

    share: Share | None
    draining: bool
    greeted: bool
    in_work: dict[int, InboundCall]
    reply_stats: ReplyStats

    @property
    def may_read(self) -> bool:
        """Whether there is no reason to pause reading."""


class ReplyFastPath:
    """Part of a client connection that dispatches successful replies in one compiled step (`_frame.hear`).

    `receive` is the connection's `buffer_updated`. Without the compiled module all frames take the slow path.
    """

    def __init__(self, connection: ReplyConnection, frames: FrameStream) -> None:
        self._connection = connection
        self._frames = frames

    def receive(self, nbytes: int) -> None:
        connection, frames = self._connection, self._frames
        if compiled is not None and not connection.upgraded:
            nbytes = compiled.hear(connection, frames, nbytes)
            if nbytes < 0:
                return
        frames.receive(nbytes)


class RequestFastPath:
    """Part of a server connection that lets the handler answer received frames on its fast path.

    `receive` is the connection's `buffer_updated`. Connections of a peer that is not trusted share a time slice;
    see limits.Share.takes_turn.
    """

    def __init__(
        self, connection: RequestReceiver, frames: FrameStream, answer: FastPath | None, later: Any
    ) -> None:
        """`later` is the connection, if the handler may answer some requests later; otherwise None."""
        self.answer = answer
        self._connection = connection
        self._frames = frames
        self._later = later

    def receive(self, nbytes: int) -> None:
        connection, frames = self._connection, self._frames
        share = connection.share
        if share is not None and nbytes and not share.takes_turn():
            frames.pause_reading()
            frames.receive(nbytes)  # which keeps the bytes
            return
        answer = self.answer
        if answer is not None and nbytes and not frames.out:
            buffer = frames.reader.empty
            if buffer is not None and connection.greeted and not connection.draining:
                # a list of its own: a handler may send other replies meanwhile
                out: list[Buffer] = []
                taken = answer(buffer, nbytes, connection.in_work, connection.reply_stats, out, self._later)
                if taken:
                    if taken == nbytes and len(out) < 2 and not frames.out:
                        if out:
                            frames.transport.write(out.pop())
                        return
                    frames.out += out
                    frames.out_bytes += sum(map(len, out))
                    frames.reader.skip(taken)
        frames.receive(nbytes)

    def take_turn(self) -> None:
        """Continue with the kept bytes, unless there is another reason to pause."""
        if self._connection.may_read:
            reader = self._frames.reader
            reader.stalled = False
            self.receive(reader.rewind())
            if not reader.stalled:
                self._frames.resume_reading()
