"""Watch of submitted writes to chains with several targets: their head may be replaced while they wait.

A write goes to the head of its chain. If the head dies or is cut off, another target becomes the head, and the
newest pool map says so. So a write whose chain has another head in a newer map ends with StaleEpoch; its
caller repeats the write at the new head under the same request id. While a reply takes long, the map is
followed: a target that is stopped or cut off sends nothing. `ChunkClient.unless_moved` does the same for
writes that a task sends. Used by the fast path for writes (client/data/write_fast_path).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from nvpool.client.data.unstable_writes import PATIENCE_S
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import StaleEpoch
from nvpool.poolmap.model import Chain


class SentToHead(Protocol):
    """A submitted write that waits for the reply of the head of its chain."""

    def fail(self, error: BaseException) -> None:
        """Stop waiting for the reply, and end the write with `error`. The store may have executed it."""


class HeadWatch:
    """The watched writes, in the order in which they were sent.

    `chain(file, index)` returns the chunk's chain by the newest map, or raises StaleEpoch.
    """

    def __init__(self, view: PoolView, clock: Clock, chain: Callable[[OpenInode, int], Chain]) -> None:
        self._view = view
        self._clock = clock
        self._chain = chain
        self._waiting: dict[SentToHead, tuple[OpenInode, int, int, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, writing: SentToHead, file: OpenInode, index: int, target: int) -> None:
        """Watch a write of chunk `index` that was sent to `target`, until `remove`."""
        self._waiting[writing] = file, index, target, self._clock.boottime_s()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._look)

    def remove(self, writing: SentToHead) -> None:
        """Stop watching a write, if it is watched."""
        self._waiting.pop(writing, None)

    @property
    def is_watching(self) -> bool:
        """Whether a watched write waits for its reply."""
        return bool(self._waiting)

    def map_changed(self) -> None:
        """End the writes whose chain has another head in the newest map."""
        for writing, (file, index, target, _) in list(self._waiting.items()):
            try:
                moved = self._chain(file, index).targets[0] != target
            except StaleEpoch:
                moved = True
            if moved and writing in self._waiting:
                writing.fail(StaleEpoch("others hold the chunks by now"))

    def close(self) -> None:
        """Stop the timer. The writes are left to their callers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Follow the map if the oldest write has waited for PATIENCE_S; look again later."""
        self._timer = None
        for *_, since_s in self._waiting.values():
            left_s = since_s + PATIENCE_S - self._clock.boottime_s()
            if left_s <= 0:
                self._view.follow()
                left_s = PATIENCE_S
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
            return
