"""Power loss under the engine: at any moment of its writes and checkpoints, whatever pages the drive had, every synced change is there,
what is there is a beginning of the history, and the engine opens."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvpool.kv.lmdb_engine import LmdbKv, LmdbOptions
from nvpool.testing.faults.powerloss import PowerLoss
from nvpool.testing.faults.preload import Faults

WRITER = """
import asyncio, json, random, sys, time
from nvpool.kv.lmdb_engine import LmdbKv, LmdbOptions

async def main():
    kv = await LmdbKv.open("kv", LmdbOptions(map_bytes=1 << 20, checkpoint_interval_s=0.02, journal_bytes=1 << 18, layer_entries_max=150))
    chance = random.Random(int(sys.argv[1]))
    for number in range(int(sys.argv[2])):
        while kv.full:
            await kv.room()
        effects = {b"last": b"%d" % number}
        for _ in range(chance.randrange(1, 4)):
            key = b"k%03d" % chance.randrange(300)
            effects[key] = None if chance.random() < 0.2 else b"%d:" % number + bytes(chance.randrange(400))
        sequence = kv.apply(effects.items())
        if chance.random() < 0.1:
            await kv.sync(sequence)
            print(json.dumps([time.clock_gettime_ns(time.CLOCK_MONOTONIC), sequence]), flush=True)
        if chance.random() < 0.05:
            await asyncio.sleep(0.005)
asyncio.run(main())
"""


def history(seed, count):
    """The same changes as the writer's: state after each sequence number, as (last, keys)."""
    import random

    chance, state, states = random.Random(seed), {}, [{}]
    for number in range(count):
        effects = {b"last": b"%d" % number}
        for _ in range(chance.randrange(1, 4)):
            key = b"k%03d" % chance.randrange(300)
            effects[key] = None if chance.random() < 0.2 else b"%d:" % number + bytes(chance.randrange(400))
        for key, value in effects.items():
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
        states.append(dict(state))
        if chance.random() < 0.1:
            pass
        chance.random()
    return states


def run_and_lose_power(tmp_path: Path, seed: int, changes: int, cuts: int) -> None:
    root = tmp_path / "root"
    root.mkdir()

    async def make():
        kv = await LmdbKv.open(root / "kv", LmdbOptions(map_bytes=1 << 20, journal_bytes=1 << 18))
        await kv.close()

    asyncio.run(make())
    faults = Faults.create(root, tmp_path / "work")
    out = subprocess.run([sys.executable, "-c", WRITER, str(seed), str(changes)], cwd=root, env=os.environ | faults.environment(),
                         check=True, timeout=300, capture_output=True, text=True).stdout
    acknowledged = [json.loads(line) for line in out.splitlines()]
    assert len(acknowledged) > 10
    loss = PowerLoss(root, faults.base, faults.log)
    states = history(seed, changes)
    moments = [record.time_ns for record in loss.records]
    assert len(moments) > changes
    for cut in range(cuts):
        at = moments[(cut * 2 + 1) * len(moments) // (2 * cuts)]
        into = tmp_path / "state"
        loss.rebuild(into, at, seed * 1000 + cut)
        must_hold = max((sequence for time_ns, sequence in acknowledged if time_ns <= at), default=0)

        async def check(must_hold=must_hold, into=into):
            kv = await LmdbKv.open(into / "kv", LmdbOptions(map_bytes=1 << 20, journal_bytes=1 << 18))
            try:
                found = dict(kv.scan(b"", b"\xff" * 16, 10_000))
                last = int(found.get(b"last", b"-1")) + 1
                assert last >= must_hold, f"power lost at cut {cut}: {last} changes are there, {must_hold} were synced"
                assert found == states[last]
            finally:
                await kv.close()

        asyncio.run(check())


def test_synced_changes_survive_power_loss_at_any_moment(tmp_path):
    run_and_lose_power(tmp_path, seed=1, changes=600, cuts=15)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_synced_changes_survive_power_loss_at_any_of_many_moments(tmp_path, seed):
    run_and_lose_power(tmp_path, seed, changes=3000, cuts=100)
