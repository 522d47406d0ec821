"""Renewed etcd leases, which expire for their holder before they expire in etcd.

A renewal waits only for its own answer. Our time counts from before the renewal was sent; etcd's counts from
its arrival, and a new etcd leader starts the time again. So our time is always the shorter one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from math import ceil

from nvpool.cluster.coordinator_api import LEASE_S_MIN, CoordinatorLease
from nvpool.cluster.etcd.client import PAUSE_S, EtcdCalls
from nvpool.core.clock import Clock
from nvpool.core.errors import Unavailable

CLOCKS_DIFFER = 0.05
"""Assumed largest difference in clock speed: etcd's clock may run this much faster than ours."""
RELEASE_S = 2.0
"""Time limit for releasing a lease; after it the lease must expire."""


class RenewedLease:
    """Base class of leases that are renewed until `lost` is done."""

    lost: asyncio.Future[None]

    def _begin(self, renewing: Coroutine[None, None, None]) -> None:
        loop = asyncio.get_running_loop()
        self.lost = loop.create_future()
        self.renewing = loop.create_task(renewing)

    def _end(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    async def release(self) -> None:
        if self.lost.done():
            return
        self._end()
        self.renewing.cancel()
        try:
            await self._give_back(RELEASE_S)
        except Unavailable:
            pass  # the lease expires

    async def _give_back(self, wait_s: float) -> None:
        """Release the lease in etcd. Unavailable."""
        raise NotImplementedError


class EtcdLease(RenewedLease):
    """An etcd lease with this `number`."""

    former = None
    former_led_s = 0.0

    def __init__(self, calls: EtcdCalls, clock: Clock, number: int, lease_s: float, sent_s: float) -> None:
        self._calls = calls
        self._clock = clock
        self.number = number
        self._lease_s = lease_s
        self._until_s = sent_s + lease_s
        self._begin(self._renew(sent_s))

    @classmethod
    async def take(cls, calls: EtcdCalls, clock: Clock, lease_s: float, wait_s: float) -> EtcdLease:
        """Create a lease. Unavailable."""
        lease_s = max(lease_s, LEASE_S_MIN)
        while True:
            sent_s = clock.boottime_s()
            number = await calls.grant_lease(ceil(lease_s), wait_s)
            took_s = clock.boottime_s() - sent_s
            if took_s < lease_s / 2:
                return cls(calls, clock, number, lease_s, sent_s)
            wait_s -= took_s
            if wait_s <= 0:
                raise Unavailable("etcd is too slow to give a lease")

    @property
    def holds(self) -> bool:
        return not self.lost.done() and self._clock.boottime_s() < self._until_s

    @property
    def in_doubt(self) -> bool:
        return self.lost.done() or self._clock.boottime_s() >= self._until_s - self._lease_s / 2

    @property
    def left_s(self) -> float:
        if self.lost.done():
            return 0.0
        return max(0.0, self._until_s - CLOCKS_DIFFER * self._lease_s - self._clock.boottime_s())

    async def _renew(self, sent_s: float) -> None:
        try:
            while True:
                await asyncio.sleep(max(0.0, sent_s + self._lease_s / 3 - self._clock.boottime_s()))
                sent_s = self._clock.boottime_s()
                left_s = self._until_s - sent_s
                if left_s <= 0:
                    return
                try:
                    if not await self._calls.keep_alive(self.number, left_s / 4):  # time for others
                        return
                    self._until_s = sent_s + self._lease_s
                except Unavailable:
                    sent_s = self._clock.boottime_s() - self._lease_s / 3 + PAUSE_S  # soon, elsewhere
        finally:
            self._end()

    async def _give_back(self, wait_s: float) -> None:
        await self._calls.revoke_lease(self.number, wait_s)


async def give_up(leases: Iterable[CoordinatorLease]) -> None:
    """Release all leases concurrently."""
    await asyncio.gather(*(lease.release() for lease in leases))
