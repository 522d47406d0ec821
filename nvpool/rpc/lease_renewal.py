"""Lease renewal calls that replace a failing connection, so that no lease depends on it.

A lease must be renewed within seconds, whatever happened to the connection of the last renewal: the server
may hang without closing that connection, or take the caller for another peer because of it. Used by
meta/server/shard_member for primary leases and by daemons/store_heartbeat for those of targets. This module does
not retry requests: the next renewal is the retry.
"""

from __future__ import annotations

from nvpool.core.clock import Clock
from nvpool.core.errors import NotLeader, NvpoolError, Stale
from nvpool.rpc.api import Buffer, Reply
from nvpool.rpc.connection_pool import Dialer, Endpoints

REDIAL_S = 2.0
"""Least time between two reconnects after a refused renewal: a TLS handshake costs more than a renewal."""


class LeaseCalls:
    """Renewal calls through `dialer`, which may be shared: pending requests of other callers are not
    disturbed."""

    def __init__(self, dialer: Dialer, clock: Clock) -> None:
        self._dialer = dialer
        self._clock = clock
        self._redialed_s = float("-inf")

    async def call(self, endpoints: Endpoints, method: int, message: Buffer, *, deadline_s: float) -> Reply:
        """Call as `Dialer.call` does; after an error about the connection make the next call reconnect.

        Stale (the caller has lost the lease) and NotLeader (there is no leader now) are answers about the
        lease itself. Another connection would not change them, so they keep the connection.
        """
        try:
            return await self._dialer.call(endpoints, method, message, deadline_s=deadline_s)
        except NvpoolError as error:
            if not isinstance(error, NotLeader | Stale):
                self._redial(endpoints)
            raise

    def _redial(self, endpoints: Endpoints) -> None:
        now_s = self._clock.boottime_s()
        if now_s - self._redialed_s >= REDIAL_S:
            self._redialed_s = now_s
            self._dialer.redial(endpoints)
