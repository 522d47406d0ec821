"""The simulated drive loses what a real one may lose, and the store over it recovers, the same for a seed."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from nvpool.core.checksum import piece_checksums
from nvpool.core.errors import DriveFailed
from nvpool.testing.sim.drive import SimulatedDevice, SimulatedDrive
from nvpool.testing.sim.simulated_process import Killed, Process
from nvpool.testing.sim.stores import SimulatedStore
from nvpool.testing.sim.virtual_time_loop import VirtualClock, VirtualLoop

BLOCK = 4096
PLACES = range(16, 24)


def on_virtual_time(test):
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(test(loop))
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


async def lived(loop, directory: Path, seed: int) -> list:
    """Write, flush and die at random, and check what is there after each start; return what happened."""
    chance, clock = random.Random(seed), VirtualClock(loop, str(seed))
    subject = SimulatedStore(loop, 1, directory, 1 << 23, str(seed))
    written = defaultdict(lambda: [0])  # block -> what it may have: its flushed value, and the later ones
    told, unanswered, lost = [], None, False
    for _ in range(12):
        process = Process(loop, "target-1", "node-1", lambda _: opening.cancel())  # noqa: B023
        process.die_after = chance.randint(1, 30) if chance.random() < 0.3 else None
        opening = loop.create_task(subject.open(process, clock, lambda reason: None))
        await asyncio.wait([opening])
        if not process.alive:  # it died in its recovery
            await asyncio.sleep(1.0)
            if chance.random() < 0.6:
                subject.lose_power()
                lost = True
            continue
        store = opening.result()
        for name, values in written.items():
            content = subject.blocks(name[0], 0).get(name[1], bytes(BLOCK))
            assert content == content[:1] * BLOCK
            # The death of a process takes nothing that was answered.
            assert content[0] in (values if lost else values[-2 if name == unanswered else -1 :])
            values[:] = content[:1]
        unanswered, lost = None, False
        assert not await subject.scrubbed()
        told.append((loop.time(), store.verifier, sorted(subject.chunks().items())))
        process.die_after = process.steps + chance.randint(1, 60)
        with suppress(Killed):
            while True:
                if chance.random() < 0.2:
                    await store.flush()
                    for values in written.values():
                        del values[:-1]
                    continue
                inode, block, value = chance.randint(1, 3), chance.randrange(16), chance.randint(1, 255)
                unanswered = inode, block
                written[inode, block].append(value)
                content, offset = bytes([value]) * BLOCK, block * BLOCK
                await store.write(inode, 0, offset, memoryview(content), piece_checksums(content, offset))
                unanswered = None
        await subject.abandon()
        if chance.random() < 0.6:
            subject.lose_power()
            lost = True
    return told


def test_flushed_blocks_survive_deaths_and_power_losses():
    for seed in range(25):
        told = []
        for _ in range(2):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                told.append(on_virtual_time(partial(lived, directory=Path(directory), seed=seed)))
        assert told[0] == told[1], "the same for a seed"
