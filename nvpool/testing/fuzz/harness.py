"""A service and one caller: the common part of all fuzz targets, from choosing a case to waiting for the
reply.

A derived class makes the service in `begin`, makes requests in `request`, and checks the outcome in `end`.
"""

from __future__ import annotations

import asyncio
import random
import shutil
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

    # -- one case ----------------------------------------------------------------------------------------------------------

    def connect(self, handle: Callable[[Call], None], peer: Peer, fast_path: Any = None) -> None:
        self._handle, self._peer = handle, peer
        self._wire = Wire(handle, peer, self._clock)
        self._wire.fast_path(fast_path)
        self._wire.on_answer = self._note

    async def case(self, only: int | None) -> tuple[int, bytes]:
        """Send one request and return its method and message."""
        chance, asking = self._chance, self._wire
        method, message, payload = self.request(only)
        drawn = chance.random()
        if drawn < 0.18:
            message = self._generator.mutated(message, chance.choice(self._corpus)[1])
        elif drawn < 0.2:
            message = self._generator.bytes()
        elif len(self._corpus) < CORPUS_MAX and message:
            self._corpus.append((method, message))
        if not self.may(method, message):
            return method, b""
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
        return method, message

    def may(self, method: int, message: bytes) -> bool:
        """Whether this request may be sent. False: it would succeed and end the target."""
        return True

    async def pause(self) -> None:
        await asyncio.sleep(0)

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
                f"{method_name(method)} {note.hex()}" for method, note in self._wire.open_ones.values()
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
