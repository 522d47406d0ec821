"""Transport `rdma`: a stream connection whose large read replies are written directly into client memory.

**Set-up.** A connection begins as one of `stream` (TCP with TLS, or a unix socket), with the greeting and
certificates of `stream`: they decide which peers may have keys to our memory. The server offers RDMA in its
Hello, and only to peers in networks that the operator has named, since one-sided writes are not encrypted.
Both sides exchange the addresses of their UCX workers and create endpoints to one another. The client creates
one too, although it sends nothing through it: UCX ends a process that learns of a peer's death through an
endpoint without an owner. Then the client gives the server a key to its memory, the server writes a few bytes
there, and once they have arrived both know that RDMA works. Otherwise the connection stays a plain stream,
and the log gives the reason.

**Requests.** A request may carry the address of a buffer in front of its message: (key, offset, length,
method), 14 bytes. The store writes the payload of the whole batch there, waits until the payload has arrived
(flush), and sends the small frame of the reply, with statuses and checksums, over the stream; the deadline
field of that frame contains the number of bytes written. Everything else (requests, small replies, errors,
cancellation, draining) uses the stream. If the store can access the buffer itself (shared memory), its
handler may fill the buffer before it answers (Call.room): the drive's pages are copied there, without another
buffer and a put between.

**Buffer reuse.** After a REPLY the store writes nothing more to the buffer of that request. Therefore:

* If a request ended here (deadline, cancellation), its buffer is not reused before the store has answered the
  request; a store also answers cancelled requests. If the store does not answer within QUARANTINE_S, the
  connection ends.
* When a connection ends, its worker is destroyed first, because data can arrive only through the worker. The
  memory of that connection is never handed out again. The caller's own memory (`into`) is copied to, never
  written by the peer.
* If a key is no longer valid, the reply is an Unavailable.

**Control messages** travel in frames of kind HELLO with a code, after the greeting:

    1 BEGIN   empty (the client wants RDMA) · address of the worker (both sides; the store sends first)
    2 KEY     number u32, reserved u32, address u64, bytes u64, key
    3 TRY     number of a key u32, offset u32, 8 bytes to be written there
    4 WORKS   (store) the bytes have arrived
    5 FAILED  (either side) why this connection continues without RDMA
    6 FORGET  number of a key u32

With UCX's own TCP the client's worker takes part in each write; with verbs and shared memory the worker does
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from nvpool.core.errors import Cancelled, CorruptFrame, NotSupported, NvpoolError, Unavailable, Unreachable
from nvpool.rpc.api import MESSAGE_BYTES_MAX, Buffer, Greeting, Handler
from nvpool.rpc.error_codec import encode_error
from nvpool.rpc.handshake import printable
from nvpool.rpc.transports import ucx
from nvpool.rpc.transports.frame import CANCEL, HELLO, REPLY, REQUEST, pack_head
from nvpool.rpc.transports.frame_stream import GATHER_IN_FLIGHT
from nvpool.rpc.transports.rdma_buffers import PLACE_BYTES_MAX, RegisteredBuffers
from nvpool.rpc.transports.stream import (
    StreamConnection,
    StreamListener,
    StreamServed,
    StreamTransport,
    UnixStreamTransport,
)

if TYPE_CHECKING:
    import socket

    from nvpool.rpc.peer_limits import MeteredTransport
    from nvpool.security.tls import TlsIdentity

    _StreamBase = StreamTransport
else:
    _StreamBase = object

_log = logging.getLogger(__name__)

BEGIN, KEY, TRY, WORKS, FAILED, FORGET = range(1, 7)
PLACED = 0xFFFF
"""Replaces a request's method: the message then begins with a buffer address and the real method.

A buffer of length 0 means that there is none."""
_PLACE = struct.Struct("<IIIH")
KEY_HEAD = struct.Struct("<IIQQ")
_TRY = struct.Struct("<II8s")
_NUMBER = struct.Struct("<I")
OFFER = "rdma:"
"""Prefix of an offer in Hello.transports; UCX's transports follow it."""

PLACED_BYTES_MIN = 16 << 10
"""Smallest reply for a registered buffer: such a buffer costs 6 us on both sides together (measured).

Copying 16 KiB costs less, so smaller replies come in their frame."""
UPGRADE_S = 2.0
QUARANTINE_S = 5.0
"""Time for a store to confirm that it no longer writes to a buffer.

It is longer than any write takes and shorter than a client waits."""
KEYS_MAX = 256
"""Most keys of one peer."""
KEY_BYTES_MAX = 4096
WRITING_BYTES_MAX = 64 << 20
"""Most bytes of pending writes to one peer. Above it nothing more is read from that peer."""
TURN_BYTES = 1 << 20
"""Bytes written to a peer's memory before its replies are sent.

Only then do we read more requests. The peer then processes those bytes while we copy the next. Replies on a
stream are that long by themselves."""
_TURNS = 256
"""Most UCX progress calls in a row, before other callbacks of this loop run."""
_SPINS_A_US = 10


class RdmaSettings(NamedTuple):
    """RDMA settings of a server; the client accepts what the server offers."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Peers in these networks are offered RDMA."""
    local: bool = False
    """Whether peers on unix sockets are offered shared memory."""
    transports: str = "auto"
    """UCX transports; auto: InfiniBand and RoCE for networks, shared memory for unix sockets."""
    devices: str = "all"
    poll_us: int = 0
    """Time to poll for the end of a write before waiting for an event."""


OFF = RdmaSettings()


class _Turning:
    """A UCX worker driven by the running event loop."""

    def __init__(self, context: Any, poll_us: int = 0) -> None:
        self.worker = ucx.Worker(context)
        self._loop = asyncio.get_running_loop()
        self._spins = poll_us * _SPINS_A_US
        self.flushes: dict[Any, Callable[[Any], None]] = {}
        self._soon = False
        self.closed = False
        self._descriptor = self.worker.descriptor()
        self._loop.add_reader(self._descriptor, self.turn)
        self.turn()

    def turn(self) -> None:
        """Make all progress that is possible now. The loop calls this again when there is more."""
        if self.closed:
            return
        done = self.worker.progress(_TURNS)
        for flush in [flush for flush in self.flushes if flush.ended()]:
            self.flushes.pop(flush)(flush)
        if not done and not self._soon and not self.closed:
            self._soon = True
            self._loop.call_soon(self._again)

    def _again(self) -> None:
        self._soon = False
        self.turn()

    def wait(self, flush: Any, on_end: Callable[[Any], None]) -> None:
        """Call `on_end(flush)` when the flush has ended; immediately if it already has."""
        if flush.ended() or (self._spins and self.worker.spin(flush, self._spins)):
            on_end(flush)
        else:
            self.flushes[flush] = on_end
            self.turn()

    def close(self) -> None:
        """Close the worker: on return nothing can arrive through it. The endpoints must be closed before."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._descriptor)
            self.flushes.clear()
            self.worker.close()


def reach(worker: Any, address: bytes, transports: str) -> Any:
    """Create an endpoint of the worker to the peer's worker at `address`.

    Over a network UCX reports the death of the peer. Within a host UCX cannot, and the connection of this
    endpoint reports it.
    """
    if not address or len(address) > KEY_BYTES_MAX:
        raise CorruptFrame("that is not an address of a worker")
    try:
        return ucx.Endpoint(worker, address, True)
    except ucx.Error:
        if set(transports.split(",")) - set(ucx.LOCAL.split(",")):
            raise
    return ucx.Endpoint(worker, address, False)


class RdmaConnection(StreamConnection):
    """Client end. `upgraded`: replies can be written to our memory; if not, `why_not` gives the reason."""

    placed_bytes_min = PLACED_BYTES_MIN

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.upgraded = False
        self.why_not = ""
        self.placed_bytes = 0
        """Payload bytes that arrived by one-sided writes, for statistics."""
        self.turning: _Turning | None = None
        self.rooms: RegisteredBuffers | None = None
        self.places: dict[int, Any] = {}  # by request, until the store has answered it
        self.quarantined: dict[int, float] = {}  # those of them whose requests have ended here: time limit
        self._quarantine_timer: asyncio.TimerHandle | None = None
        self._endpoint: Any = None
        self._works: asyncio.Future[bytes] | None = None

    async def upgrade(self, deadline_s: float) -> None:
        """Upgrade to RDMA if the server offers it and it works; otherwise set `why_not`."""
        offers = [offer.removeprefix(OFFER) for offer in self.offers if offer.startswith(OFFER)]
        if not offers:
            self.why_not = "the other side does not offer it to this host"
            return
        self._works = self.loop.create_future()
        try:
            context = ucx.context(offers[0])
            self.turning = _Turning(context)
            self.rooms = RegisteredBuffers(context, self._send_key, self._forget_key)
            async with asyncio.timeout(min(UPGRADE_S, max(0.0, deadline_s - self.now_s()))):
                self.say(BEGIN, b"")
                self._endpoint = reach(self.turning.worker, await self._works, offers[0])
                self._works = self.loop.create_future()
                self.say(BEGIN, self.turning.worker.address())
                place = self.rooms.take(8)
                if place is None:
                    raise NotSupported("no memory can be registered")
                wanted, view = os.urandom(8), memoryview(place)
                self.say(TRY, _TRY.pack(place.key, place.offset, wanted))
                await self._works
            if view != wanted:
                raise NotSupported("what the other side has written did not arrive")
            self.upgraded = True
        except (NvpoolError, ucx.Error) as error:
            self._do_without(str(error))
        except TimeoutError:
            self._do_without("the other side does not write")
        finally:
            if not self._works.done():
                self._works.cancel()

    def _do_without(self, reason: str) -> None:
        self.why_not = reason
        self._unlink()
        if not self.frames.ended:
            self.say(FAILED, reason.encode()[:KEY_BYTES_MAX])

    def _unlink(self) -> None:
        """Close the RDMA resources: on return nothing can arrive any more, and no buffer is reused."""
        self.upgraded = False
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        if self.turning is not None:
            self.turning.close()
        if self.rooms is not None:
            self.rooms.close()
        for place in self.places.values():
            place.home = None
        self.places.clear()
        self.quarantined.clear()
        if self._quarantine_timer is not None:
            self._quarantine_timer.cancel()
            self._quarantine_timer = None

    def say(self, word: int, said: bytes) -> None:
        """Send a control message."""
        self.frames.send(pack_head(HELLO, word, 0, 0, said, 0), (), 0, gather=False)

    def _send_key(self, number: int, slab: Any) -> None:
        self.say(KEY, KEY_HEAD.pack(number, 0, slab.address, slab.length) + slab.key())

    def _forget_key(self, number: int) -> None:
        if not self.frames.ended:
            self.say(FORGET, _NUMBER.pack(number))

    def _send_request(
        self,
        number: int,
        method: int,
        deadline_ms: int,
        message: Buffer,
        payload: Sequence[Buffer],
        payload_bytes: int,
    ) -> None:
        if self.upgraded:
            _, into, _, room, *_ = self.in_flight[number]
            wanted = min(room if into is None else len(into), PLACE_BYTES_MAX)
            rooms, place = self.rooms, None
            if (
                wanted >= self.placed_bytes_min
                and rooms is not None
                and len(message) <= MESSAGE_BYTES_MAX - _PLACE.size
            ):
                place = rooms.take(wanted)
            if place is not None:
                self.places[number] = place
                method, message = (
                    PLACED,
                    _PLACE.pack(place.key, place.offset, wanted, method) + bytes(message),
                )
            elif method == PLACED:
                message = _PLACE.pack(0, 0, 0, method) + bytes(message)
        super()._send_request(number, method, deadline_ms, message, payload, payload_bytes)

    def deliver(
        self, kind: int, code: int, number: int, deadline_ms: int, message: bytes, payload: memoryview
    ) -> None:
        if kind == REPLY:
            place = self.places.pop(number, None)
            if deadline_ms:
                self._arrived_there(place, code, number, deadline_ms, message)
                return
            if place is not None:
                self.quarantined.pop(number, None)
        elif kind == HELLO and code in (BEGIN, WORKS, FAILED) and self._works is not None:
            if not self._works.done():
                if code != FAILED:
                    self._works.set_result(message)
                else:
                    self._works.set_exception(NotSupported(message.decode(errors="replace")))
            return
        super().deliver(kind, code, number, deadline_ms, message, payload)

    def _arrived_there(self, place: Any, code: int, number: int, count: int, message: bytes) -> None:
        if place is None or count > place.length:
            raise CorruptFrame(f"{count} bytes were written where there was no place for them")
        if self.quarantined.pop(number, None) is not None:
            return
        self.placed_bytes += count
        payload = memoryview(place)[:count]
        into = self._into(number, count)
        if into is not None:
            into[:] = payload
            payload = into
        self.answered(number, code, message, payload)

    def _send_cancel(self, number: int) -> None:
        if number in self.places:
            self.quarantined[number] = self.now_s() + QUARANTINE_S
            if self._quarantine_timer is None:
                self._quarantine_timer = self.loop.call_later(QUARANTINE_S, self._look_at_quarantine)
        super()._send_cancel(number)

    def _look_at_quarantine(self) -> None:
        self._quarantine_timer = None
        now_s = self.now_s()
        if any(until_s <= now_s for until_s in self.quarantined.values()):
            self.frames.end("the other side does not say whether it still writes to our memory", logged=True)
        elif self.quarantined:
            self._quarantine_timer = self.loop.call_later(
                min(self.quarantined.values()) - now_s, self._look_at_quarantine
            )

    def revoke_keys(self) -> None:
        """Revoke the server's access to all memory that it has keys of.

        Pending requests with such a buffer fail with Unavailable at the server; later requests get new
        memory.
        """
        rooms = self.rooms
        if rooms is not None:
            for number in list(rooms.numbers()):
                rooms.revoke(number)

    def on_end(self, reason: str) -> None:
        self._unlink()
        if self._works is not None and not self._works.done():
            self._works.set_exception(NotSupported(reason))
        super().on_end(reason)


class RdmaServed(StreamServed):
    """Server end of one connection. It is a plain `stream` connection unless the client asks for RDMA."""

    _listener: RdmaListener

    def __init__(self, listener: RdmaListener) -> None:
        super().__init__(listener, answers_later=False)
        self._endpoint: Any = None
        self._turning: _Turning
        """The listener's worker, from the client's BEGIN on."""
        self._keys: dict[int, Any] = {}
        self._places: dict[int, Sequence[int]] = {}
        self._filled: dict[int, memoryview] = {}  # buffers that the handler fills itself
        self.writing_bytes = 0
        self._turn_bytes = 0

    def _offers(self) -> Sequence[str]:
        transports = self._listener.offered(self.frames.transport)
        return (OFFER + transports,) if transports else ()

    def deliver(
        self, kind: int, code: int, number: int, deadline_ms: int, message: bytes, payload: memoryview
    ) -> None:
        if kind == REQUEST and code == PLACED and self._endpoint is not None:
            if len(message) < _PLACE.size or number in self._places:
                raise CorruptFrame(f"request {number} has no proper place")
            *place, code = _PLACE.unpack_from(message)
            message = message[_PLACE.size :]
            if place[2]:
                self._places[number] = place
        elif kind == CANCEL and number in self._places:
            super().deliver(kind, code, number, deadline_ms, message, payload)
            self._filled.pop(number, None)
            # The answer means: we no longer write to the buffer.
            if self._places.pop(number, None) is not None:
                status, text = encode_error(Cancelled("given up"))
                super()._send_answer(number, status, text, (), 0)
            return
        elif kind == HELLO and code and self.greeted:
            self._word(code, message)
            self._pause_after_turn()
            return
        super().deliver(kind, code, number, deadline_ms, message, payload)

    # -- control messages

    def _word(self, word: int, said: bytes) -> None:
        try:
            if word == BEGIN and self._endpoint is None:
                turning = self._listener.turning
                if turning is None or not self._offers():
                    raise NotSupported("it was not offered")
                self._turning = turning
                if said:
                    self._endpoint = reach(turning.worker, said, self._listener.transports)
                else:
                    self.frames.send(
                        pack_head(HELLO, BEGIN, 0, 0, turning.worker.address(), 0), (), 0, gather=False
                    )
            elif word == KEY and self._endpoint is not None:
                number, _, base, length = KEY_HEAD.unpack_from(said)
                if len(self._keys) >= KEYS_MAX or len(said) > KEY_BYTES_MAX or number in self._keys:
                    raise CorruptFrame("more keys than one can need")
                self._keys[number] = ucx.Key(self._endpoint, bytes(said[KEY_HEAD.size :]), base, length)
            elif word == TRY and self._endpoint is not None:
                number, offset, content = _TRY.unpack(said)
                self._turning.wait(self._endpoint.put(self._keys[number], offset, (content,)), self._tried)
            elif word == FORGET:
                key = self._keys.pop(_NUMBER.unpack(said)[0], None)
                if key is not None:
                    key.drop()
            elif word == FAILED:
                reason = printable(bytes(said[:KEY_BYTES_MAX]).decode(errors="replace"))
                self._log_fault(logging.INFO, f"no RDMA with {self.peer_text()}: {reason}")
                self._unlink()
            elif self._endpoint is not None or word not in (KEY, TRY):  # they may have crossed our FAILED
                raise CorruptFrame(f"word {word} out of place")
        except (NotSupported, ucx.Error) as error:
            self.withdraw(str(error))
        except (struct.error, KeyError):
            raise CorruptFrame(f"word {word} cannot be read") from None

    def _tried(self, flush: Any) -> None:
        if flush.error:
            self.withdraw(flush.error)
        elif not self.frames.ended:
            self._carried_by(RdmaUnixTransport.scheme if self.peer.local else RdmaTransport.scheme)
            self.frames.send(pack_head(HELLO, WORKS, 0, 0, b"", 0), (), 0, gather=False)

    def withdraw(self, reason: str) -> None:
        """Continue without RDMA, and give the client and the log the reason."""
        self._log_fault(logging.INFO, f"no RDMA with {self.peer_text()}: {reason}")
        self._unlink()
        if not self.frames.ended:
            self.frames.send(pack_head(HELLO, FAILED, 0, 0, reason.encode(), 0), (), 0, gather=False)

    def _unlink(self) -> None:
        for key in self._keys.values():
            key.drop()
        self._keys.clear()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
            if not self.frames.ended:
                self._carried_by(
                    RdmaUnixTransport.stream_scheme if self.peer.local else RdmaTransport.stream_scheme
                )

    # -- replies

    def answer_room(self, number: int, byte_count: int) -> memoryview | None:
        place = self._places.get(number)
        if place is None or not 0 < byte_count <= place[2]:
            return None
        key = self._keys.get(place[0])
        window: memoryview | None = key.window(place[1], byte_count) if key is not None else None
        if window is not None:
            self._filled[number] = window
        return window

    def _send_answer(
        self, number: int, status: int, message: Buffer, payload: Sequence[Buffer], payload_bytes: int
    ) -> None:
        place = self._places.pop(number, None) if self._places else None
        filled = self._filled.pop(number, None) if self._filled else None
        if place is None or status or not payload_bytes or self.frames.ended:
            super()._send_answer(number, status, message, payload, payload_bytes)
            return
        number_of_key, offset, length = place
        key = self._keys.get(number_of_key)
        if payload_bytes > length and key is not None:
            super()._send_answer(number, status, message, payload, payload_bytes)
            return
        try:
            if key is None:
                raise ucx.Error("the key to the reader's memory is not valid any more")
            if filled is not None and len(payload) == 1 and payload[0] is filled:
                self.frames.send(
                    pack_head(REPLY, 0, number, payload_bytes, message, 0),
                    (),
                    0,
                    gather=len(self.in_work) >= GATHER_IN_FLIGHT,
                )
                self._end_turn(payload_bytes)
                return
            flush = self._write(key, offset, payload)
        except ucx.Error as error:
            self._could_not(number, str(error))
            return
        self.writing_bytes += payload_bytes
        if self.writing_bytes > WRITING_BYTES_MAX and not flush.ended():
            self.pause_writing()
        self._turning.wait(flush, lambda flush: self._written(flush, number, message, payload_bytes))

    def _end_turn(self, byte_count: int) -> None:
        self._turn_bytes += byte_count
        if self._turn_bytes >= TURN_BYTES and self.frames.reading and not self.frames.reader.stalled:
            self._turn_bytes = 0
            self.frames.pause_reading()
            self.frames.loop.call_soon(self._room)

    def _write(self, key: Any, offset: int, payload: Sequence[Buffer]) -> Any:
        return self._endpoint.put(key, offset, payload)

    def _written(self, flush: Any, number: int, message: Buffer, count: int) -> None:
        before, self.writing_bytes = self.writing_bytes, self.writing_bytes - count
        if flush.error:
            self._could_not(number, flush.error)
        elif not self.frames.ended:
            self.frames.send(pack_head(REPLY, 0, number, count, message, 0), (), 0, gather=True)
        if before > WRITING_BYTES_MAX >= self.writing_bytes and not self.frames.ended:
            self.resume_writing()

    def _could_not(self, number: int, reason: str) -> None:
        status, text = encode_error(
            Unavailable(f"the answer could not be written to the reader's memory: {reason}")
        )
        super()._send_answer(number, status, text, (), 0)

    def on_end(self, reason: str) -> None:
        self._unlink()
        self._places.clear()
        self._filled.clear()
        super().on_end(reason)


class RdmaListener(StreamListener):
    """Listener with one UCX worker for all its connections."""

    def __init__(self, settings: RdmaSettings, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._settings = settings
        self.transports = (
            settings.transports if settings.transports != "auto" else ucx.LOCAL if self.local else ucx.NETWORK
        )
        self.turning: _Turning | None = None

    def _serve(self) -> StreamServed:
        return RdmaServed(self)

    async def start(self, sock: socket.socket, endpoint: str, path: str = "") -> None:
        if self._settings.local if self.local else self._settings.networks:
            try:
                self.turning = _Turning(
                    ucx.context(self.transports, self._settings.devices), self._settings.poll_us
                )
            except (NvpoolError, ucx.Error) as error:
                _log.info("%s: no RDMA is offered: %s", endpoint, error)
        try:
            await super().start(sock, endpoint, path)
        except BaseException:
            if self.turning is not None:
                self.turning.close()
            raise

    def offered(self, transport: asyncio.BaseTransport | MeteredTransport) -> str:
        """UCX transports to offer on this connection. "" if there is no device or the peer's network is not
        allowed."""
        if self.turning is None or self.turning.closed:
            return ""
        if self.local:
            return self.transports
        for end in ("sockname", "peername"):
            address = ip_address(transport.get_extra_info(end)[0].partition("%")[0])
            address = getattr(address, "ipv4_mapped", None) or address
            if not any(address in network for network in self._settings.networks):
                return ""
        return self.transports

    async def close(self, drain_s: float = 0.0) -> None:
        await super().close(drain_s)
        if self.turning is not None:
            self.turning.close()


class _Rdma(_StreamBase):
    """Additions of both RDMA transports to those of `stream`. `strict`: fail if RDMA does not work."""

    _asking: ClassVar[type[StreamConnection]] = RdmaConnection
    stream_scheme: str

    def __init__(self, settings: RdmaSettings = OFF, *, strict: bool = True) -> None:
        super().__init__()
        self._settings = settings
        self._strict = strict
        self._logged: set[tuple[str, str]] = set()

    def _listening(
        self, greeting: Greeting, handler: Handler, identity: TlsIdentity | None
    ) -> StreamListener:
        return RdmaListener(self._settings, greeting, handler, self.local, self._clock, identity)

    async def connect(self, endpoint: str, greeting: Greeting, *, deadline_s: float) -> RdmaConnection:
        """Connect as StreamTransport does, then upgrade.

        Unreachable, too, if `strict` and RDMA does not work.
        """
        connection = cast("RdmaConnection", await super().connect(endpoint, greeting, deadline_s=deadline_s))
        try:
            await connection.upgrade(deadline_s)
        except BaseException:
            await connection.close()
            raise
        if not connection.upgraded:
            if self._strict or connection.closed:
                await connection.close()
                raise Unreachable(f"no RDMA with {endpoint}: {connection.why_not}")
            if connection.offers and (endpoint, connection.why_not) not in self._logged:
                self._logged = {*list(self._logged)[-63:], (endpoint, connection.why_not)}
                _log.info(
                    "no RDMA with %s, so it is %s: %s", endpoint, self.stream_scheme, connection.why_not
                )
        return connection


class RdmaTransport(_Rdma, StreamTransport):
    """Transport `rdma://host:port`; connects to a `stream` listener that offers RDMA."""

    scheme = "rdma"
    stream_scheme = StreamTransport.scheme
    rank = 35


class RdmaUnixTransport(_Rdma, UnixStreamTransport):
    """Transport `rdma+unix:///path`: shared memory instead of RDMA, between processes of one user of a
    host."""

    scheme = "rdma+unix"
    stream_scheme = UnixStreamTransport.scheme
    rank = 45
