"""Targets on other nodes that this one cannot reach: what a store reports to the manager with its signs of life.

The manager hears both ends of a broken link between two nodes. Without this report the chains that cross the link would wait
for its end, since neither end is silent. A target is looked at when it has not answered a write of a chain for some time, over
a connection of its own: a store that is slow, or that has much to take in, accepts one and is not reported. One that was
reported is looked at until it can be reached again, so that it does not join anew before.

Made by daemons/heartbeat; a loop of its own, which ends with the signs of life. Each look has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError, Unavailable
from nvpool.rpc.connection_pool import Dialer
from nvpool.store.replication.peer_connections import Peers

LOOK_S = 0.5
CONNECT_S = 1.5
"""For a connection to a target: a host that is up answers in milliseconds."""


class Reach:
    """`unreachable` is what to report. `on_change` is called when it has changed."""

    def __init__(self, peers: Peers, dialer: Dialer, clock: Clock, *, on_change: Callable[[], None]) -> None:
        """`dialer`: for this alone, since connections are made anew for each look."""
        self._peers = peers
        self._dialer = dialer
        self._clock = clock
        self._on_change = on_change
        self.unreachable: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await self.run_once()
        finally:
            await self._dialer.close()

    async def run_once(self) -> None:
        """Look at those that are suspected, and at those that were unreachable before."""
        wanted = [(target, endpoints) for target in sorted(self._peers.suspects() | self.unreachable)
                  if (endpoints := self._peers.elsewhere(target)) is not None]
        reached = await asyncio.gather(*(self._is_reached(endpoints) for _, endpoints in wanted))
        now = frozenset(target for (target, _), found in zip(wanted, reached, strict=True) if not found)
        if now != self.unreachable:
            self.unreachable = now
            self._on_change()

    async def _is_reached(self, endpoints: tuple[str, ...]) -> bool:
        try:
            await self._dialer.connect(endpoints, self._clock.boottime_s() + CONNECT_S)
        except Unavailable:
            return False
        except NvpoolError:
            return True  # somebody answers
        self._dialer.redial(endpoints)
        return True
