"""Session table: client sessions, their slots with stored answers, and their open files.

Sessions and slots are stored records, so a client resumes them after a restart of the shard. Open files and
the expiry of sessions are in memory only: after a restart each session gets a full lease time, in which the
client reports its open files again. Expiry is measured on boottime. Used by `meta/server/service`; makes no
decisions and never waits.
"""

from __future__ import annotations

import hmac
import stat
import struct
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice
from math import inf
from typing import Any

from google.protobuf.message import Message

from nvpool.core import primitives
from nvpool.core.errors import InvalidRequest, NvpoolError, StaleSession, TooManyOpen
from nvpool.core.ids import partition_of
from nvpool.core.names import squashes_root, user_in
from nvpool.core.units import SLOTS_PER_SESSION
from nvpool.kv.api import Kv
from nvpool.meta.options import MetaOptions
from nvpool.meta.state import records, session_records
from nvpool.meta.state.lock_table import LockTable
from nvpool.meta.state.session_records import SessionRecord
from nvpool.rpc.messages.meta_messages import CreateRequest, UnlinkRequest
from nvpool.rpc.peer_limits import raise_it
from nvpool.rpc.stats import RPC_STATS
from nvpool.rpc.v1 import meta_pb2
from nvpool.rpc.v1 import wire_pb2 as wire

CLIENT_CHARACTERS_MAX = 255
"""Longest name of a client that a session keeps in memory; its record keeps as many bytes."""
LISTED_INODES_MAX = 2048
"""Inodes that one renewal or release may name: what a client sends in one message (RENEW_INODES_MAX in
client/rpc/deferred_close), half a millisecond of the event loop. All of them are counted in one step: a client
that is refused repeats the message, and nothing of it may have been done then."""
OPEN_INODES_MAX = 1_000_000
"""Inodes that one session may have open: a bound for memory, far above the use of a node."""
RESERVED_SHARE = 10
"""One tenth of all sessions is reserved for trusted peers."""
HELD_ALL_MAX, HELD_MAX = 256, 1024
"""Limits for the open inodes that a renewal lists. It lists all of them if the session has at most
HELD_ALL_MAX, else up to HELD_MAX that have no name."""
_HELD = struct.Struct("<QI")
_VARIES = {
    **dict.fromkeys((wire.META_CREATE, wire.META_UNLINK, wire.META_RMDIR, wire.META_RENAME), ("spread",)),
    **dict.fromkeys((wire.META_SETATTR, wire.META_ALLOCATE), ("rights",)),
    wire.META_RESERVE: ("cut", "own"),
}
"""Fields that depend on what the client process knows or has open. Another process of the same client may
send other values with the same change."""
_MESSAGES: dict[type, Any] = {CreateRequest: meta_pb2.CreateRequest, UnlinkRequest: meta_pb2.UnlinkRequest}
_CHANGE_TAG, _ONE_BYTE = 1 << 3 | 2, 0x80
_MARK_METHOD, _MARK_UID, _MARK_GID = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def mark_of(method: int, request: Any, message: bytes) -> int:
    """32-bit fingerprint of a change, to distinguish a replay from another request.

    A client that sends another request with a used sequence is thereby detected.

    It covers the method, the caller's uid and gid, and all fields but `change` (its epoch may be newer) and
    those in `_VARIES`. `message` is the request as received, its fields in order as protobuf writes them.
    """
    change, varies = request.change, _VARIES.get(method)
    uid, gid, number = change.uid, change.gid, method
    if varies is not None:
        for field in varies:
            if getattr(request, field):
                message = _without(varies, request, message)
                break
    behind = (
        2 + message[1] if len(message) > 1 and message[0] == _CHANGE_TAG and message[1] < _ONE_BYTE else 0
    )
    crc = primitives.crc32c_of(message, behind)
    return (crc ^ number * _MARK_METHOD ^ uid * _MARK_UID ^ gid * _MARK_GID) & 0xFFFFFFFF


def _without(fields: tuple[str, ...], request: Any, message: bytes) -> bytes:
    plain = (type(request) if isinstance(request, Message) else _MESSAGES[type(request)]).FromString(message)
    for field in fields:
        plain.ClearField(field)
    return plain.SerializeToString()


class Slot:
    """One slot of a session: the last decided sequence with its answer or its refusal."""

    __slots__ = ("sequence", "waits_for", "answer", "mark", "error", "restored", "opened", "awaited")

    def __init__(
        self, sequence: int = 0, waits_for: int = 0, answer: bytes = b"", mark: int | None = None
    ) -> None:
        self.sequence = sequence
        self.waits_for = waits_for
        self.answer = answer
        self.mark = mark
        """Fingerprint of the decided request, see `mark_of`; None if its record has none."""
        self.error: NvpoolError | None = None
        """Refusal, in memory only: after a restart no earlier request is in flight that could arrive late."""
        self.restored = False
        """Decided before the restart, so an open by this change is not in memory."""
        self.opened = 0
        """Inode that this change opened; kept until the inode is closed or no replay can come."""
        self.awaited = False
        """Another process of the client may replay the change. The open counts until it is replayed or given
        up."""

    def take_awaited(self) -> int:
        """End the wait for a replay; return the inode whose open no longer counts, or 0."""
        if not self.awaited:
            return 0
        inode, self.opened, self.awaited = self.opened, 0, False
        return inode


class Session:
    """One client session in memory."""

    __slots__ = (
        "number",
        "secret",
        "client",
        "opened_ns",
        "watches",
        "expires_s",
        "slots",
        "opens",
        "identity",
        "brought",
        "member",
        "peer",
        "opens_max",
        "owner",
    )

    def __init__(self, number: int, record: SessionRecord, expires_s: float) -> None:
        self.number = number
        self.secret = record.secret
        self.client = record.client
        self.opened_ns = record.opened_ns
        self.watches = record.watches
        self.expires_s = expires_s
        self.slots: list[Slot | None] = [None] * SLOTS_PER_SESSION
        self.opens: dict[int, int] = {}
        """Number of handles by inode."""
        self.identity = record.identity
        """Identity that the client states at every shard; 0: it stated none."""
        self.brought: dict[int, int] = {}
        """Handles among `opens` that came with migrated partitions and that the client has not reported here
        yet."""
        self.member = ""
        """Name in the client's certificate, as far as this process has seen it; empty: no certificate."""
        self.peer = ""
        """Peer to whose limits the session counts; empty: a trusted peer, or not renewed since a restart."""
        self.opens_max = OPEN_INODES_MAX
        """0 while the peer has too many files open in all its sessions."""
        self.owner = record.owner
        """Caller that opened the session (rpc/access_control); None until its first use if the record does
        not say."""

    @property
    def record(self) -> SessionRecord:
        return SessionRecord(
            self.secret, self.opened_ns, self.client, self.watches, self.identity, self.owner
        )


def open_inode(holders: dict[int, int], session: Session, inode: int) -> None:
    """Count one more handle of the session; `holders` as in `Sessions`."""
    opens = session.opens
    count = opens.get(inode)
    if count is None:
        holders[inode] = holders.get(inode, 0) + 1
        opens[inode] = 1
    else:
        opens[inode] = count + 1


class Sessions:
    """All sessions of a shard, and the count of handles on each open inode."""

    def __init__(
        self,
        kv: Kv,
        lease_s: float,
        shard: int = 1,
        options: MetaOptions = MetaOptions(),  # noqa: B008 (immutable)
        *,
        on_free: Callable[[int], None] = lambda inode: None,
    ) -> None:
        """`on_free` is called with an inode that no session has open any longer."""
        self._kv = kv
        self._options = options
        self._of_peers: dict[str, int] = {}
        self._shard = shard
        self.lease_s = lease_s
        self.by_number: dict[int, Session] = {}
        self.holders: dict[int, int] = {}
        """Number of sessions that have the inode open."""
        self._by_identity: dict[int, int] = {}
        self.restored: frozenset[int] = frozenset()
        """Sessions that were loaded at the start of this process: what they had open is not known here."""
        self.on_free = on_free

    def load(self, now_s: float) -> None:
        """Load the stored sessions; an unreadable record is left to fsck."""
        self.by_number.clear()
        self.holders.clear()
        self._by_identity.clear()
        self._of_peers.clear()
        first, end = records.session_key(0), records.session_key((1 << 64) - 1)
        while pairs := self._kv.scan(first, end, 1000):
            for key, raw in pairs:
                try:
                    record = session_records.decode_session(raw)
                except NvpoolError:
                    continue
                number = records.session_of_key(key)
                self.add(Session(number, record, now_s + self.lease_s))
            first = pairs[-1][0] + b"\0"
        self.restored = frozenset(self.by_number)

    def expire_removed_members(self, members: Container[str]) -> None:
        """Expire the sessions of clients and bridges that are no longer members of the pool.

        The next check of leases ends them.
        """
        for session in self.by_number.values():
            if session.member.startswith(("client/", "bridge/")) and session.member not in members:
                session.expires_s = -inf

    def get(self, number: int) -> Session:
        session = self.by_number.get(number)
        if session is None:
            raise StaleSession(f"session {number:#x} is unknown or has ended; open a new one")
        return session

    def of(self, number: int, owner: str) -> Session:
        """The session, if the caller `owner` may use it; "" is a node, which may act for all.

        StaleSession: there is no such session, or it belongs to another caller.
        """
        session = self.by_number.get(number)
        if session is None or session.owner != owner:
            session = self.get(number)
            if session.owner is None and not (
                owner.startswith("uid/") or user_in(owner) or squashes_root(owner)
            ):
                # a record from before owners were stored: the first caller that uses it owns it
                session.owner = owner
            elif owner and session.owner != owner:
                raise StaleSession(f"session {number:#x} belongs to another client; open a new one")
        return session

    def identify(self, session: Session, identity: int) -> list:
        """Set the client's identity of the session. Return the effects that store it if it has changed."""
        if identity in (0, session.identity):
            return []
        self._forget_identity(session)
        session.identity = identity
        self.add(session)
        return [(records.session_key(session.number), session_records.encode_session(session.record))]

    def _forget_identity(self, session: Session) -> None:
        if self._by_identity.get(session.identity) == session.number:
            del self._by_identity[session.identity]

    def number_of(self, identity: int) -> int:
        """Session of the client with this identity; 0 if it has none, or the identity is not known."""
        return self._by_identity.get(identity, 0)

    def client_of(self, number: int) -> str:
        """Name of the client that opened the session; empty if the session has ended."""
        session = self.by_number.get(number)
        return session.client if session is not None else ""

    def slot(self, session: Session, index: int) -> Slot:
        if index >= SLOTS_PER_SESSION:
            raise InvalidRequest(f"a session has {SLOTS_PER_SESSION} slots; there is no slot {index}")
        slot = session.slots[index]
        if slot is None:
            raw = self._kv.get(records.slot_key(session.number, index))
            slot = session.slots[index] = Slot() if raw is None else Slot(*session_records.decode_slot(raw))
            slot.restored = raw is not None
        return slot

    def opening(
        self, number: int, record: SessionRecord, now_s: float, peer: str = ""
    ) -> tuple[Session, list]:
        """A new session, which counts after `add`, and the effects that store it.

        `peer`: see Session. TooManyOpen.
        """
        most, mine = self._options.sessions, self._of_peers.get(peer, 0)
        if peer and mine >= self._options.sessions_per_peer:
            RPC_STATS.limit_met("sessions_per_peer")
            raise TooManyOpen(
                f"the shard has {mine} sessions of {peer} already; end some mounts or programs, "
                f"{raise_it('sessions_per_peer')}"
            )
        if len(self.by_number) >= (most - most // RESERVED_SHARE if peer else most):
            RPC_STATS.limit_met("sessions")
            raise TooManyOpen(
                f"the shard has {len(self.by_number)} sessions already; end some clients, {raise_it('sessions')}"
            )
        return (
            Session(number, record, now_s + self.lease_s),
            [(records.session_key(number), session_records.encode_session(record))],
        )

    def belongs(self, session: Session, peer: str) -> None:
        """Count the session for this peer if it does not count for one yet."""
        if peer and not session.peer:
            session.peer = peer
            self._of_peers[peer] = self._of_peers.get(peer, 0) + 1

    def weigh(self, table: LockTable) -> None:
        """Update the limits of peers: a peer with too many open files or locks gets no more until it has
        fewer."""
        opens: dict[str, int] = {}
        locks: dict[str, int] = {}
        for session in self.by_number.values() if self._of_peers else ():
            if session.peer:
                opens[session.peer] = opens.get(session.peer, 0) + len(session.opens)
                locks[session.peer] = locks.get(session.peer, 0) + table.counts.get(session.number, 0)
        table.full = (
            frozenset(
                session.number
                for session in self.by_number.values()
                if locks.get(session.peer, 0) >= self._options.locks_per_peer
            )
            if locks
            else frozenset()
        )
        for session in self.by_number.values() if opens else ():
            session.opens_max = (
                0 if opens.get(session.peer, 0) >= self._options.open_files_per_peer else OPEN_INODES_MAX
            )

    def add(self, session: Session) -> None:
        self.by_number[session.number] = session
        if session.identity:
            known = self.by_number.get(self._by_identity.get(session.identity, 0))
            if known is None or (
                _are_of_one(known, session)
                and (
                    # a migrated session yields to one that was opened here
                    known.number >> 48 != self._shard or session.number >> 48 == self._shard
                )
            ):
                self._by_identity[session.identity] = session.number

    def migrated_duplicates(self) -> list[tuple[Session, Session]]:
        """Pairs of a migrated session and the session that the same client has opened at this shard."""
        return [
            (session, self.by_number[heir])
            for session in self.by_number.values()
            if session.number >> 48 != self._shard
            and (heir := self.number_of(session.identity))
            and heir >> 48 == self._shard
            and _are_of_one(session, self.by_number[heir])
        ]

    def take_up(self, number: int, secret: bytes, owner: str, now_s: float) -> Session:
        session = self.of(number, owner)
        if not hmac.compare_digest(session.secret, secret):
            raise StaleSession(f"session {number:#x} belongs to another client; open a new one")
        session.expires_s = now_s + self.lease_s
        return session

    def name_open(
        self, session: Session, named: Sequence[int], pending: Container[int] | None = None
    ) -> None:
        """Replace the open files of a session that another process of the client resumes.

        The process has each inode of `named` open once. It may replay the last change of the slots `pending`:
        an inode that such a change has opened counts once more until the change is replayed, or the slot is
        given up or used again. Without `pending` the process does not say which slots; then an open by the
        last change of any slot stays too.
        """
        counts = dict.fromkeys(named, 1)
        for index, slot in enumerate(session.slots):
            if slot is None or not slot.opened:
                continue
            slot.awaited = pending is not None and index in pending
            if slot.awaited:
                counts[slot.opened] = counts.get(slot.opened, 0) + 1
            elif pending is None:
                counts.setdefault(slot.opened, 1)
            else:
                slot.opened = 0
        for inode in [inode for inode in session.opens if inode not in counts]:
            del session.opens[inode]
            self._let_go(inode)
        for inode, count in counts.items():
            if inode not in session.opens:
                self.check_room(session)
                self.open(session, inode)
            session.opens[inode] = count

    def give_up(self, session: Session, slot: Slot) -> None:
        """Note that the slot's last change is not replayed.

        Close the inode that was kept open for a replay.
        """
        inode = slot.take_awaited()
        if inode:
            self.close(session, inode)

    def release(self, session: Session, inodes: Sequence[int]) -> None:
        """Close these inodes, one handle each, on behalf of the client.

        The client has therefore received the answer to the change that opened them.
        """
        for inode in inodes:
            self.close(session, inode)
        self._answered(session, inodes)

    @staticmethod
    def _answered(session: Session, inodes: Iterable[int]) -> None:
        """Note that the client has received the answers to the changes that opened these inodes."""
        closed = frozenset(inodes)
        for slot in session.slots if closed else ():
            if slot is not None and slot.opened in closed and not slot.awaited:
                slot.opened = 0

    def held(self, session: Session, nameless: Iterable[int]) -> bytes:
        """Packed open inodes of the session with their handle counts.

        All inodes if they are few, else those of `nameless`, HELD_MAX at most.
        """
        opens = session.opens
        shown = (
            opens
            if len(opens) <= HELD_ALL_MAX
            else islice((inode for inode in nameless if inode in opens), HELD_MAX)
        )
        return b"".join(_HELD.pack(inode, opens[inode]) for inode in shown)

    def give_up_all(self, session: Session, gone: dict[int, int]) -> None:
        """Close inodes that the client does not have open, given with the handle counts that `held` reported.

        An inode stays open if its count has changed, or if the client may still receive the answer to an
        open.
        """
        awaited = {slot.opened for slot in session.slots if slot is not None and slot.awaited} if gone else ()
        closed = [
            inode
            for inode, count in gone.items()
            if session.opens.get(inode) == count and inode not in awaited
        ]
        for inode in closed:  # all handles in one step: the client states their number, which may be any
            del session.opens[inode]
            self._let_go(inode)
        self._answered(session, closed)

    def open(self, session: Session, inode: int) -> None:
        """Count one more handle of the session."""
        open_inode(self.holders, session, inode)

    def open_again(self, session: Session, slot: Slot, request) -> None:
        """Open the inode again when a change from before the restart is replayed.

        The client regards the inode as open from now on, and could not report it after the restart.
        """
        if not slot.restored:
            return
        slot.restored = False
        if isinstance(request, meta_pb2.OpenRequest):
            self.open(session, request.inode)
            slot.opened = request.inode
        elif isinstance(request, CreateRequest) and request.open:
            attr = meta_pb2.CreateReply.FromString(slot.answer).entry.attr
            if stat.S_ISREG(attr.mode):
                self.open(session, attr.inode)
                slot.opened = attr.inode

    def name(self, session: Session, inodes: Sequence[int], named: bool) -> None:
        """Add inodes that the client reports as open, once each.

        A handle that came with a migrated partition is not counted twice. `named`: these are the last of all
        open inodes.
        """
        for inode in inodes:
            known = session.brought.get(inode, 0)
            if known:
                session.brought[inode] = known - 1
            else:
                self.check_room(session)
                self.open(session, inode)
        for inode in inodes if named else ():
            session.brought.pop(inode, None)
        if not inodes:
            session.brought.clear()  # the client has reported all; further opens are new

    def forget(self, partitions: frozenset[int]) -> None:
        """Forget open files in these partitions, which belong to another shard now."""
        for session in self.by_number.values():
            for inode in [inode for inode in session.opens if partition_of(inode) in partitions]:
                del session.opens[inode]
                session.brought.pop(inode, None)
                self._let_go(inode)

    def arrive(self, number: int, record: SessionRecord, opened: Iterable[int], now_s: float) -> Session:
        """Add a session that came with migrated partitions. It has these inodes of them open, once each.

        It lives here for one lease time, in which its client must come.
        """
        session = self.by_number.get(number)
        if session is None:
            session = Session(number, record, now_s + self.lease_s)
            self.add(session)
        for inode in opened:
            self.open(session, inode)
        return session

    def bring(self, session: Session, arrived: Session) -> None:
        """Move the open files of a migrated session to its client's session at this shard."""
        for inode, count in arrived.opens.items():
            for _ in range(count):
                self.open(session, inode)
            session.brought[inode] = session.brought.get(inode, 0) + count
        self.drop(arrived)

    def close(self, session: Session, inode: int) -> None:
        """Close one handle.

        An inode that is not open is ignored: after a restart a close can come before the list of open files.
        """
        count = session.opens.get(inode, 0)
        if count > 1:
            session.opens[inode] = count - 1
        elif count:
            del session.opens[inode]
            self._let_go(inode)

    def _let_go(self, inode: int) -> None:
        if self.holders[inode] > 1:
            self.holders[inode] -= 1
        else:
            del self.holders[inode]
            self.on_free(inode)

    def check_room(self, session: Session) -> None:
        if not session.opens_max:
            RPC_STATS.limit_met("open_files_per_peer")
            raise TooManyOpen(
                f"{session.peer} has {self._options.open_files_per_peer} files open in all its sessions; close "
                f"some, {raise_it('open_files_per_peer')}"
            )
        if len(session.opens) >= OPEN_INODES_MAX:
            raise TooManyOpen(f"a session holds {OPEN_INODES_MAX} inodes open at most; close some")

    def ending(self, session: Session) -> list:
        """Effects that delete the session's records."""
        effects: list = [(records.session_key(session.number), None)]
        effects += [
            (key, None) for key, _ in self._kv.scan(*records.slot_range(session.number), SLOTS_PER_SESSION)
        ]
        return effects

    def drop(self, session: Session) -> list[int]:
        """Forget the session; return the inodes that it had open."""
        if self.by_number.pop(session.number, None) is not None and session.peer:
            self._of_peers[session.peer] -= 1
            if not self._of_peers[session.peer]:
                del self._of_peers[session.peer]
        self._forget_identity(session)
        held = list(session.opens)
        for inode in held:
            self._let_go(inode)
        session.opens.clear()
        return held

    def expired(self, now_s: float) -> list[Session]:
        return [session for session in self.by_number.values() if session.expires_s < now_s]

    def lengthen(self, seconds: float) -> None:
        """Extend all sessions by the time in which the shard itself stood still."""
        for session in self.by_number.values():
            session.expires_s += seconds


def _are_of_one(one: Session, other: Session) -> bool:
    """Whether the same caller opened both sessions, as far as known.

    An identity alone is only the client's claim.
    """
    return one.owner == other.owner or one.owner is None or other.owner is None


def shown_client(name: str) -> str:
    """The name of a client as its session keeps it: short, and without characters that are not printable."""
    return "".join(
        character if character.isprintable() else "?" for character in name[:CLIENT_CHARACTERS_MAX]
    )


def inodes_of(packed: bytes, most: int | None = None) -> tuple[int, ...]:
    """Inodes of a packed list: u64 little-endian each, once for each handle.

    InvalidRequest: the list is damaged, or has more than `most`.
    """
    if len(packed) % 8:
        raise InvalidRequest("a list of inodes is 8 bytes for each")
    if most is not None and len(packed) > 8 * most:
        raise InvalidRequest(
            f"a list in one request has {most} numbers at most, not {len(packed) // 8}; send the others in the next one"
        )
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def handles_of(packed: bytes) -> dict[int, int]:
    """Handle counts by inode, from a packed list in the format of RenewSessionReply.held."""
    if len(packed) % _HELD.size or len(packed) > HELD_MAX * _HELD.size:
        raise InvalidRequest(
            f"a list of inodes with handles is {_HELD.size} bytes for each, {HELD_MAX} of them at most"
        )
    return dict(_HELD.iter_unpack(packed))
