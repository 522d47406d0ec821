"""What a pool needs of whoever keeps its map: the newest map, compare-and-set, and being told of the next one.

Called by the supervisor. Implementations: `cluster/embedded` (one machine; the map in the engine of kv/) and, where a pool has
several nodes, a consensus service. All pass `testing/contracts/coordinator`. A coordinator decides nothing: which map
comes next is made by pure functions of logic/.
"""

from __future__ import annotations

from typing import Protocol

from nvpool.logic.poolmap import PoolMap

WATCH_S_MAX = 60.0
"""The longest one watch waits; longer ones are asked in steps, so that a watcher that is gone is soon forgotten."""


class Coordinator(Protocol):
    @property
    def pool_map(self) -> PoolMap:
        """The newest map known here. It survives the loss of power."""

    async def replace(self, new: PoolMap) -> None:
        """Make `new` the pool's map if its epoch is the next one; on return it survives the loss of power and watchers know.

        If this raises, the map is the old one (Unavailable: or the new one; look again).

        StaleEpoch       somebody else was first: take pool_map, decide again, repeat
        InvalidRequest   the map contradicts itself or is another pool's: it was never considered
        """

    async def watch(self, newer_than: int, wait_s: float) -> PoolMap | None:
        """The newest map with an epoch above `newer_than`, at once where there is one, else the next that comes within
        `wait_s` (at most WATCH_S_MAX), else None. Maps in between may be left out; none is ever followed by an older one."""

    async def close(self) -> None:
        """Wake all watchers with None and release what is held. May be called twice."""
