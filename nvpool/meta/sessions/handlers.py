"""Handlers of session requests: open, renew, watch, close, release, and replayed changes.

A part of `meta/server/service`, which owns all state used here. Nothing here waits except `end_leases`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from math import inf
from typing import Any

from nvpool.core.errors import (
    CorruptRecord,
    InvalidRequest,
    NvpoolError,
    Refused,
    StaleSequence,
    WrongShard,
)
from nvpool.core.ids import partition_of
from nvpool.core.units import PARTITION_COUNT, SLOTS_PER_SESSION
from nvpool.meta.sessions.table import (
    LISTED_INODES_MAX,
    Session,
    Slot,
    handles_of,
    inodes_of,
    shown_client,
)
from nvpool.meta.state.session_records import SECRET_BYTES, SessionRecord
from nvpool.rpc.api import Call
from nvpool.rpc.error_codec import TEXT_CHARACTERS_MAX
from nvpool.rpc.peer_limits import identify
from nvpool.rpc.peer_roles import Credentials
from nvpool.rpc.v1 import meta_pb2 as pb

OWNERS_MAX = 4096
OPENS_STEP = 32
"""Stated open inodes that are checked before other requests get their turn: a quarter of a millisecond."""
COUNTED_STEP = 512
"""Open inodes that are opened or closed before other requests get their turn: as long."""
_log = logging.getLogger(__name__)


class SessionHandlers:
    """Session part of `MetaService`."""

    def _owner(self, call: Call) -> str:
        """Owner name whose sessions the caller may use; "" for a node, which may use all sessions."""
        return self._callers.of(call.peer).owner

    def _user(self, call: Call) -> Credentials | None:
        """User as which the caller must act; see Caller.user."""
        return self._callers.of(call.peer).user

    def _open_session(self, call: Call) -> None:
        request = pb.OpenSessionRequest.FromString(call.message)
        _check_slots(request.slots)
        now_s = self._clock.boottime_s()
        peer, trusted = identify(call.peer, self._callers.operators)
        peer = "" if trusted else peer
        if self._user(call) is not None:
            request.identity = 0  # an identity would speak for the sessions of another client
        if request.session:
            session = self._sessions.take_up(request.session, request.secret, self._owner(call), now_s)
            if request.names_open:
                self._reply_in_steps(call, self._taken_up(call, request, peer))
                return
        else:
            if self._kv.full:
                self._later(call, self._kv.room)
                return
            if self._numbers.next_session >= self._numbers.bounds.session:
                self._later(call, self._numbers.more)
                return
            number = self._shard << 48 | self._numbers.next_session
            record = SessionRecord(
                self._clock.secret(SECRET_BYTES),
                self._clock.wall_ns(),
                shown_client(request.client),
                request.watch,
                request.identity,
                self._owner(call),
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
        session = self._sessions.of(request.session, self._owner(call))
        self._sessions.name_open(session, opened, frozenset(request.slots) if request.names_slots else None)
        yield self._opened_reply(call, request, session, peer)

    def _opened_reply(
        self, call: Call, request: pb.OpenSessionRequest, session: Session, peer: str
    ) -> pb.OpenSessionReply:
        session.member = call.peer.member
        self._sessions.belongs(session, peer)
        if effects := self._sessions.identify(session, request.identity):
            self._kv.apply(effects, reclaims=True)
        self._moving.bring_sessions()
        reply = pb.OpenSessionReply(
            session=session.number,
            secret=session.secret,
            lease_s=self._options.session_lease_s,
            slots=SLOTS_PER_SESSION,
            incarnation=self._incarnation,
            name_key=self._view.name_key,
        )
        if session.watches:
            reply.watch, reply.watch_ms = self._watches.begin(session.number)
            reply.linger_ms = int(self._options.linger_s * 1000)
        if request.session:
            reply.sequences.extend(
                self._sessions.slot(session, index).sequence for index in range(SLOTS_PER_SESSION)
            )
        return reply

    def _renew_session(self, call: Call) -> None:
        request = pb.RenewSessionRequest.FromString(call.message)
        session = self._sessions.of(request.session, self._owner(call))
        opened = inodes_of(request.opened, LISTED_INODES_MAX)
        released = inodes_of(request.released, LISTED_INODES_MAX)
        session.expires_s, session.member = (
            self._clock.boottime_s() + self._options.session_lease_s,
            call.peer.member,
        )
        if not session.peer:
            peer, trusted = identify(call.peer, self._callers.operators)
            self._sessions.belongs(session, "" if trusted else peer)
        if self._user(call) is not None:
            request.identity = 0
        self._reply_in_steps(call, self._renewed(call, request, opened, released))

    def _renewed(
        self, call: Call, request: pb.RenewSessionRequest, opened: Sequence[int], released: Sequence[int]
    ) -> Iterator[pb.RenewSessionReply | None]:
        """Register the open files that the client states, and close the released ones."""
        own = yield from self._own_opens(call, request.session, opened)
        session = self._sessions.of(request.session, self._owner(call))
        self._check_ours(opened, released)
        if effects := self._sessions.identify(session, request.identity):
            self._kv.apply(effects, reclaims=True)
        for some in _parts_of(own):
            if some.start:
                yield None
                session = self._sessions.of(request.session, self._owner(call))
                self._check_ours(own)
            self._sessions.state_open(session, own[some])
        if (own and request.named) or not opened:
            self._sessions.end_stated(session, own)
        yield from self._close_in_steps(call, request.session, released)
        session = self._sessions.of(request.session, self._owner(call))
        yield pb.RenewSessionReply(
            lease_s=self._options.session_lease_s,
            incarnation=self._incarnation,
            map_epoch=self._map.epoch if self._map else 0,
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
        owner, user = self._owner(call), self._user(call)
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
        request = pb.CloseSessionRequest.FromString(call.message)
        if request.session in self._sessions.by_number:
            session = self._sessions.of(request.session, self._owner(call))
            if self._kv.full:
                self._later(call, self._kv.room)
                return
            self._end_session(session, 0.0)
        call.reply(pb.CloseSessionReply().SerializeToString())

    def _end_session(self, session: Session, grants_live_s: float) -> None:
        self._kv.apply(self._sessions.ending(session), reclaims=True)
        self._watches.end(session.number)
        self._view.rooms.end_session(session.number)
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
            self._end_session(session, self._options.grant_s)
            if was_removed:
                self._revocations.removed(session.number)
            await asyncio.sleep(0)
        await self._locks.run_once(self._sessions)
        if self._numbers.low(self._view.next_number):
            await self._numbers.more()

    def _watch(self, call: Call) -> None:
        request = pb.WatchRequest.FromString(call.message)
        session = self._sessions.of(request.session, self._owner(call))
        # a WATCH request shows that the client lives: a lease is never valid longer than its session
        session.expires_s = max(session.expires_s, self._clock.boottime_s() + self._options.session_lease_s)
        self._watches.ask(call, request)

    def _release(self, call: Call) -> None:
        request = pb.ReleaseRequest.FromString(call.message)
        self._sessions.of(request.session, self._owner(call))
        _check_slots(request.slots)
        inodes, gone = inodes_of(request.inodes, LISTED_INODES_MAX), handles_of(request.gone)
        self._check_ours(inodes, gone)
        self._reply_in_steps(call, self._released(call, request, inodes, gone))

    def _released(
        self, call: Call, request: pb.ReleaseRequest, inodes: Sequence[int], gone: dict[int, int]
    ) -> Iterator[pb.ReleaseReply | None]:
        """Close what the client has closed, and give up what it does not have open."""
        yield from self._close_in_steps(call, request.session, inodes)
        session = self._sessions.of(request.session, self._owner(call))
        self._sessions.give_up_all(session, gone)
        for index in request.slots:
            self._sessions.give_up(session, self._sessions.slot(session, index))
        yield pb.ReleaseReply()

    def _close_in_steps(self, call: Call, number: int, inodes: Sequence[int]) -> Generator[None, None, None]:
        """Close these inodes, one handle each.

        What has begun is finished unless the session ends, because a client that is refused repeats all of
        it, and a second close would close another handle. An inode whose partition has left in the meantime
        has no handle here anymore.
        """
        for some in _parts_of(inodes):
            if some.start:
                yield None
            self._sessions.release(self._sessions.of(number, self._owner(call)), inodes[some])

    def _owners(self, call: Call) -> None:
        request = pb.SessionsRequest.FromString(call.message)
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

    def begin_drain(self) -> None:
        """Answer all requests that wait for other requests.

        Other requests are no longer accepted, so the wait would last all the drain.
        """
        self._waits.begin_drain()
        if self._incarnation:
            self._watches.close()
            self._locks.close()

    def _wait_for_lock(self, call: Call) -> None:
        request = pb.LockWaitRequest.FromString(call.message)
        self._sessions.of(request.session, self._owner(call))
        self._locks.ask(call, request)

    # -- slots

    def _repeat(
        self, call: Call, request: Any, session: Session, slot: Slot, sequence: int, mark: int
    ) -> None:
        """Answer a replayed change with its stored answer, when that may be given.

        InvalidRequest: the slot's request with this sequence was another one. StaleSequence: the slot is
        already beyond it.
        """
        self._counters["repeated"] += 1
        if sequence < slot.sequence:
            raise StaleSequence(f"the slot has served request {slot.sequence}, {sequence} came later")
        if not sequence:
            raise InvalidRequest("sequences begin with 1")
        if slot.mark is not None and slot.mark != mark:
            raise InvalidRequest(
                f"request {sequence} of this slot was another one: each change has a sequence of its own"
            )
        slot.awaited = False
        self._sessions.open_again(session, slot, request)
        if slot.error is not None:
            call.fail(slot.error)
        elif slot.waits_for in self._view.cutting:
            cut = asyncio.shield(self._view.cutting[slot.waits_for])
            self._answer_later(call, lambda: cut, slot.answer)
        elif (
            self._kv.sync_before_answer
            or getattr(request, "sync", False)
            or isinstance(request, pb.LockRequest)
        ):
            self._answer_later(call, self._kv.sync, slot.answer)
        else:
            call.reply(slot.answer)

    def _keep_refusal(
        self, session: Session, slot: Slot, sequence: int, mark: int, error: NvpoolError
    ) -> None:
        self._sessions.give_up(session, slot)
        slot.sequence, slot.waits_for, slot.answer, slot.restored, slot.opened = sequence, 0, b"", False, 0
        slot.mark = mark
        # A copy: the error itself leads, by its traceback, to the request's message. The text may quote the request.
        slot.error = type(error)(
            str(error)[:TEXT_CHARACTERS_MAX],
            may_be_applied=error.may_be_applied,
            retry_after_s=error.retry_after_s,
        )


def _parts_of(inodes: Sequence[int]) -> Iterator[slice]:
    """Slices of at most COUNTED_STEP of the inodes, in their order."""
    return (slice(first, first + COUNTED_STEP) for first in range(0, len(inodes), COUNTED_STEP))


def _check_slots(slots: Collection[int]) -> None:
    """InvalidRequest: the request names more slots than a session has."""
    if len(slots) > SLOTS_PER_SESSION:
        raise InvalidRequest(
            f"a session has {SLOTS_PER_SESSION} slots, and the request names {len(slots)}; name each once"
        )
