"""Processes of a mount are killed every half second in any state: no application sees an error or a wrong byte.

Victims are the serving process, one of two, the holder, the forkserver and the process that writes notifications. Kills and
pauses are printed:

    .venv/bin/python -m pytest -p no:cacheprovider -s -m soak tests/fuse/test_mount_kills.py   a minute of each load (make soak)
    .venv/bin/python -m pytest -p no:cacheprovider -s tests/fuse/test_mount_kills.py           four seconds of each
"""

import pytest

from nvpool.core.programs import Program
from nvpool.fuse.engines import RESEND_MIN, kernel_version
from tests.fuse.conftest import FLOOR
from tests.fuse.kill_loads import LOADS, Killer, end

pytestmark = [
    pytest.mark.t3,
    pytest.mark.mount,
    pytest.mark.skipif(FLOOR, reason="the floor has no daemons"),
    pytest.mark.skipif(kernel_version() < RESEND_MIN, reason="this kernel does not hand requests out again"),
]

VICTIMS = {
    "serving": ((Program.MOUNT,), ()),
    "old-kernel": ((Program.MOUNT,), ("--no-resend",)),
    "old-kernel-all": ((Program.MOUNT, Program.MOUNT_HOLDER, Program.MOUNT_NOTIFIER), ("--no-resend",)),
    "over-tcp": ((Program.MOUNT,), ("--transport=stream", "--no-short-circuit")),
    "one-of-two": ((Program.MOUNT, Program.MOUNT_WORKER), ("--workers", "2")),
    "reader": ((Program.MOUNT_WORKER,), ("--workers", "2")),
    "holder": ((Program.MOUNT_HOLDER,), ()),
    "forkserver": ((Program.MOUNT_FORK_SERVER,), ()),
    "notice": ((Program.MOUNT, Program.MOUNT_NOTIFIER), ()),
}
USUAL = (
    ("serving", "fio"),
    ("serving", "loader"),
    ("serving", "model"),
    ("serving", "direct"),
    ("old-kernel", "fio"),
    ("old-kernel", "loader"),
    ("old-kernel", "model"),
    ("old-kernel", "large"),
    ("old-kernel", "direct"),
    ("old-kernel-all", "model"),
    ("over-tcp", "fio"),
    ("one-of-two", "fio"),
    ("one-of-two", "loader"),
    ("one-of-two", "model"),
    ("one-of-two", "large"),
    ("reader", "large"),
    ("holder", "model"),
    ("forkserver", "model"),
    ("notice", "fio"),
)
SMOKE = ("serving", "model")


def run_while_killed(own, victim, load, seconds):
    programs, options = VICTIMS[victim]
    held = own.mount(
        own.directory.parent / f"m-{victim}-{load.__name__}", "--holder", "--drain-s", "2", *options
    )
    try:
        here = held.place / f"{victim}-{load.__name__}-{seconds:.0f}"
        here.mkdir()
        print(f"\n{victim}, {load.__name__}: ", end="")
        with Killer(held, *programs):
            load(here, seconds)
    finally:
        end(held)


@pytest.mark.parametrize(
    ("victim", "load"),
    [
        pytest.param(
            victim,
            *LOADS[load].values,
            marks=(*LOADS[load].marks, *[pytest.mark.smoke] * ((victim, load) == SMOKE)),
            id=f"{victim}-{load}",
        )
        for victim, load in USUAL
    ],
)
def test_kills_every_half_second_cause_only_pauses(own, victim, load):
    run_while_killed(own, victim, load, 4.0)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("load", LOADS.values())
@pytest.mark.parametrize("victim", VICTIMS)
def test_kills_for_a_minute_cause_only_pauses(own, victim, load):
    run_while_killed(own, victim, load, 60.0)
