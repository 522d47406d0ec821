"""Resource limits per peer of a daemon: connections, memory, requests and time for each message.

A process has one `Limits` object, which its listeners share (Greeting.limits). A peer is identified by the
member that its certificate names, else by the user of a unix socket, else by an IP address (for IPv6 by its
/64 network). The subordinate users of one user (/etc/subuid) are one peer. Nodes, root, the daemons' own user
and operators are trusted: only the limits of the process bound them, and a quarter of its connections is
reserved for them. Every other peer has a share, and no peer can exhaust the resources that the others need.

Requests of such a peer are also scheduled: all connections of one peer share a short time slice in each
iteration of the event loop, so that other peers wait only briefly.

Guarantees for peers that are not trusted:

* A peer has at most `connections_per_peer` connections, counted also before a handshake or greeting.
* A peer's requests and their messages hold at most `memory_bytes_per_peer`. Above it a connection is not read
  until other requests of the same peer have ended.
* All peers together hold at most `memory_bytes`, unsent responses included. Above it the peer with the most
  memory is disconnected.
* A message that does not arrive completely in time ends its connection, and so do responses that the peer
  does not take in time.
* The pending requests of all connections of a peer are bounded too.

Only connections and buffers above LARGE_BYTES are counted when they are taken. Everything else is checked
every LOOK_S seconds for all connections together, so that a request costs nothing here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from nvpool.core.clock import SYSTEM_CLOCK, Clock, stopwatch_s
from nvpool.core.errors import Busy
from nvpool.host.subordinate_uids import SubordinateUids
from nvpool.rpc.peer_roles import Peer, Role, role_of
from nvpool.rpc.stats import RPC_STATS

_log = logging.getLogger(__name__)

LARGE_BYTES = 128 << 10
"""Size above which a buffer is counted when it is taken.

A connection's own receive buffer has this size."""
LOOK_S = 1.0
BYTES_PER_S = 1 << 20
"""Assumed minimum rate: a message, or data to be sent, gets one more second for each this many bytes."""
TURN_S = 0.00025
"""Time slice of a peer in one iteration of the event loop.

It is enough for about ten requests, or for a few dozen of the fastest ones, which are answered together."""
LOG_S = 10.0
"""Interval of log messages: one line per limit in this time, however often the limit is reached."""
RESERVED_SHARE = 4
"""Divisor: one quarter of all connections is reserved for trusted peers."""
DESCRIPTORS_SHARE = 3 / 4
"""Part of the process's file descriptors that connections may use."""
MEMORY_SHARE = 4


SUBORDINATE_UIDS = SubordinateUids()


class Bounds(NamedTuple):
    """The section [limits] of node.toml, with its defaults."""

    connections: int = 16_384
    connections_per_peer: int = 2048
    requests_per_peer: int = 8192
    memory_bytes: int = 4 << 30
    memory_bytes_per_peer: int = 256 << 20
    message_s: float = 30.0
    sessions: int = 10_000
    sessions_per_peer: int = 2000
    locks_per_peer: int = 262_144
    open_files_per_peer: int = 2_000_000


def identify(peer: Peer, operators: int | None = None, plain_text: bool = False) -> tuple[str, bool]:
    """Name of the peer that limits are counted for, and whether that peer is trusted.

    With `plain_text` (network.plain_text) no peer on the network has a certificate. Then addresses of other
    hosts count as nodes, because nodes wait for one another.
    """
    if peer.member:
        return peer.member, role_of(peer, operators) is Role.NODE
    if peer.credentials is not None:
        uid, trusted = peer.credentials.uid, role_of(peer, operators) is Role.NODE
        owner = "" if trusted else SUBORDINATE_UIDS.owner_of(uid)
        return f"subordinate uids of {owner}" if owner else f"uid {uid}", trusted
    if peer.local:
        return "this process", True
    host = network_of(peer.address.rpartition(":")[0])
    return f"address {host}", plain_text and not (host.startswith("127.") or host == "::1")


def network_of(host: str) -> str:
    """The address; for IPv6 the /64 network, which one host has for itself."""
    from ipaddress import IPv6Address, ip_address, ip_network  # here: costs every command 3 ms at start

    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return str(ip_network((address, 64), strict=False)) if not address.is_loopback else str(address)
        address = address.ipv4_mapped
    return str(address)


def raise_it(key: str) -> str:
    """Remedy that the text of every refusal names."""
    return f"or raise limits.{key} in node.toml and restart the daemon"


class LimitedConnection(Protocol):
    """Server end of a connection, as a Share uses it."""

    def load(self) -> tuple[int, int]:
        """Number of requests in progress and their bytes."""

    def unfinished(self) -> tuple[bytes, int] | None:
        """Name and length of a message that has arrived in part;

        None without one, or while reading is paused.
        """

    def unsent(self) -> tuple[int, int]:
        """Bytes of responses that the peer has not taken, and of all ever sent.

        The second number includes the first."""

    def hold_back(self) -> None:
        """Stop reading until `go_on`."""

    def go_on(self) -> None:
        """Resume reading, unless there is another reason not to."""

    def take_turn(self) -> None:
        """Continue with the data received so far; see Share.takes_turn."""

    def cut_off(self, reason: str) -> None:
        """Close the connection now and free its unsent data. Calls Share.leave."""


class PeerAccount:
    """All connections of one peer."""

    def __init__(self, name: str, trusted: bool) -> None:
        self.name = name
        self.trusted = trusted
        self.shares: dict[Share, None] = {}
        self.handshakes = 0
        """Connections in the TLS handshake, which are not in `shares` yet."""
        self.bytes = 0
        self.unsent = 0
        self.waiting: deque[Share] = deque()
        self.queue: deque[Share] = deque()
        """Connections that wait for this peer's next time slice; see `Share.takes_turn`."""
        self.turn_ends_s = 0.0
        self.has_begun = False
        """True if the peer's time slice in this loop iteration has begun. Another one is scheduled."""
        self.held_back = self.wakes = False


class Limits:
    """Limits of one process. See `identify` for `operators` and `plain_text`.

    Without `trust` no peer is trusted.
    """

    def __init__(
        self,
        bounds: Bounds | None = None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        operators: int | None = None,
        plain_text: bool = False,
        trust: bool = True,
    ) -> None:
        self.bounds = bounds = bounds or Bounds()
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.connections_max = max(8, min(bounds.connections, int(descriptors * DESCRIPTORS_SHARE)))
        self.others_max = self.connections_max - self.connections_max // RESERVED_SHARE
        self.per_peer_max = min(bounds.connections_per_peer, max(1, self.others_max // 2))
        self.memory_max = min(bounds.memory_bytes, physical_bytes() // MEMORY_SHARE)
        self.memory_per_peer_max = min(bounds.memory_bytes_per_peer, self.memory_max)
        self.bytes = 0
        """Counted bytes of all peers that are not trusted."""
        self.now_s = clock.boottime_s
        self.unsent = 0
        """Bytes of responses that those peers had not taken at the last check."""
        self._operators = operators
        self._plain_text = plain_text
        self._trust = trust
        self._accounts: dict[str, PeerAccount] = {}
        self._trusted = self._others = 0
        self._timer: asyncio.TimerHandle | None = None
        self._logged: dict[str, tuple[float, int]] = {}

    # -- connections

    def enter(self, connection: LimitedConnection, peer: Peer, daemon: str) -> Share:
        """Count a connection and return its share; the connection releases the share at its end.

        Busy: over a limit.
        """
        name, trusted = identify(peer, self._operators, self._plain_text)
        account = self._accounts.get(name) or PeerAccount(name, trusted and self._trust)
        self._check_connections(account, daemon, ends_handshake=True)
        share = Share(self, account, connection)
        account.shares[share] = None
        self._add(account, 1)
        return share

    def shakes_hands(self, host: str) -> str | None:
        """Count a connection from this address whose TLS handshake begins.

        Returns the name to pass to `has_shaken_hands`, or None if the address or the port has too many
        connections.
        """
        name = f"address {network_of(host)}"
        account = self._accounts.get(name) or PeerAccount(name, False)
        try:
            self._check_connections(account, "this port")
        except Busy:
            return None
        account.handshakes += 1
        self._add(account, 1)
        return name

    def has_shaken_hands(self, name: str) -> None:
        account = self._accounts[name]
        account.handshakes -= 1
        self._add(account, -1)

    def _check_connections(self, account: PeerAccount, daemon: str, ends_handshake: bool = False) -> None:
        """Raise Busy if one more connection is too many.

        With `ends_handshake` the connection may still be counted among the handshakes.
        """
        count = len(account.shares) + max(0, account.handshakes - ends_handshake)
        if account.trusted:
            if self._trusted + self._others >= self.connections_max:
                self._refuse(
                    "connections",
                    f"{daemon} has {self.connections_max} connections already; end some clients, "
                    f"{raise_it('connections')} (at most three quarters of its open files)",
                )
        elif count >= self.per_peer_max:
            self._refuse(
                "connections_per_peer",
                f"{daemon} has {count} connections of {account.name} already; close some, "
                f"{raise_it('connections_per_peer')}",
            )
        elif self._others >= self.others_max or self._trusted + self._others >= self.connections_max:
            self._refuse(
                "connections",
                f"{daemon} has {self._others} connections of clients already; end some clients, "
                f"{raise_it('connections')} (at most three quarters of its open files)",
            )

    def _refuse(self, limit: str, reason: str) -> None:
        self.note(limit, reason)
        raise Busy(reason, retry_after_s=LOOK_S)

    def _add(self, account: PeerAccount, count: int) -> None:
        if account.trusted:
            self._trusted += count
        else:
            self._others += count
        if account.shares or account.handshakes:
            self._accounts[account.name] = account
        else:
            self._accounts.pop(account.name, None)
        if self._timer is None and self._others:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
        elif self._timer is not None and not self._others:
            self._timer.cancel()
            self._timer = None

    def leave(self, share: Share) -> None:
        account = share.account
        if account.shares.pop(share, share) is share:
            return
        self._add(account, -1)
        account.unsent -= share.unsent
        self.unsent -= share.unsent
        self.release(account, share.total)
        share.coming = share.held = share.unsent = 0

    def note(self, limit: str, reason: str) -> None:
        """Count that a limit was reached, and log it at most once in LOG_S."""
        RPC_STATS.limit_met(limit)
        self.log(limit, reason)

    def log(self, kind: str, reason: str, level: int = logging.WARNING) -> None:
        """Log at most one line of this kind in LOG_S: peers that are not trusted must not fill the log."""
        now_s = self.now_s()
        since_s, more = self._logged.get(kind, (-LOG_S, 0))
        if now_s - since_s < LOG_S:
            self._logged[kind] = since_s, more + 1
            return
        self._logged[kind] = now_s, 0
        _log.log(
            level,
            "%s%s",
            reason,
            f" ({more} times more of the kind since the last such line)" if more else "",
        )

    # -- memory

    def release(self, account: PeerAccount, count: int) -> None:
        account.bytes -= count
        self.bytes -= count
        if account.wakes:
            return
        account.wakes = True
        try:
            for _ in range(len(account.waiting)):
                if account.bytes >= self.memory_per_peer_max:
                    break
                share = account.waiting.popleft()
                share.waits = False
                if share in account.shares:
                    share.connection.go_on()  # calls admit again
                if share.waits:  # refused again: it stays the first
                    account.waiting.remove(share)
                    account.waiting.appendleft(share)
                    break
        finally:
            account.wakes = False

    def relieve(self, wanted: int) -> None:
        """Disconnect connections of the peers with the most memory until `wanted` more bytes are
        available."""
        while self.bytes + self.unsent + wanted > self.memory_max:
            account = max(
                (account for account in self._accounts.values() if not account.trusted and account.shares),
                key=lambda account: account.bytes + account.unsent,
                default=None,
            )
            if account is None or account.bytes + account.unsent == 0:
                return
            share = max(account.shares, key=lambda share: share.total + share.unsent)
            reason = (
                f"{account.name} holds most of the memory for messages, {self.bytes + self.unsent >> 20} MiB in "
                f"all; send less in parallel, {raise_it('memory_bytes')}"
            )
            self.cut_off(share, "memory_bytes", reason)

    def cut_off(self, share: Share, limit: str, reason: str) -> None:
        self.note(limit, reason)
        share.connection.cut_off(reason)
        self.leave(share)

    def next_turn(self, account: PeerAccount) -> None:
        """Let the peer's waiting connections continue in order, until its time slice ends.

        Runs one iteration of the event loop after the previous slice.
        """
        account.has_begun = False
        for _ in range(len(account.queue)):
            if account.has_begun and stopwatch_s() >= account.turn_ends_s:
                break
            share = account.queue.popleft()
            share.queued = False
            if share in account.shares:
                share.connection.take_turn()
        if account.queue and not account.has_begun:
            account.has_begun = True
            asyncio.get_running_loop().call_soon(self.next_turn, account)

    # -- periodic check

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
        self.run_once()

    def run_once(self) -> None:
        """Check all connections of peers that are not trusted; runs by itself every LOOK_S seconds."""
        now_s = self.now_s()
        for account in [account for account in self._accounts.values() if not account.trusted]:
            requests = byte_count = 0
            for share in list(account.shares):
                share.look(now_s)
                if share not in account.shares:
                    continue
                mine, my_bytes = share.connection.load()
                requests += mine
                byte_count += my_bytes
            account.unsent = sum(share.unsent for share in account.shares)
            self._hold_back(account, requests, byte_count)
        self.unsent = sum(account.unsent for account in self._accounts.values())
        self.relieve(0)

    def _hold_back(self, account: PeerAccount, requests: int, byte_count: int) -> None:
        """Stop reading from the busiest connections of a peer that exceeds its share; otherwise resume."""
        most, bytes_most = self.bounds.requests_per_peer, self.memory_per_peer_max
        if requests > most or byte_count > 2 * bytes_most:
            limit = "requests_per_peer" if requests > most else "memory_bytes_per_peer"
            if not account.held_back:
                self.note(
                    limit,
                    f"{account.name} has {requests} requests with {byte_count >> 20} MiB in flight and is not "
                    f"read from until there are fewer; ask for less in parallel, {raise_it(limit)}",
                )
            account.held_back = True
            fair, fair_bytes = most // len(account.shares), bytes_most // len(account.shares)
            for share in account.shares:
                mine, my_bytes = share.connection.load()
                if mine > fair or my_bytes > fair_bytes:
                    share.connection.hold_back()
        elif account.held_back and requests <= most // 2:
            account.held_back = False
            for share in list(account.shares):
                share.connection.go_on()


class Share:
    """Resources that one connection uses of its peer's account.

    For trusted peers only the connection itself is counted.
    """

    __slots__ = (
        "limits",
        "account",
        "connection",
        "limited",
        "coming",
        "held",
        "unsent",
        "waits",
        "queued",
        "_frame",
        "_frame_since_s",
        "_goal",
        "_goal_until_s",
    )

    def __init__(self, limits: Limits, account: PeerAccount, connection: LimitedConnection) -> None:
        self.limits = limits
        self.account = account
        self.connection = connection
        self.limited = not account.trusted
        self.coming = 0
        """Bytes of the large message that is being received."""
        self.held = 0
        """Bytes of large requests in progress."""
        self.unsent = 0
        self.waits = self.queued = False
        self._frame: bytes | None = None
        self._frame_since_s = self._goal_until_s = 0.0
        self._goal = -1
        """Count of sent bytes that the peer must have taken by `_goal_until_s`; -1: none."""

    @property
    def total(self) -> int:
        return self.coming + self.held

    def leave(self) -> None:
        self.limits.leave(self)

    # -- memory

    def admit(self, count: int) -> bool:
        """Reserve memory for a message of that size, payload included; return whether it was granted.

        The memory stays reserved until `arrived`. If the result is False, the connection is paused and calls
        this again after `go_on`. Memory is never reserved in parts, so that messages cannot wait for one
        another in a circle.
        """
        limits, account = self.limits, self.account
        if self.coming:
            return True
        if account.bytes and account.bytes + count > limits.memory_per_peer_max:
            self.wait()
            return False
        limits.relieve(count)
        if self not in account.shares:
            return False  # this connection had the most memory itself and was disconnected
        self.coming = count
        account.bytes += count
        limits.bytes += count
        return True

    def wait(self) -> None:
        """Pause the connection until requests of its peer have ended."""
        account = self.account
        if not self.waits:
            self.limits.note(
                "memory_bytes_per_peer",
                f"requests of {account.name} hold {account.bytes >> 20} MiB, and more "
                f"are not read until some have ended; send less in parallel, {raise_it('memory_bytes_per_peer')}",
            )
            self.waits = True
            account.waiting.append(self)
        self.connection.hold_back()

    @property
    def is_full(self) -> bool:
        return self.account.bytes > self.limits.memory_per_peer_max

    def arrived(self, held: int) -> None:
        """Turn the received message into a request in progress with so many bytes, until `done`."""
        more, self.coming = held - self.coming, 0
        self.held += held
        self.account.bytes += more
        self.limits.bytes += more

    def done(self, held: int) -> None:
        if self in self.account.shares:
            self.held -= held
            self.limits.release(self.account, held)

    # -- time slices: the requests of all connections of a peer share one short time slice in each loop
    # iteration

    def takes_turn(self) -> bool:
        """Whether received data may be processed now; otherwise the connection's `take_turn` is called
        later."""
        account = self.account
        if not account.has_begun:
            account.has_begun = True
            account.turn_ends_s = stopwatch_s() + TURN_S
            asyncio.get_running_loop().call_soon(self.limits.next_turn, account)
            return True
        if stopwatch_s() < account.turn_ends_s:
            return True
        if not self.queued:
            self.queued = True
            account.queue.append(self)
        return False

    # -- time

    def look(self, now_s: float) -> None:
        """Close the connection if a message arrives, or responses are taken, too slowly."""
        found = self.connection.unfinished()
        if found is None:
            self._frame = None
        else:
            name, whole = found
            if self._frame is None or not name.startswith(self._frame):
                self._frame_since_s = now_s
            self._frame = name
            allowed_s = self.limits.bounds.message_s + whole / BYTES_PER_S
            if now_s - self._frame_since_s > allowed_s:
                self.limits.cut_off(
                    self,
                    "message_s",
                    f"a message of {self.account.name} has not come whole within "
                    f"{allowed_s:.0f} s; send faster, {raise_it('message_s')}",
                )
                return
        self.unsent, sent = self.connection.unsent()
        if not self.unsent:
            self._goal = -1
        elif sent - self.unsent >= self._goal or self._goal < 0:
            self._goal = sent
            self._goal_until_s = now_s + self.limits.bounds.message_s + self.unsent / BYTES_PER_S
        elif now_s > self._goal_until_s:
            self.limits.cut_off(
                self,
                "message_s",
                f"{self.account.name} has not taken {self.unsent >> 10} KiB of answers "
                f"for {self.limits.bounds.message_s:.0f} s or longer; read faster, "
                f"{raise_it('message_s')}",
            )


class MeteredTransport:
    """Wrapper of an asyncio transport that counts the bytes it is given to send."""

    __slots__ = ("sent", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.sent = 0
        self._transport = transport

    def write(self, raw: bytes | bytearray | memoryview) -> None:
        self.sent += len(raw)
        self._transport.write(raw)

    def writelines(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        self.sent += sum(map(len, pieces))
        self._transport.writelines(pieces)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
