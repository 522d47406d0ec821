"""The byte ranges of one file that one owner has locked: laying a lock over them, and what lies where.

POSIX's rules for fcntl(2): a new lock replaces what the same owner has there, splits what sticks out, and joins neighbours of
the same mode. Ranges are a list in order, disjoint, as few as can be. Used by `meta/state/lock_table`, which decides, and by
`client/vfs/locks`, which remembers what it was given. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

UNLOCKED, SHARED, EXCLUSIVE = range(3)
RECORD, WHOLE = 1, 2
"""Kinds of locks, which do not know of one another: of fcntl(2), and of flock(2)."""
LAST_BYTE = (1 << 63) - 1
"""A lock to here holds whatever the file's size becomes."""


class Span(NamedTuple):
    """Bytes start to end, both included, locked by the process `pid`."""

    start: int
    end: int
    mode: int
    pid: int = 0


class Change(NamedTuple):
    """`spans[first:last] = new` is the change."""

    first: int
    last: int
    new: list[Span]

    def apply(self, spans: list[Span]) -> None:
        spans[self.first:self.last] = self.new


def laid(spans: list[Span], start: int, end: int, mode: int, pid: int = 0) -> Change:
    """What becomes of `spans` when [start, end] gets this mode; UNLOCKED takes the locks away."""
    first = bisect_left(spans, start - 1, key=_end_of)
    last = bisect_right(spans, end + 1, first, key=_start_of)
    before, after = [], []
    low, high = start, end
    for span in spans[first:last]:
        if span.mode == mode:
            low, high = min(low, span.start), max(high, span.end)
            continue
        if span.start < start:
            before.append(span._replace(end=min(span.end, start - 1)))
        if span.end > end:
            after.append(span._replace(start=max(span.start, end + 1)))
    return Change(first, last, [*before, *([Span(low, high, mode, pid)] if mode else ()), *after])


def overlapping(spans: list[Span], start: int, end: int) -> list[Span]:
    """Those that have a byte of [start, end]."""
    first = bisect_left(spans, start, key=_end_of)
    return spans[first:bisect_right(spans, end, first, key=_start_of)]


def pieces(spans: list[Span], start: int, end: int) -> list[tuple[int, int, int]]:
    """[start, end] in parts of one mode each, what is not locked included: (start, end, mode)."""
    found = []
    for span in overlapping(spans, start, end):
        if span.start > start:
            found.append((start, span.start - 1, UNLOCKED))
        start = max(start, span.start)
        found.append((start, min(span.end, end), span.mode))
        start = span.end + 1
    if start <= end:
        found.append((start, end, UNLOCKED))
    return found


def weaker(one: list[Span], other: list[Span], start: int, end: int) -> list[tuple[int, int, int]]:
    """As `pieces`, where each byte has the weaker mode of the two."""
    return [(first, last, min(mode, its)) for begin, until, mode in pieces(one, start, end)
            for first, last, its in pieces(other, begin, until)]


def _start_of(span: Span) -> int:
    return span.start


def _end_of(span: Span) -> int:
    return span.end
