"""Calls that renew a lease: a failure on one connection makes another connection, so that no lease depends on a bad one.

A lease has to be renewed within seconds, whatever happened to the connection over which it was renewed before: the other side
may hang without closing it, or take the caller for somebody else because of it. Used by meta/server/member for the leases of
primaries and by daemons/heartbeat for those of targets. Requests are not repeated here: the next renewal is the repetition.
"""

from __future__ import annotations

from nvpool.core.clock import Clock
from nvpool.core.errors import NotLeader, NvpoolError, Stale
from nvpool.rpc.api import Buffer, Reply
from nvpool.rpc.connection_pool import Dialer, Endpoints

REDIAL_S = 2.0
"""Between two connections that are given up for a refused renewal: a TLS handshake costs more than a renewal does."""


class LeaseCalls:
    """`dialer` may be shared with other callers, whose requests under way are not disturbed."""

    def __init__(self, dialer: Dialer, clock: Clock) -> None:
        self._dialer = dialer
        self._clock = clock
        self._redialed_s = float("-inf")

    async def call(self, endpoints: Endpoints, method: int, message: Buffer, *, deadline_s: float) -> Reply:
        """As Dialer.call. Has the next call use another connection after any error that is no answer about the lease itself.

        Answers about the lease itself are Stale (it is not the caller's any more) and NotLeader (there is no leader to ask at
        the moment): with these another connection would make no difference.
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
