"""Records of slots, handles, files and writes: layout, order of the stores, bounds."""

import os
import struct

import pytest

from nvpool.core.errors import TooManyOpen
from nvpool.core.primitives import RecordMemory
from nvpool.core.units import MIB
from nvpool.shm.arena import Arena
from nvpool.shm.mount_records import (
    FILE,
    HANDLES_MAX,
    WRITE,
    FileRecords,
    HandleRecords,
    SlotRecords,
    WriteRecords,
)
from nvpool.shm.mount_state import KeptMemory


@pytest.fixture
def memory():
    descriptor = KeptMemory.make(16 * MIB)
    yield KeptMemory(descriptor)
    os.close(descriptor)


class OneTable:
    """A table of handles without free records behind those in use."""

    def __init__(self, used=HANDLES_MAX):
        self.freed, self.place, self.used = [], 0, used

    def take(self):
        raise TooManyOpen("no record is free")


def test_handle_record_has_all_fields(memory):
    handle = memory.handle_records.keep(5, 1 << 60, 1 << 31 | 2, 3, 0xFFFFFFFF, 6, 7)
    assert handle == 5 << 20
    assert memory.handles.read(0) == (1 << 60, 1 << 31 | 2, 3, 0xFFFFFFFF, 6, 7, handle)
    assert memory.handle_records.keep(6, 1, 0, 0, 0, 0, 0) == 6 << 20 | 1
    memory.handle_records.drop(handle)
    assert [record[-1] for record in memory.handles.valid()] == [6 << 20 | 1]
    assert memory.handle_records.keep(7, 1, 0, 0, 0, 0, 0) == 7 << 20, "the record that became free is reused"


def test_slot_record_is_that_of_its_shard(memory):
    for _ in range(2):
        memory.add_shard()
    memory.slot_records.keep(1, 63, (1 << 64) - 1, 40, 9)
    memory.slot_records.keep(1, 0, 2, 41, 10)
    assert memory.slots(0) == [] and memory.slots(1) == [(0, 2, 41, 10), (63, (1 << 64) - 1, 40, 9)]
    memory.slot_records.clear(1, 63)
    assert memory.slots(1) == [(0, 2, 41, 10)]


def test_room_counts_freed_and_unused_records():
    table = OneTable(HANDLES_MAX - 2)
    records = HandleRecords(RecordMemory(bytearray(80)), table)
    assert records.has_room(1) and not records.has_room(2)
    table.freed.append(0)
    assert records.has_room(2) and not records.has_room(3)
    table.used = HANDLES_MAX
    assert records.keep(1, 1, 0, 0, 0, 0, 0) == 1 << 20
    with pytest.raises(TooManyOpen):
        records.keep(2, 1, 0, 0, 0, 0, 0)


def test_nothing_is_written_beyond_the_memory():
    content = bytearray(48)
    slots = SlotRecords(RecordMemory(content), 0, 48)
    slots.keep(0, 1, 1, 2, 3)
    assert content[24:] == struct.pack("<QQQ", 1, 2, 3)
    with pytest.raises(IndexError):
        slots.keep(0, 2, 1, 2, 3)
    with pytest.raises(IndexError):
        slots.clear(0, -1)
    assert not any(content[:24]) and len(content) == 48
    with pytest.raises((BufferError, TypeError)):
        SlotRecords(RecordMemory(bytes(24)), 0, 24).clear(0, 0)


class Pieces:
    """A table of pieces of writes."""

    def __init__(self, count=4):
        self.freed, self.place, self.used, self.count = [], 0, 0, count

    def take(self):
        self.used += 1
        return self.used - 1


def test_file_record_has_all_fields():
    content = bytearray(3 * FILE.size)
    files = FileRecords(RecordMemory(content), FILE.size)
    files.keep(1, 1 << 62, 5, 1 << 40, 28, 5, (1 << 63) - 1)
    assert FILE.unpack_from(content, 2 * FILE.size) == (1 << 62, 5, 1 << 40, 28, 5, (1 << 63) - 1)
    assert not any(content[: 2 * FILE.size])
    with pytest.raises(IndexError):
        files.keep(2, 1, 2, 3, 4, 5, 6)


def test_piece_of_a_write_has_its_bytes_and_all_fields():
    content, payloads, arena = bytearray(4 * WRITE.size), memoryview(bytearray(2 * MIB)), Arena(2 * MIB)
    writes = WriteRecords(RecordMemory(content), Pieces(), arena, payloads)
    index, kept = writes.keep(7, 1 << 40, memoryview(b"some bytes"), 99, False, 1 << 50)
    place = payloads.tobytes().index(b"some bytes")
    assert index == 0 and bytes(kept) == b"some bytes"
    assert WRITE.unpack_from(content) == (7, 1 << 40, place, 99, 10, 20, 1 << 50)
    kept[:4] = b"SOME"
    assert bytes(payloads[place : place + 10]) == b"SOME bytes", "they are the memory, not a copy"
    index, _ = writes.keep(8, 0, bytes(5000), 0, True, (1 << 50) + 1)
    assert WRITE.unpack_from(content, WRITE.size)[3:] == (0, 5000, 5000 << 1 | 1, (1 << 50) + 1)
    writes.shorten(index, 100)
    assert WRITE.unpack_from(content, WRITE.size)[4:6] == (100, 5000 << 1 | 1)
    assert arena.taken == 2
    writes.drop(index)
    assert WRITE.unpack_from(content, WRITE.size)[-1] == 0 and arena.taken == 1


def test_number_of_a_request_is_stored_after_the_mark():
    """A piece without its mark counts as stored: then the request must not count as taken."""
    content = bytearray(WRITE.size - 1)  # the mark has no room, as if the process was killed before it
    writes = WriteRecords(RecordMemory(content), Pieces(), Arena(2 * MIB), memoryview(bytearray(2 * MIB)))
    with pytest.raises(IndexError):
        writes.keep(7, 0, bytes(10), 99, True, 1)
    assert content[:8] == (7).to_bytes(8, "little") and content[24:32] == bytes(8)


def test_room_for_writes_counts_records_and_memory():
    table = Pieces(4)
    writes = WriteRecords(
        RecordMemory(bytearray(4 * WRITE.size)), table, Arena(4 * MIB), memoryview(bytearray(4 * MIB))
    )
    assert writes.has_room(1) and writes.has_room(65535) and not writes.has_room(2 << 16)
    table.used = 2
    assert not writes.has_room(1)
    table.freed.append(0)
    assert writes.has_room(1)
    assert not WriteRecords(
        RecordMemory(bytearray(64)), Pieces(400), Arena(4 * MIB), memoryview(b"")
    ).has_room(3 * MIB)


def test_piece_beyond_a_mebibyte_is_refused():
    payloads = memoryview(bytearray(4 * MIB))
    writes = WriteRecords(RecordMemory(bytearray(96)), Pieces(), Arena(4 * MIB), payloads)
    with pytest.raises(IndexError):
        writes.keep(7, 0, bytes(MIB + 1), 0, True, 1)
    assert not any(payloads[: MIB + 64])
