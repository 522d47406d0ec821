"""Writers of the mount state's records of changes in flight and of open files (shm/mount_state).

The process can be killed between any two instructions. So each writer stores the fields of a record first and
its mark last, as one store: a record counts from its mark on. Used by client/rpc/slot_journal,
fuse/ops/handles and the fast paths of the mount; mount_state reads the records.
"""

from __future__ import annotations

import struct
from typing import Any

from nvpool.core.primitives import RecordMemory

SLOT = struct.Struct("<QQQ")
"""sequence, method, unique number of the kernel's request (mark)"""
HANDLE = struct.Struct("<QIIIIQQ")
"""inode, flags of open(2) (with DIRECTORY for a directory; PUBLISHED), uid, gid, pid of the opener, unique
number of the open request, handle (mark)"""
HANDLES_MAX = 1 << 20
_SLOT_BYTES, _HANDLE_BYTES = SLOT.size, HANDLE.size
_SLOT_MARK, _HANDLE_MARK = SLOT.size - 8, HANDLE.size - 8
_INDEX_BITS = HANDLES_MAX.bit_length() - 1
_HANDLES = HANDLES_MAX


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
