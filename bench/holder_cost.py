"""Cost of a holder: the same work through a mount with a holder and one without, in turns.

    python bench/holder_cost.py [--rounds 8] [--count 2000] [DIRECTORY]

A holder lets a mount outlive its process. Makes a pool below DIRECTORY (the current one) and mounts it twice. Prints for
each load the least processor time of the mount's processes per operation in any round, which other processes of the
machine disturb least; operations per second, medians of the rounds, which mean something only on a quiet machine; and
the difference that the holder makes.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from subjects.contract import wait_until

from nvpool.core.programs import OF_A_MOUNT, Program, command, processes

KIND = {"with": "--holder", "without": "--no-holder"}
CONTENT = os.urandom(4096)


def create(place: Path, count: int) -> None:
    for number in range(count):
        file = os.open(place / f"c{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(file, CONTENT)
        os.close(file)


def read_whole(place: Path, count: int) -> None:
    """Open, read and close small files in random order, like a data loader."""
    for number in random.Random(count).sample(range(count), count):
        file = os.open(place / f"c{number}", os.O_RDONLY)
        os.read(file, 8192)
        os.close(file)


def names(place: Path, count: int) -> None:
    """Five operations: mkdir, rename, link, unlink, rmdir."""
    for number in range(count // 5):
        os.mkdir(place / f"d{number}")
        os.rename(place / f"d{number}", place / f"e{number}")
        os.link(place / "c0", place / f"l{number}")
        os.unlink(place / f"l{number}")
        os.rmdir(place / f"e{number}")


def append(place: Path, count: int) -> None:
    file = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(count):
        os.write(file, b"%031d\n" % number)
    os.close(file)


def rewrite(place: Path, count: int) -> None:
    """Write 4 KiB at random places, with an fsync after every 64."""
    file, chance = os.open(place / "data", os.O_RDWR | os.O_CREAT), random.Random(1)
    for number in range(count):
        os.pwrite(file, CONTENT, chance.randrange(2048) * 4096)
        if number % 64 == 63:
            os.fsync(file)
    os.close(file)


def read_at_random(place: Path, count: int) -> None:
    """Read 4 KiB with O_DIRECT."""
    file, chance, buffer = (
        os.open(place / "data", os.O_RDONLY | os.O_DIRECT),
        random.Random(2),
        mmap.mmap(-1, 4096),
    )
    for _ in range(count):
        os.preadv(file, [buffer], chance.randrange(1024) * 4096)
    os.close(file)


LOADS = {
    "create, write, close 4 KiB": create,
    "open, read, close 4 KiB": read_whole,
    "mkdir, rename, link, unlink, rmdir": names,
    "append 32 bytes": append,
    "write 4 KiB at random, fsync every 64": rewrite,
    "read 4 KiB at random": read_at_random,
}


def processes_of(place: Path) -> list[int]:
    return [pid for pid, _ in processes(*OF_A_MOUNT, naming=place)]


def processor_s(pids: list[int]) -> float:
    return (
        sum(
            int(Path("/proc", str(pid), "task", thread, "schedstat").read_text().split()[0])
            for pid in pids
            for thread in os.listdir(f"/proc/{pid}/task")
        )
        / 1e9
    )


def nvpool(*words: object) -> None:
    subprocess.run(command(Program.CLI, *map(str, words)), check=True, stdout=subprocess.DEVNULL)


def measure(options: argparse.Namespace, directory: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Load -> with or without -> (processor seconds, seconds) per operation of each round."""
    results: dict = {load: {kind: [] for kind in KIND} for load in LOADS}
    places = {kind: directory / kind for kind in KIND}
    nvpool("dev", "up", directory / "pool", "--size", "4G")
    try:
        for kind, place in places.items():
            place.mkdir()
            nvpool("mount", KIND[kind], directory / "pool", place)
            wait_until(lambda place=place: os.path.ismount(place), "no mount")
        for turn in range(options.rounds):
            for load, work in LOADS.items():
                for kind in sorted(KIND, reverse=bool(turn % 2)):
                    here, pids = places[kind] / f"{kind}-{turn}", processes_of(places[kind])
                    here.mkdir(exist_ok=True)
                    before, began = processor_s(pids), time.perf_counter()
                    work(here, options.count)
                    took = time.perf_counter() - began
                    results[load][kind].append(
                        ((processor_s(pids) - before) / options.count, took / options.count)
                    )
            print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
    finally:
        for place in filter(os.path.ismount, places.values()):
            nvpool("umount", place)
        nvpool("dev", "down", directory / "pool")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", default=".", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--count", type=int, default=2000, help="operations of each load in a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holder-cost-", dir=options.directory) as name:
        results = measure(options, Path(name).resolve())
    print("| | processor, with a holder | without | added | a second, with | without | added time |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for load, found in results.items():
        cpu, bare_cpu = (min(cpu for cpu, _ in found[kind]) for kind in KIND)
        took, bare_took = (statistics.median(took for _, took in found[kind]) for kind in KIND)
        print(
            f"| {load} | {cpu * 1e6:.1f} µs | {bare_cpu * 1e6:.1f} µs | {cpu / bare_cpu - 1:+.1%} | {1 / took:,.0f} | "
            f"{1 / bare_took:,.0f} | {took / bare_took - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
