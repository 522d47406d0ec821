"""A handful of simulated pools on every run; `make sim SEEDS=1000` runs more. And that a simulation would see what is wrong."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from nvpool.kv.memory import MemoryKv
from nvpool.store.memory import MemoryChunkStore
from nvpool.testing.sim import pool as sim_pool
from nvpool.testing.sim.loop import Stuck, VirtualLoop
from nvpool.testing.sim.scenario import simulate

SEEDS = range(1, 13)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_violated(seed):
    problems, done = simulate(seed)
    assert not problems
    assert min(done["writes"], done["reads"], done["names"]) > 20 and done["deaths"] + done["cuts"] > 0


def test_the_same_seed_does_the_same_in_another_process():
    said = [subprocess.run([sys.executable, "-m", "nvpool.testing.sim.scenario", "4711"], capture_output=True, text=True,
                           timeout=240, env={"PYTHONHASHSEED": str(number)}, check=True).stdout for number in (1, 2)]
    assert said[0] == said[1] and "frames" in said[0]


def violations(many: int = 30) -> list[str]:
    for seed in range(1, many):
        problems, _ = simulate(seed)
        if problems:
            return problems
    return []


def test_a_store_that_forgets_acknowledged_writes_when_it_dies_is_found(monkeypatch):
    class Forgetful(MemoryChunkStore):
        async def flush(self):
            pass  # claims it

    def buried(self, process, before=sim_pool.SimPool._died):
        if process.name.startswith("target"):
            self.stores[int(process.name[7:])].crash()
        before(self, process)

    monkeypatch.setattr(sim_pool, "MemoryChunkStore", Forgetful)
    monkeypatch.setattr(sim_pool.SimPool, "_died", buried)
    assert any("block" in problem for problem in violations())


def test_a_shard_that_forgets_acknowledged_names_when_it_dies_is_found(monkeypatch):
    class Forgetful(MemoryKv):
        def forget(self) -> None:
            self.crash(max(self._synced_sequence, self._sequence - 2))

    def buried(self, process, before=sim_pool.SimPool._died):
        if process.name.startswith("meta"):
            self.kv.forget()
        before(self, process)

    monkeypatch.setattr(sim_pool, "MemoryKv", Forgetful)
    monkeypatch.setattr(sim_pool.SimPool, "_died", buried)
    assert violations()


def test_waiting_for_what_never_comes_is_found_at_once():
    async def wait() -> None:
        await asyncio.sleep(3600)
        await asyncio.get_running_loop().create_future()

    loop = VirtualLoop()
    with pytest.raises(Stuck):
        loop.run_until_complete(wait())
    assert loop.time() >= 3600
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
