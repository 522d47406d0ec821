"""A service and one caller: the common part of all fuzz targets, from choosing a case to waiting for the
reply.

A derived class makes the service in `begin`, makes requests in `request`, and checks the outcome in `end`.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import NvpoolError
from nvpool.rpc.api import Call
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import DirectCall
from nvpool.testing.fuzz.connections import FuzzFailure, Wire, Witness, wrong_frame
from nvpool.testing.fuzz.messages import REQUESTS, Generator, KnownValues

CORPUS_MAX = 300
LARGE_SHARE = 1 / 5000
"""Share of messages with a field of up to the message limit. One takes as long as some hundred others."""
HANDLE_S = 1.0
"""Most processor time for which one request, or one iteration of the loop, may keep all others waiting.

Processor time of the thread, so that other work on the machine makes no difference."""
KEEPING = 50
"""Most requests without a reply; with more of them all must be answered before the next one."""


class FuzzTarget:
    name = ""
    waits_s = 60.0
    """Loop time within which all requests must be answered."""
    deadline_ms = 60_000
    """Deadline of most requests; long polls are answered then at the latest."""
    unlike_others: frozenset[int] = frozenset()
    """Methods that are only sent over a transport, because without one a request cannot be cancelled."""

    def __init__(self, kind: str, seed: str, witness: Witness) -> None:
        """`kind` is the kind of caller. The seed alone decides what happens."""
        self.kind = kind
        self.answered: dict[int, int] = {}
        """Method -> number of successful replies. Shows how deep the requests go."""
        self._seed = seed
        self._chance = random.Random(seed)
        self._known = KnownValues()
        self._generator = Generator(self._chance, self._known)
        self._corpus: list[tuple[int, bytes]] = [(0, b"\x10\x01")]
        self._witness = witness
        self._clock: Clock = SYSTEM_CLOCK
        self._path: Path | None = None
        """Directory of its files."""
        self.large_share = LARGE_SHARE
        self._sizes = random.Random(f"{seed}/sizes")
        """Decides which messages are large. Separate, so that the others are the same whatever the share."""
        self.longest: tuple[float, str] = (0.0, "nothing")
        """Most processor time for which the loop was kept, and the request that did it."""
        self._handled_s = 0.0
        """Processor time of all requests so far, as far as they were answered immediately."""
        self._too_long = ""
        self._last_method = 0

    @staticmethod
    def loop() -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    async def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        raise NotImplementedError

    def request(self, only: int | None) -> tuple[int, bytes, bytes]:
        """Return method, message and payload of the next case; `only` restricts it to one method."""
        raise NotImplementedError

    async def end(self) -> None:
        """Check the outcome and stop everything. Trouble."""
        raise NotImplementedError

    def clean_up(self) -> None:
        """Remove its files; also called after a failure."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)

    def check(self) -> None:
        """Check what can be checked between requests. Trouble."""
        self._witness.check()
        if self._too_long:
            raise FuzzFailure(self._too_long)

    # -- one case ----------------------------------------------------------------------------------------------------------

    def connect(self, handle: Callable[[Call], None], peer: Peer, fast_path: Any = None) -> None:
        self._handle, self._peer = self._timed(handle), peer
        self._wire = Wire(self._handle, peer, self._clock)
        self._wire.fast_path(fast_path)
        self._wire.on_answer = self._note

    async def case(self, only: int | None) -> tuple[int, bytes]:
        """Send one request and return its method and message."""
        chance, asking = self._chance, self._wire
        method, message, payload = self.request(only)
        drawn = chance.random()
        if self._sizes.random() < self.large_share and method in REQUESTS:
            message = self._generator.enlarged(REQUESTS[method].DESCRIPTOR, message)
        elif drawn < 0.18:
            message = self._generator.mutated(message, chance.choice(self._corpus)[1])
        elif drawn < 0.2:
            message = self._generator.bytes()
        elif len(self._corpus) < CORPUS_MAX and message:
            self._corpus.append((method, message))
        if not self.may(method, message):
            return method, b""
        self._last_method = method
        if drawn > 0.985:
            asking.give(wrong_frame(chance, message))
            if not asking.is_closed and chance.random() < 0.5:
                asking.give(wrong_frame(chance, message))
            asking.reconnect()
        elif drawn > 0.92 and method not in self.unlike_others:
            self._direct(method, message, payload)
        else:
            deadline_ms = (
                chance.choice((0, 1, min(5000, self.deadline_ms))) if drawn > 0.86 else self.deadline_ms
            )
            number = asking.ask(method, message, payload, deadline_ms, message)
            if chance.random() < 0.02:
                asking.cancel(number)
        if asking.is_closed:
            asking.reconnect()
        if len(asking.open_ones) > KEEPING:
            await self.answer_all()
        await self.pause()
        if self._too_long:
            raise FuzzFailure(self._too_long)
        return method, message

    def may(self, method: int, message: bytes) -> bool:
        """Whether this request may be sent. False: it would succeed and end the target."""
        return True

    async def pause(self) -> None:
        await self.iteration()

    async def iteration(self) -> None:
        """Let the loop run one iteration: what earlier requests have left to do."""
        began_s, handled_s = time.thread_time(), self._handled_s
        await asyncio.sleep(0)
        spent_s = time.thread_time() - began_s - (self._handled_s - handled_s)
        self._took(spent_s, "in-the-iteration-after", self._last_method)

    def _timed(self, handle: Callable[[Call], None]) -> Callable[[Call], None]:
        def timed(call: Call) -> None:
            began_s = time.thread_time()
            try:
                handle(call)
            finally:
                spent_s = time.thread_time() - began_s
                self._handled_s += spent_s
                self._took(spent_s, "in", call.method, len(call.message))

        return timed

    def _took(self, spent_s: float, where: str, method: int, message_bytes: int = 0) -> None:
        """Note for how long the loop was kept."""
        if spent_s <= self.longest[0]:
            return
        self.longest = spent_s, f"{where}-{method_name(method)}"
        if spent_s > HANDLE_S:
            size = f" with a message of {message_bytes:,} bytes" if message_bytes else ""
            self._too_long = (
                f"the loop was kept for {spent_s:.1f} s of processor time {where.replace('-', ' ')} "
                f"{method_name(method)}{size}; {HANDLE_S:g} s at most is allowed"
            )

    def _direct(self, method: int, message: bytes, payload: bytes) -> None:
        """Send the request without a transport, as it comes from grpc, inproc and rdma."""
        call = DirectCall(method, message, payload, self._clock.boottime_s() + 60, self._peer)
        try:
            self._handle(call)
        except NvpoolError:
            return
        if isinstance(call.answer, Exception) and not isinstance(call.answer, NvpoolError):
            raise FuzzFailure(f"method {method} raised {call.answer!r}") from call.answer

    async def answer_all(self) -> None:
        """Wait for all replies. Trouble: a request has no reply."""
        left_s = self.waits_s
        while self._wire.open_ones and left_s > 0:
            left_s -= await self.wait_a_little(self.waits_s - left_s)
        if self._wire.open_ones:
            asked = ", ".join(
                f"{method_name(method)} {note[:400].hex()}" for method, note in self._wire.open_ones.values()
            )
            raise FuzzFailure(f"not answered within {self.waits_s:.0f} s: {asked}")

    async def wait_a_little(self, waited_s: float) -> float:
        pause_s = 0.0 if waited_s < 0.3 else 0.01
        await asyncio.sleep(pause_s)
        return pause_s or 0.0005

    def _note(self, method: int, note: Any, status: int, message: bytes) -> None:
        if not status and method in REQUESTS:
            self.answered[method] = self.answered.get(method, 0) + 1
            self.learn(method, note, message)

    def learn(self, method: int, asked: bytes, message: bytes) -> None:
        """Learn from a successful reply."""


def method_name(method: int) -> str:
    return wire.Method.Name(method) if method in REQUESTS else str(method)
