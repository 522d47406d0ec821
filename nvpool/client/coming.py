"""Bytes that were asked for and are told of at once: a future for one listener, without a turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Coming:
    """The bytes [skip, skip + length) of whole blocks that are being read. `on_end` is called once with (bytes, None) or (None,
    error), right when they have come, unless they had before it was set: then `done`, and `outcome` has both."""

    __slots__ = ("on_end", "outcome", "_skip", "_length")

    def __init__(self, skip: int, length: int) -> None:
        self.on_end: Callable[[memoryview | None, BaseException | None], None] | None = None
        self.outcome: tuple[memoryview | None, BaseException | None] | None = None
        self._skip = skip
        self._length = length

    def done(self) -> bool:
        return self.outcome is not None

    def set_result(self, blocks: memoryview) -> None:
        skip, length = self._skip, self._length
        self._end(blocks if len(blocks) == length else blocks[skip:skip + length], None)

    def set_exception(self, error: BaseException) -> None:
        self._end(None, error)

    def cancel(self) -> bool:
        """The listener is told a CancelledError now, and nothing later."""
        if self.outcome is not None:
            return False
        self._end(None, asyncio.CancelledError())
        return True

    def _end(self, found: memoryview | None, error: BaseException | None) -> None:
        self.outcome = found, error
        if self.on_end is not None:
            self.on_end(found, error)
