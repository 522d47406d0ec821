"""Calls of a store's service that wait, in a task or for a callback: their bounds, and their end.

Each call that waits takes a place. The places are bounded, over all peers and for each peer that is not trusted, so
that no peer takes the places of all others. Used by `store/server/service` and `store/server/writes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from nvpool.core.errors import Busy, Draining
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import Call

WAITING_MAX = 8192
"""Waiting calls allowed at the same time, over all connections; further calls get Busy."""
WAITING_PER_PEER_MAX = WAITING_MAX // 4
"""Waiting calls of one peer that is not trusted."""


ALSO_WAITING_MAX = 4096
"""More calls than this never wait elsewhere: they are not counted before the bound is near."""


class WaitingCalls:
    """Waiting calls of one service."""

    def __init__(self, callers: Callers, also_waiting: Callable[[], int]) -> None:
        """`also_waiting` returns the number of calls that wait elsewhere and count too: for the drive."""
        self._callers = callers
        self._also_waiting = also_waiting
        self._peer: Any = None
        self._account = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: dict[Call, str] = {}
        """Calls that wait for a callback, with their peer as in `_count_of`: reads for the drive, writes for a
        successor."""
        self._count_of: dict[str, int] = {}
        """Number of waiting calls by peer (CallerRights.account), for peers that are not trusted."""
        self._no_calls: asyncio.Future[None] | None = None

    @property
    def count(self) -> int:
        """Number of waiting calls."""
        return len(self._tasks) + len(self._begun) + self._also_waiting()

    def begin(self, call: Call) -> None:
        """Take a place for a call that waits for a callback. Busy: there is none."""
        self._begun[call] = self._take_place(call)

    def withdraw(self, call: Call) -> None:
        """Give back the place of a call that does not wait after all, or that `end_all` has ended."""
        self._leave(self._begun.pop(call, ""))

    def end(self, call: Call) -> bool:
        """Give back the place of a call whose callback has come. False: `end_all` has already failed the call."""
        account = self._begun.pop(call, None)
        if account is None:
            return False
        self._leave(account)
        if self._no_calls is not None and not self._begun and not self._no_calls.done():
            self._no_calls.set_result(None)
        return True

    def later(self, call: Call, work: Coroutine[Any, Any, None]) -> None:
        """Let a task do the work and answer the call. Busy: there is no place, and the work is closed."""
        try:
            account = self._take_place(call)
        except Busy:
            work.close()
            raise
        task = asyncio.get_running_loop().create_task(_answered(call, work))
        self._tasks.add(task)
        task.add_done_callback(partial(self._task_ended, work, account))

    def _task_ended(self, work: Coroutine[Any, Any, None], account: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._leave(account)
        work.close()  # for a task that was cancelled before its first step

    def _take_place(self, call: Call) -> str:
        """Count a call; return the peer for `_leave`."""
        if (
            len(self._tasks) + len(self._begun) + ALSO_WAITING_MAX >= WAITING_MAX
            and self.count >= WAITING_MAX
        ):
            raise Busy(f"{WAITING_MAX} requests wait for this target already; ask for less in parallel")
        peer = call.peer
        if peer is not self._peer:
            self._account, self._peer = self._callers.of(peer).account, peer
        account = self._account
        if account:
            count = self._count_of.get(account, 0)
            if count >= WAITING_PER_PEER_MAX:
                raise Busy(
                    f"{count} requests of {account} wait for this target already; ask for less in parallel"
                )
            self._count_of[account] = count + 1
        return account

    def _leave(self, account: str) -> None:
        if account:
            left = self._count_of[account] - 1
            if left:
                self._count_of[account] = left
            else:
                del self._count_of[account]

    # -- the end -----------------------------------------------------------------------------------------------------

    async def drained(self, drain_s: float) -> None:
        """Wait for the calls, for at most `drain_s`."""
        waiting: set[asyncio.Future[None]] = set(self._tasks)
        if self._begun:
            self._no_calls = asyncio.get_running_loop().create_future()
            waiting.add(self._no_calls)
        if waiting and drain_s > 0:
            await asyncio.wait(waiting, timeout=drain_s)

    def fail_begun(self) -> None:
        """Fail all calls that wait for a callback."""
        begun, self._begun = self._begun, {}
        for call, account in begun.items():
            self._leave(account)
            call.fail(Draining())

    async def cancel_tasks(self) -> None:
        """Cancel all tasks, which fail their calls."""
        for task in list(self._tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _answered(call: Call, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except asyncio.CancelledError:
        call.fail(Draining())
        raise
    except Exception as error:  # the border: the transport distinguishes nvpool errors from bugs
        call.fail(error)
