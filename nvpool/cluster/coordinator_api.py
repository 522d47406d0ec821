"""Coordinator interface: pool map with compare-and-set and watch, presence of nodes, and leader election.

Used by the supervisor. Implementations: `cluster/embedded_coordinator` (one machine; the map in the engine of kv/) and
`cluster/etcd/coordinator` (several machines; consensus is etcd's). All pass `testing/contracts/coordinator`.
A coordinator makes no decisions: pure functions of poolmap/ compute the next map.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from nvpool.poolmap.model import PoolMap

WATCH_S_MAX = 60.0
"""Longest wait of one watch. Longer watches are made in steps, so that a dead watcher is soon forgotten."""

LEASE_S_MIN = 2.0
"""Shortest lease: a renewal may be lost with an etcd leader, and the next one comes after etcd's election."""


class CoordinatorLease(Protocol):
    """A right that ends by itself unless it is renewed; the coordinator renews it.

    The lease time counts from the sending of the last successful renewal, on CLOCK_BOOTTIME. So the lease
    ends for its holder before it ends for anybody else, also if this process or the machine was stopped.
    """

    lost: asyncio.Future[None]
    """Done when the lease has ended and will not be renewed."""

    @property
    def holds(self) -> bool:
        """Whether the lease is valid now. Check it after the work and before the reply."""

    @property
    def in_doubt(self) -> bool:
        """Whether half of the lease has passed without a renewal. If so, start nothing that takes long."""

    @property
    def left_s(self) -> float:
        """Seconds from now for which the lease is certainly valid.

        This holds also for clocks that run faster than ours.

        Rights that are granted under the lease must end within that time. Infinite if the lease ends only
        with this process.
        """

    former: str | None
    """For a lease of `lead`: the previous leader, or None.

    The name is set if the previous leader's lease expired completely, and with it all rights that were
    granted under it. None if that leader released its lease, or if no previous leader is known."""

    former_led_s: float
    """Least number of seconds since `former` became leader, by its last heartbeat; 0: not known."""

    async def release(self) -> None:
        """Release the lease. Others see it immediately if the coordinator is reachable, else when the lease
        expires."""


class MapCoordinator(Protocol):
    @property
    def pool_map(self) -> PoolMap:
        """The newest map known here. It survives a power failure."""

    async def newest(self) -> PoolMap:
        """Return the pool's map as of some moment during this call.

        `pool_map` is then at least as new. Unavailable.
        """

    async def replace(self, new: PoolMap, leader: CoordinatorLease | None = None) -> None:
        """Make `new` the pool's map if its epoch is the next one.

        On return the map survives a power failure and watchers are notified. With `leader`, a lease of
        `lead`, the map is replaced only if that lease exists in the same step.

        If this raises, the old map is in force (after Unavailable the old or the new one; read it again).

        StaleEpoch       another change came first: read pool_map, decide again, retry
        StaleLease       another node leads, or none: make no more decisions
        InvalidRequest   the map is inconsistent or belongs to another pool: it was rejected
        """

    async def watch(self, newer_than: int, wait_s: float) -> PoolMap | None:
        """Return the newest map with an epoch above `newer_than`, or None after `wait_s`.

        The wait is at most WATCH_S_MAX. Returns immediately if there is such a map, otherwise when the next one
        comes. Maps in between may be skipped; an older map never follows a newer one.
        """

    async def announce(self, name: str, value: bytes, lease_s: float) -> CoordinatorLease:
        """Publish `value` under `name` for all to see while the lease lasts (at least LEASE_S_MIN).

        Replaces what was published under the name before. Unavailable.
        """

    def present(self) -> Mapping[str, bytes]:
        """Published names and values as known here. A dead publisher disappears when its lease expires."""

    async def watch_present(self, known: Mapping[str, bytes], wait_s: float) -> Mapping[str, bytes]:
        """Return `present()` as soon as it differs from `known`, or after `wait_s` (at most WATCH_S_MAX)."""

    async def lead(self, name: str, lease_s: float, wait_s: float) -> CoordinatorLease | None:
        """Acquire the pool's only leadership lease as soon as it is free.

        Returns None if another holder keeps it for `wait_s`. `name` is shown to people. Unavailable.
        """

    def leader(self) -> str | None:
        """Name of the leader as known here, or None."""

    async def close(self) -> None:
        """Wake all watchers with None, release leases if possible, and free resources.

        May be called twice.
        """
