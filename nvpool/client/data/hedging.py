"""Reads that take much longer than reads lately did are asked of another replica too; the first good answer counts.

Never for all: a second question costs the other target as much as the first one, so that under load it would make all slower.
Only some in a hundred may be asked twice (Dean and Barroso: The Tail at Scale, CACM 56, 2013). What is without an answer for
LATE_S is asked elsewhere in any case, and the target that is silent is left alone for a while.

Nothing is watched, and nothing costs anything, in a pool where each chunk has one replica. Called by chunkclient and batchread
on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from nvpool.client.data.target_queue import Lane, Read
from nvpool.core.clock import Clock

SHARE = 0.05
"""Of the reads may be asked twice."""
CREDIT_MAX = 16.0
"""Reads that may be asked twice in a row."""
SLOWER = 3.0
"""Times the time within which 95 of the last hundred were answered: then a read is slow."""
DELAY_S_MIN, DELAY_S_MAX = 0.005, 0.25
LATE_S = 0.5
LAST = 128
"""Reads whose times are looked at."""
_LOOK = 32
SMOOTHED = 1 / 16
"""What a new time counts in that of its lane."""


class Sent:
    """One message with reads. `again(sent)` asks another replica."""

    __slots__ = ("number", "lane", "jobs", "sent_s", "again", "cost", "end", "asked")

    def __init__(self, number: int, lane: Lane, jobs: Sequence[Read], sent_s: float, again: Callable[[Sent], None],
                 cost: float):
        self.number = number
        self.lane = lane
        self.jobs = jobs
        self.sent_s = sent_s
        self.again = again
        self.cost = cost
        self.end: Callable[[], None] = _nothing
        """Nothing is received any more; to be called before somebody else writes to the reader's memory."""
        self.asked = False


def _nothing() -> None:
    """What is received is in memory of its own."""


class Hedging:
    """`late(lane)`: it has not answered for LATE_S. `looked()`: lanes know anew what they take, now and then."""

    def __init__(self, clock: Clock, late: Callable[[Lane], None], looked: Callable[[], None]):
        self._now_s = clock.boottime_s
        self._late = late
        self._looked = looked
        self._loop = asyncio.get_running_loop()
        self._out: dict[int, Sent] = {}
        self._number = 0
        self._credit = CREDIT_MAX
        self._times: list[float] = []
        self._measured = 0
        self._timer: asyncio.TimerHandle | None = None
        self.delay_s = DELAY_S_MAX / 4
        self.counters = {"hedged": 0, "late": 0}

    def watch(self, lane: Lane, jobs: Sequence[Read], again: Callable[[Sent], None], cost: float = 0.0) -> Sent:
        """These reads are being sent. Give it to `came` when they are answered, well or not. `cost`: of asking again, in reads;
        infinite: it is done only late."""
        self._number += 1
        sent = self._out[self._number] = Sent(self._number, lane, jobs, self._now_s(), again, cost or len(jobs))
        self._credit = min(CREDIT_MAX, self._credit + SHARE * len(jobs))
        if self._timer is None:
            self._timer = self._loop.call_later(self.delay_s, self._look)
        return sent

    def came(self, sent: Sent, good: bool) -> None:
        """`good`: with bytes. How fast somebody refuses says nothing of what a read takes there."""
        self._out.pop(sent.number, None)
        took_s = self._now_s() - sent.sent_s
        if good:
            lane = sent.lane
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

    def _look(self) -> None:
        self._timer = None
        now_s = self._now_s()
        for sent in list(self._out.values()):
            age_s = now_s - sent.sent_s
            if age_s < self.delay_s:
                break  # those behind it are younger
            late = age_s >= LATE_S
            if late:
                self._out.pop(sent.number, None)
                self.counters["late"] += 1
                self._late(sent.lane)  # first: who is asked now is another one
            if not sent.asked and (late or self._credit >= sent.cost):
                sent.asked = True
                if not late:
                    self._credit -= sent.cost
                self.counters["hedged"] += len(sent.jobs)
                sent.again(sent)
        if self._out:
            self._timer = self._loop.call_later(max(DELAY_S_MIN, self.delay_s / 2), self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._out.clear()
