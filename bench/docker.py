"""Random reads in a container on a Docker volume, beside the same reads on the host.

    python bench/docker.py [--rounds 13] [--seconds 2] [--write] [DIRECTORY]

Makes a pool below DIRECTORY (the current one), a bridge with its mount, and a Docker Engine of its own; needs root. One
program without libraries (random_reads.c) reads 4 KiB at random with O_DIRECT: on the host, and in a container, which
sees the file through a bind mount of the volume. The floor is the same program on a FUSE mount that answers from memory
(fuse_floor.py), on the host and bound into the same container: its loss is the cost of the container, not of the pool.
Prints medians of the rounds and of the shares of each round; a failed read ends the program. `--write` puts the table
into bench/results/docker.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from report import machine
from subjects.contract import OWNER
from subjects.local import FuseFromMemory

from nvpool.core.units import MIB
from nvpool.testing.env.bridge import RealBridge
from nvpool.testing.env.containers import IMAGE
from nvpool.testing.env.docker import RealDocker, why_no_docker
from nvpool.testing.env.pool import RealPool

HERE = Path(__file__).resolve().parent
FILE_BYTES = 256 * MIB
THREADS = (1, 16)
GOAL = 0.97
PLAIN, CONTAINER = "plain mount", "container"
POOL, FLOOR = "Docker volume", "floor: FUSE from memory"
Results = dict[tuple[str, int], dict[str, list[float]]]
"""(what, threads) -> where -> reads per second of each measurement."""


def rate(said: str) -> float:
    reads, seconds, failed = said.split()
    if int(failed):
        raise SystemExit(f"{failed} reads have failed")
    return int(reads) / float(seconds)


def measure(options: argparse.Namespace, directory: Path) -> Results:
    program = directory / "random_reads"
    subprocess.run(["cc", "-O2", "-static", "-pthread", HERE / "random_reads.c", "-o", program], check=True)
    results: Results = {
        (what, threads): {PLAIN: [], CONTAINER: []} for what in (POOL, FLOOR) for threads in THREADS
    }
    floor = FuseFromMemory()
    try:
        with RealPool(directory / "pool", sizes=(2 * FILE_BYTES,)) as pool:
            pool.make()
            pool.start()
            with RealBridge(pool.path, directory / "bridge") as bridge, RealDocker() as docker:
                docker.run("volume", "create", "--driver", bridge.driver, "bench")
                places = {
                    POOL: bridge.mountpoint / "volumes" / "bench" / "data",
                    FLOOR: floor.start(directory / "floor") / "data",
                }
                for place in places.values():
                    subprocess.run(
                        [
                            "dd",
                            "if=/dev/urandom",
                            f"of={place}",
                            "bs=1M",
                            f"count={FILE_BYTES // MIB}",
                            "conv=fsync",
                            "status=none",
                        ],
                        check=True,
                    )
                container = docker.begin(
                    "while true; do sleep 1; done",
                    "-v",
                    "bench:/pool",
                    "-v",
                    f"{floor.mount}:/floor",
                    "-v",
                    f"{program}:/random_reads:ro",
                )
                inside = {POOL: "/pool/data", FLOOR: "/floor/data"}

                def read(what: str, threads: int, where: str) -> float:
                    words = [str(options.seconds), str(threads)]
                    if where == CONTAINER:
                        return rate(
                            docker.run("exec", container, "/random_reads", inside[what], *words).stdout
                        )
                    command = [program, places[what], *words]
                    return rate(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

                for what, threads in results:  # both ways are warm
                    read(what, threads, PLAIN), read(what, threads, CONTAINER)
                for turn in range(options.rounds):
                    for (what, threads), found in results.items():
                        for where in (
                            (PLAIN, CONTAINER, CONTAINER, PLAIN)
                            if turn % 2
                            else (CONTAINER, PLAIN, PLAIN, CONTAINER)
                        ):
                            found[where].append(read(what, threads, where))
                    print(f"round {turn + 1} of {options.rounds}", flush=True)
    finally:
        floor.stop()
    return results


def table(results: Results) -> str:
    lines = ["| 4 KiB at random | plain mount | container | share | goal |", "|---|---:|---:|---:|---:|"]
    for (what, threads), found in results.items():
        shares = [container / plain for container, plain in zip(found[CONTAINER], found[PLAIN], strict=True)]
        lines.append(
            f"| {what}, {threads} thread{'s' * (threads > 1)} | {statistics.median(found[PLAIN]):,.0f}/s | "
            f"{statistics.median(found[CONTAINER]):,.0f}/s | {statistics.median(shares):.3f} | "
            f"{GOAL if what == POOL else ''} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", default=".", type=Path)
    parser.add_argument("--rounds", type=int, default=13, help="each measures all twice")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--write", action="store_true", help="put the table into bench/results/docker.md")
    options = parser.parse_args()
    if why := why_no_docker():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory(prefix="docker-bench-", dir=options.directory) as name:
        directory = Path(name).resolve()
        (directory / OWNER).write_text(str(os.getpid()))
        found = table(measure(options, directory))
    print(found, end="")
    if options.write:
        (HERE / "results" / "docker.md").write_text(
            f"Random reads on a Docker volume, beside the plain mount of the same pool ({IMAGE}: busybox).\n{machine()}.\n"
            f"{options.rounds} rounds of {options.seconds:g} s, each measured twice in turns: `python bench/docker.py`."
            f"\n\n{found}"
        )


if __name__ == "__main__":
    main()
