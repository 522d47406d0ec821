"""The only door to time and randomness, so that a whole pool can run on a virtual clock with a seed.

`boottime_s` counts suspended time too (CLOCK_BOOTTIME): leases are measured with it, since a lease must end while a
machine sleeps. `wall_ns` is for time stamps that people see and is never used to measure a duration.
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
    """The machine's clock and its entropy."""

    def __init__(self) -> None:
        self._random = random.Random(os.urandom(16))

    # the functions themselves: a small file asks two dozen times
    boottime_s = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
    wall_ns = staticmethod(time.time_ns)

    def random(self) -> random.Random:
        return self._random

    def begin_anew(self) -> None:
        """Whoever goes on as a copy of this process draws other numbers."""
        self._random.seed(os.urandom(16))

    @staticmethod
    def secret(count: int) -> bytes:
        """`count` bytes nobody can guess: keys, session numbers, tokens."""
        return os.urandom(count)


stopwatch_s = time.perf_counter
"""For how long something took here and now, where a look at the clock has to cost as little as it can. Never for a lease: it
may stand while the machine sleeps."""


class ManualClock:
    """A clock that moves when told to; randomness from a seed. Wall time begins in 2020 and moves along."""

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
os.register_at_fork(after_in_child=SYSTEM_CLOCK.begin_anew)
