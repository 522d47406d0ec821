"""Eager coroutine runner: executes the first step immediately, without a task.

Most requests are answered in their first step; those need neither a task nor an iteration of the event loop.
`EagerCoroutine` runs a coroutine until it waits. If the coroutine ends before that, its result is available
immediately. Otherwise the step continues when the awaited future is done, and calls back at the end. Inside
the coroutine the step is the current task (asyncio.timeout and TaskGroup cancel it). Used by
`fuse/kernel/connection`, which owns all steps. Python 3.12 has eager tasks for this; 3.11 does not.
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine
from typing import Any

WAITS = object()
"""Returned by `EagerCoroutine.begin` if the coroutine has to wait."""


class EagerCoroutine:
    """A running coroutine.

    May be started once; a step whose coroutine ended without waiting may be started again with another one.
    """

    __slots__ = (
        "loop",
        "coroutine",
        "on_end",
        "unique",
        "_future",
        "_cancels",
        "_cancel_next",
        "__weakref__",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.unique = 0  # number of the kernel's request; see client/rpc/slot_journal
        self.coroutine: Coroutine | None = None
        self.on_end: Callable[[Any, BaseException | None], None] | None = None
        self._future: asyncio.Future | None = None
        self._cancels = 0
        self._cancel_next = False

    def begin(self, coroutine: Coroutine) -> Any:
        """Run the coroutine until it ends or waits. Returns its result, or WAITS.

        After WAITS set `on_end`, which is called with (result, None) or (None, error) at the end. Raises what
        the coroutine raises.
        """
        loop = self.loop
        _enter_task(loop, self)
        try:
            future = coroutine.send(None)
        except StopIteration as end:
            return end.value
        finally:
            _leave_task(loop, self)
        self.coroutine = coroutine
        self._wait_for(future)
        return WAITS

    def _wait_for(self, future) -> None:
        if future is None:  # asyncio.sleep(0)
            self.loop.call_soon(self._go_on)
        else:
            future._asyncio_future_blocking = False  # noqa: SLF001 (part of the protocol between tasks and futures)
            self._future = future
            future.add_done_callback(self._go_on)
        if self._cancel_next and future is not None and future.cancel():
            self._cancel_next = False

    def _go_on(self, _future=None) -> None:
        self._future = None
        loop = self.loop
        _enter_task(loop, self)
        try:
            if self._cancel_next:
                self._cancel_next = False
                future = self.coroutine.throw(asyncio.CancelledError())
            else:
                future = self.coroutine.send(None)  # the future delivers its result, or raises, inside send
        except StopIteration as end:
            result, error = end.value, None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:
            result, error = None, raised
        else:
            self._wait_for(future)
            return
        finally:
            _leave_task(loop, self)
        self.coroutine = None
        self.on_end(result, error)

    # -- the interface of a task that asyncio uses ---------------------------------------------------------------------
    # -------------------------------------------------------------------------

    def cancel(self, msg: str | None = None) -> bool:
        """Raise CancelledError where the coroutine waits. False: it has ended."""
        if self.coroutine is None:
            return False
        self._cancels += 1
        if self._future is None or not self._future.cancel():
            self._cancel_next = True
        return True

    def cancelling(self) -> int:
        return self._cancels

    def uncancel(self) -> int:
        self._cancels = max(0, self._cancels - 1)
        return self._cancels

    def done(self) -> bool:
        return self.coroutine is None

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def get_name(self) -> str:
        return "a FUSE request"
