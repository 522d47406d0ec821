"""Fast path for received frames: they are answered or dispatched without creating a Call.

A client dispatches successful replies in one compiled step. A server lets the handler answer the frames that
have just arrived, from bytes to bytes; this requires that all earlier bytes were processed, responses are not
blocked, the greeting is complete and the connection is not draining. From the first frame that the handler
does not answer, the bytes take the slow path. See Handler in rpc/api.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvpool.core.compiled_loader import load_compiled

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from nvpool.rpc.api import Buffer
    from nvpool.rpc.multiplexer import InboundCall, ServerConnection
    from nvpool.rpc.peer_limits import MeteredTransport
    from nvpool.rpc.stats import ReplyStats
    from nvpool.rpc.transports.frame import FrameReader

    FastPath = Callable[[bytearray, int, dict[int, InboundCall], ReplyStats, list[Buffer], Any], int]
    """Attribute `fast_path` of a handler; see Handler in rpc/api."""

    class _ClientEnd:
        """Interface of a connection's end that a fast path uses (rpc/transports/stream)."""

        _reader: FrameReader
        _transport: asyncio.Transport | MeteredTransport
        _out: list[Buffer]
        _out_bytes: int

        def buffer_updated(self, count: int) -> None: ...
        def _stop_reading(self) -> None: ...
        def _go_on_reading(self) -> None: ...

    class _ServerEnd(_ClientEnd, ServerConnection):
        """Interface of a server's end that a fast path uses."""

        fast_path: FastPath | None
        _later: Any
        _greeted: bool

        @property
        def _may_read(self) -> bool: ...
else:
    _ClientEnd = _ServerEnd = object

_frame = load_compiled("nvpool.rpc.transports._frame")


class ReplyFastPath(_ClientEnd):
    """Mixin for client connections: dispatches successful replies in one compiled step (`_frame.hear`).

    List it before _End and ClientConnection of rpc/transports/stream in the bases. Without the compiled module it has no
    effect.
    """

    upgraded = False
    """Whether replies may arrive by another path than these frames; see rpc/transports/rdma."""

    def buffer_updated(self, count: int) -> None:
        if _frame is not None and not self.upgraded:
            count = _frame.hear(self, self._reader, count)
            if count < 0:
                return
        super().buffer_updated(count)


class RequestFastPath(_ServerEnd):
    """Mixin for server connections: lets the handler answer received frames on its fast path.

    List it before _End and ServerConnection of rpc/transports/stream in the bases. Connections of a peer that is not
    trusted share a time slice; see limits.Share.takes_turn.
    """

    def buffer_updated(self, count: int) -> None:
        if self._share is not None and count and not self._share.takes_turn():
            self._stop_reading()
            super().buffer_updated(count)  # which keeps the bytes
            return
        fast_path = self.fast_path
        if fast_path is not None and count and not self._out:
            buffer = self._reader.empty
            if buffer is not None and self._greeted and not self.draining:
                out = self._out
                taken = fast_path(buffer, count, self._in_work, self._reply_stats, out, self._later)
                if taken:
                    if taken == count and len(out) < 2:
                        if out:
                            self._transport.write(out.pop())
                        return
                    self._out_bytes += sum(map(len, out))
                    self._reader.skip(taken)
        super().buffer_updated(count)

    def take_turn(self) -> None:
        """Continue with the kept bytes, unless there is another reason to pause."""
        if self._may_read:
            self._reader.stalled = False
            self.buffer_updated(self._reader.rewind())
            if not self._reader.stalled:
                self._go_on_reading()
