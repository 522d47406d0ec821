"""Short-circuit reads on real processes: stores killed under a checking load, a mount, a pool with the feature off."""

import asyncio
import mmap
import os
import random
import struct
import subprocess

import pytest

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.programs import Program, command
from nvpool.core.units import MIB
from nvpool.store.chunks.api import LOCATION_LEASE_S
from nvpool.testing.env.pool import RealPool, end_process

ME = Caller(0, 0)
BLOCK = 4096
BLOCKS = 1024
HITS_MIN = 1000
"""Number of short-circuit reads after which the load may end."""


def block(number: int, count: int) -> bytes:
    return (struct.pack("<QQ", number, count) * 256)[:BLOCK]


async def load(pool: RealPool, kills: int, apart_s: float) -> dict:
    """Two clients write and a third one reads by the short cut, while every store is killed now and then.

    A read returns bytes that were written in that place; unless a store died lately, it is not older than the change that
    was acknowledged when the read began.
    """
    options = ClientOptions(deadline_s=40.0)
    reader, writer = (
        await Client.open(str(pool.path), "reader", options),
        await Client.open(str(pool.path), "writer", options),
    )
    loop, chance = asyncio.get_running_loop(), random.Random(3)
    acknowledged, begun = [0] * BLOCKS, [0] * BLOCKS
    killed_s = -100.0
    ended = False
    _, theirs = await writer.vfs.create(1, b"load", 0o644, os.O_RDWR, ME)
    for first in range(0, BLOCKS, 256):
        await writer.vfs.write(theirs, first * BLOCK, b"".join(block(first + at, 0) for at in range(256)))
    await writer.vfs.flush(theirs)
    handle = await reader.vfs.open(theirs.inode, os.O_RDONLY, ME)

    async def write() -> None:
        while not ended:
            first, count = chance.randrange(BLOCKS), chance.choice([1, 1, 30])
            numbers = range(first, min(first + count, BLOCKS))
            for number in numbers:
                begun[number] += 1
            now = [begun[number] for number in numbers]
            await writer.vfs.write(theirs, first * BLOCK, b"".join(map(block, numbers, now)))
            await writer.vfs.flush(theirs)
            for number, generation in zip(numbers, now, strict=True):
                acknowledged[number] = generation
            await asyncio.sleep(0.002)

    async def fill() -> None:
        """Other files come and go and use the freed blocks."""
        number = 0
        while not ended:
            number += 1
            _, made = await writer.vfs.create(1, b"other-%d" % number, 0o644, os.O_WRONLY, ME)
            await writer.vfs.write(made, 0, chance.randbytes(200_000))
            await writer.vfs.flush(made)
            await writer.vfs.release(made)
            await writer.vfs.unlink(1, b"other-%d" % number, ME)

    async def read() -> None:
        while not ended or reader.vfs.chunks.short.counters["hits"] <= HITS_MIN:
            number = chance.randrange(BLOCKS)
            low, begun_s = acknowledged[number], loop.time()
            found = reader.vfs.read_now(handle, number * BLOCK, BLOCK)
            if found is None:
                found = await reader.vfs.read(handle, number * BLOCK, BLOCK)
            its_number, generation = struct.unpack_from("<QQ", found)
            assert its_number == number and found == block(number, generation)
            assert generation <= begun[number]
            assert generation >= low or begun_s - killed_s < LOCATION_LEASE_S + 1, (generation, low)
            if not chance.randrange(8):
                await asyncio.sleep(0)

    async def kill() -> None:
        nonlocal killed_s, ended
        for _ in range(kills):
            await asyncio.sleep(apart_s)
            for name in ("target-1", "target-2"):
                end_process(pool.pid(name))
            killed_s = loop.time()
        await asyncio.sleep(LOCATION_LEASE_S + 3)
        ended = True

    try:
        async with asyncio.TaskGroup() as tasks:
            for work in (write(), fill(), read(), read(), kill()):
                tasks.create_task(work)
        counters = dict(reader.vfs.chunks.short.counters)
    finally:
        await reader.close()
        await writer.close()
    return counters


@pytest.mark.parametrize("kills, apart_s", [(3, 2.0), pytest.param(60, 2.5, marks=pytest.mark.soak)])
def test_readers_see_right_bytes_while_stores_are_killed(tmp_path, kills, apart_s):
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start()
        counters = asyncio.run(asyncio.wait_for(load(pool, kills, apart_s), 300 + kills * (apart_s + 10)))
        assert counters["hits"] > HITS_MIN and not counters["mismatches"], counters
        assert not pool.fsck()


@pytest.mark.mount
@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs /dev/fuse and root")
@pytest.mark.parametrize("words", [(), ("--no-short-circuit",)])
def test_mount_uses_the_short_cut_unless_disabled(tmp_path, words):
    place = tmp_path / "mnt"
    place.mkdir()
    with RealPool(tmp_path / "pool") as pool:
        pool.make()
        pool.start()
        mounted = subprocess.Popen(command(Program.MOUNT, "--no-holder", *words, str(pool.path), str(place)))
        try:
            pool.until(lambda: os.path.ismount(place), "it is mounted")
            content = random.Random(1).randbytes(8 * MIB)
            (place / "file").write_bytes(content)
            fd = os.open(place / "file", os.O_RDONLY | os.O_DIRECT)
            into = memoryview(mmap.mmap(-1, 16 * BLOCK))
            for at in random.Random(2).sample(range(0, 8 * MIB, 16 * BLOCK), 100):
                assert os.preadv(fd, [into], at) == len(into) and into == content[at : at + len(into)]
            data = [fd for fd in os.listdir(f"/proc/{mounted.pid}/fd") if is_data(mounted.pid, fd)]
            assert bool(data) == (not words)
            os.close(fd)
        finally:
            mounted.terminate()
            mounted.wait(120)


def is_data(pid: int, fd: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").endswith("/data")
    except OSError:
        return False


@pytest.mark.smoke
def test_node_with_short_cut_off_shares_no_drive(tmp_path):
    with RealPool(tmp_path / "pool", config="[store]\nshort_cut = false\n") as pool:
        pool.make()
        pool.start()
        fs = pool.connect()
        with fs.open("/file", "wb") as file:
            file.write(bytes(MIB))
        assert fs.read_bytes("/file") == bytes(MIB)
        assert not list((pool.path / "run").glob("*.fd")) and list((pool.path / "run").glob("*.sock"))
