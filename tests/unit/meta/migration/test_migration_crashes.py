"""Crashes of shards and lost messages during a partition migration: real engines, and a load that checks its own tree."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.ids import ROOT_INODE
from nvpool.meta.server.service import MetaOptions
from nvpool.poolmap.shards import partition_moves
from nvpool.poolmap.shards.partitions import partition_of_directory
from nvpool.sdk.fsck.check import FsckReport, check_metadata
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(1000, 1000)
OPTIONS = ClientOptions(deadline_s=120.0)
WAIT_S = 120.0


class Load:
    """Client that creates, moves and removes names in its own directories, and records which exist."""

    def __init__(self, vfs, number: int) -> None:
        self.vfs = vfs
        self.random = random.Random(number)
        self.number = number
        self.directories: list[int] = []
        self.files: dict[tuple[int, bytes], int] = {}
        self.turns = 0
        self.stop = False

    async def begin(self) -> None:
        for number in range(8):
            made = await self.vfs.mkdir(ROOT_INODE, b"%d-%d" % (self.number, number), 0o755, ME)
            self.directories.append(made.inode)

    async def run(self) -> None:
        vfs, choose = self.vfs, self.random.choice
        while not self.stop:
            self.turns += 1
            place = choose(self.directories), b"f%d" % self.random.randrange(6)
            known = self.files.get(place)
            if known is None:
                attr, handle = await vfs.create(*place, 0o644, os.O_RDWR | os.O_EXCL, ME)
                await vfs.release(handle)
                self.files[place] = attr.inode
            elif self.random.random() < 0.3:
                await vfs.unlink(*place, ME)
                del self.files[place]
            else:
                other = choose(self.directories), b"f%d" % self.random.randrange(6)
                await vfs.rename(*place, *other, 0, ME)
                self.files[other] = self.files.pop(place)

    async def check(self, vfs) -> None:
        for directory in self.directories:
            listed, more = await vfs.readdir(await vfs.opendir(directory), 0, 1000)
            assert not more
            found = dict(zip(listed.names, listed.inodes, strict=True))
            assert found == {name: inode for (place, name), inode in self.files.items() if place == directory}
            for inode in found.values():
                assert (await vfs.getattr(inode)).links == 1


async def kill(pool: InProcessPool, shard: int) -> None:
    await pool.stop_shard(shard=shard)
    await pool.start_shard(shard)


async def until_at_rest(pool: InProcessPool) -> None:
    async with asyncio.timeout(WAIT_S):
        while pool.pool_map.moves or any(
            one["partitions_coming"] + one["partitions_leaving"]
            for one in (meta.moving.counters() for meta in pool.metas.values())
        ):
            for shard, meta in list(pool.metas.items()):
                if meta.died.done():  # in this term the result of its request is unknown
                    await kill(pool, shard)
            await asyncio.sleep(0.01)


async def until_settled(pool: InProcessPool) -> None:
    """Wait until no record is locked and every shard knows each decision."""
    async with asyncio.timeout(WAIT_S):
        while any(  # noqa: ASYNC110
            one["held"] or one["spans_to_tell"]
            for one in (meta.parts.cross_shard.counters() for meta in pool.metas.values())
        ):
            await asyncio.sleep(0.01)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(5))
def test_names_survive_shard_crashes_during_migration(seed, tmp_path):
    async def main() -> None:
        chance = random.Random(seed)
        async with InProcessPool(tmp_path, serves_map=True, shards=1 + seed % 2) as pool:
            pool.loses_moved = lambda: chance.choice(["", "", "question", "answer"])
            loads = [
                Load((await pool.client(f"client {number}", OPTIONS)).vfs, number) for number in range(2)
            ]
            for load in loads:
                await load.begin()
            running = [asyncio.create_task(load.run()) for load in loads]
            number = partition_moves.shards_given(pool.pool_map) + 1
            new = pool.new_shard(number)
            await pool.change_map(lambda now: partition_moves.shard_added(now, new))
            await pool.start_shard(number)
            for _ in range(6):
                await asyncio.sleep(chance.random() * 0.15)
                await kill(pool, chance.choice(list(pool.metas)))
            await until_at_rest(pool)
            await pool.change_map(lambda now: partition_moves.with_desired_state(now, 1, "remove"))
            for _ in range(6):
                await asyncio.sleep(chance.random() * 0.15)
                await kill(pool, chance.choice(list(pool.metas)))
            await until_at_rest(pool)
            assert partition_moves.is_empty(pool.pool_map, 1)
            for load in loads:
                load.stop = True
            await asyncio.wait_for(asyncio.gather(*running), WAIT_S)
            await until_settled(pool)
            another = await pool.client("another", OPTIONS)
            for load in loads:
                assert load.turns
                await load.check(load.vfs)
                await load.check(another.vfs)
            checkup = FsckReport()
            await check_metadata(another, checkup)
            assert not checkup.problems, checkup.problems

    asyncio.run(main())


def test_owned_partitions_are_adopted_before_the_next_attempt(tmp_path):
    """The next attempt first removes the remains of the one before; the map that completes that one may arrive with it."""

    async def main() -> None:
        async with InProcessPool(tmp_path, serves_map=True) as pool:
            load = Load((await pool.client("client", OPTIONS)).vfs, 1)
            await load.begin()
            pool.deaf.add(2)
            new = pool.new_shard(2)
            await pool.change_map(lambda now: partition_moves.shard_added(now, new))
            await pool.start_shard(2)
            async with asyncio.timeout(WAIT_S):
                while pool.pool_map.moves:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            pool.deaf.clear()
            pool.metas[2].update_map(pool.pool_map)
            await until_at_rest(pool)
            await load.check((await pool.client("another", OPTIONS)).vfs)

    asyncio.run(main())


def test_open_orphan_survives_a_crash_of_the_destination(
    tmp_path,
):
    """The open was reported to the process that died; the client has a lease period to report it to the next one."""

    async def main() -> None:
        async with InProcessPool(tmp_path, serves_map=True, meta_options=MetaOptions(linger_s=0.0)) as pool:
            client = await pool.client("client", OPTIONS)
            vfs, new = client.vfs, pool.new_shard(2)
            _, going = partition_moves.next_batch(partition_moves.shard_added(pool.pool_map, new), 1)
            name_hash = pool.meta.parts.view.name_hash
            name = next(
                b"%d" % number
                for number in range(1_000_000)
                if partition_of_directory(name_hash(ROOT_INODE, b"%d" % number)) in going
            )
            directory = (await vfs.mkdir(ROOT_INODE, name, 0o755, ME)).inode
            attr, handle = await vfs.create(directory, b"f", 0o644, os.O_RDWR, ME)
            await vfs.write(handle, 0, b"bytes")
            await vfs.fsync(handle, False)
            await vfs.unlink(directory, b"f", ME)
            asked = asyncio.Event()
            pool.loses_moved = lambda: asked.set() or "question"
            await pool.change_map(lambda now: partition_moves.shard_added(now, new))
            await pool.start_shard(2)
            await asyncio.wait_for(asked.wait(), WAIT_S)
            await kill(pool, 2)
            pool.loses_moved = lambda: ""
            meta = pool.metas[2]
            async with asyncio.timeout(WAIT_S):
                while not meta.moving.destination.taken:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            await meta.run_once()
            assert attr.inode in meta.parts.collector.orphans
            await until_at_rest(pool)
            assert bytes(await vfs.read(handle, 0, 100)) == b"bytes"
            await vfs.release(handle)

    asyncio.run(main())
