"""Power loss of a whole pool: real daemons write under the recorder, which rebuilds possible states of the drive.

Each rebuilt directory must open, be clean, and have everything that was synced.
"""

import asyncio
import os
import random
import shutil
import subprocess
import sys

import pytest

from nvpool.client.state.vfs_types import Caller
from nvpool.core.units import MIB
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.env.pool import RealPool, opened, problems_of
from nvpool.testing.faults.power_loss import PowerLoss
from nvpool.testing.faults.preload import PreloadFaults
from nvpool.testing.loads.crash_history import CrashHistory, read_tree


async def inspect_tree(directory, history):
    """(problems of fsck, tree) of a rebuilt pool."""
    async with opened(directory) as local:
        client = await local.client()
        tree = await read_tree(AsyncFileSystem(client, Caller(0, 0)), history.workers)
        return await problems_of(client), tree


def cut_power(loss, history, at_ns, seed, into):
    """Rebuild, open and check; and once more: the result of the recovery must survive too."""
    loss.rebuild(into, at_ns, seed)
    for _ in range(2):
        problems, tree = asyncio.run(inspect_tree(into, history))
        wrong = history.judge(tree, at_ns)
        assert not problems and not wrong, f"power lost at {at_ns}, seed {seed}: {problems} {wrong}"


def write_path(directory):
    try:
        os.close(os.open(directory / "pool" / "targets" / "1" / "data", os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return "cached"
    return "direct"


def record_history(tmp_path, seed, seconds, workers, kills=0):
    with RealPool(
        tmp_path / "pool", sizes=(256 * MIB, 384 * MIB)
    ) as pool:  # space for all large writes of a long load
        pool.make()
        faults = PreloadFaults.create(pool.path, tmp_path / "work")
        try:
            pool.start(faults.environment())
            load = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "nvpool.testing.loads.crash_history",
                    str(pool.path),
                    str(seed),
                    str(seconds),
                    str(workers),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                chance = random.Random(seed)
                for _ in range(kills):
                    pool.wait()
                    os.kill(pool.pid(chance.choice(("meta-1", "target-1", "target-2"))), 9)
                out, said = load.communicate(timeout=seconds + 240)
            finally:
                load.kill()
            assert load.returncode == 0, said + pool.said()
            assert all(
                process["writes"] == write_path(tmp_path)
                for process in pool.wait()["processes"]
                if process["role"] == "store"
            ), "large writes did not go past the page cache as they do without faults"
        finally:
            faults.close()
    history = CrashHistory(out)
    assert len(history.syncs) > 5 and len(history.workers) == workers
    return PowerLoss(pool.path, faults.base, faults.log), history


def moments(loss, history, count, seed):
    """Half of the moments anywhere in the load, half at one of its records: between two writes of a checkpoint, for example."""
    chance = random.Random(seed)
    first, last = history.operations[0]["begin"], history.operations[-1]["end"]
    records = [record.time_ns for record in loss.records if first < record.time_ns < last]
    return [chance.choice(records) if number % 2 else chance.randint(first, last) for number in range(count)]


def lose_power(tmp_path, seed, seconds, workers, cuts, kills=0):
    loss, history = record_history(tmp_path, seed, seconds, workers, kills)
    for number, at_ns in enumerate(moments(loss, history, cuts, seed)):
        cut_power(loss, history, at_ns, seed * 10_000 + number, tmp_path / "state")
    shutil.rmtree(tmp_path)


def test_synced_data_survives_a_power_loss(tmp_path):
    lose_power(tmp_path, seed=1, seconds=2.0, workers=2, cuts=8)


async def is_sound(directory):
    async with opened(directory) as local:
        client = await local.client()
        tree = AsyncFileSystem(client, Caller(0, 0))
        await tree.write_bytes("/first", b"written")
        assert await tree.read_bytes("/first") == b"written" and await problems_of(client) == []


def create_and_lose_power(tmp_path, seed, cuts):
    """The same command again creates the pool, or reports that it exists; then the pool serves."""
    root = tmp_path / "root"
    root.mkdir()
    faults = PreloadFaults.create(root, tmp_path / "work")
    assert RealPool(root / "pool").make(faults.environment()).returncode == 0
    faults.close()
    loss, chance = PowerLoss(root, faults.base, faults.log), random.Random(seed)
    whole = 0
    for number in range(cuts):
        state = tmp_path / "state"
        at_ns = loss.times()[1] if number == cuts - 1 else chance.choice(loss.records).time_ns
        loss.rebuild(state, at_ns, seed * 1000 + number)
        done = RealPool(state / "pool").make({})
        assert done.returncode == 0 or "holds a pool already" in done.stdout, (
            f"cut {number}: {done.stdout}{done.stderr}"
        )
        whole += bool(done.returncode)
        asyncio.run(is_sound(state / "pool"))
    assert 0 < whole < cuts


def test_power_loss_during_creation_leaves_a_whole_pool_or_none(tmp_path):
    create_and_lose_power(tmp_path, seed=1, cuts=5)


@pytest.mark.smoke
def test_creation_that_died_early_can_be_repeated(tmp_path):
    pool = RealPool(tmp_path / "pool")
    pool.path.mkdir()
    (pool.path / ".FORMAT.4711").write_text("nvpool pool be")
    pool.make()
    assert pool.directory.exists() and not list(pool.path.glob(".FORMAT*"))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
def test_power_loss_at_any_moment_of_creation(tmp_path, seed):
    create_and_lose_power(tmp_path, seed, cuts=150)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_synced_data_survives_power_loss_at_many_moments(tmp_path, seed):
    lose_power(tmp_path, seed, seconds=6.0, workers=3, cuts=60)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20, 26))
def test_kills_and_a_power_loss_lose_nothing_synced(tmp_path, seed):
    lose_power(tmp_path, seed, seconds=8.0, workers=3, cuts=60, kills=5)
