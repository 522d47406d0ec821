"""Large writes go to free locations of the drive before the index names them: no other request waits, and a failed write
leaves no trace."""

import asyncio
import errno

import pytest

from nvpool.core.errors import NoSpace, StaleCut
from nvpool.store.disk.device import DIRECT_WRITE_BYTES
from nvpool.testing.contracts.chunk_store import content, is_sound, put, some_bytes
from tests.unit.store.chunks.test_durability import BLOCK, on_a_forgetting_drive


class Gate:
    """Blocks direct writes until it is opened."""

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
    return store.allocator.available_blocks


@on_a_forgetting_drive
async def test_requests_are_served_during_a_large_write(one):
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
async def test_blocks_of_a_cancelled_write_are_kept_until_it_ends(one):
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
async def test_truncation_during_a_large_write_wins(one):
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
async def test_refused_large_write_leaves_the_old_bytes(one):
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
async def test_crash_during_a_large_write_leaves_no_trace(one):
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
