"""Queries of the leader to standbys, and how long the leader waits for a reply."""

import asyncio

from nvpool.core.clock import ManualClock
from nvpool.core.errors import DeadlineExceeded
from nvpool.node.coordination.leadership import PASSED_ON_S
from nvpool.node.coordination.standby_checks import has_records
from nvpool.poolmap.model import Shard, StandbyMember


class Silent:
    """A dialer that cannot connect, and records the deadline of each attempt."""

    def __init__(self):
        self.deadlines = []

    async def call(self, _endpoints, _method, _message, *, deadline_s):
        self.deadlines.append(deadline_s)
        raise DeadlineExceeded("no connection within the deadline")


def test_records_query_ends_before_the_request_times_out():
    """A primary that starts on another node than the leader has its request cancelled after PASSED_ON_S; a query to an
    unreachable standby must end before, or the primary never gets a reply."""
    dialer, clock = Silent(), ManualClock()
    shard = Shard(1, 1, (), standbys=(StandbyMember(1, 2, ("stream://h:1",), "up"),))
    assert asyncio.run(has_records(dialer, clock, shard, 1)) is None
    assert [deadline_s - clock.boottime_s() < 0.7 * PASSED_ON_S for deadline_s in dialer.deadlines] == [True]
