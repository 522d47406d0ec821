"""What was cut or removed here lately: which copies of chunks are older than that.

A metadata service cuts and removes at all targets of a chain, at one a little later than at another. A target that catches up
could fetch a chunk from a source that has not cut yet, after it has cut here itself, and nobody would cut that copy. So while
chunks are copied it remembers what came; a copy from before is fetched again until the source has done it too.

Bounded: the oldest are forgotten. By then their requests have been answered by every target, or are repeated at all.
Called by store/service and store/resync.
"""

from __future__ import annotations

from nvpool.store.chunkstore import ChunkCopy

REMEMBERED_MAX = 100_000


class Guard:
    def __init__(self) -> None:
        self.active = False
        """Nothing is remembered otherwise."""
        self._cuts: dict[int, tuple[tuple[int, int, int], ...]] = {}
        self._removed: dict[int, None] = {}

    def cut(self, inode: int, size: int, number: int, chunk_bits: int, end: int) -> None:
        """Before the store cuts."""
        if not self.active or not 0 <= chunk_bits < 64:
            return
        first = size >> chunk_bits
        last = (end - 1 >> chunk_bits) if end else 1 << 32
        before = self._cuts.pop(inode, ())
        self._cuts[inode] = (*before[-15:], (number, first, last))
        if len(self._cuts) > REMEMBERED_MAX:
            del self._cuts[next(iter(self._cuts))]

    def removed(self, inodes: list[int]) -> None:
        """Before the store removes."""
        if not self.active:
            return
        for inode in inodes:
            self._removed[inode] = None
        while len(self._removed) > REMEMBERED_MAX:
            del self._removed[next(iter(self._removed))]

    def allows(self, copy: ChunkCopy) -> bool:
        """Whether nothing was done here that the copy's source had not done when it gave it."""
        if not copy.version:
            return True
        if copy.inode in self._removed:
            return False
        return not any(number > copy.known.cut and first <= copy.index <= last
                       for number, first, last in self._cuts.get(copy.inode, ()))

    def has_cut(self, inode: int) -> bool:
        return inode in self._cuts

    def forget(self) -> None:
        self._cuts.clear()
        self._removed.clear()
