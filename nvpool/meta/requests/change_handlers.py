"""Handlers of the changes and queries in `meta/requests/dispatch_table`: decide, apply and answer.

Each decision is made and applied without a wait in between. A change that needs other shards is a cross-shard
transaction. Made by `meta/server/service`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from nvpool.core import primitives
from nvpool.core.clock import SystemClock
from nvpool.core.errors import Busy, Refused, WrongShard
from nvpool.core.ids import partition_of
from nvpool.core.units import SLOTS_PER_SESSION
from nvpool.meta.requests.call_replies import CallReplies
from nvpool.meta.requests.dispatch_table import CHANGES, CROSS_SHARD_CHANGES, QUERIES
from nvpool.meta.requests.internal_changes import InternalChanges
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.meta.requests.slot_replays import SlotReplays
from nvpool.meta.sessions import table
from nvpool.meta.sessions.table import Session, Slot
from nvpool.meta.state import records, session_records
from nvpool.meta.state.append_reservations import AppendInProgress
from nvpool.meta.state.striped_dirs import StripeView
from nvpool.meta.state.transaction import Decision, Draft, TruncationInProgress, attr_of
from nvpool.poolmap.shards.partitions import partition_of_name
from nvpool.rpc.access_control import CallerRights
from nvpool.rpc.api import Call
from nvpool.rpc.messages.meta_messages import CreateReply, InodeEntry

_SLOTS = SLOTS_PER_SESSION


class ChangeHandlers:
    """Changes and queries of clients."""

    def __init__(
        self,
        parts: ShardParts,
        replies: CallReplies,
        slots: SlotReplays,
        internal: InternalChanges,
        handle: Callable[[Call], None],
    ) -> None:
        """`handle` handles a call from its beginning."""
        self._counters = parts.status.counters
        self._clock = parts.clock
        self._callers = parts.callers
        self._kv = parts.kv
        self._view = parts.view
        self._rooms = parts.rooms
        self._appends = parts.appends
        self._sessions = parts.sessions
        self._by_number, self._holders = parts.sessions.by_number, parts.sessions.holders
        self._is_system = type(parts.clock) is SystemClock
        self._users = parts.users
        self._numbers = parts.numbers
        self._watches = parts.watches
        self._watching = parts.watches.watching
        self._collector = parts.collector
        self._cuts = parts.cuts
        self._moment = parts.moment
        self._cross_shard = parts.cross_shard
        self._coordinator = parts.cross_shard.coordinator
        self._replies = replies
        self._slots = slots
        self._internal = internal
        self._handle = handle

    def routes(self) -> dict[int, Any]:
        """Handlers by method."""
        routes = {
            method: ChangeRoute(self, *route, CROSS_SHARD_CHANGES.get(method), True)
            for method, route in CHANGES.items()
        }
        routes.update((method, ChangeRoute(self, *route, None, False)) for method, route in QUERIES.items())
        return routes

    def caller_of(self, call: Call) -> CallerRights:
        """The caller, whose rights were checked."""
        return self._callers.of(call.peer)

    def answer_query(
        self,
        call: Call,
        method: int,
        message: bytes,
        owner: str,
        user: Any,
        request_class: Any,
        decide: Decision,
    ) -> None:
        """Answer a request that changes nothing but the mark of a first write grant."""
        self._counters["requests"] += 1
        request = request_class.FromString(message)
        self._session_of(request.session, owner)
        try:
            if user is not None:
                decide = self._users.decision(method, user, decide)
            draft = decide(self._view, request, self._now_ns())
        except TruncationInProgress as wait:
            self._wait_for(call, wait)
            return
        if draft.dirty:
            if self._kv.full:
                self._replies.retry(call, self._kv.room)
                return
            self._kv.apply(draft.finish(), reclaims=True)
        call.reply(draft.reply.SerializeToString())

    def answer_change(
        self,
        call: Call,
        method: int,
        message: bytes,
        owner: str,
        user: Any,
        request_class: Any,
        decide: Decision,
        home: Callable[[Any], int] | None,
    ) -> None:
        """Answer a change.

        `home(request)` is the inode whose shard coordinates a change that may need other shards. Without
        `home` the change concerns one inode alone.
        """
        self._counters["requests"] += 1
        request = request_class.FromString(message)
        change = request.change
        session = self._session_of(change.session, owner)
        index, sequence, mark = change.slot, change.sequence, table.mark_of(method, request, message)
        slot = session.slots[index] if index < _SLOTS else None
        if slot is None:
            slot = self._sessions.slot(session, index)
        if sequence <= slot.sequence:
            self._slots.repeat(call, request, session, slot, sequence, mark)
            return
        if self._kv.full:
            self._replies.retry(call, self._kv.room)
            return
        if self._view.next_number >= self._numbers.bounds.inode:
            self._replies.retry(call, self._numbers.more)
            return
        if self._moment.changes_wait:
            self._replies.retry(call, self._moment.over)
            return
        try:
            # From here to the end of _commit nothing may wait: the decision holds only as long as nothing changes.
            if user is not None:
                decide_for_caller = self._users.decision(method, user, decide)
            else:
                decide_for_caller = decide
            draft = decide_for_caller(self._view, request, self._now_ns())
            if self._watching or self._watches.unheard:
                wait = self._watches.conflict(session.number, draft)
                if wait is not None:
                    self._replies.retry(call, wait)  # the decision is discarded and made again after the wait
                    return
            self._commit(call, draft, session, slot, index, sequence, mark)
        except (TruncationInProgress, AppendInProgress) as wait:
            self._wait_for(call, wait)
        except WrongShard as error:
            if home is None or self._view.is_elsewhere(self._home_partition(request, home)):
                # never made here, even if the partition comes back
                self._slots.keep_refusal(session, slot, sequence, mark, error)
                raise
            self._span(call, decide, request, session, slot, index, sequence, mark)
        except Refused as error:
            self._slots.keep_refusal(session, slot, sequence, mark, error)
            raise

    def _session_of(self, number: int, owner: str) -> Session:
        """As `Sessions.of`."""
        session = self._by_number.get(number)
        if session is not None and session.owner == owner:
            return session
        return self._sessions.of(number, owner)

    def _now_ns(self) -> int:
        return primitives.wall_ns() if self._is_system else self._clock.wall_ns()

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
            self._replies.retry(call, lambda: asyncio.wait([under_way]))
            return

        async def carry_out() -> None:
            coordinator, access = self._coordinator, self._view.access
            span = coordinator.begin(session.identity)

            def decide_for(*known: Any) -> Draft:
                access.caller = self._callers.owner_of(call)
                return decide(*known)

            try:
                while True:
                    draft = await coordinator.decide(span, decide_for, request)
                    # From here to the end of _commit nothing may wait, as in `answer`.
                    if self._sessions.get(session.number) is not session or sequence <= slot.sequence:
                        self._handle(call)  # decided meanwhile through records of our own shard
                        return
                    if not await self._internal.has_waited(session.number, draft):
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
                    self._slots.keep_refusal(session, slot, sequence, mark, error)
                raise
            finally:
                access.caller = None
                coordinator.end(span)

        self._cross_shard.begin(call, (session.number, index), carry_out)

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
        if draft.opened and len(session.opens) >= session.opens_max:
            self._sessions.check_room(session)
        if effects is None:
            effects = draft.finish()
        if effects:
            effects[records.slot_key(session.number, index)] = session_records.encode_slot(
                sequence, waits_for, answer, mark
            )
            self._kv.apply(effects, reclaims=not draft.adds)
            self._counters["changes"] += 1
            if committed is not None:
                committed()
        slot.sequence, slot.waits_for, slot.answer = sequence, waits_for, answer
        slot.error, slot.restored, slot.mark = None, False, mark
        given_up = slot.take_awaited() if slot.awaited else 0
        slot.opened = draft.opened
        if draft.born:
            self._view.next_number += 1
            self._view.inode_count += 1
        if draft.opened:
            table.open_inode(self._holders, session, draft.opened)
        if given_up:
            self._sessions.close(session, given_up)
        if draft.sized:
            self._watches.end_delegation(draft.sized)
        if draft.closed:
            self._sessions.release(session, (draft.closed,))
        if draft.orphans:
            for orphan in draft.orphans:
                self._collector.add(orphan)
        if draft.accounts:
            for account in draft.accounts.values():
                if account.grown is not None:
                    self._rooms.spend(account.number, *account.grown)
        if draft.then is not None:
            draft.then()
        if draft.parent is not None or draft.opened or draft.linked:
            beside = type(draft.reply)()
            if draft.parent is not None and not isinstance(draft.parent, StripeView):
                beside.parent = attr_of(draft.parent)
            leased = draft.opened or draft.linked
            if not leased and draft.born:
                leased = draft.reply.entry.attr.inode
            if leased:
                entry = beside
                if isinstance(beside, CreateReply):
                    entry = beside.entry = InodeEntry.__new__(InodeEntry)
                    entry.clear()
                made = draft.opened if draft.born else 0
                if not made or self._watches.delegate(session.number, made):
                    entry.lease_ms = self._view.issue_lease(session.number, draft.inodes[leased])
                if made and not entry.lease_ms:
                    self._watches.end_delegation(made)
            # concatenated protobuf messages decode as one merged message
            answer += beside.SerializeToString()
        if draft.intent is not None:
            cut = asyncio.shield(self._cuts.begin(*draft.intent))
            self._replies.reply_after(call, partial(_returned, cut), answer)
        elif draft.sync or (effects and self._kv.sync_before_answer):
            self._replies.reply_after(call, partial(self._kv.sync, self._kv.sequence), answer)
        else:
            call.reply(answer)

    def _wait_for(self, call: Call, wait: TruncationInProgress | AppendInProgress) -> None:
        inode = wait.inode
        self._replies.retry(
            call,
            partial(asyncio.shield, self._view.cutting[inode])
            if isinstance(wait, TruncationInProgress)
            else partial(self._appends.wait, inode),
        )


def _returned(value: Any) -> Any:
    return value


class ChangeRoute:
    """Handler of one method."""

    __slots__ = ("_handlers", "_request_class", "_decide", "_home", "_is_change")

    def __init__(
        self,
        handlers: ChangeHandlers,
        request_class: Any,
        decide: Decision,
        home: Callable[[Any], int] | None,
        is_change: bool,
    ) -> None:
        self._handlers = handlers
        self._request_class = request_class
        self._decide = decide
        self._home = home
        self._is_change = is_change

    def __call__(self, call: Call) -> None:
        """As `answer`, for the peer of the call."""
        caller = self._handlers.caller_of(call)
        self.answer(call, call.method, bytes(call.message), caller.owner, caller.user)

    def answer(self, call: Call, method: int, message: bytes, owner: str, user: Any) -> None:
        """Answer the call of this caller now, or keep it and answer later.

        `owner`, `user`: as in rpc/access_control.CallerRights.
        """
        if self._is_change:
            self._handlers.answer_change(
                call, method, message, owner, user, self._request_class, self._decide, self._home
            )
        else:
            self._handlers.answer_query(call, method, message, owner, user, self._request_class, self._decide)
