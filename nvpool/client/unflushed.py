"""What stores have of us and may lose with their power: for each inode the chains that have it, until they have flushed.

Bounded; where it is not remembered which they are (there were too many, or a process before us wrote it), all
targets of the pool are flushed, once, for whoever asks first. Used by the writer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from nvpool.client.flushing import WrittenAt

INODES_MAX = 100_000
PLACES_MAX = 400_000
"""Chains, over all inodes."""


class Unflushed:
    """`changed` is told whether there is anything."""

    def __init__(self, chunks, changed: Callable[[bool], None]) -> None:
        self._chunks = chunks
        self._changed = changed
        # inode -> chains that have unflushed bytes of ours, each with the number of the last write to it
        self._recent: OrderedDict[int, dict[WrittenAt, int]] = OrderedDict()
        self._places = 0
        self._noted = 0
        self._forgot = 0  # the number of the last write by which something was forgotten
        self.forgotten = False

    def __contains__(self, inode: int) -> bool:
        return self.forgotten or inode in self._recent

    def __bool__(self) -> bool:
        return self.forgotten or bool(self._recent)

    def note(self, inode: int, place: WrittenAt) -> None:
        self._noted += 1
        places = self._recent.get(inode)
        if places is None:
            places = self._recent[inode] = {}
            self._changed(True)
        if place not in places:
            self._places += 1
        places[place] = self._noted
        if len(self._recent) > INODES_MAX or self._places > PLACES_MAX:
            self._places -= len(self._recent.popitem(last=False)[1])
            self.forgotten, self._forgot = True, self._noted

    async def flush(self, inode: int) -> None:
        """Return when what we have stored of the inode survives the loss of power."""
        # What is flushed stays noted until that has ended: who asks meanwhile must wait for it as well.
        if self.forgotten:
            number, before = self._noted, {inode: dict(targets) for inode, targets in self._recent.items()}
            await self._chunks.flush(self._chunks.replicas.all_places())
            if self._forgot <= number:
                self.forgotten = False
        else:
            before = {inode: dict(self._recent.get(inode, ()))}
            await self._chunks.flush(list(before[inode]))
        for one, flushed in before.items():
            targets = self._recent.get(one, {})
            for target, number in flushed.items():
                if targets.get(target) == number:
                    del targets[target]
                    self._places -= 1
            if not targets:
                self._recent.pop(one, None)
        if not self:
            self._changed(False)
