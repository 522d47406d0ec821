"""A damaged index: an error and never zeros, told in status, and no obstacle to removal."""

import asyncio
import logging

import pytest

from nvpool.base import errors
from nvpool.base.clock import ManualClock
from nvpool.kv.memory import MemoryKv
from nvpool.store.allocator import Transaction
from nvpool.store.block_chunkstore import BlockChunkStore
from nvpool.store.chunkstore import StoreOptions
from nvpool.store.device import MemoryDevice
from nvpool.store.records import segment_key
from nvpool.testing.contracts.chunkstore import content, get, is_sound, put, scrubbed, some_bytes

BLOCKS = 4096


class DamagedKv(MemoryKv):
    """Records whose keys are in `damaged` can not be read, as LMDB's with a flipped bit."""

    damaged: set = set()

    def get(self, key):
        if key in self.damaged:
            raise errors.CorruptRecord(f"{key.hex()} is damaged")
        return super().get(key)

    def scan(self, first, end, limit):
        found = super().scan(first, end, limit)
        if any(key in self.damaged for key, _ in found):
            raise errors.CorruptRecord("a record is damaged")
        return found

    def apply(self, effects, *, reclaims=False):
        effects = list(effects)
        self.damaged = self.damaged - {key for key, _ in effects}
        return super().apply(effects, reclaims=reclaims)


async def a_store():
    store = BlockChunkStore(MemoryDevice(BLOCKS * 4096), BLOCKS, target=1, options=StoreOptions(cached_segments=1),
                            clock=ManualClock())
    await store.attach(DamagedKv())
    return store


def on_a_store(test):
    def run():
        async def main():
            store = await a_store()
            await test(store)
            await store.close()

        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@on_a_store
async def test_a_damaged_record_is_an_error_and_not_a_hole(store):
    await put(store, 1, 0, 0, some_bytes(600_000))
    await put(store, 2, 0, 0, some_bytes(5000))
    store.index.clear()
    store.kv.damaged = {segment_key(1, 0, 1)}
    assert (await get(store, 1, 0, 0, 4096)).status == 0
    assert (await get(store, 1, 0, 300 * 1024, 4096)).status == errors.CorruptRecord.wire_code
    assert (await get(store, 1, 0, 0, 1 << 20)).status == errors.CorruptRecord.wire_code
    assert {one[:2] for one in store.bad_blocks()} == {(1, 0)}
    with pytest.raises(errors.CorruptRecord):
        await put(store, 1, 0, 300 * 1024, b"x")
    assert await content(store, 2, 0, 5000) == some_bytes(5000)


@pytest.mark.parametrize("segments", [[(0, 0)], [(0, 1)], [(3, 0), (3, 1)], [(2, 2), (0, 0), (3, 2)]])
def test_what_is_damaged_can_be_removed(segments, caplog):
    caplog.set_level(logging.CRITICAL)

    async def run():
        store = await a_store()
        for index in range(4):
            await put(store, 1, index, 0, some_bytes(600_000))
        await put(store, 2, 0, 0, some_bytes(5000))
        store.index.clear()
        store.kv.damaged = {segment_key(1, index, segment) for index, segment in segments}
        await store.remove([1])
        assert store.inodes(0, 5) == ([2], False)
        _, bad, problems = await scrubbed(store)
        assert not bad and problems and all("by no chunk" in problem for problem in problems)
        await store.close()

    asyncio.run(run())


@on_a_store
async def test_a_scrub_compares_index_and_free_map_both_ways(store):
    await put(store, 1, 0, 0, some_bytes(20_000))
    await put(store, 2, 0, 0, some_bytes(20_000))
    await is_sound(store)
    allocator, kv = store.allocator, store.kv
    place = store.index.chunk(1, 0).segments[0].disk[2]
    freed = Transaction()
    freed.free((place, 1))
    allocator.commit(freed, kv.apply(allocator.effects(freed)))
    lost = Transaction()
    allocator.allocate(lost, 3)
    allocator.commit(lost, kv.apply(allocator.effects(lost)))
    key = segment_key(2, 0, 0)
    kv.apply([(segment_key(3, 0, 0), kv.get(key))])
    _, bad, problems = await scrubbed(store)
    assert not bad
    assert any(f"lies at {place}, which the free map calls free" in problem for problem in problems)
    assert any(problem.startswith("3 blocks from") for problem in problems)
    assert sum("which another block has too" in problem for problem in problems) == 5
    assert len(problems) == 7


@on_a_store
async def test_writes_during_a_scrub_are_no_problem(store):
    for inode in range(1, 30):
        await put(store, inode, 0, 0, some_bytes(20_000, inode))
    cursor, problems, bad, turn = b"", [], [], 0
    while True:
        step = await store.scrub(cursor, 5)
        problems += step.problems
        bad += step.bad
        if step.done:
            break
        cursor = step.cursor
        for inode in range(1, 40, 3):
            turn += 1
            await put(store, inode, 0, turn % 4 * 4096, some_bytes(4096, turn))
        await store.flush()
        await store.remove([turn % 29 + 1])
    assert not problems and not bad
    await is_sound(store)
