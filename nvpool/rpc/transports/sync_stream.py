"""Blocking client connection of the stream transports: one request at a time, by plain system calls.

The features of an event loop (many requests, gathering, cancelling) cost a single request more than its bytes
do; a thread that only waits for one reply needs none of them. Frames and greeting are those of
rpc/transports/stream, and the listener sees no difference. A connection that receives anything but a complete
reply is closed and stays closed. Used by one thread at a time, from client/read/caller_thread_reads.
"""

from __future__ import annotations

import socket
import struct

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import CorruptFrame, DeadlineExceeded, Disconnected, InvalidRequest, Unreachable
from nvpool.rpc.api import Greeting
from nvpool.rpc.error_codec import decode_error
from nvpool.rpc.handshake import check_hello, encode_hello
from nvpool.rpc.transports.frame import HELLO, REPLY, REQUEST, Frame, FrameReader, pack_head
from nvpool.rpc.transports.socket_options import set_socket_options
from nvpool.security.tls import security

_NUMBER_MASK = 0xFFFFFFFF


class BlockingConnection:
    """Blocking connection to the daemon at `endpoint`; greetings are exchanged in the constructor.

    No call takes longer than `patience_s` seconds, except the look-up of a host name.

    Unreachable        no reply from there in time, or the endpoint is none of the stream transports
    ProtocolMismatch   the other side refuses the greeting
    """

    def __init__(self, endpoint: str, greeting: Greeting, patience_s: float) -> None:
        self.closed = False
        self._patience_s = patience_s
        self._number = 0
        self._frames: list[Frame] = []
        self._reader = FrameReader(self._deliver, lambda kind, number, count: None)
        try:
            where = parse_endpoint(endpoint)
            if security(greeting.identity, where, endpoint) is not None:
                raise Unreachable(f"{endpoint}: under TLS only by a loop")
            if where.scheme == "stream":
                self._socket = socket.create_connection((where.host, where.port), patience_s)
            elif where.scheme == "stream+unix":
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.settimeout(patience_s)
                try:
                    self._socket.connect(where.path)
                except BaseException:
                    self._socket.close()
                    raise
            else:
                raise Unreachable(f"{endpoint}: not by waiting for a socket")
        except (OSError, InvalidRequest) as error:
            raise Unreachable(f"no reply from {endpoint}: {error}") from None
        try:
            # Python's own timeout would cost a poll(2) before each call; the kernel's timeout costs nothing.
            self._socket.settimeout(None)
            seconds = struct.pack("ll", int(patience_s), int(patience_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
            set_socket_options(self._socket)
            kind, code, _, _, message, _ = self._exchange(
                pack_head(HELLO, 0, 0, 0, encode_hello(greeting), 0)
            )
            if kind != HELLO:
                raise CorruptFrame(f"a frame of kind {kind} came instead of a greeting")
            if code:
                raise decode_error(code, message)
            check_hello(message, greeting)
        except (OSError, CorruptFrame, Disconnected, DeadlineExceeded) as error:
            self.close()
            raise Unreachable(f"no greeting from {endpoint}: {error}") from None
        except BaseException:
            self.close()
            raise

    def call(self, method: int, message: bytes) -> tuple[bytes, memoryview]:
        """Send a request; return the message and payload of the reply, which the caller owns.

        The deadline in the request is `patience_s`.

        DeadlineExceeded   the reply did not arrive completely in time   } the connection
        Disconnected       the other side has closed the connection      } is closed
        CorruptFrame       the received frame is no reply to this        }
        any NvpoolError    the error that the server answered: the connection stays usable
        """
        self._number = number = self._number % _NUMBER_MASK + 1
        try:
            kind, code, its_number, _, found, payload = self._exchange(
                pack_head(REQUEST, method, number, int(self._patience_s * 1000), message, 0)
            )
            if kind != REPLY or its_number != number or self._frames:
                raise CorruptFrame(
                    f"a frame of kind {kind} and number {its_number} came to question {number}"
                )
        except BlockingIOError:
            self.close()
            raise DeadlineExceeded(f"no answer within {self._patience_s} s") from None
        except OSError as error:
            self.close()
            raise Disconnected(str(error)) from None
        except BaseException:  # Ctrl-C too: a later reply would be taken for the reply to the next request
            self.close()
            raise
        if code:
            raise decode_error(code, found)
        return found, payload

    def _deliver(
        self, kind: int, code: int, number: int, deadline_ms: int, message: bytes, payload: memoryview
    ) -> None:
        self._frames.append((kind, code, number, deadline_ms, message, payload))

    def _exchange(self, frame: bytes) -> Frame:
        reader, frames, receive = self._reader, self._frames, self._socket.recv_into
        self._socket.sendall(frame)
        until_s = 0.0
        while True:
            count = receive(reader.get_buffer(0))
            if not count:
                raise Disconnected("the other side has closed the connection")
            if not until_s and (found := reader.only(count)) is not None:
                return found
            reader.buffer_updated(count)
            if frames:
                return frames.pop(0)
            now_s = SYSTEM_CLOCK.boottime_s()  # the kernel's timeout restarts with each part
            until_s = until_s or now_s + self._patience_s
            if now_s > until_s:
                raise BlockingIOError

    def close(self) -> None:
        """Close the connection. May be called twice."""
        if not self.closed:
            self.closed = True
            self._socket.close()
            self._reader.release()
