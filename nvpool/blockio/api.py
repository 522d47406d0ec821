"""Interface of asynchronous block readers; blockio/reader has the implementations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.core.errors import NvpoolError

Outcome = list[NvpoolError | None]
"""For each read of a batch its error, or None."""


class WaitingReader:
    """Asynchronous reads of any descriptors. `close` waits for the running reads."""

    name = ""

    def begin(
        self, fd: int, offsets, lengths, positions, into: memoryview, on_done: Callable[[Outcome], None]
    ) -> None:
        """Start reading each (offset, length) to its position in `into`.

        `on_done` is called once, in a later iteration of the event loop. Do not use `into` before that.
        """
        raise NotImplementedError

    async def read(self, fd: int, offsets, lengths, positions, into: memoryview) -> Outcome:
        """Read as `begin` does. A cancelled caller must not use `into` either, because reads may still be
        running."""
        done = asyncio.get_running_loop().create_future()
        self.begin(
            fd, offsets, lengths, positions, into, lambda outcome: done.done() or done.set_result(outcome)
        )
        return await done

    async def close(self) -> None:
        raise NotImplementedError
