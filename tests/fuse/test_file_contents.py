"""Bytes through the mount: sparse and large files, appends, truncation, mappings, unlinked files, direct I/O, concurrency."""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.mount
ENGINES = ("kernel", "pyfuse3")
PAGE = 4096
MIB = 1 << 20


@contextlib.contextmanager
def opened(path, flags, mode=0o644):
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def aligned(size):
    return mmap.mmap(-1, size)


def test_written_bytes_are_read(here):
    content = os.urandom(3 * MIB + 777)
    (here / "f").write_bytes(content)
    assert (here / "f").read_bytes() == content
    with opened(here / "f", os.O_RDONLY | os.O_DIRECT) as fd:
        page = aligned(4 * MIB)
        assert os.preadv(fd, [page], 0) == len(content) and page[: len(content)] == content


def test_random_writes_agree_with_a_local_file(here, tmp_path):
    chance = random.Random(7)
    size = 3 * MIB
    with open(tmp_path / "local", "w+b") as local, opened(here / "f", os.O_CREAT | os.O_RDWR) as fd:
        for _ in range(300):
            place, length = chance.randrange(size), chance.choice((1, 100, PAGE, PAGE + 1, 70_000))
            match chance.randrange(6):
                case 0:
                    local.truncate(place)
                    os.ftruncate(fd, place)
                case 1 | 2:
                    assert os.pread(fd, length, place) == os.pread(local.fileno(), length, place)
                case _:
                    content = chance.randbytes(length)
                    os.pwrite(local.fileno(), content, place)
                    os.pwrite(fd, content, place)
        expected = os.pread(local.fileno(), 2 * size, 0)
    assert (here / "f").stat().st_size == len(expected)
    assert (here / "f").read_bytes() == expected


def test_file_beyond_four_gigabytes_is_sparse(here):
    far = (5 << 30) + 123
    with opened(here / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.pwrite(fd, b"start", 0)
        os.pwrite(fd, b"end", far)
        os.fsync(fd)
        assert os.fstat(fd).st_size == far + 3
        assert os.pread(fd, 10, far) == b"end"
        assert os.pread(fd, 100, 3 << 30) == bytes(100)
        assert os.pread(fd, 8, 0) == b"start\0\0\0"
        assert os.lseek(fd, 0, os.SEEK_END) == far + 3
        os.ftruncate(fd, 6 << 40)
        assert os.fstat(fd).st_size == 6 << 40
        os.ftruncate(fd, 2)
        assert os.pread(fd, 10, 0) == b"st"


def test_truncated_part_reads_as_zeros_after_growth(here):
    for kept in (0, 1, PAGE - 1, PAGE, PAGE + 1, MIB - 5, MIB + 5):
        file = here / f"f{kept}"
        file.write_bytes(b"x" * (2 * MIB))
        os.truncate(file, kept)
        os.truncate(file, 2 * MIB)
        assert file.read_bytes() == b"x" * kept + bytes(2 * MIB - kept)


def test_open_with_truncation_empties_the_file(here):
    (here / "f").write_bytes(b"long content")
    with opened(here / "f", os.O_RDONLY) as reader, opened(here / "f", os.O_WRONLY | os.O_TRUNC) as fd:
        assert os.fstat(fd).st_size == 0
        assert os.read(reader, 10) == b""
        os.write(fd, b"new")
        assert os.pread(reader, 10, 0) == b"new"


def test_reads_stop_at_the_end_of_the_file(here):
    (here / "f").write_bytes(b"12345")
    with opened(here / "f", os.O_RDWR) as fd:
        assert (
            os.pread(fd, 100, 3) == b"45"
            and os.pread(fd, 100, 5) == b""
            and os.pread(fd, 100, 1 << 40) == b""
        )
        with pytest.raises(OSError) as refused:
            os.pwrite(fd, b"x", (1 << 62))
        assert refused.value.errno == errno.EFBIG


def test_descriptor_allows_its_access_mode_only(here):
    (here / "f").write_bytes(b"x")
    with opened(here / "f", os.O_WRONLY) as fd, pytest.raises(OSError):
        os.read(fd, 1)
    with opened(here / "f", os.O_RDONLY) as fd, pytest.raises(OSError):
        os.write(fd, b"x")


def test_appends_ignore_the_position_of_the_descriptor(here):
    with (
        opened(here / "f", os.O_CREAT | os.O_RDWR | os.O_APPEND) as a,
        opened(here / "f", os.O_WRONLY | os.O_APPEND) as b,
    ):
        for number in range(50):
            os.write((a, b)[number % 2], b"%03d\n" % number)
        os.lseek(a, 0, os.SEEK_SET)
        os.write(a, b"end\n")
        assert os.pread(a, 1 << 20, 0) == b"".join(b"%03d\n" % number for number in range(50)) + b"end\n"
    assert (here / "f").read_bytes().endswith(b"049\nend\n")


def test_appends_of_many_processes_are_complete(here):
    def append(who):
        for number in range(40):
            with open(here / "log", "a") as file:
                file.write(f"{who} {number} {'x' * 200}\n")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(append, range(6)))
    lines = (here / "log").read_text().splitlines()
    assert sorted(lines) == sorted(f"{who} {number} {'x' * 200}" for who in range(6) for number in range(40))


def test_unlinked_file_lives_while_it_is_open(here):
    with opened(here / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, b"a" * 100_000)
        os.unlink(here / "f")
        os.pwrite(fd, b"still", 100_000)
        os.ftruncate(fd, 100_003)
        os.fsync(fd)
        os.fchmod(fd, 0o600)
        assert os.fstat(fd).st_nlink == 0 and os.fstat(fd).st_size == 100_003
        assert os.pread(fd, 10, 99_998) == b"aasti"
        (here / "f").write_bytes(b"another")
        assert os.pread(fd, 1, 0) == b"a"


def test_replaced_file_lives_while_it_is_open(here):
    (here / "f").write_bytes(b"old")
    with opened(here / "f", os.O_RDWR) as fd:
        (here / "g").write_bytes(b"new")
        os.rename(here / "g", here / "f")
        os.pwrite(fd, b"OLD", 0)
        assert os.pread(fd, 10, 0) == b"OLD" and (here / "f").read_bytes() == b"new"


def test_shared_mappings_write_through(here):
    size = 2 * MIB
    with opened(here / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as view:
            view[:5] = b"first"
            view[size - 4 :] = b"last"
            view.flush()
            assert os.pread(fd, 5, 0) == b"first"
            os.pwrite(fd, b"written", 100)
            assert view[100:107] == b"written"
            view[MIB] = 77
    content = (here / "f").read_bytes()
    assert (content[:5], content[-4:], content[MIB], content[100:107]) == (b"first", b"last", 77, b"written")


def test_mapping_may_outlive_its_descriptor(here):
    fd = os.open(here / "f", os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, PAGE)
    view = mmap.mmap(fd, PAGE)
    os.close(fd)
    view[:5] = b"later"
    view.close()
    assert (here / "f").read_bytes()[:5] == b"later"


def test_private_mappings_change_nothing(here):
    (here / "f").write_bytes(b"x" * PAGE)
    both = mmap.PROT_READ | mmap.PROT_WRITE
    with (
        opened(here / "f", os.O_RDONLY) as fd,
        mmap.mmap(fd, PAGE, flags=mmap.MAP_PRIVATE, prot=both) as view,
    ):
        view[:3] = b"abc"
    assert (here / "f").read_bytes() == b"x" * PAGE


def test_direct_and_cached_access_are_coherent(here):
    with (
        opened(here / "f", os.O_CREAT | os.O_RDWR) as cached,
        opened(here / "f", os.O_RDWR | os.O_DIRECT) as direct,
    ):
        os.write(cached, b"c" * 4 * PAGE)
        page = aligned(PAGE)
        assert os.preadv(direct, [page], PAGE) == PAGE and page[:] == b"c" * PAGE
        page[:] = b"d" * PAGE
        os.pwritev(direct, [page], 2 * PAGE)
        assert os.pread(cached, 4 * PAGE, 0) == b"c" * 2 * PAGE + b"d" * PAGE + b"c" * PAGE


def test_locks_exclude_processes_of_this_node(here):
    with open(here / "f", "w") as a, open(here / "f", "w") as b:
        fcntl.flock(a, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(b, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(a, fcntl.LOCK_UN)
        fcntl.flock(b, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_writes_to_different_ranges_are_independent(here):
    part = 600_000

    def write(number):
        with opened(here / "f", os.O_CREAT | os.O_WRONLY) as fd:
            content = bytes([number]) * part
            for at in range(0, part, 50_000):
                os.pwrite(fd, content[at : at + 50_000], number * part + at)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    content = (here / "f").read_bytes()
    assert content == b"".join(bytes([number]) * part for number in range(8))


def test_overwritten_block_is_never_a_mixture(here):
    """A write of one block is visible completely or not at all."""
    stop = threading.Event()
    with opened(here / "f", os.O_CREAT | os.O_RDWR | os.O_DIRECT) as fd:
        page = aligned(PAGE)
        page[:] = bytes([1]) * PAGE
        os.pwritev(fd, [page], 0)
        os.fsync(fd)

        def write():
            mine = aligned(PAGE)
            number = 0
            while not stop.is_set():
                number += 1
                mine[:] = bytes([number % 250 + 1]) * PAGE
                os.pwritev(fd, [mine], 0)

        def read():
            mine = aligned(PAGE)
            mixed = 0
            while not stop.is_set():
                os.preadv(fd, [mine], 0)
                mixed += len(set(mine[:])) != 1
            return mixed

        with ThreadPoolExecutor(4) as pool:
            pool.submit(write)
            readers = [pool.submit(read) for _ in range(2)]
            time.sleep(0.7)
            stop.set()
            assert [reader.result() for reader in readers] == [0, 0]


def test_many_small_files_are_written_and_read_concurrently(here):
    def work(who):
        for number in range(60):
            content = f"{who} {number} ".encode() * (number + 1)
            file = here / f"{who}-{number}"
            file.write_bytes(content)
            assert file.read_bytes() == content
            if number % 3 == 0:
                os.rename(file, here / f"{who}-{number}.moved")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(os.listdir(here)) == 480
    for who in range(8):
        assert (here / f"{who}-59").read_bytes() == f"{who} 59 ".encode() * 60


def test_written_size_is_listed_before_close(here):
    with opened(here / "f", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"x" * 12_345)
        assert [entry.stat().st_size for entry in os.scandir(here)] == [12_345]
        os.listdir(here)
        assert os.fstat(fd).st_size == 12_345
        os.write(fd, b"y")
        [entry.stat() for entry in os.scandir(here)]
        assert os.stat(here / "f").st_size == 12_346 and os.fstat(fd).st_size == 12_346


def test_large_copy_is_identical(here):
    content = random.Random(1).randbytes(24 * MIB)
    with open(here / "f", "wb", buffering=0) as file:
        for at in range(0, len(content), 300_001):
            file.write(content[at : at + 300_001])
    digest = hashlib.blake2b()
    with open(here / "f", "rb", buffering=0) as file:
        while part := file.read(123_457):
            digest.update(part)
    assert digest.digest() == hashlib.blake2b(content).digest()
