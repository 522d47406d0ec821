"""Daemons that are dead or silent for longer than the deadline: every call on the mount ends with EIO or ETIMEDOUT in time.

No call hangs, everything works once the daemons are back, and the mount can be removed while no daemon answers.
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from nvpool.core.programs import Program, command
from nvpool.testing.env.pool import RealPool, end_process
from nvpool.testing.loads.crash_history import content

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="a mount needs /dev/fuse and root"
    ),
]

DEADLINE_S = 3.0
BYTES = 200_000
IN_TIME_S = 60.0
"""A call may be several requests, each with its deadline: write, flush, close. The machine may pause, too."""

CALLS = """
import concurrent.futures, json, mmap, os, sys, time
top, turn = sys.argv[1], sys.argv[2]

def write(path, flags=0):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    try:
        os.write(file, bytes(200_000))
        os.fsync(file)
    finally:
        os.close(file)

def read(path, flags):
    file = os.open(path, os.O_RDONLY | flags)
    try:
        into = mmap.mmap(-1, 65536)
        return os.preadv(file, [into], 0)
    finally:
        os.close(file)

calls = {
    "stat": lambda: os.stat(f"{top}/sub/stat"), "list": lambda: os.listdir(f"{top}/sub"), "statfs": lambda: os.statvfs(top),
    "read": lambda: read(f"{top}/sub/read", os.O_DIRECT), "write": lambda: write(f"{top}/sub/write"),
    "create": lambda: write(f"{top}/sub/create-{turn}", os.O_EXCL), "truncate": lambda: os.truncate(f"{top}/sub/truncate", 77),
    "unlink": lambda: os.unlink(f"{top}/sub/unlink-{turn}"), "mkdir": lambda: os.mkdir(f"{top}/sub/mkdir-{turn}"),
    "rename": lambda: os.rename(f"{top}/sub/rename-{turn}", f"{top}/sub/renamed-{turn}"),
    "setxattr": lambda: os.setxattr(f"{top}/sub/stat", "user.a", b"x"),
}

def one(name):
    begun = time.monotonic()
    try:
        calls[name]()
        code = 0
    except OSError as error:
        code = error.errno
    return name, code, time.monotonic() - begun

with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
    print(json.dumps(list(threads.map(one, calls))))
"""


@pytest.fixture
def mounted(tmp_path):
    mountpoint = tmp_path / "m"
    mountpoint.mkdir()
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start()
        nvpool("mount", pool.path, mountpoint, "--deadline-s", DEADLINE_S)
        (mountpoint / "sub").mkdir()
        numbered = [f"{kind}-{turn}" for kind in ("unlink", "rename") for turn in range(2)]
        for name in ("stat", "read", "write", "truncate", *numbered):
            (mountpoint / "sub" / name).write_bytes(content(1, BYTES))
        os.sync()
        try:
            yield pool, mountpoint
        finally:
            nvpool("umount", "--lazy", mountpoint, check=False)


def nvpool(*words, check=True, timeout=240):
    return subprocess.run(
        command(Program.CLI, *map(str, words)), check=check, capture_output=True, text=True, timeout=timeout
    )


def call_everything(mountpoint, turn):
    """errno of each kind of call; every call ended in time."""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLS, str(mountpoint), str(turn)], stdout=subprocess.PIPE, text=True
    )
    try:
        out, _ = caller.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        caller.kill()
        raise AssertionError("a call on the mount hangs") from None
    found = {name: (code, round(seconds, 2)) for name, code, seconds in json.loads(out)}
    late = {name: seen for name, seen in found.items() if seen[1] > IN_TIME_S}
    assert not late, late
    return {name: code for name, (code, _) in found.items()}


def test_calls_end_in_time_while_stores_are_stopped(mounted):
    pool, mountpoint = mounted
    assert not any(call_everything(mountpoint, 0).values())
    pids = [pool.pid("target-1"), pool.pid("target-2")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        found = call_everything(mountpoint, 1)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert {found[name] for name in ("read", "write", "create", "truncate")} <= {
        errno.EIO,
        errno.ETIMEDOUT,
    }, found
    assert not any(found[name] for name in ("stat", "list", "mkdir", "rename", "unlink")), found
    os.truncate(mountpoint / "sub" / "truncate", 10)
    assert (mountpoint / "sub" / "truncate").stat().st_size == 10
    (mountpoint / "sub" / "write").write_bytes(content(5, BYTES))
    assert (mountpoint / "sub" / "write").read_bytes() == content(5, BYTES)
    assert [pool.pid("target-1"), pool.pid("target-2")] == pids and pool.fsck() == []


@pytest.mark.smoke
def test_calls_end_in_time_while_a_shard_is_stopped(mounted):
    pool, mountpoint = mounted
    pid = pool.pid("meta-1")
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(1.1)  # the kernel's cached attributes have expired
        found = call_everything(mountpoint, 0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert {code for name, code in found.items() if name not in ("read", "statfs")} <= {
        errno.EIO,
        errno.ETIMEDOUT,
    }, found
    (mountpoint / "sub" / "back").write_bytes(content(6, BYTES))
    assert (mountpoint / "sub" / "back").read_bytes() == content(6, BYTES)
    assert pool.pid("meta-1") == pid and pool.fsck() == []


def test_open_file_is_readable_while_its_shard_is_stopped(mounted):
    pool, mountpoint = mounted
    file = os.open(mountpoint / "sub" / "read", os.O_RDONLY | os.O_DIRECT)
    pid = pool.pid("meta-1")
    os.kill(pid, signal.SIGSTOP)
    try:
        for place in range(3):
            time.sleep(1.2)  # the kernel's cached attributes have expired: it requests them before it reads
            assert os.pread(file, 4096, place * 4096) == content(1, BYTES)[place * 4096 : place * 4096 + 4096]
        assert os.fstat(file).st_size == BYTES
    finally:
        os.kill(pid, signal.SIGCONT)
        os.close(file)


def test_mount_without_daemons_ends_calls_and_recovers(mounted):
    pool, mountpoint = mounted
    (mountpoint / "sub" / "back").write_bytes(content(6, BYTES))
    os.sync()  # the last names must be durable before their shard is killed
    written = os.open(mountpoint / "sub" / "written", os.O_WRONLY | os.O_CREAT)
    try:
        pool.end_daemons()
        os.write(written, bytes(100))
        found = call_everything(mountpoint, 0)
        assert set(found.values()) - {0} <= {errno.EIO, errno.ETIMEDOUT}, found
        assert all(found[name] for name in ("stat", "list", "read", "write", "create", "unlink")), found
        begun = time.monotonic()
        with pytest.raises(OSError) as raised:
            os.fsync(written)
        assert raised.value.errno in (errno.EIO, errno.ETIMEDOUT) and time.monotonic() - begun < IN_TIME_S
    finally:
        with contextlib.suppress(OSError):  # the mount reports size and time to the shard once more
            os.close(written)
    nvpool("umount", mountpoint)
    assert not os.path.ismount(mountpoint)
    pool.until(lambda: not pool.processes(), "the mount daemon has ended")
    pool.start()
    nvpool("mount", pool.path, mountpoint, "--deadline-s", DEADLINE_S)
    assert (mountpoint / "sub" / "back").read_bytes() == content(6, BYTES)
    assert pool.fsck() == []


def test_daemon_killed_while_starting_causes_no_hang(mounted):
    pool, mountpoint = mounted
    end = time.monotonic() + 3 * DEADLINE_S
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLS, str(mountpoint), "0"], stdout=subprocess.PIPE, text=True
    )
    while time.monotonic() < end:
        for name in ("target-1", "target-2"):
            state = pool.directory.state_of(name)
            if state is not None:
                end_process(state.pid)
        time.sleep(0.05)
    out, _ = caller.communicate(timeout=240)
    assert {code for _, code, _ in json.loads(out)} <= {0, errno.EIO, errno.ETIMEDOUT}
    pool.wait(120)
    (mountpoint / "sub" / "after").write_bytes(content(7, BYTES))
    assert (mountpoint / "sub" / "after").read_bytes() == content(7, BYTES)
    assert pool.fsck() == []
