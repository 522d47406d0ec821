"""All threads of a process get the scheduling of node.toml; without the right, the part that needs none.

Each case runs in a process of its own, because a process without rights cannot take its nice value back.
"""

import os
import subprocess
import sys

import pytest

from nvpool.runtime.scheduling import AUTOGROUP, NICE, REALTIME_PRIORITY, SLICE_NS, attributes

PROGRAM = """
import logging, os, sys, threading
from nvpool.runtime.scheduling import attributes, schedule

logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
exec(sys.argv[2])
first, end = threading.Event(), threading.Event()
before = threading.Thread(target=lambda: (first.set(), end.wait()))
before.start()
first.wait()
print(schedule(sys.argv[1]))
after = threading.Thread(target=end.wait)
after.start()
for thread in (0, before.native_id, after.native_id):
    print(*attributes(thread))
end.set()
if os.fork() == 0:
    print(*attributes(), flush=True)
    os._exit(0)
sys.stdout.flush()
os.wait()
"""
WITHOUT_RIGHTS = "import resource; resource.setrlimit(resource.RLIMIT_NICE, (0, 0)); os.setuid(65534)"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority and give it up")
reports_slices = attributes().slice_ns != 0


def threads_under(wanted: str, before: str = "pass") -> tuple[bool, set[tuple[int, ...]], str]:
    """Return what `schedule` returned, the attributes of all threads and of a child, and the log."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, wanted, before],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd="/",
    )
    holds, *threads = done.stdout.split("\n")[:-1]
    # Standard output may hold what was not flushed before the fork twice, but nothing else.
    return holds == "True", {tuple(map(int, line.split())) for line in threads}, done.stderr


def session_of(wanted: str, *, start_new_session: bool) -> str:
    """Return the session of a process with its nice value, after `schedule`."""
    program = "import sys; from nvpool.runtime.scheduling import AUTOGROUP, schedule; schedule(sys.argv[1]); "
    return subprocess.run(
        [sys.executable, "-c", program + "print(AUTOGROUP.read_text())", wanted],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        start_new_session=start_new_session,
    ).stdout.strip()


def of(policy: int, nice: int, priority: int = 0, slice_ns: int = SLICE_NS) -> set[tuple[int, ...]]:
    return {(policy, nice, priority, slice_ns if reports_slices and policy == os.SCHED_OTHER else 0)}


def test_responsive_gives_every_thread_and_child_short_slices_and_keeps_its_share():
    holds, threads, said = threads_under("responsive", "os.nice(3)")
    assert holds and threads == of(os.SCHED_OTHER, os.nice(0) + 3) and not said


def test_normal_changes_nothing():
    own = attributes()
    holds, threads, _ = threads_under("normal")
    assert holds and threads == {(own.policy, own.nice, own.priority, own.slice_ns)}


@needs_root
def test_priority_is_nice_and_never_takes_a_better_one_away():
    holds, threads, _ = threads_under("priority")
    assert holds and threads == of(os.SCHED_OTHER, NICE)
    assert threads_under("priority", "os.setpriority(os.PRIO_PROCESS, 0, -20)")[1] == of(os.SCHED_OTHER, -20)


@needs_root
@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not share processors among sessions")
def test_priority_counts_for_a_session_of_its_own_only():
    assert session_of("priority", start_new_session=True).endswith(f" nice {NICE}")
    assert session_of("priority", start_new_session=False) == AUTOGROUP.read_text().strip()


@needs_root
def test_realtime_runs_before_ordinary_processes():
    holds, threads, _ = threads_under("realtime")
    assert holds and {thread[:3] for thread in threads} == {(os.SCHED_RR, 0, REALTIME_PRIORITY)}


@needs_root
@pytest.mark.parametrize("wanted, remedy", [("priority", "LimitNICE=-10"), ("realtime", "LimitRTPRIO=1")])
def test_without_the_right_slices_are_short_and_the_remedy_is_logged(wanted, remedy):
    holds, threads, said = threads_under(wanted, WITHOUT_RIGHTS)
    assert not holds and threads == of(os.SCHED_OTHER, os.nice(0))
    assert wanted in said and remedy in said


@pytest.mark.parametrize("wanted", ["responsive", "priority"])
def test_a_policy_that_an_operator_has_set_stays(wanted):
    holds, threads, _ = threads_under(wanted, "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))")
    assert holds and {thread[0] for thread in threads} == {os.SCHED_BATCH}
