"""Retries, late replies and replies in steps, for the request handlers of a shard.

Everything that waits is kept by `meta/deferred_replies`. Made by `meta/server/service`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from nvpool.core.errors import Busy
from nvpool.meta.admin_jobs import JobReply
from nvpool.meta.deferred_replies import DeferredReplies
from nvpool.meta.state.transaction import WaitFirst
from nvpool.meta.state.volume_access import VolumeAccess
from nvpool.rpc.access_control import Callers
from nvpool.rpc.api import Call
from nvpool.rpc.step_queue import StepQueue


class CallReplies:
    """Replies of one service that wait or come in steps."""

    def __init__(
        self,
        handle: Callable[[Call], None],
        waits: DeferredReplies,
        callers: Callers,
        steps: StepQueue,
        access: VolumeAccess,
    ) -> None:
        """`handle` handles a call from its beginning. `steps`: turns of peers that are not trusted."""
        self._handle = handle
        self._waits = waits
        self._callers = callers
        self._steps = steps
        self._access = access

    def retry(self, call: Call, wait: Callable[[], Awaitable[Any]]) -> None:
        """Handle the call again after the wait; nothing of it is decided yet."""
        self._waits.add(call, wait, lambda: call.cancelled or self._handle(call), undecided=True)

    def reply_after(self, call: Call, wait: Callable[[], Awaitable[Any]], answer: bytes) -> None:
        """Answer a change that is already made after the wait.

        A client that times out before may send it again.
        """
        self._waits.add(call, wait, lambda: call.reply(answer), may_be_applied=True)

    def reply_job(
        self, call: Call, work: Coroutine[Any, Any, JobReply], then: Callable[[], None] | None = None
    ) -> None:
        """Answer the call with the result of `work`, after a call of `then`.

        Busy: too many requests wait already; `work` does not begin.
        """

        async def run() -> None:
            answer = await work
            if then is not None:
                then()
            call.reply(answer.message.SerializeToString(), (answer.payload,) if answer.payload else ())

        try:
            self._waits.add(call, run, lambda: None)
        except Busy:
            work.close()
            raise

    def reply_in_steps(self, call: Call, steps: Iterator[Any]) -> None:
        """Run a generator of reply steps, which yields None after each step but the last, and then the reply.

        Only the last step may change something. The first one runs immediately, unless the peer is not trusted
        and another step of such a peer has run in this iteration of the event loop (rpc/step_queue).
        """
        account = self._callers.account_of(call)
        if not account or self._steps.try_begin():
            reply = next(steps)
            if reply is not None:
                call.reply(reply.SerializeToString())
                return

        async def go_on() -> None:
            try:
                while True:
                    await self._turn(account)
                    if call.cancelled:
                        return
                    found = self._step(call, steps)
                    if found is not None:
                        call.reply(found.SerializeToString())
                        return
            except WaitFirst as first:
                await first.wait()
                self._handle(call)

        self._waits.add(call, go_on, lambda: None)

    async def _turn(self, account: str) -> None:
        if account:
            await self._steps.turn(account)
        else:
            await asyncio.sleep(0)

    def _step(self, call: Call, steps: Iterator[Any]) -> Any:
        """Run the next step with the caller's rights to volumes, as they are now."""
        self._access.caller = self._callers.owner_of(call) if self._access.restricted else None
        try:
            return next(steps)
        finally:
            self._access.caller = None
