"""Having what stores have answered survive the loss of power, on each target that has it.

What was written to one target is flushed there. What was written to a chain is flushed by who are its targets, or join it, when
it is flushed: who came since has copied it and flushes that before it counts, and who is gone is not waited for. Called by
chunkclient.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from nvpool.base.clock import Clock
from nvpool.base.errors import Stale, Unavailable
from nvpool.client.answers import at_the_deadline, reason_of
from nvpool.client.poolview import PoolView
from nvpool.wire.v1 import data_pb2, wire_pb2

WrittenAt = int | tuple[int, int]
"""A target, or a chain with several members: table and number."""
PATIENCE_S = 1.0
"""For an answer, before the map is asked for: perhaps the target is gone."""


class Flushing:
    """`ask_target(target, method, request, deadline_s)`: until it answers; `call(target, method, message, deadline_s)`:
    once."""

    def __init__(self, view: PoolView, clock: Clock, *, ask_target: Callable[..., Awaitable[bytes]],
                 call: Callable[..., Awaitable], delay: Callable[[int, Exception, float], float]):
        self._view = view
        self._clock = clock
        self._ask_target = ask_target
        self._call = call
        self._delay = delay

    async def flush(self, places: Iterable[WrittenAt], deadline_s: float) -> None:
        """Return when everything that these have answered survives the loss of power. Unavailable at the deadline."""
        chains = {place for place in places if not isinstance(place, int)}
        work = [self._flush_one(place, deadline_s) for place in places if isinstance(place, int)]
        if chains:
            work.append(self._flush_chains(chains, deadline_s))
        waiting = [asyncio.get_running_loop().create_task(one) for one in work]
        try:
            await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()

    async def _flush_one(self, target: int, deadline_s: float) -> None:
        request = data_pb2.FlushRequest(map_epoch=self._view.map.epoch, target=target)
        await self._ask_target(target, wire_pb2.DATA_FLUSH, request, deadline_s)

    def _members(self, chains: set[tuple[int, int]]) -> set[int]:
        found: set[int] = set()
        for table, number in chains:
            known = self._view.map.table_by_id.get(table)
            if known is not None:
                chain = known.chains[number]
                found.update(chain.targets, chain.joining)
        return found

    async def _flush_chains(self, chains: set[tuple[int, int]], deadline_s: float) -> None:
        """One question a target, also where it is in many of the chains."""
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
