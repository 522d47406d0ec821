"""Directory of one benchmark run, its clean-up, and facts about the machine.

Used by compare.py and questions.py. Only directories with the mark of a benchmark are removed (subjects/contract.sweep).
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from subjects.contract import OWNER, mounted_below, sweep, sweep_left

PREFIX = "compare-"
BUSY_MAX = 0.05
"""Busy share of the processors before the run, above which the figures are doubtful."""
CPU_LATENCY = Path("/dev/cpu_dma_latency")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"


@contextlib.contextmanager
def workspace(parent: Path) -> Iterator[tuple[Path, list[Callable[[], None]]]]:
    """A new directory below `parent`, and a list for what is to be called at the end. However the body ends, interrupted too,
    these are called, and processes, mounts and files of the directory are gone; so is what a bench that was killed left beside
    it. An interruption ends here; further ones change nothing while it ends."""
    parent.mkdir(parents=True, exist_ok=True)
    sweep_left(parent.resolve(), PREFIX, say)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)).resolve()
    (directory / OWNER).write_text(str(os.getpid()))
    numbers, ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), []

    def interrupted(number, frame):
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupted)
    try:
        yield directory, ends
    except KeyboardInterrupt:
        say("interrupted; stopping what was started, which takes a few seconds")
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        try:
            for end in ends:
                end()
        finally:
            sweep(directory)
        if directory.exists():
            say(f"{directory} could not be removed; mounted below it: {mounted_below(directory)}")


def warn_of_others() -> float:
    """The share of the processors that is busy before anything is started; says so where it makes figures worthless."""
    busy = busy_share(2.0)
    if busy > BUSY_MAX:
        say(f"others keep {busy:.0%} of the processors busy: do not keep the figures of this run")
    if os.nice(0) > 0:
        say(
            "started with `nice`: so are all but MooseFS, which raises itself; do not keep the figures of this run"
        )
    return busy


def not_final(busy: float) -> str:
    """A sentence for the tables if the run was not alone on its machine."""
    return (
        f" **Not to be kept: others used {busy:.0%} of the processors before it began.**"
        if busy > BUSY_MAX
        else ""
    )


def can_keep_awake() -> bool:
    return os.access(CPU_LATENCY, os.W_OK)


@contextlib.contextmanager
def processors_awake(wanted: bool) -> Iterator[None]:
    """Keep processors out of deep idle states until the descriptor is closed (Linux: power/pm_qos_interface.rst)."""
    if not wanted:
        yield
        return
    with open(CPU_LATENCY, "wb", buffering=0) as file:
        file.write(struct.pack("i", 0))
        yield


def busy_share(seconds: float) -> float:
    def ticks() -> tuple[int, int]:
        with open("/proc/stat") as file:
            fields = [int(word) for word in file.readline().split()[1:9]]
        return sum(fields), fields[3] + fields[
            4
        ]  # proc(5): the fourth and fifth are idle and waiting for I/O

    all_before, idle_before = ticks()
    time.sleep(seconds)
    all_after, idle_after = ticks()
    return 1 - (idle_after - idle_before) / max(all_after - all_before, 1)
