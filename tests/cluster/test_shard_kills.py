"""A pool of three metadata shards, real processes on a real mount.

Programs work as on one shard; shards, and primaries with standbys, are killed repeatedly while names move between them, and
each name exists once in the end.
"""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nvpool.core.errors import NvpoolError
from nvpool.poolmap.shards.members import process_name
from nvpool.testing.env.pool import RealPool, end_process

NVPOOL = str(Path(sys.executable).with_name("nvpool"))
mounted = pytest.mark.skipif(
    not os.path.exists("/dev/fuse") or os.geteuid() != 0, reason="a mount needs /dev/fuse and root"
)
SHARDS = 3
DIRECTORIES = 12
"""Spread over three shards by hash: that two of them share only one shard happens in one of a hundred thousand pools."""


def nvpool(*arguments, timeout=240):
    done = subprocess.run([NVPOOL, *map(str, arguments)], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"nvpool {arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.mount
@mounted
def test_programs_work_on_three_shards(tmp_path):
    pool, mountpoint = tmp_path / "p", tmp_path / "m"
    nvpool("dev", "up", pool, "--shards", SHARDS, "--mount", mountpoint)
    try:
        source = Path(__file__).parents[2] / "nvpool"
        script = """
            set -e
            mkdir tree copy
            tar cf - -C "$SOURCE" --exclude=__pycache__ . | tar xf - -C tree
            diff -r --exclude=__pycache__ "$SOURCE" tree
            cp -a tree/. copy
            mv tree/meta copy/store; mv copy/store/meta moved; mv moved tree/meta
            ln tree/meta/options.py copy/core/linked; mv copy/core/linked tree/kv/; test $(stat -c %h tree/kv/linked) = 2
            rm tree/kv/linked; test $(stat -c %h tree/meta/options.py) = 1
            diff -r tree copy
            if mv tree tree/meta/operations 2> /dev/null; then exit 1; fi
            git init -q work; cd work; cp -r ../tree/core .; git add .
            git -c user.name=a -c user.email=a@b commit -qm one; git mv core elsewhere
            git -c user.name=a -c user.email=a@b commit -qm two; git checkout -q HEAD~1; test -d core; git fsck --strict
            cd ..; find . -type d | wc -l; rm -rf work tree copy; test -z "$(ls -A)"
        """
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=mountpoint,
            env=os.environ | {"SOURCE": str(source)},
            capture_output=True,
            text=True,
            timeout=480,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        nvpool("fsck", pool)
    finally:
        nvpool("dev", "down", pool)


class Mover(threading.Thread):
    """Moves its files between directories and knows where each must be; creates and removes directories."""

    def __init__(self, pool, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.pool, self.number, self.stop, self.chance = pool, number, stop, random.Random(number)
        self.files = {f"{number}-{file}": 0 for file in range(4)}
        self.moves, self.error = 0, None

    def run(self) -> None:
        try:
            for name in self.files:
                self.pool.write_bytes(f"/d0/{name}", name.encode())
            while not self.stop.is_set():
                self.step()
                self.moves += 1
        except (OSError, NvpoolError) as error:
            self.error = error

    def step(self) -> None:
        name, to = self.chance.choice(list(self.files)), self.chance.randrange(DIRECTORIES)
        self.pool.rename(f"/d{self.files[name]}/{name}", f"/d{to}/{name}")
        self.files[name] = to
        if self.moves % 5 == 0:
            other = self.chance.randrange(DIRECTORIES)
            self.pool.mkdir(f"/d{to}/in {self.number}")
            self.pool.rename(f"/d{to}/in {self.number}", f"/d{other}/of {self.number}")
            self.pool.rmdir(f"/d{other}/of {self.number}")


def move_while_killed(made: RealPool, kills: int, members: int) -> None:
    root = made.connect(120.0)
    for number in range(DIRECTORIES):
        root.mkdir(f"/d{number}")
    stop, chance = threading.Event(), random.Random(7)
    movers = [Mover(made.connect(120.0), number, stop) for number in range(3)]
    for mover in movers:
        mover.start()
    try:
        for _ in range(kills):
            before = [mover.moves for mover in movers]
            made.until(
                lambda before=before: all(
                    mover.moves > moves + 3 or mover.error
                    for mover, moves in zip(movers, before, strict=True)
                ),
                "all move",
            )
            shard = made.pool_map.shards[chance.randrange(SHARDS)]
            name = process_name(shard.id, shard.member)
            if members > 1:
                made.until(
                    lambda: all(one.state == "up" for each in made.pool_map.shards for one in each.standbys),
                    "all standbys are up",
                )
            end_process(made.pid(name))
        before = [mover.moves for mover in movers]
        made.until(
            lambda: all(
                mover.moves > moves + 3 or mover.error for mover, moves in zip(movers, before, strict=True)
            ),
            "all move on",
        )
    finally:
        stop.set()
        for mover in movers:
            mover.join(150)
    assert not [mover.error for mover in movers if mover.error], made.said()
    made.wait()
    wanted = {name: place for mover in movers for name, place in mover.files.items()}
    found: dict[str, int] = {}
    for number in range(DIRECTORIES):
        for name in root.list(f"/d{number}"):
            assert name not in found, f"{name} exists twice"
            found[name] = number
            assert root.read_bytes(f"/d{number}/{name}") == name.encode()
    assert found == wanted
    assert not made.fsck()


@pytest.mark.smoke
def test_renames_survive_two_kills_of_shards(tmp_path):
    with RealPool(tmp_path / "pool", shards=SHARDS) as made:
        made.make()
        made.start()
        move_while_killed(made, 2, 1)


@pytest.mark.timeout(600)
def test_renames_survive_kills_of_shards(tmp_path):
    with RealPool(tmp_path / "pool", shards=SHARDS) as made:
        made.make()
        made.start()
        move_while_killed(made, 9, 1)


@pytest.mark.timeout(600)
def test_renames_survive_kills_of_primaries(tmp_path):
    with RealPool(tmp_path / "pool", shards=SHARDS, standbys=1) as made:
        made.make()
        made.start()
        move_while_killed(made, 6, 2)
