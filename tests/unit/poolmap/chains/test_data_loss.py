"""Chains whose only copies were given up are reset: lost data is an error and never zeros, all else works."""

import asyncio
from functools import cache, partial

import pytest
from msgspec.structs import replace

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import BytesLost
from nvpool.core.ids import inode_number
from nvpool.core.units import MIB
from nvpool.poolmap.chains.data_loss import births_of, losing, may_have_lost, ownerless, with_reset_chains
from nvpool.poolmap.chains.rebalance import next_steps, with_goals
from nvpool.poolmap.chains.transitions import retired, with_desired_state
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import Births, Loss, PartitionRange, Shard, check_map, decode_map, encode_map
from nvpool.testing.fakes.in_process_pool import InProcessPool
from tests.unit.poolmap.chains.test_chain_placement import a_pool

ME = Caller(0, 0)


def given_up(pool_map, target):
    return retired(with_goals(with_desired_state(pool_map, target, "lost")))


def test_only_ownerless_chains_are_reset_and_losses_recorded():
    pool_map = replace(
        a_pool((4, 4, 4), 1),
        partitions=(PartitionRange(0, 2048, 1), PartitionRange(2048, 2048, 2)),
        shards=(Shard(1, 1, ()), Shard(2, 1, ())),
    )
    of_one = {number for number, chain in enumerate(pool_map.tables[0].chains) if chain.targets == (1,)}
    lost = given_up(pool_map, 1)
    assert {number for _, number in ownerless(lost)} == of_one == losing(lost)[1] and lost.target_by_id[
        1
    ].state == "up"
    loss = births_of(lost, {1: 10, 2: 500})
    assert with_reset_chains(lost, ownerless(lost), loss, {1}) is lost, "no target that serves"
    new = with_reset_chains(lost, ownerless(lost), loss, {2, 3})
    assert (
        not ownerless(new)
        and losing(new)[1] == of_one
        and new.target_by_id[1].state == "gone"
        and not check_map(new)
    )
    assert all(
        new.tables[0].chains[n] == pool_map.tables[0].chains[n] for n in range(1024) if n not in of_one
    )
    chain = new.tables[0].chains[min(of_one)]
    assert chain.begun == chain.epoch == 2 and may_have_lost(new, chain, inode_number(2047, 9))
    assert not may_have_lost(new, chain, inode_number(2047, 10)) and may_have_lost(
        new, chain, inode_number(2048, 499)
    )
    assert decode_map(encode_map(new)) == new


def test_reset_chain_is_joined_by_its_other_copies():
    pool_map = a_pool((4, 4, 4, 4), 2)
    lost = given_up(given_up(pool_map, 1), 2)
    names = [name for name in ownerless(lost) if name[0] == 2]
    assert names
    new = with_reset_chains(lost, names, Loss(()), {3, 4})
    for name in names:
        assert len(new.chain(*name).targets) == 1 and new.chain(*name).targets[0] in {3, 4} == set(
            new.chain(*name).goal
        )
        joined = next_steps(new, joining_max=2000, of_target_max=2000).chain(*name)
        assert {*joined.targets, *joined.joining} == {3, 4}


def test_reset_chain_has_the_highest_epoch():
    pool_map = a_pool((4, 4, 4), 1)
    table = pool_map.tables[0]
    others = next(number for number, chain in enumerate(table.chains) if chain.targets == (2,))
    chains = [
        replace(chain, epoch=70 if number == others else 3) for number, chain in enumerate(table.chains)
    ]
    lost = given_up(replace(pool_map, tables=(replace(table, chains=tuple(chains)),)), 1)
    new = with_reset_chains(lost, ownerless(lost), Loss(()), {2, 3})
    assert {(chain.epoch, chain.begun, chain.intact) for chain in new.tables[0].chains if chain.loss} == {
        (71, 71, 71)
    }
    assert new.tables[0].chains[others].epoch == 70, "other chains are unchanged"


def test_map_with_an_unrecorded_loss_is_inconsistent():
    pool_map = a_pool((4, 4), 1)
    table = pool_map.tables[0]
    for fields in ({"loss": 1, "begun": 1}, {"begun": 1}):
        wrong = replace(table, chains=(replace(table.chains[0], **fields), *table.chains[1:]))
        assert "has a loss" in check_map(replace(pool_map, tables=(wrong,)))[0]
    assert not check_map(
        replace(
            pool_map,
            losses=(Loss((Births(0, 4096, 7),)),),
            tables=(replace(table, chains=(replace(table.chains[0], loss=1, begun=1), *table.chains[1:])),),
        )
    )


class Scene:
    """A pool of three targets of which the first is given up; files with chunks of 1 MiB."""

    def __init__(self, pool, client):
        self.pool, self.vfs = pool, client.vfs
        self.chunks = client.vfs.chunks

    async def file(self, name, size):
        _, handle = await self.vfs.create(1, name, 0o644, 0o102, ME)
        if size:
            await self.vfs.write(handle, 0, content(size))
            await self.vfs.fsync(handle, False)
        return handle

    def lost(self, handle, count):
        """Indexes of the first `count` chunks that were on the target that is given up."""
        chains = self.pool.pool_map.table_by_id[1].chains
        return [index for index in range(count) if chains[chain_of(handle.file.inode, index)].targets == (1,)]

    async def give_up(self):
        await self.pool.stop_store(1)
        await self.pool.change_map(lambda now: given_up(now, 1))
        await self.reset_chains()

    async def reset_chains(self):
        counters = {shard: meta.parts.view.next_number for shard, meta in self.pool.metas.items()}
        await self.pool.change_map(
            lambda now: with_reset_chains(now, ownerless(now), births_of(now, counters), {2, 3})
        )
        await self.chunks.view.refresh()

    async def read(self, handle, index, length=MIB):
        return bytes(await self.vfs.read(handle, index * MIB, length))


@cache
def content(size):
    return b"".join(b"%08d" % number for number in range(size // 8 + 1))[:size]


def scene(work):
    async def run():
        async with InProcessPool(capacities=(128 * MIB, 128 * MIB, 128 * MIB), serves_map=True) as pool:
            client = await pool.client("test", ClientOptions(deadline_s=20.0))
            await work(Scene(pool, client))

    asyncio.run(run())


def test_lost_bytes_are_an_error_until_rewritten():
    async def work(s):
        old = await s.file(b"old", 12 * MIB)
        lost = s.lost(old, 12)
        assert 0 < len(lost) < 12
        await s.give_up()
        for index in range(12):
            if index in lost:
                with pytest.raises(BytesLost):
                    await s.read(old, index)
            else:
                assert await s.read(old, index) == content(12 * MIB)[index * MIB : (index + 1) * MIB]
        await s.vfs.write(old, lost[0] * MIB, b"n" * 8192)
        await s.vfs.fsync(old, False)
        assert await s.read(old, lost[0], 8192) == b"n" * 8192
        with pytest.raises(BytesLost):
            await s.read(old, lost[0], 12288)
        await s.vfs.write(old, lost[0] * MIB + 9000, b"part of a block")
        with pytest.raises(BytesLost):
            await s.vfs.fsync(old, False)
        with pytest.raises(BytesLost):
            await s.read(old, lost[0])
        for index in lost:
            await s.vfs.write(old, index * MIB, b"n" * MIB)
        await s.vfs.fsync(old, False)
        for index in lost:
            assert await s.read(old, index) == b"n" * MIB

    scene(work)


def test_files_created_after_a_loss_are_not_affected():
    async def work(s):
        await s.give_up()
        new = await s.file(b"new", 100)
        await s.vfs.write(new, 40 * MIB - 7, b"the end")
        await s.vfs.fsync(new, False)
        for index in range(40):
            assert len(await s.read(new, index)) == MIB, "holes are zeros"
        assert (await s.read(new, 39))[-7:] == b"the end"

    scene(work)


def test_old_file_can_be_appended_to_and_replaced():
    async def work(s):
        files = [await s.file(b"old %d" % number, 5000) for number in range(12)]
        short = [handle for handle in files if s.lost(handle, 1)]
        empty = [await s.file(b"empty %d" % number, 0) for number in range(12)]
        empty = [handle for handle in empty if s.lost(handle, 1)]
        log = await s.file(b"log", 2 * MIB)
        await s.give_up()
        assert short and empty
        for handle in empty:
            await s.vfs.write(handle, 0, b"first words")
            await s.vfs.fsync(handle, False)
            assert await s.read(handle, 0) == b"first words"
        with pytest.raises(BytesLost):
            await s.vfs.write(short[0], 5000, b"more")
            await s.vfs.fsync(short[0], False)
        for handle in short:
            await s.vfs.setattr(handle.file.inode, size=0, caller=ME, handle=handle)
            await s.vfs.write(handle, 0, b"another one")
            await s.vfs.fsync(handle, False)
            assert await s.read(handle, 0) == b"another one"
        for place in range(2 * MIB, 30 * MIB, 700_001):
            await s.vfs.write(log, place, b"x" * 700_001)
            await s.vfs.fsync(log, False)
        for index in range(2, 29):
            assert await s.read(log, index) == b"x" * MIB

    scene(work)


def test_lost_chunks_are_not_reported_as_holes():
    async def work(s):
        old = await s.file(b"old", 12 * MIB)
        lost = s.lost(old, 12)
        await s.give_up()
        found = await s.vfs.ranges.extents(old.file, 0, 12 * MIB, SYSTEM_CLOCK.boottime_s() + 10)
        assert lost and found.runs == [(0, 12 * MIB)]

    scene(work)


def test_stale_chunks_of_a_new_member_are_ignored():
    """It had the chain before the target that was given up, and has not removed its chunks yet."""

    async def work(s):
        old = await s.file(b"old", 12 * MIB)
        chains = s.pool.pool_map.table_by_id[1].chains
        stale = [index for index in range(12) if chains[chain_of(old.file.inode, index)].targets == (2,)]
        numbers = {chain_of(old.file.inode, index) for index in stale}

        def moved(now):
            table = now.table_by_id[1]
            return replace(
                now,
                tables=(
                    replace(
                        table,
                        chains=tuple(
                            replace(chain, epoch=chain.epoch + 1, targets=(1,), goal=(2,))
                            if number in numbers
                            else chain
                            for number, chain in enumerate(table.chains)
                        ),
                    ),
                ),
            )

        await s.pool.change_map(moved)
        await s.pool.stop_store(1)
        await s.pool.change_map(lambda now: retired(with_desired_state(now, 1, "lost")))
        await s.reset_chains()
        assert stale and all(s.pool.pool_map.chain(1, number).targets == (2,) for number in numbers)
        for index in stale:
            with pytest.raises(BytesLost):
                await s.read(old, index)
            await s.vfs.write(old, index * MIB, b"n" * 4096)
            await s.vfs.fsync(old, False)
            assert await s.read(old, index, 4096) == b"n" * 4096
            with pytest.raises(BytesLost):
                await s.read(old, index)

    scene(work)


def test_member_with_an_old_map_reports_no_hole():
    async def work(s):
        old = await s.file(b"old", 12 * MIB)
        lost = s.lost(old, 12)
        asked = []

        def update_later(give):
            asked.append(1)
            asyncio.get_running_loop().call_later(0.05, lambda: give(s.pool.pool_map))

        for store in s.pool.stores.values():
            store.refresh_map = partial(update_later, store.update_map)
            store.update_map = lambda pool_map: None
        await s.give_up()
        assert not asked
        for index in lost:
            with pytest.raises(BytesLost):
                await s.read(old, index)
        assert asked

    scene(work)
