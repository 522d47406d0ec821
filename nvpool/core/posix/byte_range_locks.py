"""Byte-range locks of one owner on one file: setting, clearing and finding ranges.

The rules are those of POSIX for fcntl(2): a new lock replaces the same owner's locks in its range, splits a
lock that extends beyond the range, and merges with neighbours of the same mode. Ranges are a sorted list,
disjoint and as short as possible. Used by `meta/state/lock_table`, which grants locks, and by
`client/vfs/locks`, which caches granted locks. Pure functions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

UNLOCKED, SHARED, EXCLUSIVE = range(3)
RECORD, WHOLE = 1, 2
"""Kinds of locks, independent of each other: fcntl(2) locks and flock(2) locks."""
LAST_BYTE = (1 << 63) - 1
"""A lock up to this byte covers the file however large it becomes."""


class LockRange(NamedTuple):
    """Bytes `start` to `end`, both included, locked by the process `pid`."""

    start: int
    end: int
    mode: int
    pid: int = 0


class RangeChange(NamedTuple):
    """Replacement of part of a list: `spans[first:last] = new`."""

    first: int
    last: int
    new: list[LockRange]

    def apply(self, spans: list[LockRange]) -> None:
        spans[self.first : self.last] = self.new


def laid(spans: list[LockRange], start: int, end: int, mode: int, pid: int = 0) -> RangeChange:
    """Return the change to `spans` that gives [start, end] this mode; UNLOCKED removes locks."""
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
    return RangeChange(first, last, [*before, *([LockRange(low, high, mode, pid)] if mode else ()), *after])


def overlapping(spans: list[LockRange], start: int, end: int) -> list[LockRange]:
    """Return the spans that contain a byte of [start, end]."""
    first = bisect_left(spans, start, key=_end_of)
    return spans[first : bisect_right(spans, end, first, key=_start_of)]


def pieces(spans: list[LockRange], start: int, end: int) -> list[tuple[int, int, int]]:
    """Divide [start, end] into parts of one mode each, unlocked parts included: (start, end, mode)."""
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


def weaker(one: list[LockRange], other: list[LockRange], start: int, end: int) -> list[tuple[int, int, int]]:
    """Divide [start, end] as `pieces` does; each byte gets the weaker of its modes in the two lists."""
    return [
        (first, last, min(mode, its))
        for begin, until, mode in pieces(one, start, end)
        for first, last, its in pieces(other, begin, until)
    ]


def _start_of(span: LockRange) -> int:
    return span.start


def _end_of(span: LockRange) -> int:
    return span.end
