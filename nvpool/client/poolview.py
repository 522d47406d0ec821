"""The newest pool map that this client knows, and where to get a newer one.

Guarantees that the map only moves forward in epoch and that refreshes asked for at the same time are one. Called by
metaclient and chunkclient when somebody answers that their map is old, or does not answer at all. Never invents a map:
where none can be had the old one stays.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from nvpool.base.clock import Clock
from nvpool.base.errors import NvpoolError, Unreachable, from_os_error
from nvpool.client.answers import decoded
from nvpool.logic.poolmap import PoolMap, decode_map
from nvpool.wire.v1 import pool_pb2, wire_pb2

MAP_FILE = "poolmap.json"
ASK_S = 5.0
"""For one question for a map: a node that takes longer is not worth waiting for, the asker repeats anyway."""

NEXT_S = 0.4
"""Before another node is asked too: one that is gone says nothing at all."""


def read_map_file(directory: str) -> PoolMap:
    """The map in DIR/poolmap.json. NotFound or AccessDenied as the file system says; CorruptRecord, WrongFormat."""
    path = os.path.join(directory, MAP_FILE)
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise from_os_error(error, f"reading the pool map {path}") from None
    return decode_map(raw)


class PoolView:
    """`map` is the newest; `changed` callables are told of each newer one."""

    def __init__(self, pool_map: PoolMap, *, directory: str | None, dialer, clock: Clock):
        self.map = pool_map
        self.changed: list[Callable[[PoolMap], None]] = []
        self._directory = directory
        self._dialer = dialer
        self._clock = clock
        self._asking: asyncio.Task | None = None
        self._turn = 0

    def offer(self, pool_map: PoolMap) -> bool:
        """Take `pool_map` when it is newer; whether it was."""
        if pool_map.epoch <= self.map.epoch or pool_map.pool_id != self.map.pool_id:
            return False
        self.map = pool_map
        for tell in self.changed:
            tell(pool_map)
        return True

    async def refresh(self) -> bool:
        """Ask for a newer map once; whether there was one. Does not raise when nobody answers: the old map stays."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    def look_for(self, epoch: int) -> None:
        """Somebody knows the map of this epoch: ask for it, where ours is older; nobody waits for that."""
        if epoch > self.map.epoch and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> bool:
        if self._directory is not None:
            try:
                return self.offer(read_map_file(self._directory))
            except NvpoolError:
                return False
        nodes = [node.endpoints for node in self.map.nodes if node.endpoints]
        begin = self._turn % max(1, len(nodes))
        asked: set[asyncio.Task] = set()
        try:
            for endpoints in [*nodes[begin:], *nodes[:begin]]:
                asked.add(asyncio.create_task(fetch_map(self._dialer, endpoints, self._clock, newer_than=self.map.epoch)))
                done, asked = await asyncio.wait(asked, timeout=NEXT_S, return_when=asyncio.FIRST_COMPLETED)
                if (found := _first(done)) is not None:
                    return self._took(*found)
            while asked:
                done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                if (found := _first(done)) is not None:
                    return self._took(*found)
            self._turn += 1
            return False
        finally:
            for task in asked:
                task.cancel()

    def _took(self, found: PoolMap | None) -> bool:
        if found is not None and self.offer(found):
            return True
        self._turn += 1  # it may be one that hears of nothing: another is asked first the next time
        return False

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()


def _first(done: set[asyncio.Task]) -> tuple[PoolMap | None] | None:
    """What one of them was answered."""
    for error in [task.exception() for task in done]:  # of each: what nobody has looked at is told in the log
        if error is not None and not isinstance(error, NvpoolError):
            raise error
    return next(((task.result(),) for task in done if task.exception() is None), None)


async def fetch_map(dialer, endpoints: tuple[str, ...], clock: Clock, *, newer_than: int = 0) -> PoolMap | None:
    """The map of the node at `endpoints`, or None when it has nothing newer. Unreachable, DeadlineExceeded."""
    request = pool_pb2.MapRequest(newer_than=newer_than).SerializeToString()
    reply = await dialer.call(endpoints, wire_pb2.POOL_MAP, request, deadline_s=clock.boottime_s() + ASK_S)
    raw = decoded(pool_pb2.MapReply, reply.message).map
    if not raw and not newer_than:
        raise Unreachable("the node has no pool map yet")
    return decode_map(raw) if raw else None
