"""Lock table without a service: checked against a byte map; order, turns and deadlocks."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nvpool.core.clock import ManualClock
from nvpool.core.errors import TooManyLocks, WouldDeadlock
from nvpool.core.posix.byte_range_locks import (
    EXCLUSIVE,
    LAST_BYTE,
    RECORD,
    SHARED,
    UNLOCKED,
    WHOLE,
    LockRange,
)
from nvpool.meta.state import lock_table, records
from nvpool.meta.state.lock_table import FAIR_S, SILENT_S, TURN_S, LockTable, Owner

BYTES = 8
HOLD_S = 30.0


class Tables(RuleBasedStateMachine):
    """Each request is decided as the byte map says; records match the held locks; waiters get what becomes free."""

    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.table = LockTable(self.clock, HOLD_S)
        self.records = {}
        self.held = {}  # (inode, owner) -> mode of each byte
        self.places = {}  # ticket -> (inode, owner, start, end, mode)
        self.turns = set()
        self.table.on_turn = lambda waiter: self.turns.add(waiter.ticket)

    def apply(self, step):
        for key, raw in step.effects:
            if raw is None:
                del self.records[key]
            else:
                self.records[key] = raw
        self.table.commit(step)

    def blocked_by(self, inode, owner, start, end, mode):
        """Owners that hold a conflicting lock, or whose turn it is to get one."""
        found = set()
        for (its, other), modes in self.held.items():
            if (
                its == inode
                and other != owner
                and other.kind == owner.kind
                and any(EXCLUSIVE in (mode, one) and one for one in modes[start : end + 1])
            ):
                found.add(other)
        for ticket in self.turns:
            its, other, first, last, one = self.places[ticket]
            if (
                its == inode
                and other != owner
                and other.kind == owner.kind
                and first <= end
                and start <= last
                and (EXCLUSIVE in (mode, one))
            ):
                found.add(other)
        return found

    def circle(self, owner, blockers):
        """Whether the blockers wait for the owner."""
        known = set()
        while blockers - known:
            known |= blockers
            for inode, other, *wanted in self.places.values():
                if other in known and other != owner:
                    blockers = blockers | self.blocked_by(inode, other, *wanted)
        return owner in known

    def lay(self, inode, owner, start, end, mode):
        modes = self.held.setdefault((inode, owner), [UNLOCKED] * BYTES)
        modes[start : end + 1] = [mode] * (end + 1 - start)
        if not any(modes):
            del self.held[inode, owner]

    @rule(
        inode=st.integers(1, 2),
        kind=st.sampled_from([RECORD, RECORD, WHOLE]),
        session=st.integers(1, 2),
        number=st.integers(1, 2),
        place=st.tuples(st.integers(0, BYTES - 1), st.integers(0, BYTES - 1)).map(sorted),
        mode=st.sampled_from([SHARED, EXCLUSIVE, EXCLUSIVE]),
        wait=st.booleans(),
    )
    def lock(self, inode, kind, session, number, place, mode, wait):
        owner = Owner(kind, session, number)
        start, end = place if kind == RECORD else (0, BYTES - 1)
        blockers = self.blocked_by(inode, owner, start, end, mode)
        try:
            step = self.table.decide(inode, owner, start, end, mode, 0, wait)
        except WouldDeadlock:
            assert kind == RECORD and wait and self.circle(owner, blockers)
            return
        if blockers and wait and kind == RECORD:
            assert not self.circle(owner, blockers)
        if blockers or not step.granted:
            assert not step.granted and (blockers or wait), "not granted without a conflict"
            if kind == WHOLE and (inode, owner) in self.held:
                self.lay(inode, owner, 0, BYTES - 1, UNLOCKED)
            if wait:
                self.places[step.waiter.ticket] = inode, owner, start, end, mode
        else:
            self.lay(inode, owner, start, end, mode)
        self.apply(step)

    @rule(
        inode=st.integers(1, 2),
        kind=st.sampled_from([RECORD, WHOLE]),
        session=st.integers(1, 2),
        number=st.integers(1, 2),
        place=st.tuples(st.integers(0, BYTES - 1), st.integers(0, BYTES - 1)).map(sorted),
    )
    def unlock(self, inode, kind, session, number, place):
        owner = Owner(kind, session, number)
        start, end = place if kind == RECORD else (0, BYTES - 1)
        step = self.table.decide(inode, owner, start, end, UNLOCKED)
        assert step.granted
        self.lay(inode, owner, start, end, UNLOCKED)
        self.apply(step)

    @rule(number=st.integers(0, 7), here=st.booleans())
    def retry_or_give_up(self, number, here):
        """A waiter retries, with or without its turn, or gives up."""
        if not self.places:
            return
        ticket = sorted(self.places)[number % len(self.places)]
        inode, owner, start, end, mode = self.places[ticket]
        if not here:
            self.table.give_up(self.table.waiter(owner.session, ticket))
            del self.places[ticket]
            self.turns.discard(ticket)
            return
        had_turn = ticket in self.turns
        try:
            step = self.table.decide(inode, owner, start, end, mode, 0, True, ticket)
        except WouldDeadlock:
            return
        assert step.granted or not had_turn, "a lock was taken although another owner had its turn"
        if step.granted:
            del self.places[ticket]
            self.turns.discard(ticket)
            self.lay(inode, owner, start, end, mode)
        self.apply(step)

    @rule(session=st.integers(1, 2), said_so=st.booleans())
    def end_session(self, session, said_so):
        self.table.end_session(session, 0.0 if said_so else None)
        for ticket in [ticket for ticket, place in self.places.items() if place[1].session == session]:
            del self.places[ticket]
            self.turns.discard(ticket)
        if not said_so:
            assert self.table.ended(1000) == []
            self.clock.advance(HOLD_S)
        while steps := self.table.ended(2):
            for step in steps:
                self.apply(step)
        self.held = {place: modes for place, modes in self.held.items() if place[1].session != session}

    @rule()
    def advance_clock(self):
        self.clock.advance(FAIR_S)
        for ticket in self.places:
            self.table.waiters[ticket].heard_s = math.inf
            if ticket in self.turns:
                self.table.waiters[ticket].turn_s = self.clock.boottime_s()
        self.table.tick()
        for ticket, (inode, owner, start, end, mode) in self.places.items():
            assert ticket in self.turns or self.blocked_by(inode, owner, start, end, mode), (
                "free, and not granted to a waiter"
            )

    @invariant()
    def held_locks_match_records_without_conflicts(self):
        again = LockTable(self.clock, HOLD_S)
        for key in sorted(self.records):
            kind, session, owner, start = records.lock_of_key(key)
            again.load(
                records.inode_of_key(key),
                Owner(kind, session, owner),
                LockRange(start, *records.decode_lock(self.records[key])),
            )
        for table in (self.table, again):
            seen = {}
            for inode, file in table.files.items():
                for owner, spans in file.spans.items():
                    modes = seen[inode, owner] = [UNLOCKED] * BYTES
                    for span in spans:
                        modes[span.start : span.end + 1] = [span.mode] * (span.end + 1 - span.start)
            assert seen == self.held
        for (inode, owner), modes in self.held.items():
            for (its, other), others in self.held.items():
                if its == inode and other != owner and other.kind == owner.kind:
                    assert not any(
                        one and two and EXCLUSIVE in (one, two)
                        for one, two in zip(modes, others, strict=True)
                    )
        assert self.table.waiting == len(self.places)
        assert sum(self.table.counts.values()) == len(self.records)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


class Driven:
    """Lock table whose steps are committed immediately. Owners are letters."""

    def __init__(self):
        self.clock = ManualClock()
        self.table = LockTable(self.clock, HOLD_S)
        self.turns = []
        self.table.on_turn = lambda waiter: self.turns.append(chr(waiter.owner.owner))

    def lock(self, who, mode=EXCLUSIVE, inode=1, start=0, end=LAST_BYTE, wait=True, kind=RECORD, ticket=0):
        """True, or the ticket (0 where it does not wait)."""
        session = 1 if who.islower() else 2
        step = self.table.decide(inode, Owner(kind, session, ord(who)), start, end, mode, 0, wait, ticket)
        self.table.commit(step)
        return step.granted or (step.waiter.ticket if step.waiter else 0)

    def waiter(self, ticket):
        return self.table.waiters[ticket]


def test_waiters_are_granted_in_order_and_readers_together():
    d = Driven()
    assert d.lock("a") is True
    tickets = {
        who: d.lock(who, mode)
        for who, mode in (("b", SHARED), ("c", SHARED), ("d", EXCLUSIVE), ("e", SHARED))
    }
    d.lock("a", UNLOCKED)
    assert d.turns == ["b", "c"]
    assert (
        d.lock("b", SHARED, ticket=tickets["b"]) is True and d.lock("c", SHARED, ticket=tickets["c"]) is True
    )
    d.lock("b", UNLOCKED)
    assert d.turns == ["b", "c"]
    d.lock("c", UNLOCKED)
    assert d.turns == ["b", "c", "d"]
    assert d.lock("d", ticket=tickets["d"]) is True


def test_lock_is_reserved_for_the_waiter_whose_turn_it_is():
    d = Driven()
    d.lock("a")
    ticket = d.lock("b")
    d.lock("a", UNLOCKED)
    assert d.lock("c", wait=False) == 0
    assert [one.owner.owner for one in d.table.in_the_way(1, Owner(RECORD, 1, ord("c")), 0, 9, SHARED)] == [
        ord("b")
    ]
    assert d.lock("b", ticket=ticket) is True


def test_readers_pass_a_waiting_writer_after_one_second():
    d = Driven()
    d.lock("a", SHARED)
    d.lock("b", EXCLUSIVE)
    ticket = d.lock("c", SHARED)
    assert ticket is not True
    assert d.lock("d", SHARED, wait=False) is True, "a request that does not wait ignores waiters"
    assert d.lock("a", SHARED, start=5, end=9) is True, (
        "an owner with a lock on the file is not held up either"
    )
    d.clock.advance(FAIR_S)
    d.table.tick()
    assert d.turns == ["c"] and d.lock("c", SHARED, ticket=ticket) is True


def test_deadlock_is_refused_for_record_locks_only():
    d = Driven()
    assert d.lock("a", inode=1) is True and d.lock("B", inode=2) is True and d.lock("c", inode=3) is True
    d.lock("a", inode=2)
    d.lock("B", inode=3)
    with pytest.raises(WouldDeadlock):
        d.lock("c", inode=1)
    assert d.lock("c", inode=1, wait=False) == 0
    for who in "xy":
        assert d.lock(who, SHARED, inode=9) is True
    d.lock("x", EXCLUSIVE, inode=9)
    with pytest.raises(WouldDeadlock):
        d.lock("y", EXCLUSIVE, inode=9)


def test_two_flock_upgrades_do_not_deadlock():
    d = Driven()
    for who in "ab":
        assert d.lock(who, SHARED, kind=WHOLE) is True
    first = d.lock("a", EXCLUSIVE, kind=WHOLE)
    assert first is not True, "b has the lock; the lock of a was released"
    assert d.lock("b", EXCLUSIVE, kind=WHOLE) is True
    d.lock("b", UNLOCKED, kind=WHOLE)
    assert d.turns == ["a"]
    assert d.lock("a", EXCLUSIVE, kind=WHOLE, ticket=first) is True
    assert d.lock("c", SHARED, kind=WHOLE, wait=False) == 0
    assert d.lock("d", EXCLUSIVE, kind=RECORD) is True, "the two kinds of locks are independent"


def test_flock_is_lost_when_conversion_fails_as_on_linux():
    d = Driven()
    for who in "ab":
        assert d.lock(who, SHARED, kind=WHOLE) is True
    assert d.lock("a", EXCLUSIVE, kind=WHOLE, wait=False) == 0
    assert d.lock("b", EXCLUSIVE, kind=WHOLE, wait=False) is True


def test_silent_client_loses_its_turn_and_places():
    d = Driven()
    d.lock("a")
    for who in "bcd":
        d.lock(who)
    ticket = d.lock("E")
    d.waiter(ticket).heard_s = math.inf
    d.lock("a", UNLOCKED)
    d.clock.advance(TURN_S + 0.1)
    d.table.tick()
    assert d.turns[0] == "b" and d.turns[-1] == "E" and d.table.waiting == 1
    assert d.lock("E", ticket=ticket) is True


def test_waiter_that_does_not_retry_is_dropped():
    d = Driven()
    d.lock("a")
    d.lock("b")
    d.clock.advance(SILENT_S + 0.1)
    d.table.tick()
    assert d.table.waiting == 0
    d.lock("a", UNLOCKED)
    assert d.turns == [] and not d.table.files


def test_session_end_drops_waiters_before_locks():
    d = Driven()
    d.lock("A", inode=1)
    d.lock("b", inode=2)
    d.lock("C", inode=2)
    ticket = d.lock("b", inode=1)
    d.table.end_session(2)
    assert d.table.waiting == 1 and d.turns == []
    d.clock.advance(HOLD_S - 1)
    assert d.table.ended(10) == []
    d.clock.advance(1)
    for step in d.table.ended(10):
        d.table.commit(step)
    assert d.turns == ["b"] and d.lock("b", inode=1, ticket=ticket) is True and d.table.ended(10) == []


def test_locks_and_places_have_bounds(monkeypatch):
    monkeypatch.setattr(lock_table, "LOCKS_PER_SESSION_MAX", 5)
    monkeypatch.setattr(lock_table, "WAITERS_PER_SESSION_MAX", 2)
    d = Driven()
    for number in range(5):
        d.lock("a", start=number * 10, end=number * 10)
    with pytest.raises(TooManyLocks):
        d.lock("a", start=100, end=100)
    assert d.lock("a", start=0, end=40) is True, "which makes one of the five"
    d.lock("b")
    d.lock("c")
    with pytest.raises(TooManyLocks):
        d.lock("d")
    assert d.lock("d", wait=False) == 0
