"""The metadata service of one shard: decide, apply and answer requests.

Each decision is made and applied on one thread without a wait in between, so every change sees all changes
before it. A request is answered inside the call of `handle` unless it must really wait (for a truncation on
the targets, a sync, or free space in the engine); then a task that the service owns answers it. A change is
made exactly once per (session, slot, sequence), however often the client sends it. The transports call
`handle`; `daemons/meta` starts and stops the service. File contents never pass through it.

Reply messages: LOOKUP, GETATTR, SETATTR and OPEN return Entry; LINK, REPORT, SETXATTR and REMOVEXATTR return
AttrReply; RMDIR takes UnlinkRequest; every other method has messages of its own name.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import (
    NvpoolError,
    Refused,
)
from nvpool.core.units import PARTITION_COUNT
from nvpool.kv.api import Kv
from nvpool.meta.admin_jobs import AdminJobs
from nvpool.meta.deferred_replies import DeferredReplies
from nvpool.meta.gc.collector import Collector, partitions_with_remains
from nvpool.meta.gc.truncations import Truncations
from nvpool.meta.migration.ownership import PartitionOwnership
from nvpool.meta.migration.service import MigrationService
from nvpool.meta.migration.shard_context import ShardContext
from nvpool.meta.options import MetaOptions
from nvpool.meta.requests.admin_handlers import AdminHandlers
from nvpool.meta.requests.call_replies import CallReplies
from nvpool.meta.requests.change_handlers import ChangeHandlers
from nvpool.meta.requests.internal_changes import InternalChanges
from nvpool.meta.requests.load_handler import LoadHandler
from nvpool.meta.requests.local_user_permissions import LocalUsers
from nvpool.meta.requests.query_handlers import QueryHandlers
from nvpool.meta.requests.session_handlers import SessionHandlers
from nvpool.meta.requests.shard_parts import ServiceStatus, ShardParts
from nvpool.meta.requests.slot_replays import SlotReplays
from nvpool.meta.requests.trash_handlers import TrashHandlers
from nvpool.meta.requests.volume_handlers import VolumeHandlers
from nvpool.meta.server.request_dispatch import RequestDispatch, refuse_by_state
from nvpool.meta.server.shard_report import ShardReport
from nvpool.meta.sessions.lease_table import LeaseTable
from nvpool.meta.sessions.lock_service import HOLD_BEYOND_GRANTS_S, LockService
from nvpool.meta.sessions.table import Sessions
from nvpool.meta.snapshot_barrier import SnapshotBarrier
from nvpool.meta.state import records
from nvpool.meta.state.append_reservations import AppendOrder
from nvpool.meta.state.id_allocation import Numbers
from nvpool.meta.state.lock_table import LockTable
from nvpool.meta.state.quota import QuotaLedger
from nvpool.meta.state.shard_identity import take_identity
from nvpool.meta.state.transaction import View
from nvpool.meta.store_client import Targets
from nvpool.meta.transactions.service import CrossShardTransactions
from nvpool.meta.volumes.right_revocation import Revocations, TakeRight
from nvpool.metrics.exposition import Page
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import Call
from nvpool.rpc.step_queue import StepQueue
from nvpool.rpc.target_calls import TargetDialer
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.security.volume_keys import PoolKeys

_log = logging.getLogger(__name__)


class MetaService:
    """The metadata service of one shard; its handlers are parts of it."""

    def __init__(
        self,
        kv: Kv,
        *,
        shard: int = 1,
        term: int = 0,
        grant_secret: bytes,
        dialer: TargetDialer | None = None,
        pool_keys: PoolKeys | None = None,
        clock: Clock = SYSTEM_CLOCK,
        options: MetaOptions = MetaOptions(),  # noqa: B008 (immutable)
        take_right: TakeRight | None = None,
        callers: Callers | None = None,
    ) -> None:
        """`take_right`: as in `Revocations`."""
        self._kv = kv
        self._shard = shard
        self._term = term
        self._secret = grant_secret
        self._pool_keys = pool_keys or PoolKeys()
        self._callers = callers or Callers()
        self._clock = clock
        self._options = options
        self.status = ServiceStatus()
        # last check of the leases; if long ago, this process stood still and heard no client
        self._looked_s = clock.boottime_s()
        self._sessions = Sessions(kv, options.session_lease_s, shard, options, on_free=self._inode_freed)
        self._users = LocalUsers(self._sessions)
        self._numbers = Numbers(kv)
        self._runs = AdminJobs(clock)
        self._targets = Targets(dialer, clock, grant_secret, shard)
        self._steps = StepQueue()
        self._waits = DeferredReplies(clock, f"shard {shard}", self._die, self._callers.operators)
        self._revocations = Revocations(clock, options, take_right, self.status.map_epoch)
        self._background: set[asyncio.Task[Any]] = set()
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that fails when the service cannot continue (a fenced engine, a failed background task);
        the daemon exits."""
        self.died.add_done_callback(lambda died: died.cancelled() or died.exception())
        self.routes: dict[int, Callable[[Call], None]] = {wire.META_STATUS: self._reply_status}
        """Handlers by method; all of them from `start` on."""
        # made by `start`, and again after a load
        self.parts: ShardParts
        self.internal_changes: InternalChanges
        self.session_handlers: SessionHandlers
        self.volume_handlers: VolumeHandlers
        self.trash_handlers: TrashHandlers
        self.moving: MigrationService
        self._replies: CallReplies
        self.slot_replays: SlotReplays
        self._report: ShardReport
        self.dispatch: RequestDispatch | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Prepare the shard and serve requests.

        An empty shard gets its first records (the root, if the root's partition is its own). Then numbers are
        reserved, and sessions, orphans and intents are restored. A shard with an unfinished load serves
        nothing but META_LOAD and META_STATUS.

        WrongFormat: the records belong to another shard.
        """
        identity = self._assemble()
        if identity.loading:
            self.status.state = "loading"
        else:
            await self._take_up()
        for work in (
            self._run_leases(),
            self._run_holds(),
            self._run_stripe_returns(),
            self._run_collector(),
            self._run_sweeps(),
            self._run_removals(),
        ):
            self._own(work)

    def _assemble(self) -> records.ShardIdentity:
        """Make all parts that depend on the identity of the shard."""
        status, sessions = self.status, self._sessions
        identity = take_identity(self._kv, self._shard, self._secret, status.pool_map, self._clock.wall_ns())
        lock_table = LockTable(self._clock, self._options.grant_s + HOLD_BEYOND_GRANTS_S, sessions.client_of)
        incarnation = int.from_bytes(self._clock.secret(8), "big") | 1
        watches = LeaseTable(
            self._clock,
            incarnation,
            min(self._options.watch_s, self._options.session_lease_s),
            self._options.lease_s,
            status.map_epoch,
        )
        rooms, appends = QuotaLedger(self._clock, self._options.watch_s), AppendOrder(self._clock)
        view = View(
            self._kv,
            identity,
            self._secret,
            self._options.grant_s,
            lock_table,
            pool_keys=self._pool_keys,
            rooms=rooms,
            appends=appends,
            lease_ms=watches.lease_ms,
            register_leases=watches.issue_leases,
            register_lease=watches.issue_lease,
            watching=watches.watching,
            is_open=lambda inode: inode in sessions.holders,
            recall_delegation=watches.recall_delegation,
        )
        cuts = Truncations(self._kv, view, self._targets, self._own)
        collector = Collector(
            self._kv,
            view,
            self._targets,
            self._clock,
            self._options.linger_s,
            lambda inode: inode in sessions.holders or inode in lock_table.files,
        )
        if status.pool_map is not None:
            view.use_map(status.pool_map)
        ranges = PartitionOwnership(self._kv, view)
        locks = LockService(self._kv, lock_table, self._clock, ranges.serves)
        cross_shard = CrossShardTransactions(
            self._shard,
            incarnation,
            self._kv,
            view,
            self._numbers,
            self._targets,
            self._clock,
            self._secret,
            self._own,
            self._waits,
            ranges,
            lambda identity, inodes: watches.recall(sessions.number_of(identity), inodes),
            collector.add,
        )
        if status.pool_map is not None:
            cross_shard.use_map(status.pool_map)
        self.parts = ShardParts(
            shard=self._shard,
            secret=self._secret,
            options=self._options,
            clock=self._clock,
            callers=self._callers,
            status=status,
            kv=self._kv,
            sessions=sessions,
            users=self._users,
            numbers=self._numbers,
            runs=self._runs,
            targets=self._targets,
            waits=self._waits,
            revocations=self._revocations,
            view=view,
            rooms=rooms,
            appends=appends,
            locks=locks,
            cuts=cuts,
            collector=collector,
            watches=watches,
            ranges=ranges,
            cross_shard=cross_shard,
            moment=SnapshotBarrier(cross_shard.coordinator.wait_settled),
        )
        self._make_handlers(self.parts)
        status.incarnation = incarnation
        return identity

    def _inode_freed(self, inode: int) -> None:
        """Called by the sessions, which outlive the collector: a load makes all parts again."""
        self.parts.watches.end_delegation(inode)
        self.parts.collector.closed(inode)

    def _make_handlers(self, parts: ShardParts) -> None:
        def handle(call: Call) -> None:
            self.handle(call)

        replies = CallReplies(handle, self._waits, self._callers, self._steps, parts.view.access)
        self.internal_changes = InternalChanges(parts)
        self.volume_handlers = VolumeHandlers(parts, replies, self.internal_changes)
        self.trash_handlers = TrashHandlers(parts, replies, self.internal_changes)
        self.moving = MigrationService(
            ShardContext(
                parts.shard,
                parts.kv,
                parts.view,
                parts.ranges,
                parts.numbers,
                parts.sessions,
                parts.locks,
                parts.appends,
                parts.collector,
                parts.cuts,
                parts.watches,
                parts.clock,
                self.update_map,
                self.volume_handlers.take_volumes,
                self.volume_handlers.forget_volumes,
                parts.cross_shard.holds.quiet,
            ),
            parts.targets.dialer,
            parts.clock,
            parts.secret,
            parts.targets.authority,
            parts.waits,
            self._term,
        )
        self.session_handlers = SessionHandlers(parts, replies, self.moving.bring_sessions)
        self._report = ShardReport(parts, self.moving)
        self._replies = replies
        self.slot_replays = SlotReplays(parts, replies)
        self.routes = {
            wire.META_STATUS: self._reply_status,
            **self.session_handlers.routes(),
            **QueryHandlers(parts, replies).routes(),
            **AdminHandlers(parts, replies, self.internal_changes).routes(),
            **LoadHandler(parts, replies, self._begin_again).routes(),
            **self.volume_handlers.routes(),
            **self.trash_handlers.routes(),
            **dict.fromkeys(CrossShardTransactions.METHODS, parts.cross_shard.handle),
            **dict.fromkeys(MigrationService.METHODS, self.moving.handle),
            **ChangeHandlers(parts, replies, self.slot_replays, self.internal_changes, handle).routes(),
        }
        self.dispatch = RequestDispatch(
            parts.callers,
            parts.status,
            parts.clock,
            self._die,
            replies.retry,
            parts.view.access,
            parts.view,
            self.routes,
        )

    async def _begin_again(self) -> None:
        """Serve the records of a load that is complete."""
        self._assemble()
        await self._take_up()

    async def _take_up(self) -> None:
        """Rebuild the state in memory from the stored records."""
        parts = self.parts
        parts.view.next_number = await self._numbers.begin()
        raw = self._kv.get(records.COUNTS_KEY)
        parts.view.inode_count = records.decode_counts(raw) if raw is not None else 0
        self._sessions.load(self._clock.boottime_s())
        parts.watches.after_restart(
            number
            for number, session in self._sessions.by_number.items()
            # migrated sessions have no leases here
            if session.watches and number >> 48 == self._shard
        )
        if self._sessions.by_number:
            parts.collector.grace_until_s = self._clock.boottime_s() + self._options.session_lease_s
        self.moving.begin(self.status.pool_map)
        remains = [
            partition
            for partition in await partitions_with_remains(self._kv)
            if parts.ranges.serves(partition)
        ]
        self.volume_handlers.take_volumes(
            filter(parts.ranges.serves, range(PARTITION_COUNT)), bool(self._sessions.by_number)
        )
        parts.collector.load(remains)
        parts.cuts.resume(remains)
        parts.locks.load(remains, self._sessions.by_number)
        parts.cross_shard.load()
        await self.moving.destination.run_once()
        for work in self.moving.run():
            self._own(work)
        self.status.state = "serving"

    def update_map(self, pool_map: PoolMap) -> None:
        """Use a newer pool map; an older one is ignored."""
        if self.status.pool_map is not None and pool_map.epoch <= self.status.pool_map.epoch:
            return
        self.status.pool_map = pool_map
        self._targets.use_map(pool_map)
        if pool_map.members:
            self._sessions.expire_removed_members(pool_map.members)
        if self.status.incarnation:
            self.parts.view.use_map(pool_map)
            self.parts.cross_shard.use_map(pool_map)
            self.moving.use_map(pool_map)

    def begin_drain(self) -> None:
        """Answer all requests that wait for other requests.

        Other requests are no longer accepted, so the wait would last all the drain.
        """
        self._waits.begin_drain()
        if self.status.incarnation:
            self.parts.watches.close()
            self.parts.locks.close()

    async def close(self, drain_s: float = 0.0) -> None:
        """Accept no new requests, wait up to `drain_s` seconds for deferred replies, then cancel them.

        The engine stays open.
        """
        self.status.state = "draining"
        self._runs.end_all()
        if self.status.incarnation:  # 0 if the service was never started
            self.parts.watches.close()
        if self._waits.tasks and drain_s > 0:
            await asyncio.wait(self._waits.tasks, timeout=drain_s)
        # a deferred reply may leave work to a background task
        for tasks in (self._waits.tasks, self._background):
            ending = list(tasks)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a background task. If the task fails, the whole service stops, loudly."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        if self.status.state != "fenced":
            _log.critical(
                "the metadata service of shard %d stops serving: %s", self._shard, error, exc_info=error
            )
            self.status.state = "fenced"
            if not self.died.done():
                self.died.set_exception(error)

    async def _run_leases(self) -> None:
        while True:
            await asyncio.sleep(self._options.tick_s)
            now_s = self._clock.boottime_s()
            stood_still_s = max(0.0, now_s - self._looked_s - 2 * self._options.tick_s)
            self._looked_s = now_s
            self._sessions.lengthen(stood_still_s)
            self.parts.collector.grace_until_s += stood_still_s
            if self.status.state == "serving":
                await self.session_handlers.end_leases()

    async def _run_stripe_returns(self) -> None:
        """Give back stripes of other shards' directories if this shard has no partitions left.

        A shard without partitions leaves the pool as soon as it stores no such stripe.
        """
        while True:
            await asyncio.sleep(self._options.tick_s)
            owners = self.parts.view.owners
            if self.status.state == "serving" and owners and self._shard not in owners:
                await self.internal_changes.return_stripes()

    async def _run_removals(self) -> None:
        while True:
            await asyncio.sleep(self._options.tick_s / 4)
            if self.status.state == "serving":
                await self.volume_handlers.remove_more()
                await self.trash_handlers.purge_more()

    async def _run_holds(self) -> None:
        """Resolve locks of cross-shard transactions; not in `_run_leases`, because this may wait for a silent
        shard."""
        while True:
            await asyncio.sleep(self._options.tick_s)
            if self.status.state == "serving":
                await self.parts.cross_shard.run_once()

    async def _run_collector(self) -> None:
        while True:
            await asyncio.sleep(self._options.tick_s)
            if (
                self.status.state == "serving"
                and self._clock.boottime_s() - self._looked_s < 3 * self._options.tick_s
            ):
                await self.parts.collector.run_once()

    async def _run_sweeps(self) -> None:
        while True:
            await asyncio.sleep(self._options.sweep_s)
            if self.status.state == "serving":
                await self.parts.collector.sweep_all()

    async def end_leases(self) -> None:
        """End expired sessions; see `SessionHandlers.end_leases`."""
        await self.session_handlers.end_leases()

    async def remove_more(self) -> int:
        """Remove some contents of removed volumes; see `VolumeHandlers.remove_more`."""
        return await self.volume_handlers.remove_more()

    async def purge_more(self) -> int:
        """Remove expired entries from the trashes; see `TrashHandlers.purge_more`."""
        return await self.trash_handlers.purge_more()

    async def run_once(self) -> tuple[int, int]:
        """One round of the background work, for tests: (inodes whose chunks were removed, number left)."""
        await self.session_handlers.end_leases()
        return await self.parts.collector.run_once()

    def _reply_status(self, call: Call) -> None:
        call.reply(self.status_reply().SerializeToString())

    def status_reply(self) -> pb.MetaStatusReply:
        """State and counters of the service for META_STATUS."""
        status = self.status
        reply = pb.MetaStatusReply(
            shard=self._shard, state=status.state, pid=os.getpid(), reason=status.reason
        )
        if status.incarnation:
            self._report.fill(reply)
        return reply

    def figures(self) -> dict[str, float]:
        """Counters of the service for its status and its metrics."""
        return self._report.figures()

    def measure(self, page: Page, *, may_answer: bool = True) -> None:
        """Add the metrics of this shard; none before the service has started.

        `may_answer`: whether the primary lease is valid, if one is needed.
        """
        if self.status.incarnation:
            self._report.measure(page, may_answer=may_answer)

    # -- requests ----------------------------------------------------------------------------------------------------

    def handle(self, call: Call) -> None:
        """Answer the call immediately, or keep it and answer later."""
        if self.dispatch is not None:
            self.dispatch.handle(call)
            return
        try:  # the other handlers are made by `start`
            self._callers.check(call)
            if call.method == wire.META_STATUS:
                self._reply_status(call)
            else:
                refuse_by_state(self.status.state, self._shard, call.method)
        except NvpoolError as error:
            if isinstance(error, Refused):
                self.status.counters["refused"] += 1
            call.fail(error)
        except Exception as error:
            call.fail(error)


__all__ = ["MetaOptions", "MetaService"]
