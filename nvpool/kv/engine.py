"""Key-value engine: a journal, sorted memtables (layers) of newer values, and LMDB below.

A change is appended to the journal with one write and put into the layer; then it is acknowledged. Every
second, or when the layer is large, the engine freezes it and starts a new layer and the other journal file. A
thread then writes the frozen layer in one LMDB transaction, together with its last sequence number. A read
consults the layer, then the frozen layer, then LMDB; every LMDB read transaction ends within the call that
began it. Opening replays the journal and immediately checkpoints under a new generation, so the remains of a
torn write cannot become valid later.

Files: `FORMAT` and `lock` (see kv/data_dir), `journal-0` and `journal-1` (kv/journal), `data.mdb` and
`lock.mdb` (kv/lmdb_env).

One event loop owns an engine. Two threads work for it, one for fdatasync and one for checkpoints, so a sync
never waits for a checkpoint. LMDB always runs with its own syncs enabled. Used by meta, store and cluster;
the engine does not depend on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from nvpool.core.errors import (
    Busy,
    CorruptRecord,
    Fenced,
    InvalidRequest,
    NoSpace,
    NvpoolError,
    TooBig,
    WrongFormat,
)
from nvpool.core.futures import abandon
from nvpool.kv.api import KEY_END, Effect, Effects
from nvpool.kv.data_dir import EngineDirectory
from nvpool.kv.journal import Journal
from nvpool.kv.journal_record import JournalRecord, checked_effects, encode
from nvpool.kv.lmdb_env import LmdbTree, Mark
from nvpool.kv.memtable import Layer
from nvpool.kv.options import LmdbOptions
from nvpool.kv.replication_log import Position, ReplicationHistory
from nvpool.kv.snapshot import EngineSnapshot, SnapshotSet

__all__ = ["LmdbKv", "LmdbOptions"]

log = logging.getLogger(__name__)

_ABSENT: bytes = b"absent\0"  # compared by identity only

Step = Callable[[str], None]
BeforeCheckpoint = Callable[[], Awaitable[None]]
OnReplay = Callable[[list[list[Effect]], Callable[[bytes], bytes | None]], list[list[Effect]]]


def _no_step(_name: str) -> None:
    pass


class LmdbKv:
    """The LMDB engine; `kv/api` has its contract. Created by `open` only."""

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        options: LmdbOptions | None = None,
        *,
        before_checkpoint: BeforeCheckpoint | None = None,
        on_replay: OnReplay | None = None,
        on_fence: Callable[[str], None] | None = None,
        step: Step = _no_step,
    ) -> LmdbKv:
        """Open the engine in the directory `path`, create it if it is missing, and replay its journal.

        On return everything that was acknowledged before is present and durable. May be repeated after an
        interruption.

        before_checkpoint  awaited each time before a frozen layer is written to LMDB: make the data
                           durable to which its records refer
        on_replay          called with the effects of all replayed changes, in order, and a function that
                           returns LMDB's value of a key; returns the effects to apply, change by change.
                           Called before any write.
        on_fence           called once with the reason when the engine fences itself: end the process, or
                           reopen the engine
        step               called with the name of each step of a checkpoint; for tests

        InUse: another process, or another part of this one, has the directory open.
        WrongFormat: another version created the directory, or it is not of nvpool.
        CorruptRecord: LMDB's file is damaged.
        NoSpace, DriveFailed, AccessDenied, TooManyOpen: as the system reports.
        """
        engine = cls(Path(path), options or LmdbOptions(), before_checkpoint, on_replay, on_fence, step)
        await engine.start_or_release()
        return engine

    def __init__(
        self,
        path: Path,
        options: LmdbOptions,
        before_checkpoint: BeforeCheckpoint | None,
        on_replay: OnReplay | None,
        on_fence: Callable[[str], None] | None,
        step: Step,
    ) -> None:
        self.path = path
        self.options = options
        self.sync_before_answer = options.durability == "always"
        self.term = options.term
        """Term of the changes from now on."""
        self.history: ReplicationHistory | None = None
        """On a shard with standbys: the last changes, and which are committed. Only committed ones are
        written to LMDB."""
        self.sync_others: Callable[[int], Awaitable[None]] | None = None
        """On a shard with standbys: returns when all of them have the change durably."""
        self._before_checkpoint = before_checkpoint
        self._on_replay = on_replay
        self._on_fence = on_fence
        self._step = step
        self._loop = asyncio.get_running_loop()
        self._sync_thread = options.floor.thread("kv-sync")
        self._checkpoint_thread = options.floor.thread("kv-checkpoint")
        self._record_bytes_max = self.options.journal_bytes // 8
        self._half_journal_bytes = self.options.journal_bytes // 2
        self._directory: EngineDirectory
        self.journal: Journal
        self.tree: LmdbTree
        self._resources = contextlib.ExitStack()
        """Closes the three above, as far as `start` has opened them."""
        self._release: asyncio.Future[None] | None = None
        self._layer = Layer()
        self.frozen: Layer | None = None
        """Layer that waits for its checkpoint or is being written."""
        self._frozen_sequence = self._frozen_generation = self._frozen_bytes = self._frozen_term = 0
        self._term_before = self._term_began = self._stored_term = 0
        self._sequence = self._synced_sequence = self._stored_sequence = 0
        self._fenced = ""
        self._closed = False
        self._drive_full = ""
        self._limit_adding = self._limit_reclaiming = 0
        self.entries_max = options.layer_entries_max
        """Entries of the layer from which a checkpoint starts; set again at each checkpoint."""
        self._sync_timer: asyncio.TimerHandle | None = None
        self._checkpoint_timer: asyncio.TimerHandle | None = None
        self._syncing = False
        self._sync_waiters: list[asyncio.Future[None]] = []
        self._checkpoint_task: asyncio.Task[None] | None = None
        self._sync_count = self._checkpoint_count = self._replayed_count = 0
        self._snapshots = SnapshotSet(self, path)
        self._open_snapshots = self._snapshots.live
        self.on_apply: Callable[[dict[bytes, bytes | None]], None] | None = None

    # -- opening ------------------------------------------------------------------------------------------------------

    async def start_or_release(self) -> None:
        """Start; after an error or a cancellation raise it, with everything released.

        A caller that is cancelled during the release waits for its end as well. Nothing else knows of the
        engine then, and the directory would be locked although the call has ended.
        """
        try:
            await self.start()
        except BaseException:
            cancelled = None
            while self._release is None or not self._release.done():
                try:
                    await self.abandon()
                except asyncio.CancelledError as error:
                    cancelled = error
            if cancelled is not None:
                raise cancelled from None
            raise

    async def start(self) -> None:
        """Open the files and replay the journal; called once, by `open`, with errors as there."""
        self._directory = EngineDirectory(self.path)
        self._resources.callback(self._directory.release)
        formatted = self._directory.prepare()
        self.tree = self.options.floor.tree(self.path, self.options.map_bytes)
        self._resources.callback(self.tree.close)
        sequence, generation, term = self._stored_mark(formatted)
        self.journal = self.options.floor.journal(self.path, self.options.journal_bytes)
        self._resources.callback(self.journal.close)
        # A crash leaves records in the generation after the stored one and, if it happened between a freeze
        # and its commit, in the next one too. Starting above both makes all remaining records in the files
        # invalid.
        records: list[JournalRecord] = []
        for replayed in (generation + 1, generation + 2):
            for record in self.journal.replay(replayed, sequence):
                records.append(record)
                sequence, term = record.sequence, record.term
        records, sequence, term = self._chosen(records, Mark(sequence, generation, term))
        changes = [record.effects for record in records]
        self._replayed_count = len(changes)
        if changes and self._on_replay is not None:
            changes = self._on_replay(changes, self.tree.get)
        for effects in changes:
            self._layer.values.update(effects)
        self._sequence = self._term_began = sequence
        self._term_before = term
        self.journal.begin(generation + 2)
        if self._replayed_count:
            log.info(
                "%s: %d changes replayed from the journal, up to %d",
                self.path,
                self._replayed_count,
                sequence,
            )
        await self._checkpoint_once()
        if self._replayed_count:
            self.tree.renew()  # the checkpoint may have been larger than usual
        if not formatted:
            self._finish_directory()

    def _finish_directory(self) -> None:
        self._directory.finish()

    def _chosen(self, records: list[JournalRecord], last: Mark) -> tuple[list[JournalRecord], int, int]:
        """Return the journal's valid changes (here all), and sequence and term of the last one."""
        return records, last.sequence, last.term

    def _stored_mark(self, formatted: bool) -> Mark:
        """Return the mark of LMDB's content."""
        mark = self.tree.mark()
        if mark is None:
            if formatted:
                raise CorruptRecord(
                    f"{self.path}/data.mdb is empty: restore the directory from its backup or dump"
                )
            return Mark(0, 0, 0)
        if mark.term > self.options.term:
            raise WrongFormat(
                f"{self.path} has seen the term {mark.term} and cannot be opened under {self.options.term}"
            )
        return mark

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        value = self._layer.values.get(key, _ABSENT)
        if value is not _ABSENT:
            return value
        if self.frozen is not None:
            value = self.frozen.values.get(key, _ABSENT)
            if value is not _ABSENT:
                return value
        return self.tree.get(key)

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        newer, older = self._layer.values, self.frozen.values if self.frozen is not None else {}
        stored = self.tree.get_many([key for key in keys if key not in newer and key not in older])
        return [newer[key] if key in newer else older[key] if key in older else stored[key] for key in keys]

    def scan(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        return self._scan(first, end, limit, forward=True)

    def scan_back(self, first: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        return self._scan(first, end, limit, forward=False)

    def _scan(self, first: bytes, end: bytes, limit: int, forward: bool) -> list[tuple[bytes, bytes]]:
        end = min(end, KEY_END)
        found: list[tuple[bytes, Any]] = []  # values are bytes; mypy does not narrow the pairs of the overlay
        if limit <= 0 or first >= end:
            return found
        overlay = self._overlay(first, end, forward)
        newer = next(overlay, None)
        if newer is None and forward:
            return self.tree.read(first, end, limit)
        with contextlib.closing(self.tree.walk(first, end, forward)) as stored:
            for item in stored:
                if newer is not None:
                    key = item[0]
                    while newer is not None and (newer[0] < key if forward else newer[0] > key):
                        if newer[1] is not None:
                            found.append(newer)
                            if len(found) == limit:
                                return found
                        newer = next(overlay, None)
                    if newer is not None and newer[0] == key:
                        continue  # appended when the next key, or the end, has passed it
                found.append(item)
                if len(found) == limit:
                    return found
        while newer is not None and len(found) < limit:
            if newer[1] is not None:
                found.append(newer)
            newer = next(overlay, None)
        return found

    def _overlay(self, first: bytes, end: bytes, forward: bool) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield the pairs that are newer than LMDB, in order; None for a deleted key."""
        values = self._layer.values
        keys = self._layer.ascend(first, end) if forward else self._layer.descend(first, end)
        if self.frozen is None:
            for key in keys:
                yield key, values[key]
            return
        older = self.frozen.values
        older_keys = self.frozen.ascend(first, end) if forward else self.frozen.descend(first, end)
        previous = None
        for key in heapq.merge(keys, older_keys, reverse=not forward):
            if key != previous:
                yield key, values[key] if key in values else older[key]
                previous = key

    # -- changing -----------------------------------------------------------------------------------------------------

    def apply(self, effects: Effects, *, reclaims: bool = False) -> int:
        changed = checked_effects(effects)
        journal, sequence = self.journal, self._sequence + 1
        record = encode(self.term, journal.generation, sequence, changed)
        record_bytes = len(record)
        if record_bytes > self._record_bytes_max:
            raise TooBig(f"a change of {record_bytes} bytes is more than an eighth of the journal")
        if journal.offset + record_bytes > (self._limit_reclaiming if reclaims else self._limit_adding):
            self._refuse(record_bytes, reclaims)
        self._append_to_journal(record)
        # From here on the change is applied; nothing below may fail.
        if self.on_apply is not None:
            self.on_apply(changed)
        self._sequence = sequence
        if self.history is not None:
            self.history.note(sequence, self.term, record)
        self._take(changed)
        return sequence

    def _append_to_journal(self, record: bytes) -> None:
        """Append one or more records. On return they survive kill -9; after an error other than NoSpace the
        engine is fenced."""
        try:
            self.journal.append(record)
        except NoSpace:
            raise
        except NvpoolError as error:
            self._fence(str(error))
            raise

    def _take(self, changed: dict[bytes, bytes | None]) -> None:
        """Put a change into the layer, and start the timers and the checkpoint that it needs."""
        if self._open_snapshots:
            self._snapshots.note(changed)
        values = self._layer.values
        values.update(changed)
        if self._sync_timer is None:
            self._sync_timer = self._loop.call_later(self.options.sync_interval_s, self._sync_due)
        if self._checkpoint_timer is None:
            self._checkpoint_timer = self._loop.call_later(
                self.options.checkpoint_interval_s, self._checkpoint_due
            )
        if len(values) >= self.entries_max or self.journal.offset > self._half_journal_bytes:
            self._relieve()

    def _refuse(self, record_bytes: int, reclaims: bool) -> None:
        """Raise the first applicable reason why a record does not fit."""
        if self._closed:
            raise Fenced("the engine is closed")
        if self._fenced:
            raise Fenced(self._fenced)
        if not reclaims:
            if self._drive_full:
                # Rejected callers change nothing, so only this timer checks whether there is space again.
                if self._checkpoint_timer is None and self._checkpoint_task is None:
                    self._checkpoint_timer = self._loop.call_later(
                        self.options.checkpoint_interval_s, self._checkpoint_due
                    )
                raise NoSpace(self._drive_full)
            if self.journal.offset + record_bytes <= self._limit_reclaiming:
                raise NoSpace(
                    f"the records in {self.path} have reached their configured maximum of "
                    f"{self.options.map_bytes_max} bytes"
                )
        raise Busy("changes must wait for a checkpoint")

    def _set_limits(self) -> None:
        """Set the journal limits for changes that reclaim space and for changes that add data."""
        if self._fenced or self._closed:
            self._limit_reclaiming = self._limit_adding = 0
            return
        # Also limited by the pages that LMDB copies: keys scattered over a large tree need more pages.
        # Halved, because layers reach twice this size.
        self.entries_max = min(self.options.layer_entries_max, max(1, self.tree.write_keys_max // 2))
        layer_is_full = len(self._layer.values) >= 2 * self.entries_max
        self._limit_reclaiming = 0 if layer_is_full else self.options.journal_bytes
        if self._drive_full:
            self._limit_adding = 0
            return
        # A record divided over half-full pages takes twice its bytes. Frozen bytes count until LMDB reports
        # its usage.
        left = (self.options.map_bytes_max - self.tree.used_bytes) // 2 - self._frozen_bytes
        self._limit_adding = min(self._limit_reclaiming, left)

    def _is_large(self) -> bool:
        return len(self._layer.values) >= self.entries_max or self.journal.offset > self._half_journal_bytes

    def _relieve(self) -> None:
        """Start a checkpoint for a large layer; at twice its size, stop accepting changes."""
        if self.frozen is None:
            # Immediately: a caller that does not return to the event loop must not fill the new layer too.
            self._freeze()
            self.start_checkpoint()
        elif len(self._layer.values) >= 2 * self.entries_max:
            self._set_limits()

    @property
    def full(self) -> bool:
        return self.frozen is not None and self._is_large()

    async def room(self) -> None:
        self._raise_if_fenced()
        while self.full:
            await self._checkpoint_more()

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def last(self) -> Position:
        """Position of the last applied change."""
        return Position(self._sequence, self.term if self._sequence > self._term_began else self._term_before)

    @property
    def synced_sequence(self) -> int:
        return self._synced_sequence

    @property
    def fenced(self) -> str:
        """The reason why the engine accepts no more changes, or ""."""
        return self._fenced

    def _fence(self, reason: str) -> None:
        if self._fenced or self._closed:
            return
        self._fenced = reason
        self._set_limits()
        self._cancel_timers()
        log.error("%s is fenced: %s", self.path, reason)
        if self._on_fence is not None:
            self._on_fence(reason)

    def _raise_if_fenced(self) -> None:
        if self._fenced:
            raise Fenced(self._fenced)
        if self._closed:
            raise Fenced("the engine is closed")

    # -- syncing ------------------------------------------------------------------------------------------------------

    async def sync(self, sequence: int | None = None) -> None:
        wanted = self._sequence if sequence is None else sequence
        if wanted > self._sequence:
            raise InvalidRequest(f"change {wanted} does not exist; the last is {self._sequence}")
        self._raise_if_fenced()
        if self.sync_others is not None:
            await self._sync_everywhere(wanted, self.sync_others)
        else:
            await self._sync_here(wanted)

    async def _sync_everywhere(self, wanted: int, sync_others: Callable[[int], Awaitable[None]]) -> None:
        others = asyncio.ensure_future(sync_others(wanted))
        try:
            await self._sync_here(wanted)
            await others
        finally:
            abandon(others)

    async def _sync_here(self, wanted: int) -> None:
        while self._synced_sequence < wanted:
            # A running sync may have begun before this change; then a second one follows, shared by all
            # waiters.
            if not self._syncing:
                self._begin_sync()
            waiter = self._loop.create_future()
            self._sync_waiters.append(waiter)
            await waiter
            self._raise_if_fenced()

    def _begin_sync(self) -> None:
        # Must stay together: the number, and the files with all changes up to it. Both files, since records
        # of the new generation are useless without those of the previous one.
        sequence, files = self._sequence, self.journal.take_unsynced()
        self._syncing = True
        self._sync_thread.submit(self._sync_files, sequence, files)

    def _sync_files(self, sequence: int, files: list[int]) -> None:
        """Sync in the thread, and report the outcome to the event loop in any case."""
        failure = ""
        try:
            for descriptor in files:
                self.journal.sync_file(descriptor)
        except OSError as error:
            failure = f"a sync of the journal failed: {error.strerror}"
        self._loop.call_soon_threadsafe(self._sync_ended, sequence, failure)

    def _sync_ended(self, sequence: int, failure: str) -> None:
        self._syncing = False
        if failure:
            self._fence(failure)
        else:
            self._synced_sequence = max(self._synced_sequence, sequence)
            self._sync_count += 1
        waiters, self._sync_waiters = self._sync_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _sync_due(self) -> None:
        self._sync_timer = None
        if self._syncing:  # the running sync may have begun before the last change
            self._sync_timer = self._loop.call_later(self.options.sync_interval_s, self._sync_due)
        elif self._synced_sequence < self._sequence:
            self._begin_sync()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    async def checkpoint(self) -> None:
        wanted = self._sequence
        self._raise_if_fenced()
        while self._stored_sequence < wanted:
            await self._checkpoint_more()

    async def _checkpoint_more(self) -> None:
        """Wait for the running checkpoint, or run one more."""
        task = self.start_checkpoint()
        await asyncio.wait((task,))
        self._raise_if_fenced()
        if task.exception() is not None:
            raise NoSpace(self._drive_full)

    def _checkpoint_due(self) -> None:
        self._checkpoint_timer = None
        self.start_checkpoint()

    def start_checkpoint(self) -> asyncio.Task[None]:
        """Start a checkpoint unless one runs; return its task."""
        if self._checkpoint_task is None or self._checkpoint_task.done():
            self._checkpoint_task = self._loop.create_task(self._checkpoint_once())
            self._checkpoint_task.add_done_callback(self._checkpoint_ended)
        return self._checkpoint_task

    def _checkpoint_ended(self, task: asyncio.Task[None]) -> None:
        # A change between its end and this call may have started the next one.
        if self._checkpoint_task is task:
            self._checkpoint_task = None
        if task.cancelled():
            return
        error = task.exception()
        if self._closed:
            return
        if error is None:
            if self.frozen is not None:
                self.start_checkpoint()
            elif self._is_large():
                self._relieve()  # before the callers that wait for room continue
        elif isinstance(error, NoSpace):
            log.warning("%s: %s; trying again", self.path, error)
            if self._checkpoint_timer is None:
                self._checkpoint_timer = self._loop.call_later(
                    self.options.checkpoint_interval_s, self._checkpoint_due
                )
        else:
            self._fence(f"a checkpoint failed: {error}")

    async def _checkpoint_once(self) -> None:
        """Freeze the layer, unless a frozen one exists, and write the frozen layer to LMDB.

        NoSpace: the drive is full; the frozen layer stays, and the next call tries again. After any other
        error the engine must be fenced.
        """
        self._raise_if_fenced()
        frozen = self._freeze() if self.frozen is None else self.frozen
        if frozen.values and self._before_checkpoint is not None:
            await self._before_checkpoint()
        if self.history is not None:
            await self.history.until(self._frozen_sequence)
        self._step("data synced")
        mark = Mark(self._frozen_sequence, self._frozen_generation, self._frozen_term)
        full = ""
        try:
            try:
                self.tree.prepare(self._frozen_bytes)
            except NoSpace as error:
                full = str(error)
            while not await self._loop.run_in_executor(
                self._checkpoint_thread, self.tree.write, frozen.values, mark, self._step
            ):
                # The transaction was discarded; the frozen layer still has everything.
                self.tree.double_map()
        except NoSpace as error:
            self._drive_full = str(error)
            self._set_limits()
            raise
        self._step("stored")
        self._drive_full = full
        self._drop_frozen()
        self._step("dropped")

    def _freeze(self) -> Layer:
        # Must stay together: layer, journal file and numbers change in one step. The other journal file is
        # free, because there is no frozen layer, so its content is in LMDB.
        frozen = self.frozen = self._layer
        self._layer = Layer()
        self._frozen_sequence, self._frozen_generation = self._sequence, self.journal.generation
        self._frozen_term = self.last.term
        self._frozen_bytes = self.journal.offset
        self.journal.begin(self._frozen_generation + 1)
        if self._checkpoint_timer is not None:
            self._checkpoint_timer.cancel()
            self._checkpoint_timer = None
        self._set_limits()
        self._step("frozen")
        return frozen

    def _drop_frozen(self) -> None:
        # LMDB syncs its commits, so the frozen changes are durable even if the journal is not synced yet.
        self._synced_sequence = max(self._synced_sequence, self._frozen_sequence)
        self._stored_sequence, self._stored_term = self._frozen_sequence, self._frozen_term
        self.frozen = None
        self._frozen_bytes = 0
        self._checkpoint_count += 1
        self.tree.measure()
        self._set_limits()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def snapshot(self, first: bytes = b"", end: bytes | None = None) -> EngineSnapshot:
        self._raise_if_fenced()
        return self._snapshots.begin(first, end)

    def statistics(self) -> dict[str, float]:
        tree = self.tree
        return {
            "entries": tree.entries,
            "used_bytes": tree.used_bytes,
            "map_bytes": tree.map_bytes,
            "map_bytes_max": self.options.map_bytes_max,
            "file_bytes": tree.file_bytes,
            "journal_bytes": self.journal.offset,
            "layer_entries": len(self._layer.values),
            "frozen_entries": len(self.frozen.values) if self.frozen else 0,
            "snapshots": len(self._snapshots.live),
            "checkpoints": self._checkpoint_count,
            "syncs": self._sync_count,
            "replayed": self._replayed_count,
            "sequence": self._sequence,
            "synced_sequence": self._synced_sequence,
            "stored_sequence": self._stored_sequence,
            "drive_full": float(bool(self._drive_full)),
            "fenced": float(bool(self._fenced)),
        }

    async def close(self) -> None:
        """Sync, checkpoint and release the engine. May be called twice.

        A full drive, a fence, or changes that are not committed on a standby leave the checkpoint to the next
        replay, without an error: the journal has everything acknowledged.
        """
        if self._release is not None:
            await asyncio.wait([self._release])
            return
        try:
            with contextlib.suppress(Fenced, NoSpace):
                self._raise_if_fenced()
                await self._sync_here(self._sequence)
                if self.history is None or self.history.committed >= self._sequence:
                    await self.checkpoint()
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """Release everything as the death of this process would: without sync or checkpoint.

        Once begun, the release goes on even if the caller is cancelled; a later call waits for it. Otherwise
        the directory would stay locked, and this process could never open it again.
        """
        if self._release is None:
            self._closed = True
            self._set_limits()
            self._cancel_timers()
            self._snapshots.end_all()
            if self.history is not None:
                self.history.end()
            if self._checkpoint_task is not None:
                self._checkpoint_task.cancel()
            self._release = asyncio.ensure_future(self._release_all())
        await asyncio.shield(self._release)

    async def _release_all(self) -> None:
        # The threads finish their running work: an LMDB transaction cannot be aborted from outside.
        for thread in (self._sync_thread, self._checkpoint_thread):
            await self._loop.run_in_executor(None, thread.shutdown)
        self._resources.close()

    def _cancel_timers(self) -> None:
        for timer in (self._sync_timer, self._checkpoint_timer):
            if timer is not None:
                timer.cancel()
