"""Coroutines driven by hand: most requests are answered in their first step; those get neither a task nor a turn of the loop.

`Step` runs a coroutine until it waits. If it ends before, the result is there at once; else the step goes on when the awaited
future is done, and calls back at the end. To what it runs it is the current task (asyncio.timeout and TaskGroup cancel it).
Called by `fuse/kernel/connection`, which owns all steps. Python 3.12 has eager tasks for this; 3.11 does not.
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine
from typing import Any

WAITS = object()
"""What `Step.begin` returns where the coroutine has to wait."""


class Step:
    """A coroutine at work. May be begun once; one that did not have to wait may be begun again with another coroutine."""

    __slots__ = ("loop", "coroutine", "on_end", "unique", "_future", "_cancels", "_cancel_next", "__weakref__")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.unique = 0  # of the kernel's request; see client/rpc/exactly_once
        self.coroutine: Coroutine | None = None
        self.on_end: Callable[[Any, BaseException | None], None] | None = None
        self._future: asyncio.Future | None = None
        self._cancels = 0
        self._cancel_next = False

    def begin(self, coroutine: Coroutine) -> Any:
        """Its result, or WAITS: then set `on_end`, which is called with (result, None) or (None, error) when it ends.

        Raises what the coroutine raises.
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
            future._asyncio_future_blocking = False
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
                future = self.coroutine.send(None)  # the future gives its result, or raises, in there
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

    # -- what asyncio asks of a task ---------------------------------------------------------------------------------------

    def cancel(self, msg: str | None = None) -> bool:
        """Raise CancelledError where it waits. False where it has ended."""
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
