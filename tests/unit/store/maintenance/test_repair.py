"""Retry times of bad blocks that could not be repaired, on virtual time."""

import asyncio

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.store.chunks.memory_store import MemoryChunkStore
from nvpool.store.maintenance.repair import RETRY_S, RETRY_S_MAX, Repair
from nvpool.store.throttle import Throttle
from nvpool.testing.sim.virtual_time_loop import VirtualLoop
from tests.unit.poolmap.chains.test_chain_placement import a_pool


class Counted(Repair):
    """Records when blocks are tried; no other target has a copy."""

    def __init__(self, store):
        super().__init__(store, 1, None, SYSTEM_CLOCK, Throttle(1 << 40, SYSTEM_CLOCK, bool))
        self.tried_s = []

    async def repaired(self, bad):
        self.tried_s.append(asyncio.get_running_loop().time())
        return await super().repaired(bad)


def test_unrepaired_blocks_are_retried_soon_after_a_new_map():
    async def run():
        store = MemoryChunkStore(1 << 20)
        repair = Counted(store)
        store.note_bad(1, 0, 0, "does not fit its checksum")
        repair.update_map(a_pool((4,), 1))
        await asyncio.sleep(1000)
        waits = [
            round(after - before) for before, after in zip(repair.tried_s, repair.tried_s[1:], strict=False)
        ]
        assert waits[0] == RETRY_S and max(waits) == waits[-1] == RETRY_S_MAX, (
            "less and less often, but at least every minute"
        )
        count = len(repair.tried_s)
        repair.update_map(a_pool((4,), 1))
        await asyncio.sleep(5 * RETRY_S)
        assert len(repair.tried_s) >= count + 3, "after a new map as at the start"
        await repair.close()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
