"""What a pool needs of whoever keeps its map: the newest map, compare-and-set, being told of the next one, who is there, and
who leads.

Called by the supervisor. Implementations: `cluster/embedded` (one machine; the map in the engine of kv/) and
`cluster/etcd/coordinator` (several; consensus is etcd's). All pass `testing/contracts/coordinator`. A coordinator decides
nothing: which map comes next is made by pure functions of poolmap/.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from nvpool.poolmap.model import PoolMap

WATCH_S_MAX = 60.0
"""The longest one watch waits; longer ones are asked in steps, so that a watcher that is gone is soon forgotten."""

LEASE_S_MIN = 2.0
"""The shortest: a renewal may be lost with a leader of etcd's, and the next one comes after an election there."""


class Lease(Protocol):
    """A right that ends by itself unless it is renewed, which its coordinator does.

    Its time counts from the sending of the last renewal that was answered, on CLOCK_BOOTTIME. So it ends here before it ends
    for anybody else, also where this process or the machine was stopped.
    """

    lost: asyncio.Future[None]
    """Done when it has ended and will not be renewed."""

    @property
    def holds(self) -> bool:
        """Whether it is ours at this moment. Ask after the work and before the answer."""

    @property
    def in_doubt(self) -> bool:
        """Whether half of it has gone by without a renewal: begin nothing that takes long."""

    @property
    def left_s(self) -> float:
        """For how long from now it is ours for certain, also by clocks that go faster than ours: rights that are given under it
        end within that. Infinite where it ends only with this process."""

    former: str | None
    """Of `lead`: who led before, where his lease was over as a whole, and with it all that was given under it; None where he
    has given it up, or nobody is known."""

    former_led_s: float
    """Seconds since the lead of `former` began, at least, by its last sign of life; 0: not known."""

    async def release(self) -> None:
        """Give it up; others see that at once where the coordinator can be reached, else when its time is over."""


class Coordinator(Protocol):
    @property
    def pool_map(self) -> PoolMap:
        """The newest map known here. It survives the loss of power."""

    async def newest(self) -> PoolMap:
        """The pool's map at some moment of this call; `pool_map` is at least as new then. Unavailable."""

    async def replace(self, new: PoolMap, leader: Lease | None = None) -> None:
        """Make `new` the pool's map if its epoch is the next one; on return it survives the loss of power and watchers know.
        With `leader`, of `lead`: only while that lease is there, in the same step.

        If this raises, the map is the old one (Unavailable: or the new one; look again).

        StaleEpoch       somebody else was first: take pool_map, decide again, repeat
        StaleLease       another leads, or nobody: decide nothing more
        InvalidRequest   the map contradicts itself or is another pool's: it was never considered
        """

    async def watch(self, newer_than: int, wait_s: float) -> PoolMap | None:
        """The newest map with an epoch above `newer_than`, at once where there is one, else the next that comes within
        `wait_s` (at most WATCH_S_MAX), else None. Maps in between may be left out; none is ever followed by an older one."""

    async def announce(self, name: str, value: bytes, lease_s: float) -> Lease:
        """Be present under the name, with `value` for all to see, while the lease lasts (LEASE_S_MIN and more). Takes the
        place of what was announced under it before. Unavailable."""

    def present(self) -> Mapping[str, bytes]:
        """Who is there, name -> value, as far as this coordinator knows now. Of who has died it knows when his time is over."""

    async def watch_present(self, known: Mapping[str, bytes], wait_s: float) -> Mapping[str, bytes]:
        """`present()`, as soon as it differs from `known`, or after `wait_s` (at most WATCH_S_MAX)."""

    async def lead(self, name: str, lease_s: float, wait_s: float) -> Lease | None:
        """The lease of which there is one in the pool, as soon as nobody else has it; None where somebody has for `wait_s`.
        `name` is shown to people. Unavailable."""

    def leader(self) -> str | None:
        """The name of who leads, as far as this coordinator knows now."""

    async def close(self) -> None:
        """Wake all watchers with None, give leases up as far as they can be, and release what is held. May be called twice."""
