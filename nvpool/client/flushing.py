"""Having what stores have answered survive the loss of power, on each target that has it.

What was written is remembered by its chain, and flushed by who are its targets, or join it, when it is flushed: who came since
has copied it and flushes that before it counts, and who is gone is not waited for. Called by chunkclient.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from nvpool.base.clock import Clock
from nvpool.base.errors import Stale, Unavailable
from nvpool.client.answers import at_the_deadline, reason_of
from nvpool.client.poolview import PoolView
from nvpool.wire.v1 import data_pb2, wire_pb2

WrittenAt = tuple[int, int]
"""A chain: table and number."""
PATIENCE_S = 1.0
"""For an answer, before the map is asked for: perhaps the target is gone."""


class Flushing:
    """`call(target, method, message, deadline_s)`: ask a target once."""

    def __init__(self, view: PoolView, clock: Clock, *, call: Callable[..., Awaitable],
                 delay: Callable[[int, Exception, float], float]):
        self._view = view
        self._clock = clock
        self._call = call
        self._delay = delay

    def _members(self, chains: Collection[WrittenAt]) -> set[int]:
        found: set[int] = set()
        for table, number in chains:
            known = self._view.map.table_by_id.get(table)
            if known is not None:
                chain = known.chains[number]
                found.update(chain.targets, chain.joining)
        return found

    async def flush(self, chains: Collection[WrittenAt], deadline_s: float) -> None:
        """Return when everything that was written to these chains survives the loss of power. Unavailable at the deadline."""
        # one question a target, also where it is in many of the chains
        asked: dict[int, asyncio.Task] = {}
        tries, reason = 0, None
        try:
            while True:
                members = self._members(chains)
                for target in members - asked.keys():
                    asked[target] = asyncio.get_running_loop().create_task(self._once(target, deadline_s))
                left = {asked[target] for target in members if not asked[target].done()}
                if left:
                    done, left = await asyncio.wait(left, timeout=PATIENCE_S)
                    if not done:
                        await self._view.refresh()
                        if self._clock.boottime_s() < deadline_s:
                            continue
                failed = {target: asked[target].exception() for target in members
                          if asked[target].done() and asked[target].exception() is not None}
                if not failed and not left:
                    return
                for target, error in failed.items():
                    if not isinstance(error, Stale | Unavailable):
                        raise error
                    tries, reason = tries + 1, reason_of(error, reason)
                    left_s = deadline_s - self._clock.boottime_s()
                    if left_s <= 0:
                        raise at_the_deadline(error, reason) from None
                    del asked[target]
                if failed and not await self._view.refresh():
                    await asyncio.sleep(self._delay(tries, error, left_s))
        finally:
            for task in asked.values():
                task.cancel()

    async def _once(self, target: int, deadline_s: float) -> None:
        request = data_pb2.FlushRequest(map_epoch=self._view.map.epoch, target=target)
        await self._call(target, wire_pb2.DATA_FLUSH, request.SerializeToString(), deadline_s)
