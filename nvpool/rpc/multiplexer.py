"""Request tables shared by all transports: pending requests of a client, requests in progress on a server.

`ClientConnection` (client side) numbers requests, bounds them, times them out, and completes each exactly once: by its
response, by its deadline, by the caller's cancellation, or by the end of the connection. `ServerConnection` (server
side) passes requests to the handler, bounds them, and sends each response once. A transport derives from both
and adds the transfer of frames. One event loop makes all calls to this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from functools import partial
from math import inf
from typing import Any

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import (
    Busy,
    CorruptFrame,
    DeadlineExceeded,
    Disconnected,
    Draining,
    InvariantBroken,
    NvpoolError,
    TooBig,
)
from nvpool.rpc.api import IN_FLIGHT_MAX, MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX, Buffer, Handler, Reply
from nvpool.rpc.error_codec import decode_error, encode_error
from nvpool.rpc.peer_limits import LARGE_BYTES, Share
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.reply_receivers import next_number, register
from nvpool.rpc.stats import RPC_STATS

_log = logging.getLogger(__name__)

WAITING_MAX = 16 * IN_FLIGHT_MAX
"""Requests that may wait on the client side for a free slot. Beyond it `submit` fails with Busy."""

WORK_BYTES_MAX = 64 << 20
"""Most bytes of requests in progress on one connection.

Above it the connection is not read until some requests are answered. Enough for two of the largest payloads,
so that one can arrive while the other is processed."""

TICK_S = 0.001
"""Resolution of deadlines: one timer serves all deadlines that fall within a millisecond."""

_NUMBER_MASK = 0xFFFFFFFF
OnDone = Callable[[Reply | None, BaseException | None], Any]
_InFlight = tuple[OnDone, memoryview | None, float, int, int, float]
"""A sent request: on_done, into, deadline_s, room, method, send time."""
_Waiting = tuple[OnDone, memoryview | None, float, int, int, Buffer, Sequence[Buffer], int]
"""A request before it is sent: on_done, into, deadline_s, room, method, message, payload, bytes of the payload."""


class ClientConnection:
    """Client side of a connection (`api.Connection` without `close`).

    A derived class provides `_send_request` and `_send_cancel`, and calls `answered` for each response and
    `_lost` once at the end. It sets `writable` to False while frames must not be added; afterwards it sets
    `writable` and calls `pump`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: Peer, clock: Clock = SYSTEM_CLOCK) -> None:
        self.peer = peer
        self.closed = False
        self.loop = loop
        self.now_s = clock.boottime_s
        self.calls = RPC_STATS.calls
        self.in_flight: dict[int, _InFlight] = {}
        self.waiting: OrderedDict[int, _Waiting] = OrderedDict()
        self.number = 0
        self.writable = True
        self._timer: asyncio.TimerHandle | None = None
        self.timer_s = inf
        self._end_reason = "the connection is closed"

    # -- provided by the transport

    def _send_request(
        self,
        number: int,
        method: int,
        deadline_ms: int,
        message: Buffer,
        payload: Sequence[Buffer],
        payload_bytes: int,
    ) -> None:
        raise NotImplementedError

    def _send_cancel(self, number: int) -> None:
        raise NotImplementedError

    # -- interface of api.Connection

    async def call(
        self,
        method: int,
        message: Buffer,
        payload: Sequence[Buffer] = (),
        *,
        deadline_s: float,
        into: memoryview | None = None,
    ) -> Reply:
        future: asyncio.Future[Reply] = self.loop.create_future()
        number = self._begin(method, message, payload, deadline_s, into, partial(_settle, future))
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(number, None)
            raise

    def submit(
        self,
        method: int,
        message: Buffer,
        payload: Sequence[Buffer] = (),
        *,
        deadline_s: float,
        into: memoryview | None = None,
        on_done: Callable[[Reply | None, BaseException | None], Any],
        room: int = 0,
    ) -> int:
        return self._begin(method, message, payload, deadline_s, into, on_done, room)

    def give_up(self, request: int) -> None:
        self._give_up(request, None)

    def unanswered_since_s(self, besides: Container[int] = ()) -> float:
        for entry in self.in_flight.values():  # in send order
            if entry[4] not in besides:
                return entry[5]
        return inf

    # -- request table

    def _begin(
        self,
        method: int,
        message: Buffer,
        payload: Sequence[Buffer],
        deadline_s: float,
        into: memoryview | None,
        on_done: OnDone,
        room: int = 0,
    ) -> int:
        payload_bytes = sum(map(len, payload)) if payload else 0
        if self.closed:
            return self._refuse(on_done, Disconnected(self._end_reason, may_be_applied=False))
        if len(message) > MESSAGE_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
            return self._refuse(
                on_done, TooBig(f"a request of {len(message)} + {payload_bytes} bytes fits into no frame")
            )
        now_s = self.now_s()
        left_ms = int((deadline_s - now_s) * 1000)
        if left_ms <= 0:
            return self._refuse(
                on_done, DeadlineExceeded("past before the request was sent", may_be_applied=False)
            )
        in_flight = self.in_flight
        if self.writable and len(in_flight) < IN_FLIGHT_MAX and not self.waiting:
            number = register(self, in_flight, on_done, deadline_s, room, method, now_s, into)
            self._send_request(number, method, min(left_ms, _NUMBER_MASK), message, payload, payload_bytes)
        elif len(self.waiting) < WAITING_MAX:
            number = next_number(self, in_flight, deadline_s)
            self.waiting[number] = (on_done, into, deadline_s, room, method, message, payload, payload_bytes)
            self.calls.begun += 1
        else:
            return self._refuse(on_done, Busy(f"{WAITING_MAX} requests wait for {self.peer.name} already"))
        return number

    def _refuse(self, on_done: OnDone, error: NvpoolError) -> int:
        # Through the loop, because a caller of submit does not expect on_done before submit returns.
        self.loop.call_soon(on_done, None, error)
        return 0

    def pump(self) -> None:
        """Send waiting requests while the connection is writable and has free slots."""
        while self.waiting and self.writable and len(self.in_flight) < IN_FLIGHT_MAX:
            number, entry = self.waiting.popitem(last=False)
            on_done, into, deadline_s, room, method, message, payload, payload_bytes = entry
            now_s = self.now_s()
            left_ms = max(1, int((deadline_s - now_s) * 1000))
            self.in_flight[number] = (on_done, into, deadline_s, room, method, now_s)
            self._send_request(number, method, min(left_ms, _NUMBER_MASK), message, payload, payload_bytes)

    def answered(self, number: int, status: int, message: Buffer, payload: memoryview) -> None:
        entry = self.in_flight.pop(number, None)
        if entry is None:
            return  # cancelled or timed out meanwhile
        self.calls.ended += 1
        took_s = self.now_s() - entry[5]
        try:
            if status:
                entry[0](None, decode_error(status, message))
            else:
                entry[0](Reply(message, payload), None)
        except Exception as error:
            self.loop.call_exception_handler({"message": "on_done of a request raised", "exception": error})
        self.calls.answered(entry[4], took_s, status)
        if self.waiting:
            self.pump()

    def _into(self, number: int, payload_bytes: int) -> memoryview | None:
        """The caller's buffer for this response's payload; None if absent or too small."""
        entry = self.in_flight.get(number)
        if entry is None or entry[1] is None or len(entry[1]) < payload_bytes:
            return None
        return entry[1][:payload_bytes]

    def _give_up(self, number: int, error: NvpoolError | None) -> None:
        """End a request from this side. Without an error the caller has cancelled it and is not called."""
        entry: _InFlight | _Waiting | None = self.in_flight.pop(number, None)
        if entry is not None:
            if not self.closed:
                self._send_cancel(number)
        else:
            entry = self.waiting.pop(number, None)
            if entry is None:
                return
            if error is not None:
                error.may_be_applied = False
        self.calls.ended += 1
        if error is not None:
            self.calls.failed(entry[4], error.wire_code)
            self._complete_with_error(entry[0], error)
        if self.waiting:
            self.pump()

    def _complete_with_error(self, on_done: OnDone, error: NvpoolError) -> None:
        try:
            on_done(None, error)
        except Exception as raised:
            self.loop.call_exception_handler({"message": "on_done of a request raised", "exception": raised})

    # -- deadlines: one timer for the earliest one. Most requests have later deadlines than the requests
    # before them, so a request that is answered in time costs one comparison. A tick scans all, which are few
    # (IN_FLIGHT_MAX + waiting).

    def arm(self, deadline_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.timer_s = deadline_s
        self._timer = self.loop.call_later(max(TICK_S, deadline_s - self.now_s()), self._tick)

    def _tick(self) -> None:
        self._timer, self.timer_s = None, inf
        now = self.now_s() + TICK_S / 2
        late, earliest = [], inf
        for table in (self.in_flight, self.waiting):
            for number, entry in table.items():
                if entry[2] <= now:
                    late.append((entry[2], number))
                elif entry[2] < earliest:
                    earliest = entry[2]
        if earliest < inf:
            self.arm(earliest)
        for _, number in sorted(late):
            self._give_up(number, DeadlineExceeded(f"{self.peer.name} did not answer within the deadline"))

    def _lost(self, reason: str) -> None:
        """Fail all requests, because the connection has ended. May be called twice."""
        if self.closed:
            return
        self.closed = True
        self._end_reason = reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        in_flight, self.in_flight = self.in_flight, {}
        waiting, self.waiting = self.waiting, OrderedDict()
        self.calls.ended += len(in_flight) + len(waiting)
        for entry in in_flight.values():
            self.calls.failed(entry[4], Disconnected.wire_code)
            self._complete_with_error(entry[0], Disconnected(reason))
        for unsent in waiting.values():
            self._complete_with_error(unsent[0], Disconnected(reason, may_be_applied=False))


def _settle(future: asyncio.Future[Any], reply: Reply | None, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(reply)
    else:
        future.set_exception(error)


class InboundCall:
    """Implementation of `api.Call`. Only the first response counts.

    Later responses are discarded, and so are responses to a client that has disconnected.
    """

    __slots__ = (
        "method",
        "message",
        "payload",
        "since_s",
        "deadline_s",
        "peer",
        "cancelled",
        "_side",
        "_number",
        "byte_count",
        "payload_bytes",
        "_callback",
    )

    def __init__(
        self,
        side: ServerConnection,
        number: int,
        method: int,
        message: Buffer,
        payload: memoryview,
        since_s: float,
        deadline_s: float,
    ) -> None:
        self.method = method
        self.message = message
        self.payload = payload
        self.since_s = since_s
        self.deadline_s = deadline_s
        self.peer = side.peer
        self.cancelled = False
        self._side: ServerConnection | None = side
        self._number = number
        self.payload_bytes = len(payload)
        self.byte_count = self.payload_bytes + len(message)
        self._callback: Callable[[], None] | None = None

    def room(self, byte_count: int) -> memoryview | None:
        side = self._side
        return None if side is None else side.answer_room(self._number, byte_count)

    def reply(self, message: Buffer = b"", payload: Sequence[Buffer] = ()) -> None:
        side = self._side
        if side is None:
            return
        payload_bytes = sum(map(len, payload)) if payload else 0
        if len(message) > MESSAGE_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
            self.fail(
                InvariantBroken(f"{len(message)} + {payload_bytes} bytes: too long for method {self.method}")
            )
            return
        self._side = None
        side.finish(self._number, 0, message, payload, payload_bytes)

    def fail(self, error: BaseException) -> None:
        side = self._side
        code, message = encode_error(error)  # logs unexpected exceptions even if the client has gone
        if side is not None:
            self._side = None
            side.finish(self._number, code, message, (), 0)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        if self.cancelled:
            callback()
        else:
            self._callback = callback

    def cancel(self) -> None:
        """Drop the request: the client has cancelled it or has disconnected."""
        self.cancelled = True
        self._side = None
        if self._callback is not None:
            try:
                self._callback()
            except Exception:
                _log.exception("on_cancel of a request raised")


class ServerConnection:
    """Server side of a connection.

    A derived class provides `_send_answer`, and calls `arrived`, `cancel_request` and, once at the end,
    `client_gone`. It should not read while `_overfull` is True; `_room` is called when that changes.
    """

    def __init__(
        self, handler: Handler, peer: Peer, clock: Clock = SYSTEM_CLOCK, *, transport: str = ""
    ) -> None:
        self.peer = peer
        self.reply_stats = RPC_STATS.over(transport)
        self.draining = False
        self.handler = handler
        self.now_s = clock.boottime_s
        self.in_work: dict[int, InboundCall] = {}
        self._work_bytes = 0
        self._overfull = False
        self.share: Share | None = None
        """Part of the peer's limits that this connection uses;

        None if the limits count only the connection.
        """
        self.on_idle: Callable[[], None] | None = None

    def _carried_by(self, transport: str) -> None:
        """Count the requests for that transport from now on, including those in progress."""
        count = len(self.in_work)
        self.reply_stats.begun -= count
        self.reply_stats = RPC_STATS.over(transport)
        self.reply_stats.begun += count

    def _send_answer(
        self, number: int, status: int, message: Buffer, payload: Sequence[Buffer], payload_bytes: int
    ) -> None:
        raise NotImplementedError

    def answer_room(self, number: int, byte_count: int) -> memoryview | None:
        """Implementation of Call.room for that request."""
        return None

    def _stop_reading(self) -> None:
        """Called when the connection must not be read until `_room`."""

    def _room(self) -> None:
        """Called when the connection may be read again."""

    def arrived(
        self, number: int, method: int, deadline_ms: int, message: Buffer, payload: memoryview
    ) -> None:
        if self.draining:
            code, text = encode_error(Draining())
            self._send_answer(number, code, text, (), 0)
            return
        if number in self.in_work:
            raise CorruptFrame(f"request {number} was sent twice")
        if len(self.in_work) >= IN_FLIGHT_MAX:
            raise CorruptFrame(f"more than {IN_FLIGHT_MAX} requests in flight")
        now_s = self.now_s()
        call = InboundCall(self, number, method, message, payload, now_s, now_s + deadline_ms / 1000)
        self.keep(number, call)
        try:
            self.handler(call)
        except Exception as error:
            call.fail(error)

    def keep(self, number: int, call: InboundCall) -> None:
        """Add a request to the table of those in progress."""
        self.in_work[number] = call
        self.reply_stats.begun += 1
        self._work_bytes += call.byte_count
        if call.byte_count > LARGE_BYTES and self.share is not None:
            self.share.arrived(call.byte_count)
        if self._work_bytes > WORK_BYTES_MAX and not self._overfull:
            self._overfull = True
            self._stop_reading()

    def finish(
        self, number: int, status: int, message: Buffer, payload: Sequence[Buffer], payload_bytes: int
    ) -> None:
        """Send the response of a request, and remove the request from the table."""
        call = self._forget(number)
        self._send_answer(number, status, message, payload, payload_bytes)
        if call is not None:
            self.reply_stats.answered(
                call.method, self.now_s() - call.since_s, status, call.payload_bytes, payload_bytes
            )
        if self.on_idle is not None and not self.in_work:
            self.on_idle()

    def _forget(self, number: int) -> InboundCall | None:
        call = self.in_work.pop(number, None)
        if call is not None and call.byte_count:
            self._work_bytes -= call.byte_count
            if call.byte_count > LARGE_BYTES and self.share is not None:
                self.share.done(call.byte_count)
            if self._overfull and self._work_bytes <= WORK_BYTES_MAX:
                self._overfull = False
                self._room()
        return call

    def cancel_request(self, number: int) -> None:
        """Handle the client's cancellation of a request."""
        call = self._forget(number)
        if call is not None:  # else the cancellation crossed the response on the wire
            self.reply_stats.given_up += 1
            call.cancel()
            if self.on_idle is not None and not self.in_work:
                self.on_idle()

    def load(self) -> tuple[int, int]:
        """Number of requests in progress and their bytes."""
        return len(self.in_work), self._work_bytes

    def client_gone(self) -> None:
        in_work, self.in_work = self.in_work, {}
        self._work_bytes = 0
        self.reply_stats.given_up += len(in_work)
        for call in in_work.values():
            call.cancel()
        if self.on_idle is not None:
            self.on_idle()

    async def _drained(self, timeout_s: float) -> None:
        """Refuse new requests; return when those in progress are answered, or after timeout_s."""
        self.draining = True
        if not self.in_work or timeout_s <= 0:
            return
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_idle() -> None:
            if not idle.done():
                idle.set_result(None)

        self.on_idle = on_idle
        await asyncio.wait([idle], timeout=timeout_s)
        self.on_idle = None
