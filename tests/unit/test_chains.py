"""Chains of several targets in one process, over real transports and stores: what is written is with every member, what was
acknowledged or read outlives all but one of them, and nobody sees what is not decided."""

from __future__ import annotations

import asyncio
import functools
import random
from contextlib import asynccontextmanager

import msgspec
import pytest

from nvpool.base.ids import ROOT_INODE
from nvpool.base.units import KIB, MIB
from nvpool.client.options import ClientOptions
from nvpool.client.vfs import Caller
from nvpool.logic.layout import chain_of
from nvpool.logic.poolmap import PoolMap, changed
from nvpool.testing.pool import LocalPool

ME = Caller(1000, 1000)
FAST = ClientOptions(deadline_s=10.0, fresh_s=0.0, attr_s=0.0, release_s=0.01, short_cut=False)


def in_loop(test):
    """The test, an async function, run on a loop of its own."""
    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 100))
    return run


def without(pool_map: PoolMap, dead: int) -> PoolMap:
    """The map after a target's death: it has left each chain that has another member."""
    def left(chain):
        members = tuple(t for t in chain.targets if t != dead)
        if members == chain.targets or not members:
            return chain
        return msgspec.structs.replace(chain, epoch=chain.epoch + 1, targets=members)

    return changed(pool_map, tables=tuple(
        msgspec.structs.replace(table, chains=tuple(map(left, table.chains))) for table in pool_map.tables))


@asynccontextmanager
async def made(tmp_path, replicas=2, targets=3, memory=False):
    pool = LocalPool(None if memory else tmp_path, capacities=(64 * MIB,) * targets, replicas=replicas, chunk_bytes=256 * KIB)
    async with pool:
        client = await pool.client("first", FAST)
        yield pool, client.vfs


async def written(vfs, name: bytes, content: bytes, sync: bool = True):
    _, handle = await vfs.create(ROOT_INODE, name, 0o644, 2, ME)
    await vfs.write(handle, 0, content)
    if sync:
        await vfs.fsync(handle, False)
    return handle


async def read_all(vfs, inode: int, length: int) -> bytes:
    handle = await vfs.open(inode, 0, ME)
    found = b"".join([bytes(await vfs.read(handle, at, 100_000)) for at in range(0, length, 100_000)])
    await vfs.release(handle)
    return found


def held_by(pool: LocalPool, inode: int) -> dict[int, dict[int, tuple]]:
    """target -> chunk index -> (version, blocks)."""
    return {number: {one.index: (one.version, one.blocks) for one in service.store.describe(inode, 0, 4096)[0]}
            for number, service in pool.stores.items()}


def check_replicas(pool: LocalPool, inode: int, chunks: range, replicas: int) -> None:
    held = held_by(pool, inode)
    table = pool.pool_map.table_by_id[replicas]
    for index in chunks:
        members = table.chains[chain_of(inode, index)].targets
        copies = {target: found[index] for target, found in held.items() if index in found}
        assert set(copies) == set(members), (index, copies, members)
        assert len(set(copies.values())) == 1, (index, copies)


@pytest.mark.parametrize("memory", [False, True], ids=["drives", "memory"])
@pytest.mark.parametrize("replicas", [2, 3])
@in_loop
async def test_what_is_written_is_with_every_member_of_its_chain(tmp_path, replicas, memory):
    async with made(tmp_path, replicas, memory=memory) as (pool, vfs):
        content = random.Random(1).randbytes(2 * MIB + 5000)
        handle = await written(vfs, b"file", content)
        await vfs.write(handle, 300_001, b"in the middle")
        await vfs.fsync(handle, False)
        content = content[:300_001] + b"in the middle" + content[300_014:]
        inode = handle.file.inode
        assert await read_all(vfs, inode, len(content)) == content
        check_replicas(pool, inode, range(9), replicas)
        other = await pool.client("second", FAST)
        for dead in list(pool.stores)[:replicas - 1]:
            await pool.stop_store(dead)
            await pool.change_map(lambda pool_map, dead=dead: without(pool_map, dead))
        assert await read_all(other.vfs, inode, len(content)) == content


async def kill(pool: LocalPool, dead: int, after_s: float = 0.05) -> None:
    """As a process dies; somewhat later the map says so."""
    await pool.stop_store(dead)
    await asyncio.sleep(after_s)
    await pool.change_map(lambda pool_map: without(pool_map, dead))


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("victim", ["head", "last"])
@in_loop
async def test_a_member_that_dies_under_writes_costs_no_error_and_no_acknowledged_byte(tmp_path, replicas, victim):
    async with made(tmp_path, replicas) as (pool, vfs):
        handle = await written(vfs, b"file", bytes(MIB))
        inode, chance = handle.file.inode, random.Random(2)
        content = bytearray(MIB)
        stop = False

        async def writer() -> int:
            count = 0
            while not stop:
                offset, length = chance.randrange(MIB - 70_000), chance.choice((10, 4096, 5000, 65536))
                piece = chance.randbytes(length)
                await vfs.write(handle, offset, piece)
                content[offset:offset + length] = piece
                count += 1
                if chance.random() < 0.3:
                    await vfs.fsync(handle, False)
            await vfs.fsync(handle, False)
            return count

        writing = asyncio.create_task(writer())
        await asyncio.sleep(0.3)
        chain = pool.pool_map.chain(replicas, chain_of(inode, 0)).targets
        await kill(pool, chain[0] if victim == "head" else chain[-1], 0.2)
        await asyncio.sleep(0.5)
        stop = True
        assert await asyncio.wait_for(writing, 20) > 0
        for _ in range(replicas - 1):
            found = await read_all(vfs, inode, MIB)
            assert found == content
            check_replicas_now(pool, inode, replicas)
            survivors = [t for t in pool.pool_map.chain(replicas, chain_of(inode, 0)).targets if t in pool.stores]
            if len(survivors) > 1:
                await kill(pool, survivors[0])
        assert await read_all((await pool.client("last", FAST)).vfs, inode, MIB) == content


def check_replicas_now(pool: LocalPool, inode: int, replicas: int) -> None:
    """The members of each chain have the same versions."""
    held = held_by(pool, inode)
    for index in range(4):
        members = pool.pool_map.chain(replicas, chain_of(inode, index)).targets
        assert len({held[target].get(index) for target in members}) == 1, (index, members, held)
