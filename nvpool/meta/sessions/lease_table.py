"""Lease table: leases of client sessions on inodes, recalled before another session changes the inode.

With a lease a client opens, looks up and stats cached inodes without a request, and still gets close-to-open
consistency. The table is in memory only and has a fixed size: a slot stores a few bits of an inode number and
the session that has a lease on it, or "several". If two inodes fall into the same slot, a session may be
notified without need; this costs a message and is never wrong. Nothing is stored per inode, nothing is
written to disk, and a client that changes an inode which no other client has cached waits for nobody.

A lease is valid as long as both of these are: the lease on the inode (`lease_s`; the shard forgets it later
than the client does) and the watch of the session, which the client renews by WATCH requests (proto). A
change of an inode that other sessions have leased waits until each of them has acknowledged the recall, or
until its watch has ended. For a client that is dead or stopped this takes at most `watch_s`, and happens
once: the recalls that the client missed are sent when it returns, before its watch is valid again. Recently
changed inodes get no lease at all.

A lease on a directory covers its names too, also the absence of a name. Each change of a name recalls it. So
if several clients create names in one directory, each is notified once, and the directory gets no lease again
until they have paused for COOL_S.

After a restart the shard does not know which leases exist. So changes of files wait until every session that
may have leases has returned and has been notified that they have ended, or until `watch_s` have passed. Used
by `meta/server/service`; makes no decisions and never waits itself.

A new file is delegated to the session that made it, as by a write delegation of NFSv4: until the session's
first REPORT, or until its size is set, another session sees the file's attributes only after a recall, on
which the session stores and reports what it has. So a client may complete the close of a new file before the
stores and this shard have its data. After a restart the delegations are unknown too: then empty files that are
younger than a lease are treated as delegated until every session has returned.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Collection, Container, Iterable

from nvpool.core.clock import Clock
from nvpool.core.containers.bounded_map import too_old
from nvpool.core.errors import Busy, Draining, StaleSession
from nvpool.core.ids import counter_of, partition_of
from nvpool.meta.state.transaction import Draft
from nvpool.rpc.api import Call
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.v1 import meta_pb2 as pb

SLOT_BITS = 20
"""Size of the table: a million slots of 4 bytes, twice (for this `lease_s` and for the last one). Unused
pages cost nothing. With 100,000 leases one change in 200 notifies a session without need."""
SEVERAL = 0xFFFF
_SLOT_MASK = (1 << SLOT_BITS) - 1
_ANYTHING = 0xFFFFFFFF
"""Value of a slot into which several inodes fell."""
_GOLDEN = 0x9E3779B97F4A7C15
_HASH, _U64 = _GOLDEN, (1 << 64) - 1
COOL_S = 5.0
"""Seconds without leases after a change: a writer and a reader that alternate would otherwise only send
recalls."""
COOL_MAX = 65536
DELEGATED_MAX = 65536
"""Highest number of delegated files. A file made beyond it gets no lease, so its creator does not delay."""
PENDING_MAX = 4096
"""Highest number of inodes of pending recalls per session. Beyond it the session is notified that all its
leases ended."""


class _Watch:
    """Watch of one session."""

    __slots__ = (
        "session",
        "index",
        "number",
        "seen",
        "until_s",
        "call",
        "arrived_s",
        "pending",
        "sent",
        "begins",
        "due",
    )

    def __init__(self, session: int, index: int, number: int) -> None:
        self.session = session
        self.index = index
        self.number = number  # WatchReply.watch
        self.seen = 0  # number of the last reply
        self.until_s = 0.0  # end of the session's leases, by our clock
        self.call: Call | None = None  # pending WATCH request, answered when a lease is recalled
        self.arrived_s = 0.0
        self.pending: dict[int, None] = {}  # recalls that are to be sent
        self.sent: dict[int, None] = {}  # recalls in the last reply, not acknowledged yet
        self.begins = False  # all leases were ended, and the session has not acknowledged that yet
        self.due = False


class _Recall:
    """Recall of the leases on one inode, and the watches whose acknowledgement is missing.

    `delegate`: the session to which the file is delegated, or 0. No other session can have a lease, so its changes
    do not wait for the recall; its reports come before its acknowledgement.
    """

    __slots__ = ("delegate", "left", "done", "timer")

    def __init__(
        self, delegate: int, left: set[_Watch], done: asyncio.Future, timer: asyncio.TimerHandle
    ) -> None:
        self.delegate = delegate
        self.left = left
        self.done = done
        self.timer = timer


class _Table:
    """Hash table of leases: for each slot 16 bits of an inode number and 16 bits of a session's index."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self.turn_s = 0.0
        self.new = self.old = self._empty()

    @staticmethod
    def _empty() -> memoryview:
        return memoryview(mmap.mmap(-1, 4 << SLOT_BITS)).cast("I")  # pages are allocated at first use

    def add(self, numbers: Iterable[int], index: int, now_s: float) -> None:
        """Add leases; they stay in the table for `lease_s` to two times `lease_s`."""
        if now_s >= self.turn_s:
            self.old = self.new if now_s < self.turn_s + self._lease_s else self._empty()
            self.new, self.turn_s = self._empty(), now_s + self._lease_s
        new = self.new
        for number in numbers:
            spread = number * _GOLDEN
            slot, mine = spread >> 64 - SLOT_BITS & _SLOT_MASK, (spread >> 12 & 0xFFFF0000) | index
            held = new[slot]
            if held != mine:
                if held:
                    mine = _ANYTHING if held >> 16 != mine >> 16 else mine | SEVERAL
                new[slot] = mine

    def add_one(self, number: int, index: int, now_s: float) -> None:
        """As `add`, for one inode."""
        if now_s >= self.turn_s:
            self.add((number,), index, now_s)
            return
        new = self.new
        spread = number * _HASH & _U64
        slot = spread >> 44
        mine = (spread >> 12 & 0xFFFF0000) | index
        held = new[slot]
        if held != mine:
            if held:
                mine = 0xFFFFFFFF if held >> 16 != mine >> 16 else mine | 0xFFFF
            new[slot] = mine

    def indexes(self, number: int) -> tuple[int, int]:
        """Indexes of sessions that may have a lease on the inode: 0 for none, SEVERAL for any session."""
        spread = number * _GOLDEN
        slot, tag = spread >> 64 - SLOT_BITS & (1 << SLOT_BITS) - 1, spread >> 28 & 0xFFFF
        new, old = self.new[slot], self.old[slot]
        return (
            new & 0xFFFF if new == _ANYTHING or new >> 16 == tag else 0,
            old & 0xFFFF if old == _ANYTHING or old >> 16 == tag else 0,
        )


class LeaseTable:
    """Leases and watches of all sessions of a shard."""

    def __init__(
        self,
        clock: Clock,
        first_number: int,
        watch_s: float,
        lease_s: float,
        map_epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        """`map_epoch` returns the epoch of the pool map."""
        self._clock = clock
        self._watch_s = watch_s
        self._lease_s = lease_s
        self.lease_ms = int(lease_s * 1000)
        self._map_epoch = map_epoch
        self._watch_ms = int(watch_s * 1000)
        self._next_number = first_number
        self.table = _Table(lease_s)
        self.by_session: dict[int, _Watch] = {}
        self._by_index: dict[int, _Watch] = {}
        self.recalls: dict[int, _Recall] = {}
        self.cool: dict[int, tuple[float, int, int]] = {}
        """Inode -> end of its time without leases; the only session that may have one; the session that
        changed it last."""
        self.unheard: set[int] = set()
        """Sessions that may have leases from the previous process."""
        self._unheard_until_s = 0.0
        self._heard: asyncio.Future | None = None
        self.withheld: set[int] = set()
        """Partitions in which no leases are given."""
        self.delegated: dict[int, int] = {}
        """Delegated file -> the session that made it."""
        self._heeded = asyncio.Event()
        """Set when a session has acknowledged that all of its leases have ended."""
        self.recalled = self.waited_out = 0

    # -- sessions ----------------------------------------------------------------------------------------------------

    def after_restart(self, sessions: Iterable[int]) -> None:
        """Note the sessions that had a watch at the previous process."""
        self.unheard = set(sessions)
        self._unheard_until_s = self._clock.boottime_s() + self._watch_s

    def begin(self, session: int) -> tuple[int, int]:
        """Start the watch of a session that was opened or resumed: (number of its watch, watch_ms)."""
        watch = self.by_session.get(session)
        if watch is None:
            watch = self._begin(session)
        else:
            self._restart(watch)
        watch.until_s = self._clock.boottime_s() + self._watch_s
        return watch.number, self._watch_ms

    def _begin(self, session: int) -> _Watch:
        index = len(self._by_index) + 1
        while index in self._by_index:
            index = index % (SEVERAL - 1) + 1
        watch = self.by_session[session] = self._by_index[index] = _Watch(session, index, self._number())
        return watch

    def _number(self) -> int:
        self._next_number = (self._next_number + 1) % (1 << 64)
        return self._next_number or self._number()

    def end(self, session: int) -> None:
        """End the session's watch and leases.

        This is safe: a session ends long after its watch, or the client itself closes it.
        """
        watch = self.by_session.pop(session, None)
        if watch is not None:
            del self._by_index[watch.index]
            self._end_delegations(session)
            if watch.call is not None:
                call, watch.call = watch.call, None
                call.fail(StaleSession("the session has ended"))
            for number in list(self.recalls):
                self._knows(watch, number)
            self._heeded.set()
        self._has_come(session)

    def _has_come(self, session: int) -> None:
        if session in self.unheard:
            self.unheard.discard(session)
            if self._heard is not None and not self._heard.done():
                self._heard.set_result(None)

    def close(self) -> None:
        for watch in self.by_session.values():
            if watch.call is not None:
                call, watch.call = watch.call, None
                call.fail(Draining("the shard is stopping"))

    # -- giving leases ---------------------------------------------------------------------------------------

    def issue_lease(self, session: int, number: int) -> bool:
        """As `issue_leases`, for one inode."""
        watch = self.by_session.get(session)
        if watch is None:
            return False
        if self.withheld or number in self.recalls or number in self.cool:
            return bool(self.issue_leases(session, (number,)))
        now_s = self._clock.boottime_s()
        if watch.until_s <= now_s:
            return False
        self.table.add_one(number, watch.index, now_s)
        return True

    def issue_leases(self, session: int, numbers: Iterable[int]) -> Collection[int]:
        """Give leases to a session. Return the inodes on which it may rely for `lease_ms` from now.

        All `numbers` must be inodes that have names.
        """
        watch = self.by_session.get(session)
        if watch is None:
            return ()
        now_s = self._clock.boottime_s()
        if watch.until_s <= now_s:
            return ()
        leased = set(numbers)
        if self.withheld:
            leased = {number for number in leased if partition_of(number) not in self.withheld}
        if self.recalls:
            leased -= self.recalls.keys()
        if self.cool:
            leased -= {
                number for number in self.cool.keys() & leased if self._is_cool(number, session, now_s)
            }
        self.table.add(leased, watch.index, now_s)
        return leased

    def _is_cool(self, number: int, session: int, now_s: float) -> bool:
        until_s, only, _ = self.cool[number]
        return until_s > now_s and only != session

    # -- delegations -------------------------------------------------------------------------------------------------

    def delegate(self, session: int, number: int) -> bool:
        """Delegate a new file to the session that made it, before it gets a lease. False: too many are."""
        if len(self.delegated) >= DELEGATED_MAX:
            return False
        self.delegated[number] = session
        return True

    def end_delegation(self, number: int) -> None:
        """The file has a size or a report, or no session has it open any more."""
        self.delegated.pop(number, None)

    def _end_delegations(self, session: int) -> None:
        for number in [number for number, holder in self.delegated.items() if holder == session]:
            del self.delegated[number]

    def recall_delegation(self, session: int, number: int, age_s: float) -> Callable[[], Awaitable] | None:
        """Recall the delegation of an empty file that another session may have; return the wait.

        None: the attributes of the file may be shown to `session` now. `age_s`: time since the file was made.
        """
        if self.unheard and age_s <= self._lease_s and number not in self.delegated:
            now_s = self._clock.boottime_s()
            return self._until_heard if now_s < self._unheard_until_s and self.unheard != {session} else None
        if self.delegated.get(number, session) == session:
            return None
        done = self._recall(number, session, self._clock.boottime_s())
        return (lambda: _all([done])) if done is not None else None

    # -- changes -----------------------------------------------------------------------------------------------------

    def conflict(self, session: int, draft: Draft) -> Callable[[], Awaitable] | None:
        """Recall the leases of other sessions on the inodes of a change; return the wait.

        None: there is nothing to wait for. After the wait the change must be decided again.
        """
        if not self.unheard and len(self.by_session) <= (session in self.by_session):
            return None
        born = draft.view.next_number if draft.born else 0
        return self.recall(session, [number for number in draft.dirty if counter_of(number) != born])

    def recall(self, session: int, numbers: Iterable[int]) -> Callable[[], Awaitable] | None:
        """As `conflict`, for a list of inodes that are to be changed on behalf of a session."""
        now_s, waits = self._clock.boottime_s(), []
        for number in numbers:
            if self.unheard and now_s >= self._unheard_until_s:
                self.unheard.clear()
            if self.unheard and self.unheard != {session}:
                return self._until_heard
            done = self._recall(number, session, now_s)
            if done is not None:
                waits.append(done)
        return (lambda: _all(waits)) if waits else None

    async def _until_heard(self) -> None:
        if self._heard is None or self._heard.done():
            self._heard = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(max(0.0, self._unheard_until_s - self._clock.boottime_s())):
                await asyncio.shield(self._heard)
        except TimeoutError:
            self.unheard.clear()

    def _recall(self, number: int, session: int, now_s: float) -> asyncio.Future | None:
        """End all leases on the inode except those of `session`. Return the future to wait for, if any."""
        holder = self.delegated.get(number)
        if holder == session:
            return None  # no other session has a lease
        done = self._recall_leases(number, session, now_s)
        if done is None and holder is not None:
            del self.delegated[number]  # its holder has gone, or watches no more
        return done

    def _recall_leases(self, number: int, session: int, now_s: float) -> asyncio.Future | None:
        recall = self.recalls.get(number)
        if recall is not None:
            return None if recall.delegate == session else recall.done
        until_s, only, changer = self.cool.pop(number, (0.0, 0, 0))
        if until_s > now_s:
            watch = self.by_session.get(only)
            holders = [watch] if watch is not None and only != session else []
            only = only if only == session else 0
        else:
            holders = self._holders(number)
            only = session if any(watch.session == session for watch in holders) else 0
            holders = [watch for watch in holders if watch.session != session]
            if not holders:
                return None
        delegate = self.delegated.get(number, 0)
        if not delegate:  # of a new file there is nothing to alternate on yet
            # if one session alone changes it, others may get leases again later
            if changer != session or until_s <= now_s:
                until_s = now_s + COOL_S
            self.cool[number] = until_s, only, session
            for cool in too_old(self.cool, COOL_MAX):
                del self.cool[cool]
        left = set()
        for watch in holders:
            self._notify(watch, number)
            if watch.until_s > now_s:
                left.add(watch)
        if not left:
            return None
        self.recalled += 1
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(watch.until_s for watch in left) - now_s, self._wait_no_longer, number)
        recall = self.recalls[number] = _Recall(delegate, left, loop.create_future(), timer)
        return recall.done

    def _holders(self, number: int) -> list[_Watch]:
        indexes = set(self.table.indexes(number))
        if SEVERAL in indexes:
            return list(self.by_session.values())
        return [watch for index in indexes if (watch := self._by_index.get(index)) is not None]

    async def withdraw(self, partitions: Iterable[int]) -> None:
        """Give no leases in these partitions until `restore`, and end all existing ones.

        On return no session has a lease on any of their inodes: each session has acknowledged that all its
        leases have ended, or its watch has ended (`watch_s` at most).
        """
        self.withheld.update(partitions)
        now_s = self._clock.boottime_s()
        left = {watch: watch.until_s for watch in self.by_session.values() if watch.until_s > now_s}
        for watch in left:
            self._restart(watch)
            self._answer_soon(watch)
        if self.unheard and now_s < self._unheard_until_s:
            await self._until_heard_all()
        while left := {
            watch: until_s
            for watch, until_s in left.items()
            if watch.begins
            and watch.until_s
            and self._clock.boottime_s() < until_s
            and self.by_session.get(watch.session) is watch
        }:
            self._heeded.clear()
            try:
                async with asyncio.timeout(max(0.0, max(left.values()) - self._clock.boottime_s())):
                    await self._heeded.wait()
            except TimeoutError:
                pass

    async def _until_heard_all(self) -> None:
        while self.unheard and self._clock.boottime_s() < self._unheard_until_s:
            await self._until_heard()

    def restore(self, partitions: Iterable[int]) -> None:
        """Allow leases again in these partitions, or forget them if they have moved to another shard."""
        self.withheld.difference_update(partitions)

    def end_all(self) -> None:
        """End all leases because a repair has changed inodes.

        Clients are notified; nothing waits for them.
        """
        for watch in self.by_session.values():
            self._restart(watch)
            self._answer_soon(watch)

    def _restart(self, watch: _Watch) -> None:
        watch.number, watch.begins = self._number(), True
        watch.pending.clear()
        watch.sent.clear()

    def _notify(self, watch: _Watch, number: int) -> None:
        if len(watch.pending) >= PENDING_MAX:
            self._restart(watch)
        if not watch.begins or watch.call is None:
            watch.pending[number] = None
        self._answer_soon(watch)

    def _answer_soon(self, watch: _Watch) -> None:
        if watch.call is not None and not watch.due:
            watch.due = True
            # together with other recalls of this iteration
            asyncio.get_running_loop().call_soon(self.answer, watch, watch.call)

    def _knows(self, watch: _Watch, number: int) -> None:
        recall = self.recalls.get(number)
        if recall is not None:
            recall.left.discard(watch)
            if not recall.left:
                self._over(number, recall)

    def _wait_no_longer(self, number: int) -> None:
        """Stop waiting for watches that have ended without an acknowledgement. Their recalls stay pending."""
        self.waited_out += 1
        self._over(number, self.recalls[number])

    def _over(self, number: int, recall: _Recall) -> None:
        del self.recalls[number]
        if recall.delegate:
            self.delegated.pop(number, None)
        recall.timer.cancel()
        if not recall.done.done():
            recall.done.set_result(None)

    # -- WATCH -------------------------------------------------------------------------------------------------------

    def ask(self, call: Call, request: pb.WatchRequest) -> None:
        """Handle a WATCH request of a live session."""
        watch = self.by_session.get(request.session) or self._begin(request.session)
        now_s = self._clock.boottime_s()
        if watch.call is not None:
            before, watch.call = watch.call, None
            before.fail(Busy("another request of the session watches"))
        watch.due = False
        if request.leaves:
            self._leave(watch)
        if request.watch != watch.number:
            watch.begins = True
            watch.pending.clear()
            watch.sent.clear()
            if not request.leaves:
                watch.until_s = max(watch.until_s, now_s + self._watch_s)
            call.reply(
                pb.WatchReply(
                    watch=watch.number,
                    number=watch.seen,
                    watch_ms=self._watch_ms,
                    map_epoch=self._map_epoch(),
                    delegates=True,
                ).SerializeToString()
            )
            return
        self._has_come(request.session)
        if watch.begins:
            watch.begins = False
            self._heeded.set()
            for number in [number for number in self.recalls if number not in watch.pending]:
                self._knows(watch, number)
        if request.seen == watch.seen:
            acknowledged, watch.sent = watch.sent, {}
            for number in acknowledged:
                if number not in watch.pending:
                    self._knows(watch, number)
        else:
            watch.pending, watch.sent = watch.sent | watch.pending, {}
        watch.call, watch.arrived_s = call, now_s
        # after a pause the client's leases are invalid until it has a reply
        if watch.pending or watch.until_s <= now_s:
            self.answer(watch, call)
        else:
            asyncio.get_running_loop().call_later(self._watch_s / 3, self.answer, watch, call)

    def _leave(self, watch: _Watch) -> None:
        """End all leases of a session at its own request. No change waits for it until it watches again."""
        self._restart(watch)
        self._end_delegations(watch.session)
        watch.until_s = 0.0
        self._has_come(watch.session)
        self._heeded.set()
        for number in list(self.recalls):
            self._knows(watch, number)

    def answer(self, watch: _Watch, call: Call) -> None:
        """Reply to the long poll of a session with its pending recalls, if `call` still waits."""
        if watch.call is not call:
            return
        watch.call, watch.due = None, False
        watch.seen += 1
        watch.sent, watch.pending = watch.pending, {}
        watch.until_s = max(watch.until_s, watch.arrived_s + self._watch_s)
        call.reply(
            pb.WatchReply(
                watch=watch.number,
                number=watch.seen,
                inodes=read_write_codec.pack_inodes(list(watch.sent)),
                watch_ms=self._watch_ms,
                map_epoch=self._map_epoch(),
                delegates=True,
            ).SerializeToString()
        )

    @property
    def watching(self) -> Container[int]:
        """Sessions that may have leases."""
        return self.by_session

    def counters(self) -> dict[str, int]:
        return {
            "watches": len(self.by_session),
            "recalls": self.recalled,
            "recalls_waited_out": self.waited_out,
        }


async def _all(waits: list[asyncio.Future]) -> None:
    for done in waits:
        await asyncio.shield(done)
