"""Hedged reads: sends reads of a slow target to other replicas too. The first reply counts.

Another replica may refuse for now, for instance because a write waits for the silent target. So the other
replicas are asked again and again, by the newest map, until one has answered. `hedging_policy` decides when; used by
the chunk client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from nvpool.client.data.hedging_policy import SentRead
from nvpool.client.data.read_queue import Read, ReadQueue
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError, Stale, StaleGrant, StaleSession, Unavailable
from nvpool.core.futures import BlocksFuture
from nvpool.core.grants import READ

log = logging.getLogger(__name__)

SECOND_S = 5.0
"""Time for one more attempt at another replica, before the next one is asked."""


class HedgedReads:
    """The second requests of slow reads.

    `chunks` finds target queues, sends, and owns tasks; `pause(error, tries, left_s)` waits before a retry.
    """

    def __init__(
        self,
        chunks,
        view: PoolView,
        clock: Clock,
        *,
        pause: Callable[[NvpoolError, int, float], Awaitable[None]],
        renew: Callable[[OpenInode, int], Awaitable[None]],
    ):
        self._chunks = chunks
        self._view = view
        self._clock = clock
        self._pause = pause
        self._renew = renew

    def ask(self, sent: SentRead) -> None:
        """Send each of these reads to another replica, if there is one."""
        for job in sent.jobs:
            if job.future.done() or job.second:
                continue
            try:
                lane = self._chunks.find_lane(job.file, job.index, (*job.tried, sent.lane))
            except Stale:
                lane = sent.lane
            if lane is sent.lane or lane in job.tried:
                self._insist_on(job, sent)
            else:
                self._ask(job, sent, lane, job.deadline_s)

    def _ask(self, job: Read, sent: SentRead, lane: ReadQueue, deadline_s: float) -> BlocksFuture:
        coming = BlocksFuture(0, job.length)
        coming.on_end = partial(self._came, job, sent)
        second = Read(job.file, job.index, job.offset, job.length, None, coming, deadline_s)
        second.second, second.tried = True, (*job.tried, sent.lane)
        self._chunks.send(lane, [second])
        return coming

    def _came(self, job: Read, sent: SentRead, found: memoryview | None, error: BaseException | None) -> None:
        if job.future.done():
            return
        if error is None:
            sent.end()
            settle(job, found)
        elif isinstance(error, NvpoolError):
            self._insist_on(job, sent)

    def _insist_on(self, job: Read, sent: SentRead) -> None:
        if not job.insisted:
            job.insisted = True
            self._chunks.own(self._insist(job, sent))

    async def _insist(self, job: Read, sent: SentRead) -> None:
        """Ask other replicas until one has answered.

        At the deadline the first request ends with the error.
        """
        tries = 0
        while not job.future.done() and (left_s := job.deadline_s - self._clock.boottime_s()) > 0:
            tries += 1
            await self._pause(Unavailable(), tries, left_s)
            try:
                lane = self._chunks.find_lane(job.file, job.index, (sent.lane,))
                if lane is sent.lane or job.future.done():
                    continue
                second = self._ask(job, sent, lane, min(job.deadline_s, self._clock.boottime_s() + SECOND_S))
                ended = asyncio.get_running_loop().create_future()
                second.on_end = partial(_complete_and_wake, ended, second.on_end)
                if not second.done():
                    await ended
                _, error = second.outcome
                if isinstance(error, StaleGrant | StaleSession):
                    await self._renew(job.file, READ)
                elif isinstance(error, Stale):
                    await self._view.refresh()
            except NvpoolError as error:
                log.debug("another replica of chunk %d of inode %d: %s", job.index, job.file.inode, error)


def _complete_and_wake(
    ended: asyncio.Future, also: Callable[..., None], found: memoryview | None, error: BaseException | None
) -> None:
    also(found, error)
    if not ended.done():
        ended.set_result(None)


def settle(job: Read, found: memoryview) -> None:
    """Complete the read with these bytes."""
    if job.future.done():
        return  # the caller gave up and owns the buffer again
    if job.into is not None:
        job.into[:] = found
        found = job.into
    job.future.set_result(found)
