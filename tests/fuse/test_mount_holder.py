"""A mount survives its serving process and its holder under repeated kills.

No application sees an error or a wrong byte, no request is carried out twice, locks stay held. Each pause is printed.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from nvpool.core.programs import Program, command
from nvpool.fuse.engines import RESEND_MIN, kernel_version
from tests.fuse.conftest import FLOOR, is_mounted, nvpool, wait_until
from tests.fuse.kill_loads import end, kill_serving, processes, run_model, serving, together

pytestmark = [
    pytest.mark.t3,
    pytest.mark.mount,
    pytest.mark.skipif(FLOOR, reason="the floor has no daemons"),
    pytest.mark.skipif(kernel_version() < RESEND_MIN, reason="this kernel does not hand requests out again"),
]


@pytest.fixture
def here(held, request):
    """A directory of the mount for this test."""
    place = held.place / hashlib.sha1(request.node.name.encode()).hexdigest()[:8]
    place.mkdir()
    return place


@pytest.fixture(params=[(), ("--no-resend",)], ids=["", "old-kernel"])
def held(own, request):
    """On a kernel that resends requests, and as on one that does not."""
    made = own.mount(
        own.directory.parent / f"m-{hashlib.sha1(request.node.name.encode()).hexdigest()[:8]}",
        "--holder",
        "--drain-s",
        "2",
        *request.param,
    )
    yield made
    assert made.end() == 0, made.log.read_text()
    said = made.log.read_text()
    assert "Traceback" not in said and " ERROR " not in said, said


def kill_holder(held):
    """On return there is another holder."""
    (before,) = processes(held.place, Program.MOUNT_HOLDER)
    os.kill(before, signal.SIGKILL)
    if before == held.process.pid:
        held.process.wait(120)
    wait_until(
        lambda: (
            [pid for pid in processes(held.place, Program.MOUNT_HOLDER) if pid != before] != []
            and f"holder[{processes(held.place, Program.MOUNT_HOLDER)[0]}]" in held.log.read_text()
        ),
        "another holder",
    )


def test_holder_and_serving_process_restart_each_other(own):
    held = own.mount(own.directory.parent / "m-both", "--holder")
    try:
        (held.place / "f").write_bytes(b"1" * 100_000)
        for _ in range(2):
            kill_holder(held)
            assert (held.place / "f").read_bytes() == b"1" * 100_000
            kill_serving(held)
            (held.place / "g").write_bytes(b"2")
            assert (held.place / "f").read_bytes() == b"1" * 100_000
        seen = json.loads(nvpool("status", own.directory, "--json").stdout)
        (holder,) = (
            one
            for one in seen["processes"]
            if one["role"] == "holder" and one["mountpoint"] == str(held.place)
        )
        assert holder["pid"] == processes(held.place, Program.MOUNT_HOLDER)[0] and not seen["problems"]
    finally:
        end(held)
    assert not is_mounted(held.place)


def test_serving_process_is_upgraded_under_load(held, here):
    def replace(_):
        before = serving(held)
        done = json.loads(nvpool("mount", "upgrade", held.place, "--json").stdout)
        assert done["pid"] == serving(held) != before and done["pause_ms"] >= 0

    (forkserver,) = processes(held.place, Program.MOUNT_FORK_SERVER)
    together(lambda: run_model(here, 5.0), lambda: [replace(held) for _ in range(5)])
    # the old forkserver runs the software before the upgrade
    assert forkserver not in processes(held.place, Program.MOUNT_FORK_SERVER)


def test_failed_upgrade_leaves_the_old_process(held, here, own):
    before = serving(held), processes(held.place, Program.MOUNT_FORK_SERVER)
    node = own.directory / "node.toml"
    content = node.read_bytes()
    try:
        node.write_bytes(content + b"\n[nothing]\nsense = 1\n")
        done = subprocess.run(
            command(Program.CLI, "mount", "upgrade", str(held.place)),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 3 and "the old one does" in done.stderr
    finally:
        node.write_bytes(content)
    (here / "f").touch()
    assert (serving(held), processes(held.place, Program.MOUNT_FORK_SERVER)) == before
    said = held.log.read_text()
    assert "is not replaced" in said and "nothing is unknown" in said
    held.log.write_text("")  # these errors are expected


def test_pending_page_does_not_keep_a_killed_process(own):
    """A reader waits for a silent store, and another mount changes the file: the kernel delays the notification of it until
    the page has come.
    """
    held = own.mount(own.directory.parent / "m-notice", "--holder", "--no-short-circuit")
    other = own.mount(own.directory.parent / "m-changes", "--no-holder")
    content = random.Random(3).randbytes(3 << 20)
    (other.place / "awaited").write_bytes(content)
    seen = json.loads(nvpool("status", own.directory, "--json").stdout)
    stores = [one["pid"] for one in seen["processes"] if one["role"] == "store"]
    file, read = os.open(held.place / "awaited", os.O_RDONLY), []
    work = [
        threading.Thread(target=lambda: read.append(os.pread(file, 1 << 20, 1 << 20))),
        threading.Thread(target=lambda: os.utime(other.place / "awaited", (1, 1))),
    ]
    try:
        for pid in stores:
            os.kill(pid, signal.SIGSTOP)
        work[0].start()
        time.sleep(0.3)
        work[1].start()
        wait_until(
            lambda: any("folio" in wait for wait in wait_channels(held)), "a notice that waits for the page"
        )
        kill_serving(held)
        (held.place / "alive").mkdir()
    finally:
        for pid in stores:
            os.kill(pid, signal.SIGCONT)
    for thread in work:
        thread.join(120)
        assert not thread.is_alive()
    assert read == [content[1 << 20 : 2 << 20]]
    os.close(file)
    assert other.end() == 0
    end(held)


def wait_channels(held):
    """The kernel functions in which the serving threads wait."""
    for program in (Program.MOUNT, Program.MOUNT_NOTIFIER):
        for pid in processes(held.place, program):
            for thread in os.listdir(f"/proc/{pid}/task"):
                yield Path(f"/proc/{pid}/task/{thread}/wchan").read_text()


def test_killed_forkserver_is_replaced(held, here):
    for kill_both in (False, True):
        (forkserver,) = processes(held.place, Program.MOUNT_FORK_SERVER)
        os.kill(forkserver, signal.SIGKILL)
        if not kill_both:
            wait_until(
                lambda old=forkserver: set(processes(held.place, Program.MOUNT_FORK_SERVER)) - {old},
                "another forkserver",
            )
        kill_serving(held)
        (here / f"f{kill_both}").write_bytes(b"1" * 70_000)
        assert (here / f"f{kill_both}").read_bytes() == b"1" * 70_000


def test_forked_processes_use_every_transport(own):
    held = own.mount(own.directory.parent / "m-grpc", "--holder", "--transport", "grpc")
    (held.place / "f").write_bytes(b"1" * 200_000)
    for _ in range(2):
        kill_serving(held)
        assert (held.place / "f").read_bytes() == b"1" * 200_000
    end(held)


def test_open_file_survives_kills(held, here):
    """Also without a name, and with bytes that are neither stored nor flushed."""
    (here / "there").touch()
    path = here / "f"
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(file, b"a" * 5000)
    reader = os.open(path, os.O_RDONLY)
    listing = os.scandir(here)
    kill_serving(held)
    os.pwrite(file, b"b" * 5000, 5000)
    os.unlink(path)
    kill_serving(held)
    assert os.pread(reader, 20_000, 0) == os.pread(file, 20_000, 0) == b"a" * 5000 + b"b" * 5000
    os.fsync(file)
    os.ftruncate(file, 6000)
    os.write(file, b"c")
    kill_serving(held)
    assert os.pread(reader, 20_000, 0) == b"a" * 5000 + b"c" + b"b" * 999
    assert os.fstat(file).st_size == 6000 and os.fstat(file).st_nlink == 0
    os.posix_fallocate(file, 0, 9000)
    kill_serving(held)
    assert os.fstat(reader).st_size == 9000 and list(listing)
    os.close(file)
    os.close(reader)
    assert not path.exists()


def test_hole_and_copy_work_after_a_kill(held, here):
    with open(here / "from", "wb+", buffering=0) as origin, open(here / "to", "wb+", buffering=0) as target:
        content = random.Random(1).randbytes(3 << 20)
        origin.write(content)
        kill_serving(held)
        assert os.copy_file_range(origin.fileno(), target.fileno(), len(content), 0, 0) == len(content)
        kill_serving(held)
        mebibyte = ctypes.c_long(1 << 20)
        assert ctypes.CDLL(None).fallocate(target.fileno(), 3, mebibyte, mebibyte) == 0
        kill_serving(held)
        assert (
            os.pread(target.fileno(), len(content), 0)
            == content[: 1 << 20] + bytes(1 << 20) + content[2 << 20 :]
        )


def test_acknowledged_writes_are_stored_after_a_kill(held, here, own):
    """Killed right after an acknowledged close, and after acknowledged writes."""
    expected = {}
    files = []
    for number in range(40):
        content = random.Random(number).randbytes(3000 * number + 1)
        file = os.open(here / f"f{number}", os.O_WRONLY | os.O_CREAT)
        os.write(file, content)
        if number % 2:
            os.close(file)
        else:
            files.append(file)
        expected[number] = content
    kill_serving(held)
    for number, content in expected.items():
        assert (here / f"f{number}").read_bytes() == content
    for file in files:
        os.close(file)
    again = own.mount(own.directory.parent / "m-again", "--no-holder")
    for number, content in expected.items():
        assert (again.place / here.name / f"f{number}").read_bytes() == content
    assert again.end() == 0


@pytest.fixture
def other(own):
    made = own.mount(own.directory.parent / "m-other", "--no-holder")
    yield made
    assert made.end() == 0


@pytest.mark.parametrize("lock", [fcntl.lockf, fcntl.flock], ids=["fcntl", "flock"])
def test_locks_stay_held_through_a_kill(held, here, other, lock):
    with open(here / "l", "wb+") as mine, open(other.place / here.name / "l", "rb+") as theirs:
        lock(mine, fcntl.LOCK_EX)
        for _ in range(2):
            kill_serving(held)
            with pytest.raises(BlockingIOError):
                lock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock(mine, fcntl.LOCK_UN)
        lock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kill_serving(held)
        with pytest.raises(BlockingIOError):
            lock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock(theirs, fcntl.LOCK_UN)
        lock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kill_serving(held)
    with open(other.place / here.name / "l", "rb+") as theirs:  # closed through the successor: released
        wait_until(lambda: _can_lock(lock, theirs), "the lock of the closed file")


def _can_lock(lock, file):
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("lock", [fcntl.lockf, fcntl.flock], ids=["fcntl", "flock"])
def test_waiting_lock_is_granted_once_and_kept(held, here, other, lock):
    got = threading.Event()
    with open(here / "w", "wb+") as mine, open(other.place / here.name / "w", "rb+") as theirs:
        lock(theirs, fcntl.LOCK_EX)

        def wait():
            lock(mine, fcntl.LOCK_EX)
            got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        for _ in range(2):
            time.sleep(0.1)
            kill_serving(held)
        assert not got.wait(0.2)
        lock(theirs, fcntl.LOCK_UN)
        assert got.wait(120)
        waiting.join(120)
        kill_serving(held)
        with pytest.raises(BlockingIOError):
            lock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.smoke
def test_sigterm_after_a_kill_stores_everything(own):
    held = own.mount(own.directory.parent / "m-term", "--holder", "--drain-s", "2")
    (held.place / "t").write_bytes(b"t" * 70_000)
    kill_serving(held)
    with open(held.place / "t", "ab", buffering=0) as file:
        file.write(b"u" * 10)
        held.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_mounted(held.place), "the unmount")
        assert held.process.wait(120) == 0
        with contextlib.suppress(OSError):
            file.close()
    again = own.mount(held.place, "--no-holder")
    assert (again.place / "t").read_bytes() == b"t" * 70_000 + b"u" * 10
    assert again.end() == 0


def test_successor_is_retried_until_it_starts(own):
    held = own.mount(own.directory.parent / "m-config", "--holder", "--drain-s", "2")
    (held.place / "config").write_bytes(b"1" * 9000)
    node = own.directory / "node.toml"
    before = node.read_bytes()
    try:
        node.write_bytes(before + b"\n[nothing]\nsense = 1\n")
        os.kill(serving(held), signal.SIGKILL)
        wait_until(lambda: held.log.read_text().count("before it served") >= 2, "attempts")
        assert held.process.poll() is None
    finally:
        node.write_bytes(before)
    assert (held.place / "config").read_bytes() == b"1" * 9000
    assert held.end() == 0


def test_mount_without_holder_support_is_refused(own, tmp_path):
    done = subprocess.run(
        command(Program.MOUNT, "--holder", "--engine", "pyfuse3", own.directory, tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1 and "--holder" in done.stderr
    plain = own.mount(tmp_path / "m", "--no-holder")
    done = subprocess.run(
        command(Program.CLI, "mount", "upgrade", str(plain.place)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1 and "does not outlive" in done.stderr
    assert plain.end() == 0
