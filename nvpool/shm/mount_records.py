"""Writers of the mount state's records of changes in flight, open files and unstored writes (shm/mount_state).

The process can be killed between any two instructions. So each writer stores the fields of a record first and
its mark last, as one store: a record counts from its mark on. Used by client/rpc/slot_journal,
client/write/crash_journal, fuse/ops/handles and the fast paths of the mount; mount_state reads the records.
"""

from __future__ import annotations

import struct
from typing import Any

from nvpool.core.primitives import RecordMemory
from nvpool.core.units import Buffer
from nvpool.shm.arena import Arena

SLOT = struct.Struct("<QQQ")
"""sequence, method, unique number of the kernel's request (mark)"""
HANDLE = struct.Struct("<QIIIIQQ")
"""inode, flags of open(2) (with DIRECTORY for a directory; PUBLISHED), uid, gid, pid of the opener, unique
number of the open request, handle (mark)"""
FILE = struct.Struct("<QQQIIQ")
"""end of the data that stores have and the metadata service does not know yet, bytes of that data, truncate
epoch, errno not yet reported to any caller, errno of the last loss (0: none), inode (mark)"""
WRITE = struct.Struct("<QQQQIIQ")
"""inode, offset in the file, offset in the arena, unique number of the request, length, twice the bytes
allocated in the arena (plus one in the last piece of a write), number (mark)"""
HANDLES_MAX = 1 << 20
_SLOT_BYTES, _HANDLE_BYTES = SLOT.size, HANDLE.size
_SLOT_MARK, _HANDLE_MARK = SLOT.size - 8, HANDLE.size - 8
_INDEX_BITS = HANDLES_MAX.bit_length() - 1
_HANDLES = HANDLES_MAX
_FILE_BYTES, _WRITE_BYTES = FILE.size, WRITE.size
_FILE_MARK, _WRITE_MARK = FILE.size - 8, WRITE.size - 8


class SlotRecords:
    """Records of changes whose kernel requests are not answered, by shard record and request slot."""

    def __init__(self, memory: RecordMemory, place: int, shard_bytes: int) -> None:
        """`place`: offset of the first slot of shard record 0; the shard records have `shard_bytes` each."""
        self._memory = memory
        self._place = place
        self._shard_bytes = shard_bytes

    def keep(self, shard: int, slot: int, sequence: int, method: int, unique: int) -> None:
        """Record, before sending, that the change for kernel request `unique` has this sequence number."""
        memory = self._memory
        at = self._place + shard * self._shard_bytes + slot * _SLOT_BYTES
        memory.put_u64(at, sequence)
        memory.put_u64(at + 8, method)
        memory.put_mark(at + _SLOT_MARK, unique)

    def clear(self, shard: int, slot: int) -> None:
        """Delete the record of a slot."""
        self._memory.put_mark(self._place + shard * self._shard_bytes + slot * _SLOT_BYTES + _SLOT_MARK, 0)


class HandleRecords:
    """Records of open files and directories. The low bits of a handle are the index of its record."""

    def __init__(self, memory: RecordMemory, table: Any) -> None:
        """`table`: the shm/mount_state.Table of the handles, which says what records are free."""
        self._memory = memory
        self._table = table
        self._freed = table.freed
        self._place = table.place

    def has_room(self, count: int) -> bool:
        """Whether more than `count` records are free."""
        used: int = self._table.used
        return len(self._freed) + _HANDLES - used > count

    def keep(self, serial: int, inode: int, flags: int, uid: int, gid: int, pid: int, unique: int) -> int:
        """Record an open file before the kernel gets its handle; return the handle.

        `serial` is a number that no other handle of this mount has had. TooManyOpen: no record is free.
        """
        memory = self._memory
        index: int = self._freed.pop() if self._freed else self._table.take()
        number = serial << _INDEX_BITS | index
        at = self._place + index * _HANDLE_BYTES
        memory.put_u64(at, inode)
        memory.put_u32(at + 8, flags)
        memory.put_u32(at + 12, uid)
        memory.put_u32(at + 16, gid)
        memory.put_u32(at + 20, pid)
        memory.put_u64(at + 24, unique)
        memory.put_mark(at + _HANDLE_MARK, number)
        return number

    def drop(self, number: int) -> None:
        """Delete the record of a released file."""
        index = number & _HANDLES - 1
        self._memory.put_mark(self._place + index * _HANDLE_BYTES + _HANDLE_MARK, 0)
        self._freed.append(index)


class FileRecords:
    """Records of files with data that the metadata service does not know yet."""

    def __init__(self, memory: RecordMemory, place: int) -> None:
        """`place`: offset of the first record."""
        self._memory = memory
        self._place = place

    def keep(self, index: int, end: int, byte_count: int, cut: int, error: int, met: int, inode: int) -> None:
        """Store all fields of a record, in their order in FILE."""
        memory = self._memory
        at = self._place + index * _FILE_BYTES
        memory.put_u64(at, end)
        memory.put_u64(at + 8, byte_count)
        memory.put_u64(at + 16, cut)
        memory.put_u32(at + 24, error)
        memory.put_u32(at + 28, met)
        memory.put_mark(at + _FILE_MARK, inode)


class WriteRecords:
    """Records of pieces of writes that no store has yet, with their bytes in the arena."""

    def __init__(self, memory: RecordMemory, table: Any, arena: Arena, payloads: memoryview) -> None:
        """`table`: the shm/mount_state.Table of the pieces; `payloads`: the memory of the arena."""
        self._memory = memory
        self._table = table
        self._freed = table.freed
        self._place = table.place
        self._count = table.count
        self._arena = arena
        self._payloads = payloads

    def has_room(self, length: int) -> bool:
        """Return whether `keep` can store `length` bytes, in pieces divided at unit borders."""
        pieces = (length >> 16) + 2  # units are chunks, of 64 KiB at least
        used: int = self._table.used
        return len(self._freed) + self._count - used > pieces and self._arena.has_room(length)

    def keep(
        self, inode: int, offset: int, buffer: Buffer, unique: int, last: bool, number: int
    ) -> tuple[int, memoryview]:
        """Store a piece of a write; return (record index, stored bytes).

        On return the piece survives the end of this process. A piece has at most 1 MiB, and the caller has
        checked `has_room`. `last`: it is the last piece of the write.
        """
        memory = self._memory
        length = len(buffer)
        place = self._arena.take(length)
        kept = self._payloads[place : place + length]
        kept[:] = buffer
        index: int = self._table.take()
        at = self._place + index * _WRITE_BYTES
        # A record without its mark means that the write was stored. So the request number is added only after
        # the piece is valid. If the process is killed in between, the kernel sends the request again, and the
        # write stores the same bytes again.
        memory.put_mark(at + 24, 0)
        memory.put_u64(at, inode)
        memory.put_u64(at + 8, offset)
        memory.put_u64(at + 16, place)
        memory.put_u32(at + 32, length)
        memory.put_u32(at + 36, length << 1 | last)
        memory.put_mark(at + _WRITE_MARK, number)
        if unique:
            memory.put_mark(at + 24, unique)
        return index, kept

    def shorten(self, index: int, length: int) -> None:
        """Shorten the piece to its first `length` bytes, at least one."""
        self._memory.put_u32(self._place + index * _WRITE_BYTES + 32, length)

    def drop(self, index: int) -> None:
        """Delete a piece: a store has it, or no store ever will."""
        at = self._place + index * _WRITE_BYTES
        place = self._memory.get_u64(at + 16)
        self._memory.put_mark(at + _WRITE_MARK, 0)
        self._freed.append(index)
        self._arena.give_back(place)
