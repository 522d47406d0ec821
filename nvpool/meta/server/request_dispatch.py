"""Dispatch of a shard's requests: from a call, or from the bytes of a request frame, to the handler of its method.

A frame whose request has no payload becomes a `FrameCall`, and takes the same way as any other call. If the call is
answered before its handler returns, the reply is appended to the replies of the other frames of the buffer, unless it
has a payload. Otherwise the connection keeps the call as one of its requests in progress. So there is
one way from a request to its answer, whatever the state of the shard. Made by `meta/server/service`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from nvpool.core import primitives
from nvpool.core.clock import Clock, SystemClock
from nvpool.core.errors import (
    Draining,
    Fenced,
    InvalidRequest,
    InvariantBroken,
    NotSupported,
    NvpoolError,
    Refused,
)
from nvpool.core.primitives import RequestFrames
from nvpool.meta.requests.change_handlers import ChangeRoute
from nvpool.meta.requests.dispatch_table import CHANGES, QUERIES
from nvpool.meta.requests.local_user_permissions import check_shards
from nvpool.meta.requests.shard_parts import ServiceStatus
from nvpool.meta.state.record_locks import LockedRecord
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import IN_FLIGHT_MAX, MESSAGE_BYTES_MAX, Buffer, Call
from nvpool.rpc.error_codec import encode_error
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.v1 import wire_pb2 as wire

_log = logging.getLogger(__name__)
OUT_BYTES_MAX = 256 << 10
"""Replies of one call of `answer`, as rpc/transports/frame_stream.GATHER_BYTES."""
MESSAGE_MAX = 4096
"""Longest message that is taken from a frame here: a name, and some numbers."""
_METHODS = frozenset((*CHANGES, *QUERIES, wire.META_RELEASE))
_ALWAYS = frozenset((wire.META_STATUS,))
_MESSAGE_MAX, _OUT_BYTES_MAX, _IN_FLIGHT_MAX, _REPLY_MAX = (
    MESSAGE_MAX,
    OUT_BYTES_MAX,
    IN_FLIGHT_MAX,
    MESSAGE_BYTES_MAX,
)
_NO_PAYLOAD = memoryview(b"")
_NO_USER: Any = None


class FrameCall:
    """Implementation of rpc/api.Call for a request that arrived as a frame without a payload."""

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
    ) -> None:
        """Begin the request `number` of a connection, whose reply goes to `out` while the call is not kept.

        `replies`: statistics (rpc/stats.ReplyStats). `is_system`: the connection uses the clock of this host.
        """
        self.method, self.message = method, message
        self.deadline_s = deadline_s
        self.payload = _NO_PAYLOAD
        self.payload_bytes = self.byte_count = 0
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
        if not status:
            replies.served(self.method, took_s)
        else:
            replies.begun += 1
            replies.answered(self.method, took_s, status, 0, 0)

    def keep(self) -> None:
        """Make the call one of the requests in progress of its connection, unless it is answered."""
        if self._out is not None:
            self._out = None
            self.byte_count = len(self.message)
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


class RequestDispatch:
    """Finds the handler of a request, after the checks that all requests have in common."""

    def __init__(
        self,
        callers: Callers,
        status: ServiceStatus,
        clock: Clock,
        die: Callable[[BaseException], None],
        retry: Callable[[Call, Callable[[], Any]], None],
        access: Any,
        view: Any,
        routes: dict[int, Callable[[Call], None]],
    ) -> None:
        self._callers, self._status, self._clock = callers, status, clock
        self._die, self._retry, self._access, self._view, self._routes = die, retry, access, view, routes
        self._restricted: dict[Any, Any] = access.restricted
        self._is_system = type(clock) is SystemClock
        self._frames = RequestFrames()
        self._peer: Any = None
        self._owner, self._user = "", _NO_USER
        self._refused: frozenset[int] = frozenset()

    def handle(self, call: Call) -> None:
        """Answer the call immediately, or keep it and answer later."""
        self.serve(call, call.method, bytes(call.message), call.peer)

    def serve(self, call: Call, method: int, message: bytes, peer: Any) -> None:
        """As `handle`, for a caller that knows these attributes of the call."""
        try:
            if peer is not self._peer or method in self._refused or len(message) > _MESSAGE_MAX:
                caller = self._callers.check(call)
                self._peer = peer
                self._refused, self._owner, self._user = caller.refused, caller.owner, caller.user
            owner, user = self._owner, self._user
            if self._restricted:
                self._access.caller = owner
            if user is not None and self._status.state == "serving":
                check_shards(self._view)
            route = self._routes.get(method)
            if route is None:
                raise NotSupported(f"a metadata service does not answer method {method}")
            if self._status.state != "serving" and method not in _ALWAYS:
                refuse_by_state(self._status.state, self._view.shard, method)
            try:
                if isinstance(route, ChangeRoute):
                    changes = route
                    changes.answer(call, method, message, owner, user)
                else:
                    route(call)
            except LockedRecord as held:
                self._retry(call, held.wait)
        except NvpoolError as error:
            if isinstance(error, Refused):
                self._status.counters["refused"] += 1
            elif isinstance(error, Fenced):
                self._die(error)
            call.fail(error)
        except DecodeError as error:
            call.fail(InvalidRequest(f"the message of method {call.method} cannot be read: {error}"))
        except Exception as error:
            call.fail(error)
        finally:
            if self._access.caller is not None:
                self._access.caller = None

    def answer(
        self,
        buffer: bytearray,
        end: int,
        in_work: dict[int, Any],
        reply_stats: ReplyStats,
        out: list[Any],
        side: Any = None,
        handle: Callable[[Call], None] | None = None,
        watched: Callable[[Call], Call] | None = None,
    ) -> int:
        """Handle the requests at the beginning of `buffer`, up to the first that is left to the connection.

        Left are frames with a payload or a long message, other methods than changes, queries and closes, and
        requests beyond the bounds of a connection or of one burst.

        `end` is the number of bytes received. One reply frame is appended to `out` for each request that is answered
        now; the return value is the number of bytes that the requests took. `in_work`: the requests in progress.
        `side`: the server side of the connection; without it nothing is handled. `handle` is called in place of
        `handle` of this object (the commit gate, which calls that), with the call that `watched` returns (the audit log).
        """
        if side is None:
            return 0
        at = total = 0
        while end - at >= 32 and total < _OUT_BYTES_MAX:
            message = self._frames.take(buffer, at, end, _MESSAGE_MAX)
            if message is None:
                break
            number = self._frames.number
            if in_work and (len(in_work) >= _IN_FLIGHT_MAX or number in in_work):
                break
            method = self._frames.method
            if method not in _METHODS:
                break
            call: Any = FrameCall.__new__(FrameCall)
            now_s = primitives.boottime_s() if self._is_system else self._clock.boottime_s()
            deadline_s = now_s + self._frames.deadline_ms / 1000
            call.begin(
                method,
                message,
                side,
                number,
                now_s,
                deadline_s,
                out,
                reply_stats,
                self._is_system,
            )
            at += self._frames.frame_bytes
            replies = len(out)
            try:
                if handle is not None:
                    handle(call if watched is None else watched(call))
                elif watched is not None:
                    self.serve(watched(call), method, message, call.peer)
                else:
                    self.serve(call, method, message, call.peer)
            except Exception as error:  # as in the multiplexer: the other replies of the burst are sent
                call.fail(error)
            call.keep()
            if len(out) > replies:
                total += len(out[replies])
            if side.draining:
                break
        return at


def refuse_by_state(state: str, shard: int, method: int) -> None:
    """Fenced, Draining: the shard is not serving. Returns for a load of an empty shard."""
    if state == "fenced":
        raise Fenced(f"shard {shard} has stopped serving; it will be started again")
    if state != "loading" or method != wire.META_LOAD:
        raise Draining(f"shard {shard} is {state}")
