"""Network of a simulated pool: frames take time, connections break, nodes are cut off from one another.

Frames keep their order within a connection, as with TCP, but not across connections. A process that is cut
off receives nothing; a connection that has waited for KEEPALIVE_S ends on both sides, as keepalive ends it.
Used by `sim/pool`.
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
from nvpool.testing.sim.virtual_time_loop import VirtualLoop

KEEPALIVE_S = 10.0


class SimulatedNetwork:
    """Network between nodes. `places`: node of each process; processes of one node are never cut off from one
    another."""

    def __init__(self, loop: VirtualLoop, seed: str) -> None:
        self.loop = loop
        self.chance = random.Random(seed)
        self.listeners: dict[str, InprocListener] = {}
        self.owners: dict[str, str] = {}  # listener -> process
        self.places: dict[str, str] = {}
        self.contexts: dict[str, Context] = {}
        """Context in which a process handles its events."""
        self.broken: dict[str, str] = {}
        """Endpoint -> how a connection to it fails; see sim/endpoints."""
        self.reset_share = 0.0
        """Share of frames that break their connection."""
        self.slow_share = 0.02
        self.slow_s = 0.2
        self.frames = 0
        self._cut: set[tuple[str, str]] = set()
        """(sender, receiver) pairs."""
        self._broken_links: set[tuple[str, str]] = set()
        """Further pairs, which `heal` does not restore."""
        self._pipes: dict[Pipe, None] = {}

    # -- faults

    def cut(self, one: str, other: str) -> None:
        """Cut the two nodes off from each other."""
        self.lose(one, other)
        self.lose(other, one)

    def lose(self, sender: str, receiver: str) -> None:
        """Drop everything that the first node sends to the second."""
        if sender != receiver:
            self._cut.add((sender, receiver))

    def heal(self) -> None:
        """Restore all but the broken links. Delayed frames arrive if their connection still exists."""
        self._cut.clear()
        self._release()

    def break_link(self, *ways: tuple[str, str]) -> None:
        """Drop frames in these directions, as `lose` does, until `mend_links`."""
        self._broken_links.update(ways)

    def mend_links(self) -> None:
        self._broken_links.clear()
        self._release()

    def _release(self) -> None:
        for pipe in list(self._pipes):
            pipe.release()

    def loses(self, sender: str, receiver: str) -> bool:
        """Whether frames from the first process to the second are lost.

        The other direction works, although TCP would stop it too when acknowledgements are missing for long.
        """
        way = self.places[sender], self.places[receiver]
        return way in self._cut or way in self._broken_links

    def is_cut(self, one: str, other: str) -> bool:
        """Whether the two processes cannot connect."""
        return self.loses(one, other) or self.loses(other, one)

    def hang_up(self, process: str) -> None:
        """End all connections of a process that has ended.

        Peers notice it immediately, or by keepalive if they are cut off.
        """
        for name in [name for name, owner in self.owners.items() if owner == process]:
            self.listeners.pop(name, None)
            del self.owners[name]
        for pipe in list(self._pipes):
            if process in (pipe.source, pipe.target):
                pipe.break_off("the peer has ended")

    def hang_up_at(self, endpoint: str) -> None:
        """End every connection that was made to this endpoint."""
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
    """The in-process transport as one process uses it."""

    def __init__(self, network: SimulatedNetwork, process: str, clock: Clock) -> None:
        super().__init__(clock)
        self._network = network
        self._process = process
        self.listeners = network.listeners

    async def connect(self, endpoint: str, greeting: Greeting, *, deadline_s: float) -> Connection:
        network, name = self._network, parse_endpoint(endpoint).path
        await asyncio.sleep(network.delay_s())
        owner = network.owners.get(name)
        if owner is None:
            raise Unreachable(f"no reply from {endpoint}")
        if network.is_cut(self._process, owner):
            await asyncio.sleep(max(0.0, deadline_s - self.clock.boottime_s()))
            raise Unreachable(f"no reply from {endpoint}: timed out")
        connection = await super().connect(endpoint, greeting, deadline_s=deadline_s)
        connection.carry = network.pipe(self._process, owner, connection)
        connection.server_side.carry = network.pipe(owner, self._process, connection)
        return connection

    async def listen(self, endpoint: str, greeting: Greeting, handler: Handler) -> Listener:
        listener = await super().listen(endpoint, greeting, handler)
        self._network.owners[parse_endpoint(endpoint).path] = self._process
        return listener
