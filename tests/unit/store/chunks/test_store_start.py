"""Creation and opening of chunk stores: refusals, start time, and both implementations of waiting for a drive."""

import asyncio
import os
import random
import time
from array import array

import pytest

from nvpool.blockio import reader as blockio_reader
from nvpool.blockio import uring_reader
from nvpool.core import errors
from nvpool.core.checksum import block_checksums
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.store.chunks.api import StoreOptions, create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.disk.allocator import GROUP_BLOCKS, encode_bitmap, encode_deltas
from nvpool.store.disk.buffer_pool import BufferPool
from nvpool.store.disk.device import FileDevice
from nvpool.store.disk.index_records import (
    Head,
    IndexSegment,
    delta_key,
    encode_segment,
    group_key,
    segment_key,
)
from nvpool.testing.contracts.chunk_store import content, put, some_bytes

MIB = 1 << 20


def opening(path, target=1, options=None):
    async def run():
        await (await open_chunk_store(path, target, options)).close()

    asyncio.run(run())


def test_store_is_created_once_and_opened_only_by_its_target(tmp_path):
    path = tmp_path / "t"
    with pytest.raises(errors.NotFound):
        opening(path)
    create_chunk_store(path, 3, "pool", 4 * MIB)
    with pytest.raises(errors.AlreadyExists):
        create_chunk_store(path, 3, "pool", 4 * MIB)
    with pytest.raises(errors.WrongTarget):
        opening(path, 1)
    opening(path, 3)
    with pytest.raises(errors.InvalidRequest):
        create_chunk_store(tmp_path / "small", 1, "pool", 4096)
    with pytest.raises(errors.InvalidRequest):
        create_chunk_store(tmp_path / "file", 1, "pool", device=__file__)
    with pytest.raises(errors.BadConfiguration):
        opening(path / "data")


def test_other_format_is_refused_by_name(tmp_path):
    path = tmp_path / "t"
    create_chunk_store(path, 1, "pool", 4 * MIB)
    (path / "FORMAT").write_text("nvpool chunk store 2\n")
    with pytest.raises(errors.WrongFormat, match="chunk store 2"):
        opening(path)
    (path / "FORMAT").write_text("nvpool chunk store 1\n")
    raw = (path / "data").read_bytes()
    (path / "data").write_bytes(raw[:8] + b"\x02" + raw[9:])
    with pytest.raises(errors.WrongFormat, match="format 2"):
        opening(path)
    (path / "data").write_bytes(raw[:MIB])
    with pytest.raises(errors.WrongFormat, match="bytes"):
        opening(path)
    (path / "data").write_bytes(raw)
    opening(path)


def test_index_belongs_to_its_data(tmp_path):
    for name in "ab":
        create_chunk_store(tmp_path / name, 1, "pool", 4 * MIB)
        opening(tmp_path / name)
    os.rename(tmp_path / "a" / "data", tmp_path / "b" / "data")
    with pytest.raises(errors.WrongFormat, match="another data file"):
        opening(tmp_path / "b")


def test_two_daemons_do_not_share_a_store(tmp_path):
    create_chunk_store(tmp_path / "t", 1, "pool", 4 * MIB)

    async def run():
        store = await open_chunk_store(tmp_path / "t")
        with pytest.raises(errors.InUse):
            await open_chunk_store(tmp_path / "t")
        await store.close()
        await store.close()
        await (await open_chunk_store(tmp_path / "t")).close()

    asyncio.run(run())


def test_space_of_removed_files_is_returned_to_the_file_system(tmp_path):
    create_chunk_store(tmp_path / "t", 1, "pool", 64 * MIB)

    async def run():
        store = await open_chunk_store(tmp_path / "t")
        for index in range(16):
            await put(store, 1, index, 0, some_bytes(MIB))
        await store.flush()
        taken = os.stat(tmp_path / "t" / "data").st_blocks * 512
        assert taken >= 16 * MIB
        await store.remove([1])
        await store.tend()
        await store.tend()
        assert os.stat(tmp_path / "t" / "data").st_blocks * 512 < taken - 12 * MIB
        await store.close()

    asyncio.run(run())


# -- start ---------------------------------------------------------------------------------------------------------------


async def _fill(path, blocks):
    """Create offline an index and a free map for `blocks` full blocks in chunks of 1 MiB; the data file is a hole."""
    create_chunk_store(path, 1, "pool", (blocks + blocks // 8 + 4 * GROUP_BLOCKS) * 4096)
    await (await open_chunk_store(path)).close()
    kv = await LmdbKv.open(path / "index", LmdbOptions(map_bytes=4 << 30))
    zeros = block_checksums(bytes(64 * 4096))
    first_used = GROUP_BLOCKS
    effects = []
    for number in range(blocks // 64):
        chunk, segment = divmod(number, 4)
        begin = first_used + number * 64
        key = segment_key(1 + chunk // 1024, chunk % 1024, segment)
        head = None if segment else Head(1 << 32 | 1, 0, ((5, 0, number),))
        effects.append((key, encode_segment(IndexSegment(array("Q", range(begin, begin + 64)), zeros), head)))
        if len(effects) == 2000:
            while kv.full:
                await kv.room()
            kv.apply(effects)
            effects = []
    for group in range(blocks // GROUP_BLOCKS):
        deltas = array("I", [] if group % 2 else [GROUP_BLOCKS - 1 << 13])
        effects.append((delta_key(1 + group), encode_deltas(deltas, GROUP_BLOCKS)))
        if group % 2:
            effects.append((group_key(1 + group), encode_bitmap((1 << GROUP_BLOCKS) - 1)))
        if group % 1000 == 999:
            kv.apply(effects)
            effects = []
    kv.apply(effects)
    await kv.checkpoint()
    await kv.close()


async def _start_s(path, blocks):
    """Seconds from the start to the first answered read, after a crash under a write load."""
    store = await open_chunk_store(path)
    assert store.status()["used_bytes"] == blocks * 4096
    for number in range(2000):
        await put(store, 5_000_000 + number, 0, 0, b"x" * 5000)
    await store.abandon()
    begun = time.perf_counter()
    store = await open_chunk_store(path)
    assert await content(store, 5_000_001, 0, 5000) == b"x" * 5000
    passed = time.perf_counter() - begun
    assert store.status()["used_bytes"] == (blocks + 4000) * 4096
    await store.abandon()
    return passed


def test_start_after_a_crash_rebuilds_no_state(tmp_path):
    async def run():
        blocks = 60 * GROUP_BLOCKS
        await _fill(tmp_path / "t", blocks)
        assert await _start_s(tmp_path / "t", blocks) < 5

    asyncio.run(run())


@pytest.mark.soak
def test_start_time_does_not_grow_with_the_block_count(tmp_path):
    async def run():
        found = {}
        for groups in (1221, 12207):
            path = tmp_path / str(groups)
            await _fill(path, groups * GROUP_BLOCKS)
            found[groups] = await _start_s(path, groups * GROUP_BLOCKS)
            print(f"{groups * GROUP_BLOCKS} blocks: {found[groups]:.2f} s")
        assert found[1221] <= 5 and found[12207] <= 2 * max(found[1221], 0.5)

    asyncio.run(run())


# -- waiting for a drive ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [True, False])
def test_concurrent_batches_get_their_own_bytes(tmp_path, ring):
    path = tmp_path / "data"
    blob = random.Random(3).randbytes(4 * MIB)
    path.write_bytes(blob)

    async def run():
        device = FileDevice(str(path), uring=ring)
        if ring and device.read_path != "io_uring":
            await device.close()
            pytest.skip("io_uring is not available here")

        async def batch(seed):
            chance = random.Random(seed)
            offsets = [chance.randrange(1000) * 4096 for _ in range(100)]
            lengths = [4096 * chance.randrange(1, 5) for _ in offsets]
            positions = [sum(lengths[:at]) for at in range(100)]
            into = device.buffer(sum(lengths))
            assert await device.read(offsets, lengths, positions, into) == [None] * 100
            for offset, length, position in zip(offsets, lengths, positions, strict=True):
                assert into[position : position + length] == blob[offset : offset + length]

        await asyncio.gather(*[batch(seed) for seed in range(20)])
        bad = await device.read([0, 100 * MIB], [4096, 4096], [0, 4096], device.buffer(8192))
        assert bad[0] is None and isinstance(bad[1], errors.DriveFailed)
        await device.close()

    asyncio.run(run())


def test_cancelled_batch_does_not_disturb_others(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(MIB))

    async def run():
        device = FileDevice(str(path))
        places = list(range(0, 50 * 4096, 4096))
        gone = asyncio.ensure_future(device.read(places, [4096] * 50, places, device.buffer(50 * 4096)))
        await asyncio.sleep(0)
        gone.cancel()
        assert await device.read([4096], [4096], [0], device.buffer(4096)) == [None]
        await device.close()

    asyncio.run(run())


def test_compiled_and_python_loops_find_the_same(tmp_path):
    path = tmp_path / "data"
    blob = random.Random(4).randbytes(MIB)
    path.write_bytes(blob)

    async def run():
        device = FileDevice(str(path))
        offsets, lengths, positions = (
            [0, 8192, 1 << 30, 4096],
            [4096, 8192, 4096, 4096],
            [4096, 8192, 16384, 0],
        )
        one, two = device.buffer(20480), device.buffer(20480)
        assert device.read_now(offsets, lengths, positions, one) == [2]
        assert blockio_reader.read_now_plain(device.fd, offsets, lengths, positions, two) == [2]
        assert one[:16384] == two[:16384] == blob[4096:8192] + blob[:4096] + blob[8192:16384]
        if uring_reader.compiled is not None:
            with pytest.raises(ValueError):
                uring_reader.compiled.read_now(device.fd, [0], [4096], [1 << 20], one)
        await device.close()

    asyncio.run(run())


def test_threads_read_without_the_compiled_module(tmp_path, monkeypatch):
    monkeypatch.setattr(uring_reader, "compiled", None)
    create_chunk_store(tmp_path / "t", 1, "pool", 4 * MIB)

    async def run():
        store = await open_chunk_store(tmp_path / "t")
        assert store.status()["read_path"] == "executor"
        await store.close()

    asyncio.run(run())


def test_kernel_without_io_uring_is_no_error(tmp_path, monkeypatch):
    class Forbidden:
        @staticmethod
        def Ring(_entries):
            raise PermissionError(1, "forbidden")

    monkeypatch.setattr(uring_reader, "compiled", Forbidden)
    create_chunk_store(tmp_path / "t", 1, "pool", 4 * MIB)
    opening(tmp_path / "t", options=StoreOptions())


def test_buffer_is_reused_without_references():
    made = []

    def make(size):
        made.append(size)
        return bytearray(size)

    pool = BufferPool(make)
    one = pool.take(5000)
    part = one[100:200]
    two = pool.take(5000)
    two[:] = b"2" * 5000
    del one
    three = pool.take(5000)
    assert len(made) == 3 and bytes(part) == bytes(100)
    del part, two, three
    for _ in range(10):
        pool.take(60_000)
    assert len(made) == 3
