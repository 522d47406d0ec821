"""Journal of an engine: the log from which changes are replayed after a crash.

An appended change survives the death of the process and, after a sync, a power loss.

Two preallocated files, `journal-0` and `journal-1`, alternate: generation g is written from the start of file
g mod 2. A file consists of records only, one after the other. The bytes after the last record are older or
zero, and their generation and number do not match. A record, little-endian:

    0   crc         u32   CRC32C of everything after it, bytes 4 to length
    4   length      u32   of the whole record, 40 at least
    8   term        u64   of the primary that made the change
    16  generation  u64
    24  sequence    u64   1, 2, 3, … without a gap over all generations
    32  effects     u32   how many follow
    36  reserved    u32   0
    40  effects, each:  key length u16 · value length u32, 0xFFFFFFFF for a deletion · key · value

The effects fill the record exactly. Replay ends at the first record whose length, CRC, generation or number
does not match. A generation is never started twice, so the remains of a torn write cannot become valid later.

Only the LMDB engine uses this module. All file I/O goes through `os` calls, one pwrite for each change or
shipped group, so that a preloaded library can record the calls and let them fail. Only `sync_file` waits; it is called in a
thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nvpool.core.checksum import crc32c
from nvpool.core.compiled_loader import load_compiled
from nvpool.core.errors import Fenced, NvpoolError, from_os_error

_journal_record = load_compiled("nvpool.kv._journal_record")

_HEAD = struct.Struct("<IQQQII")  # without the CRC
_HEAD_BYTES = 4 + _HEAD.size
_EFFECT = struct.Struct("<HI")
_DELETED = 0xFFFFFFFF
_PAGE_BYTES = 4096
_ZEROS = bytes(_PAGE_BYTES)
_PIECE_BYTES = 1 << 16


class JournalRecord(NamedTuple):
    term: int
    generation: int
    sequence: int
    effects: list[tuple[bytes, bytes | None]]
    length: int


def encode_plain(term: int, generation: int, sequence: int, effects: dict[bytes, bytes | None]) -> bytes:
    """Encode a record of effects that `api.checked_effects` has accepted."""
    pack = _EFFECT.pack
    body = b"".join(
        [
            pack(len(key), _DELETED) + key if value is None else pack(len(key), len(value)) + key + value
            for key, value in effects.items()
        ]
    )
    head = _HEAD.pack(_HEAD_BYTES + len(body), term, generation, sequence, len(effects), 0)
    return crc32c(body, crc32c(head)).to_bytes(4, "little") + head + body


encode = encode_plain if _journal_record is None else _journal_record.encode

Adopted = tuple[list[bytes], list[dict[bytes, bytes | None]], int]
"""Records of a shipped group, encoded for this journal; the effects of each; and the number of all effects."""


def adopt(payload: bytes, term: int, generation: int, sequence: int) -> Adopted | None:
    """Encode the records of a shipped group again, for a journal that ends with change `sequence`.

    Records up to `sequence` are left out. None if a record is invalid, of another term than `term`, or not the
    next change; and without a compiler. The caller then decodes the records one by one.
    """
    if _journal_record is None:
        return None
    adopted: Adopted | None = _journal_record.adopt(payload, term, generation, sequence)
    return adopted


def decode(buffer: memoryview, offset: int) -> JournalRecord | None:
    """Decode the record at `offset`.

    The result is None if there is no complete and valid record. Invalid bytes never raise an error.
    """
    if len(buffer) - offset < _HEAD_BYTES:
        return None
    length, term, generation, sequence, count, reserved = _HEAD.unpack_from(buffer, offset + 4)
    end = offset + length
    if length < _HEAD_BYTES or end > len(buffer) or reserved:
        return None
    if crc32c(buffer[offset + 4 : end]) != int.from_bytes(buffer[offset : offset + 4], "little"):
        return None
    effects: list[tuple[bytes, bytes | None]] = []
    at = offset + _HEAD_BYTES
    for _ in range(count):
        if end - at < _EFFECT.size:
            return None
        key_bytes, value_bytes = _EFFECT.unpack_from(buffer, at)
        at += _EFFECT.size
        deleted = value_bytes == _DELETED
        if end - at < key_bytes + (0 if deleted else value_bytes):
            return None
        key = bytes(buffer[at : at + key_bytes])
        at += key_bytes
        if deleted:
            effects.append((key, None))
        else:
            effects.append((key, bytes(buffer[at : at + value_bytes])))
            at += value_bytes
    return JournalRecord(term, generation, sequence, effects, length) if at == end else None


class Journal:
    """The two journal files of an engine, in `directory`. One thread owns it, except for `sync_file`."""

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        """Open the files; create and preallocate missing ones. On return they exist durably.

        NoSpace: the drive has no space for them. DriveFailed, AccessDenied: as the system reports.
        """
        self.capacity_bytes = capacity_bytes
        self.offset = 0
        """Position of the next record, and so also the size of the current generation."""
        self._generation = 0
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

    @property
    def generation(self) -> int:
        return self._generation

    def begin(self, generation: int) -> None:
        """Start `generation`, which must be higher than any written before.

        It overwrites the file of the generation before the last, which is in the long-term store.
        """
        self._generation = generation
        self.offset = 0

    def append(self, record: bytes) -> None:
        """Append `record`, or consecutive records. On return they survive kill -9.

        NoSpace: replay will not find the record, and another append may follow.
        DriveFailed: replay will not find the record either, but the drive is not reliable; fence the engine.
        Fenced: the journal may still contain part of the record.
        """
        half = self._generation & 1
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
                or os.pwrite(descriptor, bytes(_HEAD_BYTES), offset) == _HEAD_BYTES
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
            head = os.pread(descriptor, _HEAD_BYTES, 0)
            if len(head) < _HEAD_BYTES or _HEAD.unpack_from(head, 4)[2] != generation:
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
