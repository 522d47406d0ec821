"""Cost of volumes and their quotas: a thousand volumes, and small files with and without a quota.

    python bench/volumes.py                               five rounds, in a directory below /tmp that is removed
    python bench/volumes.py --directory /srv --rounds 3
    python bench/volumes.py --volumes 100 --files 500     a first look

Volumes are created, listed, shown and removed. A pool of one node is started as processes; one client process has eight
requests in flight for volumes and sixteen for files. In each round, small files (4 KiB, created, written and closed) go
in turns into a plain directory, a volume without a quota and a volume with quotas in bytes and files. The cost is one
minus the median of the rounds' quotients of rates.
Prints one JSON object; --results writes it to a file. Ends and removes all it started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nvpool.core.units import GIB, KIB, MIB
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.env.pool import RealPool

VOLUMES_IN_PARALLEL, FILES_IN_PARALLEL = 8, 16
PLACES = ("plain directory", "volume", "volume with quotas")


async def rate(work: Callable[[int], Awaitable], numbers: Iterable[int], in_parallel: int) -> float:
    """Calls of `work` per second."""
    waiting = iter(list(numbers))
    count = 0

    async def one() -> None:
        nonlocal count
        for number in waiting:
            await work(number)
            count += 1

    begun_s = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(in_parallel)))
    return count / (time.perf_counter() - begun_s)


async def thousand(fs: AsyncFileSystem, count: int) -> dict[str, float]:
    volumes, found = fs.volumes, {}
    found["create per s"] = await rate(
        lambda n: volumes.create(f"many-{n}", bytes_max=GIB, files_max=1000),
        range(count),
        VOLUMES_IN_PARALLEL,
    )
    begun_s = time.perf_counter()
    listed = await volumes.list()
    found["list s"] = time.perf_counter() - begun_s
    assert len(listed) >= count
    found["show per s"] = await rate(lambda n: volumes.show(f"many-{n}"), range(count), VOLUMES_IN_PARALLEL)
    found["remove per s"] = await rate(
        lambda n: volumes.remove(f"many-{n}"), range(count), VOLUMES_IN_PARALLEL
    )
    return found


async def small_files(fs: AsyncFileSystem, files: int, turn: int) -> dict[str, float]:
    """Files per second in each place; another place is first in each turn."""
    tops = {
        "plain directory": f"/plain-{turn}",
        "volume": "/volumes/open",
        "volume with quotas": "/volumes/full",
    }
    content = b"x" * 4 * KIB
    found = {}
    for place in PLACES[turn % 3 :] + PLACES[: turn % 3]:
        top = f"{tops[place]}/round-{turn}"
        await fs.mkdir(top, parents=True)
        found[place] = await rate(
            lambda n, top=top: fs.write_bytes(f"{top}/{n}", content), range(files), FILES_IN_PARALLEL
        )
        await asyncio.sleep(0.5)  # closes are reported within that time
    return found


async def measure(pool: str, rounds: int, volumes: int, files: int) -> dict:
    async with await AsyncFileSystem.connect(pool) as fs:
        many = [await thousand(fs, volumes) for _ in range(rounds)]
        await fs.volumes.create("open")
        await fs.volumes.create("full", bytes_max=100 * GIB, files_max=100 * files * rounds)
        await small_files(fs, files, 0)  # warm
        small = [await small_files(fs, files, turn) for turn in range(1, rounds + 1)]
    return {
        "volumes": volumes,
        "files": files,
        "rounds": rounds,
        **{name: round(median(one[name] for one in many), 3) for name in many[0]},
        "small files per s": {place: round(median(one[place] for one in small)) for place in PLACES},
        "cost of quotas": round(
            1 - median(one["volume with quotas"] / one["plain directory"] for one in small), 4
        ),
        "cost of volumes": round(1 - median(one["volume"] / one["plain directory"] for one in small), 4),
        "rounds of files": small,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--volumes", type=int, default=1000)
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="nvpool-bench-volumes-", dir=arguments.directory))
    try:
        with RealPool(place / "pool", sizes=(2048 * MIB, 2048 * MIB)) as pool:
            pool.make()
            pool.start()
            found = asyncio.run(
                measure(str(place / "pool"), arguments.rounds, arguments.volumes, arguments.files)
            )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.results:
        arguments.results.write_text(text + "\n")


if __name__ == "__main__":
    main()
