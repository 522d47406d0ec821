"""The network of a simulated pool: frames take time, connections break, nodes are cut off from one another.

Within a connection frames keep their order, as TCP keeps it; across connections they do not. Who is cut off hears nothing; a
connection that has waited for KEEPALIVE_S ends on both sides, as keepalive ends it. Called by `sim/pool`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import Context

from nvpool.core.clock import Clock
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.errors import Unreachable
from nvpool.rpc.api import Connection, Greeting, Handler, Listener
from nvpool.rpc.transports.inproc import InprocConnection, InprocListener, InprocTransport
from nvpool.testing.sim.loop import VirtualLoop

KEEPALIVE_S = 10.0


class SimulatedNetwork:
    """`places`: which node each process is on; processes of one node are never cut off from one another."""

    def __init__(self, loop: VirtualLoop, seed: str) -> None:
        self.loop = loop
        self.chance = random.Random(seed)
        self.listeners: dict[str, InprocListener] = {}
        self.owners: dict[str, str] = {}  # listener -> process
        self.places: dict[str, str] = {}
        self.contexts: dict[str, Context] = {}
        """In which a process takes what comes."""
        self.broken: dict[str, str] = {}
        """Endpoint -> how connections to it fail; see sim/endpoints."""
        self.reset_share = 0.0
        """Of all frames, how many break their connection."""
        self.slow_share = 0.02
        self.slow_s = 0.2
        self.frames = 0
        self._cut: set[tuple[str, str]] = set()
        """Sender, receiver."""
        self._broken_links: set[tuple[str, str]] = set()
        """Likewise, for longer than `heal` mends."""
        self._pipes: dict[Pipe, None] = {}

    # -- faults

    def cut(self, one: str, other: str) -> None:
        """Nothing goes between the two nodes from now on."""
        self.lose(one, other)
        self.lose(other, one)

    def lose(self, sender: str, receiver: str) -> None:
        """Nothing arrives any more of what the first node sends to the second."""
        if sender != receiver:
            self._cut.add((sender, receiver))

    def heal(self) -> None:
        """All can reach all again; what was held back arrives, where its connection still stands."""
        self._cut.clear()
        self._release()

    def break_link(self, *ways: tuple[str, str]) -> None:
        """As `lose`, until `mend_links`."""
        self._broken_links.update(ways)

    def mend_links(self) -> None:
        self._broken_links.clear()
        self._release()

    def _release(self) -> None:
        for pipe in list(self._pipes):
            pipe.release()

    def loses(self, sender: str, receiver: str) -> bool:
        """Whether nothing arrives of what the first process sends to the second. What comes the other way arrives, though TCP
        would stop that too when acknowledgements are missing for long."""
        way = self.places[sender], self.places[receiver]
        return way in self._cut or way in self._broken_links

    def is_cut(self, one: str, other: str) -> bool:
        """Whether the two processes can make no connection."""
        return self.loses(one, other) or self.loses(other, one)

    def hang_up(self, process: str) -> None:
        """The process has ended: who was connected sees it immediately, or, where he is cut off, by keepalive."""
        for name in [name for name, owner in self.owners.items() if owner == process]:
            self.listeners.pop(name, None)
            del self.owners[name]
        for pipe in list(self._pipes):
            if process in (pipe.source, pipe.target):
                pipe.break_off("the peer has ended")

    def hang_up_at(self, endpoint: str) -> None:
        """Every connection that was made to this endpoint ends."""
        for pipe in list(self._pipes):
            if pipe.endpoint == endpoint:
                pipe.break_off("the connection was reset")

    # -- for the transport

    def delay_s(self) -> float:
        chance = self.chance
        return (
            chance.expovariate(1 / self.slow_s)
            if chance.random() < self.slow_share
            else chance.uniform(0.00005, 0.0008)
        )

    def pipe(self, source: str, target: str, connection: InprocConnection) -> Pipe:
        pipe = Pipe(self, source, target, connection)
        self._pipes[pipe] = None
        return pipe

    def forget(self, pipe: Pipe) -> None:
        self._pipes.pop(pipe, None)


class Pipe:
    """One direction of a connection."""

    def __init__(
        self, network: SimulatedNetwork, source: str, target: str, connection: InprocConnection
    ) -> None:
        self.source, self.target = source, target
        self.endpoint = connection.peer.address
        self._network = network
        self._connection = connection
        self._last_s = 0.0
        self._held: list[tuple[Callable, tuple]] = []
        self._breaks: asyncio.TimerHandle | None = None

    def __call__(self, endpoint: str, kind: int, code: int, deliver: Callable, *frame) -> None:
        network = self._network
        if self._connection.closed:
            network.forget(self)
            return
        network.frames += 1
        if network.reset_share and network.chance.random() < network.reset_share:
            network.loop.call_soon(self.break_off, "the connection was reset")
            return
        self._last_s = max(self._last_s + 1e-6, network.loop.time() + network.delay_s())
        network.loop.call_at(
            self._last_s, self._arrive, deliver, frame, context=network.contexts.get(self.target)
        )

    def _arrive(self, deliver: Callable, frame: tuple) -> None:
        network = self._network
        if self._connection.closed:
            network.forget(self)
        elif self._held or network.loses(self.source, self.target):
            self._held.append((deliver, frame))
            if self._breaks is None:
                self._breaks = network.loop.call_later(KEEPALIVE_S, self.break_off, "keepalive")
        else:
            deliver(*frame)

    def release(self) -> None:
        network, held, self._held = self._network, self._held, []
        if self._breaks is not None:
            self._breaks.cancel()
            self._breaks = None
        for deliver, frame in held:
            self._last_s = max(self._last_s + 1e-6, self._network.loop.time() + self._network.delay_s())
            self._network.loop.call_at(
                self._last_s, self._arrive, deliver, frame, context=network.contexts.get(self.target)
            )

    def break_off(self, reason: str) -> None:
        self._network.forget(self)
        self._connection.lose(reason)


class SimTransport(InprocTransport):
    """The in-process transport as one process sees it."""

    def __init__(self, network: SimulatedNetwork, process: str, clock: Clock) -> None:
        super().__init__(clock)
        self._network = network
        self._process = process
        self._listeners = network.listeners

    async def connect(self, endpoint: str, greeting: Greeting, *, deadline_s: float) -> Connection:
        network, name = self._network, parse_endpoint(endpoint).path
        await asyncio.sleep(network.delay_s())
        owner = network.owners.get(name)
        if owner is None:
            raise Unreachable(f"nobody answers at {endpoint}")
        if network.is_cut(self._process, owner):
            await asyncio.sleep(max(0.0, deadline_s - self.clock.boottime_s()))
            raise Unreachable(f"nobody answers at {endpoint}: no answer in time")
        connection = await super().connect(endpoint, greeting, deadline_s=deadline_s)
        connection._carry = network.pipe(self._process, owner, connection)
        connection._served._carry = network.pipe(owner, self._process, connection)
        return connection

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        listener = await super().listen(endpoint, greeting, handler)
        self._network.owners[parse_endpoint(endpoint).path] = self._process
        return listener
