"""Holes, seeks for data and copies through clients: concurrent clients, restarts of daemons, and the number of messages."""

from __future__ import annotations

import asyncio
import errno
import os
import random

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, Caller
from nvpool.core import errors
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB, MIB
from nvpool.fuse.ops.operations import FuseOps, errno_of
from nvpool.rpc.v1 import meta_pb2, wire_pb2
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.store import PlainStore

ME = Caller(0, 0)
OPTIONS = ClientOptions(deadline_s=20.0, fresh_s=0.0, attr_s=0.0, write_age_s=60.0)
HOLE = PUNCH_HOLE | KEEP_SIZE
BLOCK = 4096


def in_a_pool(clients=1, directory=False, **pool_options):
    def wrap(test):
        def run(tmp_path):
            async def main():
                async with InProcessPool(tmp_path if directory else None, **pool_options) as pool:
                    made = [(await pool.client(f"client {number}", OPTIONS)).vfs for number in range(clients)]
                    await test(pool, *made)

            asyncio.run(asyncio.wait_for(main(), 120))

        run.__name__ = test.__name__
        return run

    return wrap


async def new_file(vfs, name=b"file", content=b""):
    handle = (await vfs.create(ROOT_INODE, name, 0o644, os.O_RDWR, ME))[1]
    if content:
        await vfs.write(handle, 0, content)
        await vfs.flush(handle)
    return handle


async def content_of(vfs, handle, length=64 * MIB):
    return bytes(await vfs.read(handle, 0, length))


def some_bytes(count, seed=1):
    return random.Random(seed).randbytes(count)


# -- holes and other clients ------------------------------------------------------------------------------------------------


@in_a_pool(clients=2)
async def test_unreported_bytes_survive_a_hole_of_another_client(pool, one, other):
    handle = await new_file(one)
    await one.write(handle, 0, some_bytes(MIB))
    await one.writer.store(handle.file)
    theirs = await other.open(handle.inode, os.O_RDWR, ME)
    assert theirs.size == 0
    await other.fallocate(theirs, 4096, 4096, HOLE)
    await one.flush(handle)
    expected = some_bytes(MIB)[:4096] + bytes(4096) + some_bytes(MIB)[8192:]
    assert (await one.getattr(handle.inode)).size == MIB
    assert await content_of(one, handle) == expected
    again = await other.open(handle.inode, os.O_RDONLY, ME)
    assert again.size == MIB and await content_of(other, again) == expected


@in_a_pool(clients=2)
async def test_unstored_bytes_come_after_a_hole_of_another_client(pool, one, other):
    handle = await new_file(one, content=b"old" * 4096)
    await one.write(handle, 0, b"new")
    await other.fallocate(await other.open(handle.inode, os.O_RDWR, ME), 0, 8192, HOLE)
    await one.flush(handle)
    assert (await content_of(one, handle))[:8192] == b"new" + bytes(8189)


@in_a_pool()
async def test_hole_removes_earlier_bytes_and_keeps_later_ones(pool, vfs):
    handle = await new_file(vfs)
    for at in range(0, 3 * MIB, 100_000):
        await vfs.write(handle, at, b"x" * 100_000)
    end = handle.size
    await vfs.fallocate(handle, 5000, 2 * MIB, HOLE)
    await vfs.write(handle, MIB, b"after")
    expected = bytearray(b"x" * end)
    expected[5000 : 5000 + 2 * MIB] = bytes(2 * MIB)
    expected[MIB : MIB + 5] = b"after"
    assert await content_of(vfs, handle) == expected
    await vfs.fsync(handle, False)
    assert await content_of(vfs, handle) == expected and (await vfs.getattr(handle.inode)).size == end


@in_a_pool()
async def test_hole_invalidates_read_ahead(pool, vfs):
    handle = await new_file(vfs, content=some_bytes(8 * MIB))
    for at in range(0, MIB, 128 * KIB):
        await vfs.read(handle, at, 128 * KIB)
    assert handle.ahead.units
    await vfs.fallocate(handle, 2 * MIB, MIB, ZERO_RANGE)
    found = [bytes(await vfs.read(handle, at, 128 * KIB)) for at in range(MIB, 4 * MIB, 128 * KIB)]
    assert (
        b"".join(found)
        == some_bytes(8 * MIB)[MIB : 2 * MIB] + bytes(MIB) + some_bytes(8 * MIB)[3 * MIB : 4 * MIB]
    )


@in_a_pool()
async def test_hole_reduces_blocks_of_stat(pool, vfs):
    handle = await new_file(vfs, content=some_bytes(4 * MIB))
    assert (await vfs.getattr(handle.inode)).blocks == 4 * MIB // 512
    await vfs.fallocate(handle, MIB, 2 * MIB, HOLE)
    assert (await vfs.getattr(handle.inode)).blocks == 2 * MIB // 512
    assert sum(service.store.status()["used_bytes"] for service in pool.stores.values()) == 2 * MIB


@in_a_pool()
async def test_invalid_modes_and_handles_are_refused(pool, vfs):
    handle = await new_file(vfs, content=b"x" * 10)
    for mode in (PUNCH_HOLE, PUNCH_HOLE | ZERO_RANGE | KEEP_SIZE, 8, 0x20, 0x40, 0x48):
        with pytest.raises(errors.NotSupported):
            await vfs.fallocate(handle, 0, 10, mode)
    for offset, length, error in (
        (-1, 1, errors.InvalidRequest),
        (0, 0, errors.InvalidRequest),
        (0, -1, errors.InvalidRequest),
        (1 << 52, 1, errors.FileTooLarge),
    ):
        with pytest.raises(error):
            await vfs.fallocate(handle, offset, length, HOLE)
    reader = await vfs.open(handle.inode, os.O_RDONLY, ME)
    writer = await vfs.open(handle.inode, os.O_WRONLY, ME)
    append = await vfs.open(handle.inode, os.O_RDWR | os.O_APPEND, ME)
    with pytest.raises(errors.BadHandle):
        await vfs.fallocate(reader, 0, 10, HOLE)
    for source, target in ((writer, handle), (handle, reader), (handle, append)):
        with pytest.raises(errors.BadHandle):
            await vfs.copy_range(source, 0, target, 5, 5)
    with pytest.raises(errors.InvalidRequest):
        await vfs.seek(handle, 0, os.SEEK_SET)
    assert await vfs.seek(writer, 0, os.SEEK_HOLE) == 10
    assert await content_of(vfs, handle) == b"x" * 10


@in_a_pool()
async def test_fallocate_reserves_nothing_and_checks_free_space(pool, vfs):
    handle = await new_file(vfs, content=some_bytes(MIB))
    available = (await vfs.statfs()).blocks_available * BLOCK
    change = (await vfs.getattr(handle.inode)).change
    await vfs.fallocate(handle, 0, available // 2, KEEP_SIZE)
    await vfs.fallocate(handle, 0, MIB, 0)
    attr = await vfs.getattr(handle.inode)
    assert (attr.size, attr.change) == (MIB, change)
    await vfs.fallocate(handle, 0, available // 2, 0)
    attr = await vfs.getattr(handle.inode)
    assert attr.size == available // 2 and attr.blocks == MIB // 512
    for mode in (0, KEEP_SIZE):
        with pytest.raises(errors.NoSpace):
            await vfs.fallocate(handle, 0, available + 3 * MIB, mode)
    assert (await vfs.getattr(handle.inode)).size == available // 2
    await vfs.fallocate(
        handle, 0, available + MIB - 32 * KIB, KEEP_SIZE
    )  # bytes that exist already need no space
    await vfs.fallocate(handle, 0, 1 << 40, ZERO_RANGE)
    assert (await vfs.getattr(handle.inode)).size == 1 << 40


# -- restarts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", ["stores", "shard", "both"])
def test_hole_is_made_once_across_restarts(tmp_path, dies):
    @in_a_pool(directory=True)
    async def made(pool, vfs):
        content = some_bytes(3 * MIB)
        handle = await new_file(vfs, content=content)
        if dies != "shard":
            for target in (1, 2):
                await pool.stop_store(target)
        making = asyncio.create_task(vfs.fallocate(handle, 5000, 2 * MIB, HOLE))
        await asyncio.sleep(0.05 if dies != "shard" else 0)
        if dies != "stores":
            await pool.stop_shard()
            await asyncio.sleep(0.05)
            await pool.start_shard()
        assert not making.done() or dies == "shard"
        writing = asyncio.create_task(vfs.write(handle, MIB, b"after"))
        if dies != "shard":
            for target in (1, 2):
                await pool.start_store(target)
        await making
        await writing
        await vfs.flush(handle)
        attr = await vfs.getattr(handle.inode)
        assert (attr.cut, attr.punches, attr.size) == (1, 1, 3 * MIB)
        expected = bytearray(content)
        expected[5000 : 5000 + 2 * MIB] = bytes(2 * MIB)
        expected[MIB : MIB + 5] = b"after"
        assert await content_of(vfs, handle) == expected

    made(tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_late_and_repeated_writes_do_not_fill_holes(tmp_path, seed):
    """Slow stores lose replies; holes and writes of one client alternate on the same blocks."""
    dice = random.Random(seed)
    chunks: dict[int, dict] = {}

    async def plain(pool, target):
        store = PlainStore(target, pool.grant_secret, chunks=chunks.setdefault(target, {}))
        store.fault = lambda call: dice.random() * 0.004
        return store

    @in_a_pool(make_store=plain, chunk_bytes=64 * KIB)
    async def made(pool, vfs):
        handle = await new_file(vfs)
        model = bytearray(300_000)
        await vfs.write(handle, 0, bytes(model))
        for _ in range(60):
            for store in pool.stores.values():
                if dice.random() < 0.3:
                    store.lose_answer = 1
            place, length = dice.randrange(290_000), dice.choice((10, 5000, 10_000))
            if dice.random() < 0.4:
                await vfs.fallocate(handle, place, length, HOLE)
                model[place : place + length] = bytes(len(model[place : place + length]))
            else:
                data = dice.randbytes(length)
                await vfs.write(handle, place, data)
                model[place : place + length] = data
            if dice.random() < 0.2:
                await vfs.flush(handle)
            assert await content_of(vfs, handle) == model
        await vfs.flush(handle)
        assert await content_of(vfs, handle) == model

    made(tmp_path)


# -- copies -----------------------------------------------------------------------------------------------------------------


@in_a_pool(capacities=(256 * MIB,))
async def test_copy_of_complete_blocks_stays_on_the_target(pool, vfs):
    content = some_bytes(40 * MIB + 5000)
    source = await new_file(vfs, b"a", content)
    target = await new_file(vfs, b"b", b"before")
    before = dict(vfs.chunks.counters)
    assert await vfs.copy_range(source, 0, target, 0, 1 << 40) == len(content)
    await vfs.flush(target)
    assert (
        vfs.chunks.counters["reads"] - before["reads"]
        == vfs.chunks.counters["writes"] - before["writes"]
        == 1
    ), "the tail"
    attr = await vfs.getattr(target.inode)
    assert attr.size == len(content) and attr.blocks == pytest.approx(len(content) // 512, abs=16)
    assert await content_of(vfs, target) == content
    await vfs.write(source, 0, b"other")
    assert (await content_of(vfs, target, 10)) == content[:10]


@in_a_pool()
async def test_copy_between_targets_goes_through_the_client(pool, vfs):
    content = some_bytes(10 * MIB)
    source = await new_file(vfs, b"a", content)
    target = await new_file(vfs, b"b")
    before = dict(vfs.chunks.counters)
    assert await vfs.copy_range(source, 0, target, MIB, 9 * MIB) == 9 * MIB
    writes = vfs.chunks.counters["writes"] - before["writes"]
    assert 0 < writes < 9
    assert await vfs.copy_range(source, 1, target, 0, MIB) == MIB
    assert await content_of(vfs, target) == content[1 : MIB + 1] + content[: 9 * MIB]


@in_a_pool(clients=2)
async def test_copy_includes_earlier_writes_and_is_seen_after_close(pool, one, other):
    source, target = await new_file(one, b"a"), await new_file(one, b"b")
    await one.write(source, 0, b"source" * 3000)
    await one.write(target, 0, b"target" * 3000)
    assert await one.copy_range(source, 6, target, 6, 9000) == 9000
    await one.write(target, 12, b"TARGET")
    await one.flush(target)
    theirs = await other.open(target.inode, os.O_RDONLY, ME)
    expected = bytearray(b"target" * 3000)
    expected[6:9006] = (b"source" * 3000)[6:9006]
    expected[12:18] = b"TARGET"
    assert await content_of(other, theirs) == expected


@in_a_pool()
async def test_copy_is_short_at_the_end_and_bounded_per_call(pool, vfs):
    source, target = await new_file(vfs, b"a", b"x" * 100), await new_file(vfs, b"b")
    assert await vfs.copy_range(source, 90, target, 1000, 100) == 10
    assert (
        await vfs.copy_range(source, 100, target, 0, 10)
        == await vfs.copy_range(source, 200, target, 0, 10)
        == 0
    )
    assert await vfs.copy_range(source, 0, target, 0, 0) == 0
    await vfs.setattr(source.inode, size=1 << 40, caller=ME)
    at = 0
    while copied := await vfs.copy_range(source, at, target, at, 1 << 30):
        at += copied
        if at >= 1 << 30:
            break
    await vfs.flush(target)
    attr = await vfs.getattr(target.inode)
    assert attr.size == 1 << 30 and attr.blocks <= 16, "holes stay holes"


@in_a_pool(capacities=(256 * MIB,))
async def test_copy_between_chunk_sizes_stays_on_the_store(pool, vfs):
    request = meta_pb2.SetAttrRequest(inode=ROOT_INODE, valid=512, chunk_bits=24)
    await vfs.meta.change(ROOT_INODE, wire_pb2.META_SETATTR, request, meta_pb2.Entry)
    content = some_bytes(20 * MIB)
    large = await new_file(vfs, b"a", content)
    request = meta_pb2.SetAttrRequest(inode=ROOT_INODE, valid=512, chunk_bits=16)
    await vfs.meta.change(ROOT_INODE, wire_pb2.META_SETATTR, request, meta_pb2.Entry)
    small, again = await new_file(vfs, b"b"), await new_file(vfs, b"c")
    assert (large.file.chunk_bits, small.file.chunk_bits) == (24, 16)
    before = dict(vfs.chunks.counters)
    assert await vfs.copy_range(large, 8192, small, 4096, 18 * MIB) == 18 * MIB
    assert await vfs.copy_range(small, 4096, again, 0, 18 * MIB) == 18 * MIB
    await vfs.setattr(large.inode, size=0, caller=ME)
    assert await vfs.copy_range(again, 0, large, 8192, 18 * MIB) == 18 * MIB
    assert vfs.chunks.counters["writes"] == before["writes"]
    await vfs.flush(large)
    assert await content_of(vfs, large) == bytes(8192) + content[8192 : 8192 + 18 * MIB]


@in_a_pool(capacities=(256 * MIB,))
async def test_damage_is_not_copied(pool, vfs):
    source, target = (
        await new_file(vfs, b"a", some_bytes(2 * MIB)),
        await new_file(vfs, b"b", some_bytes(2 * MIB, 2)),
    )
    pool.stores[1].store.flip(source.inode, 1, 7)
    assert await vfs.copy_range(source, 0, target, 0, 2 * MIB) == MIB, "up to the damaged chunk"
    with pytest.raises(errors.ChecksumMismatch):
        await vfs.copy_range(source, MIB, target, MIB, MIB)
    assert await content_of(vfs, target) == some_bytes(2 * MIB)[:MIB] + some_bytes(2 * MIB, 2)[MIB:]


@in_a_pool(clients=2, capacities=(256 * MIB,))
async def test_copy_is_retried_after_a_truncation_or_stale_grant(pool, one, other):
    source, target = await new_file(one, b"a", some_bytes(MIB)), await new_file(one, b"b", b"x" * MIB)
    theirs = await other.open(target.inode, os.O_RDWR, ME)
    await other.setattr(target.inode, size=0, caller=ME, handle=theirs)
    await other.fallocate(theirs, 0, MIB, HOLE)
    assert await one.copy_range(source, 0, target, 0, MIB) == MIB
    assert await content_of(one, target) == some_bytes(MIB)
    source.file.grant = source.file.grant[:-1] + bytes((source.file.grant[-1] ^ 1,))
    assert await one.copy_range(source, 0, target, MIB, MIB) == MIB
    await one.flush(target)
    assert await content_of(one, target) == some_bytes(MIB) * 2


@in_a_pool(directory=True, capacities=(256 * MIB,))
async def test_copy_survives_a_restart_and_is_durable_after_fsync(pool, vfs):
    source, target = await new_file(vfs, b"a", some_bytes(20 * MIB)), await new_file(vfs, b"b")
    await pool.stop_store(1)
    copying = asyncio.create_task(vfs.copy_range(source, 0, target, 0, 20 * MIB))
    await asyncio.sleep(0.05)
    assert not copying.done()
    await pool.start_store(1)
    await asyncio.sleep(0.02)
    await pool.stop_store(1)
    await asyncio.sleep(0.02)
    await pool.start_store(1)
    assert await copying == 20 * MIB
    await vfs.fsync(target, False)
    assert await content_of(vfs, target) == some_bytes(20 * MIB)
    assert not vfs.writer.has_unstable_writes(target.inode)


# -- seeking data and holes -------------------------------------------------------------------------------------------------


@in_a_pool()
async def test_many_extents_need_few_messages(pool, vfs):
    handle = await new_file(vfs)
    for number in range(300):
        await vfs.write(handle, number * 3 * BLOCK, b"x")
    await vfs.write(handle, 1 << 49, b"x")
    asked = []
    for service in pool.stores.values():
        answer = service.handle

        def counting(call, answer=answer):
            asked.append(call.method)
            answer(call)

        for listener in pool.listeners.values():
            if listener.handler == service.handle:
                for served in listener.connections:
                    served.handler = counting
    places, at = [], 0
    while True:
        try:
            at = await vfs.seek(handle, at, os.SEEK_DATA)
        except errors.BeyondData:
            break
        places.append(at)
        at = await vfs.seek(handle, at, os.SEEK_HOLE)
    assert places == [number * 3 * BLOCK for number in range(300)] + [1 << 49]
    assert asked.count(wire_pb2.DATA_EXTENTS) <= 6


@in_a_pool()
async def test_seek_sees_the_last_write(pool, vfs):
    handle = await new_file(vfs)
    with pytest.raises(errors.BeyondData):
        await vfs.seek(handle, 0, os.SEEK_HOLE)
    await vfs.setattr(handle.inode, size=MIB, caller=ME)
    assert await vfs.seek(handle, 0, os.SEEK_HOLE) == 0
    with pytest.raises(errors.BeyondData):
        await vfs.seek(handle, 0, os.SEEK_DATA)
    await vfs.write(handle, 500_000, b"x")
    assert await vfs.seek(handle, 0, os.SEEK_DATA) == 500_000 // BLOCK * BLOCK
    await vfs.fallocate(handle, 0, MIB, ZERO_RANGE)
    assert await vfs.seek(handle, 0, os.SEEK_HOLE) == 0


# -- FUSE operations --------------------------------------------------------------------------------------------------------


@in_a_pool()
async def test_fuse_operations_return_errno_values(pool, vfs):
    ops = FuseOps(vfs)
    attr, opened = await ops.create(ROOT_INODE, b"f", 0o644, os.O_RDWR, ME)
    await ops.write(opened.handle, 0, some_bytes(3 * BLOCK))
    await ops.fallocate(opened.handle, BLOCK, BLOCK, HOLE, ME)
    assert await ops.lseek(opened.handle, 0, os.SEEK_HOLE) == BLOCK
    assert await ops.lseek(opened.handle, BLOCK, os.SEEK_DATA) == 2 * BLOCK
    _, other = await ops.create(ROOT_INODE, b"g", 0o644, os.O_RDWR, ME)
    assert await ops.copy_file_range(opened.handle, 0, other.handle, BLOCK, 3 * BLOCK, 0, ME) == 3 * BLOCK
    for call, number in (
        (ops.lseek(opened.handle, 3 * BLOCK, os.SEEK_DATA), errno.ENXIO),
        (ops.fallocate(opened.handle, 0, 1, 8, ME), errno.EOPNOTSUPP),
        (ops.copy_file_range(opened.handle, 0, opened.handle, 1, 2, 0, ME), errno.EINVAL),
        (ops.copy_file_range(opened.handle, 0, other.handle, 0, 1, 1, ME), errno.EINVAL),
    ):
        with pytest.raises(errors.NvpoolError) as refused:
            await call
        assert errno_of(refused.value, "lseek") == number
    await ops.setattr(attr.inode, ME, None, mode=0o6755)
    await ops.fallocate(opened.handle, 0, 1, 0, ME)
    assert (await ops.getattr(attr.inode)).mode & 0o7777 == 0o6755
    await ops.fallocate(opened.handle, 0, 1, 0, Caller(7, 7))
    assert (await ops.getattr(attr.inode)).mode & 0o7777 == 0o755
