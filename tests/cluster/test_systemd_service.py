"""nvpoold as a systemd service: notifications, no capabilities, only the system calls that its unit allows; JSON log."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from nvpool.testing.env.pool import RealPool

UNIT = Path(__file__).resolve().parents[2] / "systemd" / "nvpoold.service"
JSON_LOG = '[log]\nformat = "json"\n'


class FakeSystemd:
    """Receives notifications as systemd does. Reads all the time: a socket queues ten messages, and further senders wait."""

    def __init__(self, path: Path) -> None:
        self._heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._listener.bind(str(path))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while text := self._listener.recv(4096).decode():
            self._heard.put(text)

    def until(self, wanted: str, deadline_s: float = 60.0) -> str:
        """All messages up to the wanted one."""
        heard, ends = "", time.monotonic() + deadline_s
        while wanted not in heard:
            heard += self._heard.get(timeout=max(0.0, ends - time.monotonic())) + "\n"
        return heard

    def forget(self) -> None:
        while not self._heard.empty():
            self._heard.get()

    def silent(self) -> bool:
        return self._heard.empty()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's recv
        self._thread.join(10)
        self._listener.close()


@pytest.fixture
def systemd(tmp_path):
    with contextlib.closing(FakeSystemd(tmp_path / "notify")) as systemd:
        yield systemd


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


def test_systemd_is_notified_and_no_capability_is_needed(tmp_path, systemd):
    closed = (
        ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs") if os.geteuid() == 0 else ()
    )
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}, prefix=closed)
        assert "EXTEND_TIMEOUT_USEC=" in systemd.until("READY=1")
        systemd.until("WATCHDOG=1")
        write_and_read(pool)
        supervisor = pool.pid("supervisor")
        if closed:
            assert re.search(r"^CapEff:\s*0+$", Path(f"/proc/{supervisor}/status").read_text(), re.M)
        os.kill(supervisor, signal.SIGSTOP)  # a stopped event loop sends nothing
        time.sleep(0.1)  # messages under way arrive
        systemd.forget()
        time.sleep(0.5)
        assert systemd.silent()
        os.kill(supervisor, signal.SIGCONT)
        systemd.until("WATCHDOG=1")
        pool.stop()
        systemd.until("STOPPING=1")


def test_restarted_supervisor_takes_over_serving_daemons(tmp_path, systemd):
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        serving = {process["pid"] for process in pool.status()["processes"]} - {pool.pid("supervisor")}
        os.kill(pool.pid("supervisor"), signal.SIGKILL)
        pool.start({"NOTIFY_SOCKET": str(tmp_path / "notify")})  # as Restart= does
        assert {process["pid"] for process in pool.status()["processes"]} - {
            pool.pid("supervisor")
        } == serving
        assert "--inherit-lock" not in Path(f"/proc/{pool.pid('supervisor')}/cmdline").read_text()
        write_and_read(pool)


def test_second_death_of_a_supervisor_is_left_to_systemd(tmp_path, systemd):
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        first = time.monotonic()
        os.kill(pool.pid("supervisor"), signal.SIGKILL)
        pool.start({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        time.sleep(max(0.0, first + 12.0 - time.monotonic()))
        os.kill(pool.pid("supervisor"), signal.SIGKILL)
        time.sleep(
            6.0
        )  # children that wait 15 s from the first death would start a supervisor outside of the unit
        assert "starting another one" not in pool.said(lines=200)
        pool.start({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert "--inherit-lock" not in Path(f"/proc/{pool.pid('supervisor')}/cmdline").read_text()


@pytest.mark.smoke
def test_log_is_json_and_its_level_changes_at_run_time(tmp_path):
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
            pool.until(
                lambda name=name: any(
                    "level of the log is debug" in line["message"] for line in lines_of(pool, name)
                ),
                f"{name} has taken the level",
            )
        pool.directory.node_toml.write_text('[log]\nlevel = "loud"\n')
        os.kill(pool.pid("supervisor"), signal.SIGHUP)
        pool.until(
            lambda: any(
                "stays" in line["message"] and line["level"] == "warning" for line in lines_of(pool, "meta-1")
            ),
            "what is wrong is said",
        )
        assert sorted(process["pid"] for process in pool.status()["processes"]) == pids, "no process ended"
        pool.directory.node_toml.write_text(JSON_LOG)


def allowed_calls() -> set[str]:
    """The system calls that SystemCallFilter= of the unit leaves."""

    def named(words: list[str]) -> set[str]:
        found: set[str] = set()
        for word in words:
            if not word.startswith("@"):
                found.add(word)
                continue
            listed = subprocess.run(
                ["systemd-analyze", "syscall-filter", "--no-pager", word],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
            found |= named(
                [line.strip() for line in listed.splitlines()[1:] if line.strip() and "#" not in line]
            )
        return found

    allowed: set[str] = set()
    for line in re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.M):
        words = line.lstrip("~").split()
        allowed = allowed - named(words) if line.startswith("~") else allowed | named(words)
    return allowed


def test_unit_allows_every_system_call_of_the_daemons(tmp_path):
    if missing := [name for name in ("strace", "systemd-analyze") if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    seen = tmp_path / "calls"
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start(prefix=("strace", "-f", "-qq", "-c", "-S", "name", "-o", str(seen)))
        write_and_read(pool)
        pool.stop()
        pool.until(lambda: seen.exists() and "total" in seen.read_text(), "strace has written its summary")
    made = {line.split()[-1] for line in seen.read_text().splitlines()[2:] if line.startswith(" ")} - {
        "total"
    }
    assert {"read", "openat", "epoll_wait"} & made or "io_uring_enter" in made
    assert made - allowed_calls() == set()
