"""Resets chains that no target holds any more, while this node leads.

Between the loss and the reset two things must be certain. First, no former member serves the chain: such a
member may be alive and cut off, and writes to it would be lost silently. Second, which inodes existed at the
reset. Therefore all grants that were given before must have expired; for targets of this node whose processes
have ended, the block locations that clients know must have expired instead. The shards are asked for their
inodes after that. Used by node/supervisor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import NvpoolError, StaleEpoch, Unavailable
from nvpool.core.grants import CLOCK_SKEW_S
from nvpool.node.coordination.leadership import Leading
from nvpool.poolmap.chains.data_loss import births_of, ownerless, with_reset_chains
from nvpool.poolmap.model import Loss, PoolMap
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import meta_pb2, wire_pb2
from nvpool.store.chunks.api import LOCATION_LEASE_S

LOOK_S = 0.5
LOCATIONS_S = LOCATION_LEASE_S + 1.0
"""How long clients of this host may read the drive of an ended process: until their location leases
expire."""
ASK_S = 2.0

log = logging.getLogger("nvpool.node.coordination.chain_reset")


class ChainReset:
    def __init__(
        self,
        leading: Leading,
        dialer: Dialer,
        *,
        rights_s: float,
        has_ended: Callable[[int], bool],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Create the task of one node.

        `rights_s`: lifetime of a grant for a file's chunks. `has_ended`: whether a target is on this node and
        no process serves it.
        """
        self._leading = leading
        self._dialer = dialer
        self._wait_s = rights_s + 2 * CLOCK_SKEW_S
        self._has_ended = has_ended
        self._clock = clock
        self._since_s: dict[int, float] = {}
        """Given-up targets that were the last of a chain -> start of the wait."""

    async def run(self) -> None:
        """Reset chains periodically, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._leading.manager is None:
                self._since_s.clear()
                continue
            try:
                await self.run_once()
            except NvpoolError as error:
                log.info("chains cannot be reset yet: %s", error)

    async def run_once(self) -> int:
        """Reset the chains that can be reset; return their number.

        Unavailable, StaleEpoch: nothing changed, retry.
        """
        pool_map, manager = self._leading.pool_map, self._leading.manager
        chains = ownerless(pool_map)
        now_s = self._clock.boottime_s()
        former = frozenset().union(*chains.values())
        self._since_s = {target: self._since_s.get(target, now_s) for target in former}
        silent = {
            target
            for target in former
            if now_s - self._since_s[target] > (LOCATIONS_S if self._has_ended(target) else self._wait_s)
        }
        names = [name for name, targets in chains.items() if targets <= silent]
        if not names or manager is None:
            return 0
        loss = await self._births(pool_map)
        serving = manager.serving()
        before = _inode_allocators(pool_map)

        def decide(newest: PoolMap) -> PoolMap:
            if _inode_allocators(newest) != before:
                raise StaleEpoch("the shards have changed meanwhile")
            return with_reset_chains(newest, names, loss, serving)

        after = await self._leading.change_as_leader(decide)
        begun = len(names) - len(ownerless(after).keys() & set(names))
        if begun:
            log.warning("%d chains were reset to empty: their drives were given up", begun)
        return begun

    async def _births(self, pool_map: PoolMap) -> Loss:
        """Inodes that exist now, according to the primaries."""
        counters = await asyncio.gather(*(self._next_counter(shard.endpoints) for shard in pool_map.shards))
        return births_of(
            pool_map, {shard.id: counter for shard, counter in zip(pool_map.shards, counters, strict=True)}
        )

    async def _next_counter(self, endpoints: tuple[str, ...]) -> int:
        reply = await self._dialer.call(
            endpoints,
            wire_pb2.META_STATUS,
            meta_pb2.MetaStatusRequest().SerializeToString(),
            deadline_s=self._clock.boottime_s() + ASK_S,
        )
        status = decoded(meta_pb2.MetaStatusReply, reply.message)
        if status.state != "serving" or not status.next_counter:
            raise Unavailable(f"shard {status.shard} does not serve yet")
        return status.next_counter


def _inode_allocators(pool_map: PoolMap) -> Iterable:
    """Which primary allocates numbers for which inodes."""
    return pool_map.partitions, [(shard.id, shard.member, shard.term) for shard in pool_map.shards]
