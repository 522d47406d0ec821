"""Rules for the whole suite: clean-up after tests, tiers, order of files, and a list of failed tests.

Each process that a test starts inherits a mark in its environment. A process that still has the mark at the end is listed,
killed, and fails the run. So does a new mount of nvpool, if CI=true: elsewhere the mount may belong to another user.

A shell without job control starts background processes with SIGINT ignored, and all their children inherit that: tests that
interrupt a program would have no effect. So SIGINT gets its default handler here, for the tests and their children.

Each test belongs to a tier, by its folder or by the marker of its module: T0 is lint and the rules of the house, T1 runs in
process, T2 on real mounts, T3 starts pools of processes, nodes, containers. Files run in the order of `tests/durations.json`,
the longest first, so that no worker runs alone for long at the end.

A run with NVPOOL_PURE=1, which loads no compiled module, skips the tests with the marker `compiled`.

NVPOOL_TEST_FAILED_FILE names a file for the failed tests, one a line, in the form that pytest accepts to run them again; a
failure that a second run must not excuse begins with "never again: ".
"""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from nvpool.core.compiled_loader import IS_PURE, PURE_VARIABLE

settings.register_profile("nvpool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nvpool")
"""A busy machine must not fail a test: hypothesis measures no times."""

MARK = "NVPOOL_TEST_RUN"
ENDING_S = 15.0
"""Time for stopping daemons, which may have to drain."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FAILED_FILE = "NVPOOL_TEST_FAILED_FILE"
LEFT = pytest.StashKey[list[str]]()
MOUNTS = pytest.StashKey[set[str]]()
FAILED = pytest.StashKey[dict[str, None]]()
FAILED_PATH = pytest.StashKey[str | None]()


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


PARAMETERS_SEEN = Counter()
"""Test function -> how many of its parameter sets were collected."""


def pytest_itemcollected(item):
    tier = tier_of(item)
    if tier is not None and item.get_closest_marker(tier) is None:
        item.add_marker(tier)
    if IS_PURE and item.get_closest_marker("compiled"):
        item.add_marker(
            pytest.mark.skip(reason=f"the compiled modules are not loaded: {PURE_VARIABLE} is set")
        )
    if few := item.get_closest_marker("few"):
        function = item.nodeid.partition("[")[0]
        PARAMETERS_SEEN[function] += 1
        if PARAMETERS_SEEN[function] > few.args[0]:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "smoke"]
            item.add_marker("t3")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Sort files by their durations in the last run of `tools/record_durations.py`; unknown files come first."""
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], float("inf")))


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        return
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    config.stash[MOUNTS] = nvpool_mounts()
    config.stash[FAILED_PATH] = os.environ.pop(FAILED_FILE, None)  # not for a pytest run that a test starts
    config.stash[FAILED] = {}
    config.pluginmanager.register(FailedTests(config.stash[FAILED]))


class FailedTests:
    """Failed tests, in order. A failure in the teardown of a file's fixtures counts for the file, not for its last test."""

    def __init__(self, found):
        self.found = found

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.found[report.nodeid.partition("::")[0] if report.when == "teardown" else report.nodeid] = (
                None
            )

    def pytest_collectreport(self, report):
        if report.failed:
            self.found[f"never again: {report.nodeid} cannot be collected"] = None


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
    if place := session.config.stash[FAILED_PATH]:
        failed = [*session.config.stash[FAILED], *(f"never again: left behind {line}" for line in left)]
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            failed.append(f"never again: the run ended with {session.exitstatus!r}")
        Path(place).write_text("".join(f"{line}\n" for line in failed))


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"LEFT BEHIND {line}", red=True)


def marked_processes():
    """pid -> command of each process with our mark, except this process and the workers of xdist."""
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
            continue  # ended meanwhile, or not readable by us
    return found


def nvpool_mounts():
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        return {line.split(" ")[4] for line in file if " - fuse" in line and "nvpool" in line}
