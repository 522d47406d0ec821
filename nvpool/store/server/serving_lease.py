"""Until when this target may serve what others hold too.

A target whose chains have more members than itself is replaced when it is silent; so it may answer reads, and acknowledge
writes, only while nobody can have taken its place: until a lease has ended that counts from the sending of the sign of life
that was answered, on CLOCK_BOOTTIME. It is looked at after the work and before the answer, so that a process that was stopped
between the two does not speak for the past. A target that was taken out and comes back has to know that first (`epoch_min`).
Whoever holds its chains alone needs no lease: nobody can take its place.

A target that may have lost what it had not flushed (store/disk/write_verifier) answers nobody, not even who would copy from it,
before the map says so: whoever asks later whether a chain still has what was written to it is told by the map.

Made by daemons/store, which sends the signs of life; asked by store/server/service.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import StaleTenure
from nvpool.poolmap.chains.transitions import shared
from nvpool.poolmap.model import PoolMap
from nvpool.store.chunks.location_leases import Lender


class Tenure:
    """`shared`: whether any of the target's chains has another member, so that its time counts. Not before there is a map."""

    def __init__(self, target: int, clock: Clock = SYSTEM_CLOCK, lender: Lender | None = None, *,
                 until_s: float = -math.inf, verifier: int = 0):
        """The lender's table says the same to clients that read the drive themselves. `until_s` inf: for a pool in which nobody
        is replaced. `verifier`: the store's; 0: nobody tells the map of it."""
        self.target = target
        self.verifier = verifier
        self.vouched = not verifier
        """Whether the map says what the target may have lost. Before that it answers nobody."""
        self.shared = False
        self.until_s = until_s
        self.refused = ""
        """Why the last sign of life was not answered with a lease; empty: it was."""
        self.changed: Callable[[], None] = lambda: None
        """Called after a new map: those who wait for us to know it are told soon."""
        self._clock = clock
        self._lender = lender
        self._epoch = self._epoch_min = 0
        self._epoch_told: int | None = None
        self._readable: frozenset[tuple[int, int]] = frozenset()

    def update_map(self, pool_map: PoolMap) -> None:
        """Follow this map. Where it has chains that are not to be read here any more, clients of this host are told first."""
        readable = frozenset((table.id, number) for table in pool_map.tables for number, chain in enumerate(table.chains)
                             if self.target in chain.readable)
        if self._lender is not None and self._readable - readable:
            self._lender.changing_all()
        self._readable = readable
        self._epoch = pool_map.epoch
        known = pool_map.target_by_id.get(self.target)
        self.vouched = not self.verifier or (known is not None and known.verifier == self.verifier)
        self.shared = self.target in shared(pool_map)
        self._tell()
        self.changed()

    @property
    def epoch(self) -> int:
        """Of the map that is followed."""
        return self._epoch

    @property
    def is_caught_up(self) -> bool:
        """Whether the map that is followed is at least as new as each that an earlier process of this target followed.

        It is from when it has reached the epoch that a leader told this process first. Later maps are newer in any case.
        """
        return self._epoch_told is not None and self._epoch >= self._epoch_told

    def renewed(self, sent_s: float, lease_s: float, epoch_min: int, epoch: int = 0) -> None:
        """A sign of life that was sent at `sent_s` has been answered so; `epoch` is that of the leader's map."""
        if self._epoch_told is None and epoch:
            self._epoch_told = epoch
        self.until_s = max(self.until_s, sent_s + lease_s)
        self._epoch_min = max(self._epoch_min, epoch_min)
        self._tell()

    def _tell(self) -> None:
        if self._lender is not None:
            self._lender.serve_until(math.inf if not self.shared else self.until_s if self._epoch >= self._epoch_min else 0.0)

    def holds(self) -> bool:
        """Whether the target may serve at this moment. Ask after the work and before the answer."""
        return not self.shared or (self._clock.boottime_s() < self.until_s and self._epoch >= self._epoch_min)

    def check(self) -> None:
        """StaleTenure unless it holds; what was done may have been done."""
        if not self.holds():
            raise StaleTenure(may_be_applied=True)
