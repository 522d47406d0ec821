"""The simulated drive loses what a real one may lose, and the store over it recovers, the same for a seed."""

from __future__ import annotations

import asyncio
import math
import os
import random
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest

from nvpool.core.checksum import piece_checksums
from nvpool.core.errors import DriveFailed
from nvpool.store.chunks import block_store
from nvpool.store.disk.allocator import Allocator
from nvpool.testing.sim.drive import SimulatedDevice, SimulatedDrive
from nvpool.testing.sim.simulated_process import Killed, Process, is_death
from nvpool.testing.sim.stores import SimulatedStore
from nvpool.testing.sim.virtual_time_loop import VirtualClock, VirtualLoop

BLOCK = 4096
PLACES = range(16, 24)
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


def on_virtual_time(test):
    loop, errors = VirtualLoop(), []
    loop.set_exception_handler(lambda _, context: errors.append(context.get("exception")))
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(test(loop))
        assert all(map(is_death, errors))
        return result
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def process_on(loop) -> Process:
    return Process(loop, "target-1", "node-1", lambda process: None)


def filled(byte: int, count: int = len(PLACES)) -> list[bytes]:
    return [bytes([byte]) * BLOCK * count]


def contents(drive) -> list[int]:
    """The first byte of each place; a block that is a mixture fails."""
    blocks = [drive.block(place) for place in PLACES]
    assert all(block == block[:1] * BLOCK for block in blocks)
    return [block[0] for block in blocks]


def test_power_loss_keeps_any_part_of_unsynced_writes():
    async def test(loop):
        seen = set()
        for seed in range(60):
            drive = SimulatedDrive(64, str(seed))
            device = SimulatedDevice(drive, process_on(loop))
            device.write(filled(1), PLACES[0] * BLOCK)
            await device.sync()
            device.write(filled(2), PLACES[0] * BLOCK)
            device.write(filled(3, 4), PLACES[0] * BLOCK)
            drive.lose_power()
            found = contents(drive)
            assert set(found[:4]) <= {1, 2, 3} and set(found[4:]) <= {1, 2}
            assert contents(drive) == found
            seen.add(tuple(found))
        assert (1,) * 8 in seen and any(2 in found[:4] for found in seen)
        assert len(seen) > 20, "writes of several blocks are torn"

    on_virtual_time(test)


def test_write_during_a_sync_is_not_covered():
    async def test(loop):
        lost = 0
        for seed in range(20):
            drive = SimulatedDrive(64, str(seed))
            device = SimulatedDevice(drive, process_on(loop))
            device.write(filled(1), PLACES[0] * BLOCK)
            syncing = asyncio.ensure_future(device.sync())
            await asyncio.sleep(0)
            device.write(filled(2), PLACES[0] * BLOCK)
            await syncing
            drive.lose_power()
            assert set(contents(drive)) <= {1, 2}
            lost += 1 in contents(drive)
        assert lost

    on_virtual_time(test)


def test_failed_sync_is_not_repaired_by_the_next():
    async def test(loop):
        kept = []
        for seed in range(20):
            drive = SimulatedDrive(64, str(seed))
            device = SimulatedDevice(drive, process_on(loop))
            device.write(filled(1), PLACES[0] * BLOCK)
            drive.failing_syncs = 1
            with pytest.raises(DriveFailed):
                await device.sync()
            await device.sync()
            assert set(contents(drive)) == {1}, "the kernel still shows the bytes"
            drive.lose_power()
            kept.append(set(contents(drive)))
        assert {0} in kept

    on_virtual_time(test)


def test_process_dies_within_a_write():
    async def test(loop):
        for steps in range(1, 4):
            drive, process = SimulatedDrive(64, "1"), process_on(loop)
            process.die_after = steps
            with pytest.raises(Killed):
                SimulatedDevice(drive, process).write(filled(1), PLACES[0] * BLOCK)
            assert contents(drive) == [1] * (steps - 1) + [0] * (len(PLACES) - steps + 1)
            with pytest.raises(Killed):
                SimulatedDevice(drive, process).write(filled(2), PLACES[0] * BLOCK)

    on_virtual_time(test)


class Life:
    """A process whose work ends with it."""

    def __init__(self, loop) -> None:
        self.process = Process(loop, "target-1", "node-1", lambda process: self._work.cancel())
        self._work: asyncio.Task

    async def run(self, work):
        """Run the work until it ends; return its result, or None if the process has died."""
        self._work = asyncio.get_running_loop().create_task(work)
        await asyncio.wait([self._work])
        return self._work.result() if self.process.alive else None


class Writer:
    """Writes blocks of three files at random, and knows what they may have after a death.

    `written`: the flushed value of each block, and the later ones.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.written = defaultdict(lambda: [0])
        self.unanswered = None

    async def run(self, store) -> None:
        chance = self._chance
        while True:
            if chance.random() < 0.2:
                await store.flush()
                for values in self.written.values():
                    del values[:-1]
                continue
            inode, block, value = chance.randint(1, 3), chance.randrange(16), chance.randint(1, 255)
            self.unanswered = inode, block
            self.written[inode, block].append(value)
            content, offset = bytes([value]) * BLOCK, block * BLOCK
            await store.write(inode, 0, offset, memoryview(content), piece_checksums(content, offset))
            self.unanswered = None

    def check(self, subject: SimulatedStore, lost: bool) -> None:
        for name, values in self.written.items():
            content = subject.blocks(name[0], 0).get(name[1], bytes(BLOCK))
            assert content == content[:1] * BLOCK
            # The death of a process takes nothing that was answered.
            assert content[0] in (values if lost else values[-2 if name == self.unanswered else -1 :])
            values[:] = content[:1]
        self.unanswered = None


async def lived(loop, directory: Path, seed: int) -> list:
    """Write, flush and die at random, and check what is there after each start; return what happened."""
    chance, clock = random.Random(seed), VirtualClock(loop, str(seed))
    subject, writer = SimulatedStore(loop, 1, directory, 1 << 23, str(seed)), Writer(chance)
    starts, lost = [], False
    for _ in range(12):
        life = Life(loop)
        process = life.process
        process.die_after = chance.randint(1, 30) if chance.random() < 0.3 else None
        store = await life.run(subject.open(process, clock, lambda reason: None))
        if store is not None:  # otherwise it died in its recovery
            process.die_after = None
            writer.check(subject, lost)
            lost = False
            assert not await subject.scrubbed()
            starts.append((loop.time(), store.verifier, sorted(subject.chunks().items())))
            process.die_after = process.steps + chance.randint(1, 60)
            await life.run(writer.run(store))
        await subject.abandon()
        await asyncio.sleep(1.0)
        if chance.random() < 0.6:
            subject.lose_power()
            lost = True
    return starts


def lives(seed: int) -> list:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        return on_virtual_time(partial(lived, directory=Path(directory), seed=seed))


@pytest.mark.parametrize("seed", range(12))
def test_flushed_blocks_survive_deaths_and_power_losses(seed):
    assert lives(seed) == lives(seed), "the same for a seed"


def test_recovery_that_forgets_the_free_map_is_found(monkeypatch):
    def settle(kv, allocator, until):
        kv.apply([(key, None) for key, _ in kv.scan(b"r", b"s", 1000)])
        return 1

    monkeypatch.setattr(block_store, "settle_rejected", settle)
    with pytest.raises(AssertionError):
        for seed in range(30):
            lives(seed)


def test_block_reused_before_the_flush_is_found(monkeypatch):
    class ReusingAllocator(Allocator):
        def commit(self, transaction, sequence):
            super().commit(transaction, sequence)
            self.release(sequence, math.inf)

    monkeypatch.setattr(block_store, "Allocator", ReusingAllocator)
    with pytest.raises(AssertionError):
        for seed in range(30):
            lives(seed)
