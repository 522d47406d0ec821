"""Leases of etcd, renewed: rights that end here before they end there.

A renewal waits behind nothing but its own answer. The time counts from the moment before it was sent; etcd's counts from when
it came there, and a new leader of etcd begins it anew: so ours is the shorter one always.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from math import ceil

from nvpool.cluster.api import LEASE_S_MIN, Lease
from nvpool.cluster.etcd.client import PAUSE_S, EtcdCalls
from nvpool.core.clock import Clock
from nvpool.core.errors import Unavailable

CLOCKS_DIFFER = 0.05
"""So much faster than ours may etcd's clock go."""
RELEASE_S = 2.0
"""Giving one up may take so long; then its time has to run out."""


class Renewed:
    """What is ours until `lost`, and renewed until then."""

    lost: asyncio.Future[None]

    def _begin(self, renewing: Coroutine[None, None, None]) -> None:
        loop = asyncio.get_running_loop()
        self.lost = loop.create_future()
        self._renewing = loop.create_task(renewing)

    def _end(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    async def release(self) -> None:
        if self.lost.done():
            return
        self._end()
        self._renewing.cancel()
        try:
            await self._give_back(RELEASE_S)
        except Unavailable:
            pass  # its time runs out

    async def _give_back(self, wait_s: float) -> None:
        """Say in etcd that it is over. Unavailable."""
        raise NotImplementedError


class EtcdLease(Renewed):
    """`number` in etcd."""

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
        """A new one. Unavailable."""
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
                    if not await self._calls.keep_alive(self.number, left_s / 4):  # time for other members
                        return
                    self._until_s = sent_s + self._lease_s
                except Unavailable:
                    sent_s = self._clock.boottime_s() - self._lease_s / 3 + PAUSE_S  # again at once, elsewhere
        finally:
            self._end()

    async def _give_back(self, wait_s: float) -> None:
        await self._calls.revoke_lease(self.number, wait_s)


async def give_up(leases: Iterable[Lease]) -> None:
    """All of them, at once."""
    await asyncio.gather(*(lease.release() for lease in leases))


