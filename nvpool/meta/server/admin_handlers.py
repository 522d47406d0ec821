"""Handlers for listings, bulk look-ups, status, checks, dumps and loads.

This is the second half of `meta/server/service`, which owns all state used here. Long work runs in steps, so
that other requests get their turn.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from nvpool.core.errors import Busy, InUse, InvalidRequest, NvpoolError, Refused
from nvpool.kv.metrics import measure_engine
from nvpool.meta.admin_jobs import JobReply, Load, dump_step, fsck_step, settle_sums
from nvpool.meta.dump import Dump
from nvpool.meta.fsck.directory_connectivity import climb
from nvpool.meta.fsck.repair import undivided
from nvpool.meta.fsck.walker import Fsck, Mend
from nvpool.meta.operations import queries as lookup_operations
from nvpool.meta.operations.listing import LIST_LIMIT_MAX, STEP_OF_CLIENT, attributes_in_steps, listing
from nvpool.meta.state import records
from nvpool.meta.state.record_locks import LockedRecord
from nvpool.meta.state.shard_identity import has_root, take_identity
from nvpool.metrics import registry as metrics
from nvpool.metrics.exposition import Page
from nvpool.rpc.api import Call
from nvpool.rpc.messages.fsck_sums import pack_bits
from nvpool.rpc.v1 import meta_pb2 as pb

PARTS_PER_BATCH, PARTS_COUNTED_MAX = 100, 1000
_log = logging.getLogger(__name__)


class AdminHandlers:
    """Part of `MetaService` for listings, status, checks, dumps and loads."""

    reason = ""
    """Reason why an operator must look at this service although it serves; part of its status."""

    def _list(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = pb.ListDirRequest.FromString(call.message)
        self._sessions.of(request.session, self._owner(call))
        user = self._user(call)
        shown = user is None or self._users.listed(self._view, user, request)
        self._reply_in_steps(
            call,
            listing(
                self._view,
                request,
                self._clock.wall_ns,
                names_alone=not shown,
                entries_per_step=STEP_OF_CLIENT if self._account(call) else LIST_LIMIT_MAX,
                note=partial(self._users.note_listing, user, request.inode)
                if user is not None and shown
                else None,
            ),
        )

    def _lookup_many(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = pb.LookupManyRequest.FromString(call.message)
        self._sessions.of(request.session, self._owner(call))
        user = self._user(call)
        look_up = (
            partial(
                lookup_operations.lookup_many,
                names_per_step=lookup_operations.LOOKUP_STEP_OF_CLIENT
                if self._account(call)
                else lookup_operations.LOOKUP_STEP,
            )
            if user is None
            else partial(self._users.lookup_many, credentials=user)
        )
        self._reply_in_steps(call, look_up(self._view, request=request, now_ns=self._clock.wall_ns))

    def _getattr_many(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = pb.GetAttrManyRequest.FromString(call.message)
        self._sessions.of(request.session, self._owner(call))
        if (user := self._user(call)) is not None:
            self._reply_in_steps(
                call, self._users.getattr_many(self._view, request, self._clock.wall_ns, user)
            )
            return
        inodes_per_step = STEP_OF_CLIENT if self._account(call) else LIST_LIMIT_MAX
        self._reply_in_steps(
            call, attributes_in_steps(self._view, request, self._clock.wall_ns, inodes_per_step)
        )

    def _parts(self, call: Call) -> None:
        self._counters["requests"] += 1
        request = pb.PartsRequest.FromString(call.message)
        self._sessions.of(request.session, self._owner(call))
        call.reply(lookup_operations.parts(self._view, request).SerializeToString())

    async def _run_parts(self) -> None:
        """Give back stripes of other shards' directories if this shard has no partitions left.

        A shard without partitions leaves the pool as soon as it stores no such stripe.
        """
        while True:
            await asyncio.sleep(self._options.tick_s)
            if self._state != "serving" or not self._view.owners or self._shard in self._view.owners:
                continue
            for key, _ in self._kv.scan(*records.part_range(), PARTS_PER_BATCH):
                try:
                    await self._mend(partial(undivided, number=records.part_of_key(key)[0]))
                except NvpoolError as error:
                    _log.info("a part of a directory cannot be given back yet: %s", error)

    def _account(self, call: Call) -> str:
        """Peer whose steps take turns with those of other peers; "" for a node, which is trusted."""
        return self._callers.of(call.peer).account

    def _reply_in_steps(self, call: Call, steps: Iterator) -> None:
        """Run a generator of reply steps, which yields None after each step but the last, and then the reply.

        The first step runs immediately, unless the peer is not trusted and another step of such a peer has
        run in this iteration of the event loop (rpc/step_queue).
        """
        access, caller = self._view.access, self._view.access.caller
        account = self._account(call)
        if not account or self._steps.try_begin():
            reply = next(steps)
            if reply is not None:
                call.reply(reply.SerializeToString())
                return

        async def go_on() -> None:
            try:
                while True:
                    if account:
                        await self._steps.turn(account)
                    else:
                        await asyncio.sleep(0)
                    if call.cancelled:
                        return
                    access.caller = caller
                    try:
                        found = next(steps)
                    finally:
                        access.caller = None
                    if found is not None:
                        call.reply(found.SerializeToString())
                        return
            except LockedRecord as held:
                await held.wait()
                self.handle(call)

        self._waits.add(call, go_on, lambda: None)

    async def _mend(self, decide: Mend, session: int | None = None) -> None:
        """Make a cross-shard transaction that no client requested as such.

        With a `session`, the leases of all other sessions on the changed inodes are recalled first, as for a
        change of that session.
        """
        coordinator = self._cross_shard.coordinator
        span = coordinator.begin(0)
        try:
            while True:
                draft = await coordinator.decide(
                    span, lambda view, request, now_ns: decide(view, now_ns=now_ns), None
                )
                if not await self._waited(session, draft):
                    break
            effects, decision = coordinator.split(span, draft)
            try:
                self._kv.apply(list(effects.items()), reclaims=True)
            except (Refused, Busy):
                coordinator.not_written(span)
                raise
            coordinator.committed(span, decision)
            if draft.born:
                self._view.next_number += 1
                self._view.inode_count += 1
        finally:
            coordinator.end(span)

    def _names(self, call: Call) -> None:
        call.reply(
            lookup_operations.names(self._view, pb.NamesRequest.FromString(call.message)).SerializeToString()
        )

    def _statfs(self, call: Call) -> None:
        self._sessions.of(pb.StatFsRequest.FromString(call.message).session, self._owner(call))
        call.reply(
            lookup_operations.statfs(
                self._view, self._kv.statistics(), self._options.files_max
            ).SerializeToString()
        )

    def _sync(self, call: Call) -> None:
        session = pb.SyncRequest.FromString(call.message).session
        if session or self._owner(call):  # tools that check a pool run on a node and have no session
            self._sessions.of(session, self._owner(call))
        self._answer_later(call, self._kv.sync, pb.SyncReply().SerializeToString())

    def _collect(self, call: Call) -> None:
        async def run() -> None:
            removed, left = await self._collector.run_once()
            removed += await self._collector.sweep_all()
            call.reply(pb.CollectReply(inodes=removed, left=left).SerializeToString())

        self._waits.add(call, run, lambda: None)

    def _answer(
        self, call: Call, work: Coroutine[Any, Any, JobReply], then: Callable[[], None] | None = None
    ) -> None:
        async def run() -> None:
            answer = await work
            if then is not None:
                then()
            call.reply(answer.message.SerializeToString(), (answer.payload,) if answer.payload else ())

        try:
            self._waits.add(call, run, lambda: None)
        except Busy:
            work.close()
            raise

    def _make_fsck(self, repair: bool, partitions: tuple[int, ...] | None = None) -> Fsck:
        return Fsck(
            self._kv,
            self._view,
            self._sessions,
            self._collector,
            self._cuts.begin,
            self._clock.wall_ns,
            repair,
            partitions,
        )

    def _fsck(self, call: Call) -> None:
        request = pb.FsckRequest.FromString(call.message)
        self._answer(
            call,
            fsck_step(self._runs, request, self._kv, self._view, self._numbers, self._make_fsck, self._mend),
            self._watches.end_all if request.repair else None,
        )

    def _fsck_sums(self, call: Call) -> None:
        request = pb.FsckSumsRequest.FromString(call.message)
        self._answer(
            call,
            settle_sums(request, self._kv, self._make_fsck(request.repair, ()), self._mend),
            self._watches.end_all if request.repair else None,
        )

    def _fsck_climb(self, call: Call) -> None:
        request = pb.FsckClimbRequest.FromString(call.message)
        work = self._make_fsck(False, ())

        async def run() -> JobReply:
            return JobReply(await climb(request, work.tree, self._kv, work.is_here, self._mend))

        self._answer(call, run(), self._watches.end_all if request.loose else None)

    def _take_moment(self, call: Call) -> None:
        request, moment = pb.MomentRequest.FromString(call.message), self._moment
        if request.stage == pb.MomentRequest.QUIET:
            self._answer_later(call, lambda: moment.quiet(request.id), pb.MomentReply().SerializeToString())
            return
        reply = pb.MomentReply()
        if request.stage not in (pb.MomentRequest.TAKE, pb.MomentRequest.END):
            raise InvalidRequest(f"a moment has no stage {request.stage}")
        if request.stage == pb.MomentRequest.TAKE:
            moment.take(request.id)
            self._runs.make_room()
            reply.cursor = self._runs.cursor(
                Dump(self._view, self._shard) if request.dump else self._make_fsck(request.repair)
            )
            reply.partitions = pack_bits(self._ranges.ours())
        else:
            reply.stood = moment.end(request.id)
            self._runs.drop(request.drop)
        call.reply(reply.SerializeToString())

    def _dump(self, call: Call) -> None:
        request = pb.DumpRequest.FromString(call.message)
        answer = dump_step(self._runs, request, self._view, self._shard)
        call.reply(answer.message.SerializeToString(), (answer.payload,) if answer.payload else ())

    def _load(self, call: Call) -> None:
        self._answer(call, self._load_step(pb.LoadRequest.FromString(call.message), bytes(call.payload)))

    async def _load_step(self, request: pb.LoadRequest, payload: bytes) -> JobReply:
        if request.first:
            if self._state == "serving" and (self._view.inode_count > 1 or self._sessions.by_number):
                raise InUse(
                    "metadata can only be loaded into a new pool: this one has files, or clients that are connected; "
                    "make an empty one with: nvpool pool create DIR --drive PATH"
                )
            self._state = "loading"
            self._runs.end_all()
            identity = take_identity(self._kv, self._shard, self._secret, self._map, self._clock.wall_ns())
            self._loading = Load(self._kv, identity, self._view, has_root(self._shard, self._map))
            await self._loading.begin()
        load = self._loading
        if load is None:
            raise InvalidRequest("no load is under way; begin with the first part")
        try:
            await load.take(payload, request.first)
            if request.last:
                await load.end()
        except BaseException:
            self._loading = None  # the records are incomplete; only a load from the beginning completes them
            raise
        if request.last:
            self._loading = None
            self._assemble()
            await self._take_up()
        return JobReply(pb.LoadReply(records=load.records))

    def _status(self, call: Call) -> None:
        call.reply(self.status_reply().SerializeToString())

    def status_reply(self) -> pb.MetaStatusReply:
        """State and counters of the service for META_STATUS."""
        reply = pb.MetaStatusReply(shard=self._shard, state=self._state, pid=os.getpid(), reason=self.reason)
        if self._incarnation:
            reply.inodes = self._view.inode_count
            reply.sessions = len(self._sessions.by_number)
            reply.next_counter = self._view.next_number
            reply.orphans = len(self._collector.orphans)
            reply.to_collect = self._collector.queue_length
            reply.counters.update(self.figures())
        return reply

    def figures(self) -> dict[str, float]:
        """Counters of the service for its status and its metrics."""
        counters = dict(
            self._counters,
            cutting=len(self._view.cutting),
            collected=self._collector.collected,
            open_inodes=len(self._sessions.holders),
            waiting=len(self._waits.tasks),
            waited=self._waits.waited,
            **self._locks.counters(),
            **self._watches.counters(),
            **self._cross_shard.counters(),
            **self._moving.counters(),
            walks=self._runs.under_way(),
            parts=len(self._kv.scan(*records.part_range(), PARTS_COUNTED_MAX)),
        )
        counters.update((f"kv_{name}", value) for name, value in self._kv.statistics().items())
        return counters

    def measure(self, page: Page, *, may_answer: bool = True) -> None:
        """Add the metrics of this shard; none before the service has started.

        `may_answer`: whether the primary lease is valid, if one is needed.
        """
        if not self._incarnation:
            return
        shard, figures = self._shard, self.figures()
        for metric, name in (
            (metrics.META_OPEN, "open_inodes"),
            (metrics.META_LEASES, "watches"),
            (metrics.META_RECALLS, "recalls"),
            (metrics.META_RECALLS_LATE, "recalls_waited_out"),
            (metrics.META_LOCKS, "locks"),
            (metrics.META_LOCK_WAITERS, "lock_waiters"),
            (metrics.META_WAITING, "waiting"),
            (metrics.META_CHANGES, "changes"),
            (metrics.META_REPEATED, "repeated"),
            (metrics.META_REFUSED, "refused"),
            (metrics.META_SPANS, "spans"),
            (metrics.META_COLLECTED, "collected"),
        ):
            page.set(metric, figures[name], shard=shard)
        page.set(metrics.META_SERVING, self._state == "serving" and may_answer, shard=shard)
        page.set(metrics.META_INODES, self._view.inode_count, shard=shard)
        page.set(metrics.META_SESSIONS, len(self._sessions.by_number), shard=shard)
        page.set(metrics.META_ORPHANS, len(self._collector.orphans), shard=shard)
        page.set(metrics.META_TO_COLLECT, self._collector.queue_length, shard=shard)
        measure_engine(self._kv.statistics(), page)
