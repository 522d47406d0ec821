"""Damaged index of a store: an error and never zeros, reported in status, and no obstacle to removal."""

import asyncio
import logging

import pytest

from nvpool.core import errors
from nvpool.core.clock import ManualClock
from nvpool.kv.memory_engine import MemoryKv
from nvpool.store.chunks.api import StoreOptions
from nvpool.store.chunks.block_store import BlockChunkStore
from nvpool.store.disk.allocator import Transaction
from nvpool.store.disk.device import MemoryDevice
from nvpool.store.disk.index_records import segment_key
from nvpool.testing.contracts.chunk_store import content, get, is_sound, put, scrubbed, some_bytes

BLOCKS = 4096


class DamagedKv(MemoryKv):
    """Store whose records with keys in `damaged` cannot be read, as with a flipped bit in LMDB."""

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
    store = BlockChunkStore(
        MemoryDevice(BLOCKS * 4096),
        BLOCKS,
        target=1,
        options=StoreOptions(cached_segments=1),
        clock=ManualClock(),
    )
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
async def test_damaged_record_is_an_error_and_not_a_hole(store):
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
def test_damaged_chunks_can_be_removed(segments, caplog):
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
async def test_unreadable_block_is_truncated_and_repaired(store):
    data = some_bytes(20_000)
    for inode in (1, 2):
        await put(store, inode, 0, 0, data)
    (place,) = store.index.places(store.index.chunk(1, 0), 2, 1)
    store.device.fail_reads = {place}
    with pytest.raises(errors.ChecksumMismatch) as raised:
        await put(store, 1, 0, 9000, b"part")
    assert raised.value.damaged == (1, 0, 2) and [one[:3] for one in store.bad_blocks()] == [(1, 0, 2)]
    for inode in (1, 2):
        await store.cut(inode, 10_000, 1, 20)
    assert (await get(store, 1, 0, 0, 1 << 14)).status in (
        errors.DriveFailed.wire_code,
        errors.ChecksumMismatch.wire_code,
    )
    copy = await store.fetch(2, 0, 2, 1)
    assert await store.mend(1, 0, 2, copy.content, checksum=bytes(copy.checksums), version=copy.version)
    assert await content(store, 1, 0, 20_000) == data[:10_000] + bytes(10_000) and not store.bad_blocks()
    await is_sound(store)


@on_a_store
async def test_scrub_compares_index_and_free_map_both_ways(store):
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


def leak(store, count):
    """Mark blocks as used that no chunk names."""
    transaction = Transaction()
    store.allocator.allocate(transaction, count)
    store.writer.apply(transaction, [])
    return transaction.taken


def unmark(store, inode, block):
    """Mark a block as free that a chunk names; return its location."""
    place = store.index.chunk(inode, 0).segments[0].disk[block]
    transaction = Transaction()
    transaction.free((place, 1))
    store.writer.apply(transaction, [])
    return place


async def mended(store, blocks=1 << 14):
    cursor, found, left = b"", [], []
    while True:
        step = await store.scrub(cursor, blocks, True)
        found += step.mended
        left += step.problems
        if step.done:
            return found, left
        cursor = step.cursor


@on_a_store
async def test_scrub_with_repair_corrects_the_free_map(store):
    for inode in (1, 2, 3):
        await put(store, inode, 0, 0, some_bytes(20_000, inode))
    used = store.status()["used_bytes"]
    leak(store, 3)
    leak(store, 40)
    place = unmark(store, 2, 1)
    await store.flush()
    with pytest.raises(errors.InvariantBroken):
        await store.remove([2])
    found, left = await mended(store, blocks=5)
    assert (
        left == []
        and len(found) == 2
        and f"lies at {place}," in found[0]
        and found[1].startswith("43 blocks from")
    )
    await is_sound(store)
    assert store.status()["used_bytes"] == used and store.allocator.held_blocks == 0, (
        "flushed blocks are free"
    )
    assert await content(store, 2, 0, 20_000) == some_bytes(20_000, 2)
    await store.remove([1, 2, 3])
    await store.flush()
    assert store.status()["used_bytes"] == 0
    await is_sound(store)


@on_a_store
async def test_scrub_frees_no_block_while_a_record_is_unreadable(store):
    for inode in (1, 2):
        await put(store, inode, 0, 0, some_bytes(20_000, inode))
    key = segment_key(1, 0, 0)
    raw = store.kv.get(key)
    for spoil in (
        lambda: store.kv.apply([(key, b"\xffof a later version")]),
        lambda: setattr(store.kv, "damaged", {key}),
    ):
        spoil()
        used = store.allocator.used_blocks
        found, left = await mended(store)
        assert not found and len(left) == 1 and store.allocator.used_blocks == used
        store.kv.apply([(key, raw)])
    leak(store, 2)
    store.kv.apply([(b"p" + key[1:], raw)])
    found, left = await mended(store)
    assert not found and len(left) == 1, "pending versions refer to blocks too"
    store.kv.apply([(b"p" + key[1:], None)])
    found, left = await mended(store)
    assert len(found) == 1 and not left
    await is_sound(store)


@on_a_store
async def test_concurrent_scrubs_free_no_used_block(store):
    for inode in range(1, 30):
        await put(store, inode, 0, 0, some_bytes(20_000, inode))
    cursors = [b"", b""]

    async def step(which):
        done = await store.scrub(cursors[which], 7, True)
        cursors[which] = done.cursor
        assert not done.mended and not done.problems

    for turn in range(60):
        await asyncio.gather(step(0), step(1), *([step(0)] if turn % 7 == 3 else []))
        if turn % 5 == 4:
            cursors[turn % 2] = b""
    for inode in range(1, 30):
        assert await content(store, inode, 0, 20_000) == some_bytes(20_000, inode)
    await is_sound(store)


@on_a_store
async def test_scrub_claims_a_freed_block_only_when_durable(store):
    await put(store, 1, 0, 0, some_bytes(20_000))
    place = unmark(store, 1, 2)
    found, left = await mended(store)
    assert not found and len(left) == 1, "the block is held until the change that freed it is durable"
    await store.flush()
    found, left = await mended(store)
    assert len(found) == 1 and not left and store.allocator.is_used(place)


@pytest.mark.parametrize("repair", [False, True])
def test_writes_during_a_scrub_cause_no_problems(repair):
    on_a_store(lambda store: writes_during_a_scrub(store, repair))()


async def writes_during_a_scrub(store, repair):
    for inode in range(1, 30):
        await put(store, inode, 0, 0, some_bytes(20_000, inode))
    cursor, problems, bad, turn = b"", [], [], 0
    while True:
        step = await store.scrub(cursor, 5, repair)
        problems += [*step.problems, *step.mended]
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
