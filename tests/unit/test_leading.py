"""Whom a node asks that does not lead, while the lead passes on."""

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.base.errors import StaleEpoch, Unavailable
from nvpool.logic.poolmap import changed
from nvpool.run.leading import Leading
from nvpool.testing.meta_shard import DirectCall
from nvpool.wire.v1.wire_pb2 import META_ALIVE
from tests.unit.test_placement import a_pool


class Others:
    """The coordinator and the other nodes: those in `silent` never answer."""

    def __init__(self):
        found = a_pool((4, 4, 4), 2, nodes=3)
        self.pool_map = replace(found, nodes=tuple(replace(node, endpoints=(f"inproc://{node.id}",)) for node in found.nodes))
        self.leads, self.silent, self.asked = "2", {2}, []

    async def newest(self):
        return self.pool_map

    def leader(self):
        return self.leads

    async def call(self, endpoints, method, message, *, deadline_s):
        node = int(endpoints[0].rpartition("/")[2])
        self.asked.append(node)
        if node in self.silent:
            await asyncio.get_running_loop().create_future()
        return SimpleNamespace(message=b"from %d" % node)


def asking(check):
    async def main():
        others = Others()
        leading = Leading(others, 1, others, lambda target: None)
        seeing = asyncio.ensure_future(leading._see())
        call = DirectCall(META_ALIVE, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 600)
        call.peer = call.peer._replace(member="")
        question = asyncio.ensure_future(leading.ask_leader(call))
        while not others.asked:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        try:
            await asyncio.wait_for(check(others, leading, question), 120)
        finally:
            seeing.cancel()

    asyncio.run(main())


def test_who_waits_for_a_leader_that_is_silent_asks_the_next_one():
    async def check(others, leading, question):
        others.leads = "3"
        assert await question == b"from 3" and others.asked == [2, 3]
    asking(check)


def test_who_waits_for_a_leader_that_is_silent_hears_that_nobody_leads():
    async def check(others, leading, question):
        others.leads = None
        with pytest.raises(Unavailable):
            await question
    asking(check)


def test_who_waits_for_a_leader_that_is_silent_and_leads_itself_answers_itself():
    async def check(others, leading, question):
        leading.manager = object()
        others.leads = "1"
        assert await question is None
    asking(check)


@pytest.mark.parametrize("serves_again", [False, True])
def test_a_death_that_is_told_late_is_not_that_of_the_process_that_followed(serves_again):
    """Who leads gives that one leases, and would not know for a moment that others go on without it."""
    class Coordinator(Others):
        async def replace(self, new, leader=None):
            if self.pool_map.epoch == before:  # another one was first
                self.pool_map = changed(self.pool_map)
                pids[1] = 8 if serves_again else 7
                raise StaleEpoch
            self.pool_map = new

    async def main():
        others = Coordinator()
        leading = Leading(others, 1, others, pids.get)
        leading.died(1, 7)
        await asyncio.gather(*leading._passing)
        assert any(1 in chain.targets for chain in others.pool_map.tables[-1].chains) == serves_again

    pids = {1: 7}
    before = Others().pool_map.epoch
    asyncio.run(main())
