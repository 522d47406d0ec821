"""nvpoold as systemd runs it: it tells when it serves and that it goes on, has no capabilities, makes the calls of the kernel
that its unit allows; its log is JSON, whose level changes while it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from nvpool.testing.real_pool import RealPool

UNIT = Path(__file__).resolve().parents[2] / "systemd" / "nvpoold.service"
JSON_LOG = '[log]\nformat = "json"\n'


@pytest.fixture
def told(tmp_path):
    """What systemd would hear."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        yield listener


def until_told(told: socket.socket, wanted: str) -> list[str]:
    heard: list[str] = []
    while not any(wanted in text for text in heard):
        heard.append(told.recv(4096).decode())
    return heard


def lines_of(pool: RealPool, name: str) -> list[dict]:
    return [json.loads(line) for line in (pool.directory.log / f"{name}.log").read_text().splitlines()]


def write_and_read(pool: RealPool) -> None:
    with pool.connect() as system:
        system.mkdir("/d")
        with system.open("/d/a", "wb") as file:
            file.write(os.urandom(3 << 20))
            file.flush()
        with system.open("/d/a", "rb") as file:
            assert len(file.read()) == 3 << 20


def test_systemd_hears_when_it_serves_that_it_goes_on_and_when_it_ends_and_needs_no_capability(tmp_path, told):
    closed = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs") if os.geteuid() == 0 else ()
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}, prefix=closed)
        assert "EXTEND_TIMEOUT_USEC=" in "".join(until_told(told, "READY=1"))
        until_told(told, "WATCHDOG=1")
        write_and_read(pool)
        supervisor = pool.pid("supervisor")
        if closed:
            assert re.search(r"^CapEff:\s*0+$", Path(f"/proc/{supervisor}/status").read_text(), re.M)
        os.kill(supervisor, signal.SIGSTOP)  # a loop that stands says nothing
        told.settimeout(0.0)
        try:
            while told.recv(4096):
                pass
        except BlockingIOError:
            pass
        time.sleep(0.5)
        with pytest.raises(BlockingIOError):
            told.recv(4096)
        os.kill(supervisor, signal.SIGCONT)
        told.settimeout(60)
        until_told(told, "WATCHDOG=1")
        pool.stop()
        until_told(told, "STOPPING=1")


def test_a_supervisor_that_dies_is_begun_again_by_systemd_and_takes_over_what_serves(tmp_path, told):
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        serving = {process["pid"] for process in pool.status()["processes"]} - {pool.pid("supervisor")}
        os.kill(pool.pid("supervisor"), signal.SIGKILL)
        pool.start({"NOTIFY_SOCKET": str(tmp_path / "notify")})  # as Restart= does
        assert {process["pid"] for process in pool.status()["processes"]} - {pool.pid("supervisor")} == serving
        assert "--inherit-lock" not in Path(f"/proc/{pool.pid('supervisor')}/cmdline").read_text()
        write_and_read(pool)


def test_the_log_is_json_and_its_level_changes_while_daemons_run(tmp_path):
    with RealPool(tmp_path / "pool", config=JSON_LOG) as pool:
        pool.make()
        pool.start()
        before = lines_of(pool, "nvpoold")
        assert all({"time", "level", "process", "pid", "logger", "message"} <= line.keys() for line in before)
        assert before[0]["process"] == "nvpoold" and before[0]["level"] == "info"
        pool.directory.node_toml.write_text(JSON_LOG + 'level = "debug"\n')
        pids = sorted(process["pid"] for process in pool.status()["processes"])
        os.kill(pool.pid("supervisor"), signal.SIGHUP)
        for name in ("nvpoold", "meta-1", "target-1"):
            pool.until(lambda name=name: any("level of the log is debug" in line["message"] for line in lines_of(pool, name)),
                       f"{name} has taken the level")
        pool.directory.node_toml.write_text('[log]\nlevel = "loud"\n')
        os.kill(pool.pid("supervisor"), signal.SIGHUP)
        pool.until(lambda: any("stays" in line["message"] and line["level"] == "warning" for line in lines_of(pool, "meta-1")),
                   "what is wrong is said")
        assert sorted(process["pid"] for process in pool.status()["processes"]) == pids, "nobody ended of it"
        pool.directory.node_toml.write_text(JSON_LOG)


def allowed_calls() -> set[str]:
    """What SystemCallFilter= of the unit leaves."""
    def named(words: list[str]) -> set[str]:
        found: set[str] = set()
        for word in words:
            if not word.startswith("@"):
                found.add(word)
                continue
            listed = subprocess.run(["systemd-analyze", "syscall-filter", "--no-pager", word], capture_output=True, text=True,
                                    timeout=60, check=True).stdout
            found |= named([line.strip() for line in listed.splitlines()[1:] if line.strip() and "#" not in line])
        return found

    allowed: set[str] = set()
    for line in re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.M):
        words = line.lstrip("~").split()
        allowed = allowed - named(words) if line.startswith("~") else allowed | named(words)
    return allowed


def test_the_unit_allows_every_call_of_the_kernel_that_the_daemons_make(tmp_path):
    if missing := [name for name in ("strace", "systemd-analyze") if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    seen = tmp_path / "calls"
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start(prefix=("strace", "-f", "-qq", "-c", "-S", "name", "-o", str(seen)))
        write_and_read(pool)
        pool.stop()
        pool.until(lambda: seen.exists() and "total" in seen.read_text(), "strace has told")
    made = {line.split()[-1] for line in seen.read_text().splitlines()[2:] if line.startswith(" ")} - {"total"}
    assert {"read", "openat", "epoll_wait"} & made or "io_uring_enter" in made
    assert made - allowed_calls() == set()
