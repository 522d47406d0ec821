"""For the whole suite: nothing that a test started outlives the run.

Each process that a test starts inherits a mark in its environment; what still has it at the end is named, ended, and fails the
run. So does a mount of nvpool that was not there before (on a machine of its own, CI=true; elsewhere it may be somebody's).
"""

import os
import signal
import time
from pathlib import Path

import pytest

MARK = "NVPOOL_TEST_RUN"
ENDING_S = 15.0
"""Daemons that were told to stop may take their time to drain."""

LEFT = pytest.StashKey[list[str]]()
MOUNTS = pytest.StashKey[set[str]]()


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        return
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    config.stash[MOUNTS] = nvpool_mounts()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        return
    deadline = time.monotonic() + ENDING_S
    while (found := marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = []
    for pid, name in found.items():
        left.append(f"process {pid}: {name}")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if os.environ.get("CI"):
        left += [f"mount {place}" for place in sorted(nvpool_mounts() - session.config.stash[MOUNTS])]
    session.config.stash[LEFT] = left
    if left and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"LEFT BEHIND {line}", red=True)


def marked_processes():
    """pid -> command of each process with our mark, this one and the workers of xdist excepted."""
    mark, found = f"{MARK}={os.environ[MARK]}".encode(), {}
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            if mark in (place / "environ").read_bytes().split(b"\0"):
                command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command and "execnet" not in command:
                    found[int(place.name)] = command
        except OSError:
            continue  # gone meanwhile, or not ours to look at
    return found


def nvpool_mounts():
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        return {line.split(" ")[4] for line in file if " - fuse" in line and "nvpool" in line}
