"""Journal of an engine: the log from which changes are replayed after a crash.

An appended change survives the death of the process and, after a sync, a power loss.

Two preallocated files, `journal-0` and `journal-1`, alternate: generation g is written from the start of file
g mod 2. A file consists of records only (kv/journal_record), one after the other. The bytes after the last record
are older or zero, and their generation and number do not match. Replay ends at the first record whose length, CRC,
generation or number does not match. A generation is never started twice, so the remains of a torn write cannot
become valid later.

Only the LMDB engine uses this module. All file I/O goes through `os` calls, one pwrite for each change or
shipped group, so that a preloaded library can record the calls and let them fail. Only `sync_file` waits; it is called in a
thread.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from nvpool.core.errors import Fenced, NvpoolError, from_os_error
from nvpool.kv.journal_record import HEAD_BYTES, JournalRecord, decode, generation_of

_PAGE_BYTES = 4096
_ZEROS = bytes(_PAGE_BYTES)
_PIECE_BYTES = 1 << 16


class Journal:
    """The two journal files of an engine, in `directory`. One thread owns it, except for `sync_file`."""

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        """Open the files; create and preallocate missing ones. On return they exist durably.

        NoSpace: the drive has no space for them. DriveFailed, AccessDenied: as the system reports.
        """
        self.capacity_bytes = capacity_bytes
        self.offset = 0
        """Position of the next record, and so also the size of the current generation."""
        self.generation = 0
        self.files: list[int] = []
        self._unsynced = [False, False]
        try:
            for name in ("journal-0", "journal-1"):
                descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600)
                self.files.append(descriptor)
                if os.fstat(descriptor).st_size < capacity_bytes:
                    os.posix_fallocate(descriptor, 0, capacity_bytes)
                    os.fsync(descriptor)
        except OSError as error:
            self.close()
            raise from_os_error(error, f"open the journal in {directory}") from error

    def begin(self, generation: int) -> None:
        """Start `generation`, which must be higher than any written before.

        It overwrites the file of the generation before the last, which is in the long-term store.
        """
        self.generation = generation
        self.offset = 0

    def append(self, record: bytes) -> None:
        """Append `record`, or consecutive records. On return they survive kill -9.

        NoSpace: replay will not find the record, and another append may follow.
        DriveFailed: replay will not find the record either, but the drive is not reliable; fence the engine.
        Fenced: the journal may still contain part of the record.
        """
        half = self.generation & 1
        descriptor = self.files[half]
        offset = self.offset
        end = offset + len(record)
        filling = -end % _PAGE_BYTES
        try:
            if (end - 1) // _PAGE_BYTES > (
                offset - 1
            ) // _PAGE_BYTES and end + filling <= self.capacity_bytes:
                # Fill the last page that this record begins. Otherwise, if the page is not in the page cache,
                # a partial write would first read it from the drive, and this call would wait.
                written = os.pwrite(descriptor, record + _ZEROS[:filling], offset)
            else:
                written = os.pwrite(descriptor, record, offset)
            while written < len(record):  # POSIX allows a short write; the next call reports the reason
                more = os.pwrite(descriptor, record[written:], offset + written)
                if not more:
                    raise OSError(errno.EIO, "nothing was written")
                written += more
        except OSError as error:
            if not self._wiped(descriptor, offset, record):
                raise Fenced(
                    f"the journal could not be written ({error.strerror}), and part of a change is in it"
                ) from error
            raise from_os_error(error, "write the journal") from error
        self._unsynced[half] = True
        self.offset = end

    @staticmethod
    def _wiped(descriptor: int, offset: int, record: bytes) -> bool:
        """Ensure that replay cannot find a record whose write failed; return whether this is certain.

        A full drive may refuse this write too, so first check whether there is anything to overwrite.
        """
        try:
            return (
                os.pread(descriptor, 4, offset) != record[:4]
                or os.pwrite(descriptor, bytes(HEAD_BYTES), offset) == HEAD_BYTES
            )
        except OSError:
            return False

    def take_unsynced(self) -> list[int]:
        """Return the descriptors to sync so that all appended records become durable.

        They count as synced from now on, so a failure of `sync_file` must fence the engine.
        """
        files = [self.files[half] for half in (0, 1) if self._unsynced[half]]
        self._unsynced = [False, False]
        return files

    @staticmethod
    def sync_file(descriptor: int) -> None:
        """Sync a file; waits for the drive. Never repeat after OSError: the kernel has dropped the pages."""
        os.fdatasync(descriptor)

    def replay(self, generation: int, sequence: int) -> Iterator[JournalRecord]:
        """Yield the valid records of `generation` in order; the first must have the number `sequence` + 1."""
        buffer = self._read(self.files[generation & 1], generation)
        offset = 0
        while (record := decode(buffer, offset)) is not None:
            if record.generation != generation or record.sequence != sequence + 1:
                return
            yield record
            sequence += 1
            offset += record.length

    @staticmethod
    def _read(descriptor: int, generation: int) -> memoryview:
        try:
            head = os.pread(descriptor, HEAD_BYTES, 0)
            if len(head) < HEAD_BYTES or generation_of(head) != generation:
                return memoryview(b"")  # usual after a clean stop: avoids reading the whole file
            size, offset = os.fstat(descriptor).st_size, 0
            # An own mapping, filled in small pieces: after freeing bytes of this size, malloc would later
            # retain as much freed memory.
            whole = mmap.mmap(-1, size)
            while offset < size and (piece := os.pread(descriptor, min(_PIECE_BYTES, size - offset), offset)):
                whole[offset : offset + len(piece)] = piece
                offset += len(piece)
        except OSError as error:
            raise _read_failed(error) from error
        return memoryview(whole)[:offset]

    def close(self) -> None:
        """Close the files without syncing. May be called twice."""
        while self.files:
            os.close(self.files.pop())


def _read_failed(error: OSError) -> NvpoolError:
    return from_os_error(error, "read the journal")
