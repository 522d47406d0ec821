"""Transport `inproc://name`: both ends on one event loop, for tests.

It behaves as the other transports do: everything is copied at the border, nothing is delivered before the
sender's loop iteration has ended, greetings are checked, and deadlines, cancellation, bounds and draining
work alike. `faults` may delay or drop each frame. Simulated pools use the stream transport on simulated
sockets instead (testing/sim/stream_transport).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVarTuple

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import CorruptFrame, InUse, Unreachable
from nvpool.rpc.api import Buffer, Connection, Greeting, Handler, Listener
from nvpool.rpc.handshake import check_hello, encode_hello
from nvpool.rpc.multiplexer import ClientConnection, ServerConnection
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.transports.frame import CANCEL, EMPTY, HELLO, REPLY, REQUEST

Faults = Callable[[str, int, int], float | None]
"""faults(endpoint, kind, code): delay of the frame in seconds, or None to drop the frame.

Kinds are those of rpc/transports/frame."""

_unnamed = count(1)
_Frame = TypeVarTuple("_Frame")


class InprocTransport:
    """In-process transport. Only connections of the same instance see its listeners by name.

    There is usually one instance per process.
    """

    scheme = "inproc"
    rank = 50

    def __init__(self, clock: Clock = SYSTEM_CLOCK, faults: Faults | None = None) -> None:
        self.faults = faults
        self.clock = clock
        self.listeners: dict[str, InprocListener] = {}

    async def connect(self, endpoint: str, greeting: Greeting, *, deadline_s: float) -> Connection:
        name = parse_endpoint(endpoint).path
        delay_s = self.faults(endpoint, HELLO, 0) if self.faults else 0.0
        left_s = deadline_s - self.clock.boottime_s()
        if delay_s is None or delay_s > left_s:
            await asyncio.sleep(max(0.0, left_s))
            raise Unreachable(f"no reply from {endpoint}: timed out")
        await asyncio.sleep(delay_s)
        listener = self.listeners.get(name)
        if listener is None or left_s <= 0:
            raise Unreachable(f"no reply from {endpoint}: there is no such listener in this process")
        hello = check_hello(encode_hello(greeting), listener.greeting)
        check_hello(encode_hello(listener.greeting), greeting)
        asking = InprocConnection(self, endpoint, listener.greeting.name)
        asking.server_side = _InprocServed(asking, listener, Peer(hello.name, "inproc", True))
        listener.connections.add(asking.server_side)
        return asking

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        name = parse_endpoint(endpoint).path or f"unnamed-{next(_unnamed)}"
        if name in self.listeners:
            raise InUse(f"{endpoint}: another listener has this name")
        self.listeners[name] = listener = InprocListener(self, name, greeting, handler)
        return listener

    def carry(
        self, endpoint: str, kind: int, code: int, deliver: Callable[[*_Frame], Any], *frame: *_Frame
    ) -> None:
        loop = asyncio.get_running_loop()
        delay_s = self.faults(endpoint, kind, code) if self.faults else 0.0
        if delay_s is None:
            return
        if delay_s > 0:
            loop.call_later(delay_s, deliver, *frame)
        else:
            loop.call_soon(deliver, *frame)


class InprocConnection(ClientConnection):
    def __init__(self, transport: InprocTransport, endpoint: str, name: str) -> None:
        super().__init__(asyncio.get_running_loop(), Peer(name, endpoint, True), transport.clock)
        self.carry = transport.carry
        """Carries frames to the other end."""
        self.server_side: _InprocServed

    def _send_request(
        self,
        number: int,
        method: int,
        deadline_ms: int,
        message: Buffer,
        payload: Sequence[Buffer],
        payload_bytes: int,
    ) -> None:
        self.carry(
            self.peer.address,
            REQUEST,
            method,
            self.server_side.take,
            number,
            method,
            deadline_ms,
            bytes(message),
            memoryview(b"".join(payload)) if payload_bytes else EMPTY,
        )

    def _send_cancel(self, number: int) -> None:
        self.carry(self.peer.address, CANCEL, 0, self.server_side.cancel_request, number)

    def take(self, number: int, status: int, message: bytes, payload: memoryview) -> None:
        if self.closed:
            return
        into = self._into(number, len(payload)) if payload else None
        if into is not None:
            into[:] = payload
            payload = into
        self.answered(number, status, message, payload)

    def lose(self, reason: str) -> None:
        """End the connection as if the peer had died."""
        if not self.closed:
            self._lost(f"{self.peer.name}: {reason}")
            self.server_side.end()

    async def close(self) -> None:
        self.lose("closed here")


class _InprocServed(ServerConnection):
    def __init__(self, asking: InprocConnection, listener: InprocListener, peer: Peer) -> None:
        super().__init__(listener.handler, peer, listener.transport.clock, transport="inproc")
        self.client_side = asking
        self._listener = listener
        self.carry = listener.transport.carry

    def take(self, number: int, method: int, deadline_ms: int, message: bytes, payload: memoryview) -> None:
        if self.client_side.closed:
            return
        try:
            self.arrived(number, method, deadline_ms, message, payload)
        except CorruptFrame as error:
            self.client_side.lose(str(error))

    def _send_answer(
        self, number: int, status: int, message: Buffer, payload: Sequence[Buffer], payload_bytes: int
    ) -> None:
        self.carry(
            self.client_side.peer.address,
            REPLY,
            status,
            self.client_side.take,
            number,
            status,
            bytes(message),
            memoryview(b"".join(payload)) if payload_bytes else EMPTY,
        )

    def end(self) -> None:
        self._listener.connections.discard(self)
        self.client_gone()

    async def drain(self, drain_s: float) -> None:
        await self._drained(drain_s)
        await asyncio.sleep(0)  # lets the last responses be delivered
        self.client_side.lose("the server is closing")


class InprocListener:
    def __init__(self, transport: InprocTransport, name: str, greeting: Greeting, handler: Handler) -> None:
        self.endpoint = f"inproc://{name}"
        self.transport = transport
        self.greeting = greeting
        self.handler = handler
        self.connections: set[_InprocServed] = set()
        self._name = name

    async def close(self, drain_s: float = 0.0) -> None:
        self.transport.listeners.pop(self._name, None)
        if self.connections:
            await asyncio.gather(*[served.drain(drain_s) for served in list(self.connections)])

    def kill(self) -> None:
        """Simulate the death of the process: all connections end immediately and the name is free."""
        self.transport.listeners.pop(self._name, None)
        for served in list(self.connections):
            served.client_side.lose("the connection was lost")
