"""Who holds which locks of a shard's files, who waits for them in which order, and what a request comes to.

Locks of fcntl(2) and of flock(2) are kept apart, as Linux does. What is held is also in records (`records.lock_key`), one
for each range: `decide` says what a request would change, the service makes its effects durable, `commit` makes them true
here. So nothing is held that the records do not say. Who waits is in memory only: a place in a queue with a ticket. When
the lock is free, the first that wait have their *turn*: it counts as theirs, and they ask for it by an ordinary change that
may be repeated; who does not come in `TURN_S` loses it. So a lock is never taken by an answer that nobody was there to hear.

Places are given in order. That somebody who came before waits for what stands against it counts only for who waits, and for
no longer than `FAIR_S`: after that, and for who has a lock on the file already, what is free is free, as on one machine;
else two that wait could end up waiting for one another by our rules alone.

Used by `meta/operations/lock` (decide), `meta/sessions/lock_waiters` and `meta/server/service`. Decides, never waits, tells
turns through `on_turn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nvpool.core.clock import Clock
from nvpool.core.errors import TooManyLocks, WouldDeadlock
from nvpool.core.ids import partition_of
from nvpool.core.posix.byte_ranges import EXCLUSIVE, RECORD, UNLOCKED, WHOLE, Change, Span, laid, overlapping
from nvpool.meta.state import records
from nvpool.rpc.limits import raise_it
from nvpool.rpc.stats import TALLY

LOCKS_PER_SESSION_MAX = 65_536
WAITERS_PER_SESSION_MAX = 4096
WAITERS_MAX = 65_536
TURN_S = 5.0
"""For how long a lock is kept for who has its turn; a client comes within a round trip."""
SILENT_S = 10.0
"""After which a place is given up for which nobody asks."""
FAIR_S = 1.0


class Owner(NamedTuple):
    kind: int
    session: int
    owner: int


class Waiter:
    """A place in the queue of a file."""

    __slots__ = ("ticket", "inode", "owner", "start", "end", "mode", "pid", "born_s", "heard_s", "turn_s")

    def __init__(self, ticket: int, inode: int, owner: Owner, start: int, end: int, mode: int, pid: int, now_s: float) -> None:
        self.ticket = ticket
        self.inode = inode
        self.owner = owner
        self.start = start
        self.end = end
        self.mode = mode
        self.pid = pid
        self.born_s = self.heard_s = now_s
        """heard_s: when somebody last asked for the place; infinite while a question is open."""
        self.turn_s = math.inf
        """Since when it has its turn."""

    @property
    def has_turn(self) -> bool:
        return self.turn_s < math.inf


class Step(NamedTuple):
    """A request that is decided. `waiter`: who leaves the queue where it is granted, else who is in it from now on."""

    inode: int
    owner: Owner
    granted: bool
    change: Change | None = None
    effects: tuple[tuple[bytes, bytes | None], ...] = ()
    waiter: Waiter | None = None


class InTheWay(NamedTuple):
    owner: Owner
    span: Span
    waits: bool = False


class _File:
    __slots__ = ("spans", "queue")

    def __init__(self) -> None:
        self.spans: dict[Owner, list[Span]] = {}
        self.queue: list[Waiter] = []


class LockTable:
    def __init__(self, clock: Clock, hold_s: float) -> None:
        """hold_s: for how long the locks of a session are kept that has ended without saying so."""
        self.hold_s = hold_s
        self._now_s = clock.boottime_s
        self._next_ticket = int.from_bytes(clock.secret(7), "big")  # those of before a restart are unknown ones
        self.files: dict[int, _File] = {}
        self.counts: dict[int, int] = {}
        """Ranges by session."""
        self._of_session: dict[int, dict[tuple[int, Owner], None]] = {}
        self._waiters: dict[int, Waiter] = {}
        self._waits_of: dict[Owner, list[Waiter]] = {}
        self._waits_by_session: dict[int, int] = {}
        self.dead: dict[int, float] = {}
        """Sessions that have ended and whose locks are not given on before this time: their grants live on."""
        self.on_turn: Callable[[Waiter], None] = lambda waiter: None
        self.full: frozenset[int] = frozenset()
        """Sessions of peers that have too many in all; see Sessions.weigh."""
        self.client_of: Callable[[int], str] = lambda session: ""

    # -- requests ----------------------------------------------------------------------------------------------------

    def decide(self, inode: int, owner: Owner, start: int, end: int, mode: int, pid: int = 0, wait: bool = False,
               ticket: int = 0) -> Step:
        """What the request comes to; nothing is changed. WouldDeadlock, TooManyLocks."""
        file = self.files.get(inode)
        waiter = self._waiters.get(ticket)
        if waiter is not None and (waiter.inode, waiter.owner) != (inode, owner):
            waiter = None
        if not mode or file is None:
            return self._take(inode, owner, start, end, mode, pid, waiter)
        asker = waiter or Waiter(0, inode, owner, start, end, mode, pid, self._now_s())
        if not self._is_blocked(file, asker, wait):
            return self._take(inode, owner, start, end, mode, pid, waiter)
        if owner.kind == WHOLE and owner in file.spans:
            # flock(2): the lock that one has is given up first, or two that want more would wait for each other for ever
            step = self._take(inode, owner, start, end, UNLOCKED, pid, None)._replace(granted=False)
        else:
            step = Step(inode, owner, False)
        if not wait:
            return step
        if owner.kind == RECORD and self._closes_a_circle(file, asker):
            raise WouldDeadlock()
        if waiter is None and (len(self._waiters) >= WAITERS_MAX
                               or self._waits_by_session.get(owner.session, 0) >= WAITERS_PER_SESSION_MAX):
            raise TooManyLocks(f"{len(self._waiters)} processes wait for locks already")
        asker.ticket = asker.ticket or self._next_ticket
        return step._replace(waiter=asker)

    def _take(self, inode: int, owner: Owner, start: int, end: int, mode: int, pid: int, waiter: Waiter | None) -> Step:
        spans = self.spans_of(inode, owner)
        change = laid(spans, start, end, mode, pid)
        old, new = spans[change.first:change.last], change.new
        if mode and len(new) > len(old) and self.counts.get(owner.session, 0) >= LOCKS_PER_SESSION_MAX:
            raise TooManyLocks(f"a client holds {LOCKS_PER_SESSION_MAX} locks at most")
        if mode and len(new) > len(old) and owner.session in self.full:
            TALLY.limit_met("locks_per_peer")
            raise TooManyLocks(f"{self.client_of(owner.session)} and others of its host or user hold too many locks; give some "
                               f"back, {raise_it('locks_per_peer')}")
        begins = {span.start for span in new}
        effects = [(records.lock_key(inode, *owner, span.start), None) for span in old if span.start not in begins]
        effects += [(records.lock_key(inode, *owner, span.start), records.encode_lock(span.end, span.mode, span.pid))
                    for span in new if span not in old]
        return Step(inode, owner, True, change, tuple(effects), waiter)

    def commit(self, step: Step) -> None:
        """What was decided is in the records: now it is so. Whose turn it is thereby, hears of it."""
        waiter = step.waiter
        if step.change is not None:
            self._change(step.inode, step.owner, step.change)
        if waiter is not None and step.granted:
            self._leave(waiter)
        elif waiter is not None:
            waiter.heard_s = self._now_s()
            if waiter.ticket not in self._waiters:
                self._join(waiter)
        self._give_turns(step.inode)

    def _change(self, inode: int, owner: Owner, change: Change) -> None:
        file = self.files.get(inode)
        if file is None:
            file = self.files[inode] = _File()
        spans = file.spans.setdefault(owner, [])
        before = len(spans)
        change.apply(spans)
        session = owner.session
        self.counts[session] = self.counts.get(session, 0) + len(spans) - before
        if spans:
            self._of_session.setdefault(session, {})[inode, owner] = None
        else:
            del file.spans[owner]
            of_session = self._of_session.get(session, {})
            of_session.pop((inode, owner), None)
            if not of_session:
                self._of_session.pop(session, None)
                self.counts.pop(session, None)
        self._tidy(inode, file)

    def _tidy(self, inode: int, file: _File) -> None:
        if not file.spans and not file.queue:
            self.files.pop(inode, None)

    def in_the_way(self, inode: int, owner: Owner, start: int, end: int, mode: int) -> Iterator[InTheWay]:
        """What others have that stands against such a lock; a lock whose turn somebody has counts as held."""
        file = self.files.get(inode)
        if file is not None:
            yield from self._conflicts(file, owner, start, end, mode)

    @staticmethod
    def _conflicts(file: _File, owner: Owner, start: int, end: int, mode: int) -> Iterator[InTheWay]:
        for other, spans in file.spans.items():
            if other.kind == owner.kind and other != owner:
                for span in overlapping(spans, start, end):
                    if mode == EXCLUSIVE or span.mode == EXCLUSIVE:
                        yield InTheWay(other, span)
        for waiter in file.queue:
            if waiter.has_turn and _stand_against(waiter, owner, start, end, mode):
                yield InTheWay(waiter.owner, Span(waiter.start, waiter.end, waiter.mode, waiter.pid), True)

    def locks_on(self, inode: int) -> Iterator[InTheWay]:
        """All that are held or waited for."""
        file = self.files.get(inode)
        if file is not None:
            for owner, spans in file.spans.items():
                yield from (InTheWay(owner, span) for span in spans)
            yield from (InTheWay(waiter.owner, Span(waiter.start, waiter.end, waiter.mode, waiter.pid), True)
                        for waiter in file.queue)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _is_blocked(self, file: _File, asker: Waiter, wait: bool) -> bool:
        if next(self._conflicts(file, asker.owner, asker.start, asker.end, asker.mode), None) is not None:
            return True
        if not wait or asker.has_turn or asker.owner in file.spans or self._now_s() - asker.born_s >= FAIR_S:
            return False
        for earlier in file.queue:
            if earlier is asker:
                break
            if _stand_against(earlier, asker.owner, asker.start, asker.end, asker.mode):
                return True
        return False

    def _closes_a_circle(self, file: _File, asker: Waiter) -> bool:
        """Whether those in the way wait, over however many others, for something that the asker has."""
        seen: set[Owner] = set()
        left = [one.owner for one in self._conflicts(file, asker.owner, asker.start, asker.end, asker.mode)]
        while left:
            owner = left.pop()
            if owner == asker.owner:
                return True
            if owner in seen:
                continue
            seen.add(owner)
            for waiter in self._waits_of.get(owner, ()):
                left += [one.owner for one in self._conflicts(self.files[waiter.inode], owner, waiter.start, waiter.end,
                                                              waiter.mode)]
        return False

    def _join(self, waiter: Waiter) -> None:
        self._next_ticket += 1
        self._waiters[waiter.ticket] = waiter
        self._waits_of.setdefault(waiter.owner, []).append(waiter)
        self._waits_by_session[waiter.owner.session] = self._waits_by_session.get(waiter.owner.session, 0) + 1
        file = self.files.get(waiter.inode)
        if file is None:
            file = self.files[waiter.inode] = _File()
        file.queue.append(waiter)

    def _leave(self, waiter: Waiter) -> None:
        if self._waiters.pop(waiter.ticket, None) is None:
            return
        others = self._waits_of[waiter.owner]
        others.remove(waiter)
        if not others:
            del self._waits_of[waiter.owner]
        session = waiter.owner.session
        self._waits_by_session[session] -= 1
        if not self._waits_by_session[session]:
            del self._waits_by_session[session]
        file = self.files[waiter.inode]
        file.queue.remove(waiter)
        self._tidy(waiter.inode, file)

    def _give_turns(self, inode: int) -> None:
        file = self.files.get(inode)
        if file is not None:
            for waiter in list(file.queue):
                if not waiter.has_turn and not self._is_blocked(file, waiter, True):
                    waiter.turn_s = self._now_s()
                    self.on_turn(waiter)

    def waiter(self, session: int, ticket: int) -> Waiter | None:
        waiter = self._waiters.get(ticket)
        return waiter if waiter is not None and waiter.owner.session == session else None

    def give_up(self, waiter: Waiter) -> None:
        """Nobody waits here any more."""
        self._leave(waiter)
        self._give_turns(waiter.inode)

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def tick(self) -> None:
        """About once a second: take places and turns from who does not come, give turns for which it is time."""
        now_s = self._now_s()
        silent: set[int] = set()
        for waiter in list(self._waiters.values()):
            if waiter.has_turn and now_s - waiter.turn_s > TURN_S:
                silent.add(waiter.owner.session)
                self.give_up(waiter)
            elif now_s - waiter.heard_s > SILENT_S:
                self.give_up(waiter)
        for waiter in list(self._waiters.values()) if silent else ():
            if waiter.owner.session in silent and waiter.heard_s < math.inf:
                self.give_up(waiter)  # or each of them would hold up the others for as long
        for inode in {waiter.inode for waiter in self._waiters.values()}:
            self._give_turns(inode)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def load(self, inode: int, owner: Owner, span: Span) -> None:
        """A range that the records have, in their order. What contradicts those before it is left to fsck."""
        spans = self.spans_of(inode, owner)
        if span.start <= span.end and (not spans or spans[-1].end < span.start):
            self._change(inode, owner, Change(len(spans), len(spans), [span]))

    @property
    def sessions(self) -> list[int]:
        """Those that hold locks."""
        return list(self._of_session)

    def spans_of(self, inode: int, owner: Owner) -> list[Span]:
        file = self.files.get(inode)
        return file.spans.get(owner, []) if file is not None else []

    def forget(self, inode: int) -> None:
        """The inode is not there, whatever the records said."""
        file = self.files.get(inode)
        if file is not None:
            for waiter in list(file.queue):
                self._leave(waiter)
            for owner, spans in list(file.spans.items()):
                self._change(inode, owner, Change(0, len(spans), []))

    def sessions_in(self, partitions: frozenset[int]) -> set[int]:
        """Those that hold locks on inodes of these partitions."""
        return {session for session, held in self._of_session.items()
                if any(partition_of(inode) in partitions for inode, _ in held)}

    def waiters_in(self, partitions: frozenset[int]) -> list[Waiter]:
        return [waiter for waiter in self._waiters.values() if partition_of(waiter.inode) in partitions]

    def renaming(self, old: int, new: int) -> list[tuple[bytes, bytes | None]]:
        """The effects of `rename_session`."""
        effects: list[tuple[bytes, bytes | None]] = []
        for inode, owner in self._of_session.get(old, ()):
            heir = owner._replace(session=new)
            for span in self.files[inode].spans[owner]:
                effects += [(records.lock_key(inode, *owner, span.start), None),
                            (records.lock_key(inode, *heir, span.start), records.encode_lock(span.end, span.mode, span.pid))]
        return effects

    def rename_session(self, old: int, new: int) -> None:
        """All that the one holds the other holds from here on: they are the same client's. The records say so already."""
        for inode, owner in list(self._of_session.get(old, ())):
            spans = list(self.files[inode].spans[owner])
            self._change(inode, owner, Change(0, len(spans), []))
            for span in spans:
                self.load(inode, owner._replace(session=new), span)

    def end_session(self, session: int, hold_s: float | None = None) -> int:
        """The session is over: nobody waits for it, its locks are given on after `hold_s` (see `ended`). How many it has."""
        for waiter in [waiter for waiter in self._waiters.values() if waiter.owner.session == session]:
            self.give_up(waiter)
        if session in self._of_session:
            self.dead[session] = self._now_s() + (self.hold_s if hold_s is None else hold_s)
        return self.counts.get(session, 0)

    def ended(self, limit: int, serves: Callable[[int], bool] = lambda partition: True) -> list[Step]:
        """Releases of locks whose time has come, some `limit` ranges in all; none when there are none left but in partitions
        that we do not serve at the moment."""
        steps: list[Step] = []
        for session, until_s in list(self.dead.items()):
            if session not in self._of_session:
                del self.dead[session]
            elif until_s <= self._now_s():
                for inode, owner in self._of_session[session]:
                    if limit <= 0:
                        return steps
                    if not serves(partition_of(inode)):
                        continue
                    spans = self.files[inode].spans[owner][:limit]
                    limit -= len(spans)
                    steps.append(Step(inode, owner, True, Change(0, len(spans), []),
                                      tuple((records.lock_key(inode, *owner, span.start), None) for span in spans)))
        return steps


def _stand_against(waiter: Waiter, owner: Owner, start: int, end: int, mode: int) -> bool:
    return (waiter.owner != owner and waiter.owner.kind == owner.kind and waiter.start <= end and start <= waiter.end
            and EXCLUSIVE in (mode, waiter.mode))
