"""Futures with a single immediate listener, and `abandon` for futures whose outcome nobody needs.

`ImmediateFuture` calls its listener in the event-loop iteration in which the result arrives; an asyncio future needs
one more iteration. `BlocksFuture` is the same for the bytes of a read.

asyncio logs "exception was never retrieved" for each failed future whose outcome nobody reads. A caller that
stops waiting, because another future completed first, must therefore still read the outcome. In addition, a
cancelled `gather` future fails with CancelledError instead of being cancelled. `abandon` handles both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class ImmediateFuture:
    """Single-listener future whose callback runs in the event-loop iteration in which the result arrives.

    `on_end(result, None)` or `on_end(None, error)` is called once, when the outcome is known. A listener that
    arrives after that reads `outcome`: the two arguments of that call, or None before the outcome is known.
    `then(future, result, error)` belongs to the requester: `then` returns the final outcome, or None if it
    needs more time and will call `end` again.
    """

    __slots__ = ("on_end", "outcome", "then")

    def __init__(self) -> None:
        self.on_end: Callable[[Any, BaseException | None], None] | None = None
        self.outcome: tuple[Any, BaseException | None] | None = None
        self.then: (
            Callable[[ImmediateFuture, Any, BaseException | None], tuple[Any, BaseException | None] | None]
            | None
        ) = None

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self.outcome is not None

    def cancel(self) -> bool:
        """Call the listener with CancelledError now and never again.

        Return False if the outcome was already known.
        """
        if self.outcome is not None:
            return False
        self._complete(None, asyncio.CancelledError())
        return True

    def end(self, found: Any, error: BaseException | None) -> None:
        """Pass the result or the error through `then` to the listener.

        A future whose outcome is already known ignores both.
        """
        if self.outcome is not None:
            return
        then, self.then = self.then, None
        if then is not None:
            made = then(self, found, error)
            if made is None:
                return
            found, error = made
        self._complete(found, error)

    def _complete(self, found: Any, error: BaseException | None) -> None:
        self.outcome = found, error
        if self.on_end is not None:
            self.on_end(found, error)


class BlocksFuture(ImmediateFuture):
    """Future of the bytes [skip, skip + length) of the whole blocks that a read fetches."""

    __slots__ = ("_skip", "_length")

    def __init__(self, skip: int, length: int) -> None:
        self.on_end = self.outcome = self.then = None
        self._skip = skip
        self._length = length

    def set_result(self, blocks: memoryview) -> None:
        """Complete with the wanted part of `blocks`."""
        skip, length = self._skip, self._length
        self._complete(blocks if len(blocks) == length else blocks[skip : skip + length], None)

    def set_exception(self, error: BaseException) -> None:
        """Complete with `error`."""
        self._complete(None, error)


def abandon(future: asyncio.Future[Any]) -> None:
    """Cancel `future` and retrieve its outcome on completion, which keeps asyncio from logging it."""
    future.cancel()
    if future.done():
        _look_at(future)
    else:
        future.add_done_callback(_look_at)


def _look_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
