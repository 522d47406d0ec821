"""What the leader asks standbys, and how long it waits for an answer."""

import asyncio

from nvpool.core.clock import ManualClock
from nvpool.core.errors import DeadlineExceeded
from nvpool.node.coordination.leadership import PASSED_ON_S
from nvpool.node.coordination.standby_checks import has_records
from nvpool.poolmap.model import Shard, StandbyMember


class Silent:
    """A dialer that reaches nobody, and notes until when it was asked to try."""

    def __init__(self):
        self.deadlines = []

    async def call(self, _endpoints, _method, _message, *, deadline_s):
        self.deadlines.append(deadline_s)
        raise DeadlineExceeded("no connection within the deadline")


def test_question_for_records_ends_before_the_asker_gives_up():
    """A primary that begins on another node than the leader's has its request cancelled after PASSED_ON_S: with a standby that
    can not be reached it would never be answered."""
    dialer, clock = Silent(), ManualClock()
    shard = Shard(1, 1, (), standbys=(StandbyMember(1, 2, ("stream://h:1",), "up"),))
    assert asyncio.run(has_records(dialer, clock, shard, 1)) is None
    assert [deadline_s - clock.boottime_s() < 0.7 * PASSED_ON_S for deadline_s in dialer.deadlines] == [True]
