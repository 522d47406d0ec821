"""Event loop on virtual time: when nothing can run, its time jumps to the next timer.

So a simulated minute takes as long as its work, and two runs of one program with the same seed execute the
same steps in the same order. Threads would break both and are refused; the work of a thread runs on the loop
some time later (`VirtualThread`). Calls of a simulated process (`sim/simulated_process`) wait while the
process is stopped. Used by `sim/pool`; for tests and simulations only.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

_SOON_S = 1e-9


class Stuck(AssertionError):
    """Nothing is scheduled and nothing can run, but the simulation has not ended: a task waits for ever."""


class Runner(Protocol):
    """A process, as the loop sees it: `held` are the calls that wait until it continues, None while it runs."""

    held: list[asyncio.Handle] | None


ON_BEHALF: ContextVar[Runner | None] = ContextVar("on_behalf", default=None)
"""Process to which the running code belongs."""


class _Numbered:
    """Hashed by its order of creation, not by its address; otherwise each run would iterate over sets in
    another order."""

    def __init__(self, *arguments, loop: VirtualLoop, **named) -> None:
        self._number = loop.next_number()
        super().__init__(*arguments, loop=loop, **named)

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task):
    pass


class _Future(_Numbered, asyncio.Future):
    pass


class _PausedCall:
    """A call that waits while its process is stopped."""

    __slots__ = ()

    def _run(self) -> None:
        runner = self._context.get(ON_BEHALF)
        if runner is not None and runner.held is not None:
            runner.held.append(self)
        else:
            super()._run()


class _Handle(_PausedCall, asyncio.Handle):
    __slots__ = ()


class _TimerHandle(_PausedCall, asyncio.TimerHandle):
    __slots__ = ()


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

    def call_at(self, when, callback, *args, context=None):
        """Schedule a timer, never for the present moment.

        Code that waits for less than the resolution of the time would otherwise poll for ever.
        """
        self._check_closed()
        when = max(when, self._passed_s + _SOON_S)
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # noqa: SLF001 (asyncio's loop sets it on its own timers)
        return timer

    def call_soon(self, callback, *args, context=None):
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def go_on(self, held: list[asyncio.Handle]) -> None:
        """Schedule the calls that waited, in their order."""
        self._ready.extend(held)

    def run_in_executor(self, executor, func, *args):
        if isinstance(executor, VirtualThread):
            return executor.submit(func, *args)
        if executor is None and isinstance(
            getattr(func, "__self__", None), VirtualThread
        ):  # shutdown of the executor
            done = self.create_future()
            done.set_result(func(*args))
            return done
        raise RuntimeError(f"{func} wants a thread; a simulation has none")


class VirtualThread:
    """Executor of one process: runs its work on the loop, in order, each piece some time later.

    If the process has ended by then (`lives`), the work never runs. `shutdown` waits, as that of an executor
    does, by running all work immediately.
    """

    def __init__(self, loop: VirtualLoop, waits_s: Callable[[], float], lives: Callable[[], bool]) -> None:
        self._loop = loop
        self._waits_s = waits_s
        self._lives = lives
        self._last_s = 0.0
        self._waiting: deque[tuple[asyncio.Future, Callable, tuple]] = deque()

    def submit(self, work: Callable, *arguments) -> asyncio.Future:
        done = self._loop.create_future()
        self._last_s = max(self._last_s + 1e-6, self._loop.time() + self._waits_s())
        self._waiting.append((done, work, arguments))
        self._loop.call_at(self._last_s, self._do_next)
        return done

    def _do_next(self) -> None:
        if not self._waiting:  # already run by `shutdown`
            return
        done, work, arguments = self._waiting.popleft()
        if not self._lives():
            return
        try:
            result = work(*arguments)
        except BaseException as error:
            if not self._lives():
                return
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(result)

    def shutdown(self) -> None:
        while self._waiting:
            self._do_next()


class _Jumping(selectors.SelectSelector):
    """Selector that polls no descriptor: it advances the time instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout=None):
        if timeout is None:
            raise Stuck("nothing is scheduled, and the simulation has not ended")
        if timeout > 0:
            # A little more, because of rounding: when - time + time may be less than when.
            self._loop.pass_time(timeout + 1e-7)
        return []


class VirtualClock:
    """core/clock.Clock on a VirtualLoop, with a separate stream of random numbers for each process."""

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
