"""Replication log: the last changes of an engine for its standbys, and how far changes are committed.

A change is *committed* when every member that counts has it. A change has a position, (sequence, term); the
term is that of the primary that made the change. A term has one primary, and it appends its changes to the
log with which it started. So two members with the same position have the same changes up to it. Comparing
positions shows where two logs diverge.

The engine notes each change here. On a primary, `kv/replication/primary` determines what is committed; a
standby learns it from the primary. The engine writes only committed changes to LMDB, because it cannot undo
changes there. One thread owns the log; only `until` waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

from nvpool.core.units import MIB

RETAIN_BYTES = 32 * MIB
"""About 90,000 changes of usual size: enough for a standby that was absent for some seconds of full load."""


class Position(NamedTuple):
    sequence: int
    term: int


class TermRun(NamedTuple):
    """Consecutive changes of one term."""

    term: int
    first: int
    last: int


class MarkWriter(Protocol):
    """The commit mark of a primary, as the log raises it; see kv/replication/commit_mark."""

    def raise_to(self, sequence: int) -> None:
        """Allow changes up to `sequence` to be acknowledged from now on."""


class Tail(NamedTuple):
    """The changes of a member: all up to `stored`, which it cannot undo, then `runs`, which it can."""

    stored: Position
    runs: tuple[TermRun, ...] = ()

    @property
    def last(self) -> Position:
        return Position(self.runs[-1].last, self.runs[-1].term) if self.runs else self.stored


def runs_of(positions: Iterable[Position]) -> tuple[TermRun, ...]:
    """Group consecutive positions into runs."""
    runs: list[TermRun] = []
    for sequence, term in positions:
        if runs and runs[-1].term == term:
            runs[-1] = runs[-1]._replace(last=sequence)
        else:
            runs.append(TermRun(term, sequence, sequence))
    return tuple(runs)


class ReplicationHistory:
    """Replication log of one engine. `base` is the position before the first retained change, `last` that of
    the last."""

    def __init__(self, base: Position, retain_bytes: int = RETAIN_BYTES) -> None:
        self.base = self.last = base
        self.committed = base.sequence
        self.alone = True
        """No other member counts: changes are committed immediately."""
        self.on_change: Callable[[], None] | None = None
        """Callback after each change; must be cheap."""
        self._retain_bytes = retain_bytes
        self._bytes = 0
        self._kept: dict[int, tuple[int, bytes]] = {}
        self._waiting: deque[tuple[int, Callable[[bool], None]]] = deque()
        self._ended = False
        self._mark: MarkWriter | None = None

    def mark_commits(self, mark: MarkWriter | None) -> None:
        """Raise this mark from now on, before a change counts as committed."""
        self._mark = mark

    def note(self, sequence: int, term: int, record: bytes) -> None:
        """Note that the engine has applied the change `sequence`; `record` is its journal record. Never
        raises."""
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
        """Return the term of the change `sequence`.

        The result is None if the change is no longer retained or does not exist yet.
        """
        kept = self._kept.get(sequence)
        if kept is not None:
            return kept[0]
        return self.base.term if sequence == self.base.sequence else None

    def records(self, after: int, bytes_max: int) -> list[bytes]:
        """Return the changes after `after` in order: at least one if there is one, otherwise at most
        `bytes_max` bytes."""
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
        """Return the last change that this log and a member with `tail` share, with all earlier ones.

        None if the retained changes do not show it, or if the member would have to undo changes that it
        cannot undo.
        """
        if not tail.stored.sequence and not self.base.sequence:
            tail = tail._replace(stored=self.base)  # both started empty
        for run in reversed(
            (TermRun(tail.stored.term, tail.stored.sequence, tail.stored.sequence), *tail.runs)
        ):
            sequence = min(run.last, self.last.sequence)
            while sequence >= max(run.first, self.base.sequence):
                term = self.term_at(sequence)
                if term == run.term:
                    return sequence
                if term is None or term < run.term:
                    break
                sequence -= 1
        return None

    def positions(self) -> Iterable[Position]:
        return (Position(sequence, term) for sequence, (term, _) in self._kept.items())

    # -- committed ---------------------------------------------------------------------------------------------------

    def advance(self, committed: int) -> None:
        """Mark changes up to `committed` as present on every member that counts. Never goes back."""
        committed = min(committed, self.last.sequence)
        if committed > self.committed:
            if self._mark is not None:
                self._mark.raise_to(committed)
            self.committed = committed
        waiting = self._waiting
        while waiting and waiting[0][0] <= self.committed:
            waiting.popleft()[1](True)

    def when(self, sequence: int, then: Callable[[bool], None]) -> None:
        """Call `then(True)` when the change `sequence` is committed, or `then(False)` if that will never be
        known.

        The call is immediate if the outcome is already known. Callers must pass sequences in ascending order.
        """
        if self._ended or sequence <= self.committed:
            then(not self._ended)
        else:
            self._waiting.append((sequence, then))

    @property
    def waiting(self) -> int:
        """Number of waiting callbacks."""
        return len(self._waiting)

    async def until(self, sequence: int) -> None:
        """Return when the change `sequence` is committed; wait for ever if it never is."""
        while self.committed < sequence:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            # The queue must stay ordered: wait after the last callback of `when`, whose number is as high or
            # higher.
            self._waiting.append(
                (max(sequence, self._waiting[-1][0] if self._waiting else 0), partial(_complete, done))
            )
            await done
            if self._ended:
                # Nothing will be committed: wait until the caller is cancelled.
                await asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """End the log: nothing will be committed any more, and all waiting callbacks get False."""
        self._ended = True
        while self._waiting:
            self._waiting.popleft()[1](False)


def _complete(done: asyncio.Future[None], _is_committed: bool) -> None:
    if not done.done():
        done.set_result(None)


def tail_of(stored: Position, history: ReplicationHistory) -> Tail:
    """Return the tail of a member with this log; its LMDB has all changes up to `stored`."""
    return Tail(stored, runs_of(at for at in history.positions() if at.sequence > stored.sequence))
