"""What reads that wait look like, however they are made: see blockio/reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.core.errors import NvpoolError

Outcome = list[NvpoolError | None]
"""Of each read of a batch: what is wrong with it."""


class WaitingReader:
    """Reads of any descriptors. `close` waits for what is under way."""

    name = ""

    def begin(self, fd: int, offsets, lengths, positions, into: memoryview, on_done: Callable[[Outcome], None]) -> None:
        """Read each (offset, length) to its position in `into`, which must not be used before `on_done` is called: in a later
        turn of the loop, once."""
        raise NotImplementedError

    async def read(self, fd: int, offsets, lengths, positions, into: memoryview) -> Outcome:
        """As `begin`. Who is cancelled meanwhile must not use `into` either."""
        done = asyncio.get_running_loop().create_future()
        self.begin(fd, offsets, lengths, positions, into, lambda outcome: done.done() or done.set_result(outcome))
        return await done

    async def close(self) -> None:
        raise NotImplementedError
