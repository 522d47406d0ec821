"""How processes that serve one mount hand requests to one another: the bytes of each, over a stream socket.

A request of the kernel begins with its length, so it needs no frame around it; what the processes say to each other looks like
a request, with numbers that no operation has. Used by `fuse/kernel/worker`, which hands on, and by `fuse/kernel/connection`,
which takes. Nothing here waits.
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
UP, GO, END, ASK, TELL = range(1 << 16, (1 << 16) + 5)
"""Operations: the reader could begin; it is to begin; the mount is gone, and the reader ends; it is to tell its metrics; it
tells them."""
_BUFFER_MIN = 256 << 10


def clone(descriptor: int) -> int:
    """Another descriptor of the mount that `descriptor` serves, non-blocking and closed by exec. What is read from one is
    answered there. Unavailable."""
    try:
        other = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.ioctl(other, CLONE, array.array("I", [descriptor]))
        except BaseException:
            os.close(other)
            raise
    except OSError as error:
        raise Unavailable(f"{DEVICE} can not be opened a second time: {error.strerror}") from None
    return other


def word(number: int, body: bytes = b"") -> bytes:
    return HEADER.pack(HEADER_BYTES + len(body), number, 0, 0, 0, 0, 0, 0, 0) + body


class Channel:
    """One end. `request_bytes_max`: of the longest request."""

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
        """Whether something is left that the socket has not taken: then send nothing more, and `flush` when it takes again."""
        return bool(self._unsent)

    def send(self, request) -> None:
        """It is sent, or kept to be sent by `flush`. To an end that is closed nothing is."""
        if not self._unsent:
            try:
                sent = self._socket.send(request)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # its end is seen where it is received from
            if sent == len(request):
                return
            request = request[sent:]
        self._unsent += request

    def flush(self) -> None:
        try:
            del self._unsent[:self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def fill(self) -> bool:
        """Receive what is there and has room. False at the end."""
        if self._start:
            rest = self._end - self._start
            self._buffer[:rest] = bytes(self._buffer[self._start:self._end])
            self._start, self._end = 0, rest
        if self._end == len(self._buffer):
            return True
        try:
            count = self._socket.recv_into(self._buffer[self._end:])
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._end += count
        return count > 0

    def requests(self) -> Iterator[memoryview]:
        """Those that are whole, each valid until the next. Who stops finds the others the next time."""
        while self._end - self._start >= HEADER_BYTES:
            length = int.from_bytes(self._buffer[self._start:self._start + 4], sys.byteorder)
            if length > self._end - self._start:
                return
            self._start += length
            yield self._buffer[self._start - length:self._start]

    def close(self) -> None:
        self._socket.close()


class Passing:
    """The serving process' end to one reader: what comes is as if read from the reader's descriptor `clone`, and is answered
    there. `take(self)` is called when something has come, `lost` when the reader is gone and has not said why."""

    def __init__(self, channel: Channel, clone: int, lost: Callable[[Passing], None]) -> None:
        self.channel = channel
        self.clone = clone
        self._lost = lost
        self._take: Callable[[Passing], None] = lambda _: None
        self._up: Callable[[Passing], None] = lambda _: None
        self._reading = False
        self._ended = False
        self._asked: asyncio.Future[bytes] | None = None
        self.serves = False

    def begin(self, take: Callable[[Passing], None], up: Callable[[Passing], None]) -> None:
        self._take, self._up = take, up

    def go(self) -> None:
        """The reader takes requests from now on."""
        self.serves = True
        self.channel.send(word(GO))

    def read_on(self) -> None:
        if not self._reading and not self._ended:
            self._reading = True
            loop = asyncio.get_running_loop()
            loop.add_reader(self.channel.fileno(), self._ready)
            loop.call_soon(self._take_rest)  # what was received already nobody announces again

    def stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self.channel.fileno())

    def ask(self) -> asyncio.Future[bytes]:
        """The reader's metrics, packed, when they come."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_future()
            self.channel.send(word(ASK))
        return self._asked

    def said(self, number: int, body: bytes = b"") -> None:
        """A word of the reader's."""
        if number == UP:
            self._up(self)
        elif number == TELL:
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
