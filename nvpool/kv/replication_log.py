"""The last changes of an engine, kept for its standbys, and how far they are *committed*: on every member that counts.

A change has a position, (sequence, term): the term is the primary's that made it. There is one primary in a term, and it
writes its changes one behind the other onto what it began with; so two members that have the same position have the same
changes up to it, and where their histories part is found by comparing positions.

The engine notes each change here. On a primary `kv/replication/primary` says what is committed, on a standby the primary does;
the engine writes nothing to LMDB that is not, since that could not be dropped any more. One thread owns it; nothing here waits
but `until`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from nvpool.core.units import MIB
from nvpool.kv.replication.commit_mark import CommitMark

RETAIN_BYTES = 32 * MIB
"""About 90,000 changes of usual size: a standby that was away for some seconds of full load is caught up from them."""


class Position(NamedTuple):
    sequence: int
    term: int


class Run(NamedTuple):
    """Changes of one term that follow one another."""

    term: int
    first: int
    last: int


class Tail(NamedTuple):
    """What a member has: all up to `stored`, which it can not drop, and behind it `runs`, which it can."""

    stored: Position
    runs: tuple[Run, ...] = ()

    @property
    def last(self) -> Position:
        return Position(self.runs[-1].last, self.runs[-1].term) if self.runs else self.stored


def runs_of(positions: Iterable[Position]) -> tuple[Run, ...]:
    """Positions that follow one another without a gap, as runs."""
    runs: list[Run] = []
    for sequence, term in positions:
        if runs and runs[-1].term == term:
            runs[-1] = runs[-1]._replace(last=sequence)
        else:
            runs.append(Run(term, sequence, sequence))
    return tuple(runs)


class History:
    """Of one engine. `base` is the position before the first change that is kept, `last` that of the last one."""

    def __init__(self, base: Position, retain_bytes: int = RETAIN_BYTES) -> None:
        self.base = self.last = base
        self.committed = base.sequence
        self.alone = True
        """No other member counts: what is made is committed."""
        self.on_change: Callable[[], None] | None = None
        """Called after each change; must be cheap."""
        self._retain_bytes = retain_bytes
        self._bytes = 0
        self._kept: dict[int, tuple[int, bytes]] = {}
        self._waiting: deque[tuple[int, Callable[[bool], None]]] = deque()
        self._ended = False
        self._mark: CommitMark | None = None

    def mark_commits(self, mark: CommitMark | None) -> None:
        """Raise this mark from here on before a change counts as committed."""
        self._mark = mark

    def note(self, sequence: int, term: int, record: bytes) -> None:
        """The engine has made the change `sequence`; `record` is what its journal has of it. Never fails."""
        self._kept[sequence] = term, record
        self.last = Position(sequence, term)
        self._bytes += len(record)
        if self.alone:
            if self._mark is not None:
                self._mark.raise_to(sequence)
            self.committed = sequence
        while self._bytes > self._retain_bytes and self.base.sequence < self.committed:
            first = self.base.sequence + 1
            dropped_term, dropped = self._kept.pop(first)
            self._bytes -= len(dropped)
            self.base = Position(first, dropped_term)
        if self.on_change is not None:
            self.on_change()

    def term_at(self, sequence: int) -> int | None:
        """Of the change `sequence`; None where it is not known any more, or not yet."""
        kept = self._kept.get(sequence)
        if kept is not None:
            return kept[0]
        return self.base.term if sequence == self.base.sequence else None

    def records(self, after: int, bytes_max: int) -> list[bytes]:
        """The changes behind `after`, in order: at least one where there is one, and no more than bytes_max otherwise."""
        found: list[bytes] = []
        size = 0
        sequence = after + 1
        while (kept := self._kept.get(sequence)) is not None:
            size += len(kept[1])
            if found and size > bytes_max:
                break
            found.append(kept[1])
            sequence += 1
        return found

    def common(self, tail: Tail) -> int | None:
        """The last change that we and a member with `tail` have both, with all before it; None where that can not be told from
        what is kept, or where the member would have to drop what it can not."""
        if not tail.stored.sequence and not self.base.sequence:
            tail = tail._replace(stored=self.base)  # both began with nothing
        for run in reversed((Run(tail.stored.term, tail.stored.sequence, tail.stored.sequence), *tail.runs)):
            sequence = min(run.last, self.last.sequence)
            while sequence >= max(run.first, self.base.sequence):
                term = self.term_at(sequence)
                if term == run.term:
                    return sequence
                if term < run.term:
                    break
                sequence -= 1
        return None

    def positions(self) -> Iterable[Position]:
        return (Position(sequence, term) for sequence, (term, _) in self._kept.items())

    # -- committed ---------------------------------------------------------------------------------------------------

    def advance(self, committed: int) -> None:
        """All up to `committed` is on every member that counts. Never goes back."""
        committed = min(committed, self.last.sequence)
        if committed > self.committed:
            if self._mark is not None:
                self._mark.raise_to(committed)
            self.committed = committed
        waiting = self._waiting
        while waiting and waiting[0][0] <= self.committed:
            waiting.popleft()[1](True)

    def when(self, sequence: int, then: Callable[[bool], None]) -> None:
        """Call `then(True)` when the change `sequence` is committed, or `then(False)` when that will not be known. At once
        where it is so already. Sequences are asked for in rising order."""
        if self._ended or sequence <= self.committed:
            then(not self._ended)
        else:
            self._waiting.append((sequence, then))

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def until(self, sequence: int) -> None:
        """Return when the change `sequence` is committed; for ever where it never is."""
        while self.committed < sequence:
            done = asyncio.get_running_loop().create_future()
            # Not in order with those of `when`: behind the last of them, which is as high or higher.
            self._waiting.append((max(sequence, self._waiting[-1][0] if self._waiting else 0),
                                  lambda _known, done=done: done.done() or done.set_result(None)))
            await done
            if self._ended:
                await asyncio.get_running_loop().create_future()  # until whoever waits is cancelled

    def end(self) -> None:
        """Nothing will be committed any more: all who wait are told so."""
        self._ended = True
        while self._waiting:
            self._waiting.popleft()[1](False)


def tail_of(stored: Position, history: History) -> Tail:
    """What a member with this history has, of which LMDB holds all up to `stored`."""
    return Tail(stored, runs_of(at for at in history.positions() if at.sequence > stored.sequence))
