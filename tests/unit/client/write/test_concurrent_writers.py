"""Concurrent writers of one file: neighbours within a block, slow stores, lost replies, truncations; no byte is lost."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB, MIB
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.store import PlainStore

ME = Caller(0, 0)
WRITERS = 6
SLOT = 700  # bytes; a block is shared by several writers
ROUND = WRITERS * SLOT


async def neighbours(seed: int, steps: int, real: bool) -> None:
    dice = random.Random(seed)
    options = ClientOptions(
        deadline_s=20.0,
        fresh_s=0.0,
        attr_s=0.0,
        write_buffer_bytes=64 * KIB,
        write_flight_bytes=16 * KIB,
        write_age_s=0.0,
        read_ahead_bytes=256 * KIB,
    )

    async def plain(pool: InProcessPool, target: int) -> PlainStore:
        store = PlainStore(target, pool.grant_secret, chunks=chunks.setdefault(target, {}))
        store.fault = lambda call: dice.random() * 0.004
        return store

    chunks: dict[int, dict] = {}
    async with InProcessPool(chunk_bytes=64 * KIB, make_store=None if real else plain) as pool:
        clients = [(await pool.client(f"client {number}", options)).vfs for number in range(2)]
        _, first = await clients[0].create(ROOT_INODE, b"file", 0o644, os.O_RDWR, ME)
        rounds = 60
        expected = bytearray(rounds * ROUND)
        await clients[0].setattr(first.inode, size=len(expected), caller=ME)
        done = False

        async def write(number: int) -> None:
            vfs = clients[0]
            mine = random.Random(seed * 100 + number)
            handle = await vfs.open(first.inode, os.O_RDWR, ME)
            for _ in range(steps):
                place = mine.randrange(rounds) * ROUND + number * SLOT
                content = mine.randbytes(SLOT)
                await vfs.write(handle, place, content)
                expected[place : place + SLOT] = content
                if mine.random() < 0.2:
                    await vfs.flush(handle)
                elif mine.random() < 0.1:
                    await vfs.fsync(handle, False)
                look = mine.randrange(rounds) * ROUND + number * SLOT
                assert bytes(await vfs.read(handle, look, SLOT)) == expected[look : look + SLOT]
                into = memoryview(bytearray(SLOT))
                if mine.random() < 0.2:
                    await vfs.read_many([(handle, look, SLOT)], into)
                    assert into == expected[look : look + SLOT]
            await vfs.release(handle)

        async def disturb() -> None:
            """Another client extends and truncates the file behind all writers: every grant and cut number becomes stale."""
            handle = await clients[1].open(first.inode, os.O_RDWR, ME)
            while not done:
                await clients[1].setattr(handle.inode, size=len(expected) + 5000, caller=ME)
                await clients[1].setattr(handle.inode, size=len(expected), caller=ME)
                for store in pool.stores.values():
                    if not real and dice.random() < 0.3:
                        store.lose_answer = 1
                await clients[0].run_once()
                await asyncio.sleep(0.01)
            await clients[1].release(handle)

        disturbing = asyncio.create_task(disturb())
        try:
            await asyncio.gather(*[write(number) for number in range(WRITERS)])
        finally:
            done = True
            await disturbing
        await clients[0].flush(first)
        for vfs in clients:
            handle = await vfs.open(first.inode, os.O_RDONLY, ME)
            assert handle.size == len(expected)
            assert bytes(await vfs.read(handle, 0, MIB)) == expected
            await vfs.release(handle)
        assert clients[0].writer.held_bytes() == 0


@pytest.mark.parametrize(("seed", "real"), [(1, False), (2, False), (3, True)])
def test_neighbouring_writers_lose_nothing_during_truncations(seed, real):
    asyncio.run(asyncio.wait_for(neighbours(seed, 40, real), 120))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 60))
def test_neighbouring_writers_lose_nothing_in_a_long_run(seed):
    asyncio.run(asyncio.wait_for(neighbours(seed, 400, seed % 2 == 0), 280))


@pytest.mark.parametrize("opened_again", [False, True])
def test_listing_overtaken_by_a_flush_shows_the_new_size(opened_again):
    async def scene() -> None:
        async with InProcessPool() as pool:
            vfs = (await pool.client("one")).vfs
            attr, handle = await vfs.create(ROOT_INODE, b"file", 0o644, os.O_RDWR, ME)
            await vfs.write(handle, 0, b"written")
            answered, go_on, ask = asyncio.Event(), asyncio.Event(), vfs.pages.fetch

            async def overtaken(request):
                answer = await ask(request)
                answered.set()
                await go_on.wait()
                return answer

            vfs.pages.fetch = overtaken
            listing = asyncio.ensure_future(vfs.readdir(await vfs.opendir(ROOT_INODE), 0, 100))
            await answered.wait()
            await vfs.flush(handle)
            await vfs.release(handle)
            reading = await vfs.open(attr.inode, os.O_RDONLY, ME) if opened_again else None
            go_on.set()
            listed, _ = await listing
            assert listed.attr(listed.names.index(b"file")).size == len(b"written")
            if reading is not None:
                await vfs.release(reading)

    asyncio.run(scene())
