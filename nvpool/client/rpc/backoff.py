"""Back-off before a request is retried, and the error of a request that runs out of time.

Shared by the metadata client and the chunk client, where replies of other processes arrive.
"""

from __future__ import annotations

import asyncio

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import (
    AccessDenied,
    Busy,
    DeadlineExceeded,
    NvpoolError,
    StaleIdentity,
    Unavailable,
    Unreachable,
)

REACH_S = 0.1
"""Longest delay while a daemon is unreachable: an attempt costs next to nothing.

A daemon that is restarted is back within a second.
"""

IDENTITY_S, IDENTITY_TRIES = 0.2, 5
"""Delay and number of attempts at a target whose map is older than this client's membership.

Each target learns of a new map within a second.
"""


async def until_known(error: StaleIdentity, tries: int, left_s: float) -> None:
    """Wait before a retry at a target that has refused this client's identity.

    AccessDenied: this was tried for a second, so the client is not a member of the pool any more.
    """
    if tries > IDENTITY_TRIES:
        raise AccessDenied(str(error))
    await asyncio.sleep(min(IDENTITY_S, left_s))


async def pause(
    error: NvpoolError, tries: int, left_s: float, view: PoolView, options: ClientOptions, clock: Clock
) -> None:
    """Wait before retry number `tries` of a request that failed with `error`.

    The delay grows with each attempt, up to `left_s`. It ends early when a newer pool map arrives, because
    another daemon may have replaced the failed one.
    """
    last_s = min(REACH_S, options.retry_last_s) if isinstance(error, Unreachable) else options.retry_last_s
    delay_s = max(error.retry_after_s, min(last_s, options.retry_first_s * 2 ** min(tries - 1, 16)))
    delay_s = max(0.0, min(delay_s * (0.75 + clock.random().random() / 2), left_s))
    if isinstance(error, Busy):
        await asyncio.sleep(delay_s)  # the daemon is alive, so no newer map is needed
    else:
        await view.newer(delay_s)


def reason_of(error: NvpoolError, before: NvpoolError | None) -> NvpoolError:
    """The reason of a retry: `error`, or the earlier reason if `error` is a timeout."""
    return before if before is not None and isinstance(error, DeadlineExceeded) else error


def at_the_deadline(error: NvpoolError, reason: NvpoolError, uncertain: bool = False) -> Unavailable:
    """The error to raise for a request that must not be retried any more.

    It has the last error and the reason (see `reason_of`). `uncertain`: an earlier attempt may have been
    executed.
    """
    family = type(error) if isinstance(error, Unavailable) else DeadlineExceeded
    return family(
        f"{error}" if reason is error else f"{error}; last: {reason}",
        may_be_applied=uncertain or error.may_be_applied or reason.may_be_applied,
    )
