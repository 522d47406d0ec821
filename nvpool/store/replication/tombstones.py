"""What was cut or removed here lately: which copies of chunks are older than that.

A metadata service cuts and removes at all targets of a chain, at one a little later than at another. A target that catches up
could fetch a chunk from a source that has not cut yet, after it has cut here itself, and nobody would cut that copy. So while
chunks are copied it remembers what came; a copy from before is fetched again until the source has done it too.

Bounded: the oldest are forgotten. By then their requests have been answered by every target, or are repeated at all.
Called by store/server/service and store/replication/resync.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nvpool.store.chunks.api import ChunkCopy

REMEMBERED_MAX = 100_000


class Guard:
    def __init__(self) -> None:
        self.active = False
        """Whether all that comes is remembered; otherwise only while somebody is `watching`."""
        self._watching = 0
        self._cuts: dict[int, tuple[tuple[int, int, int], ...]] = {}
        self._removed: dict[int, None] = {}
        self.came = 0
        """How many cuts have come. A copy that was asked for before one of its inode came is from before that, whoever has told
        its source of the number."""
        self._last: dict[int, int] = {}  # inode -> the last of them

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remember what comes within it."""
        self._watching += 1
        try:
            yield
        finally:
            self._watching -= 1
            if not self.active:
                self.forget()

    def cut(self, inode: int, size: int, number: int, chunk_bits: int, end: int) -> None:
        """Before the store cuts."""
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
        """Before the store removes."""
        if not (self.active or self._watching):
            return
        for inode in inodes:
            self._removed[inode] = None
        while len(self._removed) > REMEMBERED_MAX:
            del self._removed[next(iter(self._removed))]

    def allows(self, copy: ChunkCopy, asked: int) -> bool:
        """Whether nothing was done here that the copy's source had not done when it gave it. `asked`: what had come when the
        source was asked."""
        if self._last.get(copy.inode, 0) > asked:
            return False
        if not copy.version:
            return True
        if copy.inode in self._removed:
            return False
        return not any(number > copy.known.cut and first <= copy.index <= last
                       for number, first, last in self._cuts.get(copy.inode, ()))

    def has_cut(self, inode: int) -> bool:
        return inode in self._cuts

    def forget(self) -> None:
        if self._watching:
            return
        self._cuts.clear()
        self._removed.clear()
