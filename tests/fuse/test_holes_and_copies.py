"""Holes, extents and copies through the mount: fallocate(2), lseek(2), copy_file_range(2), and programs that use them.

On the direct engine: libfuse's Python binding passes none of these on.
"""

import ctypes
import errno
import hashlib
import json
import mmap
import os
import random
import re
import subprocess
import sys

import pytest

from tests.fuse.conftest import FLOOR, as_user, needs, wait_until

pytestmark = pytest.mark.mount
ENGINES = ("kernel",)
MIB = 1 << 20
BLOCK = 4096
KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE, INSERT_RANGE, UNSHARE_RANGE = 1, 2, 8, 16, 32, 64
HOLE = PUNCH_HOLE | KEEP_SIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def fallocate(fd, mode, offset, length):
    if libc.fallocate(fd, mode, offset, length):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def refused(call, *arguments):
    with pytest.raises(OSError) as error:
        call(*arguments)
    return error.value.errno


def extents(fd):
    """(begin, end) of the data extents."""
    found, place = [], 0
    while True:
        try:
            place = os.lseek(fd, place, os.SEEK_DATA)
        except OSError as error:
            assert error.errno == errno.ENXIO
            return found
        end = os.lseek(fd, place, os.SEEK_HOLE)
        found.append((place, end))
        place = end


def copy_all(source, target, count, offset=0, to=0):
    done = 0
    while done < count:
        copied = os.copy_file_range(source, target, count - done, offset + done, to + done)
        if not copied:
            break
        done += copied
    return done


def run(*words, **options):
    return subprocess.run(
        [str(word) for word in words], check=True, capture_output=True, text=True, timeout=240, **options
    )


def du(path):
    return os.stat(path).st_blocks * 512


def test_holes_and_sizes_agree_with_a_local_file(here, tmp_path):
    chance = random.Random(3)
    size = 3 * MIB
    modes = (0, KEEP_SIZE, HOLE, HOLE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE)
    with open(tmp_path / "local", "w+b", buffering=0) as local, open(here / "f", "w+b", buffering=0) as file:
        both = local.fileno(), file.fileno()
        for _ in range(400):
            place, length = (
                chance.choice((chance.randrange(size), chance.randrange(768) * BLOCK)),
                chance.choice((1, 100, BLOCK, BLOCK + 1, 70_000, 300_000)),
            )
            what = chance.choice(("write", "write", "fallocate", "fallocate", "copy", "truncate", "read"))
            content, mode, to = chance.randbytes(length), chance.choice(modes), chance.randrange(size)
            for fd in both:
                if what == "write":
                    assert os.pwrite(fd, content, place) == length
                elif what == "fallocate":
                    fallocate(fd, mode, place, length)
                elif what == "copy" and abs(place - to) >= length:
                    copy_all(fd, fd, length, place, to)
                elif what == "truncate" and length == 1:
                    os.ftruncate(fd, place)
            if what == "read":
                assert os.pread(both[0], length, place) == os.pread(both[1], length, place)
            assert os.fstat(both[0]).st_size == os.fstat(both[1]).st_size
        assert os.pread(both[0], 2 * size, 0) == os.pread(both[1], 2 * size, 0)
    assert (here / "f").read_bytes() == (tmp_path / "local").read_bytes()


def test_unsupported_modes_are_refused(here):
    with open(here / "f", "w+b") as file:
        file.write(bytes(64 * 1024))
        file.flush()
        for mode in (PUNCH_HOLE, COLLAPSE_RANGE, INSERT_RANGE, UNSHARE_RANGE, ZERO_RANGE | PUNCH_HOLE):
            assert refused(fallocate, file.fileno(), mode, 0, BLOCK) == errno.EOPNOTSUPP
        assert refused(fallocate, file.fileno(), 0, 0, 0) == errno.EINVAL
        assert refused(fallocate, file.fileno(), 0, 1 << 52, 1) == errno.EFBIG
    with open(here / "f", "rb") as file:
        assert refused(fallocate, file.fileno(), 0, 0, 1) == errno.EBADF
    assert (here / "f").read_bytes() == bytes(64 * 1024)


@pytest.mark.skipif(FLOOR, reason="memory has another size")
def test_fallocate_checks_space_and_reserves_none(here):
    space = os.statvfs(here)
    free = space.f_bavail * space.f_frsize
    with open(here / "f", "w+b") as file:
        for mode in (0, KEEP_SIZE):
            assert refused(fallocate, file.fileno(), mode, 0, free + 64 * MIB) == errno.ENOSPC
            assert os.fstat(file.fileno()).st_size == 0
        os.posix_fallocate(file.fileno(), 0, 100 * MIB)
        fallocate(file.fileno(), KEEP_SIZE, 0, 200 * MIB)
        assert os.fstat(file.fileno()).st_size == 100 * MIB and extents(file.fileno()) == []
    assert du(here / "f") == 0
    assert os.statvfs(here).f_bavail * space.f_frsize > free - 50 * MIB


def test_mappings_see_holes_and_keep_later_writes(here):
    with open(here / "f", "w+b", buffering=0) as file:
        file.write(b"x" * 64 * 1024)
        with mmap.mmap(file.fileno(), 0) as mapping:
            assert mapping[BLOCK] == ord("x")
            mapping[8 * BLOCK : 8 * BLOCK + 4] = b"kept"
            mapping[BLOCK : BLOCK + 4] = b"gone"
            fallocate(file.fileno(), HOLE, BLOCK - 1, BLOCK + 2)
            assert mapping[: 3 * BLOCK] == b"x" * (BLOCK - 1) + bytes(BLOCK + 2) + b"x" * (BLOCK - 1)
            assert mapping[8 * BLOCK : 8 * BLOCK + 4] == b"kept"
            mapping[BLOCK + 10 : BLOCK + 14] = b"back"
            mapping.flush()
            assert os.pread(file.fileno(), 6, BLOCK + 9) == b"\0back\0"
            os.copy_file_range(file.fileno(), file.fileno(), BLOCK, 8 * BLOCK, 2 * BLOCK)
            assert mapping[2 * BLOCK : 2 * BLOCK + 5] == b"keptx"


def test_cached_pages_are_dropped_by_a_copy(here):
    (here / "a").write_bytes(b"new" * MIB)
    (here / "b").write_bytes(b"old" * MIB)
    with open(here / "a", "rb") as source, open(here / "b", "r+b", buffering=0) as target:
        assert target.read(100) == (b"old" * 40)[:100]
        assert copy_all(source.fileno(), target.fileno(), 2 * MIB, 5, 5) == 2 * MIB
        assert os.pread(target.fileno(), 10, 0) == b"oldolewnew"[:5] + b"wnewn"
        os.pwrite(target.fileno(), b"mine", 8192)
        assert copy_all(source.fileno(), target.fileno(), BLOCK, 0, 12288) == BLOCK
    expected = bytearray(b"old" * MIB)
    expected[5 : 5 + 2 * MIB] = (b"new" * MIB)[5 : 5 + 2 * MIB]
    expected[8192:8196] = b"mine"
    expected[12288 : 12288 + BLOCK] = (b"new" * MIB)[:BLOCK]
    assert (here / "b").read_bytes() == expected


def test_seek_reports_extents_by_block(here):
    with open(here / "f", "w+b", buffering=0) as file:
        fd = file.fileno()
        assert refused(os.lseek, fd, 0, os.SEEK_HOLE) == errno.ENXIO
        os.ftruncate(fd, 1 << 40)
        assert extents(fd) == [] and os.lseek(fd, 77, os.SEEK_HOLE) == 77
        for place in (0, 5 * BLOCK, 6 * BLOCK, 100 * MIB + 1, (1 << 40) - 1):
            os.pwrite(fd, b"x", place)
        assert extents(fd) == [
            (0, BLOCK),
            (5 * BLOCK, 7 * BLOCK),
            (100 * MIB, 100 * MIB + BLOCK),
            ((1 << 40) - BLOCK, 1 << 40),
        ]
        fallocate(fd, HOLE, 6 * BLOCK, BLOCK)
        assert extents(fd)[1] == (5 * BLOCK, 6 * BLOCK)
        assert os.lseek(fd, 10, os.SEEK_CUR) >= 10 and os.lseek(fd, -1, os.SEEK_END) == (1 << 40) - 1
    wait_until(lambda: du(here / "f") <= 16 * BLOCK, "st_blocks")


def test_hole_or_copy_by_another_user_clears_set_id_bits(here):
    (here / "source").write_bytes(b"x" * BLOCK)
    (here / "source").chmod(0o644)
    for number, change in enumerate(("fallocate", "copy")):
        place = here / f"tool{number}"
        place.write_bytes(b"x" * BLOCK)

        def call(place=place, change=change):
            fd = os.open(place, os.O_RDWR)
            if change == "copy":
                os.copy_file_range(os.open(here / "source", os.O_RDONLY), fd, 10)
            else:
                fallocate(fd, HOLE, 0, 10)
            return True

        for uid, left in ((0, 0o6777), (1234, 0o777)):
            place.chmod(0o6777)
            assert as_user(uid, uid, call)
            assert os.stat(place).st_mode & 0o7777 == left


@pytest.mark.skipif(FLOOR, reason="the floor has one mount")
def test_other_mount_sees_holes_and_copies_at_open(here, second, mounted):
    there = second.place / here.relative_to(mounted.place)
    wait_until(there.exists, "the directory at the other mount")
    content = os.urandom(2 * MIB)
    (here / "a").write_bytes(content)
    assert (there / "a").read_bytes() == content
    with open(here / "a", "r+b") as file, open(here / "b", "wb") as copy:
        fallocate(file.fileno(), HOLE, 5000, MIB)
        copy_all(file.fileno(), copy.fileno(), 2 * MIB)
    expected = content[:5000] + bytes(MIB) + content[5000 + MIB :]
    assert (there / "a").read_bytes() == (there / "b").read_bytes() == expected
    with open(there / "a", "r+b") as theirs, open(here / "a", "r+b", buffering=0) as ours:
        ours.seek(MIB)
        ours.write(b"in flight")
        fallocate(theirs.fileno(), ZERO_RANGE, MIB, 3 * MIB)
    assert os.stat(here / "a").st_size == 4 * MIB
    assert (here / "a").read_bytes()[:MIB] == expected[:MIB]


@needs("fallocate")
def test_fallocate_command_follows_its_manual(here):
    content = b"x" * MIB + bytes(MIB) + b"y" * MIB
    (here / "f").write_bytes(content)
    run("fallocate", "--dig-holes", here / "f")
    assert (here / "f").read_bytes() == content
    wait_until(lambda: du(here / "f") == 2 * MIB, "st_blocks")
    run("fallocate", "--punch-hole", "--offset", "0", "--length", "64KiB", here / "f")
    run("fallocate", "--zero-range", "--offset", "2MiB", "--length", "4MiB", here / "f")
    run("fallocate", "--length", "10MiB", here / "f")
    assert (here / "f").read_bytes() == bytes(65536) + content[65536 : 2 * MIB] + bytes(8 * MIB)
    with pytest.raises(subprocess.CalledProcessError, match="returned non-zero"):
        run("fallocate", "--collapse-range", "--offset", "0", "--length", "64KiB", here / "f")


@needs("cp", "tar")
def test_cp_and_tar_keep_holes(here, tmp_path):
    with open(here / "f", "wb") as file:
        for place in (0, 10 * MIB + 5, 200 * MIB):
            file.seek(place)
            file.write(os.urandom(MIB + 777))
    digest = hashlib.sha256((here / "f").read_bytes()).hexdigest()
    for name, options in (
        ("auto", ["--reflink=auto", "--sparse=auto"]),
        ("always", ["--sparse=always"]),
        ("never", ["--reflink=never"]),
    ):
        run("cp", *options, here / "f", here / name)
        assert hashlib.sha256((here / name).read_bytes()).hexdigest() == digest
        with open(here / name, "rb") as file:
            assert sum(end - begin for begin, end in extents(file.fileno())) < 5 * MIB
    run("cp", "--sparse=never", here / "f", here / "dense")
    assert hashlib.sha256((here / "dense").read_bytes()).hexdigest() == digest
    run("tar", "-C", here, "--sparse", "-cf", tmp_path / "t", "f")
    assert os.stat(tmp_path / "t").st_size < 5 * MIB
    (here / "out").mkdir()
    run("tar", "-C", here / "out", "--sparse", "-xf", tmp_path / "t")
    assert hashlib.sha256((here / "out" / "f").read_bytes()).hexdigest() == digest


@needs("rsync")
def test_rsync_preallocates(here, tmp_path):
    (tmp_path / "f").write_bytes(os.urandom(3 * MIB + 5))
    done = run("rsync", "--preallocate", tmp_path / "f", here / "f")
    assert not done.stderr and (here / "f").read_bytes() == (tmp_path / "f").read_bytes()


@needs("fio")
@pytest.mark.few(2)
@pytest.mark.parametrize("way", ["native", "posix", "keep", "truncate"])
def test_fio_lays_files_out_and_verifies_them(here, way):
    done = run(
        "fio",
        "--name=x",
        f"--directory={here}",
        "--size=8m",
        f"--fallocate={way}",
        "--rw=randrw",
        "--bs=16k",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--fsync=20",
        "--thread",
        "--numjobs=2",
        "--output-format=json",
    )
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert len(jobs) == 2 and not any(job["error"] for job in jobs)


@needs("sqlite3")
def test_sqlite_vacuum_keeps_a_database_intact(here):
    said = run(
        "sqlite3",
        here / "db",
        "PRAGMA page_size=4096; CREATE TABLE t (n, b); WITH RECURSIVE c(n) AS (SELECT 1 UNION "
        "ALL SELECT n + 1 FROM c WHERE n < 2000) INSERT INTO t SELECT n, randomblob(500) FROM c; DELETE FROM t WHERE "
        "n % 3; VACUUM; PRAGMA integrity_check; SELECT count(*) FROM t;",
    )
    assert said.stdout.split() == ["ok", "666"]


@pytest.mark.skipif(FLOOR, reason="memory has other holes")
@needs("xfs_io")
def test_xfs_io_finds_its_extents(here):
    def io(*commands):
        words = [word for command in commands for word in ("-c", command)]
        return run("xfs_io", "-f", *words, here / "f").stdout

    io(
        "pwrite -S 0x61 0 1m",
        "fpunch 64k 128k",
        "fzero -k 960k 1m",
        "falloc 0 2m",
        "falloc -k 0 4m",
        "truncate 3m",
    )
    io("copy_range -s 0 -d 2m -l 8k " + str(here / "f"), "fsync")
    assert re.findall(r"(DATA|HOLE)\s+(\d+)", io("seek -a -r 0")) == [
        ("DATA", "0"),
        ("HOLE", "65536"),
        ("DATA", "196608"),
        ("HOLE", str(960 * 1024)),
        ("DATA", str(2 * MIB)),
        ("HOLE", str(2 * MIB + 8192)),
    ]
    expected = bytearray(b"a" * MIB + bytes(2 * MIB))
    expected[64 * 1024 : 192 * 1024] = bytes(128 * 1024)
    expected[960 * 1024 : MIB] = bytes(64 * 1024)
    expected[2 * MIB : 2 * MIB + 8192] = b"a" * 8192
    assert (here / "f").read_bytes() == expected


def test_concurrent_copies_and_holes_do_not_interfere(here):
    program = """
import ctypes, os, random, sys
libc = ctypes.CDLL(None)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
place, number = sys.argv[1], int(sys.argv[2])
chance, model, base = random.Random(number), bytearray(1 << 20), number << 20
fd = os.open(place, os.O_RDWR)
for _ in range(150):
    begin, length = chance.randrange(256) * 4096, chance.choice((4096, 40960, 1000))
    length = min(length, (1 << 20) - begin)
    what = chance.randrange(4)
    if what < 2:
        model[begin:begin + length] = content = chance.randbytes(length)
        assert os.pwrite(fd, content, base + begin) == length
    elif what == 2:
        assert not libc.fallocate(fd, 3, base + begin, length)
        model[begin:begin + length] = bytes(length)
    else:
        to = chance.randrange(256) * 4096
        length = min(length, (1 << 20) - to)
        if abs(to - begin) >= length:
            assert os.copy_file_range(fd, fd, length, base + begin, base + to) == length
            model[to:to + length] = model[begin:begin + length]
    assert os.pread(fd, 1 << 20, base) == model
"""
    with open(here / "f", "wb") as file:
        file.truncate(4 * MIB)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(here / "f"), str(number)], stderr=subprocess.PIPE, text=True
        )
        for number in range(4)
    ]
    for worker in workers:
        assert not worker.communicate(timeout=240)[1] and not worker.returncode
