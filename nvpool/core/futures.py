"""Futures and tasks whose outcome is not used any more.

asyncio logs "exception was never retrieved" for each future that fails and is not looked at. A caller that stops waiting
because something else came first has to look at the outcome all the same; and a gathering future that is cancelled fails
with CancelledError instead of being cancelled.
"""

from __future__ import annotations

import asyncio
from typing import Any


def abandon(future: asyncio.Future[Any]) -> None:
    """Cancel `future`, and look at its outcome whenever it comes, so that asyncio does not log it."""
    future.cancel()
    if future.done():
        _look_at(future)
    else:
        future.add_done_callback(_look_at)


def _look_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
