"""Handlers of session requests: open, renew, watch, close and release. Made by `meta/server/service`.

Nothing here waits except `end_leases`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from math import inf

from nvpool.core.errors import (
    CorruptRecord,
    InvalidRequest,
    Refused,
    WrongShard,
)
from nvpool.core.ids import partition_of
from nvpool.core.units import PARTITION_COUNT, SLOTS_PER_SESSION
from nvpool.meta.requests.call_replies import CallReplies
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.meta.sessions.table import (
    LISTED_INODES_MAX,
    Session,
    handles_of,
    inodes_of,
    shown_client,
)
from nvpool.meta.state.session_records import SECRET_BYTES, SessionRecord
from nvpool.rpc.api import Call
from nvpool.rpc.peer_limits import identify
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

OWNERS_MAX = 4096
OPENS_STEP = 32
"""Stated open inodes that are checked before other requests get their turn: a quarter of a millisecond."""
_log = logging.getLogger(__name__)


class SessionHandlers:
    """Requests about sessions, and the end of sessions."""

    def __init__(self, parts: ShardParts, replies: CallReplies, bring_sessions: Callable[[], None]) -> None:
        """`bring_sessions` merges migrated sessions into those that clients have opened here."""
        self._shard = parts.shard
        self._options = parts.options
        self._clock = parts.clock
        self._callers = parts.callers
        self._status = parts.status
        self._kv = parts.kv
        self._view = parts.view
        self._rooms = parts.rooms
        self._sessions = parts.sessions
        self._users = parts.users
        self._numbers = parts.numbers
        self._watches = parts.watches
        self._collector = parts.collector
        self._locks = parts.locks
        self._ranges = parts.ranges
        self._revocations = parts.revocations
        self._replies = replies
        self._bring_sessions = bring_sessions

    def routes(self) -> dict[int, Callable[[Call], None]]:
        """Handlers by method."""
        return {
            wire.META_OPEN_SESSION: self._open_session,
            wire.META_RENEW_SESSION: self._renew_session,
            wire.META_CLOSE_SESSION: self._close_session,
            wire.META_RELEASE: self._release,
            wire.META_LOCK_WAIT: self._wait_for_lock,
            wire.META_WATCH: self._watch,
            wire.META_SESSIONS: self._owners,
        }

    def _open_session(self, call: Call) -> None:
        request = pb.OpenSessionRequest.FromString(bytes(call.message))
        _check_slots(request.slots)
        now_s = self._clock.boottime_s()
        peer, trusted = identify(call.peer, self._callers.operators)
        peer = "" if trusted else peer
        if self._callers.user_of(call) is not None:
            request.identity = 0  # an identity would speak for the sessions of another client
        if request.session:
            session = self._sessions.take_up(
                request.session, request.secret, self._callers.owner_of(call), now_s
            )
            if request.names_open:
                self._replies.reply_in_steps(call, self._taken_up(call, request, peer))
                return
        else:
            if self._kv.full:
                self._replies.retry(call, self._kv.room)
                return
            if self._numbers.next_session >= self._numbers.bounds.session:
                self._replies.retry(call, self._numbers.more)
                return
            number = self._shard << 48 | self._numbers.next_session
            record = SessionRecord(
                self._clock.secret(SECRET_BYTES),
                self._clock.wall_ns(),
                shown_client(request.client),
                request.watch,
                request.identity,
                self._callers.owner_of(call),
            )
            session, effects = self._sessions.opening(number, record, now_s, peer)
            # allowed in a full engine: without a session nobody could delete anything
            self._kv.apply(effects, reclaims=True)
            self._sessions.add(session)
            self._numbers.next_session += 1
        call.reply(self._opened_reply(call, request, session, peer).SerializeToString())

    def _taken_up(
        self, call: Call, request: pb.OpenSessionRequest, peer: str
    ) -> Iterator[pb.OpenSessionReply | None]:
        """Resume a session with the open files that its client states."""
        opened = yield from self._own_opens(call, request.session, inodes_of(request.opened))
        session = self._sessions.of(request.session, self._callers.owner_of(call))
        self._sessions.name_open(session, opened, frozenset(request.slots) if request.names_slots else None)
        yield self._opened_reply(call, request, session, peer)

    def _opened_reply(
        self, call: Call, request: pb.OpenSessionRequest, session: Session, peer: str
    ) -> pb.OpenSessionReply:
        session.member = call.peer.member
        self._sessions.belongs(session, peer)
        if effects := self._sessions.identify(session, request.identity):
            self._kv.apply(effects, reclaims=True)
        self._bring_sessions()
        reply = pb.OpenSessionReply(
            session=session.number,
            secret=session.secret,
            lease_s=self._options.session_lease_s,
            slots=SLOTS_PER_SESSION,
            incarnation=self._status.incarnation,
            name_key=self._view.name_key,
        )
        if session.watches:
            reply.watch, reply.watch_ms = self._watches.begin(session.number)
            reply.linger_ms, reply.delegates = int(self._options.linger_s * 1000), True
        if request.session:
            reply.sequences.extend(
                self._sessions.slot(session, index).sequence for index in range(SLOTS_PER_SESSION)
            )
        return reply

    def _renew_session(self, call: Call) -> None:
        request = pb.RenewSessionRequest.FromString(bytes(call.message))
        session = self._sessions.of(request.session, self._callers.owner_of(call))
        opened = inodes_of(request.opened, LISTED_INODES_MAX)
        released = inodes_of(request.released, LISTED_INODES_MAX)
        session.expires_s, session.member = (
            self._clock.boottime_s() + self._options.session_lease_s,
            call.peer.member,
        )
        if not session.peer:
            peer, trusted = identify(call.peer, self._callers.operators)
            self._sessions.belongs(session, "" if trusted else peer)
        if self._callers.user_of(call) is not None:
            request.identity = 0
        steps = self._renewed(call, request, opened, released)
        if opened:
            self._replies.reply_in_steps(call, steps)
            return
        for reply in steps:  # one step, which must not wait behind other requests of the peer
            if reply is not None:
                call.reply(reply.SerializeToString())

    def _renewed(
        self, call: Call, request: pb.RenewSessionRequest, opened: Sequence[int], released: Sequence[int]
    ) -> Iterator[pb.RenewSessionReply | None]:
        """Register the open files that the client states, and close the released ones, both in the last step."""
        own = yield from self._own_opens(call, request.session, opened)
        session = self._sessions.of(request.session, self._callers.owner_of(call))
        self._check_ours(opened, released)
        if effects := self._sessions.identify(session, request.identity):
            self._kv.apply(effects, reclaims=True)
        if own or not opened:
            self._sessions.name(session, own, request.named)
        self._sessions.release(session, released)
        yield pb.RenewSessionReply(
            lease_s=self._options.session_lease_s,
            incarnation=self._status.incarnation,
            map_epoch=self._status.map_epoch(),
            held=self._sessions.held(session, self._collector.kept),
        )

    def _own_opens(
        self, call: Call, number: int, inodes: Sequence[int]
    ) -> Generator[None, None, Sequence[int]]:
        """Those of the inodes that the session may state as open.

        An open inode keeps a deleted file, and keeps its volume from being sealed or removed. So a client
        that is no node opens nothing in volumes that it may not see, and a user nothing that the user cannot
        reach (LocalUsers.openable). Yields wherever other requests should get their turn.
        """
        owner, user = self._callers.owner_of(call), self._callers.user_of(call)
        session = self._sessions.of(number, owner)
        if not owner or not inodes:
            return inodes
        if user is not None:
            in_grace = (
                number in self._sessions.restored and self._clock.boottime_s() < self._collector.grace_until_s
            )
            return (
                yield from self._users.openable(
                    self._view, user, session, inodes, in_grace, self._clock.wall_ns
                )
            )
        if not self._view.access.restricted:
            return inodes
        found = []
        for at, inode in enumerate(inodes):
            if at and not at % OPENS_STEP:
                yield None
            if inode not in session.opens:
                try:
                    self._view.inode(inode)  # checks the right to its volume
                except (Refused, CorruptRecord):
                    continue
            found.append(inode)
        return found

    def _check_ours(self, *inodes: Iterable[int]) -> None:
        """WrongShard: one of the inodes belongs to another shard now; nothing of the request has been
        done."""
        for partition in {partition_of(inode) for some in inodes for inode in some}:
            if self._view.is_elsewhere(partition):
                raise WrongShard(f"partition {partition} belongs to another shard")
            if partition < PARTITION_COUNT:
                self._ranges.check_partition(partition)

    def _close_session(self, call: Call) -> None:
        request = pb.CloseSessionRequest.FromString(bytes(call.message))
        if request.session in self._sessions.by_number:
            session = self._sessions.of(request.session, self._callers.owner_of(call))
            if self._kv.full:
                self._replies.retry(call, self._kv.room)
                return
            self.end_session(session, 0.0)
        call.reply(pb.CloseSessionReply().SerializeToString())

    def end_session(self, session: Session, grants_live_s: float) -> None:
        """End a session whose grants may be valid for `grants_live_s` seconds more; 0: its client closed it."""
        self._kv.apply(self._sessions.ending(session), reclaims=True)
        self._watches.end(session.number)
        self._rooms.end_session(session.number)
        self._collector.hold(
            self._sessions.drop(session), grants_live_s and self._clock.boottime_s() + grants_live_s
        )
        self._locks.end_session(session.number, said_so=not grants_live_s)

    async def end_leases(self) -> None:
        """End expired sessions and those of removed clients.

        This also releases locks, and reserves more numbers if few are left. Waits for the engine, and for the
        pool map's coordinator if locks of removed clients depend on it.
        """
        now_s = self._clock.boottime_s()
        self._locks.give_on(await self._revocations.cut_off())
        for session in self._sessions.expired(now_s):
            while self._kv.full:
                await self._kv.room()
            if session.expires_s >= now_s:
                continue  # renewed during the wait
            was_removed = session.expires_s == -inf
            _log.warning(
                "session %#x (%s) ends: %s",
                session.number,
                session.client,
                f"{session.member} was removed from the pool" if was_removed else "it has not been renewed",
            )
            self.end_session(session, self._options.grant_s)
            if was_removed:
                self._revocations.removed(session.number)
            await asyncio.sleep(0)
        await self._locks.run_once(self._sessions)
        if self._numbers.low(self._view.next_number):
            await self._numbers.more()

    def _watch(self, call: Call) -> None:
        request = pb.WatchRequest.FromString(bytes(call.message))
        session = self._sessions.of(request.session, self._callers.owner_of(call))
        # a WATCH request shows that the client lives: a lease is never valid longer than its session
        session.expires_s = max(session.expires_s, self._clock.boottime_s() + self._options.session_lease_s)
        self._watches.ask(call, request)

    def _release(self, call: Call) -> None:
        request = pb.ReleaseRequest.FromString(bytes(call.message))
        session = self._sessions.of(request.session, self._callers.owner_of(call))
        _check_slots(request.slots)
        inodes, gone = inodes_of(request.inodes, LISTED_INODES_MAX), handles_of(request.gone)
        self._check_ours(inodes, gone)
        self._sessions.release(session, inodes)
        self._sessions.give_up_all(session, gone)
        for index in request.slots:
            self._sessions.give_up(session, self._sessions.slot(session, index))
        call.reply(b"")

    def _owners(self, call: Call) -> None:
        request = pb.SessionsRequest.FromString(bytes(call.message))
        if len(request.sessions) > 8 * OWNERS_MAX:
            raise InvalidRequest(f"at most {OWNERS_MAX} sessions are looked for in one request")
        found = [self._sessions.by_number.get(number) for number in inodes_of(request.sessions)]
        call.reply(
            pb.SessionsReply(
                owners=[
                    pb.SessionOwner(session=session.number, client=session.client, identity=session.identity)
                    for session in found
                    if session is not None
                ]
            ).SerializeToString()
        )

    def _wait_for_lock(self, call: Call) -> None:
        request = pb.LockWaitRequest.FromString(bytes(call.message))
        self._sessions.of(request.session, self._callers.owner_of(call))
        self._locks.ask(call, request)


def _check_slots(slots: Collection[int]) -> None:
    """InvalidRequest: the request names more slots than a session has."""
    if len(slots) > SLOTS_PER_SESSION:
        raise InvalidRequest(
            f"a session has {SLOTS_PER_SESSION} slots, and the request names {len(slots)}; name each once"
        )
