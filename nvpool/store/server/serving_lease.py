"""Serving lease of a replicated target: until when it may answer reads and acknowledge writes.

A target whose chains have other members is replaced when it sends no heartbeats. So it may serve only while
no other target can have replaced it: until the end of a lease. The lease counts from the time when the
answered heartbeat was sent, on CLOCK_BOOTTIME. The service checks the lease after the work and before the
answer, so that a process that was stopped in between does not answer with an old state. A target that was
removed from its chains and returns must first know the map that removed it (`epoch_min`). A target that is
the only member of its chains needs no lease: no other target can replace it.

A target that may have lost unstable writes (store/disk/write_verifier) answers no request, not even from a
target that would copy from it, before the map records the possible loss. A client that asks later whether a
chain still has its writes gets the answer from the map.

`daemons/store` creates the lease and sends the heartbeats; `store/server/service` checks the lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import StaleTenure
from nvpool.poolmap.chains.transitions import shared
from nvpool.poolmap.model import PoolMap
from nvpool.store.chunks.location_leases import LocationLeases


class ServingLease:
    """Serving lease of one target.

    `shared` says whether any chain of the target has another member, so that the lease matters. `shared` is
    False before the first map.
    """

    def __init__(
        self,
        target: int,
        clock: Clock = SYSTEM_CLOCK,
        location_leases: LocationLeases | None = None,
        *,
        until_s: float = -math.inf,
        verifier: int = 0,
    ):
        """Create the lease of `target`.

        The table of `location_leases` has the same end time for clients that read the drive directly.
        `until_s` inf is for a pool without replacement of targets. `verifier` is the store's write verifier;
        0: the map does not record it.
        """
        self.target = target
        self.verifier = verifier
        self.vouched = not verifier
        """Whether the map records what the target may have lost. Until then it answers no request."""
        self.shared = False
        self.until_s = until_s
        self.refused = ""
        """Why the last heartbeat got no lease; empty if it got one."""
        self.changed: list[Callable[[], None]] = []
        """Listeners that are called after a new map, so that waiting callers are notified soon."""
        self._clock = clock
        self._location_leases = location_leases
        self._epoch = self._epoch_min = 0
        self._epoch_reported: int | None = None
        self._readable: frozenset[tuple[int, int]] = frozenset()

    def update_map(self, pool_map: PoolMap) -> None:
        """Follow this map.

        If the map ends the right to read some chains here, location leases of clients on this host are
        invalidated first.
        """
        readable = frozenset(
            (table.id, number)
            for table in pool_map.tables
            for number, chain in enumerate(table.chains)
            if self.target in chain.readable
        )
        if self._location_leases is not None and self._readable - readable:
            self._location_leases.changing_all()
        self._readable = readable
        self._epoch = pool_map.epoch
        known = pool_map.target_by_id.get(self.target)
        self.vouched = not self.verifier or (known is not None and known.verifier == self.verifier)
        self.shared = self.target in shared(pool_map)
        self._update_location_leases()
        for listener in self.changed:
            listener()

    @property
    def epoch(self) -> int:
        """Epoch of the map that is followed."""
        return self._epoch

    @property
    def is_caught_up(self) -> bool:
        """Whether the followed map is as new as all maps of this target's earlier processes.

        This is true once the map has reached the epoch that a leader first reported to this process. Later
        maps are newer in any case.
        """
        return self._epoch_reported is not None and self._epoch >= self._epoch_reported

    def renewed(self, sent_s: float, lease_s: float, epoch_min: int, epoch: int = 0) -> None:
        """Record the answer to a heartbeat that was sent at `sent_s`. `epoch` is that of the leader's map."""
        if self._epoch_reported is None and epoch:
            self._epoch_reported = epoch
        self.until_s = max(self.until_s, sent_s + lease_s)
        self._epoch_min = max(self._epoch_min, epoch_min)
        self._update_location_leases()

    def _update_location_leases(self) -> None:
        if self._location_leases is not None:
            self._location_leases.serve_until(
                math.inf if not self.shared else self.until_s if self._epoch >= self._epoch_min else 0.0
            )

    def holds(self) -> bool:
        """Whether the target may serve now. Call after the work and before the answer."""
        return not self.shared or (self._clock.boottime_s() < self.until_s and self._epoch >= self._epoch_min)

    def check(self) -> None:
        """Raise StaleTenure unless the lease holds; the work may have been done."""
        if not self.holds():
            raise StaleTenure(may_be_applied=True)
