"""A striped directory over three shards under concurrent changes, real processes.

Two clients create thousands of files in it, and others that they remove again, while a third one lists it all the time,
until a shard is added and another one removed. No listing lacks a name that existed when it began, or has one twice; in the
end every file exists once, and fsck finds nothing.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nvpool.sdk.filesystem import FileSystem

NVPOOL = str(Path(sys.executable).with_name("nvpool"))
CLIENTS, STEP = 2, 250
EACH, EACH_MAX = 1_500, 4_000
"""With so many files a listing takes several steps of each shard. They continue until the shards have come and gone, up to
a limit.
"""
MAKER = """
import asyncio, select, sys
from nvpool import connect_async

async def main(pool, who, least, most, step):
    async with await connect_async(pool, name=who) as files:
        async def make(number):
            await files.write_bytes(f"/wide/{who}-{number}", b"")
            if number % 5 == 0:
                await files.write_bytes(f"/wide/gone-{who}-{number}", b"")
                await files.remove(f"/wide/gone-{who}-{number}")

        made = 0
        while made < least or made < most and not select.select([sys.stdin], [], [], 0)[0]:
            await asyncio.gather(*(make(number) for number in range(made, made + step)))
            made += step
            print(made, flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
"""


def nvpool(*arguments, timeout=500):
    done = subprocess.run([NVPOOL, *map(str, arguments)], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"nvpool {arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Creator:
    """One client in its own process; `made`: this many of its files certainly exist."""

    def __init__(self, pool, who):
        self.who, self.made = who, 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAKER, str(pool), who, str(EACH), str(EACH_MAX), str(STEP)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self):
        for line in self._process.stdout:
            self.made = int(line)

    @property
    def works(self):
        return self._process.poll() is None

    def enough(self):
        self._process.stdin.close()

    def end(self, kill=False):
        if kill:
            self._process.kill()
        self._reading.join()
        return self._process.wait()


@pytest.fixture
def pool(tmp_path):
    path = tmp_path / "p"
    nvpool("dev", "up", path, "--drives", 2, "--shards", 3)
    try:
        yield path
    finally:
        nvpool("dev", "down", path)


def listed(files, makers):
    """The names, as of a listing that begins now."""
    before = {f"{maker.who}-{number}" for maker in makers for number in range(maker.made)}
    names = [entry.name for entry in files.scan("/wide")]
    assert len(names) == len(set(names)), "a listing has a name twice"
    assert not before.difference(names), "a listing lacks names that existed when it began"
    return set(names)


def test_listing_is_complete_under_changes_of_files_and_shards(pool):
    with FileSystem(pool, name="lists") as files:
        files.mkdir("/wide", wide=True)
        makers = [Creator(pool, f"client{number}") for number in range(CLIENTS)]
        shards = threading.Thread(
            target=lambda: [
                nvpool("shard", "add", pool, "--wait"),
                nvpool("shard", "remove", pool, 1, "--wait"),
            ]
        )
        shards.start()
        try:
            while any(maker.works for maker in makers) or shards.is_alive():
                if not shards.is_alive():
                    for maker in makers:
                        maker.enough()
                listed(files, makers)
        finally:
            shards.join()
            ended = [maker.end(kill=sys.exc_info()[0] is not None) for maker in makers]
        assert ended == [0] * CLIENTS
        assert all(maker.made >= EACH for maker in makers)
        assert listed(files, makers) == {
            f"{maker.who}-{number}" for maker in makers for number in range(maker.made)
        }
        there = json.loads(nvpool("shard", "ls", pool, "--json"))
        assert {one["shard"] for one in there if one["partitions"]} == {2, 3, 4}
    nvpool("fsck", pool)
