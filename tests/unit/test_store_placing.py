"""A large write goes to free places of the drive before it is named: nobody waits for it, and nothing of it is left behind."""

import asyncio
import errno

import pytest
from test_store_durability import BLOCK, on_a_forgetting_drive

from nvpool.core.errors import NoSpace, StaleCut
from nvpool.store.disk.device import DIRECT_WRITE_BYTES
from nvpool.testing.contracts.chunk_store import content, is_sound, put, some_bytes


class Gate:
    """Holds back what is written past the page cache until it is opened."""

    def __init__(self, device):
        self.open = asyncio.Event()
        self._write_direct = device.write_direct
        device.write_direct = self.write_direct

    def write_direct(self, buffer, ranges):
        kept = bytes(buffer)

        async def later():
            await self.open.wait()
            await self._write_direct(kept, ranges)

        return asyncio.ensure_future(later())


def free_blocks(store) -> int:
    return store.allocator._available


@on_a_forgetting_drive
async def test_while_a_large_write_is_under_way_others_are_served(one):
    gate = Gate(one.device)
    await put(one.store, 1, 0, 0, small := some_bytes(5000))
    large = asyncio.ensure_future(put(one.store, 1, 0, 0, data := some_bytes(DIRECT_WRITE_BYTES)))
    await asyncio.sleep(0)
    await put(one.store, 1, 1, 0, some_bytes(100))
    assert await content(one.store, 1, 0, 5000) == small
    assert not large.done()
    gate.open.set()
    await large
    assert await content(one.store, 1, 0, DIRECT_WRITE_BYTES) == data
    await is_sound(one.store)


@on_a_forgetting_drive
async def test_blocks_of_a_write_that_was_given_up_are_given_out_only_when_the_drive_has_done_with_them(one):
    gate = Gate(one.device)
    before = free_blocks(one.store)
    large = asyncio.ensure_future(put(one.store, 1, 0, 0, some_bytes(DIRECT_WRITE_BYTES)))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    assert free_blocks(one.store) == before - DIRECT_WRITE_BYTES // BLOCK
    gate.open.set()
    for _ in range(100):
        await asyncio.sleep(0)
    assert free_blocks(one.store) == before
    await is_sound(one.store)


@on_a_forgetting_drive
async def test_a_cut_that_comes_while_a_large_write_is_under_way_wins(one):
    gate = Gate(one.device)
    before = free_blocks(one.store)
    large = asyncio.ensure_future(put(one.store, 1, 0, 0, some_bytes(DIRECT_WRITE_BYTES), cut=0))
    await asyncio.sleep(0)
    await one.store.cut(1, 0, 1, 20)
    gate.open.set()
    with pytest.raises(StaleCut):
        await large
    assert free_blocks(one.store) == before
    await is_sound(one.store)


@on_a_forgetting_drive
async def test_a_large_write_that_the_drive_refuses_leaves_the_old_bytes_and_no_block(one):
    await put(one.store, 1, 0, 0, data := some_bytes(DIRECT_WRITE_BYTES))
    await one.store.flush()
    before = free_blocks(one.store)
    one.device.fail_writes.append(errno.ENOSPC)
    with pytest.raises(NoSpace):
        await put(one.store, 1, 0, 0, some_bytes(DIRECT_WRITE_BYTES))
    assert free_blocks(one.store) == before
    assert await content(one.store, 1, 0, DIRECT_WRITE_BYTES) == data
    await is_sound(one.store)


@on_a_forgetting_drive
async def test_a_death_while_a_large_write_is_under_way_leaves_nothing_of_it(one):
    gate = Gate(one.device)
    await put(one.store, 1, 0, 0, data := some_bytes(5 * BLOCK))
    await one.store.flush()
    large = asyncio.ensure_future(put(one.store, 1, 0, 0, some_bytes(DIRECT_WRITE_BYTES)))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    store = await one.die()
    gate.open.set()
    assert await content(store, 1, 0, 5 * BLOCK) == data
    await is_sound(store)
