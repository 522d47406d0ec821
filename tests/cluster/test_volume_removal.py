"""`nvpool volume rm --wait` on a real pool: interrupted by Ctrl-C, and repeated."""

import json
import select
import signal
import subprocess

import pytest

from nvpool.core import programs
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.testing.env.pool import RealPool

DIRECTORIES = 4000
"""Each takes a step or two of the removal: some seconds for all."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with RealPool(tmp_path_factory.mktemp("removal") / "pool") as made:
        made.make()
        made.start()
        yield made


@pytest.fixture
def large(pool):
    files = pool.connect()
    files.volumes.create("large")
    for number in range(DIRECTORIES):
        files.mkdir(f"/volumes/large/{number}")
    return files.volumes


def command(pool, *words):
    return programs.command(programs.Program.CLI, "volume", words[0], str(pool.path), *words[1:])


def nvpool(pool, *words, code=0):
    done = subprocess.run(
        command(pool, *words), capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code, f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def shown(pool):
    return {one["name"]: one for one in json.loads(nvpool(pool, "ls", "--all", "--json").stdout)}


def until(holds, wait_s=60.0):
    deadline_s = SYSTEM_CLOCK.boottime_s() + wait_s
    while not holds():
        assert SYSTEM_CLOCK.boottime_s() < deadline_s
        select.select([], [], [], 0.02)


@pytest.mark.smoke
def test_removed_volume_is_gone_and_its_name_is_free(pool):
    for _ in range(2):
        files = pool.connect()
        files.volumes.create("small")
        files.mkdir("/volumes/small/d")
        removed = json.loads(nvpool(pool, "rm", "small", "--wait", "--json").stdout)
        assert removed == {"name": "small", "removed": True, "files_left": 0}
        assert "small" not in shown(pool)
    assert "there is no volume small" in nvpool(pool, "rm", "small", code=1).stderr


def test_interrupted_removal_continues(pool, large):
    waiting = subprocess.Popen(
        command(pool, "rm", "large", "--wait"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: large.list(removing=True) and not large.list())
        progress = waiting.stderr.readline()  # a second later
        assert f"of {DIRECTORIES} files left" in progress
        waiting.send_signal(signal.SIGINT)
        out, said = waiting.communicate(timeout=30)
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 130 and not out
    assert "its files are still being deleted. Run the command again to wait" in said
    assert said.endswith("interrupted\n") and "Traceback" not in said
    (left,) = large.list(removing=True)
    assert left.state == "removing" and left.name == "large"
    until(
        lambda: large.removing(left.inode) is None or large.removing(left.inode).files_used < left.files_used
    )
    assert shown(pool)["large"]["state"] == "removing"
    again = nvpool(pool, "rm", "large", "--wait", "--json")
    assert json.loads(again.stdout) == {"name": "large", "removed": True, "files_left": 0}
    assert large.list(removing=True) == []
    assert "there is no volume large" in nvpool(pool, "rm", "large", "--wait", code=1).stderr


def test_new_volume_of_the_same_name_is_not_mistaken(pool, large):
    nvpool(pool, "rm", "large")
    (first,) = large.list(removing=True)
    assert "there is no volume large" in nvpool(pool, "rm", "large", code=1).stderr
    made = large.create("large")
    assert json.loads(nvpool(pool, "rm", "large", "--wait", "--json").stdout)["removed"]
    assert large.list() == [] and large.removing(made.inode) is None  # not the removed volume
    until(lambda: large.removing(first.inode) is None, 240.0)
