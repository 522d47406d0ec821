"""The contract of chunk stores: the fake, blocks over a device with volatile cache, a data file, a raw device."""

import asyncio
import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from nvpool.core.clock import ManualClock
from nvpool.core.errors import DriveFailed
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.store.chunks.api import StoreOptions, create_chunk_store
from nvpool.store.chunks.block_store import BlockChunkStore, open_chunk_store
from nvpool.store.chunks.memory_store import MemoryChunkStore
from nvpool.store.chunks.recovery import ReplayCheck
from nvpool.store.disk.device import MemoryDevice
from nvpool.testing.contracts.chunk_ranges import CHECKS as RANGE_CHECKS
from nvpool.testing.contracts.chunk_store import CAPACITY_BYTES, CHECKS
from nvpool.testing.contracts.chunk_transfer import CHECKS as WHOLE_CHECKS


class FakeSubject:
    async def open(self):
        self.store = MemoryChunkStore(CAPACITY_BYTES)

    async def restart(self):
        pass

    async def lose_power(self):
        self.store.crash()

    def fail_next_sync(self):
        self.store.fail_syncs = 1

    def fail_next_write(self):
        self.store.fail_writes.append(DriveFailed("asked for by the test"))

    def flip(self, inode, index, block):
        self.store.flip(inode, index, block)

    async def close(self):
        pass


class ForgettingSubject:
    """Blocks over a device that loses unsynced writes, with the real index.

    The journal of the index is never lost, so a power loss leaves records whose blocks are missing.
    """

    cold = False

    async def open(self):
        self.directory = Path(tempfile.mkdtemp(prefix="store-"))
        self.device = MemoryDevice(CAPACITY_BYTES)
        self.device.cold = self.cold
        await self.begin()

    async def begin(self):
        self.store = BlockChunkStore(
            self.device,
            CAPACITY_BYTES // 4096,
            target=1,
            options=StoreOptions(cached_segments=64),
            clock=ManualClock(),
        )
        options = LmdbOptions(
            sync_interval_s=30, checkpoint_interval_s=30, journal_bytes=1 << 20, map_bytes=1 << 20
        )
        kv = await LmdbKv.open(
            self.directory / "index",
            options,
            before_checkpoint=self.store.sync_data,
            on_replay=ReplayCheck(self.device.read_whole),
            on_fence=self.store.fence,
        )
        await self.store.attach(kv)

    async def restart(self):
        await self.store.abandon()
        await self.begin()

    async def lose_power(self):
        await self.store.abandon()
        self.device.crash()
        await self.begin()

    def fail_next_sync(self):
        self.device.fail_syncs.append(errno.EIO)

    def fail_next_write(self):
        self.device.fail_writes.append(errno.EIO)

    def flip(self, inode, index, block):
        self.device.flip(place_of(self.store, inode, index, block))

    async def close(self):
        await self.store.abandon()
        shutil.rmtree(self.directory)


class ColdSubject(ForgettingSubject):
    """As ForgettingSubject, and no read is answered without waiting."""

    cold = True


def place_of(store, inode, index, block):
    return store.index.segment(store.index.chunk(inode, index), block >> 6).disk[block & 63]


class DirectorySubject:
    options = StoreOptions()

    async def open(self):
        self.directory = Path(tempfile.mkdtemp(prefix="store-"))
        self.make()
        self.store = await open_chunk_store(self.directory / "t", 1, self.options)

    def make(self):
        create_chunk_store(self.directory / "t", 1, "pool", CAPACITY_BYTES)

    async def restart(self):
        await self.store.abandon()
        self.store = await open_chunk_store(self.directory / "t", 1, self.options)

    lose_power = restart

    def fail_next_sync(self):
        async def fail():
            raise DriveFailed("asked for by the test")

        self.store.device.sync = fail

    def fail_next_write(self):
        device, write = self.store.device, self.store.device.write

        def fail(buffers, offset):
            device.write = write
            write([bytes(4096)], offset)
            raise DriveFailed("asked for by the test")

        device.write = fail

    def flip(self, inode, index, block):
        place = place_of(self.store, inode, index, block) * 4096
        fd = os.open(self.store.path, os.O_RDWR)
        byte = os.pread(fd, 1, place + 9)[0]
        os.pwrite(fd, bytes([byte ^ 1]), place + 9)
        os.fsync(fd)
        os.close(fd)

    async def close(self):
        await self.store.abandon()
        shutil.rmtree(self.directory)


class ThreadsSubject(DirectorySubject):
    options = StoreOptions(uring=False)


class DirectSubject(DirectorySubject):
    options = StoreOptions(direct=True)


class RawDeviceSubject(DirectorySubject):
    """A loop device."""

    loop = ""

    def make(self):
        image = self.directory / "image"
        with image.open("wb") as file:
            file.truncate(CAPACITY_BYTES)
        made = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True)
        if made.returncode:
            pytest.skip("no loop device is to be had here")
        self.loop = made.stdout.strip()
        create_chunk_store(self.directory / "t", 1, "pool", device=self.loop)

    async def close(self):
        if self.loop:
            try:
                await self.store.abandon()
            finally:
                subprocess.run(["losetup", "--detach", self.loop], check=True)  # noqa: ASYNC221
        shutil.rmtree(self.directory)


SUBJECTS = [
    FakeSubject,
    ForgettingSubject,
    DirectorySubject,
    DirectSubject,
    ColdSubject,
    ThreadsSubject,
    RawDeviceSubject,
]
ALL_CHECKS = [*CHECKS, *RANGE_CHECKS, *WHOLE_CHECKS]


@pytest.mark.few(4 * len(ALL_CHECKS))  # the first four subjects
@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_stores_meet_the_contract(subject, check):
    async def run():
        one = subject()
        await one.open()
        try:
            await check(one)
        finally:
            await one.close()

    asyncio.run(run())
