"""What was asked for and is told of at once when it has come: a future for one listener, without a turn of the loop.

`Later` is any answer; `Coming` the bytes of a read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Later:
    """`on_end` is called once with (what was found, None) or (None, error), right when that is known, unless it was before it
    was set: then `done`, and `outcome` has both. `then(it, found, error)`: what its asker makes of both before they count; None
    where that takes longer, and `end` is to be called again."""

    __slots__ = ("on_end", "outcome", "then")

    def __init__(self) -> None:
        self.on_end: Callable[[Any, BaseException | None], None] | None = None
        self.outcome: tuple[Any, BaseException | None] | None = None
        self.then: Callable[[Later, Any, BaseException | None], tuple[Any, BaseException | None] | None] | None = None

    def done(self) -> bool:
        return self.outcome is not None

    def cancel(self) -> bool:
        """The listener is told a CancelledError now, and nothing later."""
        if self.outcome is not None:
            return False
        self._tell(None, asyncio.CancelledError())
        return True

    def end(self, found: Any, error: BaseException | None) -> None:
        if self.outcome is not None:
            return
        then, self.then = self.then, None
        if then is not None:
            made = then(self, found, error)
            if made is None:
                return
            found, error = made
        self._tell(found, error)

    def _tell(self, found: Any, error: BaseException | None) -> None:
        self.outcome = found, error
        if self.on_end is not None:
            self.on_end(found, error)


class Coming(Later):
    """The bytes [skip, skip + length) of whole blocks that are being read."""

    __slots__ = ("_skip", "_length")

    def __init__(self, skip: int, length: int) -> None:
        self.on_end = self.outcome = self.then = None
        self._skip = skip
        self._length = length

    def set_result(self, blocks: memoryview) -> None:
        skip, length = self._skip, self._length
        self._tell(blocks if len(blocks) == length else blocks[skip:skip + length], None)

    def set_exception(self, error: BaseException) -> None:
        self._tell(None, error)
