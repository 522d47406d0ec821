"""Quarantine of blocks that are known to be bad.

Bad blocks are recorded in the index, listed in `status`, and never returned to a reader until they are
rewritten. The users are the block store, its readers and its scrub.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from nvpool.core.errors import NvpoolError
from nvpool.kv.api import Kv
from nvpool.store.disk.index_records import bad_key, split_bad_key

log = logging.getLogger(__name__)

KEPT_MAX = 1000
"""Recorded bad blocks.

Further ones are only logged, and the next scrub finds them again: replace a drive that has more.
"""

BadName = tuple[int, int, int]
"""Inode, chunk index, block."""


class BadBlock(NamedTuple):
    """Entry of `status`: a recorded bad block and what is wrong with it."""

    inode: int
    index: int  # type: ignore[assignment]  # of the chunk; hides a method of tuples that nobody calls
    block: int
    text: str


class Quarantine:
    def __init__(self, kv: Kv, where: str):
        self._kv = kv
        self._where = where
        self._texts: dict[BadName, str] = {}
        self.on_bad: Callable[[], None] | None = None
        """Callback for each newly recorded block."""
        self.chunks: set[tuple[int, int]] = set()
        """Chunks with bad blocks: all their blocks are checked when read."""
        for key, text in kv.scan(b"b", b"c", KEPT_MAX):
            name = split_bad_key(key)
            self._texts[name] = text.decode()
            self.chunks.add(name[:2])

    def note(self, inode: int, index: int, block: int, text: str) -> None:
        """Record a bad block in memory and in the index, and log it."""
        name = (inode, index, block)
        if name in self._texts:
            return
        log.error("%s: block %d of chunk %d of inode %d %s", self._where, block, index, inode, text)
        if len(self._texts) >= KEPT_MAX:
            return
        self._texts[name] = text
        self.chunks.add(name[:2])
        if self.on_bad is not None:
            self.on_bad()
        try:
            self._kv.apply([(bad_key(*name), text.encode())])
        except NvpoolError as error:  # the list in memory has it; the next scrub finds it again
            log.warning("%s: the bad block could not be recorded: %s", self._where, error)

    def within(self, inode: int, indexes: range, blocks: range | None = None) -> list[BadName]:
        """Return the bad blocks in these chunks (and blocks).

        A change that replaces or removes them then calls `forget`.
        """
        if not self._texts:
            return []
        return [
            name
            for name in self._texts
            if name[0] == inode and name[1] in indexes and (blocks is None or name[2] in blocks)
        ]

    def forget(self, names: list[BadName]) -> None:
        """Forget blocks whose records a change has removed from the index."""
        if names:
            for name in names:
                del self._texts[name]
            self.chunks.clear()
            self.chunks.update(name[:2] for name in self._texts)

    def listed(self) -> list[BadBlock]:
        return [BadBlock(*name, text) for name, text in sorted(self._texts.items())]

    def __len__(self) -> int:
        return len(self._texts)
