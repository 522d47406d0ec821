"""A mount of several processes: readers answer as the serving process would, writes of all mounts are seen.

A kill of any process is only a pause. Each pause is printed.
"""

import fcntl
import json
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import threading

import pytest

from nvpool.core.programs import Program, command
from nvpool.fuse.engines import RESEND_MIN, kernel_version
from tests.fuse.conftest import FLOOR, nvpool, wait_until
from tests.fuse.kill_loads import load_large, pauses, processes, read_at_random, run_model, serving, together

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(FLOOR, reason="the floor has no daemons"),
    pytest.mark.skipif(kernel_version() < RESEND_MIN, reason="this kernel does not hand requests out again"),
]

MIB = 1 << 20


def mounted(own, name, workers=2):
    made = own.mount(own.directory.parent / name, "--holder", "--workers", str(workers), "--drain-s", "2")
    wait_for_readers(made, workers - 1)
    return made


def wait_for_readers(held, count=1):
    """Wait until `count` readers serve beside the present serving process."""

    def there():
        own = processes(held.place, Program.MOUNT)
        said = held.log.read_text()
        return (
            len(own) == 1
            and len(re.findall(rf"mount\[{own[0]}\] process \d+ reads for this mount", said)) >= count
        )

    wait_until(there, "readers")


def ended(held):
    """End the mount in order; the numbers of requests that readers answered, and passed on."""
    assert held.end() == 0, held.log.read_text()
    wait_until(lambda: not processes(held.place, Program.MOUNT_WORKER), "the end of the readers")
    said = held.log.read_text()
    assert "Traceback" not in said and " ERROR " not in said, said
    found = re.findall(r"has answered (\d+) requests and passed (\d+) on", said)
    return sum(int(answered) for answered, _ in found), sum(int(passed) for _, passed in found)


@pytest.fixture(scope="module")
def held(own):
    """One mount for all tests: after a kill, as many processes serve it as before."""
    made = mounted(own, "m-held")
    yield made
    answered, passed = ended(made)
    print(f"\nreaders have answered {answered} requests and passed {passed} on")


@pytest.fixture
def here(held, request):
    wait_for_readers(held)
    place = held.place / f"{abs(hash(request.node.name)) % 10**8}"
    place.mkdir()
    return place


def test_readers_return_the_right_bytes(own):
    held = mounted(own, "m-many", workers=3)
    content = random.Random(1).randbytes(6 * MIB + 777)
    (held.place / "many").write_bytes(content)
    together(*(lambda seed=seed: read_at_random(held.place / "many", content, seed) for seed in range(8)))
    assert (held.place / "many").read_bytes() == content
    seen = json.loads(nvpool("status", own.directory, "--json").stdout)
    readers = {
        one["pid"]
        for one in seen["processes"]
        if one["role"] == "reader" and one["mountpoint"] == str(held.place)
    }
    assert readers == set(processes(held.place, Program.MOUNT_WORKER)) and len(readers) == 2
    answered, _ = ended(held)
    assert answered


def test_written_bytes_are_read_through_the_same_mount(here):
    """Every written byte is returned by the next read of any process, through descriptors opened before and after."""
    path, content = here / "f", bytearray(random.Random(2).randbytes(3 * MIB))
    path.write_bytes(content)
    chance, buffer = random.Random(3), mmap.mmap(-1, 64 << 10)
    before = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for turn in range(30):
            together(*(lambda seed=seed: read_at_random(path, bytes(content), seed, 20) for seed in range(4)))
            offset, piece = chance.randrange(len(content) - 70_000), chance.randbytes(70_000)
            file = os.open(path, os.O_RDWR)
            os.pwrite(file, piece, offset)
            content[offset : offset + len(piece)] = piece
            for _ in range(4):
                start = chance.randrange(offset, offset + len(piece)) & -4096
                for one in (before, file):
                    count = os.preadv(one, [buffer], start)
                    assert buffer[:count] == content[start : start + (64 << 10)], (turn, start)
            os.close(file)
            if turn % 5 == 4:
                os.truncate(path, 2 * MIB)
                assert os.preadv(before, [buffer], 2 * MIB) == 0
                os.truncate(path, 3 * MIB)
                content[2 * MIB :] = bytes(MIB)
                assert os.preadv(before, [buffer], 2 * MIB + 4096) == 64 << 10 and not any(buffer[:])
        assert path.read_bytes() == content
    finally:
        os.close(before)


def test_writes_of_another_mount_are_read(own, here, held):
    other = own.mount(own.directory.parent / "m-other", "--no-holder")
    path, chance = here / "f", random.Random(4)
    buffer = mmap.mmap(-1, 64 << 10)
    content = bytearray(chance.randbytes(MIB))
    path.write_bytes(content)
    kept = os.open(path, os.O_RDONLY)
    try:
        for _ in range(20):
            together(*(lambda seed=seed: read_at_random(path, bytes(content), seed, 20) for seed in range(4)))
            assert os.pread(kept, len(content), 0) == content
            offset, piece = chance.randrange(len(content)), chance.randbytes(100_000)
            with open(other.place / here.name / "f", "rb+", buffering=0) as file:
                file.seek(offset)
                file.write(piece)
            content[offset : offset + len(piece)] = piece
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            count = os.preadv(file, [buffer], offset & -4096)
            assert buffer[:count] == content[offset & -4096 :][: 64 << 10]
            os.close(file)
            assert path.read_bytes() == content
    finally:
        os.close(kept)
        assert other.end() == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("lock", [fcntl.lockf, fcntl.flock], ids=["fcntl", "flock"])
def test_lock_holder_reads_earlier_writes(own, here, lock):
    other = own.mount(own.directory.parent / "m-lock", "--no-holder")
    path = here / "f"
    path.write_bytes(bytes(MIB))
    try:
        with (
            open(path, "rb", buffering=0) as mine,
            open(other.place / here.name / "f", "rb+", buffering=0) as theirs,
        ):
            for turn in range(1, 40):
                assert os.pread(mine.fileno(), 4096, 8192)
                lock(theirs, fcntl.LOCK_EX)
                os.pwrite(theirs.fileno(), bytes([turn]) * 4096, 8192)
                lock(theirs, fcntl.LOCK_UN)
                lock(mine, fcntl.LOCK_SH)
                assert os.pread(mine.fileno(), 4096, 8192) == bytes([turn]) * 4096
                lock(mine, fcntl.LOCK_UN)
    finally:
        assert other.end() == 0


def test_interrupted_lock_wait_ends_in_every_process(here):
    path = here / "f"
    path.touch()
    with open(path, "wb") as mine:
        fcntl.lockf(mine, fcntl.LOCK_EX)
        wait = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'wb'), fcntl.LOCK_EX)"
        waiting = [subprocess.Popen([sys.executable, "-S", "-c", wait, str(path)]) for _ in range(12)]
        threading.Event().wait(0.5)
        for process in waiting:
            process.kill()
        for process in waiting:
            assert process.wait(120) == -signal.SIGKILL


def test_names_and_files_agree_with_the_model(here):
    run_model(here, 2.0)


def test_space_of_an_unlinked_file_is_freed(own, here):
    content = random.Random(5).randbytes(2 * MIB)
    (here / "gone").write_bytes(content)
    together(*(lambda seed=seed: read_at_random(here / "gone", content, seed, 50) for seed in range(4)))
    (here / "gone").unlink()

    def collected():
        seen = json.loads(nvpool("status", own.directory, "--json").stdout)
        return not any(one.get("to_collect") for one in seen["processes"])

    wait_until(collected, "the collection")


def kill_reader(held):
    """On return another process serves, with another reader."""
    wait_for_readers(held)
    before = len(pauses(held))
    os.kill(processes(held.place, Program.MOUNT_WORKER)[0], signal.SIGKILL)
    wait_until(lambda: len(pauses(held)) > before, "the next serving process")
    wait_for_readers(held)


def test_killed_reader_causes_only_a_pause(held, here):
    together(lambda: load_large(here, 3.0), lambda: [kill_reader(held) for _ in range(5)])


def test_upgrade_replaces_all_processes(held, here):
    def replace():
        wait_for_readers(held)
        before = serving(held)
        upgraded = json.loads(nvpool("mount", "upgrade", held.place, "--json").stdout)
        assert upgraded["pid"] == serving(held) != before

    together(lambda: load_large(here, 3.0), lambda: [replace() for _ in range(2)])
    wait_for_readers(held)


def test_workers_need_a_holder(own, tmp_path):
    done = subprocess.run(
        command(Program.MOUNT, "--no-holder", "--workers", "2", own.directory, tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1 and "--workers" in done.stderr
