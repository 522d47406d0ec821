"""Simulated drive of a store: blocks with a volatile cache, and the device through which one process uses them.

The drive outlives its processes. A written block is in the cache until a sync covers it. The death of a process
takes nothing; a power loss takes any part of what is in the cache, each block by itself, so a write of several
blocks may be torn. A block that was written several times since the last sync may keep any of these versions.

A process can die before, within and after each write, and before and after each sync. Reads and syncs take
virtual time, drawn from the seed of the drive; a read returns the bytes of its last moment, so a block that is
overwritten while it is read is noticed. No thread runs. Used by `sim/stores`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nvpool.blockio.api import Outcome
from nvpool.core.checksum import ZERO_BLOCK
from nvpool.core.errors import DriveFailed, NotSupported, NvpoolError
from nvpool.core.units import BLOCK_BYTES
from nvpool.testing.sim.simulated_process import Process

COLD_SHARES = (0.0, 0.3, 1.0)
"""Share of reads that are not in the page cache of the simulated machine and wait for the drive."""
DIRECT_WRITE_BYTES = (0, BLOCK_BYTES, 2 * BLOCK_BYTES)
"""Size from which writes bypass the page cache; 0: none does. Chunks of a simulation are smaller than the large
writes of production."""
KEPT_SHARES = (0.0, 0.5, 0.9, 1.0)
"""Share of the unsynced blocks that survive a power loss."""


class _Version(NamedTuple):
    """Unsynced content of a block; `content` None: discarded."""

    number: int
    content: bytes | None


class SimulatedDrive:
    """Blocks of a drive. `chance` decides its delays and the losses."""

    def __init__(self, block_count: int, seed: str) -> None:
        self.block_count = block_count
        self.chance = random.Random(seed)
        self.cold_share = self.chance.choice(COLD_SHARES)
        self.direct_write_bytes = self.chance.choice(DIRECT_WRITE_BYTES)
        self.failing_syncs = 0
        """Number of next syncs that fail."""
        self._durable: dict[int, bytes] = {}
        self._cached: dict[int, list[_Version]] = {}
        """Versions of each block since the last sync that covered it, oldest first."""
        self._written = 0
        self._forgotten = 0
        """Last write that a failed sync covered: the kernel counts it as clean and never syncs it again."""

    def io_s(self) -> float:
        """Return the time of one access."""
        return self.chance.uniform(0.0001, 0.003)

    def block(self, place: int) -> bytes:
        """Return the content of a block as processes read it."""
        versions = self._cached.get(place)
        content = versions[-1].content if versions else self._durable.get(place)
        return ZERO_BLOCK if content is None else content

    def write(self, place: int, content: bytes | None) -> None:
        """Write one block to the cache, or discard it there."""
        if not 0 <= place < self.block_count:
            raise ValueError(f"block {place} is not on a drive of {self.block_count} blocks")
        self._written += 1
        self._cached.setdefault(place, []).append(_Version(self._written, content))

    @property
    def last_write(self) -> int:
        """Number of the last write."""
        return self._written

    def synced(self, number: int) -> None:
        """Make the writes up to this number durable."""
        for place in list(self._cached):
            versions = self._cached[place]
            covered = [version for version in versions if version.number <= number]
            if not covered or covered[-1].number <= self._forgotten:
                continue
            self._store(place, covered[-1].content)
            if len(covered) == len(versions):
                del self._cached[place]
            else:
                self._cached[place] = versions[len(covered) :]

    def sync_failed(self, number: int) -> None:
        """Forget that the writes up to this number are not durable, as the kernel does after a failed sync."""
        self._forgotten = max(self._forgotten, number)

    def lose_power(self) -> None:
        """Lose what is in the cache, or keep a part of it."""
        share = self.chance.choice(KEPT_SHARES)
        for place, versions in self._cached.items():
            if self.chance.random() < share:
                self._store(place, self.chance.choice(versions).content)
        self._cached.clear()
        self._forgotten = self._written

    def _store(self, place: int, content: bytes | None) -> None:
        if content is None:
            self._durable.pop(place, None)
        else:
            self._durable[place] = content

    def flip(self, place: int) -> None:
        """Flip one bit of a block: the medium forgets."""
        block = bytearray(self.block(place))
        block[self.chance.randrange(BLOCK_BYTES)] ^= 1 << self.chance.randrange(8)
        self._cached.pop(place, None)
        self._durable[place] = bytes(block)


class SimulatedDevice:
    """The drive as one process uses it; see `store/disk/device` for the interface."""

    read_path = writes = "simulated"
    direct = False

    def __init__(self, drive: SimulatedDrive, process: Process) -> None:
        self.lacks_room = False
        self.direct_write_bytes = drive.direct_write_bytes
        self._drive = drive
        self._process = process

    def buffer(self, byte_count: int) -> memoryview:
        """Return new memory."""
        return memoryview(bytearray(byte_count))

    def _fill(self, offset: int, length: int, position: int, into: memoryview) -> None:
        block, first = self._drive.block, offset // BLOCK_BYTES
        for number in range(length // BLOCK_BYTES):
            at = position + number * BLOCK_BYTES
            into[at : at + BLOCK_BYTES] = block(first + number)

    def read_now(
        self,
        offsets: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[int],
        into: memoryview,
        client_caches: bool = False,
    ) -> list[int]:
        """Miss a share of the reads, which the seed chooses."""
        missed, drive = [], self._drive
        for at, offset in enumerate(offsets):
            if drive.cold_share and drive.chance.random() < drive.cold_share:
                missed.append(at)
            else:
                self._fill(offset, lengths[at], positions[at], into)
        return missed

    async def read(
        self, offsets: Sequence[int], lengths: Sequence[int], positions: Sequence[int], into: memoryview
    ) -> list[NvpoolError | None]:
        """Read some time later."""
        self._process.step()
        await asyncio.sleep(self._drive.io_s())
        self._process.step()
        return self._read(offsets, lengths, positions, into)

    def begin_read(
        self,
        offsets: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[int],
        into: memoryview,
        client_caches: bool,
        on_done: Callable[[Outcome], None],
    ) -> None:
        """Read some time later, unless the process has died."""

        def end() -> None:
            if self._process.alive:
                on_done(self._read(offsets, lengths, positions, into))

        asyncio.get_running_loop().call_later(self._drive.io_s(), end)

    def _read(
        self, offsets: Sequence[int], lengths: Sequence[int], positions: Sequence[int], into: memoryview
    ) -> Outcome:
        for offset, length, position in zip(offsets, lengths, positions, strict=True):
            self._fill(offset, length, position, into)
        return [None] * len(offsets)

    def read_whole(self, offset: int, length: int) -> memoryview:
        """Read in no time."""
        into = self.buffer(length)
        self._fill(offset, length, 0, into)
        return into

    def open_for_reader(self) -> int:
        """Refuse: there is no file."""
        raise NotSupported("a simulated drive has no descriptor")

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write to the cache; the process may die before, after and between the blocks."""
        whole = b"".join(buffers)
        if len(whole) % BLOCK_BYTES or offset % BLOCK_BYTES:
            raise ValueError("a write is whole blocks")
        self._process.step()
        for at in range(0, len(whole), BLOCK_BYTES):
            if at:
                self._process.step()
            self._drive.write((offset + at) // BLOCK_BYTES, whole[at : at + BLOCK_BYTES])
        self._process.step()

    def write_direct(self, buffer: memoryview, ranges: Sequence[tuple[int, int]]) -> asyncio.Future[None]:
        """Write one range after the other, each some time later, with the bytes of that moment."""
        self._process.step()
        return asyncio.get_running_loop().create_task(self._write_ranges(buffer, ranges))

    async def _write_ranges(self, buffer: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        at = 0
        for offset, length in ranges:
            await asyncio.sleep(self._drive.io_s())
            self.write([buffer[at : at + length]], offset)
            at += length

    async def sync(self) -> None:
        """Make durable, some time later, the writes before this call."""
        self._process.step()
        number = self._drive.last_write
        await asyncio.sleep(self._drive.io_s())
        self._process.step()
        if self._drive.failing_syncs:
            self._drive.failing_syncs -= 1
            self._drive.sync_failed(number)
            raise DriveFailed("the simulated drive fails to sync")
        self._drive.synced(number)
        self._process.step()

    async def discard(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Discard some time later; like a write, this is durable only after a sync."""
        self._process.step()
        await asyncio.sleep(self._drive.io_s())
        self._process.step()
        for offset, length in ranges:
            for place in range(offset // BLOCK_BYTES, (offset + length) // BLOCK_BYTES):
                self._drive.write(place, None)

    async def close(self) -> None:
        """Do nothing: the drive stays."""
