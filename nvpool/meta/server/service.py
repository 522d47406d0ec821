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
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import (
    Busy,
    Draining,
    Fenced,
    InvalidRequest,
    NotSupported,
    NvpoolError,
    Refused,
    WrongShard,
)
from nvpool.core.ids import partition_of
from nvpool.core.units import PARTITION_COUNT, SLOTS_PER_SESSION
from nvpool.kv.api import Kv
from nvpool.meta.admin_jobs import AdminJobs, Load
from nvpool.meta.deferred_replies import DeferredReplies
from nvpool.meta.gc.collector import Collector, partitions_with_remains
from nvpool.meta.gc.truncations import Truncations
from nvpool.meta.migration.ownership import PartitionOwnership
from nvpool.meta.migration.service import MigrationService
from nvpool.meta.migration.shard_context import ShardContext
from nvpool.meta.options import MetaOptions
from nvpool.meta.server.admin_handlers import AdminHandlers
from nvpool.meta.server.dispatch_table import CHANGES, CROSS_SHARD_CHANGES, QUERIES
from nvpool.meta.server.fast_path import open_fast_path
from nvpool.meta.server.local_user_permissions import LocalUsers, check_shards
from nvpool.meta.sessions.handlers import SessionHandlers
from nvpool.meta.sessions.lease_table import LeaseTable
from nvpool.meta.sessions.lock_service import HOLD_BEYOND_GRANTS_S, LockService
from nvpool.meta.sessions.table import Session, Sessions, Slot, mark_of
from nvpool.meta.snapshot_barrier import SnapshotBarrier
from nvpool.meta.state import records
from nvpool.meta.state.append_reservations import AppendInProgress, AppendOrder
from nvpool.meta.state.id_allocation import Numbers
from nvpool.meta.state.lock_table import LockTable
from nvpool.meta.state.quota import QuotaLedger
from nvpool.meta.state.record_locks import LockedRecord
from nvpool.meta.state.session_records import encode_slot
from nvpool.meta.state.shard_identity import take_identity
from nvpool.meta.state.striped_dirs import StripeView
from nvpool.meta.state.transaction import Decision, Draft, TruncationInProgress, View, fill_attr
from nvpool.meta.store_client import Targets
from nvpool.meta.transactions.service import CrossShardTransactions
from nvpool.meta.volumes.handlers import VolumeHandlers
from nvpool.meta.volumes.removal import Removal
from nvpool.meta.volumes.right_revocation import Revocations, TakeRight
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.partitions import partition_of_name
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import Call
from nvpool.rpc.step_queue import StepQueue
from nvpool.rpc.target_calls import TargetDialer
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.security.volume_keys import PoolKeys

_log = logging.getLogger(__name__)


class MetaService(AdminHandlers, SessionHandlers, VolumeHandlers):
    """The metadata service of one shard; its other parts are in the base classes."""

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
        self._map: PoolMap | None = None
        self._state = "starting"
        self._incarnation = 0
        # last check of the leases; if long ago, this process stood still and heard no client
        self._looked_s = clock.boottime_s()
        self._sessions = Sessions(kv, options.session_lease_s, shard, options)
        self._users = LocalUsers(self._sessions)
        self._numbers = Numbers(kv)
        self._runs = AdminJobs(clock)
        self._loading: Load | None = None
        self._targets = Targets(dialer, clock, grant_secret, shard)
        self._steps = StepQueue()
        self._waits = DeferredReplies(clock, f"shard {shard}", self._die, self._callers.operators)
        self._revocations = Revocations(
            clock, options, take_right, lambda: self._map.epoch if self._map is not None else 0
        )
        self._removals: dict[int, Removal] = {}
        self._purged_up_to: dict[int, int] = {}
        self._attached_by: dict[int, dict[bytes, str]] = {}
        """By volume and holder: the member that has added the attachment; "" is a node."""
        self._background: set[asyncio.Task] = set()
        self._counters: dict[str, float] = {"requests": 0, "changes": 0, "repeated": 0, "refused": 0}
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that fails when the service cannot continue (a fenced engine, a failed background task);
        the daemon exits."""
        self.died.add_done_callback(lambda died: died.cancelled() or died.exception())
        self._routes: dict[int, Callable[[Call], None]] = self._make_routes()

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
            self._state = "loading"
        else:
            await self._take_up()
        for work in (
            self._run_leases(),
            self._run_holds(),
            self._run_parts(),
            self._run_collector(),
            self._run_sweeps(),
            self._run_removals(),
        ):
            self._own(work)

    def _assemble(self) -> records.ShardIdentity:
        identity = take_identity(self._kv, self._shard, self._secret, self._map, self._clock.wall_ns())
        locks = LockTable(self._clock, self._options.grant_s + HOLD_BEYOND_GRANTS_S)
        locks.client_of = self._sessions.client_of
        self._locks = LockService(self._kv, locks, self._clock)
        self._view = View(self._kv, identity, self._secret, self._options.grant_s, locks)
        self._view.is_open = lambda inode: inode in self._sessions.holders
        self._view.pool_keys = self._pool_keys
        self._view.rooms, self._view.appends = (
            QuotaLedger(self._clock, self._options.watch_s),
            AppendOrder(self._clock),
        )
        self._removals.clear()
        self._cuts = Truncations(self._kv, self._view, self._targets, self._own)
        self._collector = Collector(
            self._kv,
            self._view,
            self._targets,
            self._clock,
            self._options.linger_s,
            lambda inode: inode in self._sessions.holders or inode in locks.files,
        )
        self._sessions.on_free = self._collector.closed
        if self._map is not None:
            self._view.use_map(self._map)
        self._incarnation = int.from_bytes(self._clock.secret(8), "big") | 1
        self._watches = LeaseTable(
            self._clock,
            self._incarnation,
            min(self._options.watch_s, self._options.session_lease_s),
            self._options.lease_s,
        )
        self._watches.map_epoch = lambda: self._map.epoch if self._map is not None else 0
        self._view.promise, self._view.lease_ms = self._watches.issue_leases, self._watches.lease_ms
        self._ranges = PartitionOwnership(self._kv, self._view)
        self._locks.serves = self._ranges.serves
        self._cross_shard = CrossShardTransactions(
            self._shard,
            self._incarnation,
            self._kv,
            self._view,
            self._numbers,
            self._targets,
            self._clock,
            self._secret,
            self._own,
            self._waits,
            self._ranges,
            self._recall,
            self._collector.add,
        )
        self._ranges.changed = self._cross_shard.holds.look_through
        self._moment = SnapshotBarrier(self._cross_shard.coordinator.wait_settled)
        if self._map is not None:
            self._cross_shard.use_map(self._map)
        self._moving = MigrationService(
            ShardContext(
                self._shard,
                self._kv,
                self._view,
                self._ranges,
                self._numbers,
                self._sessions,
                self._locks,
                self._collector,
                self._cuts,
                self._watches,
                self._clock,
                self.update_map,
                self.take_volumes,
                self.forget_volumes,
                self._cross_shard.holds.quiet,
            ),
            self._targets.dialer,
            self._clock,
            self._secret,
            self._targets.authority,
            self._waits,
            self._term,
        )
        self.fast_path = open_fast_path(self)
        return identity

    async def _take_up(self) -> None:
        """Rebuild the state in memory from the stored records."""
        self._view.next_number = await self._numbers.begin()
        raw = self._kv.get(records.COUNTS_KEY)
        self._view.inode_count = records.decode_counts(raw) if raw is not None else 0
        self._sessions.load(self._clock.boottime_s())
        self._watches.after_restart(
            number
            for number, session in self._sessions.by_number.items()
            # migrated sessions have no leases here
            if session.watches and number >> 48 == self._shard
        )
        if self._sessions.by_number:
            self._collector.grace_until_s = self._clock.boottime_s() + self._options.session_lease_s
        self._moving.begin(self._map)
        remains = [
            partition
            for partition in await partitions_with_remains(self._kv)
            if self._ranges.serves(partition)
        ]
        self.take_volumes(filter(self._ranges.serves, range(PARTITION_COUNT)), bool(self._sessions.by_number))
        self._collector.load(remains)
        self._cuts.resume(remains)
        self._locks.load(remains, self._sessions.by_number)
        self._cross_shard.load()
        await self._moving.destination.run_once()
        for work in self._moving.run():
            self._own(work)
        self._state = "serving"

    def update_map(self, pool_map: PoolMap) -> None:
        """Use a newer pool map; an older one is ignored."""
        if self._map is not None and pool_map.epoch <= self._map.epoch:
            return
        self._map = pool_map
        self._targets.use_map(pool_map)
        if pool_map.members:
            self._sessions.expire_removed_members(pool_map.members)
        if self._incarnation:
            self._view.use_map(pool_map)
            self._cross_shard.use_map(pool_map)
            self._moving.use_map(pool_map)

    async def close(self, drain_s: float = 0.0) -> None:
        """Accept no new requests, wait up to `drain_s` seconds for deferred replies, then cancel them.

        The engine stays open.
        """
        self._state = "draining"
        self._runs.end_all()
        if self._incarnation:  # 0 if the service was never started
            self._watches.close()
        if self._waits.tasks and drain_s > 0:
            await asyncio.wait(self._waits.tasks, timeout=drain_s)
        # a deferred reply may leave work to a background task
        for tasks in (self._waits.tasks, self._background):
            ending = list(tasks)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def _own(self, work: Coroutine) -> asyncio.Task:
        """Start a background task. If the task fails, the whole service stops, loudly."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._die(task.exception())

    def _die(self, error: BaseException) -> None:
        if self._state != "fenced":
            _log.critical(
                "the metadata service of shard %d stops serving: %s", self._shard, error, exc_info=error
            )
            self._state = "fenced"
            if not self.died.done():
                self.died.set_exception(error)

    def change_failed(self, session: Session, slot: Slot, sequence: int, mark: int, error: Exception) -> None:
        """Record that the engine did not accept a change of the fast path, as `handle` does for others."""
        if isinstance(error, Refused):
            self._counters["refused"] += 1
            self._keep_refusal(session, slot, sequence, mark, error)
        elif isinstance(error, Fenced):
            self._die(error)

    async def _run_leases(self) -> None:
        while True:
            await asyncio.sleep(self._options.tick_s)
            now_s = self._clock.boottime_s()
            stood_still_s = max(0.0, now_s - self._looked_s - 2 * self._options.tick_s)
            self._looked_s = now_s
            self._sessions.lengthen(stood_still_s)
            self._collector.grace_until_s += stood_still_s
            if self._state == "serving":
                await self.end_leases()

    async def _run_holds(self) -> None:
        """Resolve locks of cross-shard transactions; not in `_run_leases`, because this may wait for a silent
        shard."""
        while True:
            await asyncio.sleep(self._options.tick_s)
            if self._state == "serving":
                await self._cross_shard.run_once()

    async def _run_collector(self) -> None:
        while True:
            await asyncio.sleep(self._options.tick_s)
            if (
                self._state == "serving"
                and self._clock.boottime_s() - self._looked_s < 3 * self._options.tick_s
            ):
                await self._collector.run_once()

    async def _run_sweeps(self) -> None:
        while True:
            await asyncio.sleep(self._options.sweep_s)
            if self._state == "serving":
                await self._collector.sweep_all()

    async def run_once(self) -> tuple[int, int]:
        """One round of the background work, for tests: (inodes whose chunks were removed, number left)."""
        await self.end_leases()
        return await self._collector.run_once()

    # -- requests ----------------------------------------------------------------------------------------------------

    def handle(self, call: Call) -> None:
        """Answer the call immediately, or keep it and answer later."""
        access = self._view.access if self._incarnation else None
        try:
            caller = self._callers.check(call)
            if access is not None and access.restricted:
                access.caller = caller.owner
            if caller.user is not None and self._state == "serving":
                check_shards(self._view)
            route = self._routes.get(call.method)
            if route is None:
                raise NotSupported(f"a metadata service does not answer method {call.method}")
            if self._state != "serving" and call.method not in _ALWAYS:
                self._refuse_by_state(call.method)
            try:
                route(call)
            except LockedRecord as held:
                self._later(call, held.wait)
        except NvpoolError as error:
            if isinstance(error, Refused):
                self._counters["refused"] += 1
            elif isinstance(error, Fenced):
                self._die(error)
            call.fail(error)
        except DecodeError as error:
            call.fail(InvalidRequest(f"the message of method {call.method} cannot be read: {error}"))
        except Exception as error:
            call.fail(error)
        finally:
            if access is not None:
                access.caller = None

    def _refuse_by_state(self, method: int) -> None:
        if self._state == "fenced":
            raise Fenced(f"shard {self._shard} has stopped serving; it will be started again")
        if self._state != "loading" or method != wire.META_LOAD:
            raise Draining(f"shard {self._shard} is {self._state}")

    def _make_routes(self) -> dict[int, Callable[[Call], None]]:
        routes: dict[int, Callable[[Call], None]] = {
            wire.META_OPEN_SESSION: self._open_session,
            wire.META_RENEW_SESSION: self._renew_session,
            wire.META_CLOSE_SESSION: self._close_session,
            wire.META_RELEASE: self._release,
            wire.META_LOCK_WAIT: self._wait_for_lock,
            wire.META_WATCH: self._watch,
            wire.META_SESSIONS: self._owners,
            wire.META_LIST: self._list,
            wire.META_LOOKUP_MANY: self._lookup_many,
            wire.META_GETATTR_MANY: self._getattr_many,
            wire.META_PARTS: self._parts,
            wire.META_STATFS: self._statfs,
            wire.META_SYNC: self._sync,
            wire.META_STATUS: self._status,
            wire.META_COLLECT: self._collect,
            wire.META_NAMES: self._names,
            wire.META_FSCK: self._fsck,
            wire.META_FSCK_SUMS: self._fsck_sums,
            wire.META_FSCK_CLIMB: self._fsck_climb,
            wire.META_MOMENT: self._take_moment,
            wire.META_VOLUMES: self._volumes,
            wire.META_VOLUME: self._volume,
            wire.META_VOLUME_ROOM: self._volume_room,
            wire.META_TRASH: self._trash,
            wire.META_DUMP: self._dump,
            wire.META_LOAD: self._load,
            **dict.fromkeys(CrossShardTransactions.METHODS, lambda call: self._cross_shard.handle(call)),
            **dict.fromkeys(MigrationService.METHODS, lambda call: self._moving.handle(call)),
        }
        routes.update(
            (method, self._change_route(*route, CROSS_SHARD_CHANGES.get(method)))
            for method, route in CHANGES.items()
        )
        routes.update((method, self._query_route(*route)) for method, route in QUERIES.items())
        return routes

    def _query_route(self, request_class: Any, decide: Decision) -> Callable[[Call], None]:
        parse = request_class.FromString

        def answer(call: Call) -> None:
            self._counters["requests"] += 1
            request = parse(call.message)
            self._sessions.of(request.session, self._owner(call))
            try:
                draft = self._decision(call, decide)(self._view, request, self._clock.wall_ns())
            except TruncationInProgress as wait:
                self._wait_for(call, wait)
                return
            if draft.dirty:
                if self._kv.full:
                    self._later(call, self._kv.room)
                    return
                self._kv.apply(list(draft.finish().items()), reclaims=True)
            call.reply(draft.reply.SerializeToString())

        return answer

    def _change_route(
        self, request_class: Any, decide: Decision, home: Callable[[Any], int] | None
    ) -> Callable[[Call], None]:
        """Route of a change.

        `home(request)` is the inode whose shard coordinates a change that may need other shards. Without
        `home` the change concerns one inode alone.
        """
        parse = request_class.FromString

        def answer(call: Call) -> None:
            self._counters["requests"] += 1
            request = parse(call.message)
            change = request.change
            session = self._sessions.of(change.session, self._owner(call))
            index, sequence, mark = change.slot, change.sequence, mark_of(call.method, request, call.message)
            slot = session.slots[index] if index < SLOTS_PER_SESSION else None
            if slot is None:
                slot = self._sessions.slot(session, index)
            if sequence <= slot.sequence:
                self._repeat(call, request, session, slot, sequence, mark)
                return
            if self._kv.full:
                self._later(call, self._kv.room)
                return
            if self._view.next_number >= self._numbers.bounds.inode:
                self._later(call, self._numbers.more)
                return
            if self._moment.changes_wait:
                self._later(call, self._moment.over)
                return
            try:
                # From here to the end of _commit nothing may wait: the decision holds only as long as nothing changes.
                draft = self._decision(call, decide)(self._view, request, self._clock.wall_ns())
                wait = self._watches.conflict(session.number, draft)
                if wait is not None:
                    self._later(call, wait)  # the decision is discarded and made again after the wait
                    return
                self._commit(call, draft, session, slot, index, sequence, mark)
            except (TruncationInProgress, AppendInProgress) as wait:
                self._wait_for(call, wait)
            except WrongShard as error:
                if home is None or self._view.is_elsewhere(self._home_partition(request, home)):
                    # never made here, even if the partition comes back
                    self._keep_refusal(session, slot, sequence, mark, error)
                    raise
                self._span(call, decide, request, session, slot, index, sequence, mark)
            except Refused as error:
                self._keep_refusal(session, slot, sequence, mark, error)
                raise

        return answer

    def _decision(self, call: Call, decide: Decision) -> Decision:
        user = self._user(call)
        return decide if user is None else self._users.decision(call.method, user, decide)

    def _home_partition(self, request: Any, home: Callable[[Any], int]) -> int:
        """Partition whose shard coordinates the change."""
        number = home(request)
        if getattr(request, "spread", False):
            return partition_of_name(number, True, self._view.name_hash(number, request.name))
        return partition_of(number)

    def _span(
        self,
        call: Call,
        decide: Decision,
        request: Any,
        session: Session,
        slot: Slot,
        index: int,
        sequence: int,
        mark: int,
    ) -> None:
        """Carry out a cross-shard transaction.

        Each slot has at most one: a replay waits for the first to end.
        """
        under_way = self._cross_shard.under_way.get((session.number, index))
        if under_way is not None:
            self._later(call, lambda: asyncio.wait([under_way]))
            return

        async def carry_out() -> None:
            coordinator, access = self._cross_shard.coordinator, self._view.access
            span = coordinator.begin(session.identity)

            def decide_for(*known: Any) -> Draft:
                access.caller = self._owner(call)
                return decide(*known)

            try:
                while True:
                    draft = await coordinator.decide(span, decide_for, request)
                    # From here to the end of _commit nothing may wait, as in `answer`.
                    if self._sessions.get(session.number) is not session or sequence <= slot.sequence:
                        self.handle(call)  # decided meanwhile through records of our own shard
                        return
                    if not await self._waited(session.number, draft):
                        effects, decision = coordinator.split(span, draft)
                        try:
                            self._commit(
                                call,
                                draft,
                                session,
                                slot,
                                index,
                                sequence,
                                mark,
                                effects,
                                partial(coordinator.committed, span, decision),
                            )
                        except (Refused, Busy):
                            coordinator.not_written(span)
                            raise
                        return
            except Refused as error:
                if sequence > slot.sequence:
                    self._keep_refusal(session, slot, sequence, mark, error)
                raise
            finally:
                access.caller = None
                coordinator.end(span)

        self._cross_shard.begin(call, (session.number, index), carry_out)

    def _recall(self, identity: int, inodes: list[int]) -> Callable[[], Awaitable] | None:
        """`LeaseTable.recall` for a change that another shard decides on behalf of this client."""
        return self._watches.recall(self._sessions.number_of(identity), inodes)

    def _commit(
        self,
        call: Call,
        draft: Draft,
        session: Session,
        slot: Slot,
        index: int,
        sequence: int,
        mark: int,
        effects: dict[bytes, bytes | None] | None = None,
        committed: Callable[[], None] | None = None,
    ) -> None:
        """Apply the draft with its slot record, update memory, and answer now or when allowed.

        `effects`: this shard's effects if other shards have some too; `committed` is called when they are
        applied.
        """
        answer = draft.reply.SerializeToString()
        waits_for = draft.intent[0] if draft.intent is not None else 0
        if draft.opened:
            self._sessions.check_room(session)
        if effects is None:
            effects = draft.finish()
        if effects:
            effects[records.slot_key(session.number, index)] = encode_slot(sequence, waits_for, answer, mark)
            self._kv.apply(list(effects.items()), reclaims=not draft.adds)
            self._counters["changes"] += 1
            if committed is not None:
                committed()
        slot.sequence, slot.waits_for, slot.answer, slot.error, slot.restored = (
            sequence,
            waits_for,
            answer,
            None,
            False,
        )
        slot.mark = mark
        given_up = slot.take_awaited() if slot.awaited else 0
        slot.opened = draft.opened
        if draft.born:
            self._view.next_number += 1
            self._view.inode_count += 1
        if draft.opened:
            self._sessions.open(session, draft.opened)
        if given_up:
            self._sessions.close(session, given_up)
        if draft.closed:
            self._sessions.release(session, (draft.closed,))
        for orphan in draft.orphans:
            self._collector.add(orphan)
        for account in (draft.accounts or {}).values():
            if account.grown is not None:
                self._view.rooms.spend(account.number, *account.grown)
        if draft.then is not None:
            draft.then()
        if draft.parent is not None or draft.opened or draft.linked:
            beside = type(draft.reply)()
            if draft.parent is not None and not isinstance(draft.parent, StripeView):
                fill_attr(beside.parent, draft.parent)
            leased = draft.opened or draft.linked or (draft.born and draft.reply.entry.attr.inode)
            if leased:
                entry = beside.entry if isinstance(beside, pb.CreateReply) else beside
                entry.lease_ms = self._view.issue_lease(session.number, draft.inodes[leased])
            # concatenated protobuf messages decode as one merged message
            answer += beside.SerializeToString()
        if draft.intent is not None:
            cut = asyncio.shield(self._cuts.begin(*draft.intent))
            self._answer_later(call, lambda: cut, answer)
        elif draft.sync or (effects and self._kv.sync_before_answer):
            self._answer_later(call, partial(self._kv.sync, self._kv.sequence), answer)
        else:
            call.reply(answer)

    # -- waiting -----------------------------------------------------------------------------------------------------

    async def _waited(self, session: int | None, draft: Draft) -> bool:
        """Whether a cross-shard transaction had to wait and must be decided again.

        If False, this has returned without waiting, so the decision is still valid.
        """
        if self._kv.full:
            await self._kv.room()
        elif self._view.next_number >= self._numbers.bounds.inode:
            await self._numbers.more()
        elif self._moment.spans_wait:
            await self._moment.over()
        elif session is not None and (wait := self._watches.conflict(session, draft)) is not None:
            await wait()
        else:
            return False
        return True

    def _wait_for(self, call: Call, wait: TruncationInProgress | AppendInProgress) -> None:
        view, inode = self._view, wait.inode
        self._later(
            call,
            partial(asyncio.shield, view.cutting[inode])
            if isinstance(wait, TruncationInProgress)
            else partial(view.appends.wait, inode),
        )

    def _later(self, call: Call, wait: Callable[[], Awaitable]) -> None:
        """Handle the call again after the wait; nothing of it is decided yet."""
        self._waits.add(call, wait, lambda: call.cancelled or self.handle(call), undecided=True)

    def _answer_later(self, call: Call, wait: Callable[[], Awaitable], answer: bytes) -> None:
        """Answer a change that is already made after the wait.

        A client that times out before may send it again.
        """
        self._waits.add(call, wait, lambda: call.reply(answer), may_be_applied=True)


_ALWAYS = frozenset((wire.META_STATUS,))
__all__ = ["MetaOptions", "MetaService"]
