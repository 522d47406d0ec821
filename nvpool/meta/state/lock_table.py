"""Lock table: file locks of a shard, the queues of waiters, and decisions on lock requests.

Locks of fcntl(2) and of flock(2) are separate, as in Linux. Locks are also stored in records
(`records.lock_key`), one for each range: `decide` says what a request would change, the service makes its
effects durable, and `commit` updates this table. So no lock exists that the records do not have.

Waiters are in memory only: each has a place in a queue, named by a ticket. When the lock becomes free, the
first waiters get their *turn*: the lock counts as theirs, and they ask for it by an ordinary change that may
be repeated. A waiter that does not come within `TURN_S` loses its turn. So a lock is never granted in an
answer that no client received.

Places are in order of arrival. An earlier waiter for a conflicting lock stops only other waiters, and for no
longer than `FAIR_S`. After that, and for an owner that has a lock on the file already, a free range is free,
as on one machine. Otherwise two waiters could block each other by our rules alone.

Used by `meta/operations/lock` (decide), `meta/sessions/lock_service` and `meta/server/service`. Makes
decisions, never waits, reports turns through `on_turn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nvpool.core.clock import Clock
from nvpool.core.errors import TooManyLocks, WouldDeadlock
from nvpool.core.ids import partition_of
from nvpool.core.posix.byte_range_locks import (
    EXCLUSIVE,
    RECORD,
    UNLOCKED,
    WHOLE,
    LockRange,
    RangeChange,
    laid,
    overlapping,
)
from nvpool.meta.state import records
from nvpool.rpc.peer_limits import raise_it
from nvpool.rpc.stats import RPC_STATS

LOCKS_PER_SESSION_MAX = 65_536
WAITERS_PER_SESSION_MAX = 4096
WAITERS_MAX = 65_536
TURN_S = 5.0
"""Time for which a lock is reserved for the waiter whose turn it is. A client comes within a round trip."""
SILENT_S = 10.0
"""Time after which a waiter loses its place if its client does not ask for it."""
FAIR_S = 1.0


class Owner(NamedTuple):
    """Owner of file locks: the lock's kind, the client's session, and the owner within the client."""

    kind: int
    session: int
    owner: int


class Waiter:
    """A place in the queue of a file."""

    __slots__ = ("ticket", "inode", "owner", "start", "end", "mode", "pid", "born_s", "heard_s", "turn_s")

    def __init__(
        self, ticket: int, inode: int, owner: Owner, start: int, end: int, mode: int, pid: int, now_s: float
    ) -> None:
        self.ticket = ticket
        self.inode = inode
        self.owner = owner
        self.start = start
        self.end = end
        self.mode = mode
        self.pid = pid
        self.born_s = self.heard_s = now_s
        """heard_s: time when the client last asked for the place; infinite while its request is open."""
        self.turn_s = math.inf
        """Time since which it has its turn."""

    @property
    def has_turn(self) -> bool:
        return self.turn_s < math.inf


class LockDecision(NamedTuple):
    """A decided request.

    `waiter`: leaves the queue if the lock is granted, else is in the queue from now on.
    """

    inode: int
    owner: Owner
    granted: bool
    change: RangeChange | None = None
    effects: tuple[tuple[bytes, bytes | None], ...] = ()
    waiter: Waiter | None = None


class LockConflict(NamedTuple):
    """A conflicting range and its owner. `waits`: the owner waits for it and does not have it yet."""

    owner: Owner
    span: LockRange
    waits: bool = False


class _LockedFile:
    """Locked ranges and queue of one file."""

    __slots__ = ("spans", "queue")

    def __init__(self) -> None:
        self.spans: dict[Owner, list[LockRange]] = {}
        self.queue: list[Waiter] = []


class LockTable:
    """File locks and waiters of one shard."""

    def __init__(
        self, clock: Clock, hold_s: float, client_of: Callable[[int], str] = lambda session: ""
    ) -> None:
        """hold_s: seconds for which locks of a session are kept that has ended without being closed by its
        client."""
        self.hold_s = hold_s
        self._now_s = clock.boottime_s
        # random: tickets from before a restart must be unknown
        self._next_ticket = int.from_bytes(clock.secret(7), "big")
        self.files: dict[int, _LockedFile] = {}
        self.counts: dict[int, int] = {}
        """Number of locked ranges by session."""
        self._of_session: dict[int, dict[tuple[int, Owner], None]] = {}
        self.waiters: dict[int, Waiter] = {}
        self._waits_of: dict[Owner, list[Waiter]] = {}
        self._waits_by_session: dict[int, int] = {}
        self.dead: dict[int, float] = {}
        """Ended sessions -> time before which their locks are not released, because their grants may still be
        valid."""
        self.on_turn: Callable[[Waiter], None] = lambda waiter: None
        self.full: frozenset[int] = frozenset()
        """Sessions of peers that have too many locks in all; see Sessions.weigh."""
        self.client_of = client_of

    # -- requests ----------------------------------------------------------------------------------------------------

    def decide(
        self,
        inode: int,
        owner: Owner,
        start: int,
        end: int,
        mode: int,
        pid: int = 0,
        wait: bool = False,
        ticket: int = 0,
    ) -> LockDecision:
        """Decide a lock request; nothing is changed. WouldDeadlock, TooManyLocks."""
        file = self.files.get(inode)
        waiter = self.waiters.get(ticket)
        if waiter is not None and (waiter.inode, waiter.owner) != (inode, owner):
            waiter = None
        if not mode or file is None:
            return self._take(inode, owner, start, end, mode, pid, waiter)
        candidate = waiter or Waiter(0, inode, owner, start, end, mode, pid, self._now_s())
        if not self._is_blocked(file, candidate, wait):
            return self._take(inode, owner, start, end, mode, pid, waiter)
        if owner.kind == WHOLE and owner in file.spans:
            # flock(2): the owner's own lock is given up first, or two owners that want more would wait for
            # each other for ever
            step = self._take(inode, owner, start, end, UNLOCKED, pid, None)._replace(granted=False)
        else:
            step = LockDecision(inode, owner, False)
        if not wait:
            return step
        if owner.kind == RECORD and self._closes_a_circle(file, candidate):
            raise WouldDeadlock()
        if waiter is None and (
            len(self.waiters) >= WAITERS_MAX
            or self._waits_by_session.get(owner.session, 0) >= WAITERS_PER_SESSION_MAX
        ):
            raise TooManyLocks(f"{len(self.waiters)} processes wait for locks already")
        candidate.ticket = candidate.ticket or self._next_ticket
        return step._replace(waiter=candidate)

    def _take(
        self, inode: int, owner: Owner, start: int, end: int, mode: int, pid: int, waiter: Waiter | None
    ) -> LockDecision:
        spans = self.spans_of(inode, owner)
        change = laid(spans, start, end, mode, pid)
        old, new = spans[change.first : change.last], change.new
        if mode and len(new) > len(old) and self.counts.get(owner.session, 0) >= LOCKS_PER_SESSION_MAX:
            raise TooManyLocks(f"a client holds {LOCKS_PER_SESSION_MAX} locks at most")
        if mode and len(new) > len(old) and owner.session in self.full:
            RPC_STATS.limit_met("locks_per_peer")
            raise TooManyLocks(
                f"{self.client_of(owner.session)} and others of its host or user hold too many locks; give some "
                f"back, {raise_it('locks_per_peer')}"
            )
        begins = {span.start for span in new}
        effects = [
            (records.lock_key(inode, *owner, span.start), None) for span in old if span.start not in begins
        ]
        effects += [
            (records.lock_key(inode, *owner, span.start), records.encode_lock(span.end, span.mode, span.pid))
            for span in new
            if span not in old
        ]
        return LockDecision(inode, owner, True, change, tuple(effects), waiter)

    def commit(self, step: LockDecision) -> None:
        """Update the table after a decided step is in the records, and report new turns."""
        waiter = step.waiter
        if step.change is not None:
            self._change(step.inode, step.owner, step.change)
        if waiter is not None and step.granted:
            self._leave(waiter)
        elif waiter is not None:
            waiter.heard_s = self._now_s()
            if waiter.ticket not in self.waiters:
                self._join(waiter)
        self._give_turns(step.inode)

    def _change(self, inode: int, owner: Owner, change: RangeChange) -> None:
        file = self.files.get(inode)
        if file is None:
            file = self.files[inode] = _LockedFile()
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

    def _tidy(self, inode: int, file: _LockedFile) -> None:
        if not file.spans and not file.queue:
            self.files.pop(inode, None)

    def in_the_way(self, inode: int, owner: Owner, start: int, end: int, mode: int) -> Iterator[LockConflict]:
        """Locks of other owners that conflict with such a lock.

        A lock that is reserved for a turn counts as held.
        """
        file = self.files.get(inode)
        if file is not None:
            yield from self._conflicts(file, owner, start, end, mode)

    @staticmethod
    def _conflicts(
        file: _LockedFile, owner: Owner, start: int, end: int, mode: int
    ) -> Iterator[LockConflict]:
        for other, spans in file.spans.items():
            if other.kind == owner.kind and other != owner:
                for span in overlapping(spans, start, end):
                    if mode == EXCLUSIVE or span.mode == EXCLUSIVE:
                        yield LockConflict(other, span)
        for waiter in file.queue:
            if waiter.has_turn and _stand_against(waiter, owner, start, end, mode):
                yield LockConflict(
                    waiter.owner, LockRange(waiter.start, waiter.end, waiter.mode, waiter.pid), True
                )

    def locks_on(self, inode: int) -> Iterator[LockConflict]:
        """All locks that are held or waited for."""
        file = self.files.get(inode)
        if file is not None:
            for owner, spans in file.spans.items():
                yield from (LockConflict(owner, span) for span in spans)
            yield from (
                LockConflict(waiter.owner, LockRange(waiter.start, waiter.end, waiter.mode, waiter.pid), True)
                for waiter in file.queue
            )

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _is_blocked(self, file: _LockedFile, candidate: Waiter, wait: bool) -> bool:
        if (
            next(self._conflicts(file, candidate.owner, candidate.start, candidate.end, candidate.mode), None)
            is not None
        ):
            return True
        if (
            not wait
            or candidate.has_turn
            or candidate.owner in file.spans
            or self._now_s() - candidate.born_s >= FAIR_S
        ):
            return False
        for earlier in file.queue:
            if earlier is candidate:
                break
            if _stand_against(earlier, candidate.owner, candidate.start, candidate.end, candidate.mode):
                return True
        return False

    def _closes_a_circle(self, file: _LockedFile, candidate: Waiter) -> bool:
        """Whether the request closes a deadlock: a conflicting owner waits, directly or not, for the caller's
        lock."""
        seen: set[Owner] = set()
        left = [
            one.owner
            for one in self._conflicts(file, candidate.owner, candidate.start, candidate.end, candidate.mode)
        ]
        while left:
            owner = left.pop()
            if owner == candidate.owner:
                return True
            if owner in seen:
                continue
            seen.add(owner)
            for waiter in self._waits_of.get(owner, ()):
                left += [
                    one.owner
                    for one in self._conflicts(
                        self.files[waiter.inode], owner, waiter.start, waiter.end, waiter.mode
                    )
                ]
        return False

    def _join(self, waiter: Waiter) -> None:
        self._next_ticket += 1
        self.waiters[waiter.ticket] = waiter
        self._waits_of.setdefault(waiter.owner, []).append(waiter)
        self._waits_by_session[waiter.owner.session] = self._waits_by_session.get(waiter.owner.session, 0) + 1
        file = self.files.get(waiter.inode)
        if file is None:
            file = self.files[waiter.inode] = _LockedFile()
        file.queue.append(waiter)

    def _leave(self, waiter: Waiter) -> None:
        if self.waiters.pop(waiter.ticket, None) is None:
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
        waiter = self.waiters.get(ticket)
        return waiter if waiter is not None and waiter.owner.session == session else None

    def give_up(self, waiter: Waiter) -> None:
        """Remove a waiter from its queue."""
        self._leave(waiter)
        self._give_turns(waiter.inode)

    @property
    def waiting(self) -> int:
        return len(self.waiters)

    def tick(self) -> None:
        """Called about once a second: drop silent waiters and unused turns, and give turns that are due."""
        now_s = self._now_s()
        silent: set[int] = set()
        for waiter in list(self.waiters.values()):
            if waiter.has_turn and now_s - waiter.turn_s > TURN_S:
                silent.add(waiter.owner.session)
                self.give_up(waiter)
            elif now_s - waiter.heard_s > SILENT_S:
                self.give_up(waiter)
        for waiter in list(self.waiters.values()) if silent else ():
            if waiter.owner.session in silent and waiter.heard_s < math.inf:
                self.give_up(waiter)  # otherwise each of them would delay the others for as long
        for inode in {waiter.inode for waiter in self.waiters.values()}:
            self._give_turns(inode)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def load(self, inode: int, owner: Owner, span: LockRange) -> None:
        """Load a range from the records, in their order.

        A range that contradicts earlier ones is left to fsck.
        """
        spans = self.spans_of(inode, owner)
        if span.start <= span.end and (not spans or spans[-1].end < span.start):
            self._change(inode, owner, RangeChange(len(spans), len(spans), [span]))

    @property
    def sessions(self) -> list[int]:
        """Sessions that have locks."""
        return list(self._of_session)

    def spans_of(self, inode: int, owner: Owner) -> list[LockRange]:
        file = self.files.get(inode)
        return file.spans.get(owner, []) if file is not None else []

    def forget(self, inode: int) -> None:
        """Forget an inode that does not exist here, whatever the records said."""
        file = self.files.get(inode)
        if file is not None:
            for waiter in list(file.queue):
                self._leave(waiter)
            for owner, spans in list(file.spans.items()):
                self._change(inode, owner, RangeChange(0, len(spans), []))

    def sessions_in(self, partitions: frozenset[int]) -> set[int]:
        """Sessions that have locks on inodes of these partitions."""
        return {
            session
            for session, held in self._of_session.items()
            if any(partition_of(inode) in partitions for inode, _ in held)
        }

    def waiters_in(self, partitions: frozenset[int]) -> list[Waiter]:
        return [waiter for waiter in self.waiters.values() if partition_of(waiter.inode) in partitions]

    def renaming(self, old: int, new: int) -> list[tuple[bytes, bytes | None]]:
        """Effects of `rename_session`."""
        effects: list[tuple[bytes, bytes | None]] = []
        for inode, owner in self._of_session.get(old, ()):
            heir = owner._replace(session=new)
            for span in self.files[inode].spans[owner]:
                effects += [
                    (records.lock_key(inode, *owner, span.start), None),
                    (
                        records.lock_key(inode, *heir, span.start),
                        records.encode_lock(span.end, span.mode, span.pid),
                    ),
                ]
        return effects

    def rename_session(self, old: int, new: int) -> None:
        """Move all locks of session `old` to session `new` of the same client.

        The records are changed already.
        """
        for inode, owner in list(self._of_session.get(old, ())):
            spans = list(self.files[inode].spans[owner])
            self._change(inode, owner, RangeChange(0, len(spans), []))
            for span in spans:
                self.load(inode, owner._replace(session=new), span)

    def end_session(self, session: int, hold_s: float | None = None) -> int:
        """End a session: remove its waiters, release its locks after `hold_s` (see `ended`).

        Return its lock count.
        """
        for waiter in [waiter for waiter in self.waiters.values() if waiter.owner.session == session]:
            self.give_up(waiter)
        if session in self._of_session:
            self.dead[session] = self._now_s() + (self.hold_s if hold_s is None else hold_s)
        return self.counts.get(session, 0)

    def ended(self, limit: int, serves: Callable[[int], bool] = lambda partition: True) -> list[LockDecision]:
        """Releases of locks whose time has come, about `limit` ranges in all.

        Empty if no locks are left to release, except in partitions that this shard does not serve at the
        moment.
        """
        steps: list[LockDecision] = []
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
                    steps.append(
                        LockDecision(
                            inode,
                            owner,
                            True,
                            RangeChange(0, len(spans), []),
                            tuple((records.lock_key(inode, *owner, span.start), None) for span in spans),
                        )
                    )
        return steps


def _stand_against(waiter: Waiter, owner: Owner, start: int, end: int, mode: int) -> bool:
    return (
        waiter.owner != owner
        and waiter.owner.kind == owner.kind
        and waiter.start <= end
        and start <= waiter.end
        and EXCLUSIVE in (mode, waiter.mode)
    )
