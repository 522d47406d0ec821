"""Commit: makes acknowledged writes survive a power loss, on each target that has them.

Unstable writes are recorded by chain, and committed by the targets that are in the chain, or join it, at the
time of the commit. A target that came later has copied the bytes and commits them before it counts as a
member; a target that is gone is not waited for.

The map says whether the chain still has the bytes (`Chain.intact`): a chain loses unstable writes only when
its last remaining target does, and that target answers nothing before the map says so. So a map as new as the
replies shows all losses before them. Used by the chunk client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple

from nvpool.client.rpc.backoff import at_the_deadline, reason_of
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import DeadlineExceeded, NvpoolError, Stale, Unavailable
from nvpool.core.futures import abandon
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import data_pb2, wire_pb2

WrittenAt = tuple[int, int]
"""A chain: table and number."""


class Stored(NamedTuple):
    """An unstable write to the chain `place`.

    `epoch`: of the chain, before the write; `cut`: the file's truncate number in the write.
    """

    place: WrittenAt
    epoch: int
    cut: int


PATIENCE_S = 0.5
"""Time for a reply before the pool map is followed: the target may be gone."""


class StoreCommit:
    """Commits of chains. `call(target, method, message, deadline_s)` sends one request to a target."""

    def __init__(
        self,
        view: PoolView,
        clock: Clock,
        *,
        call: Callable[..., Awaitable],
        pause: Callable[[NvpoolError, int, float], Awaitable[None]],
    ):
        self._view = view
        self._clock = clock
        self._call = call
        self._pause = pause

    def _members(self, chains: Collection[WrittenAt]) -> set[int]:
        found: set[int] = set()
        for table, number in chains:
            known = self._view.map.table_by_id.get(table)
            if known is not None:
                chain = known.chains[number]
                found.update(chain.targets, chain.joining)
        return found

    def _lost(self, chains: Mapping[WrittenAt, int | None], epoch: int) -> set[WrittenAt] | None:
        """Chains that have lost unstable writes; None if a map of `epoch` is needed to know."""
        if self._view.map.epoch < epoch:
            return None
        tables = self._view.map.table_by_id
        return {
            place
            for place, since in chains.items()
            if since is not None and place[0] in tables and tables[place[0]].chains[place[1]].intact > since
        }

    async def flush(self, chains: Mapping[WrittenAt, int | None], deadline_s: float) -> set[WrittenAt]:
        """Commit all unstable writes to these chains. Return the chains that have lost some of them.

        On return all other writes to the chains, since they had the given epoch, survive a power loss. For a
        chain without a known epoch no loss is found. Unavailable: the deadline has passed.
        """
        # one request per target, even if it is in many of the chains
        asked: dict[int, asyncio.Task] = {}
        tries, reason = 0, None
        try:
            while True:
                members = self._members(chains)
                for target in members - asked.keys():
                    asked[target] = asyncio.get_running_loop().create_task(self._once(target, deadline_s))
                left = {asked[target] for target in members if not asked[target].done()}
                if left:
                    done, _ = await asyncio.wait(
                        {*left, self._view.next}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    if not done:
                        self._view.follow()
                    if not done & left and self._clock.boottime_s() < deadline_s:
                        continue
                    left -= done
                failed = {
                    target: asked[target].exception()
                    for target in members
                    if asked[target].done() and asked[target].exception() is not None
                }
                if not failed and not left:
                    lost = self._lost(
                        chains, max((asked[target].result().map_epoch for target in members), default=0)
                    )
                    if lost is not None:
                        return lost
                    left_s = deadline_s - self._clock.boottime_s()
                    if left_s <= 0:
                        raise DeadlineExceeded(
                            "the pool map by which the targets have flushed did not come in time"
                        )
                    if not await self._view.refresh():
                        tries += 1
                        await self._pause(Unavailable(), tries, left_s)
                    continue
                for target, error in failed.items():
                    if not isinstance(error, Stale | Unavailable):
                        raise error
                    tries, reason = tries + 1, reason_of(error, reason)
                    left_s = deadline_s - self._clock.boottime_s()
                    if left_s <= 0:
                        raise at_the_deadline(error, reason) from None
                    del asked[target]
                if failed and not (isinstance(error, Stale) and await self._view.refresh()):
                    await self._pause(error, tries, left_s)
        finally:
            for task in asked.values():
                abandon(task)

    async def _once(self, target: int, deadline_s: float) -> data_pb2.FlushReply:
        request = data_pb2.FlushRequest(map_epoch=self._view.map.epoch, target=target)
        reply = await self._call(target, wire_pb2.DATA_FLUSH, request.SerializeToString(), deadline_s)
        return decoded(data_pb2.FlushReply, reply.message)
