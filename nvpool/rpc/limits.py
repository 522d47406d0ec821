"""Limits for the peers of a daemon: connections, memory and requests under way, and time for each message.

One `Limits` for a process; its listeners share it (Greeting.limits). A peer is the member that its certificate names, else the
user of a unix socket, else an IP address (of IPv6 the network of 64 bits). Nodes, root, the daemons' own user and operators are
trusted: they are bounded by what a process can have at all, and a quarter of its connections is kept for them. Every other peer
has a share, and no peer can use up what the others need.

Each request of such a peer also waits for its turn: connections of one peer share a little time in each round of the loop, so
that others wait for little.

Guarantees, for all peers that are not trusted: no more connections than `connections_per_peer`, also before a handshake or
greeting; requests with their messages hold no more than `memory_bytes_per_peer`: above it a connection is not read from until
others of the same peer have ended; all peers together hold no more than `memory_bytes`, unsent answers included: above it the
peer with most is cut off; a message that does not come whole in time, or answers that are not taken in time, end their
connection. Requests in flight of all connections of a peer are bounded too.

Counted are connections, and buffers above LARGE_BYTES; everything else is looked at once in LOOK_S, for all connections
together, so that a request costs nothing here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import deque
from typing import NamedTuple, Protocol

from nvpool.core.clock import SYSTEM_CLOCK, Clock, stopwatch_s
from nvpool.core.errors import Busy
from nvpool.rpc.api import Peer
from nvpool.rpc.peer_roles import Role, role_of
from nvpool.rpc.stats import TALLY

_log = logging.getLogger(__name__)

LARGE_BYTES = 128 << 10
"""Buffers above it are counted when they are taken; a connection's own receive buffer is as large."""
LOOK_S = 1.0
BYTES_PER_S = 1 << 20
"""A message, or what is to be sent, has a second more for each so many bytes."""
TURN_S = 0.00025
"""Of a peer in one round of the loop: some ten requests, or of the quickest, which are answered together, a few dozen."""
LOG_S = 10.0
"""One line for each limit in this time, however often it is met."""
RESERVED_SHARE = 4
"""A fourth of all connections is kept for peers that are trusted."""
DESCRIPTORS_SHARE = 3 / 4
"""Of the process's file descriptors are for connections."""
MEMORY_SHARE = 4


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
    """Name of the peer that limits are counted for, and whether it is trusted. With `plain_text` (network.plain_text) nobody on
    the network has a certificate: addresses of other hosts are nodes then, which wait for one another."""
    if peer.member:
        return peer.member, role_of(peer, operators) is Role.NODE
    if peer.credentials is not None:
        return f"uid {peer.credentials.uid}", role_of(peer, operators) is Role.NODE
    if peer.local:
        return "this process", True
    host = network_of(peer.address.rpartition(":")[0])
    return f"address {host}", plain_text and not (host.startswith("127.") or host == "::1")


def network_of(host: str) -> str:
    """The address, or of IPv6 the network that one host has for itself."""
    from ipaddress import IPv6Address, ip_address, ip_network  # 3 ms of every command's start
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
    """The remedy that every refusal names."""
    return f"or raise limits.{key} in node.toml and restart the daemon"


class Limited(Protocol):
    """The answering end of a connection, as a Share sees it."""

    def load(self) -> tuple[int, int]:
        """Requests in work and their bytes."""

    def unfinished(self) -> tuple[bytes, int] | None:
        """Name and length of a message that has begun and is not whole; None without one, or while we do not read."""

    def unsent(self) -> tuple[int, int]:
        """Bytes of answers that the peer has not taken, and of all that were ever sent, these included."""

    def hold_back(self) -> None:
        """Read nothing more, until `go_on`."""

    def go_on(self) -> None:
        """Read on, unless something else is against it."""

    def take_turn(self) -> None:
        """Go on with what was received; see Share.takes_turn."""

    def cut_off(self, reason: str) -> None:
        """End now, and let go of what is unsent. Calls Share.leave."""


class Account:
    """All connections of one peer."""

    def __init__(self, name: str, trusted: bool) -> None:
        self.name = name
        self.trusted = trusted
        self.shares: dict[Share, None] = {}
        self.strangers = 0
        """Connections in the handshake of TLS, not in `shares` yet."""
        self.bytes = 0
        self.unsent = 0
        self.waiting: deque[Share] = deque()
        self.queue: deque[Share] = deque()
        """Connections that wait for this peer's next turn; see `Share.turn`."""
        self.turn_ends_s = 0.0
        self.has_begun = False
        """Its turn in this round of the loop; another one is to come."""
        self.held_back = self.wakes = False


class Limits:
    """`operators`, `plain_text`: see `identify`. Without `trust` nobody is trusted."""

    def __init__(self, bounds: Bounds | None = None, clock: Clock = SYSTEM_CLOCK, *, operators: int | None = None,
                 plain_text: bool = False, trust: bool = True) -> None:
        self.bounds = bounds = bounds or Bounds()
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.connections_max = max(8, min(bounds.connections, int(descriptors * DESCRIPTORS_SHARE)))
        self.others_max = self.connections_max - self.connections_max // RESERVED_SHARE
        self.per_peer_max = min(bounds.connections_per_peer, max(1, self.others_max // 2))
        self.memory_max = min(bounds.memory_bytes, _physical_bytes() // MEMORY_SHARE)
        self.memory_per_peer_max = min(bounds.memory_bytes_per_peer, self.memory_max)
        self.bytes = 0
        """Counted for peers that are not trusted."""
        self.now_s = clock.boottime_s
        self.unsent = 0
        """Answers to them that were not taken, at the last look."""
        self._operators = operators
        self._plain_text = plain_text
        self._trust = trust
        self._accounts: dict[str, Account] = {}
        self._trusted = self._others = 0
        self._timer: asyncio.TimerHandle | None = None
        self._logged: dict[str, tuple[float, int]] = {}

    # -- connections

    def enter(self, connection: Limited, peer: Peer, daemon: str) -> Share:
        """The share of a connection, to be left at its end. Busy."""
        name, trusted = identify(peer, self._operators, self._plain_text)
        account = self._accounts.get(name) or Account(name, trusted and self._trust)
        self._check_connections(account, daemon, ends_handshake=True)
        share = Share(self, account, connection)
        account.shares[share] = None
        self._add(account, 1)
        return share

    def shakes_hands(self, host: str) -> str | None:
        """Count a connection from this address, whose handshake begins: its name, for `has_shaken_hands`; None: no room."""
        name = f"address {network_of(host)}"
        account = self._accounts.get(name) or Account(name, False)
        try:
            self._check_connections(account, "this port")
        except Busy:
            return None
        account.strangers += 1
        self._add(account, 1)
        return name

    def has_shaken_hands(self, name: str) -> None:
        account = self._accounts[name]
        account.strangers -= 1
        self._add(account, -1)

    def _check_connections(self, account: Account, daemon: str, ends_handshake: bool = False) -> None:
        """Busy, where one more is too many; `ends_handshake`: it may be counted among the strangers still."""
        count = len(account.shares) + max(0, account.strangers - ends_handshake)
        if account.trusted:
            if self._trusted + self._others >= self.connections_max:
                self._refuse("connections", f"{daemon} has {self.connections_max} connections already; end some clients, "
                                            f"{raise_it('connections')} (at most three quarters of its open files)")
        elif count >= self.per_peer_max:
            self._refuse("connections_per_peer", f"{daemon} has {count} connections of {account.name} already; close some, "
                                                 f"{raise_it('connections_per_peer')}")
        elif self._others >= self.others_max or self._trusted + self._others >= self.connections_max:
            self._refuse("connections", f"{daemon} has {self._others} connections of clients already; end some clients, "
                                        f"{raise_it('connections')} (at most three quarters of its open files)")

    def _refuse(self, limit: str, reason: str) -> None:
        self.note(limit, reason)
        raise Busy(reason, retry_after_s=LOOK_S)

    def _add(self, account: Account, count: int) -> None:
        if account.trusted:
            self._trusted += count
        else:
            self._others += count
        if account.shares or account.strangers:
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
        """Count that a limit was met, and say so in the log, seldom."""
        TALLY.limit_met(limit)
        now_s = self.now_s()
        since_s, more = self._logged.get(limit, (-LOG_S, 0))
        if now_s - since_s < LOG_S:
            self._logged[limit] = since_s, more + 1
            return
        self._logged[limit] = now_s, 0
        _log.warning("%s%s", reason, f" ({more} times more of the kind since the last such line)" if more else "")

    # -- memory

    def release(self, account: Account, count: int) -> None:
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
                    share.connection.go_on()  # asks again
                if share.waits:  # in vain: it stays the first
                    account.waiting.remove(share)
                    account.waiting.appendleft(share)
                    break
        finally:
            account.wakes = False

    def relieve(self, wanted: int) -> None:
        """Cut off connections of the peers with most until `wanted` bytes more are to be had."""
        while self.bytes + self.unsent + wanted > self.memory_max:
            account = max((account for account in self._accounts.values() if not account.trusted and account.shares),
                          key=lambda account: account.bytes + account.unsent, default=None)
            if account is None or account.bytes + account.unsent == 0:
                return
            share = max(account.shares, key=lambda share: share.total + share.unsent)
            reason = (f"{account.name} holds most of the memory for messages, {self.bytes + self.unsent >> 20} MiB in "
                      f"all; send less at once, {raise_it('memory_bytes')}")
            self.cut_off(share, "memory_bytes", reason)

    def cut_off(self, share: Share, limit: str, reason: str) -> None:
        self.note(limit, reason)
        share.connection.cut_off(reason)
        self.leave(share)

    def next_turn(self, account: Account) -> None:
        """A round of the loop later: those of the peer that wait, in their order, until its time is up again."""
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

    # -- the look

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
        self.run_once()

    def run_once(self) -> None:
        """Look at all connections of peers that are not trusted: once in LOOK_S by itself."""
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

    def _hold_back(self, account: Account, requests: int, byte_count: int) -> None:
        """Read nothing from the busiest connections of a peer that has more in flight than its share; else go on."""
        most, bytes_most = self.bounds.requests_per_peer, self.memory_per_peer_max
        if requests > most or byte_count > 2 * bytes_most:
            limit = "requests_per_peer" if requests > most else "memory_bytes_per_peer"
            if not account.held_back:
                self.note(limit, f"{account.name} has {requests} requests with {byte_count >> 20} MiB in flight and is not "
                                 f"read from until there are fewer; ask for less at once, {raise_it(limit)}")
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
    """What one connection has of its peer's account; of trusted peers only the connection itself is counted."""

    __slots__ = ("limits", "account", "connection", "limited", "coming", "held", "unsent", "waits", "queued",
                 "_frame", "_frame_since_s", "_goal", "_goal_until_s")

    def __init__(self, limits: Limits, account: Account, connection: Limited) -> None:
        self.limits = limits
        self.account = account
        self.connection = connection
        self.limited = not account.trusted
        self.coming = 0
        """Of the large message that is being received."""
        self.held = 0
        """Of large requests in work."""
        self.unsent = 0
        self.waits = self.queued = False
        self._frame: bytes | None = None
        self._frame_since_s = self._goal_until_s = 0.0
        self._goal = -1
        """Of all bytes ever sent, those that are to be taken until then; -1: none."""

    @property
    def total(self) -> int:
        return self.coming + self.held

    def leave(self) -> None:
        self.limits.leave(self)

    # -- memory

    def admit(self, count: int) -> bool:
        """Whether memory may be taken for a message of that size, payload included; a message that was admitted is until it has
        `arrived`. False: the connection is held back, and asks again after `go_on`. Nothing is taken in parts, so that messages
        can not wait for one another in a circle."""
        limits, account = self.limits, self.account
        if self.coming:
            return True
        if account.bytes and account.bytes + count > limits.memory_per_peer_max:
            self.wait()
            return False
        limits.relieve(count)
        if self not in account.shares:
            return False  # it had most itself
        self.coming = count
        account.bytes += count
        limits.bytes += count
        return True

    def wait(self) -> None:
        """Hold the connection back until requests of its peer have ended."""
        account = self.account
        if not self.waits:
            self.limits.note("memory_bytes_per_peer", f"requests of {account.name} hold {account.bytes >> 20} MiB, and more "
                             f"are not read until some have ended; send less at once, {raise_it('memory_bytes_per_peer')}")
            self.waits = True
            account.waiting.append(self)
        self.connection.hold_back()

    @property
    def is_full(self) -> bool:
        return self.account.bytes > self.limits.memory_per_peer_max

    def arrived(self, held: int) -> None:
        """The message that came is a request in work, with so many bytes, until `done`."""
        more, self.coming = held - self.coming, 0
        self.held += held
        self.account.bytes += more
        self.limits.bytes += more

    def done(self, held: int) -> None:
        if self in self.account.shares:
            self.held -= held
            self.limits.release(self.account, held)

    # -- turns: what comes of all connections of a peer together is worked on for a little while in each round of the loop

    def takes_turn(self) -> bool:
        """Whether what was received may be worked on now; else the connection is told `take_turn` later."""
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
        """End the connection where a message does not come, or answers are not taken, in time."""
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
                self.limits.cut_off(self, "message_s", f"a message of {self.account.name} has not come whole within "
                                                       f"{allowed_s:.0f} s; send faster, {raise_it('message_s')}")
                return
        self.unsent, sent = self.connection.unsent()
        if not self.unsent:
            self._goal = -1
        elif sent - self.unsent >= self._goal or self._goal < 0:
            self._goal = sent
            self._goal_until_s = now_s + self.limits.bounds.message_s + self.unsent / BYTES_PER_S
        elif now_s > self._goal_until_s:
            self.limits.cut_off(self, "message_s", f"{self.account.name} has not taken {self.unsent >> 10} KiB of answers "
                                                   f"for {self.limits.bounds.message_s:.0f} s or longer; read faster, "
                                                   f"{raise_it('message_s')}")


class Metered:
    """A transport of the loop that counts what it is given to send."""

    __slots__ = ("sent", "_transport")

    def __init__(self, transport) -> None:
        self.sent = 0
        self._transport = transport

    def write(self, raw) -> None:
        self.sent += len(raw)
        self._transport.write(raw)

    def writelines(self, pieces) -> None:
        self.sent += sum(map(len, pieces))
        self._transport.writelines(pieces)

    def __getattr__(self, name: str):
        return getattr(self._transport, name)


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
