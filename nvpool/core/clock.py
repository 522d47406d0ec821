"""The clocks and the randomness of nvpool.

All code takes time and randomness from this module only, so that tests can run a whole pool on a virtual
clock with a seed. `boottime_s` includes the time that the machine is suspended (CLOCK_BOOTTIME). Leases are
measured with `boottime_s`, since a lease must end while a machine sleeps. `wall_ns` is for timestamps that
people see and is never used to measure a duration.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial
from typing import Protocol


class Clock(Protocol):
    def boottime_s(self) -> float: ...

    def wall_ns(self) -> int: ...

    def random(self) -> random.Random: ...

    def secret(self, count: int) -> bytes: ...


class SystemClock:
    """The machine's clock and entropy."""

    def __init__(self) -> None:
        self._random = random.Random(os.urandom(16))

    # The C functions themselves, without a Python wrapper: an operation on a small file reads the clock about
    # 24 times.
    boottime_s = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
    wall_ns = staticmethod(time.time_ns)

    def random(self) -> random.Random:
        return self._random

    def reseed(self) -> None:
        """Seed the random numbers again; a forked child must not repeat the numbers of its parent."""
        self._random.seed(os.urandom(16))

    @staticmethod
    def secret(count: int) -> bytes:
        """Return `count` unpredictable bytes, for keys, session numbers and tokens."""
        return os.urandom(count)


stopwatch_s = time.perf_counter
"""Seconds of a cheap monotonic clock, for measuring short durations on this machine.

Never use this clock for a lease: it may stop while the machine sleeps."""


class ManualClock:
    """Virtual clock for tests: time moves only in `advance`, and random numbers come from a seed.

    Wall time begins in 2020 and advances together with `boottime_s`.
    """

    def __init__(self, seed: int = 0, start_s: float = 1000.0) -> None:
        self.now_s = start_s
        self._random = random.Random(seed)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def boottime_s(self) -> float:
        return self.now_s

    def wall_ns(self) -> int:
        return 1_577_836_800_000_000_000 + int(self.now_s * 1e9)

    def random(self) -> random.Random:
        return self._random

    def secret(self, count: int) -> bytes:
        return self._random.randbytes(count)


SYSTEM_CLOCK = SystemClock()
os.register_at_fork(after_in_child=SYSTEM_CLOCK.reseed)
