"""Records of slots and handles: layout, order of the stores, bounds."""

import os
import struct

import pytest

from nvpool.core.errors import TooManyOpen
from nvpool.core.primitives import RecordMemory
from nvpool.core.units import MIB
from nvpool.shm.mount_records import HANDLES_MAX, HandleRecords, SlotRecords
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
