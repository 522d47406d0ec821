"""Cost of encryption at rest: reads and writes of an encrypted volume beside those of a plain one.

    python bench/encryption.py                       five rounds, in a directory below /tmp that is removed
    python bench/encryption.py --write               the same, and its table in bench/README.md is replaced
    python bench/encryption.py --rounds 9 --seconds 3 --results FILE

Starts the processes of a pool of one node with two targets and mounts it twice: with short-circuit reads, and without,
so that reads go through the stores. The data stays in the page cache of the stores. Loads, on a file of 64 MiB in each
volume:

    reads 1, 16       4 KiB at random places with O_DIRECT, by so many threads (random_reads.c)
    read_many         4 KiB at random places, 256 a call, by the SDK
    sequential read   1 MiB at a time with O_DIRECT
    sequential write  1 MiB at a time, then fsync

Plain and encrypted volumes take turns. Prints a table of medians and of the quotient encrypted / plain; --results writes
the figures as JSON. Needs root, to mount. Ends and removes all it started.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import commit, machine, number, publish
from workspace import minutes, not_final, say, warn_of_others

from nvpool.core.units import KIB, MIB
from nvpool.testing.env.nvpool_command import nvpool
from nvpool.testing.env.pool import RealPool

HERE = Path(__file__).resolve().parent
VOLUMES = ("plain", "encrypted")
FILE_BYTES = 64 * MIB
BATCH = 256


def build(directory: Path) -> Path:
    program = directory / "random_reads"
    subprocess.run(
        ["cc", "-O2", "-pthread", str(Path(__file__).with_name("random_reads.c")), "-o", str(program)],
        check=True,
    )
    return program


def random_reads(program: Path, file: Path, seconds: float, threads: int) -> float:
    said = subprocess.run(
        [str(program), str(file), str(seconds), str(threads)], check=True, capture_output=True, text=True
    )
    reads, took_s, failed = said.stdout.split()
    if float(failed):
        raise RuntimeError(f"{failed} reads of {file} failed")
    return float(reads) / float(took_s)


def mounted_reads(program: Path, mount: Path, seconds: float, threads: int, volume: str) -> float:
    return random_reads(program, mount / "volumes" / volume / "file", seconds, threads)


def read_many(client, path: str, seconds: float) -> float:
    dice, count, begun_s = random.Random(1), 0, time.perf_counter()
    while time.perf_counter() - begun_s < seconds:
        client.read_many([(path, dice.randrange(FILE_BYTES // 4096) * 4096, 4096) for _ in range(BATCH)])
        count += BATCH
    return count / (time.perf_counter() - begun_s)


def sequential_read(file: Path, seconds: float) -> float:
    into, done, begun_s = mmap.mmap(-1, MIB), 0, time.perf_counter()
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        while time.perf_counter() - begun_s < seconds:
            done += os.preadv(descriptor, [into], done % FILE_BYTES)
    finally:
        os.close(descriptor)
    return done / MIB / (time.perf_counter() - begun_s)


def sequential_write(file: Path, count: int = 64) -> float:
    piece, begun_s = random.Random(3).randbytes(MIB), time.perf_counter()
    with open(file, "wb", buffering=0) as out:
        for _ in range(count):
            out.write(piece)
        os.fsync(out.fileno())
    return count / (time.perf_counter() - begun_s)


def measure(pool: RealPool, top: Path, rounds: int, seconds: float, only: str) -> dict:
    program, client = build(top), pool.connect(60.0)
    content = random.Random(2).randbytes(FILE_BYTES)
    for volume in VOLUMES:
        client.write_bytes(f"/volumes/{volume}/file", content)
    near, far = top / "near", top / "far"
    works = {
        f"{how} 4 KiB reads, {threads} thread{'s' * (threads > 1)} (reads/s)": partial(
            mounted_reads, program, mount, seconds, threads
        )
        for how, mount in (("short-circuit", near), ("through the stores", far))
        for threads in (1, 16)
    } | {
        "read_many of 4 KiB (reads/s)": lambda v: read_many(client, f"/volumes/{v}/file", seconds),
        "sequential 1 MiB reads (MiB/s)": lambda v: sequential_read(near / "volumes" / v / "file", seconds),
        "sequential 1 MiB writes and fsync (MiB/s)": lambda v: sequential_write(
            near / "volumes" / v / "written"
        ),
    }
    found: dict = {}
    for name, work in [(n, w) for n, w in works.items() if only in n]:
        taken: dict[str, list[float]] = {volume: [] for volume in VOLUMES}
        for volume in VOLUMES:
            work(volume)  # warm
        for turn in range(rounds):
            for volume in VOLUMES if turn % 2 else VOLUMES[::-1]:
                taken[volume].append(work(volume))
        found[name] = {volume: round(median(times), 1) for volume, times in taken.items()}
        found[name]["quotient"] = round(median(b / a for a, b in zip(*taken.values(), strict=True)), 3)
        say(f"{name}: {found[name]}")
    return found


def markdown(results: dict) -> str:
    lines = ["| work | plain | encrypted | encrypted ÷ plain |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {number(one['plain'])} | {number(one['encrypted'])} | {one['quotient']:.2f} |"
        for name, one in results["works"].items()
    ]
    return (
        f"{results['date']}, {results['machine']}; nvpool {results['commit']}; medians of {results['rounds']} rounds of "
        f"{results['seconds']:g} s, {minutes(results['took_s'])}.{not_final(results['busy_before'])}\n\n"
        + "\n".join(lines)
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="", help="only works with this in their name")
    parser.add_argument("--results", type=Path, help="write the figures to this file, as JSON")
    parser.add_argument(
        "--write",
        action="store_true",
        help="and to results/encryption.json, and the table into bench/README.md; of all works alone",
    )
    arguments = parser.parse_args()
    if arguments.write and arguments.only:
        parser.error("--write wants all works, so it goes without --only")
    busy_before, began_s = warn_of_others(), time.monotonic()
    top = Path(tempfile.mkdtemp(prefix="nvpool-bench-encryption-", dir=arguments.directory))
    mounted = []
    try:
        nvpool("encryption", "key", top / "pool.key")
        with RealPool(
            top / "pool", sizes=(512 * MIB,) * 2, config=f'[encryption]\nkey_file = "{top / "pool.key"}"\n'
        ) as pool:
            pool.make()
            pool.start()
            nvpool("volume", "create", pool.path, "plain")
            nvpool("volume", "create", pool.path, "encrypted", "--encrypt")
            for place, options in ((top / "near", ()), (top / "far", ("--no-short-circuit",))):
                place.mkdir()
                nvpool("mount", pool.path, place, *options)
                mounted.append(place)
            try:
                works = measure(pool, top, arguments.rounds, arguments.seconds, arguments.only)
            finally:
                for place in mounted:
                    subprocess.run(["umount", "-l", str(place)], check=False)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "commit": commit(),
        "took_s": round(time.monotonic() - began_s),
        "busy_before": busy_before,
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "block": 4 * KIB,
        "works": works,
    }
    publish("encryption", results, markdown(results), arguments.results, arguments.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
