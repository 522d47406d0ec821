"""fsck of metadata against stores: unreferenced data is found, and removed only on request."""

import asyncio
import os
import struct

import pytest

from nvpool.client.state.vfs_types import Caller
from nvpool.core import grants
from nvpool.core.checksum import piece_checksums
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import Busy, WrongTarget
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.v1 import data_pb2, wire_pb2
from nvpool.sdk.dump import dump, load
from nvpool.sdk.fsck.check import FsckReport, check
from nvpool.testing.fakes.in_process_pool import InProcessPool, run
from tests.unit.store.chunks.test_index_damage import leak

GHOST = 4242
ROOT = Caller(0, 0)


async def checked(client, **more):
    checkup = FsckReport()
    await check(client, checkup, **more)
    return checkup


async def plant(client, secret, *, inode, index=0, cut=0, target=None):
    """Write a block of chunk `index` of `inode`, as a client with a grant for it does; on the chunk's target or another."""
    pool_map = client.pool_map
    target = target or pool_map.table_by_id[1].chains[chain_of(inode, index)].targets[0]
    block = b"y" * 4096
    ends_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000 + 60_000
    request = data_pb2.WriteRequest(
        map_epoch=pool_map.epoch,
        target=target,
        session=1,
        checksums=piece_checksums(block, 0),
        grants=[grants.sign(grants.Grant(grants.WRITE, 0, 1, inode, cut, ends_ms), secret)],
        writes=struct.pack("<QQQIIIHH", inode, cut, 1, index, 0, len(block), 0, 0),
    )
    reply = await client.dialer.call(
        pool_map.target_by_id[target].endpoints,
        wire_pb2.DATA_WRITE,
        request.SerializeToString(),
        (block,),
        deadline_s=SYSTEM_CLOCK.boottime_s() + 10,
    )
    return struct.unpack_from("<H", data_pb2.WriteReply.FromString(bytes(reply.message)).results)[0]


def test_healthy_pool_has_no_problem_after_removals():
    async def main(pool):
        client = await pool.client()
        attr, handle = await client.vfs.create(1, b"file", 0o644, os.O_RDWR, ROOT)
        await client.vfs.write(handle, 0, b"x" * 3_000_000)
        await client.vfs.flush(handle)
        found = await checked(client)
        assert not found.problems and found.chunks == 3 and found.blocks >= 733
        await client.vfs.release(handle)
        await client.vfs.unlink(1, b"file", ROOT)
        assert not (await checked(client)).problems

    run(main)


def test_records_are_counted_once_in_any_number_of_steps(monkeypatch, tmp_path):
    monkeypatch.setattr("nvpool.sdk.fsck.metadata.RECORDS_A_STEP", 3)
    monkeypatch.setattr("nvpool.sdk.dump.RECORDS_A_STEP", 3)
    path = str(tmp_path / "dump")

    async def made(pool):
        client = await pool.client()
        for number in range(10):
            await client.vfs.mkdir(1, b"%d" % number, 0o755, ROOT)
        found, dumped = await checked(client), await dump(client, path)
        assert 21 <= dumped <= 30 and dumped <= found.records < 50  # sessions and slots are not dumped
        counts.append(dumped)

    async def loaded(pool):
        assert [(await load(await pool.client(), path)).records] == counts

    counts: list[int] = []
    run(made)
    run(loaded)


def test_leaked_blocks_are_freed_only_on_repair(tmp_path):
    async def main():
        async with InProcessPool(tmp_path) as pool:
            client = await pool.client()
            store = pool.stores[1].store
            leak(store, 5)
            used = store.status()["used_bytes"]
            for repair, repaired, left in ((False, [False], 5), (True, [True], 0), (True, [], 0)):
                found = await checked(client, repair=repair)
                assert [problem.repaired for problem in found.problems] == repaired
                assert all(
                    "5 blocks" in problem.text and problem.where == "target 1" for problem in found.problems
                )
                assert store.status()["used_bytes"] == used - (5 - left) * 4096

    asyncio.run(main())


def test_chunks_without_inode_are_removed_only_on_repair():
    async def main(pool):
        client = await pool.client()
        assert await plant(client, pool.grant_secret, inode=GHOST) == 0
        found = await checked(client)
        assert [(problem.kind, problem.repaired) for problem in found.problems] == [("leaked", False)]
        without_secret = await checked(client, repair=True)
        assert "with its directory" in without_secret.problems[0].text and without_secret.unrepaired == 1
        repaired = await checked(client, repair=True, grant_secret=pool.grant_secret)
        assert repaired.found == 1 and repaired.unrepaired == 0
        assert not (await checked(client)).problems

    run(main)


def test_chunk_with_a_later_cut_than_its_inode_is_found():
    async def main(pool):
        client = await pool.client()
        attr, handle = await client.vfs.create(1, b"file", 0o644, os.O_RDWR, ROOT)
        assert await plant(client, pool.grant_secret, inode=attr.inode, cut=7) == 0
        found = await checked(client, scrub=False)
        assert [problem.kind for problem in found.problems] == ["cut"], found.problems
        await client.vfs.release(handle)

    run(main)


@pytest.fixture
def quick_looks(monkeypatch):
    monkeypatch.setattr("nvpool.sdk.fsck.replicas.LOOKS_S", (0.01, 0.02, 0.05))


def of_two_replicas(test):
    """Decorator: runs the test on an in-memory pool with two replicas and an open file of three chunks."""

    def run_it(quick_looks):
        async def main():
            async with InProcessPool(replicas=2, capacities=(64 << 20,) * 3) as pool:
                client = await pool.client()
                _, handle = await client.vfs.create(1, b"file", 0o644, os.O_RDWR, ROOT)
                await client.vfs.write(handle, 0, b"x" * 3_000_000)
                await client.vfs.fsync(handle, False)
                await test(pool, client, handle)
                assert not (await checked(client)).problems
                for index in range(3):
                    head, last = pool.pool_map.chain(2, chain_of(handle.inode, index)).targets
                    copies = [
                        await pool.stores[target].store.fetch(handle.inode, index) for target in (head, last)
                    ]
                    assert (
                        copies[0].content == copies[1].content and copies[0].version == copies[1].version > 0
                    )
                await client.vfs.release(handle)

        asyncio.run(asyncio.wait_for(main(), 120))

    run_it.__name__, run_it.__doc__ = test.__name__, test.__doc__
    return run_it


async def found_and_repaired(pool, client):
    for repair, secret, unrepaired in ((False, None, 1), (True, None, 1), (True, pool.grant_secret, 0)):
        found = await checked(client, repair=repair, grant_secret=secret)
        assert [(problem.kind, "not the same" in problem.text) for problem in found.problems] == [
            ("copies", True)
        ]
        assert found.unrepaired == unrepaired and "file" in found.problems[0].text


@of_two_replicas
async def test_chunk_missing_on_a_replica_is_copied(pool, client, handle):
    for member in (0, 1):
        target = pool.pool_map.chain(2, chain_of(handle.inode, 1)).targets[member]
        await pool.stores[target].store.discard(handle.inode, 1)
        await found_and_repaired(pool, client)


@of_two_replicas
async def test_older_chunk_on_a_replica_is_copied(pool, client, handle):
    for member in (0, 1):
        store = pool.stores[pool.pool_map.chain(2, chain_of(handle.inode, 2)).targets[member]].store
        old = await store.fetch(handle.inode, 2)
        await client.vfs.write(handle, 2_500_000, b"newer %d" % member)
        await client.vfs.fsync(handle, False)
        assert await store.install([(old, store.state(handle.inode, 2))]) == [True]
        await found_and_repaired(pool, client)


@of_two_replicas
async def test_concurrent_writes_are_not_reported_as_differences(pool, client, handle):
    over = asyncio.Event()

    async def write():
        count = 0
        while not over.is_set():
            await client.vfs.write(handle, count * 4096 % 3_000_000, b"%d" % count)
            await client.vfs.fsync(handle, False)
            count += 1
        return count

    writing = asyncio.create_task(write())
    other = await pool.client("other")
    for _ in range(5):
        assert not (await checked(other)).problems
    over.set()
    assert await writing


def test_chunk_is_not_copied_from_a_replica_without_the_cut():
    async def main():
        async with InProcessPool(replicas=2) as pool:
            client = await pool.client()
            _, handle = await client.vfs.create(1, b"file", 0o644, os.O_RDWR, ROOT)
            await client.vfs.write(handle, 0, b"x" * 4096)
            await client.vfs.fsync(handle, False)
            head, last = pool.pool_map.chain(2, chain_of(handle.inode, 0)).targets
            store, resync = pool.stores[head].store, pool.stores[head].upkeep.resync
            await store.cut(handle.inode, 0, 1, 20, 0)
            with pytest.raises(Busy):
                await resync.level(2, handle.inode, 0, last)
            assert not store.state(handle.inode, 0).version
            with pytest.raises(WrongTarget):
                await resync.level(2, handle.inode, 0, 3)

    asyncio.run(main())


def test_misplaced_chunk_is_reported_only_when_it_stays(monkeypatch):
    async def main():
        async with InProcessPool(replicas=2, capacities=(64 << 20,) * 3) as pool:
            client = await pool.client()
            _, handle = await client.vfs.create(1, b"file", 0o644, os.O_RDWR, ROOT)
            await client.vfs.write(handle, 0, b"x" * 4096)
            await client.vfs.fsync(handle, False)
            members = pool.pool_map.chain(2, chain_of(handle.inode, 0)).targets
            (other,) = set(pool.stores) - set(members)
            store = pool.stores[other].store
            copy = await pool.stores[members[0]].store.fetch(handle.inode, 0)
            assert await store.install([(copy, store.state(handle.inode, 0))]) == [True]
            assert not (await checked(client)).problems
            monkeypatch.setattr("nvpool.store.maintenance.orphan_chunks.LATE_S", 0.0)
            assert [problem.kind for problem in (await checked(client)).problems] == ["misplaced"]

    asyncio.run(main())
