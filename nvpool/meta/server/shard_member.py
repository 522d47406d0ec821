"""Shard member: primary or standby as the pool map says, and the promotion to primary.

A primary without standbys is only the service and its engine. A primary with standbys ships its log to them
(kv/replication/primary), answers through a commit gate (meta/server/commit_gate), and holds a primary lease:
every half second it sends a heartbeat to the leader, and the lease counts from the time of sending.
A standby receives the shipped log (meta/server/replication_rpc) until the map makes it the primary. Then it
continues with the engine that it has, as a shard does after a restart.

A process that starts may have read an old map, so it asks the coordinator before it serves. The reply gives
it a new term, or says that another member has become the primary. A process that learns that it is no longer
the primary exits, and is started again as a standby.

Run by `daemons/meta`, which supplies the engine's options and a factory for the service.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nvpool.core.clock import Clock
from nvpool.core.errors import (
    CorruptRecord,
    Draining,
    NotFound,
    NotLeader,
    NvpoolError,
    StaleTerm,
    Unavailable,
    Unreachable,
)
from nvpool.kv.metrics import measure_engine
from nvpool.kv.options import LmdbOptions
from nvpool.kv.replication.commit_mark import CommitMark, remove_mark
from nvpool.kv.replication.member_engine import MemberKv, whole_term, with_term
from nvpool.kv.replication.primary import Shipping, ShippingOptions
from nvpool.kv.replication.standby import StandbyKv
from nvpool.meta.server.commit_gate import CommitGate
from nvpool.meta.server.replication_rpc import PrimaryService, StandbyService, WireStandby
from nvpool.meta.server.service import MetaService
from nvpool.meta.service_auth import ServiceRight
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.poolmap.model import PoolMap, Shard, decode_map
from nvpool.poolmap.shards.members import endpoints_of, up_standbys
from nvpool.poolmap.shards.placement import store_beside
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import Call
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.lease_renewal import LeaseCalls
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire

log = logging.getLogger(__name__)

RENEW_S = 0.5
AGAIN_S = 0.15
"""Pause after a renewal that no leader accepted, for instance during an election."""
ASK_S = 1.0
"""Timeout of one renewal, and so the longest delay of the next. A reply later than half a lease is
discarded."""
LEASE_SHARE = 0.95
"""Share of the primary lease that we use by our own clock. The rest allows for clocks of different speed."""
BEGIN_S = 60.0
_LOOK_S = 1.0
_LOOKS = 3
"""Consecutive checks that must find the records missing before this process reacts."""
LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Options of one shard member."""

    node: int
    shard: int
    member: int
    path: Path
    engine: LmdbOptions
    secret: bytes
    shipping: ShippingOptions = ShippingOptions()
    mark: Path | None = None
    """Path of the commit mark (kv/replication/commit_mark) on a tmpfs; None: no commit mark."""
    callers: Callers = field(default_factory=Callers)


class MemberFastPath:
    """Handles the frames of a primary as its calls: see meta/server/request_dispatch."""

    def __init__(self, member: ShardMember) -> None:
        self._member = member

    def answer(
        self,
        buffer: bytearray,
        end: int,
        in_work: dict,
        reply_stats: ReplyStats,
        out: list,
        side: Any = None,
        watched: Callable[[Call], Call] | None = None,
    ) -> int:
        service = self._member.service
        dispatch = service.dispatch if service is not None else None
        if dispatch is None:
            return 0
        handle = None if self._member.handle == service.handle else self._member.handle
        return dispatch.answer(buffer, end, in_work, reply_stats, out, side, handle, watched)


class ShardMember:
    """One shard member as served by runtime/daemon_lifecycle: `handle`, `update_map`, `start`, `close`."""

    def __init__(
        self,
        options: MemberOptions,
        pool_map: PoolMap,
        dialer: Dialer,
        clock: Clock,
        make_service: Callable[[MemberKv], MetaService],
        fail: Callable[[str], None],
    ) -> None:
        """`fail(reason)` ends the process, which cannot continue in its role."""
        self._options = options
        self._map = pool_map
        self._dialer = dialer
        self._keeper_calls = LeaseCalls(dialer, clock)
        self._clock = clock
        self._make_service = make_service
        self._fail = fail
        self._authority = ServiceRight(clock, options.secret, options.shard)
        self.term = 0
        self.service: MetaService | None = None
        self.kv: MemberKv | None = None
        self._shipping: Shipping | None = None
        self._gate: CommitGate | None = None
        self.standby: StandbyKv | None = None
        self._standby_service: StandbyService | None = None
        self._tasks: set[asyncio.Task] = set()
        self._promoting = False
        self._closed = self._left = False
        self._lost = ""
        """Reason why this standby has no records; empty: it has records, or will be filled."""
        self._unrenewed = ""
        """Reason why the last renewal of the primary lease failed."""
        self._removed = ""
        """Reason why the next process will not find the records of this one."""
        self.handle: Callable[[Call], None] = self._not_yet
        self.fast_path = MemberFastPath(self)

    @property
    def _shard(self) -> Shard:
        return self._map.shard_by_id[self._options.shard]

    @property
    def _is_primary(self) -> bool:
        return self._shard.member == self._options.member

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start as the primary, or as a standby that waits for its primary. On return requests are accepted.

        A standby without records waits until its directory exists again, and says so in its status.

        NotFound, CorruptRecord: the primary's records are missing; an empty shard is never created in their
        place. Unavailable: the pool map's coordinator does not answer.
        """
        path = self._options.path
        if (
            self._is_primary
            and (self._shard.standbys or len(self._map.nodes) > 1 or len(self._map.shards) > 1)
            and (path.is_dir() or up_standbys(self._shard))
        ):
            await self._ask_to_begin()
        if self._is_primary:
            if not path.is_dir():
                raise NotFound(
                    f"{path} is missing: is its file system mounted? It is never created again here"
                )
            if not (path / "FORMAT").exists():
                raise CorruptRecord(
                    f"{path} holds no whole records; restore it, or another member of the shard"
                )
            kv = await MemberKv.open_member(
                path, with_term(self._options.engine, self._shard.term), on_fence=self._fail
            )
            await self._serve(kv)
        elif path.is_dir():
            self.stand_by()
        else:
            self._lost = f"its records are gone: {path} is missing"
            log.error("member %d of shard %d: %s", self._options.member, self._options.shard, self._lost)
            self._own(self._await_directory())
        self._own(self._watch_records())

    async def _await_directory(self) -> None:
        """Become a standby when the directory for the records exists again."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._options.path.is_dir():
                break
        self._lost = ""
        self.stand_by()

    async def _watch_records(self) -> None:
        """Detect that the directory of the records is removed while in use.

        The next process would start without records; this one still has them. So a primary exits only if a
        standby can take over, and a standby exits only when the map no longer counts on it.
        """
        mark, seen, missing = self._options.path / "FORMAT", False, 0
        while True:
            await asyncio.sleep(_LOOK_S)
            if mark.exists():
                seen, missing, self._removed = True, 0, ""
                continue
            if not seen or (self.standby is not None and self.standby.filling):
                continue
            missing += 1
            if missing < _LOOKS:
                continue
            self._removed = f"{self._options.path} was removed while it was in use"
            if self.service is not None:
                self.service.status.reason = f"{self._removed}: only this process still has the records"
            if not self._is_primary and self.standby is not None:
                if self._options.member in up_standbys(self._shard):
                    try:
                        await self._ask_for_standby(self._options.member, False, self._shard.term)
                    except NvpoolError as error:
                        log.info("the map still counts on this member: %s", error)
                        continue
                self._fail(f"{self._removed}; it is filled again")
            elif self._is_primary and up_standbys(self._shard):
                self._fail(f"{self._removed}; a standby follows")

    def update_map(self, pool_map: PoolMap) -> None:
        """Use a newer pool map; an older one is ignored."""
        if pool_map.epoch <= self._map.epoch and pool_map is not self._map:
            return
        if self._options.shard not in pool_map.shard_by_id:
            if not self._closed and not self._left:
                self._left = True
                self._own(self._leave())
            return
        self._map = pool_map
        deposed = self.kv is not None and (not self._is_primary or self._shard.term > self.term)
        # what the map grants the shard may already belong to our successor
        if self.service is not None and not deposed:
            self.service.update_map(pool_map)
        if self._shard.id != self._options.shard or self._closed:
            return
        if self._lost and self._is_primary:
            self._fail(f"this member cannot become the primary: {self._lost}")
        elif self.standby is not None:
            if self._is_primary and not self._promoting:
                self._promoting = True
                self._own(self._promote())
        elif self.kv is not None:
            if deposed:
                self._depose()
            else:
                self._use_standbys()

    async def _leave(self) -> None:
        """End the process after LEAVE_S, in case no supervisor ends it before."""
        log.info("shard %d has left the pool", self._options.shard)
        await asyncio.sleep(LEAVE_S)
        self._fail(f"shard {self._options.shard} has left the pool")

    def begin_drain(self) -> None:
        if self.service is not None:
            self.service.begin_drain()

    def _stop_serving(self) -> None:
        self._closed = True
        self.handle = self._not_yet
        for task in list(self._tasks):
            task.cancel()

    def begin_abandon(self) -> list[Callable[[], Awaitable[None]]]:
        """Stop serving without storing anything, as if the process had died; used by simulations.

        Returns the calls that release what is still open, in their order.
        """
        self._stop_serving()
        ends: list[Callable[[], Awaitable[None]]] = []
        if self._standby_service is not None:
            ends.append(self._standby_service.close)
        if self.service is not None:
            ends.append(self.service.close)
        if self._shipping is not None:
            ends.append(self._shipping.close)
        if self.standby is not None:
            ends.append(self.standby.abandon)
        if self.kv is not None:
            ends.append(self.kv.abandon)
        return ends

    async def close(self, drain_s: float = 0.0) -> None:
        self._stop_serving()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._standby_service is not None:
            await self._standby_service.close()
        if self.standby is not None:
            await self.standby.close()
        if self.service is not None:
            await self.service.close(drain_s)
        if self._shipping is not None:
            await self._shipping.close()
        if self.kv is not None:
            await self.kv.close()
            if self._options.mark is not None:
                remove_mark(self._options.mark)

    def _own(self, work) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "member %d of shard %d: %s",
                self._options.member,
                self._options.shard,
                error,
                exc_info=not isinstance(error, NvpoolError) and error,
            )
            self._fail(f"the member cannot go on: {error}")

    def measure(self, page: Page) -> None:
        if self.service is not None:
            self.service.measure(page, may_answer=self._gate is None or self._gate.open())
        else:
            page.set(metrics.META_SERVING, 0, shard=self._options.shard)
        for member, state in (self._shipping.states() if self._shipping is not None else {}).items():
            page.set(metrics.META_BEHIND, state["behind"], shard=self._options.shard, member=member)
            page.set(metrics.META_STANDBY_COUNTS, state["counts"], shard=self._options.shard, member=member)
        if self.standby is not None and self.standby.kv is not None:
            measure_engine(self.standby.kv.statistics(), page)

    def _not_yet(self, call: Call) -> None:
        if call.method == wire.META_STATUS:
            self._report_status(call)
        else:
            call.fail(Draining(f"shard {self._options.shard} changes its primary"))

    def _report_status(self, call: Call) -> None:
        standby, reason = self.standby, self._lost or self._removed
        counters: dict[str, float] = {"term": self._shard.term}
        if standby is not None and standby.kv is not None:
            counters.update((f"kv_{name}", value) for name, value in standby.kv.statistics().items())
        if self._promoting:
            state = "promoting"
        elif self._lost:
            state = "lost" if self._is_drive_here() else "away"
        elif standby is not None:
            state, damage = standby.state()
            reason = damage or reason
        else:
            state = "starting"
        call.reply(
            pb.MetaStatusReply(
                shard=self._options.shard, state=state, counters=counters, reason=reason
            ).SerializeToString()
        )

    def _is_drive_here(self) -> bool:
        """Whether the drive of the store next to which the records lie is mounted."""
        beside = store_beside(self._map, self._shard, self._options.member)
        return not beside or os.path.exists(beside)

    def _report_primary_status(self, call: Call) -> None:
        reply, gate = self.service.status_reply(), self._gate
        if gate is not None and not gate.open() and reply.state == "serving":
            reply.state = "waiting"
            reply.reason = "it is the primary and has no lease" + (
                f": {self._unrenewed}" if self._unrenewed else ""
            )
        call.reply(reply.SerializeToString())

    # -- standby -----------------------------------------------------------------------------------------------------

    def stand_by(self) -> None:
        """Serve as a standby, with the records in the directory or without any."""
        options = self._options
        if options.mark is not None:
            remove_mark(options.mark)  # left from a time as the primary
        self.standby = StandbyKv(options.path, options.engine, term=self._shard.term, on_fence=self._fail)
        self._standby_service = StandbyService(
            self.standby,
            shard=options.shard,
            member=options.member,
            clock=self._clock,
            secret=options.secret,
        )
        self.handle = self._handle_as_standby
        log.info("member %d is a standby of shard %d", options.member, options.shard)

    def _handle_as_standby(self, call: Call) -> None:
        self._options.callers.check(call)
        if call.method == wire.META_STATUS:
            self._report_status(call)
        else:
            self._standby_service.handle(call)

    async def _promote(self) -> None:
        """Turn this standby into the primary that the map names."""
        term = self._shard.term
        log.warning(
            "member %d becomes the primary of shard %d in term %d",
            self._options.member,
            self._options.shard,
            term,
        )
        self.handle = self._not_yet
        kv = await self.standby.promote(term)
        await self._standby_service.close()
        self.standby = self._standby_service = None
        await self._serve(kv)
        self._promoting = False
        log.warning(
            "shard %d is served by member %d in term %d", self._options.shard, self._options.member, term
        )

    # -- primary -----------------------------------------------------------------------------------------------------

    async def _serve(self, kv: MemberKv) -> None:
        self.kv, self.term = kv, kv.term
        kv.remember(bool(self._shard.standbys))
        self._use_standbys()
        self.service = self._make_service(kv)
        self.service.update_map(self._map)
        await self.service.start()
        self.handle = self.service.handle if self._gate is None else self._handle_behind_gate

    def _begin_shipping(self) -> None:
        kv = self.kv
        kv.remember(True)
        # before any standby can be up: all changes acknowledged so far are here
        if self._options.mark is not None:
            kv.history.mark_commits(
                CommitMark.begin(self._options.mark, self._options.path, self.term, kv.last.sequence)
            )
        self._shipping = Shipping(
            kv,
            clock=self._clock,
            ask=self._ask_for_standby,
            on_deposed=self._depose,
            options=self._options.shipping,
        )
        self._gate = CommitGate(kv.history, self._clock, lambda: self._shipping.may_be_replaced)
        self._own(self._keep_lease())

    def _use_standbys(self) -> None:
        if self._shipping is None:
            if not self._shard.standbys:
                return
            self._begin_shipping()
            if self.service is not None and self.handle == self.service.handle:
                self.handle = self._handle_behind_gate
        self._shipping.use(
            {
                standby.member: (partial(self._reach, standby.member), standby.state == "up")
                for standby in self._shard.standbys
            }
        )

    def _reach(self, member: int) -> WireStandby:
        return WireStandby(
            self._dialer,
            lambda: endpoints_of(self._shard, member),
            shard=self._options.shard,
            member=member,
            clock=self._clock,
            authority=self._authority,
        )

    def _handle_behind_gate(self, call: Call) -> None:
        if call.method == wire.META_STATUS:
            self._options.callers.check(call)
            self._report_primary_status(call)
        elif call.method in (wire.META_SHIP, wire.META_FOLLOW):
            self._options.callers.check(call)
            PrimaryService(
                shard=self._options.shard,
                member=self._options.member,
                term=self.term,
                clock=self._clock,
                secret=self._options.secret,
                on_later=self._depose,
            ).handle(call)
        else:
            self._gate.handle(self.service.handle, call)

    def _depose(self) -> None:
        """Stop answering: another member is, or will be, the primary."""
        if self._gate is not None:
            self._gate.closed = True
        self.handle = self._not_yet
        self._fail(
            f"member {self._options.member} is not the primary of shard {self._options.shard} any more; it begins again "
            "as a standby"
        )

    # -- calls to the pool map's coordinator ----------------------------------------------------------------

    async def _call_keeper(self, method: int, request: Any, reply_type: Any, wait_s: float) -> Any:
        request.shard, request.authority = self._options.shard, self._authority()
        reply = await self._keeper_calls.call(
            self._map.node_by_id[self._options.node].endpoints,
            method,
            request.SerializeToString(),
            deadline_s=self._clock.boottime_s() + wait_s,
        )
        return decoded(reply_type, reply.message)

    async def take_right(self, request: pb.TakeRightRequest) -> list[int]:
        """Have stores refuse grants of a revoked right; return the targets unaware of it.

        A request with `known` only asks which targets do not know that pool map yet. On return this member
        has the pool map that records the revocation, so the grants that it gives are newer. Errors are those
        of the supervisor.
        """
        reply = await self._call_keeper(wire.META_TAKE_RIGHT, request, pb.TakeRightReply, ASK_S)
        if reply.map:
            self.update_map(decode_map(reply.map))
        return list(reply.unaware)

    async def _ask_to_begin(self) -> None:
        """Obtain a term to serve in, or learn which member is the primary."""
        give_up_s, proven, said = self._clock.boottime_s() + BEGIN_S, self._whole_term(), ""
        while self._is_primary:
            try:
                request = pb.ShardAliveRequest(
                    member=self._options.member, map_epoch=self._map.epoch, whole_term=proven
                )
                reply = await self._call_keeper(wire.META_ALIVE, request, pb.ShardAliveReply, 5.0)
            except (Unavailable, StaleTerm) as error:
                if str(error) != said:
                    log.info(
                        "member %d of shard %d cannot begin yet: %s",
                        self._options.member,
                        self._options.shard,
                        error,
                    )
                said = str(error)
                if self._clock.boottime_s() > give_up_s:
                    raise Unavailable(
                        f"who keeps the map does not let shard {self._options.shard} begin: {error}"
                    ) from None
                await asyncio.sleep(0.1)
                continue
            if reply.map:
                self.update_map(decode_map(reply.map))
            if self._is_primary and reply.term == self._shard.term:
                return

    def _whole_term(self) -> int:
        """Term up to which the records are complete; see `whole_term` in kv/replication/member_engine.

        0 if unknown.
        """
        try:
            return whole_term(self._options.mark, self._options.path)
        except NvpoolError as error:
            log.warning(
                "the records of member %d cannot be compared with its commit mark: %s",
                self._options.member,
                error,
            )
            return 0

    async def _keep_lease(self) -> None:
        """Renew the primary lease until this member is deposed. A renewal waits for nothing but the event loop."""
        gate = self._gate
        while True:
            sent_s, pause_s = self._clock.boottime_s(), RENEW_S
            try:
                request = pb.ShardAliveRequest(
                    member=self._options.member, term=self.term, map_epoch=self._map.epoch
                )
                reply = await self._call_keeper(wire.META_ALIVE, request, pb.ShardAliveReply, ASK_S)
            except StaleTerm as error:
                log.warning("%s", error)
                self._depose()
                return
            except NvpoolError as error:
                log.info("the lease is not renewed: %s", error)
                pause_s, self._unrenewed = AGAIN_S, str(error)
            else:
                lease_s, self._unrenewed = (
                    reply.lease_ms / 1000,
                    "" if reply.lease_ms else "the leader gives none",
                )
                if reply.map:
                    self.update_map(decode_map(reply.map))
                if reply.term == self.term and self._clock.boottime_s() - sent_s < lease_s / 2:
                    gate.lease_until_s = sent_s + lease_s * LEASE_SHARE
            await asyncio.sleep(max(0.05, sent_s + pause_s - self._clock.boottime_s()))

    async def _ask_for_standby(self, member: int, up: bool, term: int = 0) -> None:
        epoch = self._shard.epoch
        request = pb.StandbyRequest(member=member, term=term or self.term, up=up, epoch=epoch)
        if up:
            try:
                await self._dialer.connect(
                    self._map.node_by_id[self._options.node].endpoints, self._clock.boottime_s() + ASK_S
                )
            # no request was sent; kv/replication/primary relies on this certainty
            except Unreachable as error:
                raise NotLeader(f"the supervisor of this node cannot be reached: {error}") from None
        reply = await self._call_keeper(wire.META_STANDBY, request, pb.StandbyReply, 5.0)
        self.update_map(decode_map(reply.map))
