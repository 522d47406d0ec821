"""Simulated processes, and the doors to what they keep: what it does to drives can be stopped between any two steps.

A process that was killed does nothing any more: each door to its durable state is shut, and whatever of it still runs ends at
the next one. Its successor gets doors of its own to the same state. Called by `sim/pool`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from typing import Any


class Killed(BaseException):
    """The process does not exist any more. None of its code catches this."""


class Process:
    """`die_after`: steps on its drive after which it dies, None: when it is told to."""

    def __init__(self, name: str, node: str, on_death: Callable[[Process], None]) -> None:
        self.name = name
        self.node = node
        self.alive = True
        self.steps = 0
        self.die_after: int | None = None
        self._on_death = on_death

    def step(self) -> None:
        """Between two steps. Killed, when it was."""
        if not self.alive:
            raise Killed(self.name)
        self.steps += 1
        if self.die_after is not None and self.steps >= self.die_after:
            self.kill()
            raise Killed(self.name)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self._on_death(self)


class Door:
    """`inner` as this process sees it: a step before and one behind each of the `durable` calls; waiting ones take time."""

    def __init__(self, inner: Any, process: Process, durable: Iterable[str], waits_s: Callable[[], float]) -> None:
        self._inner = inner
        self._process = process
        self._durable = frozenset(durable)
        self._waits_s = waits_s

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

        def at_once(*arguments, **named):
            process.step()
            result = found(*arguments, **named)
            process.step()
            return result

        door = self.__dict__[name] = waiting if inspect.iscoroutinefunction(found) else at_once
        return door


KV_STEPS = ("apply", "sync", "checkpoint")
STORE_STEPS = ("write_now", "write", "flush", "cut", "copy", "remove", "install", "drop", "prepare", "commit")
