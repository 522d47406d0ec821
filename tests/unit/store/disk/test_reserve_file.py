"""Full file system below a sparse data file: writes are refused, truncations and removals work, and status reports it."""

import asyncio
import contextlib
import os
import subprocess

import pytest

from nvpool.core.checksum import block_checksums
from nvpool.core.errors import NoSpace
from nvpool.core.units import KIB, MIB
from nvpool.store.chunks.api import StoreOptions, create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.disk import reserve_file
from nvpool.store.disk.reserve_file import SpaceReserve

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/loop-control"), reason="needs root and loop devices"
)
FILES = 60


@pytest.fixture
def host(tmp_path):
    place, image = tmp_path / "fs", tmp_path / "image"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(200 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    yield place
    subprocess.run(
        ["umount", "--lazy", place], check=True
    )  # a store that a failed test left open must not keep it mounted


def eat_all_room(place):
    for number, size in enumerate((MIB, 4096, 1)):
        with open(place / f"eaten-{number}", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(size))
    assert os.statvfs(place).f_bavail == 0


async def put(store, inode, byte_count, *, cut=0):
    content = os.urandom(byte_count)
    await store.write(inode, 0, 0, memoryview(content), block_checksums(content), cut=cut)
    return content


async def fill(store, inode):
    with pytest.raises(NoSpace):
        for number in range(inode, inode + 10_000):
            await put(store, number, MIB)


@pytest.mark.parametrize("direct", (False, True))
def test_truncate_and_remove_work_on_a_full_file_system(host, monkeypatch, direct):
    monkeypatch.setattr(reserve_file, "RESERVE_BYTES", 64 * KIB)  # less than the cuts below write

    async def run():
        create_chunk_store(host / "t", 1, "pool", 512 * MIB)
        options = StoreOptions(direct=direct)
        store = await open_chunk_store(host / "t", options=options)
        contents = {inode: await put(store, inode, 2 * 4096) for inode in range(1, FILES)}
        await store.flush()
        eat_all_room(host)
        await fill(store, 1000)
        await store.tend()
        assert "make room" in store.status()["host_full"]
        for inode in contents:
            if inode == FILES // 2:  # the reserve outlasts the process
                await store.close()
                store = await open_chunk_store(host / "t", options=options)
            await store.cut(inode, 5000, 1, 20)
            if inode % 20 == 0:
                await store.tend()
        assert store.room.missing or store.status()["host_full"]
        for inode, content in contents.items():
            assert await read(store, inode) == content[:5000] + bytes(3192)
        await store.remove([*range(1, FILES), *range(1000, 1200)])
        for number in range(3):
            (host / f"eaten-{number}").unlink()
        await store.tend()
        assert store.status()["host_full"] == "" and not store.room.missing
        assert (host / "t" / "reserve").stat().st_blocks * 512 >= 64 * KIB
        async with asyncio.timeout(120):
            while True:
                try:
                    await put(store, 1, MIB, cut=1)
                    break
                except NoSpace:  # the index met the full drive too, and retries with its next checkpoint
                    await asyncio.sleep(0.1)
        await store.close()

    asyncio.run(run())


async def read(store, inode):
    from nvpool.store.chunks.api import ALL_INODES
    from nvpool.store.chunks.read_batch import READ

    batch = store.read_now(READ.pack(inode, 0, 0, 2 * 4096, 0, 0), [ALL_INODES])
    if batch.missed:
        await store.finish_read(batch)
    return b"".join(batch.payload)


def test_exhausted_reserve_is_an_error_and_no_loop(tmp_path):
    room = SpaceReserve(tmp_path / "reserve", "a test")
    room.keep()
    tries = []

    def write():
        tries.append(1)
        raise NoSpace

    with pytest.raises(NoSpace):
        room.with_reserve(write)
    assert (
        len(tries) == reserve_file.RESERVE_BYTES // reserve_file.PIECE_BYTES + 1
        and "is full" in room.full_message
    )
    room.tend()
    assert (
        not room.missing
        and not room.full_message
        and (tmp_path / "reserve").stat().st_size == reserve_file.RESERVE_BYTES
    )


def test_refusal_during_reserve_refill_is_kept(tmp_path, monkeypatch):
    room = SpaceReserve(tmp_path / "reserve", "a test")
    room.missing = True
    keep = room.keep

    def refused_meanwhile():
        keep()
        room.refused()

    monkeypatch.setattr(room, "keep", refused_meanwhile)
    room.tend()
    assert room.full and "is full" in room.full_message
    monkeypatch.setattr(room, "keep", keep)
    room.tend()
    assert not room.full
