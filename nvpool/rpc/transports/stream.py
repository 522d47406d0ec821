"""Transports `stream` (TCP) and `stream+unix` (unix sockets): frames on the event loop's sockets.

The frames are those of rpc/transports/frame. The transports work on any asyncio loop and are designed for
uvloop, whose transports write immediately and keep unsent data by reference, without a copy. A frame that is
malformed, too long or unknown ends its connection with one logged reason, and affects nothing else.

Both directions are bounded: a client holds requests back while its socket is full; a server reads nothing
while its responses are not taken or too many payload bytes are in progress. Keepalive and TCP_USER_TIMEOUT
detect a dead host within DEAD_PEER_S. A process that merely hangs is left to the deadlines of requests.

Traffic between hosts uses the loop's TLS with certificates of both sides, as the greeting's identity says;
frames and all else are unchanged. In TLS 1.3 the client's handshake is over before the server has checked the
client's certificate. A refusal therefore arrives instead of the greeting, and the TLS of uvloop and asyncio
reports no reason for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar, cast

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.endpoint import Endpoint, host_port_url, parse_endpoint
from nvpool.core.errors import (
    AccessDenied,
    Busy,
    CorruptFrame,
    InUse,
    NvpoolError,
    ProtocolMismatch,
    Unreachable,
)
from nvpool.rpc.api import Buffer, Greeting, Handler, Listener
from nvpool.rpc.error_codec import decode_error, encode_error
from nvpool.rpc.handshake import HELLO_S, check_hello, encode_hello
from nvpool.rpc.multiplexer import ClientConnection, ServerConnection
from nvpool.rpc.peer_limits import Limits, MeteredTransport, Share
from nvpool.rpc.peer_roles import Peer, with_address
from nvpool.rpc.transports.frame import CANCEL, HELLO, REPLY, REQUEST, pack_head
from nvpool.rpc.transports.frame_fast_path import ReplyFastPath, RequestFastPath
from nvpool.rpc.transports.frame_stream import GATHER_IN_FLIGHT, FrameStream
from nvpool.rpc.transports.socket_options import (
    GOODBYE_S,
    TlsOptions,
    connect_error,
    is_socket,
    listen_error,
    tls_options,
)
from nvpool.rpc.transports.tls_server import TlsServer
from nvpool.security.tls import TlsIdentity, member_of, security

_log = logging.getLogger(__name__)

BACKLOG = 1024


def _certified_member(
    connection: StreamConnection | StreamServed, identity: TlsIdentity, *, as_server: bool
) -> str:
    """Return the peer's member name from its certificate, and watch the certificate from now on.

    Returns "" if the peer presented none. AccessDenied, StaleIdentity: the certificate is refused.
    """
    member = member_of(connection.frames.transport.get_extra_info("peercert"), identity.pool_id)
    if member:
        identity.admit(member, as_server=as_server)
        identity.watch(connection, member)
    return member


class StreamConnection(ClientConnection, asyncio.BufferedProtocol):
    """Client end, made by the transports' `connect`."""

    upgraded = False
    """Whether replies may arrive by another path than the frames; see rpc/transports/rdma."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        greeting: Greeting,
        endpoint: str,
        local: bool,
        clock: Clock,
        identity: TlsIdentity | None = None,
    ) -> None:
        """With `identity` the connection uses TLS."""
        super().__init__(loop, Peer(endpoint, endpoint, local), clock)
        self.frames = FrameStream(loop, self)
        # Attributes, because each method would cost a call per receive.
        self.get_buffer = self.frames.reader.get_buffer  # type: ignore[method-assign]  # see above
        self.buffer_updated = ReplyFastPath(self, self.frames).receive  # type: ignore[method-assign]  # see above
        self._greeting = greeting
        self._identity = identity
        self.offers: tuple[str, ...] = ()
        """Upgrades that the server offers; see rpc/transports/rdma."""
        self.greeted: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.frames.made(transport)
        self._linger(False)
        if self._identity is not None:
            try:
                self.peer = self.peer._replace(member=_certified_member(self, self._identity, as_server=True))
            except NvpoolError as error:
                self._refused(type(error)(f"{self.peer.address}: {error}"))
                return
        self.frames.send(pack_head(HELLO, 0, 0, 0, encode_hello(self._greeting), 0), (), 0, gather=False)

    def deliver(
        self, kind: int, code: int, number: int, deadline_ms: int, message: bytes, payload: memoryview
    ) -> None:
        if kind == REPLY and self.greeted.done():
            self.answered(number, code, message, payload)
        elif kind == HELLO and not self.greeted.done():
            if code:
                self._refused(decode_error(code, message))
                return
            try:
                hello = check_hello(message, self._greeting)
            except ProtocolMismatch as error:
                self._refused(error)
                return
            self.peer = self.peer._replace(name=hello.name)
            self.offers = tuple(hello.transports)
            self.greeted.set_result(None)
        else:
            raise CorruptFrame(f"a frame of kind {kind} out of place")

    def _refused(self, error: NvpoolError) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(error)
        self.frames.end(str(error))

    def turned_away(self, error: NvpoolError) -> None:
        self._refused(error)

    def place(self, kind: int, number: int, payload_bytes: int) -> memoryview | None:
        return self._into(number, payload_bytes)

    def _send_request(
        self,
        number: int,
        method: int,
        deadline_ms: int,
        message: Buffer,
        payload: Sequence[Buffer],
        payload_bytes: int,
    ) -> None:
        self.frames.send(
            pack_head(REQUEST, method, number, deadline_ms, message, payload_bytes),
            payload,
            payload_bytes,
            len(self.in_flight) >= GATHER_IN_FLIGHT,
        )

    def _send_cancel(self, number: int) -> None:
        self.frames.reader.abandon(number)
        self.frames.send(pack_head(CANCEL, 0, number, 0, b"", 0), (), 0, gather=True)

    def connection_lost(self, error: Exception | None) -> None:
        self.frames.lost(error)
        # Without the fast path, which refers to this connection: a reference cycle would keep it.
        self.buffer_updated = self.frames.receive  # type: ignore[method-assign]  # see __init__

    def eof_received(self) -> None:
        self.frames.end("the other side has closed the connection")

    def revoked(self, error: NvpoolError) -> None:
        self.frames.end(str(error), logged=True)

    def abandon(self, reason: str) -> None:
        """Close the connection, if it was made at all."""
        self.frames.abandon(reason)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self.pump()

    def peer_text(self) -> str:
        return self.peer.name

    def log_end(self, reason: str) -> None:
        _log.warning("connection with %s ended: %s", self.peer_text(), reason)

    def on_end(self, reason: str) -> None:
        if not self.greeted.done():
            plain = self._identity is None and not self.peer.local
            self.greeted.set_exception(
                Unreachable(
                    f"{self.peer.address}: {reason}"
                    + (
                        "; does it speak TLS? Here plain text is spoken (network.plain_text, --plain-text)"
                        if plain
                        else ""
                    )
                )
            )
        self._lost(f"{self.peer.name}: {reason}")

    async def close(self) -> None:
        self._linger(True)
        self.frames.end("closed here")
        await self.frames.wait_closed(timeout_s=1.0)

    def _linger(self, wanted: bool) -> None:
        """Set whether the kernel continues to send after this end is closed.

        Not wanted if this process dies: a write that arrives seconds later, after lost packets, could
        overwrite what the successor of this process has written there since.
        """
        sock = self.frames.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", not wanted, 0))


class StreamServed(ServerConnection, asyncio.BufferedProtocol):
    """Server end of one connection."""

    def __init__(
        self, listener: StreamListener, *, known_peer: Peer | None = None, answers_later: bool = True
    ) -> None:
        """With `known_peer` the transport and its certificate are not asked who the peer is.

        `answers_later`: the handler's fast path may answer a request later, in a frame of this connection. A
        derived class that may send replies by another path does not allow it.
        """
        super().__init__(
            listener.handler,
            known_peer or Peer("unknown", "", listener.local),
            listener.clock,
            transport="stream+unix" if listener.local else "stream",
        )
        self.frames = FrameStream(listener.loop, self)
        self.requests = RequestFastPath(
            self,
            self.frames,
            getattr(listener.handler, "fast_path", None),
            self if answers_later else None,
        )
        # Attributes, because each method would cost a call per receive.
        self.get_buffer = self.frames.reader.get_buffer  # type: ignore[method-assign]  # see above
        self.buffer_updated = self.requests.receive  # type: ignore[method-assign]  # see above
        self.greeted = False
        self.entered: Share | None = None
        """Part of the peer's limits that this connection uses, also if they count only the connection."""
        self._listener = listener
        self._knows_peer = known_peer is not None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._held_back = False
        self._writing_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.frames.made(transport)
        if not self._knows_peer:
            self.peer = with_address(self.peer, transport)
        connections = self._listener.connections
        connections.add(self)
        self._hello_timer = self.frames.loop.call_later(HELLO_S, self.frames.end, "no greeting came", True)
        try:
            identity = self._listener.identity
            if identity is not None and not self._knows_peer:
                self.peer = self.peer._replace(member=_certified_member(self, identity, as_server=False))
            self.entered = share = self._listener.limits.enter(self, self.peer, self._listener.greeting.name)
        except NvpoolError as error:
            self._refuse(error)
            return
        if share.limited:
            self.share = share
            self.frames.reader.admit = self._admit
            self.frames.transport = MeteredTransport(cast("asyncio.Transport", transport))

    def _refuse(self, error: NvpoolError) -> None:
        code, message = encode_error(error)
        self.frames.send(pack_head(HELLO, code, 0, 0, message, 0), (), 0, gather=False)
        # The limits module logs Busy, at a bounded rate.
        self.frames.end(str(error), logged=not isinstance(error, Busy))

    def place(self, kind: int, number: int, payload_bytes: int) -> None:
        if kind != REQUEST:
            raise CorruptFrame(f"a frame of kind {kind} with a payload")

    def _admit(self, kind: int, count: int) -> bool:
        if kind != REQUEST or not self.greeted:
            raise CorruptFrame(f"a frame of kind {kind} with {count} bytes out of place")
        return self.share is None or self.share.admit(count)

    def connection_lost(self, error: Exception | None) -> None:
        self.frames.lost(error)

    def eof_received(self) -> None:
        self.frames.end("the other side has closed the connection")

    def revoked(self, error: NvpoolError) -> None:
        self.frames.end(str(error), logged=True)

    def turned_away(self, error: NvpoolError) -> None:
        """Do nothing but end, as after every loss of the connection."""

    # -- interface that limits need of a connection: rpc/peer_limits.LimitedConnection

    def unfinished(self) -> tuple[bytes, int] | None:
        return self.frames.reader.unfinished() if self.greeted else None

    def unsent(self) -> tuple[int, int]:
        transport = self.frames.transport
        sent = transport.sent if isinstance(transport, MeteredTransport) else 0
        return transport.get_write_buffer_size(), sent

    def hold_back(self) -> None:
        self._held_back = True
        self.frames.pause_reading()

    def go_on(self) -> None:
        self._held_back = False
        self._room()

    def take_turn(self) -> None:
        self.requests.take_turn()

    def cut_off(self, reason: str) -> None:
        self.frames.end(reason)
        self.frames.transport.abort()

    def deliver(
        self, kind: int, code: int, number: int, deadline_ms: int, message: bytes, payload: memoryview
    ) -> None:
        if kind == REQUEST and self.greeted:
            self.arrived(number, code, deadline_ms, message, payload)
            if self.share is not None and not self.share.takes_turn():
                self.frames.pause_reading()
        elif kind == CANCEL and self.greeted:
            self.cancel_request(number)
            self._pause_after_turn()
        elif kind == HELLO and not self.greeted:
            greeting = self._listener.greeting
            try:
                hello = check_hello(message, greeting)
            except ProtocolMismatch as error:
                self._refuse(error)
                return
            self.greeted = True
            if self._hello_timer is not None:
                self._hello_timer.cancel()
            self.peer = self.peer._replace(name=hello.name)
            self.frames.send(
                pack_head(HELLO, 0, 0, 0, encode_hello(greeting, self._offers()), 0), (), 0, gather=False
            )
        else:
            raise CorruptFrame(f"a frame of kind {kind} out of place")

    def _pause_after_turn(self) -> None:
        """Stop reading if the time slice of the peer has ended; frames other than requests count too."""
        if self.share is not None and not self.share.takes_turn():
            self.frames.pause_reading()

    def log_end(self, reason: str) -> None:
        self._log_fault(logging.WARNING, f"connection with {self.peer_text()} ended: {reason}")

    def _log_fault(self, level: int, text: str) -> None:
        """Log a fault of the peer; at a bounded rate unless the peer is trusted."""
        if self.entered is not None and not self.entered.limited:
            _log.log(level, "%s", text)
        else:
            self._listener.limits.log(f"fault {level}", text, level)

    def _offers(self) -> Sequence[str]:
        return ()

    def _send_answer(
        self, number: int, status: int, message: Buffer, payload: Sequence[Buffer], payload_bytes: int
    ) -> None:
        if not self.frames.ended:
            self.frames.send(
                pack_head(REPLY, status, number, 0, message, payload_bytes),
                payload,
                payload_bytes,
                len(self.in_work) >= GATHER_IN_FLIGHT,
            )

    # Reading is paused while responses are not taken; otherwise unsent responses would grow without bound.

    def pause_writing(self) -> None:
        self._writing_paused = True
        self.frames.pause_reading()

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._room()

    def _stop_reading(self) -> None:
        self.frames.pause_reading()

    def _room(self) -> None:
        if self.may_read and (self.share is None or not self.share.queued):
            self.frames.resume_reading()

    @property
    def may_read(self) -> bool:
        return not (self._writing_paused or self._overfull or self._held_back or self.frames.ended)

    def peer_text(self) -> str:
        return f"{self.peer.name} at {self.peer.address}"

    def on_end(self, reason: str) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._listener.connections.discard(self)
        self.client_gone()
        if self.entered is not None:
            self.entered.leave()
        if self.frames.transport.get_write_buffer_size():  # the peer may never take it
            self.frames.loop.call_later(GOODBYE_S, self.frames.transport.abort)

    async def drain(self, drain_s: float) -> None:
        await self._drained(drain_s)
        self.frames.end("the server is closing")
        await self.frames.wait_closed(timeout_s=1.0)


class StreamListener:
    """`api.Listener` of both stream transports."""

    def __init__(
        self,
        greeting: Greeting,
        handler: Handler,
        local: bool,
        clock: Clock,
        identity: TlsIdentity | None = None,
    ) -> None:
        """With `identity` the listener uses TLS."""
        self.endpoint = ""
        self.greeting = greeting
        self.identity = identity
        self.handler = handler
        self.local = local
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.limits = greeting.limits or Limits(clock=clock)
        self.connections: set[StreamServed] = set()
        self._server: asyncio.Server | TlsServer | None = None
        self._path: tuple[str, int] | None = None

    def _serve(self) -> StreamServed:
        return StreamServed(self)

    async def start(self, sock: socket.socket, endpoint: str, path: str = "") -> None:
        self.endpoint = endpoint
        if path:
            self._path = (path, os.stat(path).st_ino)
            self._server = await self.loop.create_unix_server(self._serve, sock=sock, backlog=BACKLOG)
        elif self.identity is None:
            self._server = await self.loop.create_server(self._serve, sock=sock, backlog=BACKLOG)
        else:
            self._server = TlsServer(
                self._serve, sock, tls_options(self.identity, self.greeting, serving=True), self.limits
            )

    async def close(self, drain_s: float = 0.0) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            if self._path is not None:
                with contextlib.suppress(OSError):
                    if os.stat(self._path[0]).st_ino == self._path[1]:  # not another process's
                        os.unlink(self._path[0])
        if self.connections:
            await asyncio.gather(*[connection.drain(drain_s) for connection in list(self.connections)])


class StreamTransport:
    """Transport `stream://host:port`: frames over TCP."""

    scheme = "stream"
    rank = 30
    local = False

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock

    async def connect(self, endpoint: str, greeting: Greeting, *, deadline_s: float) -> StreamConnection:
        where = parse_endpoint(endpoint)
        loop = asyncio.get_running_loop()
        made: list[StreamConnection] = []
        identity = security(greeting.identity, where, endpoint)

        def protocol() -> StreamConnection:
            made.append(self._asking(loop, greeting, endpoint, self.local, self._clock, identity))
            return made[0]

        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock.boottime_s())):
                await self._open(loop, protocol, where, tls_options(identity, greeting, serving=False))
                await asyncio.shield(made[0].greeted)
        except OSError as error:  # TimeoutError is one
            raise connect_error(error, endpoint) from None
        except Unreachable:
            if identity is not None and (trouble := identity.own_trouble()):
                raise AccessDenied(f"{endpoint} hung up: {trouble}") from None
            raise
        finally:
            if made and not (made[0].greeted.done() and made[0].greeted.exception() is None):
                made[0].abandon("the greeting did not come")
                if made[0].greeted.done():
                    made[0].greeted.exception()
        return made[0]

    _asking: ClassVar[type[StreamConnection]] = StreamConnection

    def _listening(
        self, greeting: Greeting, handler: Handler, identity: TlsIdentity | None
    ) -> StreamListener:
        return StreamListener(greeting, handler, self.local, self._clock, identity)

    async def _open(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: Callable[[], StreamConnection],
        where: Endpoint,
        tls: TlsOptions,
    ) -> None:
        await loop.create_connection(protocol, where.host, where.port, **tls)

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        where = parse_endpoint(endpoint)
        loop = asyncio.get_running_loop()
        identity = security(greeting.identity, where, endpoint)
        try:
            family, kind, protocol, _, address = (
                await loop.getaddrinfo(
                    where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
            )[0]
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                sock.listen(BACKLOG)
                sock.setblocking(False)
            except OSError:
                sock.close()
                raise
        except OSError as error:
            raise listen_error(error, endpoint) from None
        listener = self._listening(greeting, handler, identity)
        await listener.start(sock, host_port_url(self.scheme, where.host, sock.getsockname()[1]))
        return listener


class UnixStreamTransport(StreamTransport):
    """Transport `stream+unix:///path`: frames over a unix socket, between processes of one host."""

    scheme = "stream+unix"
    rank = 40
    local = True

    async def _open(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: Callable[[], StreamConnection],
        where: Endpoint,
        tls: TlsOptions,
    ) -> None:
        await loop.create_unix_connection(protocol, where.path)

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        """Listen as StreamTransport.listen does. A socket file without a listener is replaced.

        Only this user may connect; every user of this host if the greeting allows it (`local_users`).
        """
        where = parse_endpoint(endpoint)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if is_socket(where.path):
                sock.setblocking(False)
                with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
                    sock.connect(where.path)
                    raise InUse(f"{endpoint}: another process listens there")
                sock.close()
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                os.unlink(where.path)
            sock.bind(where.path)
            os.chmod(where.path, 0o666 if greeting.local_users else 0o600)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise listen_error(error, endpoint) from None
        except InUse:
            sock.close()
            raise
        listener = self._listening(greeting, handler, None)
        await listener.start(sock, endpoint, where.path)
        return listener
