"""The contract of a transport: many requests in flight on one connection, answered in any order.

A message is a method number, a protobuf message (schema in proto/nvpool/v1, already encoded) and a payload of raw bytes that
never enters the protobuf. The same three travel on every transport: in-process, `stream` (frames over TCP and unix
sockets), `grpc` (a bidirectional stream of Frame messages), and plug-ins that register in the entry-point group
`nvpool.transports`. All pass `testing/contracts/transport`.

Buffers: what a caller hands over belongs to the transport until its call ends. What a handler or a reply receives belongs to
the receiver; the transport does not touch it again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from nvpool.rpc.limits import Limits
    from nvpool.security.tls import Identity

Buffer = bytes | bytearray | memoryview

MESSAGE_BYTES_MAX = 4 << 20
PAYLOAD_BYTES_MAX = 32 << 20
PROTOCOL_VERSION = 1
PROTOCOL_VERSION_MIN = 1
IN_FLIGHT_MAX = 1024
"""Requests a connection carries at once; further ones wait on the sending side."""


class Reply(NamedTuple):
    """An answer without an error: the encoded protobuf message and the payload."""

    message: Buffer
    payload: memoryview


class Call(Protocol):
    """One request as the server's handler sees it. Answered once, by reply or by fail, now or later, by anyone."""

    method: int
    message: Buffer
    payload: memoryview
    since_s: float
    """When it arrived, on base.clock's boottime."""
    deadline_s: float
    """On base.clock's boottime; a handler that finds it past need not work."""
    peer: Peer
    cancelled: bool
    """The asker has gone or given up: the answer will be thrown away."""

    def room(self, byte_count: int) -> memoryview | None:
        """Memory of the asker for an answer's payload of that many bytes, where the transport can reach it (shared memory), to
        save a copy; None: bring your own, as ever. To be filled on the spot, before anything else on the loop has a turn, and
        then handed to `reply` as it is, as all of the payload; or left alone, whatever has been written there. The asker may
        change it while you look: what you check, check elsewhere."""

    def reply(self, message: Buffer = b"", payload: Sequence[Buffer] = ()) -> None:
        """Send the answer. `payload` buffers go out in order, without being joined; they must not change any more, since they
        may leave later. Never raises for a lost peer."""

    def fail(self, error: BaseException) -> None:
        """Send the error; what is none of ours becomes Bug and is logged with its traceback."""

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the asker gives up or the connection ends before an answer."""


class BelievedGroups:
    """All groups but root's: of a client that is believed which groups its users are in. There is one, BELIEVED_GROUPS."""

    def __contains__(self, gid: object) -> bool:
        return gid != 0


BELIEVED_GROUPS = BelievedGroups()
SOMEBODY = -1
"""As a uid: any user of a client but its root. The request does not say which one."""


class Credentials(NamedTuple):
    """User and groups of the process at the other end of a unix socket, when it connected, as the kernel knows them; or as whom
    a client may act."""

    uid: int
    gids: frozenset[int] | BelievedGroups
    """Its group and, where the kernel tells them (Linux 4.13), its further groups."""
    pid: int


class Peer(NamedTuple):
    """Who is at the other end: its greeting, its certificate, its credentials."""

    name: str
    address: str
    local: bool
    """On this host (unix socket or in-process)."""
    member: str = ""
    """Who that is by his certificate, like node/alpha; nothing in plain text, and for a stranger where those are let in."""
    credentials: Credentials | None = None
    """Of a process on this host; None on other connections than unix sockets."""


Handler = Callable[[Call], None]
"""Called on the event loop for each request as it arrives. It must not block: it answers at once or keeps the call and
hands the work to a task that it owns. An exception out of it is answered as `fail` would.

It may have an attribute `at_once(buffer, end, in_work, tally, out, side)`: a listener of the stream transports lets it answer
frames that came whole, without a Call; see store/server/fast_reads for what it has to do. Others do not ask for it."""


class Connection(Protocol):
    """The asking side of one connection. Made by Transport.connect; used from one event loop."""

    peer: Peer
    closed: bool

    async def call(self, method: int, message: Buffer, payload: Sequence[Buffer] = (), *, deadline_s: float,
                   into: memoryview | None = None) -> Reply:
        """Send and wait for the answer, at most until `deadline_s` (boottime).

        With `into` the payload of the answer is received there when it fits, and Reply.payload is that part of it.
        Cancelling the awaiting task tells the other side to stop. After a deadline or a cancellation `into` is not written to
        any more, but what was handed over may still be on its way: a payload that is changed then arrives changed.

        DeadlineExceeded   the answer did not come in time (may be applied)
        Disconnected       the connection ended (may be applied, except where it never was sent)
        any NvpoolError    what the other side answered
        """

    def submit(self, method: int, message: Buffer, payload: Sequence[Buffer] = (), *, deadline_s: float,
               into: memoryview | None = None, on_done: Callable[[Reply | None, BaseException | None], Any],
               room: int = 0) -> int:
        """As `call`, without a task: `on_done(reply, None)` or `on_done(None, error)` is called once, on the loop, after this
        has returned. The number is for `give_up`. `room`: bytes that the answer's payload is likely to have, for transports
        that get registered memory ready for it; nothing depends on it."""

    def give_up(self, request: int) -> None:
        """End a submitted request without its on_done: the other side is told to stop, `into` is not written to any more.
        Nothing when it has ended already."""

    def unanswered_since_s(self, besides: Container[int] = ()) -> float:
        """When (boottime) the oldest of the requests was sent that are not answered yet, but for those of the methods
        `besides`; infinity where there is none."""

    async def close(self) -> None:
        """End the connection; what is in flight fails with Disconnected. May be called twice."""


class Listener(Protocol):
    """Keep it for as long as it is to listen: loops close what nobody refers to."""

    endpoint: str
    """The URL to connect to, with the real port where 0 was asked for."""

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no new connections or requests (they fail with Draining); wait up to drain_s for those in work; close."""


class Greeting(NamedTuple):
    """What each side says first. A server refuses another pool or no common version with ProtocolMismatch, by name."""

    name: str
    fingerprint: str = ""
    """Of the pool (PoolMap.fingerprint); empty on either side: not compared (a client that has no map yet)."""
    host_id: str = ""
    """Of the host that speaks; for transports that only work within one."""
    identity: Identity | None = None
    """Not said, but shown: our certificate, and whom we let in. Without one nothing leaves this host."""
    strangers: bool = False
    """Of who listens: who shows no certificate is served too, as a peer without a `member`. The handler decides what it may."""
    limits: Limits | None = None
    """Of who listens: for all listeners that have the same. None: the defaults, for this one alone."""
    local_users: bool = False
    """Of who listens on a unix socket: every user of this host may connect; the handler looks at `Peer.credentials`. Otherwise
    root and our own user alone."""


class Transport(Protocol):
    scheme: str
    """Of the endpoints it takes: stream, stream+unix, grpc, inproc."""
    rank: int
    """The higher is preferred when both ends have it."""

    async def connect(self, endpoint: str, greeting: Greeting, *, deadline_s: float) -> Connection:
        """Unreachable when nobody answers there by deadline_s; ProtocolMismatch as the other side says. AccessDenied when one
        side's certificate is refused, or plain text would leave the host; StaleIdentity when one side's is not in the pool."""

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        """InUse when the address is taken."""
