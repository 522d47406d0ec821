"""Replication over the wire: the primary's client of a standby, and the standby's service.

`WireStandby` implements the Standby interface of kv/replication/primary: groups are sent in the order of the
calls, on one connection. `StandbyService` passes arriving groups to a kv/replication/standby in the order of
arrival. Every message carries the service's grant (authority). Used by `meta/server/shard_member`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from nvpool.core.clock import Clock
from nvpool.core.errors import (
    CorruptFrame,
    Disconnected,
    InvalidRequest,
    NvpoolError,
    StaleEpoch,
    StaleTerm,
    Unavailable,
)
from nvpool.kv.replication.standby import Done, Group, StandbyKv
from nvpool.kv.replication_log import Position, Tail, TermRun
from nvpool.meta.service_auth import AuthorityCheck
from nvpool.rpc.api import Call, Connection
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

SHIP_S = 10.0
"""Timeout of one group; a standby that takes longer has been removed from the replication before."""
FOLLOW_S = 60.0

STEP = pb.FollowRequest


class WireStandby:
    """Client of one standby, for the primary."""

    def __init__(
        self,
        dialer: Dialer,
        endpoints: Callable[[], tuple[str, ...]],
        *,
        shard: int,
        member: int,
        clock: Clock,
        authority: Callable[[], bytes],
    ) -> None:
        self._dialer = dialer
        self._endpoints = endpoints
        self._shard = shard
        self._member = member
        self._clock = clock
        self._authority = authority
        self._connection: Connection | None = None

    async def _follow(
        self, term: int, step: int, sequence: int = 0, sequence_term: int = 0
    ) -> pb.FollowReply:
        connection = self._connection
        if connection is None or connection.closed:
            raise Disconnected("the connection to the standby has ended", may_be_applied=False)
        request = pb.FollowRequest(
            shard=self._shard,
            member=self._member,
            term=term,
            step=step,
            sequence=sequence,
            sequence_term=sequence_term,
            authority=self._authority(),
        )
        reply = await connection.call(
            wire.META_FOLLOW, request.SerializeToString(), deadline_s=self._clock.boottime_s() + FOLLOW_S
        )
        return decoded(pb.FollowReply, reply.message)

    async def begin(self, term: int) -> Tail:
        self._connection = await self._dialer.connect(self._endpoints(), self._clock.boottime_s() + SHIP_S)
        reply = await self._follow(term, STEP.BEGIN)
        return Tail(
            Position(reply.stored, reply.stored_term),
            tuple(TermRun(run.term, run.first, run.last) for run in reply.runs),
        )

    async def keep(self, term: int, sequence: int) -> None:
        await self._follow(term, STEP.KEEP, sequence)

    async def install(self, term: int, position: Position) -> None:
        await self._follow(term, STEP.INSTALL, *position)

    async def installed(self, term: int) -> None:
        await self._follow(term, STEP.INSTALLED)

    async def sync(self, term: int) -> int:
        return (await self._follow(term, STEP.SYNC)).synced

    def ship(self, group: Group, done: Done) -> None:
        connection = self._connection
        if connection is None or connection.closed:
            done(None, Disconnected("the connection to the standby has ended", may_be_applied=False))
            return

        def answered(reply, error: BaseException | None) -> None:
            if error is not None:
                done(None, error)
                return
            try:
                sequence = decoded(pb.ShipReply, reply.message).sequence
            except CorruptFrame as error:
                done(None, error)
            else:
                done(sequence, None)

        request = pb.ShipRequest(
            shard=self._shard,
            member=self._member,
            term=group.term,
            committed=group.committed,
            pairs=group.pairs,
            authority=self._authority(),
        )
        try:
            connection.submit(
                wire.META_SHIP,
                request.SerializeToString(),
                (group.records,) if group.records else (),
                deadline_s=self._clock.boottime_s() + SHIP_S,
                on_done=answered,
            )
        except NvpoolError as error:
            done(None, error)


class StandbyService:
    """Request handler of a member that is not the primary.

    It serves META_SHIP and META_FOLLOW. Every other request fails with StaleEpoch: another member is the
    primary.
    """

    def __init__(self, standby: StandbyKv, *, shard: int, member: int, clock: Clock, secret: bytes) -> None:
        self.standby = standby
        self._shard = shard
        self._member = member
        self._check = AuthorityCheck(clock, secret)
        self._tasks: set[asyncio.Task] = set()

    def handle(self, call: Call) -> None:
        try:
            if call.method == wire.META_SHIP:
                self._ship(call)
            elif call.method == wire.META_FOLLOW:
                self._follow(call)
            else:
                raise StaleEpoch(
                    f"member {self._member} is a standby of shard {self._shard}; its primary is in the newest map"
                )
        except DecodeError as error:
            call.fail(InvalidRequest(f"the message of method {call.method} cannot be read: {error}"))
        except Exception as error:
            call.fail(error)

    def _meant(self, request: Any) -> None:
        self._check(request.authority)
        if request.shard != self._shard or request.member != self._member:
            raise StaleEpoch(
                f"this is member {self._member} of shard {self._shard}, not {request.member} of {request.shard}"
            )

    def _ship(self, call: Call) -> None:
        request = pb.ShipRequest.FromString(bytes(call.message))
        self._meant(request)

        def done(sequence: int | None, error: BaseException | None) -> None:
            if error is not None:
                call.fail(error)
            else:
                call.reply(pb.ShipReply(sequence=sequence).SerializeToString())

        self.standby.ship(Group(request.term, bytes(call.payload), request.committed, request.pairs), done)

    def _follow(self, call: Call) -> None:
        request = pb.FollowRequest.FromString(bytes(call.message))
        self._meant(request)
        task = asyncio.ensure_future(self._finish(call, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _step(self, request: pb.FollowRequest) -> pb.FollowReply:
        standby, term = self.standby, request.term
        reply = pb.FollowReply()
        if request.step == STEP.BEGIN:
            tail = await standby.begin(term)
            reply.stored, reply.stored_term = tail.stored
            reply.runs.extend(
                pb.FollowRun(term=run.term, first=run.first, last=run.last) for run in tail.runs
            )
        elif request.step == STEP.KEEP:
            await standby.keep(term, request.sequence)
        elif request.step == STEP.INSTALL:
            await standby.install(term, Position(request.sequence, request.sequence_term))
        elif request.step == STEP.INSTALLED:
            await standby.installed(term)
        elif request.step == STEP.SYNC:
            reply.synced = await standby.sync(term)
        else:
            raise InvalidRequest(f"a standby knows no step {request.step}")
        return reply

    async def _finish(self, call: Call, request: pb.FollowRequest) -> None:
        """Run the step inside this task, because `close` may cancel the task before it has started."""
        try:
            call.reply((await self._step(request)).SerializeToString())
        except asyncio.CancelledError:
            call.fail(Disconnected("this member ends, or becomes the primary"))
            raise
        except Exception as error:
            call.fail(error)

    async def close(self) -> None:
        """Cancel and answer the steps in progress; the standby itself stays open."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class PrimaryService:
    """Handler of META_SHIP and META_FOLLOW at a member that considers itself the primary.

    If two members consider themselves the primary, the one of the later term is. `on_later` is called if that
    is the other.
    """

    def __init__(
        self, *, shard: int, member: int, term: int, clock: Clock, secret: bytes, on_later: Callable[[], None]
    ) -> None:
        self._name = f"member {member} is the primary of shard {shard} in term {term}"
        self._term = term
        self._check = AuthorityCheck(clock, secret)
        self._on_later = on_later

    def handle(self, call: Call) -> None:
        kind = pb.ShipRequest if call.method == wire.META_SHIP else pb.FollowRequest
        try:
            request = kind.FromString(bytes(call.message))
            self._check(request.authority)
        except DecodeError as error:
            call.fail(InvalidRequest(f"the message of method {call.method} cannot be read: {error}"))
        except NvpoolError as error:
            call.fail(error)
        else:
            if request.term <= self._term:
                call.fail(StaleTerm(self._name))
            else:
                call.fail(
                    Unavailable(f"{self._name}, and hears now of term {request.term}", retry_after_s=0.1)
                )
                self._on_later()
