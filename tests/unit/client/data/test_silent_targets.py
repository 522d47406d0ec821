"""Silent targets, such as stopped processes and isolated hosts: requests go on with another target or the next map, and no
caller waits for a silent one until its deadline."""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import os
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from nvpool.client.data import chunk_ranges as client_extents
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import Busy, Unreachable, WrongTarget
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB, MIB
from nvpool.meta import store_client as meta_targets
from nvpool.poolmap.chains.transitions import died, returned
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc import connection_pool
from nvpool.rpc.transport_registry import transport
from nvpool.rpc.transports.frame import HELLO
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.replication import transfer_client
from nvpool.testing.fakes.stalling_pool import StallingPool

ME = Caller(1000, 1000)
CHUNK = 256 * KIB
OPTIONS = ClientOptions(deadline_s=10.0, fresh_s=0.0, attr_s=0.0, short_circuit=False)
"""A caller that waits for a silent target to the end gets an error."""


def in_loop(test):
    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 100))

    return run


@asynccontextmanager
async def made(replicas=2, targets=2):
    async with StallingPool(
        capacities=(64 * MIB,) * targets, replicas=replicas, chunk_bytes=CHUNK, serves_map=True
    ) as pool:
        yield pool, (await pool.client("first", OPTIONS)).vfs


async def new_file(vfs, name: bytes, content: bytes = b""):
    _, handle = await vfs.create(ROOT_INODE, name, 0o644, os.O_RDWR, ME)
    if content:
        await vfs.write(handle, 0, content)
        await vfs.fsync(handle, False)
    return handle


async def content_of(vfs, handle) -> bytes:
    return bytes(await vfs.read(handle, 0, 64 * MIB))


@in_loop
async def test_extent_query_is_repeated_when_all_were_silent(monkeypatch):
    monkeypatch.setattr(client_extents, "PATIENCE_S", 0.05)
    async with made() as (pool, vfs):
        content = os.urandom(100_000)
        handle, copy = await new_file(vfs, b"file", content), await new_file(vfs, b"copy")
        first, second = pool.pool_map.chain(2, chain_of(handle.inode, 0)).targets
        for target in (first, second):
            pool.hold(target, Method.DATA_EXTENTS)
        copying = asyncio.create_task(vfs.copy_range(handle, 0, copy, 0, len(content)))
        await pool.until(
            lambda: pool.asked[second, Method.DATA_EXTENTS] and pool.asked[first, Method.DATA_EXTENTS] > 1
        )
        pool.let_go(second)
        assert await copying == len(content)
        assert (
            len(pool.held[first]) == pool.asked[first, Method.DATA_EXTENTS]
        )  # the first target never replied
        await vfs.flush(copy)
        assert await content_of(vfs, copy) == content


@in_loop
async def test_extent_query_is_repeated_after_an_expired_lease(monkeypatch):
    monkeypatch.setattr(client_extents, "PATIENCE_S", 0.05)
    async with made() as (pool, vfs):
        content = os.urandom(100_000)
        handle, copy = await new_file(vfs, b"file", content), await new_file(vfs, b"copy")
        without_lease = pool.pool_map.chain(2, chain_of(handle.inode, 0)).targets
        for target in without_lease:
            pool.stores[target].serving_lease.until_s = 0.0
        copying = asyncio.create_task(vfs.copy_range(handle, 0, copy, 0, len(content)))
        await pool.until(lambda: all(pool.asked[target, Method.DATA_EXTENTS] for target in without_lease))
        for target in without_lease:
            pool.stores[target].serving_lease.until_s = math.inf
        assert await copying == len(content)
        await vfs.flush(copy)
        assert await content_of(vfs, copy) == content


@in_loop
async def test_extent_query_follows_a_map_without_the_silent_target(monkeypatch):
    monkeypatch.setattr(client_extents, "PATIENCE_S", 600.0)
    async with made() as (pool, vfs):
        handle = await new_file(vfs, b"file", bytes(5000))
        silent = pool.pool_map.chain(2, chain_of(handle.inode, 0)).targets[0]
        pool.hold(silent, Method.DATA_EXTENTS)
        looking = asyncio.create_task(vfs.seek(handle, 0, os.SEEK_HOLE))
        await pool.until(lambda: pool.held[silent])
        await pool.change_map(lambda now: died(now, {silent}))
        assert await looking == 8192 or looking.result() == 5000


@in_loop
async def test_superseded_query_leaves_no_unseen_error(monkeypatch):
    monkeypatch.setattr(client_extents, "PATIENCE_S", 600.0)
    async with made() as (pool, vfs):
        handle = await new_file(vfs, b"file", bytes(5000))
        silent = pool.pool_map.chain(2, chain_of(handle.inode, 0)).targets[0]
        pool.hold(silent, Method.DATA_EXTENTS)
        unseen = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context["message"]))
        looking = asyncio.create_task(vfs.seek(handle, 0, os.SEEK_HOLE))
        await pool.until(lambda: pool.held[silent])
        await pool.change_map(lambda now: died(now, {silent}))
        await looking
        await asyncio.sleep(0)
        gc.collect()
        assert not unseen


@in_loop
async def test_copy_follows_the_chunks_of_a_silent_store():
    async with made(replicas=1) as (pool, vfs):
        content = os.urandom(100_000)
        handle = await new_file(vfs, b"file", content)
        (source,) = pool.pool_map.chain(1, chain_of(handle.inode, 0)).targets
        other = 3 - source
        index = next(
            index
            for index in range(1, 1000)
            if pool.pool_map.chain(1, chain_of(handle.inode, index)).targets == (source,)
        )
        pool.hold(source, Method.DATA_COPY)
        copying = asyncio.create_task(vfs.copy_range(handle, 0, handle, index * CHUNK, 24 * 4096))
        await pool.until(lambda: pool.held[source])

        def moved(pool_map):
            return replace(
                pool_map,
                tables=tuple(
                    replace(
                        table,
                        chains=tuple(
                            replace(chain, targets=(other,), epoch=chain.epoch + 1) for chain in table.chains
                        ),
                    )
                    for table in pool_map.tables
                ),
            )

        await pool.change_map(moved)
        assert await copying == 24 * 4096
        assert pool.asked[other, Method.DATA_COPY] == 1 and len(pool.held[source]) == 1


@in_loop
async def test_copy_falls_back_to_the_client_when_a_target_joins():
    async with made() as (pool, vfs):
        content = os.urandom(200_000)
        handle, copy = await new_file(vfs, b"file", content), await new_file(vfs, b"copy")
        await pool.change_map(lambda now: died(now, {2}))
        assert await vfs.view.refresh()
        pool.hold(1, Method.DATA_COPY)
        copying = asyncio.create_task(vfs.copy_range(handle, 0, copy, 0, len(content)))
        await pool.until(lambda: pool.held[1])
        await pool.change_map(lambda now: returned(now, {2}))
        pool.let_go(1)
        assert await copying == len(content)
        await vfs.fsync(copy, False)
        assert await content_of(vfs, copy) == content


@in_loop
async def test_truncation_does_not_wait_for_a_removed_target(monkeypatch):
    monkeypatch.setattr(meta_targets, "CALL_S", 600.0)
    async with made() as (pool, vfs):
        handle = await new_file(vfs, b"file", os.urandom(100_000))
        silent = pool.pool_map.chain(2, chain_of(handle.inode, 0)).targets[0]
        pool.hold(silent, Method.DATA_CUT)
        cutting = asyncio.create_task(vfs.setattr(handle.inode, size=1000, caller=ME, handle=handle))
        await pool.until(lambda: pool.held[silent])
        await pool.change_map(lambda now: died(now, {silent}))
        await cutting
        assert len(await content_of(vfs, handle)) == 1000


@in_loop
async def test_store_does_not_wait_for_a_removed_target(monkeypatch):
    monkeypatch.setattr(transfer_client, "CALL_S", 600.0)
    async with made() as (pool, vfs):
        handle = await new_file(vfs, b"file", os.urandom(100_000))
        asking = pool.stores[1].upkeep.others
        pool.hold(2, Method.DATA_FETCH)
        fetching = asyncio.create_task(asking.fetch(2, [(handle.inode, 0, 2)]))
        await pool.until(lambda: pool.held[2])
        await pool.change_map(lambda now: died(now, {2}))
        with pytest.raises(Unreachable):
            await fetching
        pool.let_go(2)  # a target that is already removed is asked nevertheless, and replies
        with pytest.raises(WrongTarget, match="not held here"):
            await asking.fetch(2, [(handle.inode, 0, 2)])


@in_loop
async def test_reads_use_another_replica_when_connect_hangs(monkeypatch):
    monkeypatch.setattr(connection_pool, "ATTEMPT_S", 600.0)
    async with made() as (pool, vfs):
        content = os.urandom(300_000)
        await new_file(vfs, b"file", content)
        for silent in (1, 2):
            (endpoint,) = pool.pool_map.target_by_id[silent].endpoints
            monkeypatch.setattr(
                transport("inproc"),
                "faults",
                lambda where, kind, _, endpoint=endpoint: None if (where, kind) == (endpoint, HELLO) else 0.0,
            )
            fresh = (await pool.client(f"of {silent}", OPTIONS)).vfs
            attr = await fresh.look(ROOT_INODE, b"file")
            handle = await fresh.open(attr.inode, os.O_RDONLY, ME)
            assert await content_of(fresh, handle) == content
            into = bytearray(300_000)
            await fresh.read_many([(handle, 0, 150_000), (handle, 150_000, 150_000)], memoryview(into))
            assert into == content


@pytest.mark.parametrize("first", ["silent", "refuses"])
@in_loop
async def test_busy_replica_is_retried_while_the_other_is_silent(
    first,
):
    async with made() as (pool, vfs):
        content = os.urandom(100_000)
        handle = await new_file(vfs, b"file", content)
        lane = vfs.chunks.find_lane(handle.file, 0)
        silent = lane.target if first == "silent" else 3 - lane.target
        other = 3 - silent
        pool.hold(silent, Method.DATA_READ)
        pool.hold(other, Method.DATA_READ)
        reading = asyncio.create_task(vfs.read(handle, 8192, 4096))
        asked = 0

        def refused() -> bool:
            """A replica that is busy because a write is undecided."""
            nonlocal asked
            while pool.held[other]:
                asked += 1
                pool.held[other].pop().fail(Busy("the chunk has a pending write; use another target"))
            return asked >= 3 and bool(pool.held[silent])

        await pool.until(refused)
        pool.let_go(other)
        assert bytes(await reading) == content[8192:12288]
        assert pool.held[silent]


@in_loop
async def test_statfs_works_while_a_target_is_away():
    async with made() as (pool, vfs):
        before = await vfs.statfs()
        await pool.change_map(lambda now: died(now, {2}))
        pool.hold(2, Method.DATA_STATUS)
        found = await (await pool.client("fresh", OPTIONS)).vfs.statfs()
        assert found.blocks_total >= before.blocks_total
        assert 0 < found.blocks_available <= found.blocks_free < before.blocks_free
