"""Call of a request that arrived as a frame, handled before its connection knows of it.

If the call is answered before its handler returns, the reply is appended to the replies of the other frames of the
buffer, unless it has a payload. Otherwise the connection keeps the call as one of its requests in progress, so
cancelling, draining and lost connections know it. Used by `meta/server/request_dispatch` and `store/server/writes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from nvpool.core import primitives
from nvpool.core.errors import InvariantBroken
from nvpool.rpc.api import MESSAGE_BYTES_MAX, Buffer
from nvpool.rpc.error_codec import encode_error
from nvpool.rpc.stats import ReplyStats

_log = logging.getLogger(__name__)
_REPLY_MAX = MESSAGE_BYTES_MAX
_NO_PAYLOAD = memoryview(b"")


class FrameCall:
    """Implementation of rpc/api.Call for a request that arrived as a frame."""

    __slots__ = (
        "method",
        "message",
        "payload",
        "since_s",
        "deadline_s",
        "peer",
        "cancelled",
        "payload_bytes",
        "byte_count",
        "_side",
        "_number",
        "_out",
        "_callback",
        "_replies",
        "_is_system",
    )

    def begin(
        self,
        method: int,
        message: bytes,
        side: Any,
        number: int,
        now_s: float,
        deadline_s: float,
        out: list[Any],
        replies: ReplyStats,
        is_system: bool,
        payload: bytes = b"",
    ) -> None:
        """Begin the request `number` of a connection, whose reply goes to `out` while the call is not kept.

        `replies`: statistics (rpc/stats.ReplyStats). `is_system`: the connection uses the clock of this host.
        """
        self.method, self.message = method, message
        self.deadline_s = deadline_s
        self.payload_bytes, self.byte_count = len(payload), 0
        self.payload = memoryview(payload) if payload else _NO_PAYLOAD
        self.cancelled = False
        self._callback: Callable[[], None] | None = None
        self.peer = side.peer
        self.since_s = now_s
        self._side, self._number, self._replies = side, number, replies
        self._out: list[Any] | None = out
        self._is_system = is_system

    def room(self, byte_count: int) -> memoryview | None:
        """As in rpc/api.Call."""
        return None

    def reply(self, message: Buffer = b"", payload: Sequence[Buffer] = ()) -> None:
        """As in rpc/api.Call."""
        if self._side is None:
            return
        if len(message) > _REPLY_MAX:
            self.fail(InvariantBroken(f"{len(message)} bytes: too long for method {self.method}"))
            return
        if payload:
            self.keep()
        self._end(0, bytes(message), payload)

    def fail(self, error: BaseException) -> None:
        """As in rpc/api.Call."""
        code, message = encode_error(error)  # logs unexpected exceptions even if the client has gone
        if self._side is not None:
            self._end(code, message, ())

    def _end(self, status: int, message: bytes, payload: Sequence[Buffer]) -> None:
        side, out = self._side, self._out
        self._side = None
        if out is None:
            side.finish(self._number, status, message, payload, sum(map(len, payload)))
            return
        self._out = None
        out.append(primitives.reply_frame(self._number, status, message))
        took_s = (primitives.boottime_s() if self._is_system else side.now_s()) - self.since_s
        replies = self._replies
        if not status and not self.payload_bytes:
            replies.served(self.method, took_s)
        else:
            replies.begun += 1
            replies.answered(self.method, took_s, status, self.payload_bytes, 0)

    def keep(self) -> None:
        """Make the call one of the requests in progress of its connection, unless it is answered."""
        if self._out is not None:
            self._out = None
            self.byte_count = len(self.message) + self.payload_bytes
            self._side.keep(self._number, self)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """As in rpc/api.Call."""
        if self.cancelled:
            callback()
        else:
            self._callback = callback

    def cancel(self) -> None:
        """Drop the request: the client has cancelled it or has disconnected."""
        self.cancelled, self._side = True, None
        if self._callback is not None:
            try:
                self._callback()
            except Exception:
                _log.exception("on_cancel of a request raised")
