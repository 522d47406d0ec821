"""For the whole suite: nothing that a test started outlives the run.

Each process that a test starts inherits a mark in its environment; what still has it at the end is named, ended, and fails the
run. So does a mount of nvpool that was not there before (on a machine of its own, CI=true; elsewhere it may be somebody's).

A shell without job control starts what it puts into the background with SIGINT ignored, and all below it inherits that: tests
that interrupt a program would see nothing happen. Here it is as in a terminal again, for the tests and what they start.

Each test belongs to a tier, by its folder or by the marker of its module: T0 is lint and the rules of the house, T1 runs in
process, T2 on real mounts, T3 starts pools of processes, nodes, containers. Files run in the order of `tests/durations.json`,
the longest first, so that no worker runs alone for long at the end.

NVPOOL_TEST_FAILED_FILE names a file for what failed, a line each, in the words that pytest takes to run it again; what must
not be forgiven by running it again begins with "never again: ".
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest

MARK = "NVPOOL_TEST_RUN"
ENDING_S = 15.0
"""Daemons that were told to stop may take their time to drain."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FAILED_FILE = "NVPOOL_TEST_FAILED_FILE"
LEFT = pytest.StashKey[list[str]]()
MOUNTS = pytest.StashKey[set[str]]()
FAILED = pytest.StashKey[dict[str, None]]()
TOLD_IN = pytest.StashKey[str | None]()


TIERS = {
    "house": "t0",
    "unit": "t1",
    "contract": "t1",
    "model": "t1",
    "fuse": "t2",
    "cluster": "t3",
    "bridge": "t3",
    "packaging": "t3",
}
"""Folder of tests -> tier of its tests, where neither the test nor its module has a tier's marker."""
TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.json"


def tier_of(item):
    named = {mark.name for mark in item.iter_markers()} & set(TIERS.values())
    assert len(named) < 2, f"{item.nodeid} is marked with {named}"
    if named:
        return named.pop()
    return TIERS.get(item.path.relative_to(TESTS).parts[0]) if item.path.is_relative_to(TESTS) else None


def pytest_itemcollected(item):
    tier = tier_of(item)
    if tier is not None and item.get_closest_marker(tier) is None:
        item.add_marker(tier)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Sort files by how long they took when `tools/record_durations.py` was run last; unknown ones come first."""
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], float("inf")))


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        return
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    config.stash[MOUNTS] = nvpool_mounts()
    config.stash[TOLD_IN] = os.environ.pop(FAILED_FILE, None)  # not for a run that a test of ours makes
    config.stash[FAILED] = {}
    config.pluginmanager.register(FailedOnes(config.stash[FAILED]))


class FailedOnes:
    """What failed, in order. What a file's fixtures find at their end is the file's, not its last test's."""

    def __init__(self, found):
        self.found = found

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.found[report.nodeid.partition("::")[0] if report.when == "teardown" else report.nodeid] = (
                None
            )

    def pytest_collectreport(self, report):
        if report.failed:
            self.found[f"never again: {report.nodeid} can not be collected"] = None


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
    if place := session.config.stash[TOLD_IN]:
        failed = [*session.config.stash[FAILED], *(f"never again: left behind {line}" for line in left)]
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            failed.append(f"never again: the run ended with {session.exitstatus!r}")
        Path(place).write_text("".join(f"{line}\n" for line in failed))


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
                command = (
                    (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                if command and "execnet" not in command:
                    found[int(place.name)] = command
        except OSError:
            continue  # gone meanwhile, or not ours to look at
    return found


def nvpool_mounts():
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        return {line.split(" ")[4] for line in file if " - fuse" in line and "nvpool" in line}
