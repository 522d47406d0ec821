"""Lock service of a shard: loading, notification of waiting clients, locks of ended sessions.

A session that has ended keeps its locks until its last grant has expired, because a client that lost its
session may still write with a grant. After a restart the time of the end is unknown, so the period starts
again. Used by `meta/server/service`; the decisions are in `meta/state/lock_table`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from collections.abc import Callable, Iterable

from nvpool.core.clock import Clock
from nvpool.core.errors import CorruptRecord
from nvpool.core.grants import CLOCK_SKEW_S
from nvpool.core.ids import partition_of
from nvpool.core.posix.byte_range_locks import LockRange
from nvpool.kv.api import Effect, Kv
from nvpool.meta.sessions.table import Sessions, inodes_of
from nvpool.meta.state import records
from nvpool.meta.state.lock_table import WAITERS_PER_SESSION_MAX, LockTable, Owner, Waiter
from nvpool.rpc.api import Call
from nvpool.rpc.v1 import meta_pb2 as pb

_log = logging.getLogger(__name__)

QUESTION_S = 20.0
"""Seconds after which a request for turns is answered even if no waiter has its turn."""
TICKETS_MAX = 2 * WAITERS_PER_SESSION_MAX
"""Tickets in each list of a request: all that a session can have, and as many that it has given up while the
shard did not answer."""
RELEASE_BATCH = 1000
SCAN_BATCH = 1000
HOLD_BEYOND_GRANTS_S = 2 * CLOCK_SKEW_S
"""Time after a grant's end, by our clock, in which a store may still accept it. The store's clock may be
behind, and the store itself allows for clocks that are behind."""


class _Question:
    """Pending request of a client that waits for the turn of its tickets."""

    __slots__ = ("call", "waiters", "timer")

    def __init__(self, call: Call, waiters: dict[int, Waiter], timer: asyncio.TimerHandle) -> None:
        self.call = call
        self.waiters = waiters
        self.timer = timer


class LockService:
    """Clients that wait for locks, and locks of ended sessions."""

    def __init__(
        self,
        kv: Kv,
        table: LockTable,
        clock: Clock,
        serves: Callable[[int], bool] = lambda partition: True,
    ) -> None:
        """`serves(partition)`: whether this shard may release locks in the partition."""
        self._kv = kv
        self.table = table
        self._clock = clock
        self._questions: dict[int, _Question] = {}
        self._serves = serves
        table.on_turn = self._notify

    def load(self, partitions: Iterable[int], lives: Iterable[int]) -> None:
        """Load the stored locks of these partitions. Unreadable records are left to fsck."""
        for partition in partitions:
            first, end = records.prefix(partition, records.LOCK), records.prefix(partition, records.LOCK + 1)
            while pairs := self._kv.scan(first, end, SCAN_BATCH):
                for key, raw in pairs:
                    try:
                        kind, session, owner, start = records.lock_of_key(key)
                        self.table.load(
                            records.inode_of_key(key),
                            Owner(kind, session, owner),
                            LockRange(start, *records.decode_lock(raw)),
                        )
                    except CorruptRecord:
                        continue
                first = pairs[-1][0] + b"\0"
        for session in set(self.table.sessions).difference(lives):
            self.end_session(session, said_so=False)

    def sessions_in(self, partitions: frozenset[int]) -> set[int]:
        """Sessions that have locks on inodes of these partitions."""
        return self.table.sessions_in(partitions)

    def bringing(self, arrived: int, session: int) -> list[Effect]:
        """Effects that move the locks of a migrated session to its client's session at this shard."""
        return self.table.renaming(arrived, session)

    def bring(self, arrived: int, session: int) -> None:
        """Move the locks in memory, after the effects of `bringing` are applied."""
        self.table.rename_session(arrived, session)

    def forget(self, partitions: frozenset[int]) -> None:
        """Forget partitions that belong to another shard now.

        Clients that wait for locks there get an answer, ask again, and learn which shard to ask.
        """
        waiting = self.table.waiters_in(partitions)
        for waiter in waiting:
            self._end_question(
                waiter.owner.session,
                [one.ticket for one in waiting if one.owner.session == waiter.owner.session],
            )
        for inode in {inode for inode in self.table.files if partition_of(inode) in partitions}:
            self.table.forget(inode)

    def end_session(self, session: int, *, said_so: bool) -> None:
        """End a session. If its client did not close it, its locks are kept while its grants may be valid."""
        self._end_question(session)
        held = self.table.end_session(session, 0.0 if said_so else None)
        if held and said_so:
            self._give_on()
        elif held:
            _log.warning(
                "session %#x has ended without giving back %d locks, which are kept for %.0f s: it may still write",
                session,
                held,
                self.table.hold_s,
            )

    def give_on(self, sessions: Iterable[int]) -> None:
        """Release the locks of these ended sessions at the next `run_once`: their clients can write no
        more."""
        for session in sessions:
            self.table.end_session(session, 0.0)

    async def run_once(self, sessions: Sessions) -> None:
        """Release locks of ended sessions whose time has come.

        This also advances the queues and updates the limits of peers. Waits for the engine only.
        """
        sessions.weigh(self.table)
        self.table.tick()
        while True:
            while self._kv.full:
                await self._kv.room()
            if not self._give_on():
                return
            await asyncio.sleep(0)

    def _give_on(self) -> bool:
        steps = self.table.ended(RELEASE_BATCH, self._serves)
        if steps:
            self._kv.apply([effect for step in steps for effect in step.effects], reclaims=True)
        for step in steps:
            self.table.commit(step)
        return bool(steps)

    # -- waiting clients -------------------------------------------------------------------------------------

    def ask(self, call: Call, request: pb.LockWaitRequest) -> None:
        """Answer when one of the tickets has its turn.

        The answer is immediate if a ticket has its turn already, or names no place in a queue.
        """
        session, table = request.session, self.table
        tickets, given_up = inodes_of(request.tickets, TICKETS_MAX), inodes_of(request.given_up, TICKETS_MAX)
        self._end_question(session)
        for ticket in given_up:
            waiter = table.waiter(session, ticket)
            if waiter is not None:
                table.give_up(waiter)
        waiters, ready = {}, []
        for ticket in tickets:
            waiter = table.waiter(session, ticket)
            if waiter is None or waiter.has_turn:
                ready.append(ticket)
            else:
                waiters[ticket] = waiter
        if ready or not waiters:
            _reply(call, ready)
            return
        for waiter in waiters.values():
            waiter.heard_s = math.inf
        wait_s = min(QUESTION_S, max(0.0, call.deadline_s - self._clock.boottime_s()) * 0.75)
        timer = asyncio.get_running_loop().call_later(wait_s, self._end_question, session)
        question = self._questions[session] = _Question(call, waiters, timer)
        call.on_cancel(lambda: self._questions.get(session) is question and self._end_question(session))

    def _notify(self, waiter: Waiter) -> None:
        question = self._questions.get(waiter.owner.session)
        if question is not None and waiter.ticket in question.waiters:
            self._end_question(waiter.owner.session, [waiter.ticket])

    def _end_question(self, session: int, ready: Iterable[int] = ()) -> None:
        question = self._questions.pop(session, None)
        if question is not None:
            question.timer.cancel()
            for waiter in question.waiters.values():
                waiter.heard_s = self._clock.boottime_s()
            _reply(question.call, ready)

    def close(self) -> None:
        """Answer all waiting clients; they ask again, at the next primary."""
        for session in list(self._questions):
            self._end_question(session)

    def counters(self) -> dict[str, float]:
        return {"locks": sum(self.table.counts.values()), "lock_waiters": self.table.waiting}


def _reply(call: Call, tickets: Iterable[int]) -> None:
    tickets = list(tickets)
    call.reply(pb.LockWaitReply(tickets=struct.pack(f"<{len(tickets)}Q", *tickets)).SerializeToString())
