"""Metadata shards are added and removed, real processes under a checking load on a real mount, and killed meanwhile: giver,
taker, supervisor; or the pool is checked and dumped meanwhile. No error at the application, nothing is lost, and nothing of a
removed shard is left."""

import json
import os
import random
import signal
import subprocess
import time

import pytest

from nvpool.host.pool_directory import holder_of
from nvpool.poolmap.shards.members import process_name
from nvpool.testing.env.command import NVPOOL, CommandPool, nvpool
from nvpool.testing.loads.checking import CheckingLoad, Pauses

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="a mount needs /dev/fuse and root"
    ),
]
DEADLINE_S = 180.0


class Pool(CommandPool):
    def kill(self, name):
        """The process of that name, if there is one at this moment; another is started in its place."""
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


def test_a_shard_is_added_and_the_one_with_the_root_removed_under_load(pool):
    steady = pool.mountpoint / "steady"
    steady.mkdir()
    with CheckingLoad(pool.mountpoint, threads=3, seed=1) as load, Pauses(steady) as pause:
        made = json.loads(nvpool("shard", "add", pool.path, "--wait", "--json").stdout)
        assert made["shard"] == 2
        assert {one["shard"]: one["partitions"] for one in made["shards"]} == {1: 2048, 2: 2048}
        load.goes_on()
        again = json.loads(nvpool("shard", "add", pool.path, "--number", 2, "--wait", "--json").stdout)
        assert len(again["shards"]) == 2, "one that is there is not added again"
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


def test_a_pool_is_checked_and_dumped_under_load_while_its_partitions_move(pool, tmp_path):
    looked = 0
    with CheckingLoad(pool.mountpoint, threads=3, seed=3) as load:
        for turn in range(20):
            wish = ("add",) if turn % 2 == 0 else ("remove", str(max(pool.shards())))
            command = [NVPOOL, "shard", wish[0], str(pool.path), *wish[1:], "--wait", "--json"]
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
    assert looked >= 4, "partitions were not looked at while they moved"
    load.verify()
    pool.check()


def test_killing_shards_and_the_supervisor_while_partitions_move_loses_nothing(pool):
    chance = random.Random(1)
    wishes = ("add", pool.path, "--number", 2), ("add", pool.path, "--number", 3), ("remove", pool.path, 1)
    with CheckingLoad(pool.mountpoint, threads=3, seed=2) as load:
        for wish in wishes:
            command = [NVPOOL, "shard", *map(str, wish), "--wait", "--json"]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as waiting:
                try:
                    for turn in range(4):
                        time.sleep(chance.uniform(0.2, 0.8))
                        names = [process_name(shard.id, shard.member) for shard in pool.map.shards]
                        pool.kill("supervisor" if turn == 2 else chance.choice(names))
                    waiting.wait(DEADLINE_S)
                finally:
                    waiting.kill()
            nvpool(
                "shard", *wish, "--wait"
            )  # where the supervisor was killed under the wish itself it is said again
            assert not pool.map.moves
        load.goes_on()
    load.verify()
    assert {one["shard"]: one["partitions"] for one in pool.shards().values()} == {2: 2048, 3: 2048}
    pool.check()
