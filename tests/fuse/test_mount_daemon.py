"""The life of a mount: refused starts, orderly and disorderly ends, dead and returning daemons of the pool."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from nvpool.core.programs import Program, command, program_of
from nvpool.core.programs import processes as running
from nvpool.host.mountinfo import look_at, mount_at
from nvpool.runtime.scheduling import NICE, SLICE_NS, attributes
from nvpool.testing.loads.data_verification import CheckingLoad
from tests.fuse.conftest import FLOOR, Pool, is_mounted, nvpool, wait_until
from tests.fuse.kill_loads import kill_serving, serving

pytestmark = [pytest.mark.t3, pytest.mark.mount, pytest.mark.skipif(FLOOR, reason="the floor has no daemons")]


@pytest.fixture(scope="module")
def own():
    """A pool that tests may damage."""
    place = Path(tempfile.mkdtemp(prefix="nvpool-fuse-"))
    made = Pool(place / "pool")
    yield made
    made.close()
    shutil.rmtree(place)


@pytest.fixture
def mine(own, request):
    made = own.mount(
        own.directory.parent / f"m-{request.node.name[-40:]}", "--deadline-s", "60", "--drain-s", "2"
    )
    yield made
    made.end(signal.SIGKILL)


def refused(*words):
    done = subprocess.run(
        command(Program.MOUNT, *map(str, words)),
        capture_output=True,
        text=True,
        timeout=240,
        cwd="/",
        check=False,
    )
    assert done.returncode not in (0, 70), done.stderr
    return done.stderr


def processes(pool):
    return json.loads(nvpool("status", pool.directory, "--json").stdout)["processes"]


def pids(pool, role):
    return [process["pid"] for process in processes(pool) if process["role"] == role]


def test_wrong_starts_are_refused_with_the_reason(own, mine, tmp_path):
    assert "mounted on it" in refused(own.directory, mine.place)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "is not empty" in refused(own.directory, tmp_path / "full")
    assert "mkdir -p" in refused(own.directory, tmp_path / "missing")
    (tmp_path / "m").mkdir()
    assert refused("127.0.0.1:1", tmp_path / "m", "--deadline-s", "1")
    assert "is not a pool directory" in refused(tmp_path, tmp_path / "m")
    assert not is_mounted(tmp_path / "m") and is_mounted(mine.place)


def test_all_processes_of_pool_and_mount_run_soon_after_a_wake_up(own, mine):
    if not attributes().slice_ns:
        pytest.skip("this kernel has no time slices per thread")
    (mine.place / "file").write_bytes(bytes(1 << 20))  # threads that start on first use
    found = {pid: words for naming in (own.directory, mine.place) for pid, words in running(naming=naming)}
    assert {Program.SUPERVISOR, Program.META, Program.STORE, Program.MOUNT, Program.MOUNT_NOTIFIER} <= {
        program_of(words) for words in found.values()
    }
    nice = NICE if os.geteuid() == 0 else 0
    without = set()
    for pid, words in found.items():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                if attributes(int(thread))[1:] != (nice, 0, SLICE_NS):
                    without.add(program_of(words))
    assert without <= {Program.MOUNT_HOLDER}  # it serves no requests


def test_mount_point_may_be_a_symbolic_link(own, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to("m")
    try:
        nvpool("mount", own.directory, tmp_path / "link", "--wait", "120")
        assert is_mounted(tmp_path / "m")
    finally:
        nvpool("umount", tmp_path / "link")
    assert not is_mounted(tmp_path / "m")


def test_check_of_a_hung_mount_ends(own, mine, monkeypatch):
    monkeypatch.setattr("nvpool.host.mountinfo.LOOK_S", 0.3)
    (shard,) = pids(own, "meta")
    os.kill(shard, signal.SIGSTOP)
    try:
        assert look_at(mine.place) == "hung"
    finally:
        os.kill(shard, signal.SIGCONT)
    wait_until(lambda: look_at(mine.place) == "alive", "the shard")


def test_status_lists_the_mount_with_its_process(own, mine):
    seen = [process for process in processes(own) if process.get("mountpoint") == str(mine.place)]
    assert "mount" in {process["role"] for process in seen} and mine.process.pid in {
        process["pid"] for process in seen
    }
    mine.end()
    assert not any(process.get("mountpoint") == str(mine.place) for process in processes(own))


def test_requested_engine_is_used_and_shown(own, tmp_path):
    shown = {}
    for word in ("auto", "kernel", "pyfuse3"):
        made = own.mount(tmp_path / word, "--engine", word)
        (made.place / "by-engine").write_bytes(word.encode())
        shown[word] = next(
            process["engine"] for process in processes(own) if process.get("mountpoint") == str(made.place)
        )
        assert made.end() == 0
    assert shown == {"auto": "kernel", "kernel": "kernel", "pyfuse3": "pyfuse3"}
    (tmp_path / "m").mkdir()
    assert "engine kernel only" in refused(
        "--engine", "pyfuse3", "--writeback", own.directory, tmp_path / "m"
    )
    nvpool(
        "mount",
        own.directory,
        tmp_path / "m",
        "--engine",
        "kernel",
        "--writeback",
        "--max-read",
        "256K",
        "--max-background",
        "64",
        "--congestion-threshold",
        "32",
        "--read-ahead",
        "512K",
    )
    read_ahead = Path(f"/sys/class/bdi/{mount_at(tmp_path / 'm').device}/read_ahead_kb")
    assert read_ahead.read_text() == "512\n"
    (tmp_path / "m" / "by-engine").write_bytes(b"written back")
    assert (tmp_path / "m" / "by-engine").read_bytes() == b"written back"
    nvpool("umount", tmp_path / "m")


@pytest.mark.smoke
def test_sigterm_stores_everything_and_leaves_no_mount(own, mine):
    with open(mine.place / "kept", "wb", buffering=0) as file:
        for number in range(50):
            file.write(bytes([number]) * 10_000)
    assert mine.end() == 0
    assert not is_mounted(mine.place)
    again = own.mount(mine.place)
    assert (again.place / "kept").read_bytes() == b"".join(bytes([number]) * 10_000 for number in range(50))
    assert again.end() == 0


def test_sigterm_detaches_and_stores_open_files(own, mine):
    file = open(mine.place / "open", "wb", buffering=0)
    try:
        file.write(b"a" * 100_000)
        mine.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_mounted(mine.place), "the unmount")
        file.write(b"b" * 100_000)
        assert mine.process.wait(120) == 0
        with pytest.raises(OSError) as gone:
            file.write(b"c")
        assert gone.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    finally:
        with contextlib.suppress(OSError):
            file.close()
    again = own.mount(mine.place)
    assert (again.place / "open").read_bytes() == b"a" * 100_000 + b"b" * 100_000
    assert again.end() == 0


def test_second_signal_does_not_wait_for_open_files(own):
    slow = own.mount(own.directory.parent / "m-slow", "--drain-s", "600")
    with contextlib.suppress(OSError), open(slow.place / "f", "wb"):  # close fails with ENOTCONN
        slow.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_mounted(slow.place), "the unmount")
        slow.process.send_signal(signal.SIGTERM)
        assert slow.process.wait(120) == 0


def test_umount_ends_the_daemon_and_loses_nothing(own, mine):
    (mine.place / "by-umount").write_bytes(b"x" * 50_000)
    subprocess.run(["umount", mine.place], check=True, timeout=240)
    assert mine.process.wait(120) == 0
    again = own.mount(mine.place)
    assert (again.place / "by-umount").read_bytes() == b"x" * 50_000
    assert again.end() == 0


@contextlib.contextmanager
def copied(place):
    """Another mount namespace, with a copy of the mount."""
    other = subprocess.Popen(["unshare", "-m", "--propagation", "private", "sleep", "1000"])
    try:
        wait_until(
            lambda: b"sleep" in Path(f"/proc/{other.pid}/cmdline").read_bytes()[:6], "the other name space"
        )
        assert str(place) in Path(f"/proc/{other.pid}/mountinfo").read_text()
        yield
    finally:
        other.kill()
        other.wait()


def test_umount_ends_the_daemon_despite_another_namespace(own, mine):
    (mine.place / "copied").write_bytes(b"c" * 50_000)
    with copied(mine.place):
        nvpool("umount", "--wait", "120", mine.place)
        assert mine.process.wait(120) == 0
    again = own.mount(mine.place)
    assert (again.place / "copied").read_bytes() == b"c" * 50_000
    assert again.end() == 0


def test_dev_down_ends_a_mount_in_another_namespace(tmp_path):
    made = Pool(tmp_path / "pool")
    there = made.mount(tmp_path / "m", "--drain-s", "1")
    with copied(there.place):
        subprocess.run(["umount", there.place], check=True, timeout=240)
        assert there.process.poll() is None
        made.mounts.clear()
        made.close()
        assert there.process.wait(120) == 0


def test_umount_keeps_its_time_limit_without_daemons(tmp_path):
    made = Pool(tmp_path / "pool")
    here = made.mount(tmp_path / "m")
    found = [process["pid"] for process in processes(made) if process["role"] != "mount"]
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(1.1)  # the kernel's caches have expired
        nvpool("umount", "--wait", "2", here.place)
        assert not is_mounted(here.place)
    finally:
        for pid in found:
            os.kill(pid, signal.SIGCONT)
    assert here.process.wait(120) == 0
    made.mounts.clear()
    made.close()


@pytest.fixture
def alone(own, request):
    """A mount without a holder."""
    made = own.mount(
        own.directory.parent / f"m-{request.node.name[-40:]}", "--deadline-s", "20", "--no-holder"
    )
    yield made
    made.end(signal.SIGKILL)


def test_killed_mount_is_replaced_by_force(own, alone):
    mine = alone
    (mine.place / "closed").write_bytes(b"k" * 70_000)
    mine.process.kill()
    mine.process.wait()
    with pytest.raises(OSError) as dead:
        os.stat(mine.place)
    assert dead.value.errno == errno.ENOTCONN
    assert "--force" in refused(own.directory, mine.place)
    again = subprocess.Popen(
        command(Program.MOUNT, "--force", own.directory, mine.place), cwd="/", stderr=subprocess.DEVNULL
    )
    try:
        wait_until(
            lambda: (
                subprocess.run(["stat", mine.place / "closed"], capture_output=True, check=False).returncode
                == 0
            ),
            "the mount that was forced",
        )
        assert (mine.place / "closed").read_bytes() == b"k" * 70_000
    finally:
        again.terminate()
        assert again.wait(120) == 0
    assert not is_mounted(mine.place)


def test_status_shows_a_dead_mount_until_its_cleanup(own, alone):
    mine = alone
    mine.process.kill()
    mine.process.wait()
    for _ in range(2):
        seen = json.loads(nvpool("status", own.directory, "--json").stdout)
        (dead,) = (process for process in seen["processes"] if process["state"] == "dead")
        assert (dead["role"], dead["pid"], dead["mountpoint"]) == ("mount", 0, str(mine.place))
        assert any(f"nvpool umount {mine.place}" in problem for problem in seen["problems"])
        assert seen["pool"]["state"] == "serving", "a dead client is no problem of the pool"
    nvpool("umount", mine.place)
    seen = json.loads(nvpool("status", own.directory, "--json").stdout)
    assert not seen["problems"] and not any(process["state"] == "dead" for process in seen["processes"])


def test_read_only_mount_refuses_changes(own, tmp_path):
    made = own.mount(tmp_path / "m", "--read-only")
    with pytest.raises(OSError) as refused_:
        (made.place / "x").touch()
    assert refused_.value.errno == errno.EROFS
    assert made.end() == 0


def all_serving(pool, role):
    """The pids of the daemons of the role, once each of them serves.

    A load may continue before, without a daemon that it does not need; until then `nvpool status` has exit code 3, and 0
    for the pid of a daemon that is not started yet.
    """
    found = []

    def serve():
        seen = subprocess.run(
            command(Program.CLI, "status", str(pool.directory), "--json"),
            capture_output=True,
            text=True,
            cwd="/",
            timeout=240,
            check=False,
        )
        assert seen.returncode in (0, 3), seen.stderr
        if seen.returncode:
            return False
        found[:] = [process for process in json.loads(seen.stdout)["processes"] if process["role"] == role]
        return all(process["pid"] and process["state"] == "serving" for process in found)

    wait_until(serve, f"serving daemons of role {role}")
    return [process["pid"] for process in found]


@pytest.mark.parametrize("role", ["meta", "store"])
def test_killed_daemon_is_only_a_pause(own, mine, role):
    with CheckingLoad(mine.place, threads=2, seed=1 if role == "meta" else 2) as load:
        for _ in range(3):
            load.goes_on()
            for pid in all_serving(own, role):
                os.kill(pid, signal.SIGKILL)
        load.goes_on()
    load.verify()


def test_mount_is_unmounted_after_the_death_of_all_daemons(tmp_path):
    made = Pool(tmp_path / "pool")
    here = made.mount(tmp_path / "m", "--deadline-s", "2", "--drain-s", "1")
    (here.place / "f").write_bytes(b"x")
    file = open(here.place / "f", "r+b", buffering=0)
    file.write(b"lost")
    kill_all(made)
    with pytest.raises(OSError) as failed:
        (here.place / "g").write_bytes(b"x")
    assert failed.value.errno in (errno.EIO, errno.ETIMEDOUT)
    subprocess.run(["umount", "-l", here.place], check=True, timeout=240)
    here.process.send_signal(signal.SIGTERM)
    here.process.wait(120)
    assert not is_mounted(here.place)
    with pytest.raises(OSError):
        file.write(b"x")
        os.fsync(file.fileno())
    with contextlib.suppress(OSError):
        file.close()
    made.mounts.clear()
    made.close()


def kill_all(pool):
    """Supervisor first, then the others, repeated until no process is left to start another supervisor."""
    found = {
        process["pid"] for process in processes(pool) if process["role"] in ("supervisor", "meta", "store")
    }
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)


def test_mount_program_has_help():
    said = subprocess.run(
        command(Program.MOUNT, "--help"), capture_output=True, text=True, cwd="/", check=True
    ).stdout
    assert "--read-only" in said and "--drain-s" in said


@contextlib.contextmanager
def silent_stores(own):
    stores = pids(own, "store")
    try:
        for pid in stores:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in stores:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["O_SYNC", "O_DSYNC", "RWF_DSYNC"])
def test_durable_append_returns_once_it_is_durable(own, mine, how):
    """The kernel sends no FSYNC after a write past its pages. The process is killed meanwhile, too."""
    sync = getattr(os, how)
    flags, each = (0, sync) if how.startswith("RWF") else (sync, 0)
    file = os.open(mine.place / how, os.O_CREAT | os.O_WRONLY | os.O_APPEND | flags)
    assert os.pwritev(file, [b"a" * 1000], 0, each) == 1000
    ended, process = [], serving(mine)
    work = threading.Thread(target=lambda: ended.append(os.pwritev(file, [b"b" * 1000], 0, each)))
    with silent_stores(own):
        work.start()
        work.join(0.7)
        assert not ended
        os.kill(process, signal.SIGKILL)
        work.join(2)
        assert not ended
    work.join(60)
    os.close(file)
    assert ended == [1000]
    assert (mine.place / how).read_bytes() == b"a" * 1000 + b"b" * 1000


@pytest.mark.parametrize("first", ["close", "fsync"])
def test_fsync_reports_an_error_that_close_reported_too(own, tmp_path, first):
    """As where another thread starts a program: its copies of descriptors are closed."""
    made = own.mount(tmp_path / "m", "--deadline-s", "3")
    file, results = os.open(made.place / "f", os.O_CREAT | os.O_WRONLY), {}
    copy = os.dup(file)

    def waits(call, one):
        try:
            results[call] = call(one)
        except OSError as error:
            results[call] = error.errno

    work = [threading.Thread(target=waits, args=each) for each in ((os.close, copy), (os.fsync, file))]
    with silent_stores(own):
        os.write(file, b"a" * 1000)
        for thread in work if first == "close" else work[::-1]:
            thread.start()
            time.sleep(0.3)
        for thread in work:
            thread.join(60)
    os.close(file)
    assert results[os.fsync] == errno.ETIMEDOUT, results
    assert made.end() == 0


@pytest.mark.parametrize("killed", [False, True], ids=["one-process", "killed-meanwhile"])
def test_each_open_file_sees_a_write_error_once(own, tmp_path, killed):
    """By fsync, also after a write or close reported it; files opened afterwards do not see it. errseq_t of Linux."""
    made = own.mount(tmp_path / "m", "--holder", "--deadline-s", "2")
    writer = os.open(made.place / "f", os.O_CREAT | os.O_WRONLY)
    other = os.open(made.place / "f", os.O_WRONLY)
    with silent_stores(own):
        os.write(writer, b"a" * 1000)
        with pytest.raises(OSError) as raised:
            os.close(os.dup(writer))
        assert raised.value.errno == errno.ETIMEDOUT
    if killed:
        kill_serving(made)
    later = os.open(made.place / "f", os.O_WRONLY)
    for file in (writer, other):
        with pytest.raises(OSError) as raised:
            os.fsync(file)
        assert raised.value.errno == (errno.EIO if killed else errno.ETIMEDOUT)
    for file in (later, writer, other):
        os.fsync(file)
        os.close(file)
    nvpool("umount", made.place)
