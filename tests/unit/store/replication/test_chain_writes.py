"""Chain replication over real transports and stores, in one process.

Written data is on every member of its chain; acknowledged or read data survives the loss of all members but one;
uncommitted data is never visible."""

from __future__ import annotations

import asyncio
import functools
import random
from contextlib import asynccontextmanager

import msgspec
import pytest

from nvpool.client.data import hedged_reads as hedging_module
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import Busy, ChecksumMismatch, CorruptRecord, NoSpace, StaleEpoch
from nvpool.core.ids import ROOT_INODE, version, version_parts
from nvpool.core.units import KIB, MIB
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import PoolMap, changed
from nvpool.rpc.messages.read_write_codec import encode_read_request
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.chunks.api import ALL_INODES, InodeCut
from nvpool.store.chunks.read_batch import READ, RESULT
from nvpool.store.disk.allocator import Transaction
from nvpool.store.disk.index_records import encode_segment, segment_key
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.stalling_pool import StallingPool

ME = Caller(1000, 1000)
FAST = ClientOptions(deadline_s=60.0, fresh_s=0.0, attr_s=0.0, release_s=0.01, short_circuit=False)


def in_loop(test):
    """Decorator: runs an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 100))

    return run


def without(pool_map: PoolMap, dead: int) -> PoolMap:
    """The map after a target's death: the target is removed from each chain that has another member."""

    def left(chain):
        members = tuple(t for t in chain.targets if t != dead)
        if members == chain.targets or not members:
            return chain
        return msgspec.structs.replace(chain, epoch=chain.epoch + 1, targets=members)

    return changed(
        pool_map,
        tables=tuple(
            msgspec.structs.replace(table, chains=tuple(map(left, table.chains))) for table in pool_map.tables
        ),
    )


@asynccontextmanager
async def made(tmp_path, replicas=2, targets=3, memory=False):
    pool = StallingPool(
        None if memory else tmp_path,
        capacities=(64 * MIB,) * targets,
        replicas=replicas,
        chunk_bytes=256 * KIB,
    )
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


def held_by(pool: InProcessPool, inode: int) -> dict[int, dict[int, tuple]]:
    """target -> chunk index -> (version, blocks)."""
    return {
        number: {one.index: (one.version, one.blocks) for one in service.store.describe(inode, 0, 4096)[0]}
        for number, service in pool.stores.items()
    }


@pytest.mark.parametrize("raised", ["floor", "cut"])
@pytest.mark.parametrize("in_task", [False, True], ids=["without a task", "in a task"])
@in_loop
async def test_raised_cut_does_not_refuse_a_decided_write(tmp_path, raised, in_task):
    """A resync of another chain of the file raises the known cut between a write's version and its commit at the head."""
    async with made(tmp_path) as (pool, vfs):
        handle = await written(vfs, b"file", bytes(300_000))
        inode = handle.file.inode
        head = pool.pool_map.chain(2, chain_of(inode, 0)).targets[0]
        store, writes = pool.stores[head].store, pool.stores[head].replica.writes
        device, cut = store.device, store.held(inode, 0).cut
        known = InodeCut(inode, cut + (raised == "cut"), version(14, 120) if raised == "floor" else 0, 18)

        reached = 0

        async def raised_and_read(*arguments):
            nonlocal reached
            assert writes.pending
            await store.raise_cuts([known])
            reached += 1
            return await read(*arguments)

        def missed(offsets, *_):
            return list(range(len(offsets)))

        read_now, read = device.read_now, device.read
        last = pool.pool_map.chain(2, chain_of(inode, 0)).targets[1]
        if in_task:
            device.read_now, device.read = missed, raised_and_read
        else:
            pool.hold(last, Method.DATA_PEER_WRITE)
        # in a task, a part of an old block has to be read first
        length = 5000 if in_task else 8192
        await vfs.write(handle, 0, b"x" * length)
        storing = asyncio.create_task(vfs.fsync(handle, False))
        if not in_task:
            await pool.until(lambda: pool.held[last])
            assert writes.pending[inode, 0].offered is not None
            await store.raise_cuts([known])
            pool.let_go(last)
        await storing
        assert reached == in_task
        device.read_now, device.read = read_now, read
        assert not any(service.store.fenced_because for service in pool.stores.values())
        assert len({tuple(held.items()) for held in held_by(pool, inode).values() if held}) <= 2
        assert await read_all(vfs, inode, 300_000) == b"x" * length + bytes(300_000 - length)
        chain = pool.pool_map.chain(2, chain_of(inode, 0))
        await vfs.write(handle, 0, b"y")
        if raised == "floor":  # the client never learns of a cut that was not made
            await vfs.fsync(handle, False)
            assert version_parts(store.held(inode, 0).version)[0] == chain.epoch


@pytest.mark.parametrize("replicas", [1, 2])
@in_loop
async def test_chunks_after_truncation_have_their_chains_epoch(tmp_path, replicas):
    async with made(tmp_path, replicas=replicas) as (pool, vfs):
        handle = await written(vfs, b"file", bytes(2 * MIB))
        inode = handle.file.inode
        old = max(
            version_parts(chunk)[0] for held in held_by(pool, inode).values() for chunk, _ in held.values()
        )
        for step in range(3):
            await pool.change_map(
                lambda pool_map, step=step: changed(
                    pool_map,
                    tables=tuple(
                        msgspec.structs.replace(
                            table,
                            chains=tuple(
                                msgspec.structs.replace(chain, epoch=chain.epoch + (number % 3 >= step))
                                for number, chain in enumerate(table.chains)
                            ),
                        )
                        for table in pool_map.tables
                    ),
                )
            )
        await vfs.release(handle)
        vfs = (await pool.client("knows the map", FAST)).vfs
        handle = await vfs.open(inode, 2, ME)
        for size in (0, 700_000, 0):
            await vfs.setattr(inode, size=size, caller=ME)
            await vfs.write(handle, 0, bytes(2 * MIB))
            await vfs.fsync(handle, False)
        for held in held_by(pool, inode).values():
            for index, (its_version, _) in held.items():
                epoch = pool.pool_map.chain(replicas, chain_of(inode, index)).epoch
                assert version_parts(its_version)[0] == epoch > old


def check_replicas(pool: InProcessPool, inode: int, chunks: range, replicas: int) -> None:
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
async def test_write_reaches_every_member_of_its_chain(tmp_path, replicas, memory):
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
        for dead in list(pool.stores)[: replicas - 1]:
            await pool.stop_store(dead)
            await pool.change_map(lambda pool_map, dead=dead: without(pool_map, dead))
        assert await read_all(other.vfs, inode, len(content)) == content


async def kill(pool: InProcessPool, dead: int, after_s: float = 0.05) -> None:
    """Stop a store as if its process died; the map changes `after_s` later."""
    await pool.stop_store(dead)
    await asyncio.sleep(after_s)
    await pool.change_map(lambda pool_map: without(pool_map, dead))


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("victim", ["head", "last"])
@in_loop
async def test_member_that_dies_during_writes_loses_nothing(tmp_path, replicas, victim):
    async with made(tmp_path, replicas) as (pool, vfs):
        handle = await written(vfs, b"file", bytes(MIB))
        inode, chance = handle.file.inode, random.Random(2)
        content = bytearray(MIB)
        stop = False

        count = 0

        async def writer() -> None:
            nonlocal count
            while not stop:
                offset, length = chance.randrange(MIB - 70_000), chance.choice((10, 4096, 5000, 65536))
                piece = chance.randbytes(length)
                await vfs.write(handle, offset, piece)
                content[offset : offset + length] = piece
                count += 1
                if chance.random() < 0.3:
                    await vfs.fsync(handle, False)
            await vfs.fsync(handle, False)

        writing = asyncio.create_task(writer())
        await pool.until(lambda: count > 5 or writing.done())
        chain = pool.pool_map.chain(replicas, chain_of(inode, 0)).targets
        await kill(pool, chain[0] if victim == "head" else chain[-1], 0.2)
        before = count
        await pool.until(lambda: count > before + 5 or writing.done())
        stop = True
        await asyncio.wait_for(writing, 120)
        for _ in range(replicas - 1):
            found = await read_all(vfs, inode, MIB)
            assert found == content
            check_replicas_now(pool, inode, replicas)
            survivors = [
                t for t in pool.pool_map.chain(replicas, chain_of(inode, 0)).targets if t in pool.stores
            ]
            if len(survivors) > 1:
                await kill(pool, survivors[0])
        assert await read_all((await pool.client("last", FAST)).vfs, inode, MIB) == content


def check_replicas_now(pool: InProcessPool, inode: int, replicas: int) -> None:
    """The members of each chain have the same versions."""
    held = held_by(pool, inode)
    for index in range(4):
        members = pool.pool_map.chain(replicas, chain_of(inode, index)).targets
        assert len({held[target].get(index) for target in members}) == 1, (index, members, held)


def content_of(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


@in_loop
async def test_reads_of_a_silent_target_use_another_replica(tmp_path):
    async with made(tmp_path) as (pool, vfs):
        content = content_of(3, 3 * MIB)
        handle = await written(vfs, b"file", content)
        inode = handle.file.inode
        for silent in (1, 2, 3):
            pool.hold(silent, Method.DATA_READ)
            client = await pool.client(f"of {silent}", FAST)
            # the whole file in pieces, single blocks gathered in one turn, and a batch: no read waits for the silent target
            assert await read_all(client.vfs, inode, len(content)) == content
            opened = await client.vfs.open(inode, 0, ME)
            places = [number * 40_000 for number in range(60)]
            found = await asyncio.gather(*[client.vfs.read(opened, place, 4096) for place in places])
            assert [bytes(one) for one in found] == [content[place : place + 4096] for place in places]
            into = bytearray(60 * 5000)
            await client.vfs.read_many([(opened, place, 5000) for place in places], memoryview(into))
            assert into == b"".join([content[place : place + 5000] for place in places])
            pool.let_go(silent)
        counters = client.vfs.chunks.hedging.counters
        assert counters["late"] + counters["hedged"] > 0


@in_loop
async def test_slow_target_gets_few_reads(tmp_path):
    async with made(tmp_path, targets=2) as (pool, vfs):
        content = content_of(5, 4 * MIB)
        handle = await written(vfs, b"file", content)
        pool.delay(1, 0.08)
        client = await pool.client("reader", FAST)
        opened = await client.vfs.open(handle.file.inode, 0, ME)
        chance, reads = random.Random(2), 600
        before = pool.asked[1, Method.DATA_READ]
        for _ in range(reads):
            offset = chance.randrange(len(content) - 4096)
            assert await client.vfs.read(opened, offset, 4096) == content[offset : offset + 4096]
        assert pool.asked[1, Method.DATA_READ] - before < reads / 4


@in_loop
async def test_hedged_reads_are_limited(tmp_path):
    async with made(tmp_path) as (pool, vfs):
        content = content_of(4, 2 * MIB)
        handle = await written(vfs, b"file", content)
        hedging = vfs.chunks.hedging
        hedging.delay_s, came = 0.0, hedging.came  # every read is slow

        def still_slow(sent, good):
            came(sent, False)
            hedging.delay_s = 0.0

        hedging.came = still_slow
        before = {number: pool.asked[number, Method.DATA_READ] for number in pool.stores}
        chance, reads = random.Random(1), 1500
        opened = await vfs.open(handle.file.inode, 0, ME)
        for _ in range(reads):
            offset = chance.randrange(len(content) - 4096)
            assert await vfs.read(opened, offset, 4096) == content[offset : offset + 4096]
        asked = sum(pool.asked[number, Method.DATA_READ] - before[number] for number in pool.stores)
        assert hedging.counters["hedged"] <= hedging_module.CREDIT_MAX + 1 + hedging_module.SHARE * (
            asked + reads
        )


@in_loop
async def test_read_at_the_head_waits_for_an_unacknowledged_write(tmp_path):
    async with made(tmp_path) as (pool, vfs):
        handle = await written(vfs, b"file", b"old" * 4000)
        inode = handle.file.inode
        head, last = pool.pool_map.chain(2, chain_of(inode, 0)).targets
        pool.hold(last, Method.DATA_PEER_WRITE)
        await vfs.write(handle, 0, b"new")
        storing = asyncio.create_task(vfs.fsync(handle, False))
        await pool.until(lambda: pool.held[last])
        assert pool.stores[head].replica.is_pending([(inode, 0)])
        # the last member has not committed: a read there returns the old bytes, the head does not reply
        reading = pool.stores[head].replica.decided([(inode, 0)], pool.clock.boottime_s() + 0.2)
        with pytest.raises(Busy):
            await reading
        assert (await read_all((await pool.client("third", FAST)).vfs, inode, 12_000))[:3] == b"old"
        assert not storing.done()
        pool.let_go(last)
        await storing
        assert (await read_all((await pool.client("fourth", FAST)).vfs, inode, 12_000))[:3] == b"new"
        assert not pool.stores[head].replica.pending


@in_loop
async def test_waiting_read_fails_when_its_target_leaves_the_chain(tmp_path):
    async with made(tmp_path, memory=True) as (pool, vfs):
        handle = await written(vfs, b"file", b"old" * 4000)
        inode, file = handle.file.inode, handle.file
        head, last = pool.pool_map.chain(2, chain_of(inode, 0)).targets
        pool.hold(last, Method.DATA_PEER_WRITE)
        await vfs.write(handle, 0, b"new")
        storing = asyncio.create_task(vfs.fsync(handle, False))
        await pool.until(lambda: pool.held[last])
        message = encode_read_request(
            pool.pool_map.epoch, head, [file.grant], READ.pack(inode, 0, 0, 4096, 0, 0), False
        )
        reading = asyncio.create_task(
            vfs.chunks.dialer.call(
                pool.pool_map.target_by_id[head].endpoints,
                Method.DATA_READ,
                message,
                deadline_s=vfs.clock.boottime_s() + 60,
            )
        )
        await pool.until(lambda: pool.asked[head, Method.DATA_READ])
        await pool.change_map(
            lambda pool_map: without(pool_map, head)
        )  # the target does not know what was written since
        with pytest.raises(StaleEpoch):
            await reading
        pool.let_go(last)
        await storing


@in_loop
async def test_head_commits_what_the_lost_last_member_committed(
    tmp_path,
):
    async with made(tmp_path) as (pool, vfs):
        handle = await written(vfs, b"file", b"old" * 4000)
        inode = handle.file.inode
        head, last = pool.pool_map.chain(2, chain_of(inode, 0)).targets
        pool.mute(last, Method.DATA_PEER_WRITE)  # it does the write, but its reply is dropped
        await vfs.write(handle, 0, b"new")
        storing = asyncio.create_task(vfs.fsync(handle, False))
        stores = [pool.stores[number].store for number in (head, last)]
        await pool.until(lambda: stores[1].held(inode, 0).version > stores[0].held(inode, 0).version)
        assert (await read_all((await pool.client("reader", FAST)).vfs, inode, 12_000))[:3] == b"new"
        await kill(pool, last)
        await asyncio.wait_for(storing, 120)
        assert (await read_all((await pool.client("later", FAST)).vfs, inode, 12_000))[:3] == b"new"


@in_loop
async def test_truncation_during_a_write_leaves_replicas_equal(tmp_path):
    async with made(tmp_path) as (pool, vfs):
        chance = random.Random(6)
        handle = await written(vfs, b"file", bytes(400_000))
        inode, model = handle.file.inode, bytearray(400_000)
        for number in range(60):
            offset, piece = chance.randrange(300_000), chance.randbytes(chance.choice((5000, 70_000)))
            await vfs.write(handle, offset, piece)
            model[offset : offset + len(piece)] = piece
            if number % 3 == 0:
                size = chance.randrange(100_000, 390_000)
                await vfs.setattr(inode, caller=ME, size=size, handle=handle)
                model[size:] = b""
                await vfs.setattr(inode, caller=ME, size=400_000, handle=handle)
                model += bytes(400_000 - size)
        await vfs.fsync(handle, False)
        assert await read_all(vfs, inode, 400_000) == model[:400_000]
        check_replicas_now(pool, inode, 2)


@in_loop
async def test_concurrent_writes_have_one_order_on_all_replicas(tmp_path):
    async with made(tmp_path, replicas=3) as (pool, vfs):
        handle = await written(vfs, b"file", bytes(64 * KIB))
        inode = handle.file.inode

        async def write_all(number: int) -> None:
            client = await pool.client(f"writer {number}", FAST)
            opened = await client.vfs.open(inode, 1, ME)
            for round_number in range(20):
                await client.vfs.write(opened, 0, bytes([number * 20 + round_number]) * 8192)
                await client.vfs.fsync(opened, False)

        await asyncio.gather(*[write_all(number) for number in range(4)])
        check_replicas_now(pool, inode, 3)
        copies = set()
        for target in pool.pool_map.chain(3, chain_of(inode, 0)).targets:
            batch = pool.stores[target].store.read_now(READ.pack(inode, 0, 0, 8192, 0, 0), [ALL_INODES])
            copies.add(b"".join(batch.payload))
        assert len(copies) == 1 and len(set(copies.pop())) == 1


@in_loop
async def test_full_member_refuses_the_write_on_all_replicas(tmp_path):
    pool = StallingPool(tmp_path, capacities=(64 * MIB, 64 * MIB), replicas=2, chunk_bytes=MIB)
    async with pool:
        client = await pool.client("first", FAST)
        handle = await written(client.vfs, b"file", b"old" * 4000)
        inode = handle.file.inode
        _, last = pool.pool_map.chain(2, chain_of(inode, 0)).targets
        allocator = pool.stores[last].store.allocator
        taken = Transaction()
        allocator.allocate(taken, allocator.block_count - allocator.used_blocks, grows=False)
        await client.vfs.write(handle, 100_000, b"x" * 300_000)
        with pytest.raises(NoSpace):
            await client.vfs.fsync(handle, False)
        allocator.drop(taken)
        check_replicas_now(pool, inode, 2)
        assert all(not service.replica.pending for service in pool.stores.values())
        await client.vfs.write(handle, 100_000, b"y" * 300_000)
        await client.vfs.fsync(handle, False)
        check_replicas_now(pool, inode, 2)


def spoil(pool: InProcessPool, target: int, inode: int, index: int, block: int) -> None:
    """Change a byte of a block on the drive."""
    store = pool.stores[target].store
    (place,) = store.index.places(store.index.chunk(inode, index), block, 1)
    with open(store.device.path, "r+b") as data:
        data.seek((place << 12) + 100)
        byte = data.read(1)
        data.seek((place << 12) + 100)
        data.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("where", ["first", "last", "all but one"])
@in_loop
async def test_partial_write_repairs_a_damaged_block(tmp_path, where):
    async with made(tmp_path, 3) as (pool, vfs):
        content = bytearray(random.Random(3).randbytes(100_000))
        handle = await written(vfs, b"file", content)
        inode = handle.file.inode
        chain = pool.pool_map.table_by_id[3].chains[chain_of(inode, 0)].targets
        for target in {"first": chain[:1], "last": chain[2:], "all but one": chain[:2]}[where]:
            for block in (2, 5):
                spoil(pool, target, inode, 0, block)
        await vfs.write(handle, 10_000, b"!" * 11_000)  # from the middle of block 2 to the middle of block 5
        await vfs.fsync(handle, False)
        content[10_000:21_000] = b"!" * 11_000
        assert vfs.chunks.counters["repeats"] == 0
        for target in pool.stores:
            reads = READ.pack(inode, 0, 0, 98_304, 0, 0)
            batch = pool.stores[target].store.read_now(reads, [ALL_INODES], True)
            if batch.missed:
                await pool.stores[target].store.finish_read(batch)
            assert b"".join(bytes(part) for part in batch.payload) == content[:98_304], target
        assert not any(service.store.bad_blocks() for service in pool.stores.values())


@in_loop
async def test_partial_write_to_an_unrepairable_block_fails(tmp_path):
    async with made(tmp_path, 2, targets=2) as (pool, vfs):
        handle = await written(vfs, b"file", b"x" * 20_000)
        inode = handle.file.inode
        for target in (1, 2):
            spoil(pool, target, inode, 0, 1)
        await vfs.write(handle, 5000, b"part")
        with pytest.raises(ChecksumMismatch):
            await vfs.fsync(handle, False)
        await vfs.write(handle, 4096, b"w" * 4096)
        await vfs.fsync(handle, False)
        assert await read_all(vfs, inode, 20_000) == b"x" * 4096 + b"w" * 4096 + b"x" * (20_000 - 8192)


@pytest.mark.parametrize("where", ["first", "last", "all but one"])
@in_loop
async def test_damaged_truncated_block_is_repaired(tmp_path, where):
    async with made(tmp_path, 3) as (pool, vfs):
        content = bytearray(random.Random(3).randbytes(100_000))
        handle = await written(vfs, b"file", content)
        inode = handle.file.inode
        chain = pool.pool_map.table_by_id[3].chains[chain_of(inode, 0)].targets
        for target in {"first": chain[:1], "last": chain[2:], "all but one": chain[:2]}[where]:
            spoil(pool, target, inode, 0, 5)
        await vfs.setattr(inode, caller=ME, size=21_000, handle=handle)
        await vfs.write(handle, 22_000, b"!")  # a part of the same block, whichever target repaired it
        await vfs.fsync(handle, False)
        content[21_000:] = bytes(1000) + b"!"
        assert await read_all(vfs, inode, len(content)) == content
        await pool.until(lambda: not any(service.store.bad_blocks() for service in pool.stores.values()))
        copies = [await service.store.fetch(inode, 0) for service in pool.stores.values()]
        assert len({(copy.version, copy.checksums, bytes(copy.content)) for copy in copies}) == 1
        assert bytes(copies[0].content) == content.ljust(24_576, b"\0") and not copies[0].bad


def lose_record(pool: InProcessPool, target: int, inode: int, index: int) -> None:
    """Make the record of a chunk unreadable: it has no head."""
    store = pool.stores[target].store
    segment = store.index.segment(store.index.chunk(inode, index), 0)
    store.kv.apply([(segment_key(inode, index, 0), encode_segment(segment, None, 0, 0))])
    store.index.forget(inode, index)


@pytest.mark.parametrize("who", ["head", "last"])
@pytest.mark.parametrize("found_by", ["read", "scrub", "write"])
@in_loop
async def test_chunk_with_unreadable_record_is_rebuilt(tmp_path, who, found_by):
    async with made(tmp_path, 2) as (pool, vfs):
        content = random.Random(4).randbytes(200_000)
        handle = await written(vfs, b"file", content)
        inode = handle.file.inode
        chain = pool.pool_map.table_by_id[2].chains[chain_of(inode, 0)].targets
        target = chain[0] if who == "head" else chain[-1]
        store = pool.stores[target].store
        lose_record(pool, target, inode, 0)
        with pytest.raises(CorruptRecord):
            store.state(inode, 0)
        assert store.unreadable(inode, 0)
        if found_by == "read":
            batch = store.read_now(READ.pack(inode, 0, 0, 4096, 0, 0), [ALL_INODES])
            assert RESULT.unpack_from(batch.results)[0] == CorruptRecord.wire_code
        elif found_by == "scrub":
            assert (await store.scrub(b"", 1 << 14)).problems
        else:
            await vfs.write(handle, 5000, b"w" * 10)
            await vfs.fsync(handle, False)
            content = content[:5000] + b"w" * 10 + content[5010:]
        await pool.until(lambda: not store.unreadable(inode, 0) and not store.bad_blocks())
        check_replicas(pool, inode, range(1), 2)
        assert (await store.fetch(inode, 0)).content[:200_000] == content
        other = await pool.client("second", FAST)
        assert await read_all(other.vfs, inode, len(content)) == content


@in_loop
async def test_unreadable_record_without_another_copy_stays(tmp_path):
    async with made(tmp_path, 2, targets=2) as (pool, vfs):
        handle = await written(vfs, b"file", b"x" * 9000)
        inode = handle.file.inode
        for target in (1, 2):
            lose_record(pool, target, inode, 0)
        for target in (1, 2):
            assert not await pool.stores[target].upkeep.repair.rebuilt(inode, 0)
            assert pool.stores[target].store.unreadable(inode, 0)
        other = await pool.client("second", FAST._replace(deadline_s=1.0))
        with pytest.raises(CorruptRecord):
            await read_all(other.vfs, inode, 9000)
