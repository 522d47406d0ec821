"""What every transport does alike: the table of requests in flight on the asking side and in work on the answering side.

`Asker` gives numbers to requests, bounds them, times them out, and settles each exactly once: by its answer, by its deadline,
by the caller's cancellation, or by the end of the connection. `Answerer` gives requests to the handler, bounds them, and sends
each answer once. A transport derives from both and adds how frames travel. One event loop calls everything here.
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
from nvpool.rpc.api import IN_FLIGHT_MAX, MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX, Buffer, Handler, Peer, Reply
from nvpool.rpc.error_codec import decode_error, encode_error
from nvpool.rpc.limits import LARGE_BYTES, Share
from nvpool.rpc.stats import TALLY

_log = logging.getLogger(__name__)

WAITING_MAX = 16 * IN_FLIGHT_MAX
"""Requests that may wait on the asking side for one of those in flight to end. Behind it `submit` fails with Busy."""

WORK_BYTES_MAX = 64 << 20
"""Of requests in work on one connection; above it nothing more is read from that until some are answered. Two of the largest
payloads, so that one can arrive while one is worked on."""

TICK_S = 0.001
"""Deadlines are kept to a millisecond: those that end within one are served by one timer."""

_NUMBER_MASK = 0xFFFFFFFF
OnDone = Callable[[Reply | None, BaseException | None], Any]


class Asker:
    """The asking side of a connection (transport.Connection but for `close`).

    A derived class has `_send_request` and `_send_cancel`, calls `_answered` for each answer and `_lost` once at the end,
    and sets `_writable` to False while frames must not be added (then calls `_pump`).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: Peer, clock: Clock = SYSTEM_CLOCK) -> None:
        self.peer = peer
        self.closed = False
        self._loop = loop
        self._now_s = clock.boottime_s
        self._calls = TALLY.calls
        self._in_flight: dict[int, tuple[OnDone, memoryview | None, float, int, int, float]] = {}
        """Number -> on_done, into, deadline_s, room, method, when it was sent."""
        self._waiting: OrderedDict[int, tuple] = OrderedDict()
        self._number = 0
        self._writable = True
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = inf
        self._end_reason = "the connection is closed"

    # -- to be supplied by the transport

    def _send_request(self, number: int, method: int, deadline_ms: int, message: Buffer, payload: Sequence[Buffer],
                      payload_bytes: int) -> None:
        raise NotImplementedError

    def _send_cancel(self, number: int) -> None:
        raise NotImplementedError

    # -- the contract

    async def call(self, method: int, message: Buffer, payload: Sequence[Buffer] = (), *, deadline_s: float,
                   into: memoryview | None = None) -> Reply:
        future = self._loop.create_future()
        number = self._begin(method, message, payload, deadline_s, into, partial(_settle, future))
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(number, None)
            raise

    def submit(self, method: int, message: Buffer, payload: Sequence[Buffer] = (), *, deadline_s: float,
               into: memoryview | None = None, on_done: Callable[[Reply | None, BaseException | None], Any],
               room: int = 0) -> int:
        return self._begin(method, message, payload, deadline_s, into, on_done, room)

    def give_up(self, request: int) -> None:
        self._give_up(request, None)

    def unanswered_since_s(self, besides: Container[int] = ()) -> float:
        for entry in self._in_flight.values():  # in the order in which they were sent
            if entry[4] not in besides:
                return entry[5]
        return inf

    # -- the table

    def _begin(self, method, message, payload, deadline_s, into, on_done, room=0) -> int:
        payload_bytes = sum(map(len, payload)) if payload else 0
        if self.closed:
            return self._refuse(on_done, Disconnected(self._end_reason, may_be_applied=False))
        if len(message) > MESSAGE_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
            return self._refuse(on_done, TooBig(f"a request of {len(message)} + {payload_bytes} bytes fits into no frame"))
        now_s = self._now_s()
        left_ms = int((deadline_s - now_s) * 1000)
        if left_ms <= 0:
            return self._refuse(on_done, DeadlineExceeded("past before the request was sent", may_be_applied=False))
        in_flight = self._in_flight
        number = self._number + 1 & _NUMBER_MASK
        while number in in_flight or not number:
            number = number + 1 & _NUMBER_MASK
        self._number = number
        if deadline_s < self._timer_s:
            self._arm(deadline_s)
        if self._writable and len(in_flight) < IN_FLIGHT_MAX and not self._waiting:
            in_flight[number] = (on_done, into, deadline_s, room, method, now_s)
            self._calls.begun += 1
            self._send_request(number, method, min(left_ms, _NUMBER_MASK), message, payload, payload_bytes)
        elif len(self._waiting) < WAITING_MAX:
            self._waiting[number] = (on_done, into, deadline_s, room, method, message, payload, payload_bytes)
            self._calls.begun += 1
        else:
            return self._refuse(on_done, Busy(f"{WAITING_MAX} requests wait for {self.peer.name} already"))
        return number

    def _refuse(self, on_done, error: NvpoolError) -> int:
        # By the loop, because a caller of submit does not expect its on_done before submit returns.
        self._loop.call_soon(on_done, None, error)
        return 0

    def _pump(self) -> None:
        """Send what waits, as far as it may."""
        while self._waiting and self._writable and len(self._in_flight) < IN_FLIGHT_MAX:
            number, (on_done, into, deadline_s, room, *request) = self._waiting.popitem(last=False)
            method, message, payload, payload_bytes = request
            now_s = self._now_s()
            left_ms = max(1, int((deadline_s - now_s) * 1000))
            self._in_flight[number] = (on_done, into, deadline_s, room, method, now_s)
            self._send_request(number, method, min(left_ms, _NUMBER_MASK), message, payload, payload_bytes)

    def _answered(self, number: int, status: int, message: Buffer, payload: memoryview) -> None:
        entry = self._in_flight.pop(number, None)
        if entry is None:
            return  # given up meanwhile
        self._calls.ended += 1
        took_s = self._now_s() - entry[5]
        try:
            if status:
                entry[0](None, decode_error(status, message))
            else:
                entry[0](Reply(message, payload), None)
        except Exception as error:
            self._loop.call_exception_handler({"message": "on_done of a request raised", "exception": error})
        self._calls.answered(entry[4], took_s, status)
        if self._waiting:
            self._pump()

    def _into(self, number: int, payload_bytes: int) -> memoryview | None:
        """Where the asker wants this answer's payload, if it said so and it fits."""
        entry = self._in_flight.get(number)
        if entry is None or entry[1] is None or len(entry[1]) < payload_bytes:
            return None
        return entry[1][:payload_bytes]

    def _give_up(self, number: int, error: NvpoolError | None) -> None:
        """End a request from this side; without an error its caller knows already."""
        entry = self._in_flight.pop(number, None)
        if entry is not None:
            if not self.closed:
                self._send_cancel(number)
        else:
            entry = self._waiting.pop(number, None)
            if entry is None:
                return
            if error is not None:
                error.may_be_applied = False
        self._calls.ended += 1
        if error is not None:
            self._calls.failed(entry[4], error.wire_code)
            self._tell(entry[0], error)
        if self._waiting:
            self._pump()

    def _tell(self, on_done, error: NvpoolError) -> None:
        try:
            on_done(None, error)
        except Exception as raised:
            self._loop.call_exception_handler({"message": "on_done of a request raised", "exception": raised})

    # -- deadlines: one timer for the earliest. Requests mostly come with later deadlines than those before them, so that a
    # request that is answered in time costs one comparison; a tick looks at all, which are few (IN_FLIGHT_MAX + waiting).

    def _arm(self, deadline_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = deadline_s
        self._timer = self._loop.call_later(max(TICK_S, deadline_s - self._now_s()), self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_s = None, inf
        now = self._now_s() + TICK_S / 2
        late, earliest = [], inf
        for table in (self._in_flight, self._waiting):
            for number, entry in table.items():
                if entry[2] <= now:
                    late.append((entry[2], number))
                elif entry[2] < earliest:
                    earliest = entry[2]
        if earliest < inf:
            self._arm(earliest)
        for _, number in sorted(late):
            self._give_up(number, DeadlineExceeded(f"{self.peer.name} did not answer within the deadline"))

    def _lost(self, reason: str) -> None:
        """The connection has ended: everything fails. May be called twice."""
        if self.closed:
            return
        self.closed = True
        self._end_reason = reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        in_flight, self._in_flight = self._in_flight, {}
        waiting, self._waiting = self._waiting, OrderedDict()
        self._calls.ended += len(in_flight) + len(waiting)
        for entry in in_flight.values():
            self._calls.failed(entry[4], Disconnected.wire_code)
            self._tell(entry[0], Disconnected(reason))
        for entry in waiting.values():
            self._tell(entry[0], Disconnected(reason, may_be_applied=False))


def _settle(future: asyncio.Future, reply: Reply | None, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(reply)
    else:
        future.set_exception(error)


class InboundCall:
    """transport.Call. The first answer counts; later ones, and those to an asker that has gone, are thrown away."""

    __slots__ = ("method", "message", "payload", "since_s", "deadline_s", "peer", "cancelled", "_side", "_number", "_bytes",
                 "_payload_bytes", "_callback")

    def __init__(self, side: Answerer, number: int, method: int, message: Buffer, payload: memoryview,
                 since_s: float, deadline_s: float) -> None:
        self.method = method
        self.message = message
        self.payload = payload
        self.since_s = since_s
        self.deadline_s = deadline_s
        self.peer = side.peer
        self.cancelled = False
        self._side: Answerer | None = side
        self._number = number
        self._payload_bytes = len(payload)
        self._bytes = self._payload_bytes + len(message)
        self._callback: Callable[[], None] | None = None

    def room(self, byte_count: int) -> memoryview | None:
        side = self._side
        return None if side is None else side._answer_room(self._number, byte_count)

    def reply(self, message: Buffer = b"", payload: Sequence[Buffer] = ()) -> None:
        side = self._side
        if side is None:
            return
        payload_bytes = sum(map(len, payload)) if payload else 0
        if len(message) > MESSAGE_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
            self.fail(InvariantBroken(f"{len(message)} + {payload_bytes} bytes: too long for method {self.method}"))
            return
        self._side = None
        side._finish(self._number, 0, message, payload, payload_bytes)

    def fail(self, error: BaseException) -> None:
        side = self._side
        code, message = encode_error(error)  # logs what is none of ours, even when nobody waits for it any more
        if side is not None:
            self._side = None
            side._finish(self._number, code, message, (), 0)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        if self.cancelled:
            callback()
        else:
            self._callback = callback

    def _cancel(self) -> None:
        self.cancelled = True
        self._side = None
        if self._callback is not None:
            try:
                self._callback()
            except Exception:
                _log.exception("on_cancel of a request raised")


class Answerer:
    """The answering side of a connection.

    A derived class has `_send_answer` and calls `_arrived`, `_cancelled` and, once at the end, `_asker_gone`. While
    `_overfull` it should read nothing more; `_room` is called when that ends.
    """

    def __init__(self, handler: Handler, peer: Peer, clock: Clock = SYSTEM_CLOCK, *, transport: str = "") -> None:
        self.peer = peer
        self._tally = TALLY.over(transport)
        self.draining = False
        self._handler = handler
        self._now_s = clock.boottime_s
        self._in_work: dict[int, InboundCall] = {}
        self._work_bytes = 0
        self._overfull = False
        self._share: Share | None = None
        """What its peer's limits count of it; None where they count nothing but the connection."""
        self._on_idle: Callable[[], None] | None = None

    def _carried_by(self, transport: str) -> None:
        """Its requests are those of that transport from now on, with those that are in work."""
        count = len(self._in_work)
        self._tally.begun -= count
        self._tally = TALLY.over(transport)
        self._tally.begun += count

    def _send_answer(self, number: int, status: int, message: Buffer, payload: Sequence[Buffer], payload_bytes: int) -> None:
        raise NotImplementedError

    def _answer_room(self, number: int, byte_count: int) -> memoryview | None:
        """Call.room of that request."""
        return None

    def _room(self) -> None:
        """The peer may be read from again."""

    def _arrived(self, number: int, method: int, deadline_ms: int, message: Buffer, payload: memoryview) -> None:
        if self.draining:
            code, text = encode_error(Draining())
            self._send_answer(number, code, text, (), 0)
            return
        if number in self._in_work:
            raise CorruptFrame(f"request {number} was sent twice")
        if len(self._in_work) >= IN_FLIGHT_MAX:
            raise CorruptFrame(f"more than {IN_FLIGHT_MAX} requests at once")
        now_s = self._now_s()
        call = InboundCall(self, number, method, message, payload, now_s, now_s + deadline_ms / 1000)
        self._in_work[number] = call
        self._tally.begun += 1
        self._work_bytes += call._bytes
        if call._bytes > LARGE_BYTES and self._share is not None:
            self._share.arrived(call._bytes)
        if self._work_bytes > WORK_BYTES_MAX:
            self._overfull = True
        try:
            self._handler(call)
        except Exception as error:
            call.fail(error)

    def _finish(self, number: int, status: int, message: Buffer, payload: Sequence[Buffer], payload_bytes: int) -> None:
        call = self._forget(number)
        self._send_answer(number, status, message, payload, payload_bytes)
        if call is not None:
            self._tally.answered(call.method, self._now_s() - call.since_s, status, call._payload_bytes,
                                 payload_bytes)
        if self._on_idle is not None and not self._in_work:
            self._on_idle()

    def _forget(self, number: int) -> InboundCall | None:
        call = self._in_work.pop(number, None)
        if call is not None and call._bytes:
            self._work_bytes -= call._bytes
            if call._bytes > LARGE_BYTES and self._share is not None:
                self._share.done(call._bytes)
            if self._overfull and self._work_bytes <= WORK_BYTES_MAX:
                self._overfull = False
                self._room()
        return call

    def _cancelled(self, number: int) -> None:
        call = self._forget(number)
        if call is not None:  # else answered already, and the two have crossed
            self._tally.given_up += 1
            call._cancel()
            if self._on_idle is not None and not self._in_work:
                self._on_idle()

    def load(self) -> tuple[int, int]:
        """Requests in work and their bytes."""
        return len(self._in_work), self._work_bytes

    def _asker_gone(self) -> None:
        in_work, self._in_work = self._in_work, {}
        self._work_bytes = 0
        self._tally.given_up += len(in_work)
        for call in in_work.values():
            call._cancel()
        if self._on_idle is not None:
            self._on_idle()

    async def _drained(self, timeout_s: float) -> None:
        """Take no new requests; return when those in work are answered, or after timeout_s."""
        self.draining = True
        if not self._in_work or timeout_s <= 0:
            return
        idle = asyncio.get_running_loop().create_future()
        self._on_idle = lambda: idle.done() or idle.set_result(None)
        await asyncio.wait([idle], timeout=timeout_s)
        self._on_idle = None
