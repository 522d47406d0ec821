"""Metadata shards are added and removed under a checking load on a real mount, with kills, checks or dumps meanwhile.

Killed are source, destination and supervisor. The application sees no error, nothing is lost, and nothing of a removed
shard is left.
"""

import json
import os
import random
import signal
import subprocess
import time

import pytest

from nvpool.host.pool_directory import holder_of
from nvpool.poolmap.shards.members import process_name
from nvpool.testing.env.nvpool_command import NVPOOL, CommandPool, nvpool
from nvpool.testing.loads.data_verification import CheckingLoad, Pauses

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="a mount needs /dev/fuse and root"
    ),
]
DEADLINE_S = 180.0


class Pool(CommandPool):
    def kill(self, name):
        """Kill the process of that name, if one exists at this moment; another one is started in its place."""
        holder = holder_of(
            self.directory.lock if name == "supervisor" else self.directory.run / f"{name}.lock"
        )
        if holder is not None:
            os.kill(holder.pid, signal.SIGKILL)

    def shards(self):
        return {one["shard"]: one for one in json.loads(nvpool("shard", "ls", self.path, "--json").stdout)}


@pytest.fixture
def pool(tmp_path_factory):
    made = Pool(tmp_path_factory.mktemp("shards"))
    with made.up():
        yield made


@pytest.mark.smoke
def test_shard_is_added_and_the_root_shard_removed(pool):
    steady = pool.mountpoint / "steady"
    steady.mkdir()
    with CheckingLoad(pool.mountpoint, threads=3, seed=1) as load, Pauses(steady) as pause:
        made = json.loads(nvpool("shard", "add", pool.path, "--wait", "--json").stdout)
        assert made["shard"] == 2
        assert {one["shard"]: one["partitions"] for one in made["shards"]} == {1: 2048, 2: 2048}
        load.goes_on()
        again = json.loads(nvpool("shard", "add", pool.path, "--number", 2, "--wait", "--json").stdout)
        assert len(again["shards"]) == 2, "an existing shard is not added again"
        nvpool("shard", "remove", pool.path, 1, "--wait")
        nvpool("shard", "remove", pool.path, 1, "--wait")
        load.goes_on()
    load.verify()
    pause.verify()
    print(f"pause of {pause.longest_s:.2f} s")
    assert {number: one["partitions"] for number, one in pool.shards().items()} == {2: 4096}
    refused = nvpool("shard", "remove", pool.path, 2, check=False)
    assert refused.returncode == 1 and "last shard" in refused.stderr
    pool.check()
    assert sorted(path.name for path in (pool.path / "meta").iterdir()) == ["shard-2"]
    assert not list(pool.directory.run.glob("meta-1*"))


def test_check_and_dump_work_while_partitions_move(pool, tmp_path):
    looked = 0
    with CheckingLoad(pool.mountpoint, threads=3, seed=3) as load:
        for turn in range(20):
            request = ("add",) if turn % 2 == 0 else ("remove", str(max(pool.shards())))
            command = [NVPOOL, "shard", request[0], str(pool.path), *request[1:], "--wait", "--json"]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as moving:
                while moving.poll() is None:
                    before = pool.map.partitions
                    pool.check("--no-scrub")
                    nvpool("dump", pool.path, tmp_path / "dump")
                    looked += pool.map.partitions != before
            assert moving.returncode == 0
            if looked >= 4:
                break
        load.goes_on()
    assert looked >= 4, "too few checks while partitions moved"
    load.verify()
    pool.check()


def test_kills_while_partitions_move_lose_nothing(pool):
    chance = random.Random(1)
    requests = ("add", pool.path, "--number", 2), ("add", pool.path, "--number", 3), ("remove", pool.path, 1)
    with CheckingLoad(pool.mountpoint, threads=3, seed=2) as load:
        for request in requests:
            command = [NVPOOL, "shard", *map(str, request), "--wait", "--json"]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as waiting:
                try:
                    for turn in range(4):
                        time.sleep(chance.uniform(0.2, 0.8))
                        names = [process_name(shard.id, shard.member) for shard in pool.map.shards]
                        pool.kill("supervisor" if turn == 2 else chance.choice(names))
                    waiting.wait(DEADLINE_S)
                finally:
                    waiting.kill()
            nvpool("shard", *request, "--wait")  # a request under which the supervisor was killed is repeated
            assert not pool.map.moves
        load.goes_on()
    load.verify()
    assert {one["shard"]: one["partitions"] for one in pool.shards().values()} == {2: 2048, 3: 2048}
    pool.check()
