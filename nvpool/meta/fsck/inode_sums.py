"""Sums that a check keeps of each inode: what its names and entries differ from its record.

Used by `meta/fsck/walker` and its checks.
"""

from __future__ import annotations

NAMES, SUBDIRS, ENTRIES, PARENTS = range(4)
"""Indexes of the sums of an inode."""


class InodeSums:
    """Sums by inode; an inode whose sums are even has none."""

    def __init__(self, is_whole: bool) -> None:
        """`is_whole`: the walk reads all records; otherwise nothing is counted."""
        self.is_whole = is_whole
        self.by_inode: dict[int, list[int]] = {}
        self.misplaced: dict[int, bytes] = {}
        """Directory -> key of a name that is not in the directory's parent; the directory keeps its sums."""

    def add(self, number: int, which: int, amount: int) -> None:
        """Add to a sum."""
        if not amount:
            return
        sums = self.by_inode.get(number)
        if sums is None:
            sums = self.by_inode[number] = [0, 0, 0, 0]
        sums[which] += amount
        if not any(sums) and number not in self.misplaced:
            del self.by_inode[number]

    def count(self, number: int, which: int, amount: int) -> None:
        """Add what the walk has found."""
        if self.is_whole:
            self.add(number, which, amount)
