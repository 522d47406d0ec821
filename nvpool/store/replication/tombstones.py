"""Tombstones: recent truncations and removals, which show that a copy of a chunk is too old.

A metadata service truncates and removes on all targets of a chain, on some a little later than on others. A
target that catches up could truncate first and then fetch a chunk from a source that has not truncated yet.
No later request would truncate that copy. So while chunks are copied, the target remembers recent truncations
and removals. It fetches an older copy again until the source has done them too.

The memory is bounded: the oldest entries are dropped. By then every target has answered their requests, or
the requests are repeated anyway. The users are `store/server/service` and `store/replication/resync`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nvpool.store.chunks.api import ChunkCopy

REMEMBERED_MAX = 100_000


class Tombstones:
    def __init__(self) -> None:
        self.active = False
        """Whether every truncation and removal is remembered; otherwise only inside `watching`."""
        self._watching = 0
        self._cuts: dict[int, tuple[tuple[int, int, int], ...]] = {}
        self._removed: dict[int, None] = {}
        self.came = 0
        """Number of truncations so far.

        A copy that was requested before a truncation of its inode counts as older than the truncation, even
        if its source already has the truncate number from somewhere else.
        """
        self._last: dict[int, int] = {}  # inode -> number of its last truncation

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remember truncations and removals within this context."""
        self._watching += 1
        try:
            yield
        finally:
            self._watching -= 1
            if not self.active:
                self.forget()

    def cut(self, inode: int, size: int, number: int, chunk_bits: int, end: int) -> None:
        """Record a truncation. Call before the store truncates."""
        self.came += 1
        self._last.pop(inode, None)
        self._last[inode] = self.came
        if len(self._last) > REMEMBERED_MAX:
            del self._last[next(iter(self._last))]
        if not (self.active or self._watching) or not 0 <= chunk_bits < 64:
            return
        first = size >> chunk_bits
        last = (end - 1 >> chunk_bits) if end else 1 << 32
        before = self._cuts.pop(inode, ())
        self._cuts[inode] = (*before[-15:], (number, first, last))
        if len(self._cuts) > REMEMBERED_MAX:
            del self._cuts[next(iter(self._cuts))]

    def removed(self, inodes: list[int]) -> None:
        """Record a removal. Call before the store removes."""
        if not (self.active or self._watching):
            return
        for inode in inodes:
            self._removed[inode] = None
        while len(self._removed) > REMEMBERED_MAX:
            del self._removed[next(iter(self._removed))]

    def allows(self, copy: ChunkCopy, asked: int) -> bool:
        """Whether the copy includes every truncation and removal that this target has done.

        `asked` is the value of `came` when the source was asked.
        """
        if self._last.get(copy.inode, 0) > asked:
            return False
        if not copy.version:
            return True
        if copy.inode in self._removed:
            return False
        return not any(
            number > copy.known.cut and first <= copy.index <= last
            for number, first, last in self._cuts.get(copy.inode, ())
        )

    def has_cut(self, inode: int) -> bool:
        return inode in self._cuts

    def forget(self) -> None:
        if self._watching:
            return
        self._cuts.clear()
        self._removed.clear()
