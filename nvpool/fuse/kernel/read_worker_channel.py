"""Channel between the serving process and a read worker: forwarded requests over a stream socket.

A request of the kernel begins with its length, so it needs no further frame. Messages between the processes
have the form of a request, with operation numbers that the kernel does not use. Used by `fuse/kernel/read_worker`,
which forwards, and by `fuse/kernel/connection`, which receives. Nothing here waits.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import socket
import sys
from collections.abc import Callable, Iterator

from nvpool.core.errors import Unavailable
from nvpool.fuse.protocol.constants import CLONE
from nvpool.fuse.protocol.requests import HEADER, HEADER_BYTES

DEVICE = "/dev/fuse"
UP, GO, END, ASK, METRICS = range(1 << 16, (1 << 16) + 5)
"""Messages.

UP: the worker is ready; GO: it has to start; END: the mount is gone, and the worker ends; ASK: it has to
report its metrics; METRICS: its metrics.
"""
_BUFFER_MIN = 256 << 10


def clone(descriptor: int) -> int:
    """Another descriptor of the mount that `descriptor` serves, non-blocking and closed by exec.

    A request must be answered on the descriptor that it was read from. Raises Unavailable.
    """
    try:
        other = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.ioctl(other, CLONE, array.array("I", [descriptor]))
        except BaseException:
            os.close(other)
            raise
    except OSError as error:
        raise Unavailable(f"{DEVICE} cannot be opened a second time: {error.strerror}") from None
    return other


def word(number: int, body: bytes = b"") -> bytes:
    return HEADER.pack(HEADER_BYTES + len(body), number, 0, 0, 0, 0, 0, 0, 0) + body


class Channel:
    """One end of the channel. `request_bytes_max`: size of the longest request."""

    def __init__(self, connection: socket.socket, request_bytes_max: int) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._buffer = memoryview(bytearray(max(_BUFFER_MIN, request_bytes_max)))
        self._start = self._end = 0
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_full(self) -> bool:
        """Whether unsent data remains: send nothing more, and call `flush` when the socket is writable."""
        return bool(self._unsent)

    def send(self, request) -> None:
        """Send a request, or keep it for `flush`. If the other end is closed, nothing is sent."""
        if not self._unsent:
            try:
                sent = self._socket.send(request)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the receiver notices the closed end
            if sent == len(request):
                return
            request = request[sent:]
        self._unsent += request

    def flush(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def fill(self) -> bool:
        """Receive the data that is available and fits. False: the other end is closed."""
        if self._start:
            rest = self._end - self._start
            self._buffer[:rest] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, rest
        if self._end == len(self._buffer):
            return True
        try:
            count = self._socket.recv_into(self._buffer[self._end :])
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._end += count
        return count > 0

    def requests(self) -> Iterator[memoryview]:
        """The complete requests, each valid until the next.

        A caller that stops early gets the others from the next call.
        """
        while self._end - self._start >= HEADER_BYTES:
            length = int.from_bytes(self._buffer[self._start : self._start + 4], sys.byteorder)
            if length > self._end - self._start:
                return
            self._start += length
            yield self._buffer[self._start - length : self._start]

    def close(self) -> None:
        self._socket.close()


class ForwardedReads:
    """The serving process' end of the channel to one worker.

    Requests that arrive are handled as if read from the worker's descriptor `clone`, and answered there.
    `take(self)` is called when data has arrived, `lost` when the worker is gone and has not announced its
    end.
    """

    def __init__(self, channel: Channel, clone: int, lost: Callable[[ForwardedReads], None]) -> None:
        self.channel = channel
        self.clone = clone
        self._lost = lost
        self._take: Callable[[ForwardedReads], None] = lambda _: None
        self._up: Callable[[ForwardedReads], None] = lambda _: None
        self._reading = False
        self._ended = False
        self._asked: asyncio.Future[bytes] | None = None
        self.serves = False

    def begin(self, take: Callable[[ForwardedReads], None], up: Callable[[ForwardedReads], None]) -> None:
        self._take, self._up = take, up

    def go(self) -> None:
        """Let the worker read requests from now on."""
        self.serves = True
        self.channel.send(word(GO))

    def read_on(self) -> None:
        if not self._reading and not self._ended:
            self._reading = True
            loop = asyncio.get_running_loop()
            loop.add_reader(self.channel.fileno(), self._ready)
            loop.call_soon(self._take_rest)  # no event announces data that was already received

    def stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self.channel.fileno())

    def ask(self) -> asyncio.Future[bytes]:
        """Request the worker's metrics; the result is their encoded form."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_future()
            self.channel.send(word(ASK))
        return self._asked

    def said(self, number: int, body: bytes = b"") -> None:
        """Handle a message of the worker."""
        if number == UP:
            self._up(self)
        elif number == METRICS:
            if self._asked is not None and not self._asked.done():
                self._asked.set_result(body)
        elif number == END:
            self._ended = True

    def _take_rest(self) -> None:
        if self._reading:
            self._take(self)

    def _ready(self) -> None:
        is_open = self.channel.fill()
        self._take(self)
        if not is_open:
            self.stop_reading()
            if not self._ended:
                self._ended = True
                self._lost(self)
