"""Client of the chunk stores: finds the targets of a placement table and sends requests to them.

Used by `meta/gc/truncations` and `meta/gc/collector`. Without a dialer (unit tests, offline tools) there are
no targets.
"""

from __future__ import annotations

import asyncio
from typing import Any

from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.meta.service_auth import ServiceRight
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import PoolMap
from nvpool.rpc.target_calls import TargetCalls, TargetDialer

CALL_S = 5.0
"""Timeout of one call. After it the request is sent again; truncation and removal may be repeated safely."""


class Targets:
    """The storage targets in the newest pool map. `of_table` and `of_chunks` wait until there is a map."""

    def __init__(self, dialer: TargetDialer | None, clock: Clock, grant_secret: bytes, shard: int) -> None:
        self._dialer = self.dialer = dialer
        self._clock = clock
        self._map: PoolMap | None = None
        self._calls = TargetCalls(dialer)
        self._has_map = asyncio.Event()
        self._of_table: dict[int, frozenset[int]] = {}
        self._changed_at: dict[int, int] = {}
        self.authority = ServiceRight(clock, grant_secret, shard)

    @property
    def epoch(self) -> int:
        """Epoch of the current pool map; 0 without one."""
        return self._map.epoch if self._map is not None else 0

    def changed_at(self, target: int) -> int:
        """Map epoch since which the chains that `target` belongs to, or joins, are unchanged."""
        return self._changed_at.get(target, 0)

    def use_map(self, pool_map: PoolMap) -> None:
        before, self._map = self._map, pool_map
        self._calls.use_map(pool_map)
        for table in pool_map.tables:
            known = before.table_by_id.get(table.id) if before is not None else None
            for number, chain in enumerate(table.chains):
                if known is None or known.chains[number].epoch != chain.epoch:
                    self._changed_at.update(dict.fromkeys((*chain.targets, *chain.joining), pool_map.epoch))
        self._of_table = {
            table.id: frozenset(
                target for chain in table.chains for target in (*chain.targets, *chain.joining)
            )
            for table in pool_map.tables
        }
        self._has_map.set()

    def all(self) -> frozenset[int]:
        """Targets that are in the pool and not decommissioned; none without a map or a dialer."""
        if self._map is None or self._dialer is None:
            return frozenset()
        return frozenset(target.id for target in self._map.targets if not target.is_over)

    async def of_table(self, table: int) -> frozenset[int]:
        """Targets that hold, or are catching up with, chunks of files of this table; none if the map has no
        such table."""
        if self._dialer is None:
            return frozenset()
        await self._has_map.wait()
        return self._of_table.get(table, frozenset())

    async def of_chunks(self, table: int, inode: int, chunks: range) -> frozenset[int]:
        """Targets among those of the table that can hold these chunks of an inode."""
        found = await self.of_table(table)
        if not found or len(chunks) >= CHAINS_PER_TABLE:
            return found
        chains = self._map.table_by_id[table].chains
        touched = [chains[chain_of(inode, index)] for index in chunks]
        return frozenset(target for chain in touched for target in (*chain.targets, *chain.joining))

    def joining(self, table: int) -> frozenset[int]:
        """Targets that are catching up with chains of this table."""
        known = self._map.table_by_id.get(table) if self._map is not None else None
        return (
            frozenset(target for chain in known.chains for target in chain.joining)
            if known is not None
            else frozenset()
        )

    async def ask(self, target: int, method: int, request: Any) -> Any:
        """Send a request to one target and return its reply. Raises any NvpoolError."""
        request.target = target
        if hasattr(request, "map_epoch"):
            request.map_epoch = self.epoch
        if hasattr(request, "authority"):
            request.authority = self.authority()
        return await self._calls.call(
            target, method, request.SerializeToString(), deadline_s=self._clock.boottime_s() + CALL_S
        )

    async def broadcast(
        self,
        targets: frozenset[int] | set[int],
        method: int,
        request: Any,
        answers: dict[int, bytes] | None = None,
    ) -> dict[int, NvpoolError]:
        """Send one request to all `targets`.

        Return the targets that have not carried it out, each with its error. The replies of the others are
        put into `answers`.
        """
        failed: dict[int, NvpoolError] = {}

        async def one(target: int) -> None:
            try:
                reply = await self.ask(target, method, request)
                if answers is not None:
                    answers[target] = bytes(reply.message)
            except NvpoolError as error:
                failed[target] = error

        await asyncio.gather(*(one(target) for target in targets))
        return failed
