"""An event loop that never sleeps: when nothing can run, its time jumps to the next timer.

So a minute of a pool takes as long as its work, and two runs of the same program with the same seed do the same in the same
order. Threads would spoil both and are refused. Called by `sim/pool`; for tests and simulations only.
"""

from __future__ import annotations

import asyncio
import random
import selectors


class Stuck(AssertionError):
    """Nothing is scheduled and nothing can run, but the simulation has not ended: somebody waits for ever."""


class _Numbered:
    """Its place in a set is by when it was made, not by where in memory: or each run would go through sets in another order."""

    def __init__(self, *arguments, loop: VirtualLoop, **named) -> None:
        self._number = loop.next_number()
        super().__init__(*arguments, loop=loop, **named)

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task):
    pass


class _Future(_Numbered, asyncio.Future):
    pass


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._passed_s = 0.0
        self._made = 0
        super().__init__(_Jumping(self))
        self.set_task_factory(lambda loop, work, **named: _Task(work, loop=loop, **named))

    def next_number(self) -> int:
        self._made += 1
        return self._made

    def create_future(self) -> asyncio.Future:
        return _Future(loop=self)

    def time(self) -> float:
        return self._passed_s

    def pass_time(self, seconds: float) -> None:
        self._passed_s += seconds

    def run_in_executor(self, executor, func, *args):
        raise RuntimeError(f"{func} wants a thread; a simulation has none")


class _Jumping(selectors.SelectSelector):
    """Looks at no descriptor: what the loop would wait for has passed."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        if timeout is None:
            raise Stuck("nothing is scheduled, and the simulation has not ended")
        if timeout > 0:
            # a little more, since when - time + time may be less than when
            self._loop.pass_time(timeout + 1e-7)
        return []


class VirtualClock:
    """base/clock.Clock on a VirtualLoop, with a stream of random numbers of its own for each process."""

    def __init__(self, loop: VirtualLoop, seed: str, skew_s: float = 0.0) -> None:
        self._loop = loop
        self._random = random.Random(seed)
        self._skew_ns = int(skew_s * 1e9)

    def boottime_s(self) -> float:
        return 1000.0 + self._loop.time()

    def wall_ns(self) -> int:
        return 1_577_836_800_000_000_000 + int(self._loop.time() * 1e9) + self._skew_ns

    def random(self) -> random.Random:
        return self._random

    def secret(self, count: int) -> bytes:
        return self._random.randbytes(count)
