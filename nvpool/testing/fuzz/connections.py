"""In-memory connection to the real server side of the stream transport, with compiled frames and fast paths.

Only the socket is left out, so a frame costs microseconds and virtual time is enough. `FuzzFailure` is raised for
everything that must not happen: a Bug as a reply, an error in a log, an exception on the loop. Used by the
fuzz targets of this package.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from nvpool.core.checksum import crc32c
from nvpool.core.clock import Clock
from nvpool.core.errors import Bug
from nvpool.rpc.api import Greeting
from nvpool.rpc.error_codec import decode_error
from nvpool.rpc.handshake import encode_hello
from nvpool.rpc.peer_limits import Bounds, Limits
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.transports.frame import CANCEL, HEADER, HEADER_BYTES, HELLO, REPLY, REQUEST, pack_head
from nvpool.rpc.transports.stream import StreamListener, StreamServed

RECENT = 40
"""Number of last cases that are printed with a failure: an earlier one may be the cause."""
TEXT_MAX = 20_000
"""Characters of a log record that are kept: a large message may be in it."""


class FuzzFailure(AssertionError):
    """Something that must not happen, whatever the request."""


class Witness(logging.Handler):
    """Records what the services log at ERROR and above."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.said) < 20:
            self.said.append(self.format(record)[:TEXT_MAX])

    def unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        what = context.get("exception") or context.get("task") or context.get("future")
        self.said.append(f"on the loop: {context.get('message')}: {what!r}")

    def check(self) -> None:
        if self.said:
            raise FuzzFailure("\n".join(self.said))


class _Socket:
    """Socket of the transport, for code that sets options or identifies the peer."""

    def setsockopt(self, *_: Any) -> None:
        pass

    def fileno(self) -> int:
        return -1

    family = -1


class _Transport:
    """Transport that the server side writes to."""

    def __init__(self, taken: Callable[[bytes], None], resumed: Callable[[], None]) -> None:
        self._taken = taken
        self._resumed = resumed
        self.closing = False
        self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("192.0.2.1", 1), "socket": _Socket()}.get(name, default)

    def set_write_buffer_limits(self, *_: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False
        self._resumed()

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def write(self, raw: bytes) -> None:
        self._taken(bytes(raw))

    def writelines(self, pieces: list) -> None:
        self._taken(b"".join(pieces))


class Wire:
    """One connection of a peer with a service. `answers`: number of request -> (status, message)."""

    def __init__(self, handler: Any, peer: Peer, clock: Clock) -> None:
        self._listener = StreamListener(
            Greeting("fuzz", limits=Limits(Bounds(), clock)), handler, peer.local, clock
        )
        self._peer = peer
        self._number = 0
        self.answers: dict[int, tuple[int, bytes]] = {}
        self.open_ones: dict[int, tuple[int, Any]] = {}
        """Requests without a reply: method, and what the sender stores with it."""
        self.on_answer: Callable[[int, Any, int, bytes], None] = lambda method, note, status, message: None
        self._come, self._coming = bytearray(), bytearray()
        self.connects = 0
        self._fast_path: Any = None
        self._connect()

    def _connect(self) -> None:
        self.connects += 1
        self._come.clear()
        self.open_ones.clear()
        self._coming.clear()
        self._transport = _Transport(self._taken, self._go_on)
        self._served = StreamServed(self._listener, known_peer=self._peer)
        self._served.requests.answer = self._fast_path
        self._served.connection_made(self._transport)
        self.give(pack_head(HELLO, 0, 0, 0, encode_hello(Greeting("fuzz")), 0))

    def fast_path(self, answer: Any) -> None:
        """Set the fast path with which the service replies without a Call, on this and later connections."""
        self._fast_path = self._served.requests.answer = answer

    def hang_up(self) -> None:
        self._served.eof_received()
        self._served.connection_lost(None)

    def reconnect(self) -> None:
        self.hang_up()
        self._connect()

    @property
    def is_closed(self) -> bool:
        return self._transport.closing

    def give(self, raw: bytes) -> None:
        """Deliver bytes from the peer; they are queued while the server side does not read."""
        at, served, transport = 0, self._served, self._transport
        if self._coming:
            self._coming += raw
            return
        while at < len(raw) and not transport.closing:
            if transport.paused:
                self._coming += raw[at:]
                return
            buffer = served.get_buffer(-1)
            count = min(len(buffer), len(raw) - at)
            buffer[:count] = raw[at : at + count]
            at += count
            served.buffer_updated(count)

    def _go_on(self) -> None:
        if self._coming:
            asyncio.get_running_loop().call_soon(self._give_rest, self._transport)

    def _give_rest(self, transport: _Transport) -> None:
        if transport is self._transport and not transport.paused and self._coming:
            raw = bytes(self._coming)
            self._coming.clear()
            self.give(raw)

    def ask(
        self, method: int, message: bytes, payload: bytes = b"", deadline_ms: int = 5000, note: Any = None
    ) -> int:
        self._number = number = self._number % 0xFFFFFFF0 + 1
        self.open_ones[number] = method, note
        self.give(pack_head(REQUEST, method & 0xFFFF, number, deadline_ms, message, len(payload)) + payload)
        return number

    def cancel(self, number: int) -> None:
        self.open_ones.pop(number, None)
        self.give(pack_head(CANCEL, 0, number, 0, b"", 0))

    def _taken(self, raw: bytes) -> None:
        come = self._come
        come += raw
        while len(come) >= HEADER_BYTES:
            (_, kind, _, code, _, number, _, message_bytes, payload_bytes, *_) = HEADER.unpack_from(come)
            whole = HEADER_BYTES + message_bytes + payload_bytes
            if len(come) < whole:
                return
            message = bytes(come[HEADER_BYTES : HEADER_BYTES + message_bytes])
            del come[:whole]
            if kind != REPLY:
                continue
            method, note = self.open_ones.pop(number, (0, None))
            if code and isinstance(decode_error(code, message), Bug):
                raise FuzzFailure(f"method {method} was answered with {decode_error(code, message)!r}")
            if method:
                self.on_answer(method, note, code, message)


def wrong_frame(chance: random.Random, message: bytes) -> bytes:
    """Return a frame with an invalid header, or bytes that are no frame."""
    kind, flags, reserved, method, number, deadline = (
        REQUEST,
        0,
        0,
        chance.randrange(300),
        chance.randrange(1 << 32),
        100,
    )
    lengths = [len(message), 0]
    drawn = chance.randrange(9)
    if drawn == 0:
        kind = chance.choice((0, HELLO, REPLY, CANCEL, 5, 255))
    elif drawn == 1:
        flags = chance.randrange(1, 256)
    elif drawn == 2:
        reserved = chance.randrange(1, 1 << 16)
    elif drawn == 3:
        lengths[0] = chance.choice(
            (0, len(message) + 1, 4 << 20, (4 << 20) + 1, (1 << 31) - 1, (1 << 32) - 1)
        )
    elif drawn == 4:
        lengths[1] = chance.choice((1, 32 << 20, (32 << 20) + 1, (1 << 32) - 1))
    elif drawn == 5:
        return chance.randbytes(chance.choice((1, 31, 32, 33, 500)))
    elif drawn == 6:
        number = chance.choice((0, 1, (1 << 32) - 1))
        deadline = chance.choice((0, (1 << 32) - 1))
    head = HEADER.pack(0x504E, kind, flags, method, reserved, number, deadline, *lengths, crc32c(message), 0)[
        :28
    ]
    frame = bytearray(head + crc32c(head).to_bytes(4, "little") + message)
    if drawn == 7:
        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
    elif drawn == 8:
        del frame[chance.randrange(len(frame)) :]
    return bytes(frame)
