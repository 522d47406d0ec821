"""What a metadata service answers about sessions: opened, renewed, watched, ended; and what they have open.

A part of `meta/service`, which owns all that is used here. Nothing here waits.
"""

from __future__ import annotations

from nvpool.base.errors import InvalidRequest, WrongShard
from nvpool.base.ids import partition_of
from nvpool.base.units import PARTITION_COUNT, SLOTS_PER_SESSION
from nvpool.meta import records
from nvpool.meta.leases import Session, handles_of, inodes_of
from nvpool.wire.roles import acts_as
from nvpool.wire.transport import Call
from nvpool.wire.v1 import meta_pb2 as pb

OWNERS_MAX = 4096


class SessionAnswers:
    def _open_session(self, call: Call) -> None:
        request = pb.OpenSessionRequest.FromString(call.message)
        now_s = self._clock.boottime_s()
        user = acts_as(call.peer, self._options.operators)
        if user is not None:
            request.identity = 0  # which would speak for the sessions of another client
        if request.session:
            session = self._sessions.take_up(request.session, request.secret, now_s)
            if request.names_open:
                self._sessions.name_open(session, inodes_of(request.opened), request.slots if request.names_slots else None)
        else:
            if self._kv.full:
                self._later(call, self._kv.room)
                return
            if self._numbers.next_session >= self._numbers.bounds.session:
                self._later(call, self._numbers.more)
                return
            number = self._shard << 48 | self._numbers.next_session
            record = records.SessionRecord(self._clock.secret(records.SESSION_SECRET_BYTES), self._clock.wall_ns(),
                                           request.client, request.watch, request.identity)
            session, effects = self._sessions.opening(number, record, now_s)
            self._kv.apply(effects, reclaims=True)  # it adds, but without a session nobody could remove anything
            self._sessions.add(session)
            self._numbers.next_session += 1
        if (effects := self._sessions.identify(session, request.identity)):
            self._kv.apply(effects, reclaims=True)
        if user is not None:
            self._users.opened(session.number, user)
        self._moving.bring_sessions()
        reply = pb.OpenSessionReply(session=session.number, secret=session.secret, lease_s=self._options.session_lease_s,
                                    slots=SLOTS_PER_SESSION, incarnation=self._incarnation, name_key=self._view.name_key)
        if session.watches:
            reply.watch, reply.watch_ms = self._watches.begin(session.number)
            reply.linger_ms = int(self._options.linger_s * 1000)
        if request.session:
            reply.sequences.extend(self._sessions.slot(session, index).sequence for index in range(SLOTS_PER_SESSION))
        call.reply(reply.SerializeToString())

    def _renew_session(self, call: Call) -> None:
        request = pb.RenewSessionRequest.FromString(call.message)
        session = self._sessions.get(request.session)
        session.expires_s = self._clock.boottime_s() + self._options.session_lease_s
        self._check_ours(request.opened, request.released)
        if acts_as(call.peer, self._options.operators) is not None:
            request.identity = 0
        if (effects := self._sessions.identify(session, request.identity)):
            self._kv.apply(effects, reclaims=True)
        self._sessions.name(session, inodes_of(request.opened), request.named)
        self._sessions.release(session, inodes_of(request.released))
        call.reply(pb.RenewSessionReply(lease_s=self._options.session_lease_s, incarnation=self._incarnation,
                                        map_epoch=self._map.epoch if self._map else 0,
                                        held=self._sessions.held(session, self._collector.kept)).SerializeToString())

    def _check_ours(self, *packed: bytes) -> None:
        """WrongShard where one of the inodes is another shard's by now: nothing of the message is done then."""
        for partition in {partition_of(inode) for inodes in packed for inode in inodes_of(inodes)}:
            if self._view.is_elsewhere(partition):
                raise WrongShard(f"partition {partition} belongs to another shard")
            if partition < PARTITION_COUNT:
                self._ranges.check_partition(partition)

    def _close_session(self, call: Call) -> None:
        request = pb.CloseSessionRequest.FromString(call.message)
        session = self._sessions.by_number.get(request.session)
        if session is not None:
            if self._kv.full:
                self._later(call, self._kv.room)
                return
            self._end_session(session, 0.0)
        call.reply(pb.CloseSessionReply().SerializeToString())

    def _end_session(self, session: Session, grants_live_s: float) -> None:
        self._kv.apply(self._sessions.ending(session), reclaims=True)
        self._watches.end(session.number)
        self._view.rooms.end_session(session.number)
        self._collector.hold(self._sessions.drop(session), grants_live_s and self._clock.boottime_s() + grants_live_s)
        self._locks.end_session(session.number, said_so=not grants_live_s)

    def _watch(self, call: Call) -> None:
        request = pb.WatchRequest.FromString(call.message)
        session = self._sessions.get(request.session)
        # who watches lives: a lease never holds longer than the session
        session.expires_s = max(session.expires_s, self._clock.boottime_s() + self._options.session_lease_s)
        self._watches.ask(call, request)

    def _release(self, call: Call) -> None:
        request = pb.ReleaseRequest.FromString(call.message)
        session = self._sessions.get(request.session)
        gone = handles_of(request.gone)
        self._check_ours(request.inodes, b"".join(inode.to_bytes(8, "little") for inode in gone))
        self._sessions.release(session, inodes_of(request.inodes))
        self._sessions.give_up_all(session, gone)
        for index in request.slots:
            self._sessions.give_up(session, self._sessions.slot(session, index))
        call.reply(b"")

    def _owners(self, call: Call) -> None:
        request = pb.SessionsRequest.FromString(call.message)
        if len(request.sessions) > 8 * OWNERS_MAX:
            raise InvalidRequest(f"at most {OWNERS_MAX} sessions are looked for at once")
        found = [self._sessions.by_number.get(number) for number in inodes_of(request.sessions)]
        call.reply(pb.SessionsReply(owners=[
            pb.SessionOwner(session=session.number, client=session.client, identity=session.identity)
            for session in found if session is not None]).SerializeToString())

    def begin_drain(self) -> None:
        """Answer requests that wait for other requests: no more of these are taken, so they would wait for the whole drain."""
        self._waits.begin_drain()
        if self._incarnation:
            self._watches.close()
            self._locks.close()

    def _wait_for_lock(self, call: Call) -> None:
        request = pb.LockWaitRequest.FromString(call.message)
        self._sessions.get(request.session)
        self._locks.ask(call, request)
