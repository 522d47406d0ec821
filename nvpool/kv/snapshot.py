"""Snapshots: a consistent view of a Kv, read in bounded steps while changes continue.

A snapshot does not hold a read transaction of the store below, because the store could not reuse pages while
one is open. Instead, before a change is applied, the snapshot saves the old values of the changed keys that
it has not read yet, and prefers these to the current values. Old values are in memory; if there are many,
those needed last are moved to a file (`SpillFile`). A snapshot that exceeds both limits ends with Busy
and does not delay changes. Used by dump, fsck and partition migration, through `Kv.snapshot`. One thread owns
the snapshots; nothing here waits, except for the pause between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import lmdb

from nvpool.core.errors import Busy, CorruptRecord, NvpoolError, from_os_error
from nvpool.kv.api import KEY_BYTES_MAX, KEY_END
from nvpool.kv.lmdb_env import from_lmdb_error
from nvpool.kv.memtable import OrderedKeys

OLD_VALUES_MAX = 100_000
"""Old values in memory: about 30 MB with records of usual size."""

SPILLED_MAX = 20_000_000
"""Old values in a file, about 4 GB: a quarter of an hour of 20,000 changed keys a second, all ahead of the
reader."""

SPILLED_PER_BATCH = 2000
"""Old values moved to the file in one batch: blocks the event loop for a few milliseconds."""

SNAPSHOTS_MAX = 4
"""Open snapshots: with each of them, every change reads the old values of its keys once more."""

STEP_PAIRS = 1000
"""Pairs of one step of the asynchronous iteration: about a millisecond of the event loop."""

_NAME = "snapshot-"
_MAP_BYTES = 1 << 40
"""Reserved address space of a spill file: the caller and the drive bound the real usage."""


class _Readable(Protocol):
    @property
    def sequence(self) -> int: ...

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]: ...


class EngineSnapshot:
    """All pairs with first <= key < end as they were after the change `sequence`, in order."""

    def __init__(self, owner: SnapshotSet, first: bytes, end: bytes) -> None:
        self.sequence = owner.kv.sequence
        self.done = first >= end
        self._owner = owner
        self._position = first
        self._end = end
        self._old: dict[bytes, bytes | None] = {}
        self._old_keys = OrderedKeys()
        self._scratch: SpillFile | None = None
        self._spilled_count = 0
        self._failed = ""

    def step(self, limit: int) -> list[tuple[bytes, bytes]]:
        """Return the next pairs, at most `limit`, perhaps none; `done` becomes true at the end.

        Busy: too much changed ahead of the reader, or the store was closed; start again with a new snapshot.
        CorruptRecord: the next record is damaged; all records before it were returned, and `skip` continues
        after it.
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
        then = [(key, value) for key, value in changed if key < reached and value is not None]
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
        """Continue after the damaged record `key`.

        If a bit of the key itself was flipped, the position is too far, or advances only to the next byte
        string; the records in between are not returned.
        """
        self._position = max(self._position, key) + b"\0"

    def _changed(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes | None]]:
        """Return the first keys in the range that have changed since the snapshot, with their old values."""
        old = self._old
        found: Iterator[tuple[bytes, bytes | None]] = (
            (key, old[key]) for key in self._old_keys.ascend(first, end)
        )
        if self._scratch is None:
            return list(islice(found, limit))
        with contextlib.closing(self._scratch.ascend(first, end)) as spilled:
            return list(islice(heapq.merge(found, spilled, key=itemgetter(0)), limit))

    async def __aiter__(self) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Yield the pairs in lists of up to a thousand; the event loop runs before each list."""
        while not self.done:
            await asyncio.sleep(0)
            if pairs := self.step(STEP_PAIRS):
                yield pairs

    def note(self, keys: Iterable[bytes]) -> None:
        """Save the old values of `keys`.

        The engine calls this before the keys change. A failure ends the snapshot and raises nothing.
        """
        try:
            for key in keys:
                if (
                    self._position <= key < self._end
                    and key not in self._old
                    and not (self._scratch and key in self._scratch)
                ):
                    if len(self._old) >= OLD_VALUES_MAX:
                        self._spill()
                    self._old[key] = self._owner.kv.get(key)
                    self._old_keys.add(key)
        except NvpoolError as error:
            self.end(f"the snapshot had to be given up: {error}")

    def _spill(self) -> None:
        """Move the old values that are needed last from memory to the file."""
        if self._owner.directory is None or self._spilled_count >= SPILLED_MAX:
            raise Busy("too much changed while it was read; begin again at a quieter time")
        if self._scratch is None:
            self._scratch = SpillFile(self._owner.directory)
        last = list(islice(self._old_keys.descend(b"", KEY_END), SPILLED_PER_BATCH))
        self._scratch.put([(key, self._old[key]) for key in last])
        for key in last:
            del self._old[key]
            self._old_keys.remove(key)
        self._spilled_count += len(last)

    def end(self, reason: str) -> None:
        """Release the memory; later steps raise Busy with the reason."""
        if not self.done:
            self.close()
            self.done, self._failed = False, reason

    def close(self) -> None:
        """Release the memory. May be called twice; needed only if the snapshot is not read to its end."""
        self.done = True
        self._old.clear()
        self._old_keys.rebuild(())
        self._owner.live.discard(self)
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None


class SnapshotSet:
    """The open snapshots of one Kv. False if there are none."""

    def __init__(self, kv: _Readable, directory: Path | None = None) -> None:
        """Create the set.

        Old values may be moved to `directory`. Without one, a snapshot ends when memory is full.
        """
        self.kv = kv
        self.directory = directory
        self.live: set[EngineSnapshot] = set()

    def __bool__(self) -> bool:
        return bool(self.live)

    def begin(self, first: bytes, end: bytes | None) -> EngineSnapshot:
        if len(self.live) >= SNAPSHOTS_MAX:
            raise Busy(f"{SNAPSHOTS_MAX} snapshots are being read already", retry_after_s=5.0)
        snapshot = EngineSnapshot(self, first, KEY_END if end is None else min(end, KEY_END))
        if not snapshot.done:
            self.live.add(snapshot)
        return snapshot

    def note(self, keys: Iterable[bytes]) -> None:
        for snapshot in list(self.live):
            snapshot.note(keys)

    def end_all(self) -> None:
        for snapshot in list(self.live):
            snapshot.end("the store was closed while the snapshot was read")


class SpillFile:
    """Expendable LMDB environment for old values that exceed the memory limit.

    The environment is never synced. `close` deletes it; the `snapshot-*` directories of a dead engine are
    deleted when the engine is reopened. `put` writes some thousand pairs to the page cache, which takes
    milliseconds of the event loop.
    """

    def __init__(self, directory: Path) -> None:
        """Create an empty environment below `directory`.

        NoSpace, DriveFailed and similar errors: as the system reports.
        """
        try:
            self._path = Path(tempfile.mkdtemp(prefix=_NAME, dir=directory))
        except OSError as error:
            raise from_os_error(error, f"make a directory in {directory}") from error
        try:
            self._env = lmdb.open(
                os.fspath(self._path),
                map_size=_MAP_BYTES,
                sync=False,
                metasync=False,
                lock=False,
                readahead=False,
                max_spare_txns=1,
            )
        except lmdb.Error as error:
            shutil.rmtree(self._path, ignore_errors=True)
            raise from_lmdb_error(error, f"open {self._path}") from error

    def put(self, pairs: list[tuple[bytes, bytes | None]]) -> None:
        """Store `pairs` with new keys; NoSpace: nothing was stored."""
        stored = sorted((key, b"" if value is None else b"=" + value) for key, value in pairs)
        try:
            with self._env.begin(write=True) as transaction:
                transaction.cursor().putmulti(stored)
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"write {self._path}") from error

    def __contains__(self, key: bytes) -> bool:
        try:
            with self._env.begin() as transaction:
                return transaction.get(key) is not None
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self._path}") from error

    def ascend(self, first: bytes, end: bytes) -> Generator[tuple[bytes, bytes | None]]:
        """Yield pairs with first <= key < end; exhaust or close the iterator before the next `put`."""
        try:
            with self._env.begin() as transaction:
                cursor = transaction.cursor()
                if cursor.set_range(first[:KEY_BYTES_MAX] or b"\0"):
                    for key, stored in cursor.iternext():
                        if key >= end:
                            return
                        if key >= first:
                            yield key, stored[1:] if stored else None
        except lmdb.Error as error:
            raise from_lmdb_error(error, f"read {self._path}") from error

    def close(self) -> None:
        self._env.close()
        shutil.rmtree(self._path, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Delete what a dead owner of `directory` left."""
    for left in directory.glob(_NAME + "*"):
        shutil.rmtree(left, ignore_errors=True)
