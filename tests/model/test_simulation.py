"""A few simulated pools on every run; `make sim SEEDS=1000` runs more. test_sabotage shows which faults they find."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys

import pytest

from nvpool.core.compiled_loader import IS_PURE, PURE_VARIABLE
from nvpool.testing.sim.scenario import simulate
from nvpool.testing.sim.virtual_time_loop import Stuck, VirtualLoop
from nvpool.testing.sim.workloads.file_data import Blocks, Sizes
from nvpool.testing.sim.workloads.namespace import NamespaceWorkload
from nvpool.testing.sim.workloads.quotas import Quotas

SEEDS = range(1, 13)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_invariant_is_violated(seed):
    problems, done = simulate(seed)
    assert not problems
    # A seed in which primaries die several times in a row does few steps: seed 6 has five writes.
    assert min(done["writes"], done["reads"], done["names"]) > 3 and done["deaths"] + done["cuts"] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", (2, 3))
def test_drains_complete_under_truncations(seed):
    problems, done = simulate(
        seed,
        draining=True,
        replicas=2,
        standbys=0,
        shards=1,
        moving=False,
        etcd=False,
        kinds={"kill": 1, "cut": 1, "die": 1},
        of="target",
        only=(Blocks, Sizes),
        clients=4,
    )
    assert not problems
    assert done["drains"] > 1 and done["cuts_made"] > 10


def test_removed_volume_leaves_nothing_behind():
    problems, done = simulate(4, volumes=True, only=(Quotas,))
    assert not problems
    assert done["volumes"] > 20 and done["quotas"] and done["removed"]


def printed(seed: int, **environment: str) -> str:
    """The result of a seed in another process."""
    return subprocess.run(
        [sys.executable, "-m", "nvpool.testing.sim.scenario", str(seed)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=True,
    ).stdout


@pytest.mark.t3
def test_same_seed_repeats_in_another_process():
    said = [
        printed(4711, PYTHONHASHSEED=str(number), **{PURE_VARIABLE: str(int(IS_PURE))}) for number in (1, 2)
    ]
    assert said[0] == said[1] and "segments" in said[0]


@pytest.mark.t3
@pytest.mark.compiled
def test_compiled_code_does_what_python_does():
    """The same, in the same order, at the same time; also the requests that shards take from frames."""
    compiled, pure = [printed(27, **{PURE_VARIABLE: value}) for value in ("0", "1")]
    assert compiled == pure
    requests = re.search(r"(\d+) fast", compiled)
    assert requests is not None and int(requests[1]) > 20


def test_shards_answer_on_the_fast_path():
    problems, done = simulate(
        3,
        standbys=0,
        shards=1,
        moving=False,
        volumes=False,
        kinds={"kill": 1, "cut": 1},
        only=(NamespaceWorkload, Sizes),
    )
    assert not problems
    assert done["fast"] > 50 and done["names"] > 30


def test_clock_advances_for_a_tiny_sleep():
    async def main() -> None:
        await asyncio.sleep(1000.0)
        loop = asyncio.get_running_loop()
        begun_s, looks = loop.time(), 0
        while loop.time() == begun_s:
            await asyncio.sleep(1e-14)
            looks += 1
            assert looks < 10

    loop = VirtualLoop()
    loop.run_until_complete(main())
    loop.close()


def test_deadlock_is_reported():
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
