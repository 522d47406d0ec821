"""The engine of a shard that has, or may get, standbys: one member's records, whether it is the primary or not.

An LmdbKv that remembers its last changes (kv/replication_log), can take changes from another engine's journal under their
numbers, can be opened without the end of its own, and can be filled from nothing. Used by kv/replication/standby and
kv/replication/primary; made by `open_member`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nvpool.core.errors import CorruptRecord, InvalidRequest, NoSpace, NvpoolError, StaleTerm
from nvpool.kv.api import Effect
from nvpool.kv.data_dir import EngineDirectory
from nvpool.kv.engine import LmdbKv
from nvpool.kv.journal import Journal, Record, decode, encode
from nvpool.kv.lmdb_env import LmdbTree, Mark
from nvpool.kv.options import LmdbOptions
from nvpool.kv.replication.commit_mark import read_mark
from nvpool.kv.replication_log import RETAIN_BYTES, History, Position, Tail, runs_of

NOTHING = Tail(Position(0, 0))


class MemberKv(LmdbKv):
    """See kv/api and kv/engine; what is added is for the shipping of changes."""

    history: History | None

    @classmethod
    async def open_member(cls, path: str | os.PathLike[str], options: LmdbOptions, *, keep: int | None = None,
                          begin: Position | None = None, on_fence: Callable[[str], None] | None = None,
                          retain_bytes: int = RETAIN_BYTES) -> MemberKv:
        """As `open`. With `keep` nothing behind that change stands, and it is forgotten for good; with `begin` the directory is
        emptied and filled by `install`, `finish` ends that: until then its changes come behind that position.

        InvalidRequest  LMDB has changes behind `keep` already: only a copy of the whole helps
        """
        directory = Path(path)
        if begin is not None:
            _empty(directory)
        engine = cls(directory, options, None, None, on_fence, lambda _step: None)
        engine._keep, engine._begin, engine._retain_bytes = keep, begin, retain_bytes
        try:
            await engine._start()
        except BaseException:
            await engine.abandon()
            raise
        engine.history, engine._remembered = engine._remembered, None  # only now: what stands is written to LMDB at once
        return engine

    _keep: int | None = None
    _begin: Position | None = None
    _retain_bytes = RETAIN_BYTES
    _remembered: History | None = None

    def _chosen(self, records: list[Record], last: Mark) -> tuple[list[Record], int, int]:
        mark = self._tree.mark()
        base = self._begin or (Position(mark.sequence, mark.term) if mark is not None else Position(0, 0))
        if self._keep is not None:
            if not base.sequence <= self._keep <= last.sequence:
                raise InvalidRequest(f"{self.path} can not go back to change {self._keep}: "
                                     f"it has {base.sequence} to {last.sequence}")
            records = [record for record in records if record.sequence <= self._keep]
        remembered = self._remembered = History(base, self._retain_bytes)
        for record in records:
            remembered.note(record.sequence, record.term, encode(record.term, 0, record.sequence, dict(record.effects)))
        return records, *remembered.last

    def _stored_mark(self, formatted: bool) -> Mark:
        if not formatted and self._begin is not None:
            return Mark(self._begin.sequence, 0, self._begin.term)
        return super()._stored_mark(formatted)

    # -- what is remembered ------------------------------------------------------------------------------------------

    def remember(self, on: bool) -> None:
        """Keep the last changes from here on, or forget them: without standbys nobody asks, and it costs."""
        if not on:
            self.history = None
        elif self.history is None:
            self.history = History(self.last, self._retain_bytes)

    # -- taking changes of another engine ----------------------------------------------------------------------------

    def begin_term(self, term: int) -> None:
        """Changes from here on are of this term. StaleTerm: there were changes of a later one."""
        if term < self.last.term:
            raise StaleTerm(f"{self.path} has changes of term {self.last.term}, {term} is over")
        if term != self.term:
            self._term_before, self._term_began, self.term = self.last.term, self._sequence, term

    def append(self, record: Record) -> None:
        """Make the next change of another engine's journal ours. On return it survives kill -9; else nothing has changed.

        InvalidRequest  it is not the next one: begin anew with `keep`
        Busy            await room(), then repeat; NoSpace, Fenced and what the drive says: as `apply`
        """
        sequence = self._sequence + 1
        if record.sequence != sequence:
            raise InvalidRequest(f"change {record.sequence} can not follow {self._sequence}")
        changed = dict(record.effects)
        self.begin_term(record.term)
        raw = encode(record.term, self._journal.generation, sequence, changed)
        if self._journal.offset + len(raw) > self._limit_reclaiming:
            self._refuse(len(raw), reclaims=True)
        try:
            self._journal.append(raw)
        except NoSpace:
            raise
        except NvpoolError as error:
            self._fence(str(error))
            raise
        self._sequence = sequence
        self.history.note(sequence, record.term, raw)
        self._take(changed)

    def _take(self, changed: dict[bytes, bytes | None]) -> None:
        """Into the layer; as the end of `apply`, where it is written out since it is called for every change of a primary."""
        if self._snapshots:
            self._snapshots.note(changed)
        values = self._layer.values
        values.update(changed)
        if self._sync_timer is None:
            self._sync_timer = self._loop.call_later(self.options.sync_interval_s, self._sync_due)
        if self._checkpoint_timer is None:
            self._checkpoint_timer = self._loop.call_later(self.options.checkpoint_interval_s, self._checkpoint_due)
        if self._is_large():
            self._relieve()

    async def more_room(self) -> None:
        """After Busy of `append`: wait until a checkpoint has ended. NoSpace: the drive is full."""
        await self._checkpoint_more()

    @property
    def stored(self) -> Position:
        """Of the last change that is in LMDB, or may be before long."""
        if self._frozen is not None and self.history.committed >= self._frozen_sequence:
            return Position(self._frozen_sequence, self._frozen_term)
        return Position(self._stored_sequence, self._stored_term)

    # -- being filled --------------------------------------------------------------------------------------------------

    def install(self, pairs: list[Effect]) -> None:
        """Put records of another engine as they were after our last change. They are durable with `finish`, not before."""
        if self._begin is None:
            raise InvalidRequest("only an engine that was opened to be filled takes records as they are")
        self._raise_if_fenced()
        self._take(dict(pairs))

    async def finish(self) -> None:
        """All is installed: on return it is durable, and the directory is whole. NoSpace, Fenced."""
        wanted = self._checkpoint_count + (1 if self._frozen is None else 2)
        while self._checkpoint_count < wanted:
            await self._checkpoint_more()
        self._directory.finish()
        self._begin = None

    def _finish_directory(self) -> None:
        if self._begin is None:
            super()._finish_directory()


def is_whole(path: Path) -> bool:
    """Whether the directory holds records that were made completely."""
    return (path / "FORMAT").exists() and (path / "data.mdb").exists()


def peek(path: Path) -> Tail:
    """What the member in this directory has, without changing anything; nothing where there is none, or not a whole one.

    InUse while it is open; CorruptRecord, WrongFormat and what the drive says, as opening it would.
    """
    if not is_whole(path):
        return NOTHING
    directory = EngineDirectory(path)
    tree = journal = None
    try:
        tree = LmdbTree(path, 1)
        mark = tree.mark()
        if mark is None:
            raise CorruptRecord(f"{path}/data.mdb is empty: restore the directory from its backup or dump")
        journal = Journal(path, 0)
        found, sequence = [], mark.sequence
        for generation in (mark.generation + 1, mark.generation + 2):
            for record in journal.replay(generation, sequence):
                found.append(Position(record.sequence, record.term))
                sequence = record.sequence
        return Tail(Position(mark.sequence, mark.term), runs_of(found))
    finally:
        if tree is not None:
            tree.close()
        if journal is not None:
            journal.close()
        directory.release()


def whole_term(mark: Path | None, path: Path) -> int:
    """The term of which the commit mark proves that the records in `path` have every change acknowledged up to and in it; 0
    without proof. Errors as of `peek`."""
    marked = read_mark(mark, path) if mark is not None else None
    return marked.term if marked is not None and peek(path).last.sequence >= marked.sequence else 0


def _empty(path: Path) -> None:
    directory = EngineDirectory(path)
    try:
        directory.unfinish()
        directory.prepare()
    finally:
        directory.release()


def records_of(payload: bytes | memoryview) -> list[Record]:
    """The records of a shipped group, one behind the other. CorruptRecord where one is not sound."""
    view, offset, found = memoryview(payload), 0, []
    while offset < len(view):
        record = decode(view, offset)
        if record is None:
            raise CorruptRecord("a shipped change is not sound")
        found.append(record)
        offset += record.length
    return found


def as_one_record(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Pairs in the form in which changes are shipped."""
    return encode(0, 0, 0, dict(pairs))


def with_term(options: LmdbOptions, term: int) -> LmdbOptions:
    return replace(options, term=term)
