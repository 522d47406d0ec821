"""Appends and pages: readers see a record late or whole, changed flags of an open file apply, and no page has wrong bytes."""

import ctypes
import fcntl
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fuse.conftest import FLOOR, wait_until

pytestmark = pytest.mark.mount
ENGINES = ("kernel", "pyfuse3")
LIMIT_S = 120.0


def record(number):
    return b"record %07d\n" % number * 10


RECORDS = 150
LOG = b"".join(map(record, range(RECORDS)))


@pytest.fixture
def there(here, second, mounted):
    """The same directory through a mount of another process."""
    place = second.place / here.relative_to(mounted.place)
    wait_until(place.exists, "the directory at the other mount", LIMIT_S)
    return place


def append_reopened(path):
    for number in range(RECORDS):
        with open(path, "ab") as file:
            file.write(record(number))
        time.sleep(0.002)


def append_open(path):
    with open(path, "ab", buffering=0) as file:
        for number in range(RECORDS):
            file.write(record(number))
            time.sleep(0.002)


def read_reopened(path, offset):
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(997)


def follow(path, read):
    """Read the whole log as it grows; each piece must be as written."""
    offset, end_s = 0, time.monotonic() + LIMIT_S
    while offset < len(LOG):
        data = read(path, offset)
        assert data == LOG[offset : offset + len(data)], f"at {offset}: {data.count(0)} NUL bytes"
        offset += len(data)
        assert time.monotonic() < end_s, f"{offset} of {len(LOG)} bytes were seen"


@pytest.mark.few(4)
@pytest.mark.parametrize("append", [append_reopened, append_open])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_reader_of_a_log_sees_no_zeros(here, there, append, kept, elsewhere):
    (here / "log").touch()
    fd = os.open((there if elsewhere else here) / "log", os.O_RDONLY)
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(append, here / "log")
        follow(
            (there if elsewhere else here) / "log",
            (lambda _, at: os.pread(fd, 997, at)) if kept else read_reopened,
        )
        writing.result()
    os.close(fd)
    assert (there / "log").read_bytes() == (here / "log").read_bytes() == LOG


def test_two_mounts_append_whole_records(here, there):
    def append(place, mark):
        with open(place / "log", "ab", buffering=0) as file:
            for number in range(60):
                file.write(b"%c %04d\n" % (mark, number))

    (here / "log").touch()
    with ThreadPoolExecutor(2) as writers:
        writing = [writers.submit(append, place, mark) for place, mark in ((here, b"a"), (there, b"b"))]
        while not all(one.done() for one in writing):
            assert b"\0" not in (here / "log").read_bytes() + (there / "log").read_bytes()
        for one in writing:
            one.result()
    lines = (here / "log").read_bytes().splitlines()
    for mark in (b"a", b"b"):
        assert [line for line in lines if line.startswith(mark)] == [
            b"%c %04d" % (mark, number) for number in range(60)
        ]


def set_append(fd, wanted):
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_APPEND
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_APPEND if wanted else flags)


def test_cleared_append_flag_writes_in_place(here, engine):
    if engine == "pyfuse3":
        pytest.skip("pyfuse3 does not get the flags of a write")
    fd, reader = os.open(here / "f", os.O_CREAT | os.O_RDWR | os.O_APPEND), os.open(here / "f", os.O_RDONLY)
    os.write(fd, b"0123456789")
    assert os.pread(reader, 20, 0) == b"0123456789"
    set_append(fd, False)
    os.pwrite(fd, b"AB", 2)
    os.lseek(fd, 6, os.SEEK_SET)
    os.write(fd, b"CD")
    assert os.pread(reader, 20, 0) == b"01AB45CD89"
    set_append(fd, True)
    os.write(fd, b"end")
    os.close(fd)
    os.close(reader)
    assert (here / "f").read_bytes() == b"01AB45CD89end"


def test_set_append_flag_appends_at_the_end_of_all_writers(here, there, engine):
    if engine == "pyfuse3":
        pytest.skip("pyfuse3 does not get the flags of a write")
    fd = os.open(here / "f", os.O_CREAT | os.O_RDWR)
    os.write(fd, b"0123456789")
    os.fsync(fd)
    with open(there / "f", "ab") as other:
        other.write(b"other")
    set_append(fd, True)
    os.write(fd, b"this")
    os.fsync(fd)
    assert (there / "f").read_bytes() == b"0123456789otherthis"
    wait_until(lambda: os.pread(fd, 100, 0) == b"0123456789otherthis", "pages with all records", LIMIT_S)
    os.close(fd)


@pytest.mark.parametrize("grow", ["ftruncate", "truncate", "write behind", "write in the page", "fallocate"])
def test_bytes_mapped_behind_the_end_are_not_stored(here, there, engine, grow):
    if engine == "pyfuse3" and grow == "fallocate":
        pytest.skip("posix_fallocate writes zeros there")
    path = here / "f"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(fd, b"z" * 5000)
    with mmap.mmap(fd, 5000) as area:
        view = ctypes.c_char.from_buffer(area)
        ctypes.memset(ctypes.addressof(view) + 5000, 0x55, 100)
        {
            "ftruncate": lambda: os.ftruncate(fd, 8192),
            "truncate": lambda: os.truncate(path, 5100),
            "write behind": lambda: os.pwrite(fd, b"E", 20_000),
            "write in the page": lambda: os.pwrite(fd, b"E", 5100),
            "fallocate": lambda: os.posix_fallocate(fd, 0, 30_000),
        }[grow]()
        assert os.pread(fd, 100, 5000) == bytes(100)
        os.fsync(fd)
        del view
    assert os.pread(fd, 5000, 0) == b"z" * 5000
    os.close(fd)
    assert (there / "f").read_bytes()[:5100] == b"z" * 5000 + bytes(100)


@pytest.mark.parametrize("mapped", [False, True], ids=["written", "mapped"])
def test_bytes_written_into_a_gap_stay(here, there, mapped):
    """A write behind the end, in the last page, leaves a gap of zeros. Later bytes there are not cleared with the gap."""
    for number in range(30):
        fd = os.open(here / f"{number}", os.O_CREAT | os.O_RDWR)
        os.write(fd, b"z" * 5000)
        with mmap.mmap(fd, 5000) as area:
            view = ctypes.c_char.from_buffer(area)
            ctypes.memset(ctypes.addressof(view) + 4999, ord("y"), 1)  # the page is read and complete
            os.pwrite(fd, b"E", 5100)
            if mapped:
                ctypes.memset(ctypes.addressof(view) + 5000, ord("x"), 100)
            else:
                os.pwrite(fd, b"x" * 100, 5000)
            del view
            time.sleep(0.01)
            assert os.pread(fd, 102, 4999) == b"y" + b"x" * 100 + b"E"
            os.fsync(fd)
        os.close(fd)
        assert (there / f"{number}").read_bytes() == b"z" * 4999 + b"y" + b"x" * 100 + b"E"


class Block(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("rest", ctypes.c_uint64 * 2),
    )


class Event(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("more", ctypes.c_int64),
    )


class AsyncWriter:
    """One write at a time by io_submit(2)."""

    SETUP, GETEVENTS, SUBMIT = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}[os.uname().machine]

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.syscall.restype = ctypes.c_long
        self.context = ctypes.c_ulong(0)
        assert not self.libc.syscall(self.SETUP, ctypes.c_long(4), ctypes.byref(self.context))

    def write(self, fd, memory):
        block = Block(
            opcode=1, fd=fd, buffer=ctypes.addressof(ctypes.c_char.from_buffer(memory)), length=len(memory)
        )
        blocks, event = (ctypes.c_void_p * 1)(ctypes.addressof(block)), Event()
        assert self.libc.syscall(self.SUBMIT, self.context, ctypes.c_long(1), blocks) == 1
        assert (
            self.libc.syscall(
                self.GETEVENTS, self.context, ctypes.c_long(1), ctypes.c_long(1), ctypes.byref(event), None
            )
            == 1
        )
        assert event.result == len(memory)


@pytest.mark.skipif(FLOOR, reason="for the pool's engines")
def test_pages_show_a_finished_asynchronous_direct_write(here):
    size = 160 * 4096
    cached, direct = os.open(here / "f", os.O_CREAT | os.O_RDWR), os.open(here / "f", os.O_RDWR | os.O_DIRECT)
    os.write(cached, b"\1" * size)
    stop, writer, memory = threading.Event(), AsyncWriter(), mmap.mmap(-1, size)

    def read_on():
        fd, buffer = os.open(here / "f", os.O_RDONLY), bytearray(size)
        while not stop.is_set():
            os.preadv(fd, [buffer], 0)
        os.close(fd)

    with ThreadPoolExecutor(2) as readers:
        reading = [readers.submit(read_on) for _ in range(2)]
        try:
            for number in range(60):
                content = bytes([number % 250 + 2]) * size
                memory[:] = content
                writer.write(direct, memory)
                assert os.pread(cached, size, 0) == content, f"old bytes behind write {number}"
        finally:
            stop.set()
        for one in reading:
            one.result()
    os.close(cached)
    os.close(direct)
