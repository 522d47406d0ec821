"""kill -9 of any daemon at any moment under a checking load on a real mount.

No acknowledged change is missing, nothing is restarted by hand, the mount continues by itself, and fsck is clean.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from nvpool.testing.env.nvpool_command import NVPOOL, nvpool
from nvpool.testing.loads.data_verification import CheckingLoad

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="a mount needs /dev/fuse and root"
    ),
]


@pytest.fixture
def pool(tmp_path_factory):
    top = Path("/tmp") / f"nvpool-kill-{os.getpid()}"
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir()
    pool, mountpoint = top / "p", top / "m"
    nvpool("dev", "up", pool, "--drives", 2, "--mount", mountpoint)
    try:
        yield pool, mountpoint
    finally:
        nvpool("dev", "down", pool)
        shutil.rmtree(top)


def processes(pool):
    return json.loads(nvpool("status", pool, "--json", check=False).stdout)["processes"]


def wait_until_serving(pool, count, seconds=240):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done = nvpool("status", pool, "--json", check=False)
        if done.stdout.startswith("{"):
            found = [
                process
                for process in json.loads(done.stdout).get("processes", ())
                if process["role"] != "holder"
            ]
            if len(found) == count and all(p["state"] == "serving" for p in found):
                return found
        time.sleep(0.1)
    raise AssertionError(f"not all {count} processes serve after {seconds} s: {done.stdout}{done.stderr}")


def kill_under_load(pool, mountpoint, kills, seed):
    chance = random.Random(seed)
    count = len(wait_until_serving(pool, 5))
    with CheckingLoad(mountpoint, threads=3, seed=seed) as load:
        for _ in range(kills):
            time.sleep(chance.uniform(0.1, 0.8))
            victims = [p for p in wait_until_serving(pool, count) if p["role"] != "mount"]
            os.kill(chance.choice(victims)["pid"], signal.SIGKILL)
        wait_until_serving(pool, count)
        load.goes_on()  # after the last kill, too
    load.verify()
    found = nvpool("fsck", pool, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_kills_of_any_daemon_lose_nothing(pool):
    kill_under_load(*pool, kills=8, seed=1)


@pytest.mark.smoke
def test_one_command_restarts_a_killed_pool(pool):
    pool, mountpoint = pool
    found = wait_until_serving(pool, 5)
    # Started before the load, and signalled later: a program started now would first close its copies of
    # the load's open files, and closing a written file waits for the pool.
    starter = subprocess.Popen(
        ["sh", "-c", f"read go && exec {NVPOOL} dev up {pool}"],
        stdin=subprocess.PIPE,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with CheckingLoad(mountpoint, threads=2, seed=5) as load:
        load.goes_on()
        for process in sorted(found, key=lambda p: p["role"] != "supervisor"):
            if process["role"] != "mount":
                os.kill(process["pid"], signal.SIGKILL)
        errors = starter.communicate("go\n", timeout=240)[1]
        assert starter.returncode == 0, errors
        wait_until_serving(pool, 5)
        load.goes_on()
    load.verify()
    assert nvpool("fsck", pool).returncode == 0


@pytest.mark.soak
def test_hundreds_of_kills_lose_nothing(pool):
    kill_under_load(*pool, kills=200, seed=7)
