"""Real processes of a real pool: starts, restarts after a death, and that no daemon ever runs twice.

One pool for the tests that leave it as they found it; tests that need another one create it.
"""

import asyncio
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from nvpool.cli.pool_connection import status_of
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import Unavailable
from nvpool.core.programs import Program, command, command_line, processes, program_of
from nvpool.host.pool_directory import PoolDirectory, holder_of
from nvpool.host.process_identity import identity_of
from nvpool.poolmap.model import decode_map
from nvpool.testing.env.pool import PLAIN_TCP

SIZES = ("--size", "128M", "--size", "192M")


def nvpool(*arguments, code: int | None = 0, wait_s: float = 240) -> subprocess.CompletedProcess:
    done = subprocess.run(
        command(Program.CLI, *map(str, arguments)),
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )
    assert code is None or done.returncode == code, (arguments, done)
    return done


def status(directory, wait_s: float = 60.0) -> dict:
    """The output of `nvpool status --json`, without starting a program for it."""
    return asyncio.run(status_of(str(directory), wait_s))


def pids(directory) -> dict[str, int]:
    return {
        process.get("name", process["role"]): process["pid"] for process in status(directory)["processes"]
    }


def until(holds, what: str, wait_s: float = 120.0):
    """The result of `holds` once that is true."""
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    while not (found := holds()):
        assert SYSTEM_CLOCK.boottime_s() < deadline_s, f"not within {wait_s} s: {what}"
        threading.Event().wait(0.05)
    return found


def all_serve(directory) -> dict:
    def look():
        try:
            seen = status(directory, 10.0)
        except Unavailable:
            return None
        return seen if all(process["state"] == "serving" for process in seen["processes"]) else None

    return until(look, "all processes serve")


def shown_with(directory, states: dict[str, str]) -> dict | None:
    """The output of `nvpool status` if the processes have these states. On a busy machine others may be silent, too."""
    seen = json.loads(nvpool("status", directory, "--json", "--check", code=3).stdout)
    return seen if {p["name"]: p["state"] for p in seen["processes"] if "name" in p} == states else None


def processes_of(directory) -> list[int]:
    """Every process of this pool, whichever process started it."""
    return sorted(pid for pid, _ in processes(naming=directory) if identity_of(pid) is not None)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process and, if that kills it, wait until it is gone."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, number)
        if number == signal.SIGKILL:
            assert select.select([pidfd], [], [], 60)[0]
    finally:
        os.close(pidfd)


def kill_all(directory) -> None:
    """Kill all together: they are stopped first, so that none can start another one."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in processes_of(directory):
            kill(pid, number)


def clean_up(directory: Path) -> None:
    """Remove every process and file of the pool after a test."""
    nvpool("dev", "down", directory, code=None)
    kill_all(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shared") / "pool"
    nvpool("dev", "up", directory, *SIZES)
    yield directory
    clean_up(directory)


@pytest.fixture
def pool(shared):
    """The shared pool with everything running, whatever state the last test left."""
    nvpool("dev", "up", shared)
    return shared


@pytest.fixture
def own(tmp_path):
    yield tmp_path / "pool"
    clean_up(tmp_path / "pool")


def test_status_lists_every_process(pool):
    all_serve(pool)
    seen = json.loads(nvpool("status", pool, "--json").stdout)
    assert sorted(process["role"] for process in seen["processes"]) == [
        "meta",
        "store",
        "store",
        "supervisor",
    ]
    assert sorted(process["pid"] for process in seen["processes"]) == processes_of(pool)
    assert seen["problems"] == [] and seen["pool"]["state"] == "serving"
    assert [drive["capacity_bytes"] >> 20 for drive in seen["drives"]] == [128, 192]
    assert all(drive["in_use"] for drive in seen["drives"])
    assert nvpool("status", pool, "--check").returncode == 0


def test_status_shows_the_read_path_of_drives(own, tmp_path):
    (tmp_path / "node.toml").write_text("[store]\ndirect = true\nreads = 'executor'\n")
    nvpool("dev", "up", own, "--size", "64M", "--config", tmp_path / "node.toml")
    store = next(process for process in status(own)["processes"] if process["role"] == "store")
    assert (store["read_path"], store["direct"]) == ("executor", True)
    assert "directory, executor, O_DIRECT" in nvpool("status", own).stdout


def test_pool_of_one_machine_listens_on_unix_sockets(pool):
    pool_map = decode_map(PoolDirectory(pool).poolmap.read_bytes())
    for daemon in (*pool_map.nodes, *pool_map.targets, *pool_map.shards):
        assert [endpoint.partition("://")[0] for endpoint in daemon.endpoints] == ["stream+unix"]
    listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    assert not [pid for pid in pids(pool).values() if f"pid={pid}," in listening]
    assert status(pool_map.nodes[0].endpoints[0])["pool"]["directory"] == str(pool)


def test_pool_is_reached_by_every_address_it_is_given(own, tmp_path):
    (tmp_path / "node.toml").write_text(PLAIN_TCP)
    nvpool("dev", "up", own, "--size", "64M", "--config", tmp_path / "node.toml")
    tcp = next(
        e
        for e in decode_map(PoolDirectory(own).poolmap.read_bytes()).nodes[0].endpoints
        if e.startswith("stream://")
    )
    for named in (own, tcp, tcp.removeprefix("stream://")):
        assert status(named)["pool"]["directory"] == str(own)
    seen = status(own)
    (found,) = seen["health"]["problems"]
    assert not seen["problems"]
    assert (found["kind"], found["severity"]) == ("plain-text", "notice") and "plain_text = false" in found[
        "remedy"
    ]


def test_loopback_endpoints_of_an_older_map_are_removed(own, tmp_path):
    """With the map of a version in which loopback was the default."""
    (tmp_path / "node.toml").write_text('[network]\nhost = "127.0.0.1"\n')
    nvpool("dev", "up", own, "--size", "64M", "--config", tmp_path / "node.toml")
    kill_all(own)
    before = decode_map(PoolDirectory(own).poolmap.read_bytes())
    assert (
        len(before.targets[0].endpoints)
        == len(before.shards[0].endpoints)
        == len(before.nodes[0].endpoints)
        == 3
    )
    (own / "node.toml").write_text("")
    nvpool("dev", "up", own)
    after = decode_map(PoolDirectory(own).poolmap.read_bytes())
    for old, new in zip(
        (*before.nodes, *before.targets, *before.shards),
        (*after.nodes, *after.targets, *after.shards),
        strict=True,
    ):
        assert new.endpoints == old.endpoints[:1]
    listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    assert not [pid for pid in pids(own).values() if f"pid={pid}," in listening]


def test_second_daemon_is_refused_with_the_first_ones_pid(pool):
    first = pids(pool)["supervisor"]
    for words in (command(Program.SUPERVISOR, str(pool)), command(Program.CLI, "serve", str(pool))):
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 1 and f"in use by process {first}" in done.stderr
    assert pids(pool)["supervisor"] == first


@pytest.mark.smoke
def test_killed_child_is_restarted_and_counted(pool):
    before = pids(pool)
    for name in ("meta-1", "target-1", "target-2"):
        kill(before[name])
    seen = all_serve(pool)
    for process in seen["processes"]:
        if process["role"] != "supervisor":
            assert process["pid"] != before[process["name"]] and process["restarts"] >= 1
            assert process["last_end"] == "killed by SIGKILL"
    assert len(processes_of(pool)) == 4


def test_killed_supervisor_is_replaced_and_adopts_all(pool):
    before = pids(pool)
    kill(before["supervisor"])
    seen = all_serve(pool)
    after = {process.get("name", process["role"]): process["pid"] for process in seen["processes"]}
    assert after.pop("supervisor") != before.pop("supervisor") and after == before, (
        "no child was started a second time"
    )
    assert all(process["adopted"] for process in seen["processes"] if process["role"] != "supervisor")
    assert len(processes_of(pool)) == 4


def test_lock_is_held_through_repeated_kills(pool):
    directory, free, ended = PoolDirectory(pool), [], threading.Event()
    supervisors = set()

    def watch() -> None:
        """Try to share the lock: that succeeds only while no process has it.

        At most the moment between a death and the wake-up of the next waiting process is seen. So the test checks which
        process has the lock afterwards, and that there is one at a time.
        """
        while not ended.wait(0.002):
            holder = holder_of(directory.lock)
            if holder is not None:
                supervisors.add(holder.pid)
            running = [
                pid for pid in processes_of(pool) if program_of(command_line(pid)) is Program.SUPERVISOR
            ]
            if len(running) > 1:
                free.append(running)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(3):
            all_serve(pool)
            kill(pids(pool)["supervisor"])
        all_serve(pool)
    finally:
        ended.set()
        watcher.join()
    serving = [both for both in free if len([pid for pid in both if _has_lock_open(pid, directory.lock)]) > 1]
    assert not [both for both in serving if all(identity_of(pid) for pid in both)], (
        "two supervisors at the same time"
    )
    assert len(supervisors) >= 4


def _has_lock_open(pid: int, path: Path) -> bool:
    try:
        return any(os.path.samefile(f"/proc/{pid}/fd/{fd}", path) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def test_child_killed_without_a_supervisor_is_restarted(pool):
    before = pids(pool)
    for name in ("supervisor", "target-1"):
        kill(before[name])
    seen = all_serve(pool)
    after = {process.get("name", process["role"]): process["pid"] for process in seen["processes"]}
    assert after["target-1"] != before["target-1"] and after["meta-1"] == before["meta-1"]
    assert len(processes_of(pool)) == 4


def test_pool_starts_again_after_the_death_of_all(pool):
    kill_all(pool)
    assert processes_of(pool) == []
    done = nvpool("status", pool, "--wait", "0.3", code=3)
    assert "does not answer" in done.stderr and f"nvpool dev up {pool}" in done.stderr
    nvpool("dev", "up", pool)
    assert len(processes_of(pool)) == 4


def test_stopped_supervisor_keeps_its_lock(pool):
    supervisor = pids(pool)["supervisor"]
    kill(supervisor, signal.SIGSTOP)
    try:
        with open(PoolDirectory(pool).lock) as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert nvpool("status", pool, "--wait", "0.5", code=None).returncode == 3
    finally:
        kill(supervisor, signal.SIGCONT)
    assert all_serve(pool)["processes"][0]["pid"] == supervisor


def test_silent_process_is_shown_as_silent(pool):
    stopped = pids(pool)["target-1"]
    kill(stopped, signal.SIGSTOP)
    try:
        states = {"meta-1": "serving", "target-1": "silent", "target-2": "serving"}
        seen = until(lambda: shown_with(pool, states), "one is silent, the others serve")
        (silent,) = (one for one in seen["health"]["problems"] if one["kind"] == "process-down")
        assert (
            seen["pool"]["state"] == "degraded"
            and silent["name"] == "target-1"
            and " is silent" in silent["reason"]
        )
        assert f"kill -9 {stopped}" in silent["remedy"]
    finally:
        kill(stopped, signal.SIGCONT)
    assert {p["name"]: p["pid"] for p in all_serve(pool)["processes"] if "name" in p}["target-1"] == stopped


def test_low_descriptor_limit_is_refused_with_the_remedy(own):
    nvpool("dev", "up", own, "--size", "128M")
    kill_all(own)
    done = subprocess.run(
        [
            "bash",
            "-c",
            'ulimit -n 40; exec "$0" "$@"',
            *command(Program.SUPERVISOR),
            str(own),
            "--log",
            "stderr",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1 and "LimitNOFILE" in done.stderr and processes_of(own) == []


def test_sigterm_stops_every_process_and_leaves_no_state(pool):
    supervisor = pids(pool)["supervisor"]
    kill(supervisor, signal.SIGTERM)
    until(lambda: processes_of(pool) == [], "all have ended")
    directory = PoolDirectory(pool)
    until(
        lambda: directory.supervisor() is None,
        "no process waits for the exit code of the supervisor any more",
    )
    assert list(directory.run.glob("*.json")) == []
    log = (directory.log / "nvpoold.log").read_text().splitlines()
    assert log[-1].endswith("stopped")
    for name in ("meta-1", "target-1", "target-2"):
        assert (directory.log / f"{name}.log").read_text().splitlines()[-1].endswith("stopped"), name


def test_serve_ends_on_ctrl_c_and_notifies_systemd(pool, tmp_path):
    import socket

    kill(pids(pool)["supervisor"], signal.SIGTERM)
    until(lambda: processes_of(pool) == [], "all have ended")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(120)
        daemon = subprocess.Popen(
            command(Program.CLI, "serve", str(pool), "--log", "stderr"),
            stderr=subprocess.PIPE,
            env=os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")},
        )
        while (notification := systemd.recv(1000)).startswith(b"EXTEND_TIMEOUT_USEC="):
            pass
        assert notification.startswith(b"READY=1")
        daemon.send_signal(signal.SIGINT)
        _, said = daemon.communicate(timeout=240)
    assert daemon.returncode == 0 and b"stopping: SIGINT" in said
    assert processes_of(pool) == []


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda d: d.format.write_text("nvpool pool 2\n"), "nvpool pool 2"),
        (
            lambda d: d.node_toml.write_text("[log]\nlevl = 'info'\n"),
            "line 2: log.levl is unknown; did you mean level?",
        ),
        (lambda d: d.node_toml.unlink(), "nvpool config sample"),
        (lambda d: shutil.rmtree(d.map), "map"),
        (
            lambda d: (d.target(1) / "FORMAT").write_text("nvpool chunk store 7\n"),
            "use the version of nvpool that made it",
        ),
    ],
)
def test_pool_that_cannot_be_served_is_refused(own, damage, said):
    made = {
        "verb": "pool",
        "directory": str(own),
        "name": "x",
        "chunk_bytes": 1 << 20,
        "replicas": 1,
        "config": "",
        "drives": [{"path": str(own / "targets" / "1"), "capacity_bytes": 128 << 20}],
        "throw_away": True,
    }
    subprocess.run(
        command(Program.POOL_MAKER),
        input=json.dumps(made),
        text=True,
        check=True,
        timeout=240,
        stdout=subprocess.DEVNULL,
    )
    damage(PoolDirectory(own))
    done = subprocess.run(
        command(Program.SUPERVISOR, str(own), "--log", "stderr"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode in (1, 2, 4) and said in done.stderr, done
    assert "Traceback" not in done.stderr and processes_of(own) == []


@pytest.mark.parametrize("part, daemon", [("targets/2/index", "target-2"), ("meta/shard-1", "meta-1")])
def test_part_of_another_version_is_reported_and_refused(pool, part, daemon):
    path = pool / part / "FORMAT"
    right = path.read_text()
    wrong = right.replace("1", "7")
    path.write_text(wrong)
    try:
        kill(pids(pool)[daemon])
        said = until(
            lambda: next((p for p in status(pool)["problems"] if wrong.strip() in p), None),
            "the status says why",
        )
        assert (
            daemon in said and "does not start" in said and "use the version of nvpool that made it" in said
        )
        kill_all(pool)
        notification = nvpool("dev", "up", pool, code=1).stderr
        assert (
            wrong.strip() in notification and "use the version" in notification and processes_of(pool) == []
        )
        assert wrong.strip() in nvpool("serve", pool, code=1).stderr
    finally:
        path.write_text(right)
    nvpool("dev", "up", pool)
    assert status(pool)["problems"] == []
