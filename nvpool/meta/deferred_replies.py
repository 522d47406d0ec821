"""Deferred replies: requests that wait before they can be answered.

A request waits for free space in the engine, for a truncation on the storage targets, for a sync, or for the
acknowledgement of a lease holder. The number of waiting requests is bounded, also for each peer that is not
trusted (rpc/peer_limits), and each request waits at most until its deadline. Used by `meta/server/service`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from nvpool.core.clock import Clock
from nvpool.core.errors import Busy, DeadlineExceeded, Draining, Fenced, NvpoolError
from nvpool.meta.state.transaction import WaitFirst
from nvpool.rpc.api import Call
from nvpool.rpc.peer_limits import identify

WAITING_MAX = 4096
"""Highest number of requests that wait at the same time. A request beyond it fails with Busy."""
BUSY_S = 0.1
"""Time after which a peer with too many waiting requests tries again."""
WAITING_PER_PEER_MAX = WAITING_MAX // 4
"""As WAITING_MAX, for each peer that is not trusted: as many as one connection carries (IN_FLIGHT_MAX in
rpc/api)."""


class DeferredReplies:
    """All requests of a service that wait, each in a task of its own."""

    def __init__(
        self, clock: Clock, who: str, on_fenced: Callable[[Fenced], None], operators: int | None = None
    ) -> None:
        """`operators`: id of the operator group, whose members are trusted peers."""
        self._clock = clock
        self._who = who
        self._on_fenced = on_fenced
        self._operators = operators
        self._of_peers: dict[str, int] = {}
        """Number of waiting requests of each peer that is not trusted."""
        self.tasks: set[asyncio.Task] = set()
        self._undecided: set[asyncio.Task] = set()
        self._draining = False
        self.waited = 0

    def begin_drain(self) -> None:
        """Cancel the waits of requests for which nothing is decided yet, and refuse new ones.

        Many of these requests wait for other requests, which are no longer accepted.
        """
        self._draining = True
        for task in self._undecided:
            task.cancel()

    def add(
        self,
        call: Call,
        wait: Callable[[], Awaitable],
        then: Callable[[], Any],
        may_be_applied: bool = False,
        undecided: bool = False,
    ) -> None:
        """Call `then` after `wait()` returns.

        If `then` meets a locked record, wait for the record and call `then` again. If `wait` or `then` fails,
        or the deadline passes first, the call fails with that error. `may_be_applied`: the change is already
        made. `undecided`: nothing of the request is decided, and the wait itself changes nothing.

        Busy: too many requests wait already, in all or of this peer, and this change is not made. Draining:
        the service is stopping, and the request is undecided.
        """
        if undecided and self._draining:
            raise Draining(f"{self._who} is stopping")
        if len(self.tasks) >= WAITING_MAX and not may_be_applied:
            raise Busy(f"{WAITING_MAX} requests wait already")
        peer, trusted = identify(call.peer, self._operators)
        if not trusted:
            waiting = self._of_peers.get(peer, 0)
            if waiting >= WAITING_PER_PEER_MAX and not may_be_applied:
                raise Busy(
                    f"{waiting} requests of {peer} wait at {self._who} already, of {WAITING_PER_PEER_MAX} that one "
                    f"client may have; ask for less in parallel",
                    retry_after_s=BUSY_S,
                )
            self._of_peers[peer] = waiting + 1
        self.waited += 1
        task = asyncio.ensure_future(self._wait(call, wait, then, may_be_applied))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if not trusted:
            task.add_done_callback(partial(self._ended, peer))
        if undecided:
            self._undecided.add(task)
            task.add_done_callback(self._undecided.discard)

    def _ended(self, peer: str, task: asyncio.Task) -> None:
        self._of_peers[peer] -= 1
        if not self._of_peers[peer]:
            del self._of_peers[peer]

    async def _wait(
        self, call: Call, wait: Callable[[], Awaitable], then: Callable[[], Any], may_be_applied: bool
    ) -> None:
        try:
            async with asyncio.timeout(max(0.0, call.deadline_s - self._clock.boottime_s())):
                await wait()
                while True:
                    try:
                        then()
                        break
                    except WaitFirst as first:
                        await first.wait()
        except TimeoutError:
            call.fail(
                DeadlineExceeded(
                    "what the request waits for did not come in time", may_be_applied=may_be_applied
                )
            )
        except asyncio.CancelledError:
            call.fail(Draining(f"{self._who} is stopping", may_be_applied=may_be_applied))
            raise
        except NvpoolError as error:
            if isinstance(error, Fenced):
                self._on_fenced(error)
            call.fail(error)
        except Exception as error:
            call.fail(error)
