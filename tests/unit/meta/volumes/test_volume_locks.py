"""Background work of a shard on volumes, while partitions migrate or cross-shard transactions lock records: it leaves them
unchanged, and continues when they are free."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, contextmanager

import pytest

from nvpool.core.clock import SystemClock
from nvpool.core.ids import partition_of
from nvpool.meta.options import MetaOptions
from nvpool.meta.state.record_locks import LockedRecord
from nvpool.meta.state.records import inode_key
from nvpool.meta.state.transaction_records import TransactionId
from nvpool.meta.state.volume_records import ATTACHED, USE, volume_key
from nvpool.meta.volumes.removal import Removal
from tests.unit.sdk.test_volumes import pool_and_client

SPAN = TransactionId(7, 7, 7)
IN_THE_TEST = MetaOptions(tick_s=600.0, linger_s=0.0)
"""Background work runs only when the test starts it."""


class ShiftedClock(SystemClock):
    """Clock whose wall time is ahead."""

    ahead_ns = 0

    def wall_ns(self) -> int:
        return time.time_ns() + self.ahead_ns


@contextmanager
def held(meta, key):
    """Lock a record as a transaction of another shard does."""
    meta.parts.cross_shard.holds.take(SPAN, 0, [key])
    yield
    meta.parts.cross_shard.holds.release(SPAN)


def at_recall(meta, happens):
    """Run `happens` during the next lease recall."""
    recall = meta.parts.watches.recall

    def once(*_):
        meta.parts.watches.recall = recall
        return happens

    meta.parts.watches.recall = once


def close_at_recall(meta, volume):
    async def close():
        meta.parts.ranges.close((partition_of(volume),))

    at_recall(meta, close)


@asynccontextmanager
async def removing():
    """A volume with two nested directories that is being removed."""
    async with pool_and_client(meta_options=IN_THE_TEST) as (pool, fs):
        made = await fs.volumes.create("v")
        await fs.mkdir("/volumes/v/a/b", parents=True)
        await fs.write_bytes("/volumes/v/a/b/f", b"")
        directory = (await fs.stat("/volumes/v/a")).st_ino
        await fs.volumes.remove("v")
        yield pool.meta, made.inode, directory
        assert await fs.volumes.removing(made.inode) is None and not pool.meta.volume_handlers.removals


@asynccontextmanager
async def trashed():
    """A volume with an expired file in its trash."""
    clock = ShiftedClock()
    async with pool_and_client(meta_options=IN_THE_TEST, clock=clock) as (pool, fs):
        made = await fs.volumes.create("v", trash_s=60)
        await fs.write_bytes("/volumes/v/f", b"")
        inode = (await fs.stat("/volumes/v/f")).st_ino
        await fs.remove("/volumes/v/f")
        clock.ahead_ns = 10**12
        yield pool.meta, fs, made.inode, inode
        assert await fs.volumes.trash("v") == []


def test_volume_migrates_during_the_recalls_of_its_removal():
    async def main():
        async with removing() as (meta, volume, _):
            close_at_recall(meta, volume)
            assert await meta.remove_more() == 0
            meta.parts.ranges.open((partition_of(volume),))
            assert await meta.remove_more() == 3

    asyncio.run(main())


def test_removal_waits_for_a_snapshot_barrier():
    async def main():
        async with removing() as (meta, _, _directory):

            async def take_moment():
                await meta.parts.moment.quiet(9)
                meta.parts.moment.take(9)

            before = meta.parts.kv.sequence
            at_recall(meta, take_moment)
            going = asyncio.create_task(meta.remove_more())
            while not meta.parts.moment.changes_wait:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert meta.parts.kv.sequence == before and meta.parts.moment.end(9)
            assert await going == 3

    asyncio.run(main())


def test_locked_directory_of_a_volume_is_removed_later():
    async def main():
        async with removing() as (meta, _, directory):
            with held(meta, inode_key(directory)):
                assert await meta.remove_more() == 0
            assert await meta.remove_more() == 3

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(6))
def test_each_step_of_a_removal_is_repeated_after_a_lock(steps):
    async def main():
        async with removing() as (meta, volume, _):
            removal = Removal(meta.parts.kv, meta.parts.view, meta.parts.collector, meta.parts.clock, volume)
            gone = sum(removal.step() for _ in range(steps))
            assert not removal.done
            meta.parts.ranges.close((partition_of(volume),))
            with pytest.raises(LockedRecord):
                removal.step()
            meta.parts.ranges.open((partition_of(volume),))
            while not removal.done:
                gone += removal.step()
            assert gone == 3
            meta.parts.view.access.note(volume, None)

    asyncio.run(main())


def test_end_of_a_removal_waits_for_locked_records():
    async def main():
        async with removing() as (meta, volume, _):
            with held(meta, volume_key(ATTACHED, volume, b"somebody")):
                assert await meta.remove_more() == 3
                assert await meta.remove_more() == 0
            assert await meta.remove_more() == 0

    asyncio.run(main())


def test_volume_migrates_during_the_recalls_of_its_purge():
    async def main():
        async with trashed() as (meta, _, volume, _inode):
            close_at_recall(meta, volume)
            assert await meta.purge_more() == 0
            meta.parts.ranges.open((partition_of(volume),))
            assert await meta.purge_more() == 1

    asyncio.run(main())


def test_locked_file_stays_in_the_trash():
    async def main():
        async with trashed() as (meta, _, _volume, inode):
            with held(meta, inode_key(inode)):
                assert await meta.purge_more() == 0
            assert await meta.purge_more() == 1

    asyncio.run(main())


@pytest.mark.parametrize("one", (True, False))
def test_purge_waits_for_a_migration_of_the_volume(one):
    async def main():
        async with trashed() as (meta, fs, volume, inode):
            close_at_recall(meta, volume)
            purging = asyncio.create_task(fs.volumes.purge("v", inode if one else 0))
            while meta.parts.view.serves(partition_of(volume)) and not purging.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not purging.done()
            meta.parts.ranges.open((partition_of(volume),))
            assert await purging == 1

    asyncio.run(main())


def test_closed_orphan_is_collected_when_its_volume_is_unlocked():
    async def main():
        async with pool_and_client(meta_options=IN_THE_TEST) as (pool, fs):
            volume, meta = (await fs.volumes.create("v", files_max=5)).inode, pool.meta
            file = await fs.open("/volumes/v/f", "wb")
            inode = (await fs.stat("/volumes/v/f")).st_ino
            await fs.remove("/volumes/v/f")
            with held(meta, volume_key(USE, volume)):
                await file.close()
                await fs.vfs.meta.release_now(inode)
                assert not meta.parts.collector.is_open(inode) and inode in meta.parts.collector.orphans
                meta.parts.collector.orphans[inode] = meta.parts.collector.grace_until_s = 0.0
                await meta.run_once()
                assert inode in meta.parts.collector.orphans
            assert (await fs.volumes.show("v")).files_used == 1
            await meta.run_once()
            assert inode not in meta.parts.collector.orphans and (await fs.volumes.show("v")).files_used == 0

    asyncio.run(main())
