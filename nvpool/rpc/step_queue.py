"""Fair queue for the steps of long requests of peers that are not trusted.

A service divides such a request into short steps, and waits for its turn before each of them. In each
iteration of the event loop one step runs, of all peers in rotation. So requests of other peers wait for one
step at most, however many long requests a peer has sent. Together with the time slices of rpc/peer_limits
this bounds what a peer costs the others. Used by the metadata service.
"""

from __future__ import annotations

import asyncio
from collections import deque


class StepQueue:
    """Turns of one service."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Steps of each peer, in the order in which the peers get their turns."""
        self._is_scheduled = False
        """True if a step has begun in this iteration of the event loop, or steps wait."""

    def try_begin(self) -> bool:
        """Return whether a step may run now, without waiting. If so, the next one waits for the next iteration."""
        if self._is_scheduled:
            return False
        self._schedule()
        return True

    async def turn(self, peer: str) -> None:
        """Wait for the next turn of that peer. A task that is cancelled while it waits gives its turn on."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(future)
        if not self._is_scheduled:
            self._schedule()
        await future

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._begin_next)

    def _begin_next(self) -> None:
        self._is_scheduled = False
        while self._waiting:
            peer = next(iter(self._waiting))
            queue = self._waiting.pop(peer)
            future = queue.popleft()
            if queue:
                self._waiting[peer] = queue  # behind the others
            if not future.done():
                future.set_result(None)
                self._schedule()
                return
