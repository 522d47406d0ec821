"""Changes that the shard itself makes, and the conditions under which any change may be made.

Used by the request handlers for repairs, volumes and the trash, and for the return of stripes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from nvpool.core.errors import Busy, NvpoolError, Refused, WrongShard
from nvpool.core.ids import partition_of
from nvpool.core.units import PARTITION_COUNT
from nvpool.meta.fsck.findings import Mend
from nvpool.meta.fsck.repair import undivided
from nvpool.meta.requests.shard_parts import ShardParts
from nvpool.meta.state import records
from nvpool.meta.state.transaction import Draft

PARTS_PER_BATCH = 100
_log = logging.getLogger(__name__)


class InternalChanges:
    """Changes without a slot of a client."""

    def __init__(self, parts: ShardParts) -> None:
        self._kv = parts.kv
        self._view = parts.view
        self._numbers = parts.numbers
        self._moment = parts.moment
        self._watches = parts.watches
        self._coordinator = parts.cross_shard.coordinator

    async def carry_out(self, decide: Mend, session: int | None = None) -> None:
        """Make a cross-shard transaction that no client requested as such.

        With a `session`, the leases of all other sessions on the changed inodes are recalled first, as for a
        change of that session.
        """
        coordinator = self._coordinator
        span = coordinator.begin(0)
        try:
            while True:
                draft = await coordinator.decide(
                    span, lambda view, request, now_ns: decide(view, now_ns=now_ns), None
                )
                if not await self.has_waited(session, draft):
                    break
            effects, decision = coordinator.split(span, draft)
            try:
                self._kv.apply(effects, reclaims=True)
            except (Refused, Busy):
                coordinator.not_written(span)
                raise
            coordinator.committed(span, decision)
            if draft.born:
                self._view.next_number += 1
                self._view.inode_count += 1
        finally:
            coordinator.end(span)

    async def has_waited(self, session: int | None, draft: Draft) -> bool:
        """Whether a cross-shard transaction had to wait and must be decided again.

        If False, this has returned without waiting, so the decision is still valid.
        """
        if self._kv.full:
            await self._kv.room()
        elif self._view.next_number >= self._numbers.bounds.inode:
            await self._numbers.more()
        elif self._moment.spans_wait:
            await self._moment.over()
        elif session is not None and (wait := self._watches.conflict(session, draft)) is not None:
            await wait()
        else:
            return False
        return True

    def check_here(self, volume: int) -> None:
        """Check that the volume belongs to this shard and can be used now.

        WrongShard: it is another shard's. Held, Unavailable: its ownership is not settled.
        """
        partition = partition_of(volume)
        if partition < PARTITION_COUNT and self._view.is_elsewhere(partition):
            raise WrongShard(f"volume {volume} belongs to another shard")
        if self._view.check_partition is not None:
            self._view.check_partition(partition)

    async def may_change(self, volume: int, session: int, inodes: Callable[[], list[int]]) -> bool:
        """Whether the session may change these inodes of the volume now.

        Leases of all other sessions on them are recalled first. False: the volume is being, or was, migrated.
        After each wait all conditions are checked again, so on return nothing has waited since the last
        check. The records may be locked nevertheless.
        """
        partition = partition_of(volume)
        while self._view.serves(partition) and not self._view.is_elsewhere(partition):
            if self._kv.full:
                await self._kv.room()
            elif self._moment.changes_wait:
                await self._moment.over()
            elif (wait := self._watches.recall(session, inodes())) is not None:
                await wait()
            else:
                return True
        return False

    async def return_stripes(self) -> None:
        """Give back stripes of other shards' directories, as far as possible now."""
        for key, _ in self._kv.scan(*records.part_range(), PARTS_PER_BATCH):
            try:
                await self.carry_out(partial(undivided, number=records.part_of_key(key)[0]))
            except NvpoolError as error:
                _log.info("a part of a directory cannot be given back yet: %s", error)
