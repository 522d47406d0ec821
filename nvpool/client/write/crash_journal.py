"""Crash journal: copies of unstored writes in memory that outlives this process.

A piece of a write is in the mount state (shm/mount_state) before the write is answered, and is dropped when a
store has it. The end of stored but unreported bytes of a file is dropped when it has been reported. Pieces
never cross a unit's border: so overlapping pieces are in one extent, or the older one is stored before the
newer one is sent; pieces are dropped in the order of their numbers. A successor process overlays the pieces
that it finds in that order. Used by the writer, and by vfs/takeover at the start of a successor.
"""

from __future__ import annotations

from typing import NamedTuple

from nvpool.client.state.dirty_file import DirtyExtent, DirtyFile, Record
from nvpool.shm.mount_state import KeptMemory, Word


class JournaledExtent(NamedTuple):
    """A piece of a write of the previous process."""

    offset: int
    data: memoryview
    record: Record


class JournaledFile(NamedTuple):
    """The state of a file that the previous process left; see shm/mount_state.FILE."""

    entry: int
    stored_end: int
    stored_bytes: int
    cut: int
    error: int
    met: int
    pieces: list[JournaledExtent]


class CrashJournal:
    """The crash journal of a client."""

    def __init__(self, memory: KeptMemory) -> None:
        self.memory = memory
        self._files, self._writes = memory.file_records, memory.write_records
        self.last_number = max([record[-1] for record in memory.writes.all()], default=0)
        self._unstable = bool(memory.word(Word.UNSTABLE))

    def has_room(self, length: int) -> bool:
        """Whether `keep` can journal a write of `length` bytes, in pieces divided at unit borders."""
        return self._writes.has_room(length)

    def keep(
        self, written: DirtyFile, offset: int, data, unique: int, last: bool
    ) -> tuple[Record, memoryview]:
        """Journal a piece: from here on it outlives this process.

        Return its record, and its bytes in the journal.
        """
        number = self.last_number + 1
        self.last_number = number
        index, kept = self._writes.keep(written.file.inode, offset, data, unique, last, number)
        return (number, index), kept

    def drop(self, records: list[Record]) -> None:
        """Drop pieces, and empty the list."""
        for record in records:
            self._writes.drop(record[1])
        records.clear()

    def clip(self, segment: DirtyExtent, size: int) -> None:
        """Drop the parts of the extent's pieces at or behind `size`."""
        kept = []
        for record in segment.records:
            _, offset, _, _, length, _, _ = self.memory.writes.read(record[1])
            if offset >= size:
                self._writes.drop(record[1])
                continue
            if offset + length > size:
                self._writes.shorten(record[1], size - offset)
            kept.append(record)
        segment.records = kept

    def begin(self, written: DirtyFile) -> None:
        """Start an entry for a file that is written from now on. TooManyOpen."""
        written.entry = self.memory.files.take()
        self.note(written)

    def note(self, written: DirtyFile) -> None:
        """Update the file's entry: the bytes that stores have and the service does not know.

        Called before the pieces of those bytes are dropped, and after a report.
        """
        file = written.file
        error = written.error.errno if written.error is not None else 0
        met = written.met.errno if written.met is not None else 0
        self._files.keep(
            written.entry, written.stored_up_to(), written.stored_bytes, file.cut, error, met, file.inode
        )

    def end(self, written: DirtyFile) -> None:
        """Drop the file's entry and pieces; pieces in flight stay until they have arrived."""
        for segments in written.dirty.values():
            for segment in segments:
                self.drop(segment.records)
        if written.entry >= 0:
            self.memory.files.give_back(written.entry)
            written.entry = -1

    def note_unstable(self, there_is: bool) -> None:
        if there_is != self._unstable:
            self._unstable = there_is
            self.memory.set_word(Word.UNSTABLE, there_is)

    def left(self) -> dict[int, JournaledFile]:
        """The files that the previous process left, by inode; pieces are in write order."""
        found = {}
        for entry, end, byte_count, cut, error, met, inode in self.memory.files.valid():
            found[inode] = JournaledFile(entry, end, byte_count, cut, error, met, [])
        pieces = sorted(self.memory.writes.valid(), key=lambda record: record[-1])
        for index, inode, offset, place, _, length, _, number in pieces:
            kept = found.get(inode)
            if kept is None:
                kept = found[inode] = JournaledFile(-1, 0, 0, 0, 0, 0, [])
            kept.pieces.append(
                JournaledExtent(offset, self.memory.payloads[place : place + length], (number, index))
            )
        return found

    def finished(self) -> dict[int, int]:
        """Kernel requests with writes in the journal or stored a short time ago: number -> bytes."""
        found: dict[int, int] = {}
        ended = set()
        for _, _, _, _, unique, _, taken, _ in self.memory.writes.all():
            if unique:
                found[unique] = found.get(unique, 0) + (taken >> 1)
                if taken & 1:
                    ended.add(unique)
        return {unique: count for unique, count in found.items() if unique in ended}
