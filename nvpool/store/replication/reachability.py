"""Report of unreachable targets on other nodes, sent with the heartbeats to the manager.

The manager receives heartbeats from both ends of a broken link between two nodes. Without this report the
chains that cross the link would wait until the link is repaired, since neither end is silent.

A target is probed when it has not answered a write of a chain for some time. The probe uses its own
connection: a store that is slow, or that has much data to receive, accepts the connection and is not
reported. A reported target is probed until it can be reached again, so that it does not rejoin its chains
while it is unreachable.

`daemons/store_heartbeat` creates this object. It runs its own loop, which ends with the heartbeats. Each probe has
a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError, Unavailable
from nvpool.rpc.connection_pool import Dialer
from nvpool.store.replication.peer_connections import ReplicaPeers

LOOK_S = 0.5
CONNECT_S = 1.5
"""Timeout of a connection to a target: a host that is up answers in milliseconds."""


class ReachabilityProbe:
    """Prober of suspected targets.

    `unreachable` is the set to report. `on_change` is called when the set has changed.
    """

    def __init__(
        self, peers: ReplicaPeers, dialer: Dialer, clock: Clock, *, on_change: Callable[[], None]
    ) -> None:
        """Create a prober. `dialer` must not be shared, since each probe makes a new connection."""
        self._peers = peers
        self._dialer = dialer
        self._clock = clock
        self._on_change = on_change
        self.unreachable: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await self.run_once()
        finally:
            await self._dialer.close()

    async def run_once(self) -> None:
        """Probe the suspected targets and those that were unreachable before."""
        wanted = [
            (target, endpoints)
            for target in sorted(self._peers.suspects() | self.unreachable)
            if (endpoints := self._peers.elsewhere(target)) is not None
        ]
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
            return True  # the target answers
        self._dialer.redial(endpoints)
        return True
