"""One moment of the whole pool, as a shard has part in it: so that the checks or dumps of all shards show the same one.

    quiet   no change over several shards is decided here any more; answered when those that are decided have been told
    take    when all are quiet: this shard's snapshot. From here on no change is made at all
    end     when all have theirs: changes go on. It says whether none was made meanwhile

So from the last `take` to the first `end` the pool stood still, and what it was then is what the snapshots show: no change
over several shards is there by half, and none without another that somebody had seen before it. What was decided by then
waits, and is decided anew; nothing is refused. A shard waits for MOMENT_S and goes on by itself; then it has not `stood`,
and whoever asked begins again. Whose a partition is that is handed over at that moment the shards say themselves: each its
own, all together each of them once, or it is begun again. Owned by `meta/server/service`; asked by
`sdk/admin/snapshot_barrier`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nvpool.core.errors import Busy, InvalidRequest

QUIET_S = 1.0
"""To tell all that is decided: milliseconds, or a shard is away."""
MOMENT_S = 2.0
"""For all of it, counted from the first question: several round trips."""
_NO_NUMBER = "a moment has a number, which is not 0: whoever begins one draws it"


class Moment:
    def __init__(self, told: Callable[[], Awaitable[None]]) -> None:
        """`told` returns when nothing is decided that another shard has still to hear of."""
        self._told = told
        self._id = 0
        self._over: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.spans_wait = False
        """Whether no change over several shards may be decided."""
        self.changes_wait = False
        """Whether no change may be made."""

    async def quiet(self, number: int) -> None:
        """Busy: another one is being taken, or what is decided can not be told now. InvalidRequest: it has no number."""
        if not number:
            raise InvalidRequest(_NO_NUMBER)
        if self._id not in (0, number):
            raise Busy("another check or dump is beginning", retry_after_s=0.05)
        if not self._id:
            loop = asyncio.get_running_loop()
            self._id, self._over = number, loop.create_future()
            self._timer = loop.call_later(MOMENT_S, self.end, number)
            self.spans_wait = True
        try:
            async with asyncio.timeout(QUIET_S):
                await self._told()
        except TimeoutError:
            self.end(number)
            raise Busy("changes over several shards do not come to their end", retry_after_s=0.2) from None
        self._check(number)

    def take(self, number: int) -> None:
        """Busy: it was not begun, or took too long, and changes have been made. InvalidRequest: it has no number."""
        if not number:  # what no moment has: it would pass for the one that is taken, and nothing would end it
            raise InvalidRequest(_NO_NUMBER)
        self._check(number)
        self.changes_wait = True  # until the timer of its beginning ends it, at the latest

    def _check(self, number: int) -> None:
        if self._id != number:
            raise Busy("the moment has passed", retry_after_s=0.05)

    def end(self, number: int) -> bool:
        """Go on; whether it stood until now."""
        if not number or self._id != number:
            return False
        stood = self.changes_wait
        self._id, self.spans_wait, self.changes_wait = 0, False, False
        self._timer.cancel()
        self._over.set_result(None)
        return stood

    async def over(self) -> None:
        """Return when what waits may go on."""
        if self._id:
            await asyncio.shield(self._over)
