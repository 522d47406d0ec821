"""What stores have of us and may lose with their power: for each inode the targets, until they have flushed.

Bounded; where it is not remembered which targets they are (there were too many inodes, or a process before us wrote it), all
targets of the pool are flushed, once, for whoever asks first. Used by the writer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

INODES_MAX = 100_000


class Unflushed:
    """`changed` is told whether there is anything."""

    def __init__(self, chunks, changed: Callable[[bool], None]) -> None:
        self._chunks = chunks
        self._changed = changed
        # inode -> targets that have unflushed bytes of ours, each with the number of the last write to it
        self._recent: OrderedDict[int, dict[int, int]] = OrderedDict()
        self._noted = 0
        self._forgot = 0  # the number of the last write by which something was forgotten
        self.forgotten = False

    def __contains__(self, inode: int) -> bool:
        return self.forgotten or inode in self._recent

    def __bool__(self) -> bool:
        return self.forgotten or bool(self._recent)

    def note(self, inode: int, target: int) -> None:
        self._noted += 1
        targets = self._recent.get(inode)
        if targets is None:
            targets = self._recent[inode] = {}
            if len(self._recent) > INODES_MAX:
                self._recent.popitem(last=False)
                self.forgotten, self._forgot = True, self._noted
            self._changed(True)
        targets[target] = self._noted

    async def flush(self, inode: int) -> None:
        """Return when what we have stored of the inode survives the loss of power."""
        # What is flushed stays noted until that has ended: who asks meanwhile must wait for it as well.
        if self.forgotten:
            number, before = self._noted, {inode: dict(targets) for inode, targets in self._recent.items()}
            await self._chunks.flush(sorted(self._chunks.all_targets()))
            if self._forgot <= number:
                self.forgotten = False
        else:
            before = {inode: dict(self._recent.get(inode, ()))}
            await self._chunks.flush(sorted(before[inode]))
        for one, flushed in before.items():
            targets = self._recent.get(one, {})
            for target, number in flushed.items():
                if targets.get(target) == number:
                    del targets[target]
            if not targets:
                self._recent.pop(one, None)
        if not self:
            self._changed(False)
