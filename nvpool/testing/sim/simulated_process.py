"""Simulated processes, and wrappers of their durable state in which a process can die between any two steps.

A killed process does nothing any more: each wrapper of its durable state raises, and code that still runs
ends at the next one. Its successor gets its own wrappers of the same state. A stopped process, as by SIGSTOP,
does nothing until it continues: its events wait. Used by `sim/pool`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nvpool.testing.sim.virtual_time_loop import ON_BEHALF, VirtualLoop

if TYPE_CHECKING:
    from nvpool.rpc.api import Buffer, Call
    from nvpool.rpc.multiplexer import InboundCall
    from nvpool.rpc.stats import ReplyStats
    from nvpool.rpc.transports.frame_fast_path import FastPath


class Killed(BaseException):
    """The process does not exist any more. None of its code catches this."""


def is_death(error: BaseException | None) -> bool:
    """Whether the error is Killed, or a group of nothing else."""
    return isinstance(error, Killed) or (
        isinstance(error, BaseExceptionGroup) and all(map(is_death, error.exceptions))
    )


class Process:
    """`die_after`: number of steps on its drive after which it dies; None: only by `kill`. `context`: context
    of its code."""

    def __init__(self, loop: VirtualLoop, name: str, node: str, on_death: Callable[[Process], None]) -> None:
        self.held: list[asyncio.Handle] | None = None
        self.context = contextvars.copy_context()
        self.context.run(ON_BEHALF.set, self)
        self._loop = loop
        self.name = name
        self.node = node
        self.alive = True
        self.steps = 0
        self.die_after: int | None = None
        self.when_asked: Callable[[], None] | None = None
        """Called once, directly after the process has taken its next request."""
        self._on_death = on_death

    def step(self) -> None:
        """Mark a point between two steps. Killed, if the process was killed."""
        if not self.alive:
            raise Killed(self.name)
        self.steps += 1
        if self.die_after is not None and self.steps >= self.die_after:
            self.kill()
            raise Killed(self.name)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self.go_on()  # its remaining code ends at the next step
            self._on_death(self)

    def stop(self) -> None:
        """Do nothing from now on, but queue events."""
        if self.held is None and self.alive:
            self.held = []

    def was_asked(self) -> None:
        """Note that the process has taken a request."""
        then, self.when_asked = self.when_asked, None
        if then is not None:
            then()

    def go_on(self) -> None:
        held, self.held = self.held, None
        if held:
            self._loop.go_on(held)


class ProcessHandler:
    """Request handler of a process, for its listener."""

    def __init__(
        self, process: Process, handle: Callable[[Call], None], answer_fast: FastPath | None = None
    ) -> None:
        """`answer_fast`: fast path of the service, see Handler in rpc/api; None: every request takes the slow path."""
        self._process = process
        self._handle = handle
        self._answer = answer_fast
        self.fast_path = self._answer_fast if answer_fast is not None else None

    def __call__(self, call: Call) -> None:
        self._handle(call)
        self._process.was_asked()

    def _answer_fast(
        self,
        buffer: bytearray,
        end: int,
        in_work: dict[int, InboundCall],
        reply_stats: ReplyStats,
        out: list[Buffer],
        side: Any,
    ) -> int:
        assert self._answer is not None
        taken = self._answer(buffer, end, in_work, reply_stats, out, side)
        if taken:
            self._process.was_asked()
        return taken


class CrashPointProxy:
    """`inner` as this process uses it: a step before and after each `durable` call; coroutines also take
    time."""

    def __init__(
        self, inner: Any, process: Process, durable: Iterable[str], waits_s: Callable[[], float]
    ) -> None:
        self._inner = inner
        self._process = process
        self._durable = frozenset(durable)
        self._waits_s = waits_s

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)  # a callback of the inner object

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._durable:
            if inspect.ismethod(found):
                self.__dict__[name] = found
            return found
        process, waits_s = self._process, self._waits_s

        async def waiting(*arguments, **named):
            process.step()
            await asyncio.sleep(waits_s())
            process.step()
            result = await found(*arguments, **named)
            process.step()
            return result

        def without_delay(*arguments, **named):
            process.step()
            result = found(*arguments, **named)
            process.step()
            return result

        wrapped = self.__dict__[name] = waiting if inspect.iscoroutinefunction(found) else without_delay
        return wrapped


KV_STEPS = ("apply", "sync", "checkpoint")
