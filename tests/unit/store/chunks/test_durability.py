"""Order of durable steps: one by one, and in random histories with power losses at any moment."""

import asyncio
import contextlib
import errno
import os
import random
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nvpool.core.clock import ManualClock
from nvpool.core.errors import Fenced, NoSpace
from nvpool.core.ids import RequestId, version
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.store.chunks.api import InodeCut, StoreOptions
from nvpool.store.chunks.block_store import BlockChunkStore
from nvpool.store.chunks.read_batch import READ
from nvpool.store.chunks.recovery import ReplayCheck
from nvpool.store.disk.allocator import SpacePending
from nvpool.store.disk.device import MemoryDevice
from nvpool.store.disk.index_records import segment_key
from nvpool.testing.contracts.chunk_store import content, get, is_sound, put, scrubbed, some_bytes
from tests.unit.store.chunks.test_index_damage import leak, mended, unmark

BLOCK = 4096
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""These tests simulate power losses without the drive's own faults."""


class Forgetful:
    """A store over the forgetting device and a real index, with access to both."""

    def __init__(self, blocks=4096):
        self.directory = Path(tempfile.mkdtemp(prefix="store-", dir=IN_MEMORY))
        self.blocks = blocks
        self.device = MemoryDevice(blocks * BLOCK)

    async def begin(self, step=lambda name: None):
        self.store = BlockChunkStore(
            self.device, self.blocks, target=1, options=StoreOptions(), clock=ManualClock()
        )
        self.check = ReplayCheck(self.device.read_whole, self.device.write)
        options = LmdbOptions(
            sync_interval_s=30, checkpoint_interval_s=30, journal_bytes=1 << 20, map_bytes=1 << 20
        )
        kv = await LmdbKv.open(
            self.directory / "index",
            options,
            before_checkpoint=self.store.sync_data,
            on_replay=self.check,
            on_fence=self.store.fence,
            step=step,
        )
        await self.store.attach(kv)
        return self.store

    async def die(self, power=True, keep=None):
        await self.store.abandon()
        if power:
            self.device.crash(keep)
        return await self.begin()

    def remember_journal(self):
        """Record the part of the index that a power loss before the next sync leaves at least."""
        shutil.rmtree(self.directory / "synced", ignore_errors=True)
        shutil.copytree(self.directory / "index", self.directory / "synced")

    async def die_with_the_journal(self, keep):
        await self.store.abandon()
        self.device.crash(keep)
        shutil.rmtree(self.directory / "index")
        shutil.copytree(self.directory / "synced", self.directory / "index")
        return await self.begin()

    async def close(self):
        await self.store.abandon()
        shutil.rmtree(self.directory)


def on_a_forgetting_drive(test):
    def run():
        async def main():
            one = Forgetful()
            await one.begin()
            try:
                await test(one)
            finally:
                await one.close()

        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@on_a_forgetting_drive
async def test_data_is_synced_before_the_index_commit(one):
    states = []
    await one.store.abandon()
    store = await one.begin(step=lambda name: states.append((name, len(one.device.unsynced))))
    await put(store, 1, 0, 0, some_bytes(50_000))
    assert one.device.unsynced
    states.clear()
    await store.kv.checkpoint()
    assert ("begun", 0) in states and ("frozen", 13) in states


@on_a_forgetting_drive
async def test_flush_syncs_the_data_before_the_journal(one):
    order = []
    sync, kv_sync = one.device.sync, one.store.kv.sync

    async def device_sync():
        order.append("data")
        await sync()

    async def journal_sync(sequence=None):
        order.append("journal")
        await kv_sync(sequence)

    one.device.sync, one.store.kv.sync = device_sync, journal_sync
    await put(one.store, 1, 0, 0, some_bytes(100))
    await one.store.flush()
    assert order == ["data", "journal"]
    await one.store.flush()
    assert order == ["data", "journal"], "no new writes, so no sync"
    one.store.kv.sync = kv_sync


@on_a_forgetting_drive
async def test_concurrent_flushes_share_a_sync(one):
    syncs = []
    sync = one.device.sync

    async def counted():
        syncs.append(1)
        await sync()

    one.device.sync = counted

    async def writer(inode):
        await put(one.store, inode, 0, 0, b"x")
        await one.store.flush()

    await asyncio.gather(*[writer(inode) for inode in range(1, 50)])
    assert len(syncs) <= 2


@on_a_forgetting_drive
async def test_synced_journal_alone_frees_no_block(one):
    store = one.store
    await put(store, 1, 0, 0, some_bytes(BLOCK))
    await store.flush()
    old = store.index.chunk(1, 0).segments[0].disk[0]
    await put(store, 1, 0, 0, some_bytes(BLOCK, 2))
    await store.kv.sync()
    taken = set()
    for inode in range(2, 60):
        await put(store, inode, 0, 0, some_bytes(BLOCK))
        taken.add(store.index.chunk(inode, 0).segments[0].disk[0])
    assert old not in taken
    store = await one.die()
    assert await content(store, 1, 0, BLOCK) == some_bytes(BLOCK), (
        "the new bytes did not reach the drive, the old bytes remain"
    )
    assert one.check.checked_blocks
    assert await get(store, 30, 0) and (await get(store, 30, 0)).data == b""
    await is_sound(store)


@on_a_forgetting_drive
async def test_block_under_a_waiting_read_is_not_reallocated(one):
    store = one.store
    await put(store, 1, 0, 0, some_bytes(BLOCK))
    old = store.index.chunk(1, 0).segments[0].disk[0]
    with store.readings.held():
        await put(store, 1, 0, 0, some_bytes(BLOCK, 2))
        await store.flush()
        assert store.allocator.held_blocks == 1
    await put(store, 2, 0, 0, b"x")
    await store.flush()
    assert store.allocator.held_blocks == 0 and not store.allocator.is_used(old)


@on_a_forgetting_drive
async def test_block_overwritten_before_a_read_waits_is_kept(
    one,
):
    store = one.store
    await put(store, 1, 0, 0, some_bytes(BLOCK))
    store.device.cold = True
    batch = store.read_now(READ.pack(1, 0, 0, BLOCK, 0, 0), [1])
    await put(store, 1, 0, 0, some_bytes(BLOCK, 2))  # in the same iteration of the loop
    late = []
    begin = store.device.begin_read
    store.device.begin_read = lambda *arguments: late.append(partial(begin, *arguments))
    finishing = asyncio.create_task(store.finish_read(batch))
    await asyncio.sleep(0)
    await store.flush()
    assert store.allocator.held_blocks == 1
    late.pop()()
    await finishing
    assert bytes(batch.payload[0]) == some_bytes(BLOCK)


@on_a_forgetting_drive
async def test_flush_after_a_failed_sync_makes_data_durable(one):
    await put(one.store, 1, 0, 0, some_bytes(5 * BLOCK))
    await one.store.flush()
    await put(one.store, 1, 0, BLOCK, some_bytes(BLOCK, 2))
    one.device.fail_syncs.append(errno.EIO)
    with pytest.raises(Fenced):
        await one.store.flush()
    store = await one.die(power=False)  # the process ends and restarts; its client repeats the flush
    await store.flush()
    store = await one.die()
    assert await content(store, 1, 0, 2 * BLOCK) == some_bytes(BLOCK) + some_bytes(BLOCK, 2)
    await is_sound(store)


@on_a_forgetting_drive
async def test_write_with_a_lost_block_is_undone_whole(one):
    store = one.store
    old, new = some_bytes(600 * 1024), some_bytes(600 * 1024, 2)
    await put(store, 1, 0, 0, old)
    await store.flush()
    before = (await get(store, 1, 0)).version
    lost_version = await put(store, 1, 0, 0, new, request=RequestId(1, 1, 1))
    lost = store.index.chunk(1, 0).segments[2].disk[7]
    store = await one.die(keep=lambda number: number != lost)
    assert await content(store, 1, 0, 600 * 1024) == old
    assert (await get(store, 1, 0)).version not in (before, lost_version), (
        "other targets would take it for the lost write"
    )
    await is_sound(store)
    assert await put(store, 1, 0, 0, new, request=RequestId(1, 1, 1)) > before, (
        "a replay is written, not only acknowledged"
    )
    assert await content(store, 1, 0, 600 * 1024) == new


@on_a_forgetting_drive
async def test_crash_during_replay_is_settled_at_the_next_start(one):
    store = one.store
    await put(store, 1, 0, 0, some_bytes(BLOCK))
    await store.flush()
    await put(store, 1, 0, 0, some_bytes(BLOCK, 2))
    await store.abandon()
    one.device.crash()
    kv = await LmdbKv.open(one.directory / "index", on_replay=ReplayCheck(one.device.read_whole))
    assert kv.scan(b"r", b"s", 10)
    await kv.abandon()
    store = await one.begin()
    assert not store.kv.scan(b"r", b"s", 10)
    assert await content(store, 1, 0, BLOCK) == some_bytes(BLOCK)
    await is_sound(store)


@on_a_forgetting_drive
async def test_damaged_flushed_block_is_not_taken_for_unwritten(one):
    store = one.store
    await put(store, 1, 0, 0, some_bytes(BLOCK))
    await put(store, 1, 0, 0, some_bytes(BLOCK, 2))
    await store.flush()
    one.device.flip(store.index.chunk(1, 0).segments[0].disk[0])
    store = await one.die()
    _, bad, problems = await scrubbed(store)
    assert [one[:3] for one in bad] == [(1, 0, 0)] and not problems


@on_a_forgetting_drive
async def test_truncated_bytes_stay_removed_after_a_power_loss(one):
    store = one.store
    await put(store, 1, 0, 0, b"x" * 10_000)
    await store.cut(1, 5000, 1, 20)
    store = await one.die()
    assert await content(store, 1, 0, 10_000) == b"x" * 5000 + bytes(5000)
    await is_sound(store)


@on_a_forgetting_drive
async def test_failed_sync_is_never_repeated(one):
    store = one.store
    syncs = []

    async def fail():
        syncs.append(1)
        raise NoSpace("asked for by the test")

    await put(store, 1, 0, 0, b"x")
    one.device.sync = fail
    for _ in range(3):
        with pytest.raises(Fenced):
            await store.flush()
    with pytest.raises(Fenced):
        await store.kv.checkpoint()
    assert len(syncs) == 1
    del one.device.sync


@on_a_forgetting_drive
async def test_failed_sync_of_a_cancelled_flush_fences_the_store(one):
    store = one.store
    begun, go = asyncio.Event(), asyncio.Event()

    async def fail():
        begun.set()
        await go.wait()
        raise NoSpace("raised by the test")

    await put(store, 1, 0, 0, b"x")
    one.device.sync = fail
    flush = asyncio.ensure_future(store.flush())
    await begun.wait()
    flush.cancel()
    await asyncio.gather(flush, return_exceptions=True)
    go.set()
    with pytest.raises(Fenced):
        await store.flush()
    assert store.fenced_because
    del one.device.sync


@on_a_forgetting_drive
async def test_full_drive_leaves_no_partial_write(one):
    store = one.store
    await put(store, 1, 0, 0, some_bytes(20_000))
    one.device.fail_writes.append(errno.ENOSPC)
    with pytest.raises(NoSpace):
        await put(store, 1, 0, 3000, some_bytes(12_000, 2))
    assert await content(store, 1, 0, 20_000) == some_bytes(20_000)
    await is_sound(store)


class _Model:
    """Possible contents of each block of a chunk: those since the last flush, each with the number of its write."""

    def __init__(self):
        self.possible: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        self.whole: dict[int, dict[tuple[int, int], bytes]] = {}

    def now(self, name):
        return self.possible.get(name, [(0, bytes(BLOCK))])[-1][1]

    def write(self, number, inode, first, contents, whole):
        for at, block in enumerate(contents):
            self.possible.setdefault((inode, first + at), [(0, bytes(BLOCK))]).append((number, block))
        if whole:
            self.whole[number] = {(inode, first + at): block for at, block in enumerate(contents)}

    def flushed(self):
        self.possible = {name: found[-1:] for name, found in self.possible.items()}
        self.whole.clear()

    def settle(self, found):
        """`found`: contents of the chunks after a power loss; each block has a possible content, no write is torn."""
        shown = {}
        for name, options in self.possible.items():
            numbers = [number for number, block in options if block == found[name]]
            assert numbers, f"block {name} has content that was never written"
            shown[name] = numbers  # several if a copy restored earlier content
        for number, blocks in self.whole.items():
            if any(shown[name][0] == number for name in blocks):
                assert all(shown[name][-1] >= number for name in blocks), f"write {number} is partly applied"
        self.possible = {name: [(0, found[name])] for name in self.possible}
        self.whole.clear()


async def _history(seed, turns):
    chance = random.Random(seed)
    one = Forgetful(blocks=700)
    store = await one.begin()
    model = _Model()
    inodes, chunk_blocks = 4, 100
    cuts = dict.fromkeys(range(1, inodes + 1), 0)
    contents, epoch = {}, 1
    one.remember_journal()
    try:
        for turn in range(1, turns):
            for number in (
                cuts
            ):  # content of each version; a truncation makes the next version, without an epoch of its own
                found = await get(store, number, 0, 0, chunk_blocks * BLOCK)
                if found.version:
                    contents[number, found.version] = found.data
            inode = chance.randint(1, inodes)
            what = chance.random()
            if what < 0.15:
                other, length = chance.randint(1, inodes), chance.choice([1, 5, 40])
                first, from_ = (
                    chance.randrange(chunk_blocks - length),
                    chance.randrange(chunk_blocks - length),
                )
                try:
                    await store.copy(
                        (other, 0, from_ * BLOCK),
                        inode,
                        0,
                        first * BLOCK,
                        length * BLOCK,
                        cut=cuts[inode],
                        request=RequestId(5, turn % 8, turn),
                        epoch=epoch,
                    )
                except NoSpace:
                    assert store.status()["used_bytes"] > 400 * BLOCK
                    continue
                blocks = [model.now((other, from_ + at)) for at in range(length)]
                if any(map(any, blocks)) or any(any(model.now((inode, first + at))) for at in range(length)):
                    model.write(turn, inode, first, blocks, True)
            elif what < 0.22:
                other = chance.randint(1, inodes)
                source = await store.fetch(other, 0)
                copy = replace(
                    source,
                    inode=inode,
                    version=version(epoch + 1, turn),
                    cut=cuts[inode],
                    known=InodeCut(inode, cuts[inode], 0, 20),
                )
                try:
                    assert await store.install([(copy, store.state(inode, 0))]) == [True]
                except NoSpace:
                    assert store.status()["used_bytes"] > 400 * BLOCK
                    continue
                model.write(turn, inode, 0, [model.now((other, at)) for at in range(chunk_blocks)], True)
            elif what < 0.70:
                offset = chance.randrange(chunk_blocks * BLOCK - 1)
                length = chance.choice([1, 700, BLOCK, 5 * BLOCK, 40 * BLOCK])
                aligned = chance.random() < 0.6
                if aligned:
                    offset, length = offset // BLOCK * BLOCK, max(BLOCK, length // BLOCK * BLOCK)
                length = min(length, chunk_blocks * BLOCK - offset)
                data = chance.randbytes(length)
                first, last = offset // BLOCK, (offset + length - 1) // BLOCK
                joined = bytearray(b"".join(model.now((inode, block)) for block in range(first, last + 1)))
                joined[offset - first * BLOCK : offset - first * BLOCK + length] = data
                try:
                    await put(
                        store,
                        inode,
                        0,
                        offset,
                        data,
                        cut=cuts[inode],
                        request=RequestId(5, turn % 8, turn),
                        epoch=epoch,
                    )
                except NoSpace:
                    assert store.status()["used_bytes"] > 400 * BLOCK
                    continue
                blocks = [bytes(joined[at : at + BLOCK]) for at in range(0, len(joined), BLOCK)]
                model.write(turn, inode, first, blocks, aligned)
            elif what < 0.80:
                await store.flush()
                model.flushed()
                one.remember_journal()
            elif what < 0.85:
                await store.kv.checkpoint()
                one.remember_journal()
            elif what < 0.90:
                cuts[inode] += 1
                size = chance.choice([0, chance.randrange(chunk_blocks * BLOCK)])
                end = chance.choice([0, size + chance.choice([1, 5000, 20 * BLOCK])])
                await store.cut(inode, size, cuts[inode], 20, end)
                for block in range(chunk_blocks):
                    kept = max(0, min(BLOCK, size - block * BLOCK))
                    behind = max(0, min(BLOCK, end - block * BLOCK)) if end else BLOCK
                    if (inode, block) in model.possible and kept < behind:
                        now = model.now((inode, block))
                        model.write(
                            turn, inode, block, [now[:kept] + bytes(behind - kept) + now[behind:]], False
                        )
                model.flushed()  # a truncation is flushed when it replies, with all earlier writes
                one.remember_journal()
            elif what < 0.92:
                await _corrupt_free_map(store, chance, inodes)
                await store.flush()
                model.flushed()
                one.remember_journal()
                if chance.random() < 0.5:  # the power fails before the repair is flushed
                    flush, store.flush = store.flush, _nothing
                    found, left = await mended(store, chance.choice([7, 1 << 14]))
                    store.flush = flush
                    if chance.random() < 0.5:
                        await store.kv.sync()
                    store = await (one.die_with_the_journal(None) if chance.random() < 0.5 else one.die())
                    one.remember_journal()
                found, left = await mended(store, chance.choice([7, 1 << 14]))
                assert not left
                one.remember_journal()
                await is_sound(store)
            else:
                power = chance.random() < 0.7
                share = chance.choice([0, 0.5, 0.9, 1])

                def keep(_number, share=share):
                    return chance.random() < share

                if power and chance.random() < 0.4:
                    store = await one.die_with_the_journal(keep)
                else:
                    store = await one.die(power, keep)
                one.remember_journal()
                epoch += 2
                found = {}
                for number in cuts:
                    now = await get(store, number, 0, 0, chunk_blocks * BLOCK)
                    assert contents.get((number, now.version), now.data) == now.data, (
                        "one version has two contents"
                    )
                    whole = await content(store, number, 0, chunk_blocks * BLOCK)
                    found |= {
                        (number, block): whole[block * BLOCK :][:BLOCK] for block in range(chunk_blocks)
                    }
                model.settle(found)
                if not power:
                    assert not store.kv.scan(b"r", b"s", 1)
                await is_sound(store)
        await store.remove(list(cuts))
        await is_sound(store)
        assert store.status()["used_bytes"] == 0
    finally:
        await one.close()


async def _corrupt_free_map(store, chance, inodes):
    """Mark unnamed blocks as used, and some named ones as free."""
    with contextlib.suppress(NoSpace, SpacePending):
        leak(store, chance.choice([1, 3, 30]))
    for inode in range(1, inodes + 1):
        chunk = store.index.chunk(inode, 0)
        if chunk.version and chance.random() < 0.5:
            named = [at for at, place in enumerate(store.index.segment(chunk, 0).disk) if place]
            for block in chance.sample(named, min(len(named), chance.choice([1, 4]))):
                unmark(store, inode, block)


async def _nothing():
    pass


@on_a_forgetting_drive
async def test_blocks_freed_by_a_scrub_are_reused_only_when_durable(
    one,
):
    """An unreadable record is removed, and a scrub frees its blocks: until the removal is durable, the bytes must stay, because
    a power loss restores the record."""
    store = one.store
    await put(store, 1, 0, 0, some_bytes(40_000))
    await put(store, 2, 0, 0, some_bytes(40_000, 2))
    await store.flush()
    one.remember_journal()
    places = set(store.index.chunk(1, 0).segments[0].disk)
    key = segment_key(1, 0, 0)
    store.kv.apply([(key, None)])  # as trim does with an unreadable record: the blocks stay used
    store.index.clear()
    flush, store.flush = store.flush, _nothing
    found, left = await mended(store)
    store.flush = flush
    assert len(found) == 1 and not left and store.allocator.held_blocks == len(places)
    for inode in range(10, 40):
        await put(store, inode, 0, 0, some_bytes(100_000, inode))
        assert not places & set(store.index.chunk(inode, 0).segments[0].disk)
    store = await one.die_with_the_journal(None)
    assert await content(store, 1, 0, 40_000) == some_bytes(40_000)
    await is_sound(store)
    store.kv.apply([(key, None)])
    store.index.clear()
    await mended(store)
    one.remember_journal()
    assert not store.allocator.held_blocks
    store = await one.die_with_the_journal(None)
    assert await content(store, 1, 0, 4096) == bytes(4096)
    assert await content(store, 2, 0, 40_000) == some_bytes(40_000, 2)
    await is_sound(store)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(8))
def test_history_with_power_losses_shows_old_or_new_bytes(seed):
    asyncio.run(_history(seed, 120))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_histories_with_power_losses_show_old_or_new(seed):
    asyncio.run(_history(seed, 600))
