"""StallingPool: a pool in one process whose targets fall silent on request, like a stopped process or
unreachable host.

For tests of the clients of such targets.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from types import SimpleNamespace

from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.testing.fakes.in_process_pool import InProcessPool


class StallingPool(InProcessPool):
    """A InProcessPool that can delay or lose requests to its targets.

    `hold`: requests of these methods are kept unhandled until `let_go`. `mute`: they are handled and the
    reply is lost. `delay`: reads are handled after that time.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.asked: Counter = Counter()
        self.held: dict[int, list] = defaultdict(list)
        self._holding: dict[int, tuple] = {}
        self._muted: dict[int, tuple] = {}
        self._delays: dict[int, float] = {}
        self._handlers: dict[int, object] = {}

    async def listen(self, role, number, handler) -> None:
        if role != "target":
            await super().listen(role, number, handler)
            return
        self._handlers[number] = handler

        def hand_on(call):
            self.asked[number, call.method] += 1
            if call.method in self._holding.get(number, ()):
                self.held[number].append(call)
                return
            if call.method == Method.DATA_READ and number in self._delays:
                asyncio.get_running_loop().call_later(self._delays[number], handler, call)
                return
            if call.method in self._muted.get(number, ()):
                call = SimpleNamespace(
                    method=call.method,
                    message=call.message,
                    payload=call.payload,
                    cancelled=False,
                    peer=call.peer,
                    deadline_s=call.deadline_s,
                    reply=lambda *_: None,
                    fail=lambda *_: None,
                )
            handler(call)

        await super().listen(role, number, hand_on)

    def hold(self, target: int, *methods: int) -> None:
        self._holding[target] = methods

    def delay(self, target: int, delay_s: float) -> None:
        self._delays[target] = delay_s

    def mute(self, target: int, *methods: int) -> None:
        self._muted[target] = methods

    def let_go(self, target: int) -> None:
        calls, self.held[target], self._holding[target] = self.held[target], [], ()
        for call in calls:
            try:
                self._handlers[target](call)
            except Exception as error:
                call.fail(error)

    async def until(self, holds) -> None:
        async with asyncio.timeout(120):
            while not holds():  # noqa: ASYNC110 - the conditions have no events
                await asyncio.sleep(0.005)
