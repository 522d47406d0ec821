"""Mount state: the part of a mount that outlives its serving process, in one versioned shared memory.

A serving process can be killed between any two instructions. Therefore the last field of each record is a
mark, which makes the record valid: a half-written record does not count, and clearing the mark deletes the
record. Payload bytes are written before the record that refers to them. Only the serving process writes here;
its successor reads the state once, at start.

Sections follow one another, each at a multiple of 4 KiB: words, shards, handles, locks, files, writes, arena.
The memory is sparse: unused parts cost nothing. The serving process creates the memory, mountd/holder keeps a
descriptor of it, and client/ and fuse/ use it. This module is plain bookkeeping: it never waits, and knows
neither the kernel nor the pool.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from nvpool.core.errors import CorruptRecord, NoSpace, TooManyOpen, WrongFormat
from nvpool.core.primitives import RecordMemory
from nvpool.core.units import KIB, MIB, SLOTS_PER_SESSION
from nvpool.shm.arena import Arena
from nvpool.shm.memfd import make_sealed
from nvpool.shm.mount_records import (
    FILE,
    HANDLE,
    HANDLES_MAX,
    SLOT,
    WRITE,
    FileRecords,
    HandleRecords,
    SlotRecords,
    WriteRecords,
)

MAGIC = b"nvpkept\n"
VERSION = 1
_HEAD = struct.Struct("<8sIIQQ")
"""magic, version, zero, total bytes, bytes of the arena"""
_WORDS = 64
_DEVICE = struct.Struct("<B15s")
_DEVICE_PLACE = 1024

SHARDS_MAX = 1024
LOCKS_MAX = 1 << 16
FILES_MAX = 1 << 18
WRITES_MAX = 1 << 14
"""Bound for pieces of writes that no store has yet: 64 MiB of 4 KiB. Beyond the bound, writers wait for the
stores."""
SECRET_BYTES_MAX = 63

SHARD = struct.Struct("<IB63sQ")
"""shard, length of the secret, secret, session (mark)"""
LOCK = struct.Struct("<QQQQ")
"""inode, owner, handle through which the lock was acquired, kind (mark)"""
_MARK = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")

SHARD_BYTES = 2048
"""Size of a SHARD record, including the SLOTS_PER_SESSION SLOT records after it."""
DIRECTORY = 1 << 31
PUBLISHED = 1 << 30
"""Handle flag: other processes of the mount may read the file. The process that opened the handle sets and
clears the flag."""
_MADV_REMOVE = 9


class Word(IntEnum):
    """Numbers of 8 bytes at offset 64 + 8 × their value."""

    LIVES = 0
    """Number of serving processes so far."""
    GREETED = 1
    """INIT was answered, with the values in the words below."""
    INIT_FLAGS = 2
    PAGES = 3
    UNSTABLE = 4
    """Stores may have unstable writes."""
    SHARDS = 5
    """This word and the next four: number of records of each table that were ever used; used records come
    first."""
    HANDLES = 6
    LOCKS = 7
    FILES = 8
    WRITES = 9
    ROOT = 10
    """Inode of the mounted directory; 0 for the pool's root."""


def _up(count: int) -> int:
    return (count + 4095) & ~4095


class Table:
    """Records of one form.

    `take` reuses the most recently freed record or, with `in_turn`, the record that has been free for the
    longest time.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        place: int,
        form: struct.Struct,
        count: int,
        word: Word,
        *,
        in_turn: bool = False,
    ):
        self._memory, self.place, self.form, self.count = memory, place, form, count
        self._word = 64 + 8 * word
        self._mark = form.size - 8
        self.used: int
        (self.used,) = _MARK.unpack_from(memory, self._word)
        if self.used > count:
            raise CorruptRecord(
                f"{word.name.lower()}: {self.used} records are said to be used, there are {count}"
            )
        self._in_turn = in_turn
        self.freed: deque[int] = deque(index for index in range(self.used) if not self.mark(index))

    @property
    def free(self) -> int:
        return len(self.freed) + self.count - self.used

    def take(self) -> int:
        """Return the index of a free record; TooManyOpen if the table is full."""
        if self.freed and not (self._in_turn and self.used < self.count):
            return self.freed.popleft() if self._in_turn else self.freed.pop()
        if self.used >= self.count:
            raise TooManyOpen(
                f"the memory that outlives a mount's process holds {self.count} records of a kind"
            )
        index = self.used
        self.used += 1
        _MARK.pack_into(self._memory, self._word, self.used)
        return index

    def put(self, index: int, *fields: int) -> None:
        self.form.pack_into(self._memory, self.place + index * self.form.size, *fields)

    def give_back(self, index: int) -> None:
        _MARK.pack_into(self._memory, self.place + index * self.form.size + self._mark, 0)
        self.freed.append(index)

    def mark(self, index: int) -> int:
        mark: int
        (mark,) = _MARK.unpack_from(self._memory, self.place + index * self.form.size + self._mark)
        return mark

    def read(self, index: int) -> tuple[Any, ...]:
        return self.form.unpack_from(self._memory, self.place + index * self.form.size)

    def all(self) -> Iterator[tuple[Any, ...]]:
        """Yield (index, *fields) of every record that was ever used, valid or not."""
        for index in range(self.used):
            yield index, *self.read(index)

    def valid(self) -> list[tuple[Any, ...]]:
        return [record for record in self.all() if record[-1]]


class KeptMemory:
    """One mapping of a mount state. `descriptor` stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        """Map and verify the memory.

        WrongFormat: the memory has another version.
        CorruptRecord: its contents are inconsistent.
        """
        size = os.fstat(descriptor).st_size
        if size < 4096:
            raise CorruptRecord(f"the memory that a mount's process left has {size} bytes")
        self.mapping = memory = mmap.mmap(descriptor, size)
        magic, version, _, total, arena_bytes = _HEAD.unpack_from(memory)
        if magic != MAGIC or version != VERSION:
            raise WrongFormat(
                f"the memory that a mount's process left has version {version}, this nvpool knows {VERSION}: "
                "unmount, and mount again"
                if magic == MAGIC
                else "this is not the memory of a mount's process"
            )
        places = places_for(arena_bytes)
        if total != size or arena_bytes % MIB or places[-1] + arena_bytes != total:
            raise CorruptRecord(
                f"the memory that a mount's process left says that it has {total} bytes, and has {size}"
            )
        self.shards_place = places[0]
        self.shard_count = self.word(Word.SHARDS)
        if self.shard_count > SHARDS_MAX:
            raise CorruptRecord(f"{self.shard_count} shards in the memory that a mount's process left")
        self.handles = Table(memory, places[1], HANDLE, HANDLES_MAX, Word.HANDLES)
        records = RecordMemory(memory)
        self.slot_records = SlotRecords(records, places[0] + SHARD.size, SHARD_BYTES)
        self.handle_records = HandleRecords(records, self.handles)
        self.locks = Table(memory, places[2], LOCK, LOCKS_MAX, Word.LOCKS)
        self.files = Table(memory, places[3], FILE, FILES_MAX, Word.FILES)
        self.writes = Table(memory, places[4], WRITE, WRITES_MAX, Word.WRITES, in_turn=True)
        self.payloads = memoryview(memory)[places[5] :]
        held = []
        for index, inode, offset, place, _, length, taken, _ in self.writes.valid():
            if not inode or not 0 < length <= taken >> 1 <= MIB or offset >= 1 << 62:
                raise CorruptRecord(f"write {index} in the memory that a mount's process left makes no sense")
            held.append((place, taken >> 1))
        self.arena = Arena(arena_bytes, held)
        self.file_records = FileRecords(records, self.files.place)
        self.write_records = WriteRecords(records, self.writes, self.arena, self.payloads)
        for index, inode, *_ in self.handles.valid():
            if not inode:
                raise CorruptRecord(
                    f"handle {index} in the memory that a mount's process left is of no inode"
                )

    @classmethod
    def make(cls, arena_bytes: int = 256 * MIB) -> int:
        """Create an empty mount state and return its descriptor.

        The descriptor is closed on exec, and the size of the memory is sealed.
        """
        arena_bytes = max(arena_bytes, 16 * MIB) + MIB - 1 & ~(MIB - 1)
        total = places_for(arena_bytes)[-1] + arena_bytes
        return make_sealed("nvpool mount", total, _HEAD.pack(MAGIC, VERSION, 0, total, arena_bytes))

    # -- words -----------------------------------------------------------------------------------------------------------

    def word(self, word: Word) -> int:
        value: int
        (value,) = _MARK.unpack_from(self.mapping, 64 + 8 * word)
        return value

    def set_word(self, word: Word, value: int) -> None:
        _MARK.pack_into(self.mapping, 64 + 8 * word, value)

    @property
    def device(self) -> str:
        """Device of the mount as major:minor; empty before the mount exists."""
        length: int
        text: bytes
        length, text = _DEVICE.unpack_from(self.mapping, _DEVICE_PLACE)
        return text[:length].decode(errors="replace")

    @device.setter
    def device(self, text: str) -> None:
        _DEVICE.pack_into(self.mapping, _DEVICE_PLACE, len(text), text.encode())

    # -- sessions --------------------------------------------------------------------------------------------------------

    def _shard_place(self, number: int) -> int:
        return self.shards_place + number * SHARD_BYTES

    def shards(self) -> dict[int, tuple[int, int, bytes]]:
        """Return shard -> (record number, session, secret) of the sessions that were not closed."""
        found = {}
        for number in range(self.shard_count):
            shard, length, secret, session = SHARD.unpack_from(self.mapping, self._shard_place(number))
            if length > SECRET_BYTES_MAX:
                raise CorruptRecord(
                    f"the secret of shard {shard} in the memory that a mount's process left is too long"
                )
            if session:
                found[shard] = number, session, secret[:length]
        return found

    def add_shard(self) -> int:
        """Return the number of a new record, for `keep_session`; NoSpace if there are SHARDS_MAX records."""
        if self.shard_count >= SHARDS_MAX:
            raise NoSpace(f"a mount that outlives its process takes {SHARDS_MAX} metadata shards at most")
        self.shard_count += 1
        self.set_word(Word.SHARDS, self.shard_count)
        return self.shard_count - 1

    def keep_session(self, number: int, shard: int, session: int, secret: bytes) -> None:
        """Record the session at a shard (0: none), with all of its slots unused."""
        place = self._shard_place(number)
        _MARK.pack_into(self.mapping, place + SHARD.size - 8, 0)
        for slot in range(SLOTS_PER_SESSION):
            self.slot_records.clear(number, slot)
        SHARD.pack_into(self.mapping, place, shard, len(secret), secret, session)

    def slots(self, number: int) -> list[tuple[int, int, int, int]]:
        """Return (slot, sequence, method, unique) of changes whose requests were not answered."""
        place = self._shard_place(number) + SHARD.size
        found = [
            (slot, *SLOT.unpack_from(self.mapping, place + slot * SLOT.size))
            for slot in range(SLOTS_PER_SESSION)
        ]
        return [record for record in found if record[3]]

    def unpublish(self, index: int) -> None:
        """Revoke other processes' permission to read the file of this handle."""
        place = self.handles.place + index * HANDLE.size + 8
        (flags,) = _LENGTH.unpack_from(self.mapping, place)
        _LENGTH.pack_into(self.mapping, place, flags & ~PUBLISHED)

    def trim(self) -> None:
        """Return the pages of an empty arena to the system; do nothing if the arena is not empty."""
        if self.arena.trim():
            try:
                self.mapping.madvise(_MADV_REMOVE, len(self.mapping) - len(self.payloads), len(self.payloads))
            except OSError:
                pass  # not fatal: the memory merely stays allocated


class KeptHandles:
    """Read-only view of the handles, for other processes of the mount."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory; WrongFormat if it has another version."""
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_READ)
        magic, version, _, _, arena_bytes = _HEAD.unpack_from(self._memory)
        if magic != MAGIC or version != VERSION:
            raise WrongFormat(f"the memory of this mount has version {version}, this nvpool knows {VERSION}")
        self._place = places_for(arena_bytes)[1]

    def word(self, word: Word) -> int:
        value: int
        (value,) = _MARK.unpack_from(self._memory, 64 + 8 * word)
        return value

    def published(self, number: int) -> int:
        """Return the inode of a handle; 0 if the handle is closed or not published."""
        place = self._place + (number & HANDLES_MAX - 1) * HANDLE.size
        inode, flags, _, _, _, _, mark = HANDLE.unpack_from(self._memory, place)
        return inode if mark == number and flags & PUBLISHED else 0


def places_for(arena_bytes: int) -> tuple[int, ...]:
    """Return the offsets of shards, handles, locks, files, writes and arena."""
    found = [4 * KIB]
    for count in (
        SHARDS_MAX * SHARD_BYTES,
        HANDLES_MAX * HANDLE.size,
        LOCKS_MAX * LOCK.size,
        FILES_MAX * FILE.size,
        WRITES_MAX * WRITE.size,
    ):
        found.append(_up(found[-1] + count))
    return tuple(found)
