"""Transport interface: many concurrent requests on one connection, answered in any order.

A message has three parts: a method number, an encoded protobuf message (schema in proto/nvpool/v1) and a
payload of raw bytes that never enters the protobuf. Every transport carries the same three parts: in-process,
`stream` (frames over TCP and unix sockets), `grpc` (a bidirectional stream of Frame messages), and plug-ins
that register in the entry-point group `nvpool.transports`. All transports pass `testing/contracts/transport`.

Buffer ownership: a buffer that the caller passes in belongs to the transport until the call ends. A buffer
that a handler or the receiver of a reply gets belongs to that receiver; the transport does not touch the
buffer again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nvpool.rpc.peer_roles import Peer

if TYPE_CHECKING:
    from nvpool.rpc.peer_limits import Limits
    from nvpool.security.tls import TlsIdentity

Buffer = bytes | bytearray | memoryview

MESSAGE_BYTES_MAX = 4 << 20
PAYLOAD_BYTES_MAX = 32 << 20
PROTOCOL_VERSION = 1
PROTOCOL_VERSION_MIN = 1
IN_FLIGHT_MAX = 1024
"""Most requests that a connection carries concurrently; further requests wait on the sending side."""


class Reply(NamedTuple):
    """A successful response: the encoded protobuf message and the payload."""

    message: Buffer
    payload: memoryview


class Call(Protocol):
    """One request as the server's handler sees it.

    The request is answered once, by `reply` or by `fail`, immediately or later, by any code that holds the
    call.
    """

    method: int
    message: Buffer
    payload: memoryview
    since_s: float
    """Arrival time of the request, on the boottime clock of `core.clock`."""
    deadline_s: float
    """Deadline on the boottime clock of `core.clock`. After it a handler need not do the work."""
    peer: Peer
    cancelled: bool
    """True when the client disconnected or cancelled the request: a response would be discarded."""

    def room(self, byte_count: int) -> memoryview | None:
        """Client memory for a response payload of that many bytes, to save a copy.

        Returns None where the transport has no access to such memory (it has for shared memory); the handler
        then uses its own buffer. The handler fills the memory immediately, before any other callback of the
        event loop runs, and then passes the memory unchanged to `reply` as the whole payload. The handler may
        also leave the memory unused, even after writing to it. The client may change the memory at any time:
        check data in a private copy, not here.
        """

    def reply(self, message: Buffer = b"", payload: Sequence[Buffer] = ()) -> None:
        """Send the response. Never raises for a lost peer.

        The `payload` buffers are sent in order, without being joined. They must not change any more, because
        they may be sent after this returns.
        """

    def fail(self, error: BaseException) -> None:
        """Send the error. Any other exception than NvpoolError becomes Bug and is logged with its
        traceback."""

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` once if the client cancels the request or the connection ends unanswered."""


Handler = Callable[[Call], None]
"""Request handler, called on the event loop for each request as it arrives.

The handler must not block: it answers immediately, or it keeps the call and hands the work to a task that it
owns. An exception that the handler raises is answered as `fail` would answer it.

The handler may have an attribute `fast_path(buffer, end, in_work, reply_stats, out, side)`: a listener of the
stream transports lets it answer frames that arrived complete, without a Call; store/server/reads
states its contract. The other transports ignore the attribute."""


class Connection(Protocol):
    """Client side of one connection, made by Transport.connect and used from one event loop."""

    peer: Peer
    closed: bool

    async def call(
        self,
        method: int,
        message: Buffer,
        payload: Sequence[Buffer] = (),
        *,
        deadline_s: float,
        into: memoryview | None = None,
    ) -> Reply:
        """Send a request and wait for the response, at most until `deadline_s` (boottime).

        With `into` the response payload is received there if it fits, and Reply.payload is that part of
        `into`. Cancelling the awaiting task sends a cancellation to the server. After a deadline or a
        cancellation nothing writes to `into` any more, but the request's own buffers may still be in the send
        queue: if the caller changes its payload then, the server receives the changed bytes.

        DeadlineExceeded   the response did not arrive in time (the request may be applied)
        Disconnected       the connection ended (may be applied, except where the request was never sent)
        any NvpoolError    the error that the server answered
        """

    def submit(
        self,
        method: int,
        message: Buffer,
        payload: Sequence[Buffer] = (),
        *,
        deadline_s: float,
        into: memoryview | None = None,
        on_done: Callable[[Reply | None, BaseException | None], Any],
        room: int = 0,
    ) -> int:
        """Send a request as `call` does, without a task.

        Returns the number to pass to `give_up`. `on_done(reply, None)` or `on_done(None, error)` is called
        once, on the loop, after this method has returned. `room` is the number of bytes that the response
        payload is likely to have: a hint for transports that prepare registered memory for it. Correctness
        does not depend on the hint.
        """

    def give_up(self, request: int) -> None:
        """Cancel a submitted request; its on_done is not called.

        The server is asked to stop, and nothing writes to `into` any more. Has no effect on a request that
        has ended already.
        """

    def unanswered_since_s(self, besides: Container[int] = ()) -> float:
        """Send time (boottime) of the oldest unanswered request; infinity if every request is answered.

        Requests of the methods in `besides` do not count.
        """

    async def close(self) -> None:
        """End the connection; pending requests fail with Disconnected. May be called twice."""


class Listener(Protocol):
    """Listening end of a transport.

    Keep a reference while it is in use: event loops close unreferenced listeners.
    """

    endpoint: str
    """URL to connect to; contains the real port if port 0 was requested."""

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop accepting, drain for at most drain_s seconds, and close.

        New connections and requests fail with Draining. Requests in progress have up to drain_s to finish.
        """


class Greeting(NamedTuple):
    """First message of each side on a connection.

    A server refuses a client of another pool, or one without a common protocol version, with
    ProtocolMismatch; the error names both sides.
    """

    name: str
    fingerprint: str = ""
    """Fingerprint of the pool (PoolMap.fingerprint).

    Not compared when either side's value is empty (a client that has no map yet).
    """
    host_id: str = ""
    """Id of the host of the sender, for transports that only work within one host."""
    identity: TlsIdentity | None = None
    """Our certificate, and the peers that we accept.

    The certificate is presented in TLS and is not part of the message. Without an identity no connection
    leaves this host.
    """
    admit_unauthenticated: bool = False
    """For a listener: also serve peers that present no certificate; such a peer has no `member`.

    The handler decides which requests such a peer may make.
    """
    limits: Limits | None = None
    """For a listener: limits shared by all listeners that have the same object.

    None: the default limits, for this listener alone.
    """
    local_users: bool = False
    """For a listener on a unix socket: every user of this host may connect.

    The handler checks `Peer.credentials`. If False, only root and the user of this process may connect.
    """


class Transport(Protocol):
    scheme: str
    """Scheme of the endpoints that the transport takes: stream, stream+unix, grpc, inproc."""
    rank: int
    """Preference: of the transports that both ends have, the one with the highest rank is used."""

    async def connect(self, endpoint: str, greeting: Greeting, *, deadline_s: float) -> Connection:
        """Connect to an endpoint and exchange greetings.

        Unreachable        no reply from there by deadline_s
        ProtocolMismatch   the other side refuses the greeting
        AccessDenied       one side's certificate is refused, or plain text would leave the host
        StaleIdentity      one side's certificate is not in the pool
        """

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        """Listen at `endpoint` and pass each request to `handler`. InUse: the address is taken."""
