"""Dispatch of a shard's requests: from a call, or from the bytes of a request frame, to the handler of its method.

A frame whose request has no payload becomes a `FrameCall` (rpc/transports/frame_call), and takes the same way as any
other call. So there is one way from a request to its answer, whatever the state of the shard. Made by
`meta/server/service`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from nvpool.core import primitives
from nvpool.core.clock import Clock, SystemClock
from nvpool.core.errors import (
    Draining,
    Fenced,
    InvalidRequest,
    NotSupported,
    NvpoolError,
    Refused,
)
from nvpool.core.primitives import RequestFrames
from nvpool.meta.requests.change_handlers import ChangeRoute
from nvpool.meta.requests.dispatch_table import CHANGES, QUERIES
from nvpool.meta.requests.local_user_permissions import check_shards
from nvpool.meta.requests.shard_parts import ServiceStatus
from nvpool.meta.state.transaction import WaitFirst
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import IN_FLIGHT_MAX, Call
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.transports.frame_call import FrameCall
from nvpool.rpc.v1 import wire_pb2 as wire

_log = logging.getLogger(__name__)
OUT_BYTES_MAX = 256 << 10
"""Replies of one call of `answer`, as rpc/transports/frame_stream.GATHER_BYTES."""
MESSAGE_MAX = 4096
"""Longest message that is taken from a frame here: a name, and some numbers."""
_METHODS = frozenset((*CHANGES, *QUERIES, wire.META_RELEASE))
_ALWAYS = frozenset((wire.META_STATUS,))
_MESSAGE_MAX, _OUT_BYTES_MAX, _IN_FLIGHT_MAX = MESSAGE_MAX, OUT_BYTES_MAX, IN_FLIGHT_MAX
_NO_USER: Any = None


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
            except WaitFirst as first:
                self._retry(call, first.wait)
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
