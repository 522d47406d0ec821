"""A walk over one moment of a Kv, in bounded steps, while changes go on.

A snapshot holds no reader of the store below, which could not reuse a page while one lives. Instead each change, before
it is made, leaves the old values of the keys that the walk has not reached with the snapshot, and the walk prefers
those to what it reads. The price is memory for the keys that change in front of the walk; a snapshot that would need
more than `OLD_VALUES_MAX` of them ends with Busy rather than holding changes up. Used by dump, fsck and the copying of
partitions, through `Kv.snapshot`. One thread owns all of it; nothing here waits but the pause between two steps.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import Protocol

from nvpool.base.errors import Busy
from nvpool.kv.contract import KEY_END
from nvpool.kv.ordered import OrderedKeys

OLD_VALUES_MAX = 1_000_000
"""About 300 MB with records of usual size: two minutes of 2,000 changes a second, all in front of the walk."""

SNAPSHOTS_MAX = 4
"""Each makes every change read the old values of its keys once more."""

STEP_PAIRS = 1000
"""A step of the asynchronous walk takes about a millisecond of the loop."""


class _Readable(Protocol):
    sequence: int

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]: ...


class Snapshot:
    """All pairs with first <= key < end as they were after the change `sequence`, in order."""

    def __init__(self, owner: SnapshotSet, first: bytes, end: bytes) -> None:
        self.sequence = owner.kv.sequence
        self.done = first >= end
        self._owner = owner
        self._position = first
        self._end = end
        self._old: dict[bytes, bytes | None] = {}
        self._old_keys = OrderedKeys()
        self._failed = ""

    def step(self, limit: int) -> list[tuple[bytes, bytes]]:
        """The next pairs, `limit` at most, perhaps none; `done` says when the walk is over.

        Busy when too much changed in front of the walk, or the store was closed: begin again with a new snapshot.
        """
        if self._failed:
            raise Busy(self._failed)
        if self.done:
            return []
        window = self._owner.kv.scan(self._position, self._end, limit)
        reached = window[-1][0] + b"\0" if len(window) == limit else self._end
        changed = list(islice(self._old_keys.ascend(self._position, reached), limit))
        if len(changed) == limit:
            reached = min(reached, changed[-1] + b"\0")
        old = self._old
        now = [pair for pair in window if pair[0] < reached and pair[0] not in old]
        then = [(key, value) for key in changed if key < reached and (value := old[key]) is not None]
        pairs = list(heapq.merge(now, then)) if then else now
        if len(pairs) > limit:
            del pairs[limit:]
            reached = pairs[-1][0] + b"\0"
        for key in changed:
            if key < reached:
                del old[key]
                self._old_keys.remove(key)
        self._position = reached
        if reached >= self._end:
            self.close()
        return pairs

    async def __aiter__(self) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """The pairs in lists of up to a thousand, with a turn of the event loop before each."""
        while not self.done:
            await asyncio.sleep(0)
            if pairs := self.step(STEP_PAIRS):
                yield pairs

    def note(self, keys: Iterable[bytes]) -> None:
        """Called before `keys` change."""
        for key in keys:
            if self._position <= key < self._end and key not in self._old:
                if len(self._old) >= OLD_VALUES_MAX:
                    self.end("too much changed while the snapshot was read; begin again at a quieter time")
                    return
                self._old[key] = self._owner.kv.get(key)
                self._old_keys.add(key)

    def end(self, reason: str) -> None:
        """Give up the memory; a later step raises Busy with the reason."""
        if not self.done:
            self.close()
            self.done, self._failed = False, reason

    def close(self) -> None:
        """Give up the memory. May be called twice; needed only when the walk is not read to its end."""
        self.done = True
        self._old.clear()
        self._old_keys.rebuild(())
        self._owner.live.discard(self)


class SnapshotSet:
    """The snapshots that are being read from one Kv. False when there are none."""

    def __init__(self, kv: _Readable) -> None:
        self.kv = kv
        self.live: set[Snapshot] = set()

    def __bool__(self) -> bool:
        return bool(self.live)

    def begin(self, first: bytes, end: bytes | None) -> Snapshot:
        if len(self.live) >= SNAPSHOTS_MAX:
            raise Busy(f"{SNAPSHOTS_MAX} snapshots are being read already", retry_after_s=5.0)
        snapshot = Snapshot(self, first, KEY_END if end is None else min(end, KEY_END))
        if not snapshot.done:
            self.live.add(snapshot)
        return snapshot

    def note(self, keys: Iterable[bytes]) -> None:
        for snapshot in list(self.live):
            snapshot.note(keys)

    def end_all(self) -> None:
        for snapshot in list(self.live):
            snapshot.end("the store was closed while the snapshot was read")
