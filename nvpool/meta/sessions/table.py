"""Sessions of clients: leases, slots with their kept answers, and who has which inode open.

Sessions and slots are records, so that a client takes them up again after a restart of the shard; open files and ends of
leases are in memory only: after a restart each session gets a full lease, in which it names its open files again. Leases
are measured on boottime. Used by `meta/server/service`; keeps books, decides nothing, never waits.
"""

from __future__ import annotations

import hmac
import stat
import struct
from collections.abc import Callable, Container, Iterable
from itertools import islice
from math import inf

from nvpool.core.checksum import crc32c
from nvpool.core.errors import InvalidRequest, NvpoolError, StaleSession, TooManyOpen
from nvpool.core.ids import partition_of
from nvpool.core.member_names import squashes_root, user_in
from nvpool.core.units import SLOTS_PER_SESSION
from nvpool.kv.api import Kv
from nvpool.meta.options import MetaOptions
from nvpool.meta.state import records, session_records
from nvpool.meta.state.lock_table import LockTable
from nvpool.meta.state.session_records import SessionRecord
from nvpool.rpc.limits import raise_it
from nvpool.rpc.stats import TALLY
from nvpool.rpc.v1 import meta_pb2
from nvpool.rpc.v1 import wire_pb2 as wire

OPEN_INODES_MAX = 1_000_000
"""Inodes that one session may hold open: a bound for memory, far above what a node uses."""
RESERVED_SHARE = 10
"""A tenth of all sessions is kept for peers that are trusted."""
HELD_ALL_MAX, HELD_MAX = 256, 1024
"""A session that has no more than so many inodes open is told all of them with each renewal, others so many nameless ones."""
_HELD = struct.Struct("<QI")
_VARIES = {**dict.fromkeys((wire.META_CREATE, wire.META_UNLINK, wire.META_RMDIR, wire.META_RENAME), ("spread",)),
           **dict.fromkeys((wire.META_SETATTR, wire.META_ALLOCATE), ("rights",)), wire.META_RESERVE: ("cut", "own")}
"""Fields that say what the asker knows or has open, which another process of it may see otherwise: the change is the same."""
_CHANGE_TAG, _ONE_BYTE = 1 << 3 | 2, 0x80


def mark_of(method: int, request, message: bytes | memoryview) -> int:
    """32 bits of what a change is, by which a repetition is told from another request under the same name.

    Of the method, the caller's uid and gid, and all fields but `change` (its epoch may be newer) and those that vary. `message`
    is the request as it came, its fields in order as protobuf writes them; `_atonce` makes the same mark.
    """
    change, varies = request.change, _VARIES.get(method)
    if varies is not None and any(getattr(request, field) for field in varies):
        plain = type(request)()
        plain.CopyFrom(request)
        for field in varies:
            plain.ClearField(field)
        message = plain.SerializeToString()
    behind = 2 + message[1] if len(message) > 1 and message[0] == _CHANGE_TAG and message[1] < _ONE_BYTE else 0
    return (crc32c(message[behind:]) ^ method * 0x9E3779B1 ^ change.uid * 0x85EBCA6B ^ change.gid * 0xC2B2AE35) & 0xFFFFFFFF


class Slot:
    """One request place: the last sequence that was decided, with its answer or its refusal."""

    __slots__ = ("sequence", "waits_for", "answer", "mark", "error", "restored", "opened", "awaited")

    def __init__(self, sequence: int = 0, waits_for: int = 0, answer: bytes = b"", mark: int | None = None) -> None:
        self.sequence = sequence
        self.waits_for = waits_for
        self.answer = answer
        self.mark = mark
        """Of the request that was decided, see `mark_of`; None where its record has none."""
        self.error: NvpoolError | None = None
        """A refusal is kept in memory only: after a restart nothing is under way that could come late."""
        self.restored = False
        """Decided before the restart: what it opened is not in our memory."""
        self.opened = 0
        """What it opened, as long as that may be asked for again and was not closed."""
        self.awaited = False
        """Another process of the client may ask for it again: what it opened counts until that is asked for, or given up."""

    def take_awaited(self) -> int:
        """What nobody asks for again from here on, and counts no more; 0: nothing."""
        if not self.awaited:
            return 0
        inode, self.opened, self.awaited = self.opened, 0, False
        return inode


class Session:
    __slots__ = ("number", "secret", "client", "opened_ns", "watches", "expires_s", "slots", "opens", "identity", "brought",
                 "member", "peer", "opens_max", "owner")

    def __init__(self, number: int, record: SessionRecord, expires_s: float) -> None:
        self.number = number
        self.secret = record.secret
        self.client = record.client
        self.opened_ns = record.opened_ns
        self.watches = record.watches
        self.expires_s = expires_s
        self.slots: list[Slot | None] = [None] * SLOTS_PER_SESSION
        self.opens: dict[int, int] = {}
        """Handles by inode."""
        self.identity = record.identity
        """The client's, as it says it at every shard; 0: it did not say."""
        self.brought: dict[int, int] = {}
        """Of these, what has come with partitions from another shard, and the client has not named here yet."""
        self.member = ""
        """Whom the certificate of the client names, as far as this process has heard it; empty: it showed none."""
        self.peer = ""
        """Whose share it is of; nothing: of a trusted peer, or not renewed since a restart."""
        self.opens_max = OPEN_INODES_MAX
        """0 while the peer has too much open in all its sessions."""
        self.owner = record.owner
        """The caller that has opened it (rpc/access_control); None until somebody uses it, where its record does not say."""

    @property
    def record(self) -> SessionRecord:
        return SessionRecord(self.secret, self.opened_ns, self.client, self.watches, self.identity, self.owner)


class Sessions:
    """All sessions of a shard, and the count of handles on each open inode."""

    def __init__(self, kv: Kv, lease_s: float, shard: int = 1, options: MetaOptions = MetaOptions()) -> None:  # noqa: B008
        self._kv = kv
        self._options = options
        self._of_peers: dict[str, int] = {}
        self._shard = shard
        self.lease_s = lease_s
        self.by_number: dict[int, Session] = {}
        self.holders: dict[int, int] = {}
        """Sessions that have the inode open."""
        self._by_identity: dict[int, int] = {}
        self.on_free: Callable[[int], None] = lambda inode: None
        """Told of an inode that nobody has open any more."""

    def load(self, now_s: float) -> None:
        """Take up what the records say; a session that can not be read is left to fsck."""
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

    def end_strangers(self, members: Container[str]) -> None:
        """End those of clients and bridges that are not among the members of the pool, with the next look at leases."""
        for session in self.by_number.values():
            if session.member.startswith(("client/", "bridge/")) and session.member not in members:
                session.expires_s = -inf

    def get(self, number: int) -> Session:
        session = self.by_number.get(number)
        if session is None:
            raise StaleSession(f"session {number:#x} is unknown or has ended; open a new one")
        return session

    def of(self, number: int, owner: str) -> Session:
        """The session, for a caller of that name, "" for a node: nodes may act for all. StaleSession: there is none, or it is
        another's."""
        session = self.by_number.get(number)
        if session is None or session.owner != owner:
            session = self.get(number)
            if session.owner is None and not (owner.startswith("uid/") or user_in(owner) or squashes_root(owner)):
                session.owner = owner  # as its record was made before owners were kept: who has it goes on with it first
            elif owner and session.owner != owner:
                raise StaleSession(f"session {number:#x} belongs to somebody else than {owner}; open a new one")
        return session

    def identify(self, session: Session, identity: int) -> list:
        """The session is that client's. The effects that keep this, where it is news."""
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
        """The session of the client; 0 where he has none, or it is not known."""
        return self._by_identity.get(identity, 0)

    def client_of(self, number: int) -> str:
        """Who opened the session; nothing where it has ended."""
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

    def opening(self, number: int, record: SessionRecord, now_s: float, peer: str = "") -> tuple[Session, list]:
        """A new session that begins to count with `add`, and the effects that keep it. `peer`: see Session. TooManyOpen."""
        most, mine = self._options.sessions, self._of_peers.get(peer, 0)
        if peer and mine >= self._options.sessions_per_peer:
            TALLY.limit_met("sessions_per_peer")
            raise TooManyOpen(f"the shard has {mine} sessions of {peer} already; end some mounts or programs, "
                              f"{raise_it('sessions_per_peer')}")
        if len(self.by_number) >= (most - most // RESERVED_SHARE if peer else most):
            TALLY.limit_met("sessions")
            raise TooManyOpen(f"the shard has {len(self.by_number)} sessions already; end some clients, {raise_it('sessions')}")
        return (Session(number, record, now_s + self.lease_s),
                [(records.session_key(number), session_records.encode_session(record))])

    def belongs(self, session: Session, peer: str) -> None:
        """The session counts for this peer, where it does not count for one yet."""
        if peer and not session.peer:
            session.peer = peer
            self._of_peers[peer] = self._of_peers.get(peer, 0) + 1

    def weigh(self, table: LockTable) -> None:
        """Let peers whose sessions together have too many files open, or locks, take no more until they have less."""
        opens: dict[str, int] = {}
        locks: dict[str, int] = {}
        for session in self.by_number.values() if self._of_peers else ():
            if session.peer:
                opens[session.peer] = opens.get(session.peer, 0) + len(session.opens)
                locks[session.peer] = locks.get(session.peer, 0) + table.counts.get(session.number, 0)
        table.full = frozenset(session.number for session in self.by_number.values()
                               if locks.get(session.peer, 0) >= self._options.locks_per_peer) if locks else frozenset()
        for session in self.by_number.values() if opens else ():
            session.opens_max = 0 if opens.get(session.peer, 0) >= self._options.open_files_per_peer else OPEN_INODES_MAX

    def add(self, session: Session) -> None:
        self.by_number[session.number] = session
        if session.identity:
            known = self.by_number.get(self._by_identity.get(session.identity, 0))
            if known is None or (_are_of_one(known, session) and (
                    # one that came here counts less
                    known.number >> 48 != self._shard or session.number >> 48 == self._shard)):
                self._by_identity[session.identity] = session.number

    def strangers(self) -> list[tuple[Session, Session]]:
        """Sessions that have come from other shards and whose clients have one of ours, with that."""
        return [(session, self.by_number[heir]) for session in self.by_number.values() if session.number >> 48 != self._shard
                and (heir := self.number_of(session.identity)) and heir >> 48 == self._shard
                and _are_of_one(session, self.by_number[heir])]

    def take_up(self, number: int, secret: bytes, owner: str, now_s: float) -> Session:
        session = self.of(number, owner)
        if not hmac.compare_digest(session.secret, secret):
            raise StaleSession(f"session {number:#x} belongs to somebody else; open a new one")
        session.expires_s = now_s + self.lease_s
        return session

    def name_open(self, session: Session, named: tuple[int, ...], pending: Container[int] | None = None) -> None:
        """Another process of the client goes on with the session and has these open, once each. It may ask again for the last
        change of the slots `pending`: what that has opened is open once more, until it is asked for, the slot is given up or
        used anew. Without `pending` it does not say which: then what the last change of any slot has opened stays open too."""
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
        """Nobody asks for its last change again: what that has opened for whom might have asked is closed."""
        inode = slot.take_awaited()
        if inode:
            self.close(session, inode)

    def release(self, session: Session, inodes: tuple[int, ...]) -> None:
        """The client has closed these, one handle each: so it was answered what opened them."""
        for inode in inodes:
            self.close(session, inode)
        for slot in session.slots if inodes else ():
            if slot is not None and slot.opened in inodes and not slot.awaited:
                slot.opened = 0

    def held(self, session: Session, nameless: Iterable[int]) -> bytes:
        """What the session has open, with how many handles: of these inodes, and all where that is little. At most HELD_MAX."""
        opens = session.opens
        shown = opens if len(opens) <= HELD_ALL_MAX else islice((inode for inode in nameless if inode in opens), HELD_MAX)
        return b"".join(_HELD.pack(inode, opens[inode]) for inode in shown)

    def give_up_all(self, session: Session, gone: dict[int, int]) -> None:
        """The client has none of these open, of which `held` told that it has so many handles. Where it is another number by
        now, or the client may yet be answered that it has opened one, all stays as it is."""
        awaited = {slot.opened for slot in session.slots if slot is not None and slot.awaited} if gone else ()
        for inode, count in gone.items():
            if session.opens.get(inode) == count and inode not in awaited:
                self.release(session, (inode,) * count)

    def open(self, session: Session, inode: int) -> None:
        count = session.opens.get(inode, 0)
        if not count:
            self.holders[inode] = self.holders.get(inode, 0) + 1
        session.opens[inode] = count + 1

    def open_again(self, session: Session, slot: Slot, request) -> None:
        """Where a change decided before the restart is answered again: its asker takes what it opened for open from now on, and
        could not name it after the restart."""
        if not slot.restored:
            return
        slot.restored = False
        if isinstance(request, meta_pb2.OpenRequest):
            self.open(session, request.inode)
            slot.opened = request.inode
        elif isinstance(request, meta_pb2.CreateRequest) and request.open:
            attr = meta_pb2.CreateReply.FromString(slot.answer).entry.attr
            if stat.S_ISREG(attr.mode):
                self.open(session, attr.inode)
                slot.opened = attr.inode

    def name(self, session: Session, inodes: tuple[int, ...], named: bool) -> None:
        """The client has these open, once each; what has come with their partitions counts once. `named`: these are the last of
        all that it has open."""
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
            session.brought.clear()  # it has had its time; what it opens from here on counts

    def forget(self, partitions: frozenset[int]) -> None:
        """What is open in these partitions is another shard's to know."""
        for session in self.by_number.values():
            for inode in [inode for inode in session.opens if partition_of(inode) in partitions]:
                del session.opens[inode]
                session.brought.pop(inode, None)
                self._let_go(inode)

    def arrive(self, number: int, record: SessionRecord, opened: Iterable[int], now_s: float) -> Session:
        """A session has come from another shard with partitions, of which it has these open, once each; it lives here for a
        lease, in which its client comes."""
        session = self.by_number.get(number)
        if session is None:
            session = Session(number, record, now_s + self.lease_s)
            self.add(session)
        for inode in opened:
            self.open(session, inode)
        return session

    def bring(self, session: Session, arrived: Session) -> None:
        """The one that has arrived is the same client's: what it has open is the other's from here on."""
        for inode, count in arrived.opens.items():
            for _ in range(count):
                self.open(session, inode)
            session.brought[inode] = session.brought.get(inode, 0) + count
        self.drop(arrived)

    def close(self, session: Session, inode: int) -> None:
        """One handle less. What was not open is ignored: after a restart of the shard a close can come before the list
        of open files."""
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
            TALLY.limit_met("open_files_per_peer")
            raise TooManyOpen(f"{session.peer} has {self._options.open_files_per_peer} files open in all its sessions; close "
                              f"some, {raise_it('open_files_per_peer')}")
        if len(session.opens) >= OPEN_INODES_MAX:
            raise TooManyOpen(f"a session holds {OPEN_INODES_MAX} inodes open at most; close some")

    def ending(self, session: Session) -> list:
        """The effects by which the session's records go."""
        effects: list = [(records.session_key(session.number), None)]
        effects += [(key, None) for key, _ in self._kv.scan(*records.slot_range(session.number), SLOTS_PER_SESSION)]
        return effects

    def drop(self, session: Session) -> list[int]:
        """Forget the session; the inodes that it had open."""
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
        """The shard itself stood still: no session is to blame for that."""
        for session in self.by_number.values():
            session.expires_s += seconds


def _are_of_one(one: Session, other: Session) -> bool:
    """Whether one caller has opened both, as far as is known: an identity is what a client says of itself."""
    return one.owner == other.owner or one.owner is None or other.owner is None


def inodes_of(packed: bytes) -> tuple[int, ...]:
    """The inodes of a message's list: u64 little-endian each, once for each handle."""
    if len(packed) % 8:
        raise InvalidRequest("a list of inodes is 8 bytes for each")
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def handles_of(packed: bytes) -> dict[int, int]:
    """Handles by inode, of a message's list as RenewSessionReply.held."""
    if len(packed) % _HELD.size or len(packed) > HELD_MAX * _HELD.size:
        raise InvalidRequest(f"a list of inodes with handles is {_HELD.size} bytes for each, {HELD_MAX} of them at most")
    return dict(_HELD.iter_unpack(packed))
