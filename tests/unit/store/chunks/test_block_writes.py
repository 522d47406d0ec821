"""Writes of the block store: the branch for the first block of a chunk, and staged blocks."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from nvpool.core.checksum import piece_checksums
from nvpool.core.clock import ManualClock
from nvpool.core.errors import NoSpace, StaleEpoch
from nvpool.core.ids import RequestId
from nvpool.store.chunk_write import ChunkWrite
from nvpool.store.chunks import block_store
from nvpool.store.chunks.api import MustWait, create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.disk.allocator import Allocator

BLOCK = bytes(range(256)) * 16
OWN_KEYS = (b"F", b"V")
"""Numbers and verifier of the index, which differ between stores."""


class Searching(Allocator):
    """An allocator that searches for each block: every write takes the general way."""

    def find_block(self):
        return 0


@asynccontextmanager
async def opened(path, allocator=Allocator, size=64 << 20):
    create_chunk_store(path, 1, "pool", size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_store, "Allocator", allocator)
        store = await open_chunk_store(path, 1, clock=ManualClock())
    store.allocator.is_used(0)
    try:
        yield store
    finally:
        await store.close()


def write_of(inode=1, index=0, offset=0, data=BLOCK, *, cut=0, request=(9, 1, 1), table=1, checksums=None):
    sums = piece_checksums(data, offset) if checksums is None else checksums
    return ChunkWrite(table, inode, index, offset, memoryview(data), sums, cut, RequestId(*request))


def state(store):
    """Index, chunks and free map."""
    allocator = store.allocator
    return {
        "index": [pair for pair in store.kv.scan(b"\0", b"\xff", 1 << 20) if pair[0] not in OWN_KEYS],
        "chunks": {
            name: (one.version, one.cut, one.requests, one.table)
            for name, one in {**store.index.old, **store.index.young}.items()
            if one.version
        },
        "free": (allocator.used_blocks, allocator.available_blocks, allocator.spare.tolist()),
        "held": allocator.held_masks,
        "groups": {n: (one.used, one.deltas.tolist()) for n, one in allocator.cached_groups.items()},
        "written": (store.written_bytes, store.write_count),
        "stamps": bytes(store.location_leases.stamps),
    }


@pytest.mark.parametrize("seed", range(4))
def test_first_block_is_written_as_by_the_general_way(tmp_path, seed):
    async def scene():
        dice = random.Random(seed)
        async with opened(tmp_path / "a") as one, opened(tmp_path / "b", Searching) as other:
            for step in range(300):
                inode = dice.randrange(1, 120)
                data = dice.choice((BLOCK, dice.randbytes(4096), dice.randbytes(dice.randrange(1, 4096))))
                write = write_of(
                    inode,
                    dice.choice((0, 0, 3)),
                    dice.choice((0, 0, 0, 4096 - len(data), 4096)),
                    data,
                    cut=step,
                    request=(9, dice.randrange(3), step),
                    table=dice.choice((1, 2, 0)),
                )
                fate = dice.random()
                for store in (one, other):
                    if fate < 0.05:
                        await store.remove([inode])
                    elif fate < 0.1:
                        await store.flush()
                    elif fate < 0.3:
                        placed = store.writer.prepare_now(write)
                        store.writer.write_now(write, 1, 0, placed)
                        store.writer.drop_placed(placed)
                    else:
                        store.writer.write_now(write, 1, 0)
                assert state(one) == state(other), step

    asyncio.run(scene())


def test_prepared_block_is_held_until_it_is_named_or_dropped(tmp_path):
    async def scene():
        async with opened(tmp_path / "t") as store:
            free, allocator = store.allocator.available_blocks, store.allocator
            placed = store.writer.prepare_now(write_of())
            assert allocator.available_blocks == free - 1 and allocator.held_masks
            assert placed.block and placed.block != store.writer.prepare_now(write_of(inode=2)).block
            store.writer.drop_placed(placed)
            store.writer.drop_placed(placed)
            assert allocator.available_blocks == free - 1
            with pytest.raises(StaleEpoch):
                store.writer.write_now(write_of(), 1, 1 << 32 | 1, store.writer.prepare_now(write_of())) and (
                    store.writer.write_now(write_of(request=(9, 1, 2)), 1, 1 << 32 | 1)
                )

    asyncio.run(scene())


@pytest.mark.parametrize("is_prepared", [False, True])
def test_refused_change_frees_the_block(tmp_path, is_prepared):
    async def scene():
        async with opened(tmp_path / "t") as store:
            before, apply = state(store), store.kv.apply

            def refuse(effects, **_):
                raise NoSpace("full")

            placed = store.writer.prepare_now(write_of()) if is_prepared else None
            store.kv.apply = refuse
            with pytest.raises(NoSpace):
                store.writer.write_now(write_of(), 1, 0, placed)
            store.kv.apply = apply
            after = state(store)
            assert all(after[part] == before[part] for part in ("index", "chunks", "free", "held", "groups"))
            assert store.writer.write_now(write_of(), 1, 0, placed) == 1 << 32 | 1
            assert not store.allocator.held_masks

    asyncio.run(scene())


def test_block_prepared_for_an_older_version_is_prepared_again(tmp_path):
    async def scene():
        async with opened(tmp_path / "t") as store:
            write = write_of(data=b"new" * 100, offset=50)
            placed = store.writer.prepare_now(write)
            store.writer.write_now(write_of(data=b"x" * 20), 1, 0)
            assert store.writer.write_now(
                write_of(data=b"new" * 100, offset=50, request=(9, 2, 2)), 1, 0, placed
            )
            (place,) = store.index.places(store.index.chunk(1, 0), 0, 1)
            found = bytes(store.device.read_whole(place << 12, 4096))
            assert found == b"x" * 20 + bytes(30) + b"new" * 100 + bytes(4096 - 350)
            assert not store.allocator.held_masks or store.allocator.held_blocks

    asyncio.run(scene())


def test_full_store_waits_or_refuses_in_both_ways(tmp_path):
    async def scene():
        async with opened(tmp_path / "t", size=2 << 20) as store:
            inode = 0
            with pytest.raises(NoSpace):
                while True:
                    inode += 1
                    store.writer.write_now(write_of(inode), 1, 0)
            store.writer.write_now(write_of(1, data=b"over", request=(9, 1, 2)), 1, 0)
            with pytest.raises((NoSpace, MustWait)):
                store.writer.prepare_now(write_of(inode))
            assert not store.index.chunk(inode, 0).version

    asyncio.run(scene())
