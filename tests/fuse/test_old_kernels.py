"""A mount survives its process also on kernels that do not resend requests: real mounts with --no-resend, killed during
calls.

The tests of test_holder and test_kills run in this mode too.
"""

import contextlib
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from nvpool.core.programs import OF_A_MOUNT, Program, command
from tests.fuse.conftest import FLOOR, nvpool, wait_until
from tests.fuse.kill_loads import end, kill_serving, processes, serving, together

pytestmark = [pytest.mark.t3, pytest.mark.mount, pytest.mark.skipif(FLOOR, reason="the floor has no daemons")]

MIB = 1 << 20


@pytest.fixture
def held(own, request):
    made = own.mount(
        own.directory.parent / f"m-{request.node.name[:40].replace('[', '-').rstrip(']')}",
        "--holder",
        "--no-resend",
        "--no-short-circuit",
    )
    yield made
    end(made)


@contextlib.contextmanager
def silent_stores(own):
    seen = json.loads(nvpool("status", own.directory, "--json").stdout)
    stores = [one["pid"] for one in seen["processes"] if one["role"] == "store"]
    try:
        for pid in stores:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in stores:
            os.kill(pid, signal.SIGCONT)


def states(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.smoke
def test_memory_for_requests_is_resident(held):
    """Otherwise a process that is killed while the kernel copies a request to it leaves a caller with EIO: see shm/memfd."""
    with open(f"/proc/{serving(held)}/smaps") as file:
        mapping = file.read().partition("nvpool requests")[2].partition("\n\n")[0]
    assert int(re.search(r"Rss:\s+(\d+) kB", mapping)[1]) << 10 >= MIB


def test_calls_that_wait_for_a_silent_store_survive_kills(held, own):
    """The process is killed three times meanwhile: each read gets its bytes, each write is carried out once, in its place."""
    content = random.Random(1).randbytes(12 * MIB)
    (held.place / "slow").write_bytes(content)
    file = os.open(held.place / "slow", os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    synced = os.open(held.place / "synced", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    read, wrote = {}, []

    def reader(at):
        read[at] = os.pread(file, 100_000, at * MIB)

    def writer(me):
        count = os.write(synced, bytes([me]) * 1000)
        os.fsync(synced)
        wrote.append(count)

    work = [threading.Thread(target=reader, args=(at,)) for at in range(12)]
    work += [threading.Thread(target=writer, args=(me,)) for me in range(8)]
    with silent_stores(own):
        for thread in work:
            thread.start()
        time.sleep(0.5)
        for _ in range(3):
            kill_serving(held)
            (held.place / "others").mkdir()  # other requests continue
            (held.place / "others").rmdir()
            time.sleep(0.2)
        assert not read and not wrote
    for thread in work:
        thread.join(120)
        assert not thread.is_alive(), "a call hangs"
    assert read == {at: content[at * MIB : at * MIB + 100_000] for at in range(12)} and wrote == [1000] * 8
    os.close(file)
    os.close(synced)
    found = (held.place / "synced").read_bytes()
    assert sorted(found[at : at + 1000] for at in range(0, len(found), 1000)) == [
        bytes([me]) * 1000 for me in range(8)
    ]


def test_waiting_caller_can_be_killed_after_a_kill(held, own):
    """The kernel notifies once, of a first signal; the fatal one arrives after the successor's start."""
    syncing = (
        "import os,signal,sys; signal.signal(signal.SIGUSR1, lambda *_: None);"
        "f=os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); os.write(f, bytes(100_000)); print(flush=True); os.fsync(f)"
    )
    with silent_stores(own):
        writer = subprocess.Popen(
            [sys.executable, "-c", syncing, held.place / "unsynced"], stdout=subprocess.PIPE
        )
        writer.stdout.readline()
        time.sleep(0.5)
        writer.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        assert writer.poll() is None
        kill_serving(held)
        time.sleep(0.3)
        assert writer.poll() is None
        writer.kill()
        since = time.monotonic()
        assert writer.wait(40) == -signal.SIGKILL
        assert time.monotonic() - since < 10
        writer.stdout.close()
    assert (held.place / "unsynced").read_bytes() == bytes(100_000)


@pytest.mark.parametrize("before", [True, False], ids=["signal-first", "kill-first"])
def test_waiting_lock_is_interrupted_after_a_kill(held, own, before):
    """EINTR for the signal, as without a kill; its notification may have been the last one for the dead process."""
    waits = (
        "import fcntl,signal,sys\n"
        "def ring(*_): raise InterruptedError\n"
        "signal.signal(signal.SIGUSR1, ring); f=open(sys.argv[1], 'rb+'); print(flush=True)\n"
        "try: fcntl.lockf(f, fcntl.LOCK_EX)\n"
        "except InterruptedError: print('interrupted', flush=True)\n"
    )
    with open(held.place / "l", "wb+") as mine:
        fcntl.lockf(mine, fcntl.LOCK_EX)
        waiter = subprocess.Popen(
            [sys.executable, "-c", waits, held.place / "l"], stdout=subprocess.PIPE, text=True
        )
        waiter.stdout.readline()
        time.sleep(0.5)
        old = serving(held)
        if before:
            os.kill(old, signal.SIGSTOP)
            waiter.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        kill_serving(held)
        if not before:
            time.sleep(0.2)
            assert waiter.poll() is None
            waiter.send_signal(signal.SIGUSR1)
        assert waiter.communicate(timeout=20)[0] == "interrupted\n"


def test_upgrade_under_load_causes_no_error(held, own):
    over = threading.Event()

    def load(me):
        turn = 0
        while not over.is_set():
            path = held.place / f"u{me}-{turn}"
            path.write_bytes(bytes([me]) * 5000)
            assert path.read_bytes() == bytes([me]) * 5000
            path.rename(f"{path}.n")
            os.unlink(f"{path}.n")
            turn += 1

    def upgrade():
        try:
            for _ in range(3):
                before = serving(held)
                upgraded = json.loads(nvpool("mount", "upgrade", held.place, "--json").stdout)
                assert upgraded["pid"] == serving(held) != before
        finally:
            over.set()

    with open(held.place / "l", "wb+") as mine:
        fcntl.lockf(mine, fcntl.LOCK_EX)
        together(upgrade, *(lambda me=me: load(me) for me in range(3)))
        seen = json.loads(nvpool("status", own.directory, "--json").stdout)
        assert any(
            one["role"] == "holder" and one["mountpoint"] == str(held.place) for one in seen["processes"]
        )
    wait_until(
        lambda: all(states(pid) != "D" for program in OF_A_MOUNT for pid in processes(held.place, program)),
        "sleep",
        10,
    )


def test_more_workers_are_refused(own, tmp_path):
    done = subprocess.run(
        command(Program.MOUNT, "--no-resend", "--workers", "2", own.directory, tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1 and "hands requests out again" in done.stderr
