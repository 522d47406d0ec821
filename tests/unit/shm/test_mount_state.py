"""Mount state in shared memory: format, incomplete and invalid records, and the allocator for payloads."""

import os
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.client.write.crash_journal import CrashJournal
from nvpool.core.errors import CorruptRecord, NoSpace, NvpoolError, TooManyOpen, WrongFormat
from nvpool.shm import mount_state
from nvpool.shm.arena import Arena
from nvpool.shm.mount_state import KeptMemory, Word

MIB = 1 << 20


@pytest.fixture
def descriptor():
    made = KeptMemory.make(16 * MIB)
    yield made
    os.close(made)


def test_layout_matches_the_format(descriptor):
    """A change here is a change of format: raise VERSION, or running mounts cannot be upgraded."""
    memory = KeptMemory(descriptor)
    memory.set_word(Word.INIT_FLAGS, 0x0102030405060708)
    memory.device = "0:45"
    number = memory.add_shard()
    memory.keep_session(number, 7, 0x1122, b"secret")
    memory.slot_records.keep(number, 2, 5, 33, 0x99)
    memory.handles.put(memory.handles.take(), 10, 2, 3, 4, 5, 6, 1 << 20)
    memory.locks.put(memory.locks.take(), 1, 2, 3, 1)
    memory.file_records.keep(memory.files.take(), 1, 2, 3, 4, 0, 10)
    memory.write_records.keep(10, 4096, b"payload", 0x77, True, 1)

    def at(place, count):
        return os.pread(descriptor, count, place)

    assert at(0, 32) == b"nvpkept\n" + struct.pack("<IIQQ", 1, 0, os.fstat(descriptor).st_size, 16 * MIB)
    assert at(64 + 16, 8) == bytes((8, 7, 6, 5, 4, 3, 2, 1)) and at(1024, 5) == b"\x040:45"
    shards, handles, locks, files, writes, arena = mount_state.places_for(16 * MIB)
    assert (shards, handles) == (4096, 4096 + (2 << 20))
    assert at(shards, 76) == struct.pack("<IB63sQ", 7, 6, b"secret", 0x1122)
    assert at(shards + 76 + 2 * 24, 24) == struct.pack("<QQQ", 5, 33, 0x99)
    assert at(handles, 40) == struct.pack("<QIIIIQQ", 10, 2, 3, 4, 5, 6, 1 << 20)
    assert at(locks, 32) == struct.pack("<QQQQ", 1, 2, 3, 1)
    assert at(files, 40) == struct.pack("<QQQIIQ", 1, 2, 3, 4, 0, 10)
    assert at(writes, 48) == struct.pack("<QQQQIIQ", 10, 4096, 15 * MIB * 0, 0x77, 7, 15, 1)
    assert at(arena, 7) == b"payload"


def test_successor_finds_valid_records_only(descriptor):
    memory = KeptMemory(descriptor)
    number = memory.add_shard()
    memory.keep_session(number, 1, 5, b"s")
    memory.slot_records.keep(number, 3, 9, 40, 1234)
    memory.slot_records.keep(number, 4, 9, 40, 1235)
    memory.slot_records.clear(number, 4)
    index, _ = memory.write_records.keep(10, 0, bytes(range(200)), 1, True, 1)
    gone, _ = memory.write_records.keep(10, 300, b"stored", 2, True, 2)
    memory.write_records.drop(gone)
    memory.write_records.shorten(index, 50)
    half = memory.writes.take()
    memory.writes.put(half, 10, 500, 0, 3, 10, 21, 0)  # killed before the mark was set

    after = KeptMemory(descriptor)
    assert after.shards() == {1: (0, 5, b"s")} and after.slots(0) == [(3, 9, 40, 1234)]
    ((found, inode, offset, place, unique, length, taken, mark),) = after.writes.valid()
    assert (found, inode, offset, unique, length, taken, mark) == (index, 10, 0, 1, 50, 401, 1)
    assert after.payloads[place : place + length] == bytes(range(50))
    assert [record[4] for record in after.writes.all()] == [1, 2, 3], (
        "a recently stored write is known by its request number"
    )
    other, _ = after.write_records.keep(11, 0, b"x" * 200, 4, True, 3)
    assert after.payloads[place : place + length] == bytes(range(50)) and other not in (index,)


def test_write_without_its_mark_is_not_finished(descriptor):
    """The process is killed there: its bytes are lost, and the kernel sends the request again."""
    memory = KeptMemory(descriptor)
    index = memory.writes.take()
    memory.writes.put(index, 10, 0, 0, 0, 200, 401, 0)
    assert CrashJournal(KeptMemory(descriptor)).finished() == {}
    KeptMemory(descriptor).write_records.keep(10, 0, bytes(200), 99, True, 1)
    assert CrashJournal(KeptMemory(descriptor)).finished() == {99: 200}


def test_memory_cannot_be_truncated_and_other_version_fails(descriptor):
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 4096)
    os.pwrite(descriptor, struct.pack("<I", mount_state.VERSION + 1), 8)
    with pytest.raises(WrongFormat, match="unmount"):
        KeptMemory(descriptor)
    os.pwrite(descriptor, b"something", 0)
    with pytest.raises(WrongFormat):
        KeptMemory(descriptor)


def test_invalid_bytes_raise_only_nvpool_errors(descriptor):
    memory = KeptMemory(descriptor)
    memory.keep_session(memory.add_shard(), 1, 5, b"s")
    for number in range(20):
        memory.write_records.keep(10, number << 12, bytes(4096), number, True, number + 1)
        memory.handles.put(memory.handles.take(), 10, 0, 0, 0, 0, 0, number + 1)
    whole = os.pread(descriptor, 8192, 0)
    shards, handles, _, _, writes, _ = mount_state.places_for(16 * MIB)
    places = [
        *range(128),
        *range(shards, shards + 100),
        *range(handles, handles + 800),
        *range(writes, writes + 960),
    ]
    chance = random.Random(3)
    refused = 0
    for _ in range(300):
        place = chance.choice(places)
        before = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes((chance.randrange(256),)), place)
        try:
            found = KeptMemory(descriptor)
            found.shards(), found.writes.valid(), found.handles.valid()
        except NvpoolError:
            refused += 1
        os.pwrite(descriptor, before, place)
    assert refused > 10 and os.pread(descriptor, 8192, 0) == whole


def test_full_table_raises_too_many_open(descriptor, monkeypatch):
    memory = KeptMemory(descriptor)
    table = mount_state.Table(
        memory.mapping, mount_state.places_for(16 * MIB)[2], mount_state.LOCK, 3, Word.LOCKS
    )
    taken = [table.take() for _ in range(3)]
    assert taken == [0, 1, 2] and not table.free
    with pytest.raises(TooManyOpen):
        table.take()
    table.give_back(1)
    assert table.take() == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, MIB)), max_size=80), st.randoms(use_true_random=False)
)
def test_allocations_never_overlap_and_are_restored(steps, chance):
    arena = Arena(8 * MIB)
    held: dict[int, int] = {}
    for takes, length in steps:
        if takes or not held:
            try:
                place = arena.take(length)
            except NoSpace:
                continue
            assert all(place + length <= other or other + count <= place for other, count in held.items())
            assert 0 <= place <= 8 * MIB - length
            held[place] = length
        else:
            place = chance.choice(sorted(held))
            del held[place]
            arena.give_back(place)
    again = Arena(8 * MIB, held.items())
    for place in list(held):
        again.give_back(place)
    assert again.has_room(6 * MIB)


def test_invalid_allocations_are_refused():
    for held in (
        [(8 * MIB, 1)],
        [(1, 64)],
        [(0, 0)],
        [(0, MIB + 1)],
        [(0, 64), (0, 64)],
        [(0, 64), (128, 128)],
    ):
        with pytest.raises(CorruptRecord):
            Arena(8 * MIB, held)
