"""Engine of a shard member that has, or may get, standbys: the records of a primary or of a standby.

Extends LmdbKv: it retains its last changes (kv/replication_log), can apply changes from another engine's
journal under their own numbers, can be opened without its last changes, and can be filled from scratch. Used
by kv/replication/standby and kv/replication/primary; created by `open_member`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nvpool.core.errors import CorruptRecord, InvalidRequest, StaleTerm
from nvpool.kv.api import Effect
from nvpool.kv.data_dir import EngineDirectory
from nvpool.kv.engine import LmdbKv
from nvpool.kv.journal import Journal
from nvpool.kv.journal_record import JournalRecord, adopt, decode, encode
from nvpool.kv.lmdb_env import LmdbTree, Mark
from nvpool.kv.options import LmdbOptions
from nvpool.kv.replication.commit_mark import read_mark
from nvpool.kv.replication_log import RETAIN_BYTES, Position, ReplicationHistory, Tail, runs_of

NOTHING = Tail(Position(0, 0))


class MemberKv(LmdbKv):
    """An LmdbKv with log shipping; kv/api and kv/engine have the rest of the contract."""

    history: ReplicationHistory | None

    @classmethod
    async def open_member(
        cls,
        path: str | os.PathLike[str],
        options: LmdbOptions,
        *,
        keep: int | None = None,
        begin: Position | None = None,
        on_fence: Callable[[str], None] | None = None,
        retain_bytes: int = RETAIN_BYTES,
    ) -> MemberKv:
        """Open a member as `open` does.

        With `keep`, the changes after that number are discarded permanently. With `begin`, the directory is
        emptied, and then filled by `install` until `finish`; until then, its changes follow that position.

        InvalidRequest: LMDB already has changes after `keep`; only a full copy helps.
        """
        directory = Path(path)
        if begin is not None:
            _empty(directory)
        engine = cls(directory, options, on_fence, keep=keep, begin=begin, retain_bytes=retain_bytes)
        await engine.start_or_release()
        return engine

    def __init__(
        self,
        path: Path,
        options: LmdbOptions,
        on_fence: Callable[[str], None] | None,
        *,
        keep: int | None,
        begin: Position | None,
        retain_bytes: int,
    ) -> None:
        super().__init__(path, options, None, None, on_fence, lambda _step: None)
        self._keep = keep
        self._begin = begin
        self._retain_bytes = retain_bytes
        self._remembered: ReplicationHistory | None = None

    async def start(self) -> None:
        """As LmdbKv.start; then retain the replayed changes."""
        await super().start()
        # Set only now, because the remaining changes were checkpointed during the start.
        self.history, self._remembered = self._remembered, None

    def _chosen(self, records: list[JournalRecord], last: Mark) -> tuple[list[JournalRecord], int, int]:
        mark = self.tree.mark()
        base = self._begin or (Position(mark.sequence, mark.term) if mark is not None else Position(0, 0))
        if self._keep is not None:
            if not base.sequence <= self._keep <= last.sequence:
                raise InvalidRequest(
                    f"{self.path} cannot go back to change {self._keep}: "
                    f"it has {base.sequence} to {last.sequence}"
                )
            records = [record for record in records if record.sequence <= self._keep]
        remembered = self._remembered = ReplicationHistory(base, self._retain_bytes)
        for record in records:
            remembered.note(
                record.sequence, record.term, encode(record.term, 0, record.sequence, dict(record.effects))
            )
        return records, *remembered.last

    def _stored_mark(self, formatted: bool) -> Mark:
        if not formatted and self._begin is not None:
            return Mark(self._begin.sequence, 0, self._begin.term)
        return super()._stored_mark(formatted)

    # -- retained changes ------------------------------------------------------------------------------------

    def remember(self, on: bool) -> None:
        """Retain the last changes from now on, or drop them: without standbys they are useless and cost
        time."""
        if not on:
            self.history = None
        elif self.history is None:
            self.history = ReplicationHistory(self.last, self._retain_bytes)

    # -- changes of another engine ---------------------------------------------------------------------------

    def begin_term(self, term: int) -> None:
        """Use this term for changes from now on; StaleTerm if there are changes of a later term."""
        if term < self.last.term:
            raise StaleTerm(f"{self.path} has changes of term {self.last.term}, {term} is over")
        if term != self.term:
            self._term_before, self._term_began, self.term = self.last.term, self._sequence, term

    def append(self, record: JournalRecord) -> None:
        """Apply the next change of another engine's journal. On return it survives kill -9; on error nothing
        has changed.

        InvalidRequest: the change is not the next one; begin again with `keep`.
        Busy: await room(), then repeat.
        NoSpace, Fenced and errors of the drive: as for `apply`.
        """
        sequence = self._sequence + 1
        if record.sequence != sequence:
            raise InvalidRequest(f"change {record.sequence} cannot follow {self._sequence}")
        changed = dict(record.effects)
        self.begin_term(record.term)
        raw = encode(record.term, self.journal.generation, sequence, changed)
        if self.journal.offset + len(raw) > self._limit_reclaiming:
            self._refuse(len(raw), reclaims=True)
        self._append_to_journal(raw)
        self._sequence = sequence
        if self.history is not None:
            self.history.note(sequence, record.term, raw)
        self._take(changed)

    def try_append_group(self, payload: bytes) -> bool:
        """Apply all changes of a shipped group with one write to the journal. On return they survive kill -9.

        False: nothing has happened, and the records have to be appended one by one. This is the case if a
        record is invalid, of another term than the change before or not the next one, or if the group does
        not fit into journal and layer without a checkpoint in between. Errors as for `append`.
        """
        if self.term < self.last.term:
            return False
        adopted = adopt(payload, self.term, self.journal.generation, self._sequence)
        if adopted is None:
            return False
        records, effects, count = adopted
        if not records:
            return True
        joined = records[0] if len(records) == 1 else b"".join(records)
        room = min(self._limit_reclaiming, self.options.journal_bytes // 2) - self.journal.offset
        if len(joined) > room or len(self._layer.values) + count >= self.entries_max:
            return False
        self._append_to_journal(joined)
        for raw, changed in zip(records, effects, strict=True):
            self._sequence += 1
            if self.history is not None:
                self.history.note(self._sequence, self.term, raw)
            self._take(changed)
        return True

    async def more_room(self) -> None:
        """Wait after Busy of `append` until a checkpoint has ended; NoSpace if the drive is full."""
        await self._checkpoint_more()

    @property
    def stored(self) -> Position:
        """Position of the last change that is in LMDB, or that a running checkpoint may write."""
        history = self.history
        if self.frozen is not None and (history is None or history.committed >= self._frozen_sequence):
            return Position(self._frozen_sequence, self._frozen_term)
        return Position(self._stored_sequence, self._stored_term)

    # -- filling ---------------------------------------------------------------------------------------------

    def install(self, pairs: list[Effect]) -> None:
        """Store records of another engine, as of our last change. They become durable with `finish`, not
        before."""
        if self._begin is None:
            raise InvalidRequest("only an engine that was opened to be filled takes records as they are")
        self._raise_if_fenced()
        self._take(dict(pairs))

    async def finish(self) -> None:
        """Complete the filling: on return the records are durable and the directory is complete. NoSpace,
        Fenced."""
        wanted = self._checkpoint_count + (1 if self.frozen is None else 2)
        while self._checkpoint_count < wanted:
            await self._checkpoint_more()
        self._directory.finish()
        self._begin = None

    def _finish_directory(self) -> None:
        if self._begin is None:
            super()._finish_directory()


def is_whole(path: Path) -> bool:
    """Return whether the directory holds completely created records."""
    return (path / "FORMAT").exists() and (path / "data.mdb").exists()


def peek(path: Path) -> Tail:
    """Return the tail of the member in this directory, without changing anything; NOTHING if there are no
    complete records.

    InUse: the directory is open. CorruptRecord, WrongFormat and errors of the drive: as when opening it.
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
    """Return the term up to which the commit mark proves that `path` has every acknowledged change; 0 without
    proof.

    Errors as in `peek`.
    """
    marked = read_mark(mark, path) if mark is not None else None
    return marked.term if marked is not None and peek(path).last.sequence >= marked.sequence else 0


def _empty(path: Path) -> None:
    directory = EngineDirectory(path)
    try:
        directory.unfinish()
        directory.prepare()
    finally:
        directory.release()


def records_of(payload: bytes | memoryview) -> list[JournalRecord]:
    """Return the records of a shipped group; CorruptRecord if a record is invalid."""
    view, offset, found = memoryview(payload), 0, []
    while offset < len(view):
        record = decode(view, offset)
        if record is None:
            raise CorruptRecord("a shipped change is not sound")
        found.append(record)
        offset += record.length
    return found


def as_one_record(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Encode pairs in the form in which changes are shipped."""
    return encode(0, 0, 0, dict(pairs))


def with_term(options: LmdbOptions, term: int) -> LmdbOptions:
    return replace(options, term=term)
