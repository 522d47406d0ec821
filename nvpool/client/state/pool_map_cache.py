"""The newest pool map that this client knows, and its refresh.

The map only moves forward in epoch, and concurrent refreshes share one request. If no newer map can be
fetched, the old one stays in use. The metadata client and the chunk client call this module when a daemon
answers that their map is old, or does not answer at all: then they wait for the next map, and the nodes are
asked to send it as soon as it exists.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError, Unreachable, from_os_error
from nvpool.core.futures import abandon
from nvpool.poolmap.model import PoolMap, decode_map
from nvpool.rpc.messages.read_write_codec import decoded
from nvpool.rpc.v1 import pool_pb2, wire_pb2

MAP_FILE = "poolmap.json"
ASK_S = 5.0
"""Deadline of one request for a map. A slower node is not worth the wait: the caller retries in any case."""

NEXT_S = 0.4
"""Delay before another node is asked too: a node that is gone does not answer at all."""

FOLLOW_S = 2.0
"""How long the next map is followed after the last call that waits for it. Longer waits call again."""
FOLLOWED = 3
"""Nodes followed at the same time: one may be dead and another cut off from the rest."""
NEXT_MAP_WAIT_S = 1.0
"""How long a node holds that request; then another node gets it."""
LOOK_S = 0.05
"""Interval of checks of the map file, and of requests to nodes that have no newer map."""


def read_map_file(directory: str) -> PoolMap:
    """Read the map in DIR/poolmap.json.

    NotFound or AccessDenied from the file system; CorruptRecord, WrongFormat.
    """
    path = os.path.join(directory, MAP_FILE)
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise from_os_error(error, f"reading the pool map {path}") from None
    return decode_map(raw)


class PoolView:
    """The pool map of a client. Each newer `map` is passed to the callables in `changed`."""

    def __init__(self, pool_map: PoolMap, *, directory: str | None, dialer, clock: Clock):
        self.map = pool_map
        self.changed: list[Callable[[PoolMap], None]] = []
        self._directory = directory
        self._dialer = dialer
        self._clock = clock
        self._asking: asyncio.Task | None = None
        self._turn = 0
        self._next: asyncio.Future[None] | None = None
        self._following: asyncio.Task | None = None
        self._follow_until_s = 0.0
        self._seen: tuple[int, int] | None = None
        self._closed = False

    def offer(self, pool_map: PoolMap) -> bool:
        """Adopt `pool_map` if it is newer; return whether it was."""
        if pool_map.epoch <= self.map.epoch or pool_map.pool_id != self.map.pool_id:
            return False
        self.map = pool_map
        for callback in self.changed:
            callback(pool_map)
        if self._next is not None:
            self._next.set_result(None)
            self._next = None
        return True

    @property
    def next(self) -> asyncio.Future[None]:
        """A future that completes when a map newer than the present one arrives. Must not be cancelled."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def follow(self) -> None:
        """Follow the next map for FOLLOW_S."""
        self._follow_until_s = self._clock.boottime_s() + FOLLOW_S
        if not self._closed and (self._following is None or self._following.done()):
            self._following = asyncio.create_task(self._follow())

    async def newer(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for a map newer than the present one. Return whether it arrived.

        Follows the map.
        """
        coming = self.next
        self.follow()
        await asyncio.wait([coming], timeout=wait_s)
        return coming.done()

    async def refresh(self) -> bool:
        """Request a newer map once; return whether there was one.

        Does not raise if no node answers: the old map stays in use.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    def look_for(self, epoch: int) -> None:
        """Start a refresh if the present map is older than `epoch`, which a peer knows.

        Does not wait for it.
        """
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
                asked.add(
                    asyncio.create_task(
                        fetch_map(self._dialer, endpoints, self._clock, newer_than=self.map.epoch)
                    )
                )
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
                abandon(task)

    async def _follow(self) -> None:
        asked: dict[tuple[str, ...], asyncio.Task] = {}
        try:
            while (left_s := self._follow_until_s - self._clock.boottime_s()) > 0:
                if self._directory is not None:
                    self._look(self._directory)
                    await asyncio.sleep(LOOK_S)
                    continue
                self._request_next_map(asked)
                if asked:
                    await asyncio.wait(asked.values(), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for endpoints in [endpoints for endpoints, task in asked.items() if task.done()]:
                    found = _first([asked.pop(endpoints)])
                    if found is not None and found[0] is not None:
                        self.offer(found[0])
                await asyncio.sleep(LOOK_S)
        finally:
            for task in asked.values():
                abandon(task)

    def _look(self, directory: str) -> None:
        """Read the map file if it was replaced since the last read."""
        try:
            there = os.stat(os.path.join(directory, MAP_FILE))
            if self._seen != (there.st_ino, there.st_mtime_ns):
                self.offer(read_map_file(directory))
                self._seen = there.st_ino, there.st_mtime_ns
        except (OSError, NvpoolError):
            pass

    def _request_next_map(self, asked: dict[tuple[str, ...], asyncio.Task]) -> None:
        """Keep requests for the next map pending at FOLLOWED nodes, in rotation."""
        nodes = list(dict.fromkeys(node.endpoints for node in self.map.nodes if node.endpoints))
        for _ in nodes:
            if len(asked) >= FOLLOWED:
                return
            endpoints = nodes[self._turn % len(nodes)]
            self._turn += 1
            if endpoints not in asked:
                asked[endpoints] = asyncio.create_task(
                    fetch_map(
                        self._dialer,
                        endpoints,
                        self._clock,
                        newer_than=self.map.epoch,
                        wait_s=NEXT_MAP_WAIT_S,
                    )
                )

    def _took(self, found: PoolMap | None) -> bool:
        if found is not None and self.offer(found):
            return True
        self._turn += 1  # this node may be cut off from news: ask another one first the next time
        return False

    async def close(self) -> None:
        self._closed = True
        for task in (self._asking, self._following):
            if task is not None:
                task.cancel()


def _first(done: Iterable[asyncio.Task]) -> tuple[PoolMap | None] | None:
    """The first successful result among finished tasks, as a tuple; None if there is none."""
    # of each task: asyncio logs exceptions that are never retrieved
    for error in [task.exception() for task in done]:
        if error is not None and not isinstance(error, NvpoolError):
            raise error
    return next(((task.result(),) for task in done if task.exception() is None), None)


async def fetch_map(
    dialer, endpoints: tuple[str, ...], clock: Clock, *, newer_than: int = 0, wait_s: float = 0.0
) -> PoolMap | None:
    """Fetch the map of the node at `endpoints`.

    None: the node has no map newer than `newer_than`, and gets none within `wait_s`. Unreachable,
    DeadlineExceeded.
    """
    request = pool_pb2.MapRequest(newer_than=newer_than, wait_s=wait_s).SerializeToString()
    deadline_s = clock.boottime_s() + (2 * wait_s or ASK_S)
    reply = await dialer.call(endpoints, wire_pb2.POOL_MAP, request, deadline_s=deadline_s)
    raw = decoded(pool_pb2.MapReply, reply.message).map
    if not raw and not newer_than:
        raise Unreachable("the node has no pool map yet")
    return decode_map(raw) if raw else None
