"""Transport `grpc://host:port`: Frame messages on one bidirectional gRPC stream (service Exchange).

For networks and programs that use gRPC; slower than `stream` for single messages, good for batches. The
semantics are those of `stream`. Only this module of rpc imports grpc. The schema is in
proto/nvpool/v1/wire.proto. gRPC receives frames as bytes: protobuf encodes the fields of a Frame except the
payload, and the payload field is appended behind them. That is allowed because the order of fields is free
(protobuf.dev/programming-guides/encoding), and it saves two copies of the payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.endpoint import host_port_url, parse_endpoint
from nvpool.core.errors import (
    AccessDenied,
    BadConfiguration,
    Busy,
    CorruptFrame,
    Draining,
    InUse,
    NvpoolError,
    ProtocolMismatch,
    Stale,
    Unreachable,
)
from nvpool.core.names import dns_of
from nvpool.rpc.api import (
    MESSAGE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    Buffer,
    Connection,
    Greeting,
    Handler,
    Listener,
)
from nvpool.rpc.error_codec import decode_error, encode_error
from nvpool.rpc.handshake import HELLO_S, check_hello, encode_hello
from nvpool.rpc.multiplexer import ClientConnection, ServerConnection
from nvpool.rpc.peer_limits import Limits, Share
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.transports.frame import CANCEL, EMPTY, HELLO, REPLY, REQUEST
from nvpool.rpc.v1 import wire_pb2
from nvpool.security.tls import TlsIdentity, member_at, member_of_uris, refusal_of, security

_log = logging.getLogger(__name__)

METHOD = "/nvpool.v1.Exchange/Frames"
FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + PAYLOAD_BYTES_MAX + 1024
"""Largest frame: message, payload and the fields around them."""

QUEUE_BYTES = 1 << 20
"""Most bytes that wait for gRPC to send them.

Above it a client holds requests back, a server stops reading.
"""

REFUSED_S = 1.0
"""Wait for the greeting of a client that will be refused."""

_OPTIONS = (
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ("grpc.enable_retries", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
)
"""Options of both sides. A dead peer is noticed within 10 s, as on `stream`. gRPC itself never retries."""

_CLIENT_OPTIONS = (*_OPTIONS, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
"""Options of clients: a separate connection for each dialer, and no proxy from the environment's web
settings."""

_SERVER_OPTIONS = (
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.max_concurrent_streams", 1),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.server_handshake_timeout_ms", int(HELLO_S * 1000)),
)
"""Options of servers.

Without so_reuseport 0 a second daemon on the port would silently take half of the connections. A connection
has one stream, which counts towards the limits; a connection without a stream is closed."""

_PROTOCOLS = ("h2",)
"""Protocol name for ALPN (RFC 7301); gRPC refuses peers that have not named it."""

_PAYLOAD_TAG = b"\x3a"
"""Tag of field 7, length-delimited."""


def encode_frame(
    kind: wire_pb2.Frame.Kind,
    number: int,
    message: Buffer,
    payload: Sequence[Buffer] = (),
    payload_bytes: int = 0,
    *,
    method: int = 0,
    status: int = 0,
    deadline_ms: int = 0,
) -> bytes:
    """Encode a wire_pb2.Frame."""
    head = wire_pb2.Frame(
        kind=kind,
        method=method,
        status=status,
        request=number,
        deadline_ms=deadline_ms,
        message=message if type(message) is bytes else bytes(message),
    ).SerializeToString()
    if not payload_bytes:
        return head
    return b"".join((head, _PAYLOAD_TAG, _varint(payload_bytes), *payload))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_frame(raw: bytes) -> tuple[wire_pb2.Frame, memoryview]:
    """Return the frame and its payload. CorruptFrame: not a frame, or too long."""
    frame = wire_pb2.Frame()
    try:
        frame.ParseFromString(raw)
    except DecodeError:
        raise CorruptFrame("what came is not a frame of ours") from None
    payload = frame.payload
    if len(frame.message) > MESSAGE_BYTES_MAX or len(payload) > PAYLOAD_BYTES_MAX:
        raise CorruptFrame(f"a frame of {len(frame.message)} + {len(payload)} bytes is too long")
    if frame.request > 0xFFFFFFFF or not HELLO <= frame.kind <= CANCEL:
        raise CorruptFrame(f"a frame of unknown kind {frame.kind}")
    return frame, memoryview(payload) if payload else EMPTY


class _Sending:
    """Send queue of a gRPC stream: one write at a time, in order, in a task of the connection."""

    def __init__(self) -> None:
        self._queue: deque[bytes] = deque()
        self._queued_bytes = self._put_bytes = 0
        self._wake = asyncio.Event()
        self._stopping = False

    def _put(self, raw: bytes) -> None:
        self._queue.append(raw)
        self._queued_bytes += len(raw)
        self._put_bytes += len(raw)
        self._wake.set()

    @property
    def _full(self) -> bool:
        return self._queued_bytes > QUEUE_BYTES

    async def _write_all(self, stream: Any) -> None:
        """Write the queued frames until `_stop`; then return when everything is written."""
        while True:
            while self._queue:
                raw = self._queue.popleft()
                await stream.write(raw)
                was_full = self._full
                self._queued_bytes -= len(raw)
                if was_full and not self._full:
                    self._has_room()
            if self._stopping:
                return
            self._wake.clear()
            await self._wake.wait()

    def _stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def _has_room(self) -> None:
        raise NotImplementedError


class GrpcConnection(_Sending, ClientConnection):
    """Client end: a channel with one stream, a reading task and a writing task."""

    def __init__(
        self,
        endpoint: str,
        target: str,
        greeting: Greeting,
        clock: Clock,
        identity: TlsIdentity | None = None,
        member: str = "",
    ) -> None:
        """With `identity` the connection uses TLS and accepts only `member` as the server."""
        ClientConnection.__init__(
            self, asyncio.get_running_loop(), Peer(endpoint, endpoint, False, member), clock
        )
        _Sending.__init__(self)
        self._greeting = greeting
        if identity is None:
            self._channel = grpc.aio.insecure_channel(target, options=_CLIENT_OPTIONS)
        else:
            shown = identity.shown
            assert shown is not None  # else `security` would have returned no identity
            self._channel = grpc.aio.secure_channel(
                target,
                grpc.ssl_channel_credentials(shown.authority, shown.key, shown.certificate),
                options=(
                    *_CLIENT_OPTIONS,
                    ("grpc.ssl_target_name_override", dns_of(identity.pool_id, member)),
                ),
            )
            identity.watch(self, member)
        self._stream: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._stream = stream = self._channel.stream_stream(
            METHOD, request_serializer=None, response_deserializer=None
        )()
        await stream.write(encode_frame(HELLO, 0, encode_hello(self._greeting)))
        raw = await stream.read()
        if raw is grpc.aio.EOF:
            raise Unreachable(f"{self.peer.address} closed the stream before its greeting")
        frame, _ = decode_frame(raw)
        if frame.kind != HELLO:
            raise CorruptFrame(f"a frame of kind {frame.kind} out of place")
        if frame.status:
            raise decode_error(frame.status, frame.message)
        self.peer = self.peer._replace(name=check_hello(frame.message, self._greeting).name)
        self._tasks = [
            self.loop.create_task(self._read_all()),
            self.loop.create_task(self._write_until_lost()),
        ]

    async def _read_all(self) -> None:
        reason = "the connection was lost"
        try:
            while True:
                raw = await self._stream.read()
                if raw is grpc.aio.EOF:
                    reason = "the other side has closed the connection"
                    break
                frame, payload = decode_frame(raw)
                if frame.kind != REPLY:
                    raise CorruptFrame(f"a frame of kind {frame.kind} out of place")
                into = self._into(frame.request, len(payload)) if payload else None
                if into is not None:
                    into[:] = payload
                    payload = into
                self.answered(frame.request, frame.status, frame.message, payload)
        except CorruptFrame as error:
            reason = str(error)
            _log.warning("connection with %s ended: %s", self.peer.name, reason)
        except grpc.RpcError as error:
            reason = f"the connection was lost ({_code_of(error)})"
        finally:
            self._end(reason)

    async def _write_until_lost(self) -> None:
        try:
            await self._write_all(self._stream)
        except (grpc.RpcError, asyncio.InvalidStateError):
            self._end("the connection was lost")

    def _send_request(
        self,
        number: int,
        method: int,
        deadline_ms: int,
        message: Buffer,
        payload: Sequence[Buffer],
        payload_bytes: int,
    ) -> None:
        self._put(
            encode_frame(
                REQUEST, number, message, payload, payload_bytes, method=method, deadline_ms=deadline_ms
            )
        )
        self.writable = not self._full

    def _send_cancel(self, number: int) -> None:
        self._put(encode_frame(CANCEL, number, b""))

    def _has_room(self) -> None:
        self.writable = True
        self.pump()

    def _end(self, reason: str) -> asyncio.Task[None]:
        """End the connection once; the task is done when all is closed."""
        self._lost(f"{self.peer.name}: {reason}")
        if self._ending is None:
            self._ending = self.loop.create_task(self._tear_down())
        return self._ending

    async def _tear_down(self) -> None:
        self._stop()
        if self._stream is not None:
            self._stream.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._channel.close()

    def revoked(self, error: NvpoolError) -> None:
        _log.warning("connection with %s ended: %s", self.peer.name, error)
        self._end(str(error))

    async def close(self) -> None:
        await asyncio.shield(self._end("closed here"))


class _GrpcServed(_Sending, ServerConnection):
    """Server end of one stream; lives as long as its coroutine in the gRPC server."""

    def __init__(self, listener: GrpcListener, context: Any) -> None:
        ServerConnection.__init__(
            self,
            listener.handler,
            Peer("unknown", _address(context.peer()), False),
            listener.clock,
            transport="grpc",
        )
        _Sending.__init__(self)
        self._listener = listener
        self._context = context
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._serving: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._entered: Share | None = None
        self._held_back = False
        self._ended = False

    async def serve(self) -> None:
        """Exchange greetings, then read and answer requests until either side ends."""
        self._serving = asyncio.current_task()
        try:
            if await self._greet():
                await self._exchange()
        finally:
            if self._entered is not None:
                self._entered.leave()

    async def _exchange(self) -> None:
        self._listener.connections.add(self)
        writer = asyncio.get_running_loop().create_task(self._write_all(self._context))
        self._reading = reader = asyncio.get_running_loop().create_task(self._read_all())
        try:
            await asyncio.wait([reader, writer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ended = True
            self._listener.connections.discard(self)
            self.client_gone()
            for task in (reader, writer):
                task.cancel()
            await asyncio.wait([reader, writer])
            for task in (reader, writer):
                if not task.cancelled():
                    task.exception()  # retrieve it: the stream has ended, so nobody can get it

    async def _greet(self) -> bool:
        greeting = self._listener.greeting
        refusal = self._enter()
        try:
            async with asyncio.timeout(HELLO_S if refusal is None else REFUSED_S):
                raw = await self._context.read()
            if raw is grpc.aio.EOF:
                return False
            frame, _ = decode_frame(raw)
            if frame.kind != HELLO:
                raise CorruptFrame(f"a frame of kind {frame.kind} before a greeting")
            if refusal is not None:
                raise refusal
            hello = check_hello(frame.message, greeting)
            if self._listener.closing:
                raise Draining()
        except (ProtocolMismatch, Busy, Draining, AccessDenied, Stale) as error:
            if not isinstance(error, Busy):  # the limits module logs those, at a bounded rate
                self._complain(str(error))
            code, message = encode_error(error)
            await self._context.write(encode_frame(HELLO, 0, message, status=code))
            return False
        except (CorruptFrame, TimeoutError) as error:
            self._complain(str(error) or "no greeting came")
            return False
        self.peer = self.peer._replace(name=hello.name)
        await self._context.write(encode_frame(HELLO, 0, encode_hello(greeting)))
        return True

    def _enter(self) -> NvpoolError | None:
        """Count the connection before anything is read; return the reason if it is refused."""
        try:
            self.peer = self.peer._replace(member=self._member())
            self._entered = share = self._listener.limits.enter(self, self.peer, self._listener.greeting.name)
        except (Busy, AccessDenied, Stale) as error:
            return error
        self.share = share if share.limited else None
        return None

    # -- interface that limits need of a connection: rpc/peer_limits.LimitedConnection

    def unfinished(self) -> None:
        """Return None: gRPC does not report how much of a message it has received."""
        return

    def unsent(self) -> tuple[int, int]:
        return self._queued_bytes, self._put_bytes

    def hold_back(self) -> None:
        self._held_back = True

    def go_on(self) -> None:
        self._held_back = False
        self._room()

    def take_turn(self) -> None:
        """Do nothing: this transport processes frames one at a time and never asks for a turn."""

    def cut_off(self, reason: str) -> None:
        self._queue.clear()
        if self._reading is not None:
            self._reading.cancel()

    def _member(self) -> str:
        """Return the peer's member name from its certificate, and watch the certificate from now on.

        AccessDenied, StaleIdentity: the certificate is refused.
        """
        identity = self._listener.identity
        if identity is None:
            return ""
        names = self._context.auth_context().get("x509_subject_alternative_name", ())
        member = member_of_uris([name.decode(errors="replace") for name in names], identity.pool_id)
        identity.admit(member)
        identity.watch(self, member)
        return member

    def revoked(self, error: NvpoolError) -> None:
        self._complain(str(error))
        self._stop()

    async def _read_all(self) -> None:
        try:
            while True:
                raw = await self._context.read()
                if raw is grpc.aio.EOF:
                    return
                frame, payload = decode_frame(raw)
                if frame.kind == REQUEST:
                    self.arrived(frame.request, frame.method, frame.deadline_ms, frame.message, payload)
                    if self.share is not None and self.share.is_full:
                        self.share.wait()
                    if self._overfull or self._full or self._held_back:
                        self._flowing.clear()
                        await self._flowing.wait()
                elif frame.kind == CANCEL:
                    self.cancel_request(frame.request)
                else:
                    raise CorruptFrame(f"a frame of kind {frame.kind} out of place")
        except CorruptFrame as error:
            self._complain(str(error))

    def _complain(self, reason: str) -> None:
        text = f"connection with {self.peer.name} at {self.peer.address} ended: {reason}"
        if self._entered is not None and not self._entered.limited:
            _log.warning("%s", text)
        else:  # such a peer must not fill the log
            self._listener.limits.log(f"fault {logging.WARNING}", text)

    def _send_answer(
        self, number: int, status: int, message: Buffer, payload: Sequence[Buffer], payload_bytes: int
    ) -> None:
        if not self._ended:
            self._put(encode_frame(REPLY, number, message, payload, payload_bytes, status=status))

    def _room(self) -> None:
        if not self._full and not self._overfull and not self._held_back:
            self._flowing.set()

    _has_room = _room

    async def drain(self, drain_s: float) -> None:
        await self._drained(drain_s)
        self._stop()  # ends the writer after its last frame, and with it `serve`
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=1.0)


class GrpcListener:
    """`api.Listener` over a grpc.aio server with one service."""

    def __init__(
        self, greeting: Greeting, handler: Handler, clock: Clock, identity: TlsIdentity | None = None
    ) -> None:
        """With `identity` the listener uses TLS.

        Peers without a certificate are refused, whatever the greeting allows.
        """
        self.endpoint = ""
        self.greeting = greeting
        self.identity = identity
        self.handler = handler
        self.clock = clock
        self.limits = greeting.limits or Limits(clock=clock)
        self.connections: set[_GrpcServed] = set()
        self.closing = False
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "nvpool.v1.Exchange", {"Frames": grpc.stream_stream_rpc_method_handler(self._frames)}
                ),
            )
        )

    async def _frames(self, _requests: Any, context: Any) -> None:
        await _GrpcServed(self, context).serve()

    async def start(self, endpoint: str) -> None:
        where = parse_endpoint(endpoint)
        try:
            target = _target(where.host, where.port)
            port = (
                self._server.add_insecure_port(target)
                if self.identity is None
                else self._server.add_secure_port(target, _credentials(self.identity))
            )
        except RuntimeError:  # the only one that it raises: no address could be bound
            raise InUse(f"{endpoint}: the address is in use, or not one of this host") from None
        await self._server.start()
        self.endpoint = host_port_url("grpc", where.host, port)

    async def close(self, drain_s: float = 0.0) -> None:
        self.closing = True
        if self.connections:
            await asyncio.gather(*[served.drain(drain_s) for served in list(self.connections)])
        await self._server.stop(0.2)


class GrpcTransport:
    scheme = "grpc"
    rank = 10

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock

    async def connect(self, endpoint: str, greeting: Greeting, *, deadline_s: float) -> Connection:
        where = parse_endpoint(endpoint)
        identity = security(greeting.identity, where, endpoint)
        member = "" if identity is None else await self._whom(identity, endpoint, deadline_s)
        connection = GrpcConnection(
            endpoint, _target(where.host, where.port), greeting, self._clock, identity, member
        )
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock.boottime_s())):
                await connection.start()
            return connection
        except TimeoutError:
            raised: NvpoolError = Unreachable(f"no reply from {endpoint} in time")
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            trouble = "" if identity is None else identity.own_trouble()
            raised = (
                AccessDenied(f"{endpoint} hung up: {trouble}")
                if trouble
                else Unreachable(f"no reply from {endpoint} ({_code_of(error)})")
            )
        except CorruptFrame as error:
            raised = Unreachable(f"{endpoint}: {error}")
        except NvpoolError as error:
            raised = error
        except asyncio.CancelledError:
            await connection.close()
            raise
        with contextlib.suppress(grpc.RpcError):
            await connection.close()
        raise raised

    async def _whom(self, identity: TlsIdentity, endpoint: str, deadline_s: float) -> str:
        """Member that serves at the endpoint; raises unless that member is in the pool."""
        where = parse_endpoint(endpoint)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock.boottime_s())):
                member = await member_at(identity, where.host, where.port, _PROTOCOLS)
            identity.admit(member, as_server=True)
            return member
        except OSError as error:  # TimeoutError is one
            if refusal := refusal_of(error):
                raise AccessDenied(f"{endpoint}: {refusal}") from None
            raise Unreachable(f"no reply from {endpoint}: {error.strerror or error or 'timed out'}") from None
        except (AccessDenied, Stale) as error:
            raise type(error)(f"{endpoint}: {error}") from None

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        if not parse_endpoint(endpoint).host:
            raise BadConfiguration(f"{endpoint!r} names no host")
        listener = GrpcListener(
            greeting, handler, self._clock, security(greeting.identity, parse_endpoint(endpoint), endpoint)
        )
        await listener.start(endpoint)
        return listener


def _credentials(identity: TlsIdentity) -> grpc.ServerCredentials:
    """TLS credentials of a server.

    The server presents `identity`'s current certificate and requires a client certificate of the same CA."""

    def shown() -> grpc.ServerCertificateConfiguration:
        now = identity.shown
        assert now is not None  # else `security` would have returned no identity
        return grpc.ssl_server_certificate_configuration([(now.key, now.certificate)], now.authority)

    return grpc.dynamic_ssl_server_credentials(shown(), shown, require_client_authentication=True)


def _target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(peer: str) -> str:
    return unquote(peer).partition(":")[2]


def _code_of(error: BaseException) -> str:
    return error.code().name.lower() if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
