"""How long to wait before a request is repeated: the one back-off of metaclient and chunkclient."""

from __future__ import annotations

import asyncio

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.pool_view import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import AccessDenied, Busy, NvpoolError, StaleIdentity, Unreachable

REACH_S = 0.1
"""Between two looks whether anybody listens again where nobody does: they cost next to nothing, and a daemon that is started
again is there within a second."""

IDENTITY_S, IDENTITY_TRIES = 0.2, 5
"""For a target whose map is older than the joining of this client to hear of it; each target hears of a map within a second."""


async def until_known(error: StaleIdentity, tries: int, left_s: float) -> None:
    """Before a target that has not let this client in is asked again. AccessDenied where that has been tried for a second: then
    the client is in the pool no more."""
    if tries > IDENTITY_TRIES:
        raise AccessDenied(str(error))
    await asyncio.sleep(min(IDENTITY_S, left_s))


async def pause(error: NvpoolError, tries: int, left_s: float, view: PoolView, options: ClientOptions, clock: Clock) -> None:
    """Before what has met `error`, and others before it, is asked for again, `tries` times by now: longer and longer, but no
    longer than `left_s`, nor than until there is a newer map, in which somebody else may have taken the place of who failed."""
    last_s = min(REACH_S, options.retry_last_s) if isinstance(error, Unreachable) else options.retry_last_s
    delay_s = max(error.retry_after_s, min(last_s, options.retry_first_s * 2 ** min(tries - 1, 16)))
    delay_s = max(0.0, min(delay_s * (0.75 + clock.random().random() / 2), left_s))
    if isinstance(error, Busy):
        await asyncio.sleep(delay_s)  # it serves
    else:
        await view.newer(delay_s)
