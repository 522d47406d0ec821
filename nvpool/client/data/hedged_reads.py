"""Hedged reads: sends reads of a slow target to other replicas too. The first good reply counts.

`Hedging` decides when. Only a few percent of the reads may be sent twice: a second request costs the other
target as much as the first one, so under load hedging of all reads would make all of them slower (Dean and
Barroso: The Tail at Scale, CACM 56, 2013). A read without a reply for LATE_S is sent to another replica in
any case, and the silent target is avoided for a while. In a pool with one replica per chunk nothing is
watched, and nothing costs anything.

`HedgedReads` sends the second requests. Another replica may refuse for now, for instance because a write
waits for the silent target. So the other replicas are asked again and again, by the newest map, until one has
answered. Used by the chunk client and `read/batch` on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from nvpool.client.data.read_queue import Read, ReadQueue
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError, Stale, StaleGrant, StaleSession, Unavailable
from nvpool.core.futures import BlocksFuture
from nvpool.core.grants import READ
from nvpool.rpc.reply_receivers import PayloadReceiver

log = logging.getLogger(__name__)

SHARE = 0.05
"""Fraction of reads that may be sent twice."""
CREDIT_MAX = 16.0
"""Reads that may be sent twice in a row."""
SLOWER = 3.0
"""Multiple of the 95th percentile of recent latencies from which on a read is slow."""
DELAY_S_MIN, DELAY_S_MAX = 0.005, 0.25
LATE_S = 0.5
LAST = 128
"""Reads whose latencies are kept."""
_LOOK = 32
SMOOTHED = 1 / 16
"""Weight of a new latency in the average of its target queue."""
SECOND_S = 5.0
"""Time for one more attempt at another replica, before the next one is asked."""
MEASURED_S = 0.001
"""Time after a measured reply of a target in which good replies do not measure another one.

A measurement costs a good part of what a read costs. So at most a thousand replies a second and target are
measured, fast and slow ones alike: to add all slow ones would raise the 95th percentile, and with it the time
before a read is sent twice.
"""

_MEASURED_S = MEASURED_S


class SentRead(PayloadReceiver):
    """A message with reads in flight. `again(sent)` sends the reads to another replica.

    `jobs`: the reads; None while compiled code answers them. The messages of `store_reads` derive from it, and
    receive their replies.
    """

    __slots__ = ("lane", "jobs", "sent_s", "again", "count", "cost", "end", "is_hedged", "is_watched")

    def __init__(
        self,
        lane: ReadQueue,
        jobs: Sequence[Read],
        sent_s: float,
        again: Callable[[SentRead], None],
        cost: float,
    ) -> None:
        self.begin(lane, len(jobs), sent_s, again)
        self.jobs = jobs
        self.cost = cost

    def begin(self, lane: ReadQueue, count: int, sent_s: float, again: Callable[[Any], None]) -> None:
        """Begin a message with `count` reads that is sent now, also in place of an ended one."""
        self.lane, self.sent_s, self.again = lane, sent_s, again
        self.jobs: Any = None
        self.count = count
        self.cost: float = count
        self.end: Callable[[], None] = _nothing
        """Stops reception; must be called before another task writes to the reader's memory."""
        self.is_hedged = self.is_watched = False


def _nothing() -> None:
    """Default for reads that are received into memory of their own."""


class Hedging:
    """The watch of reads in flight.

    `late(lane)` is called when a target has not answered for LATE_S; `looked()` at intervals, when the
    average latencies are up to date. `read_count()`: the number of reads sent until now.
    """

    def __init__(
        self,
        clock: Clock,
        late: Callable[[ReadQueue], None],
        looked: Callable[[], None],
        read_count: Callable[[], int],
    ) -> None:
        self._now_s = clock.boottime_s
        self._late = late
        self._looked = looked
        self._read_count = read_count
        self._loop = asyncio.get_running_loop()
        self.sent: dict[SentRead, None] = {}
        """The messages in flight, in the order of sending."""
        self._credit = CREDIT_MAX
        self._credited = 0  # of the reads, those that are counted in the credit
        self._times: list[float] = []
        self._measured = 0
        self.timer: asyncio.TimerHandle | None = None
        """Set while messages are in flight; see `start_timer`."""
        self.delay_s = DELAY_S_MAX / 4
        self.counters = {"hedged": 0, "late": 0}

    def watch(
        self, lane: ReadQueue, jobs: Sequence[Read], again: Callable[[SentRead], None], cost: float = 0.0
    ) -> SentRead:
        """Watch a message of reads that is being sent.

        The caller passes the result to `came` at the end, also after an error. `cost`: cost of a second
        request, in reads; infinite: only a late read is sent twice.
        """
        sent = SentRead(lane, jobs, self._now_s(), again, cost or len(jobs))
        self.add(sent)
        return sent

    def add(self, sent: SentRead) -> None:
        """Watch a message that has begun; as `watch`."""
        sent.is_watched = True
        self.sent[sent] = None
        if self.timer is None:
            self.start_timer()

    def leave_out(self, read_count: int) -> None:
        """Earn no credit by these reads, which are never sent twice before they are late.

        Call it when they are counted. Without it a large batch would pay for the second requests of others.
        """
        self._credited += read_count

    def start_timer(self) -> None:
        """Look for slow reads from now on, until none is in flight."""
        self.timer = self._loop.call_later(self.delay_s, self.look)

    def came(self, sent: SentRead, good: bool) -> None:
        """Record the end of a message.

        `good`: with bytes; a refusal says nothing about the latency of reads.
        """
        self.sent.pop(sent, None)
        self.measure(sent.lane, self._now_s() - sent.sent_s, good)

    def came_at(self, sent: SentRead, now_s: float) -> None:
        """Record the end of a message with a reply; measure it if MEASURED_S have passed."""
        self.sent.pop(sent, None)
        lane = sent.lane
        if now_s - lane.measured_s >= _MEASURED_S:
            lane.measured_s = now_s
            self.measure(lane, now_s - sent.sent_s)

    def measure(self, lane: ReadQueue, took_s: float, good: bool = True) -> None:
        """Record the latency of a message. `good` as in `came`."""
        if good:
            lane.took_s += (took_s - lane.took_s) * (SMOOTHED if lane.took_s else 1.0)
        if len(self._times) < LAST:
            self._times.append(took_s)
        else:
            self._times[self._measured % LAST] = took_s
        self._measured += 1
        if self._measured % _LOOK == 0:
            ordered = sorted(self._times)
            self.delay_s = min(DELAY_S_MAX, max(DELAY_S_MIN, SLOWER * ordered[len(ordered) * 95 // 100]))
            self._looked()

    def look(self) -> None:
        """Send slow reads to other replicas too; the timer calls this while messages are in flight."""
        self.timer = None
        now_s = self._now_s()
        count = self._read_count()
        self._credit = min(CREDIT_MAX, self._credit + SHARE * (count - self._credited))
        self._credited = count
        for sent in list(self.sent):
            if sent not in self.sent:
                continue  # it ended while another one was sent again
            age_s = now_s - sent.sent_s
            if age_s < self.delay_s:
                break  # the following ones are younger
            late = age_s >= LATE_S
            if late:
                self.sent.pop(sent, None)
                self.counters["late"] += 1
                self._late(sent.lane)  # first, so that another replica is asked now
            if not sent.is_hedged and (late or self._credit >= sent.cost):
                sent.is_hedged = True
                if not late:
                    self._credit -= sent.cost
                self.counters["hedged"] += sent.count
                sent.again(sent)
        if self.sent:
            self.timer = self._loop.call_later(max(DELAY_S_MIN, self.delay_s / 2), self.look)

    def close(self) -> None:
        """Stop the watch."""
        if self.timer is not None:
            self.timer.cancel()
        self.sent.clear()


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
    ) -> None:
        self._chunks = chunks
        self._view = view
        self._clock = clock
        self._pause = pause
        self._renew = renew

    def ask(self, sent: SentRead) -> None:
        """Send each of these reads to another replica, if there is one."""
        for job in sent.jobs:
            if job.done() or job.second:
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
        if job.done():
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
        while not job.done() and (left_s := job.deadline_s - self._clock.boottime_s()) > 0:
            tries += 1
            await self._pause(Unavailable(), tries, left_s)
            try:
                lane = self._chunks.find_lane(job.file, job.index, (sent.lane,))
                if lane is sent.lane or job.done():
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
    if job.done():
        return  # the caller gave up and owns the buffer again
    if job.into is not None:
        job.into[:] = found
        found = job.into
    job.set_result(found)
