"""Log of requests that outlive the process that read them: contents after a crash between any two writes, and refusal of
invalid memory."""

import mmap
import os
import random
import struct

import pytest

from nvpool.core.errors import CorruptRecord, WrongFormat
from nvpool.shm import request_log
from nvpool.shm.request_log import MAGIC, PAGE, SMALL_COUNT, Unanswered

LARGE = 1 << 20
MASK = (1 << 63) - 1


def request(unique, length=60, fill=b"r"):
    return struct.pack("=IIQ", length, 1, unique) + fill * (length - 16)


@pytest.fixture
def descriptor():
    made = Unanswered.make(LARGE)
    yield made
    os.close(made)


def read(kept, unique, length=60, fill=b"r"):
    """The request in the buffer, as the kernel puts it there."""
    kept.buffer[:length] = request(unique, length, fill)
    return kept.buffer[:length]


def test_pending_requests_are_found_in_order(descriptor):
    kept = Unanswered(descriptor)
    for unique in (8, 2, 6, 4):
        kept.keep(unique, read(kept, unique, 60 + unique))
    kept.forget(6)
    kept.forget(12)
    read(kept, 10, 70)
    for _ in range(2):
        after = Unanswered(descriptor)
        expected = ((2, 62), (4, 64), (8, 68), (10, 70))
        assert after.left(MASK) == [(unique, request(unique, length)) for unique, length in expected]
        assert after.count == 4
    assert os.pread(descriptor, 8, 0) == MAGIC and not os.get_inheritable(descriptor)


def test_last_request_read_is_kept_once(descriptor):
    kept = Unanswered(descriptor)
    assert kept.left(MASK) == []
    kept.keep(4, read(kept, 4))
    kept.keep(4, read(kept, 4, fill=b"s"))  # the same number: the first request stays
    assert Unanswered(descriptor).left(MASK) == [(4, request(4))]
    kept.put(request(4 | 1 << 63))  # the kernel repeated the request
    assert Unanswered(descriptor).left(MASK) == [(4, request(4))]


def test_long_requests_use_own_slots_that_are_reused(descriptor):
    kept = Unanswered(descriptor)
    large = kept.request_bytes
    count = 0
    while kept.has_room:
        count += 1
        kept.keep(2 * count, read(kept, 2 * count, large if count < 4 else PAGE + 1, bytes([count & 255])))
    assert count == 256
    kept.keep(10_000, read(kept, 10_000, PAGE))
    found = dict(Unanswered(descriptor).left(MASK))
    assert (
        found[2] == request(2, large, b"\1")
        and found[512] == request(512, PAGE + 1, b"\0")
        and len(found) == 257
    )
    kept.forget(2)
    assert kept.has_room
    kept.keep(4_000, read(kept, 4_000, large, b"z"))
    assert not kept.has_room and dict(Unanswered(descriptor).left(MASK))[4_000] == request(4_000, large, b"z")


def test_short_requests_fill_all_slots(descriptor):
    kept = Unanswered(descriptor)
    for number in range(SMALL_COUNT):
        assert kept.has_room
        kept.keep(2 + 2 * number, read(kept, 2 + 2 * number))
    assert not kept.has_room
    kept.forget(2)
    assert kept.has_room and Unanswered(descriptor).has_room


def test_kill_between_any_two_writes_loses_no_request(descriptor, monkeypatch):
    """A partly written record is ignored, and pending requests are found."""
    kept = Unanswered(descriptor)
    kept.keep(4, read(kept, 4, 100, b"a"))
    new = request(6, 90, b"b")
    for done in range(3):  # for each of put's three writes
        kept.buffer[:100] = request(4, 100, b"a")
        kept.buffer[:8] = bytes(8) if done else kept.buffer[:8]
        if done > 1:
            kept.buffer[4:90] = new[4:]
        assert Unanswered(descriptor).left(MASK) == [(4, request(4, 100, b"a"))]
    # bytes of a slot without its mark
    whole = mmap.mmap(descriptor, 0)
    place = kept.place_of(SMALL_COUNT - 1)
    whole[place : place + 60] = request(8)
    assert Unanswered(descriptor).left(MASK) == [(4, request(4, 100, b"a"))]


def test_invalid_memory_is_refused(descriptor, monkeypatch):
    kept = Unanswered(descriptor)
    kept.keep(4, read(kept, 4))
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, PAGE)
    monkeypatch.setattr(request_log, "VERSION", 2)
    with pytest.raises(WrongFormat, match="unmount, and mount again"):
        Unanswered(descriptor)
    monkeypatch.undo()
    head = os.pread(descriptor, 32, 0)
    for at, wrong in ((0, b"nonsense"), (16, b"\1"), (24, b"\0" * 8), (25, b"\1")):
        os.pwrite(descriptor, wrong, at)
        with pytest.raises((WrongFormat, CorruptRecord)):
            Unanswered(descriptor)
        os.pwrite(descriptor, head, 0)
    small = os.memfd_create("small")
    with pytest.raises(CorruptRecord):
        Unanswered(small)
    os.close(small)


def test_invalid_marks_are_refused(descriptor):
    kept = Unanswered(descriptor)
    kept.keep(4, read(kept, 4))
    os.pwrite(descriptor, struct.pack("<Q", 6), PAGE + 8)  # of an empty slot
    with pytest.raises(CorruptRecord):
        Unanswered(descriptor)
    chance = random.Random(1)
    for _ in range(30):
        os.pwrite(descriptor, chance.randbytes(16), PAGE + 16 * chance.randrange(100))
        with pytest.raises(CorruptRecord):
            Unanswered(descriptor)
