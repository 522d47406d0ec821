"""A walk over one moment of a Kv, in bounded steps, while changes go on.

A snapshot holds no reader of the store below, which could not reuse a page while one lives. Instead each change, before
it is made, leaves the old values of the keys that the walk has not reached with the snapshot, and the walk prefers
those to what it reads. Old values are kept in memory and, where they are many, those that are needed last in a file
(kv/snapshot_spill); a snapshot that would need more than either may hold ends with Busy rather than holding changes up. Used by
dump, fsck and the copying of partitions, through `Kv.snapshot`. One thread owns all of it; nothing here waits but the
pause between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from nvpool.core.errors import Busy, CorruptRecord, NvpoolError
from nvpool.kv.api import KEY_END
from nvpool.kv.memtable import OrderedKeys
from nvpool.kv.snapshot_spill import Scratch

OLD_VALUES_MAX = 100_000
"""In memory: about 30 MB with records of usual size."""

SPILLED_MAX = 20_000_000
"""In a file, about 4 GB: a quarter of an hour of 20,000 changed keys a second, all in front of the walk."""

SPILL_AT_ONCE = 2000
"""A few milliseconds of the loop."""

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
        self._scratch: Scratch | None = None
        self._spilled_count = 0
        self._failed = ""

    def step(self, limit: int) -> list[tuple[bytes, bytes]]:
        """The next pairs, `limit` at most, perhaps none; `done` says when the walk is over.

        Busy when too much changed in front of the walk, or the store was closed: begin again with a new snapshot.
        CorruptRecord when the next record is damaged: all before it were answered, and `skip` goes on behind it.
        """
        if self._failed:
            raise Busy(self._failed)
        if self.done or limit < 1:
            return []
        end = self._end
        try:
            window = self._owner.kv.scan(self._position, end, limit)
        except CorruptRecord as error:
            if error.key <= self._position:
                raise
            end = error.key
            window = self._owner.kv.scan(self._position, end, limit)
        reached = window[-1][0] + b"\0" if len(window) == limit else end
        changed = self._changed(self._position, reached, limit)
        if len(changed) == limit:
            reached = min(reached, changed[-1][0] + b"\0")
        old = dict(changed)
        now = [pair for pair in window if pair[0] < reached and pair[0] not in old]
        then = [pair for pair in changed if pair[0] < reached and pair[1] is not None]
        pairs = list(heapq.merge(now, then)) if then else now
        if len(pairs) > limit:
            del pairs[limit:]
            reached = pairs[-1][0] + b"\0"
        for key in old:
            if key < reached and key in self._old:
                del self._old[key]
                self._old_keys.remove(key)
        self._position = reached
        if reached >= self._end:
            self.close()
        return pairs

    def skip(self, key: bytes) -> None:
        """Go on behind the damaged record `key`. A flipped bit in the key itself makes that further on, or no further than
        to the next byte string; what lies between is not seen."""
        self._position = max(self._position, key) + b"\0"

    def _changed(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes | None]]:
        """The first keys in the range that have changed since the moment, with their values then."""
        old = self._old
        found: Iterator[tuple[bytes, bytes | None]] = ((key, old[key]) for key in self._old_keys.ascend(first, end))
        if self._scratch is None:
            return list(islice(found, limit))
        with contextlib.closing(self._scratch.ascend(first, end)) as spilled:
            return list(islice(heapq.merge(found, spilled, key=itemgetter(0)), limit))

    async def __aiter__(self) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """The pairs in lists of up to a thousand, with a turn of the event loop before each."""
        while not self.done:
            await asyncio.sleep(0)
            if pairs := self.step(STEP_PAIRS):
                yield pairs

    def note(self, keys: Iterable[bytes]) -> None:
        """Called before `keys` change. Never fails: what goes wrong ends the snapshot."""
        try:
            for key in keys:
                if self._position <= key < self._end and key not in self._old and not (self._scratch and key in self._scratch):
                    if len(self._old) >= OLD_VALUES_MAX:
                        self._spill()
                    self._old[key] = self._owner.kv.get(key)
                    self._old_keys.add(key)
        except NvpoolError as error:
            self.end(f"the snapshot had to be given up: {error}")

    def _spill(self) -> None:
        """Move the old values that are needed last from memory into the file."""
        if self._owner.directory is None or self._spilled_count >= SPILLED_MAX:
            raise Busy("too much changed while it was read; begin again at a quieter time")
        if self._scratch is None:
            self._scratch = Scratch(self._owner.directory)
        last = list(islice(self._old_keys.descend(b"", KEY_END), SPILL_AT_ONCE))
        self._scratch.put([(key, self._old[key]) for key in last])
        for key in last:
            del self._old[key]
            self._old_keys.remove(key)
        self._spilled_count += len(last)

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
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None


class SnapshotSet:
    """The snapshots that are being read from one Kv. False when there are none."""

    def __init__(self, kv: _Readable, directory: Path | None = None) -> None:
        """`directory` is where old values may be spilled; without one a snapshot ends when memory is not enough."""
        self.kv = kv
        self.directory = directory
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
