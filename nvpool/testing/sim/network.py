"""Network of a simulated pool: byte streams take time, connections break, nodes are cut off from one another.

The bytes of a connection keep their order, as with TCP, but arrive in other pieces than they were sent in:
a write is sometimes split at a random point, and what arrives while the receiver is busy or stopped is read
together. The kernels of the nodes continue while a process is stopped: connections to it are accepted, and its
bytes wait, up to WINDOW_BYTES a connection; the rest waits at the sender. Bytes for a node that is cut off
wait until the network is whole again; a connection that has waited for KEEPALIVE_S ends on both sides, as
keepalive ends it. Used by `sim/stream_transport` and `sim/pool`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from enum import Enum
from typing import Any

from nvpool.testing.sim.virtual_time_loop import VirtualLoop

KEEPALIVE_S = 10.0
"""As rpc/transports/socket_options.DEAD_PEER_S."""
SILENT_S = KEEPALIVE_S / 2
"""Time without traffic after which keepalive asks the peer, which has no connection after a loss of power."""
RESENT_S = 1.0
"""Interval of the attempts to connect to a listener that does not answer."""
WINDOW_BYTES = 256 << 10
"""Bytes of a connection that are on their way or wait for the receiving process."""
SPLIT_SHARE = 0.1
"""Share of writes that arrive in two pieces."""
SPLIT_EARLY_BYTES = 64
"""Half of the splits are within so many bytes from the start: in the header or in a short message."""
JOIN_SHARE = 0.05
"""Share of arrivals that the receiver reads only some time later, together with what has come by then."""
JOIN_S = 0.001

Buffer = bytes | bytearray | memoryview


class _Mark(Enum):
    END = "no more bytes come"
    RESET = "the connection is reset"


class Server:
    """Listening socket of a process."""

    def __init__(self, process: str, accept: Callable[[StreamEnd], asyncio.BufferedProtocol]) -> None:
        """`accept` returns the protocol for the server's end of a new connection."""
        self.process = process
        self.accept = accept


class SimulatedNetwork:
    """Network between nodes. `places`: node of each process; processes of one node are never cut off from one
    another."""

    def __init__(self, loop: VirtualLoop, seed: str) -> None:
        self.loop = loop
        self.chance = random.Random(seed)
        self.servers: dict[str, Server] = {}
        """Listening sockets by address."""
        self.places: dict[str, str] = {}
        self.contexts: dict[str, Context] = {}
        """Context in which a process handles its events."""
        self.kernel = Context()
        """Context of the nodes' kernels, which no stopped process holds up."""
        self.broken: dict[str, str] = {}
        """Address -> how a connection to it fails: "silent", or refused for any other reason."""
        self.reset_share = 0.0
        """Share of writes that break their connection."""
        self.slow_share = 0.02
        self.slow_s = 0.2
        self.segments = 0
        """Pieces of byte streams that were sent."""
        self._homes: dict[str, str] = {}
        """Last process that listened at each address."""
        self._cut: set[tuple[str, str]] = set()
        """(sender, receiver) pairs."""
        self._broken_links: set[tuple[str, str]] = set()
        """Further pairs, which `heal` does not restore."""
        self._ends: dict[StreamEnd, None] = {}

    # -- faults

    def cut(self, one: str, other: str) -> None:
        """Cut the two nodes off from each other."""
        self.lose(one, other)
        self.lose(other, one)

    def lose(self, sender: str, receiver: str) -> None:
        """Drop everything that the first node sends to the second."""
        if sender != receiver:
            self._cut.add((sender, receiver))

    def heal(self) -> None:
        """Restore all but the broken links. Delayed bytes arrive if their connection still exists."""
        self._cut.clear()
        self._release()

    def break_link(self, *ways: tuple[str, str]) -> None:
        """Drop bytes in these directions, as `lose` does, until `mend_links`."""
        self._broken_links.update(ways)

    def mend_links(self) -> None:
        self._broken_links.clear()
        self._release()

    def _release(self) -> None:
        for end in list(self._ends):
            end.send_again()

    def loses(self, sender: str, receiver: str) -> bool:
        """Whether bytes from the first process to the second are lost.

        The other direction works, although TCP would stop it too when acknowledgements are missing for long.
        """
        way = self.places[sender], self.places[receiver]
        return way in self._cut or way in self._broken_links

    def is_cut(self, one: str, other: str) -> bool:
        """Whether the two processes cannot connect."""
        return self.loses(one, other) or self.loses(other, one)

    def hang_up(self, process: str) -> None:
        """End all connections of a process that has ended.

        Peers notice it as soon as they are reached, or by keepalive.
        """
        for address in [address for address, server in self.servers.items() if server.process == process]:
            del self.servers[address]
        for end in list(self._ends):
            if end.process == process:
                end.die()

    def lose_power(self, process: str) -> None:
        """End all connections of a process whose node loses power, before the process ends.

        Nothing of what it has sent arrives any more. Peers notice it when they send something, or by keepalive.
        """
        for end in list(self._ends):
            if end.process == process:
                end.vanish()

    def hang_up_at(self, address: str) -> None:
        """End every connection that was made to this address."""
        for end in list(self._ends):
            if end.address == address:
                end.break_off(errno.ECONNRESET)

    # -- sockets

    def listen(self, address: str, server: Server) -> None:
        """Listen at an address. OSError (EADDRINUSE): a process listens there."""
        if address in self.servers:
            raise _os_error(errno.EADDRINUSE)
        self.servers[address] = server
        self._homes[address] = server.process

    async def connect(
        self, process: str, address: str, protocol: Callable[[], asyncio.BufferedProtocol]
    ) -> None:
        """Connect a process to an address. Waits for a node that is cut off, as a kernel does.

        ConnectionRefusedError: no process listens there, or the endpoint is broken.
        """
        await asyncio.sleep(self.delay_s())
        while self.broken.get(address) == "silent" or self._does_not_answer(process, address):  # noqa: ASYNC110 - on virtual time
            await asyncio.sleep(RESENT_S)
        server = self.servers.get(address)
        if server is None or address in self.broken:
            raise _os_error(errno.ECONNREFUSED)
        asking = StreamEnd(self, process, address)
        serving = StreamEnd(self, server.process, address)
        asking.peer, serving.peer = serving, asking
        serving.begin(server.accept(serving))
        asking.begin(protocol())

    def _does_not_answer(self, process: str, address: str) -> bool:
        home = self._homes.get(address)
        return home is not None and self.is_cut(process, home)

    def delay_s(self) -> float:
        chance = self.chance
        return (
            chance.expovariate(1 / self.slow_s)
            if chance.random() < self.slow_share
            else chance.uniform(0.00005, 0.0008)
        )

    @property
    def open_ends(self) -> int:
        """Number of ends of connections that are open, or from which something is still under way."""
        return len(self._ends)

    def opened(self, end: StreamEnd) -> None:
        self._ends[end] = None

    def forget(self, end: StreamEnd) -> None:
        self._ends.pop(end, None)


class _SocketOptions:
    """Socket of a stream end, as far as the product sets options of it."""

    def __init__(self, family: int) -> None:
        self.family = family
        self.resets = False
        """Whether a close resets the connection (SO_LINGER with a time of 0), so that nothing is sent afterwards."""

    def fileno(self) -> int:
        return 1 << 30  # no descriptor of this process: nothing may use it

    def setsockopt(self, level: int, option: int, value: bytes | int) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER) and isinstance(value, bytes):
            self.resets = struct.unpack("ii", value) == (1, 0)


class StreamEnd(asyncio.Transport):
    """One end of a connection: the asyncio transport of a buffered protocol, and its node's kernel.

    Methods of asyncio.Transport behave as those of the loop's transports do. All calls of the protocol are made
    through the loop, in the context of its process, and so wait while the process is stopped.
    """

    def __init__(self, network: SimulatedNetwork, process: str, address: str) -> None:
        """`address`: where the connection was made to, on both ends."""
        super().__init__()
        self.process = process
        self.address = address
        self.peer: StreamEnd
        """The other end."""
        self._network = network
        self._loop = network.loop
        self._context = network.contexts.get(process, network.kernel)
        self._protocol: asyncio.BufferedProtocol | None = None
        self._options = _SocketOptions(socket.AF_UNIX if "+unix://" in address else socket.AF_INET)
        self._closing = False
        """Whether the process can neither write nor read any more."""
        self._gone = False
        """Whether `connection_lost` is called, or soon will be."""
        # to the peer
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._high_bytes, self._low_bytes = 64 << 10, 16 << 10
        self._writing_paused = False
        self._in_flight_bytes = 0
        """Bytes that the peer's process has not read yet."""
        self._flying: deque[bytes | _Mark] = deque()
        """Sent pieces in their order; each has a timer, which delivers the first of them."""
        self._held: list[bytes | _Mark] = []
        """Pieces that were lost and will be sent again."""
        self._last_s = 0.0
        self._keepalive: asyncio.TimerHandle | None = None
        # from the peer
        self._received = bytearray()
        self._end_received = False
        self._reading_paused = False
        self._read_scheduled = False

    def begin(self, protocol: asyncio.BufferedProtocol) -> None:
        """Begin to call this protocol."""
        self._protocol = protocol
        self._network.opened(self)
        self._loop.call_soon(protocol.connection_made, self, context=self._context)

    # -- asyncio.Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._options if name == "socket" else default

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = 64 << 10 if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def write(self, data: Buffer) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        if self._closing:
            return
        network = self._network
        if network.reset_share and network.chance.random() < network.reset_share:
            self._loop.call_soon(self.break_off, errno.ECONNRESET, context=network.kernel)
            return
        for data in list_of_data:
            if data:
                self._unsent.append(memoryview(data))  # a reference, as in the loop's transports
                self._unsent_bytes += len(data)
        self._send_unsent()
        if self._unsent_bytes > self._high_bytes and not self._writing_paused and self._protocol is not None:
            self._writing_paused = True
            self._protocol.pause_writing()

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._schedule_read()

    def is_reading(self) -> bool:
        return not self._reading_paused and not self._closing

    def close(self) -> None:
        """Send what is unsent, then end the connection."""
        if not self._closing:
            self._closing = True
            if not self._unsent:
                self._close_socket()

    def abort(self) -> None:
        """End the connection now; the peer gets a reset."""
        if not self._gone:
            self._reset()
            self._lose(None)

    # -- to the peer

    def _send_unsent(self) -> None:
        while self._unsent and self._in_flight_bytes < WINDOW_BYTES:
            data, room = self._unsent.popleft(), WINDOW_BYTES - self._in_flight_bytes
            if len(data) > room:
                self._unsent.appendleft(data[room:])
                data = data[:room]
            self._unsent_bytes -= len(data)
            self._in_flight_bytes += len(data)
            for piece in self._pieces(bytes(data)):
                self._send(piece)

    def _pieces(self, data: bytes) -> tuple[bytes, ...]:
        chance = self._network.chance
        if len(data) < 2 or chance.random() >= SPLIT_SHARE:
            return (data,)
        first_max = min(len(data), SPLIT_EARLY_BYTES) if chance.random() < 0.5 else len(data)
        at = chance.randrange(1, first_max)
        return data[:at], data[at:]

    def _send(self, piece: bytes | _Mark) -> None:
        self._network.segments += 1
        self._flying.append(piece)
        self._schedule_arrival()

    def _schedule_arrival(self) -> None:
        self._last_s = max(self._last_s + 1e-6, self._loop.time() + self._network.delay_s())
        self._loop.call_at(self._last_s, self._arrive, context=self._network.kernel)

    def _arrive(self) -> None:
        """Deliver the next piece to the peer."""
        if not self._flying:
            return
        piece, network = self._flying.popleft(), self._network
        if self._held or network.loses(self.process, self.peer.process):
            if self._gone and self._options.resets and piece is not _Mark.RESET:
                return  # the kernel does not send it again
            self._held.append(piece)
            if self._keepalive is None:
                self._keepalive = self._loop.call_later(
                    KEEPALIVE_S, self.break_off, errno.ETIMEDOUT, context=network.kernel
                )
        elif self.peer.is_gone:
            if not self._gone:
                self._lose(_os_error(errno.ECONNRESET))
            self._forget_if_over()
        else:
            self.peer.take(piece)
            self._forget_if_over()

    def send_again(self) -> None:
        """Send the pieces that were lost, since they may arrive now."""
        held, self._held = self._held, []
        self._cancel_keepalive()
        self._flying.extendleft(reversed(held))
        for _ in held:
            self._schedule_arrival()

    def _close_socket(self) -> None:
        if self._options.resets:
            self._reset()
        else:
            self._send(_Mark.END)
        self._lose(None)

    def _reset(self) -> None:
        if self._held:
            self._held = [_Mark.RESET]
        else:
            self._send(_Mark.RESET)

    def _lose(self, error: OSError | None) -> None:
        """The process loses the connection. Pieces that are under way are not affected."""
        self._gone = self._closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._received.clear()
        self._forget_if_over()
        self._loop.call_soon(self._call_connection_lost, error, context=self._context)

    def _call_connection_lost(self, error: OSError | None) -> None:
        protocol, self._protocol = self._protocol, None
        assert protocol is not None
        protocol.connection_lost(error)

    def _forget_if_over(self) -> None:
        if self._gone and not self._flying and not self._held:
            self._network.forget(self)

    def _cancel_keepalive(self) -> None:
        if self._keepalive is not None:
            self._keepalive.cancel()
            self._keepalive = None

    # -- from the peer

    @property
    def is_gone(self) -> bool:
        """Whether this end takes nothing any more."""
        return self._gone

    def take(self, piece: bytes | _Mark) -> None:
        """Receive the next piece."""
        if piece is _Mark.RESET:
            self._lose(_os_error(errno.ECONNRESET))
            return
        if piece is _Mark.END:
            self._end_received = True
        else:
            self._received += piece
        self._schedule_read()

    def _schedule_read(self) -> None:
        if (
            self._read_scheduled
            or self._reading_paused
            or self._closing
            or not (self._received or self._end_received)
        ):
            return
        self._read_scheduled = True
        chance = self._network.chance
        if chance.random() < JOIN_SHARE:
            self._loop.call_later(chance.uniform(0.0, JOIN_S), self._read, context=self._context)
        else:
            self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._read_scheduled = False
        protocol, received = self._protocol, self._received
        if self._reading_paused or self._closing or protocol is None:
            return
        if received:
            buffer = memoryview(protocol.get_buffer(-1))
            count = min(len(buffer), len(received))
            buffer[:count] = received[:count]
            del received[:count]
            self.peer.was_read(count)
            protocol.buffer_updated(count)
            self._schedule_read()
        elif self._end_received:
            self._end_received = False
            if not protocol.eof_received():
                self.close()

    def was_read(self, count: int) -> None:
        """Note that the peer's process has read so many bytes, so that more may be sent."""
        self._in_flight_bytes -= count
        if not self._unsent:
            return
        self._send_unsent()
        if self._writing_paused and self._unsent_bytes <= self._low_bytes:
            self._writing_paused = False
            self._loop.call_soon(self._call_resume_writing, context=self._context)
        if self._closing and not self._gone and not self._unsent:
            self._close_socket()

    def _call_resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # -- faults

    def die(self) -> None:
        """The process of this end has ended: its kernel closes the socket."""
        if self._gone:
            return
        if self._options.resets or self._received:
            self._reset()
        else:
            self._send(_Mark.END)
        self._lose(None)

    def vanish(self) -> None:
        """The node of this end loses power: the peer gets no notice."""
        self.drop(None)
        self._loop.call_later(
            self._network.chance.uniform(0.0, SILENT_S), self.peer.probe, context=self._network.kernel
        )

    def probe(self) -> None:
        """Ask whether the connection still exists at the peer, as keepalive does."""
        if not self._gone and self.peer.is_gone:
            self._lose(_os_error(errno.ECONNRESET))

    def break_off(self, number: int) -> None:
        """End the connection on both sides with this errno."""
        for end in (self, self.peer):
            end.drop(_os_error(number))

    def drop(self, error: OSError | None) -> None:
        """End the connection here; nothing more arrives at the peer."""
        self._flying.clear()
        self._held.clear()
        self._cancel_keepalive()
        if self._gone:
            self._network.forget(self)
        else:
            self._lose(error)


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
