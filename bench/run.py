"""Benchmark table of a pool on this machine, beside the floors of the same run.

    make bench-floors                              three rounds, about six minutes
    python bench/run.py --rounds 1 --seconds 2     a first look
    python bench/run.py --only 'mount 4 KiB'       some lines of it
    python bench/run.py --write                    and put the table into bench/README.md

Makes a pool with one target in a directory of its own on the drive of --directory (default: this checkout), mounts it, and runs
each load in turn, all of them once a round; a figure is the median of the rounds. Floors, measured in the same rounds: the same
load on a plain directory of the same drive, FUSE requests answered from memory, and requests echoed over the transport. Reads
of a pool come from its stores' memory (their page cache), and the kernel's cache of the mount is bypassed with O_DIRECT; "cold"
lines have the stores' files dropped from memory before. Ends and removes all it started, also when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nvpool.core.programs import Program, command

sys.path.insert(0, str(Path(__file__).resolve().parent))
import loads
from report import machine, put_into_readme

from nvpool.testing.env.pool import PLAIN_TCP

HERE = Path(__file__).resolve().parent
KIB, MIB = 1 << 10, 1 << 20
FILE_BYTES = 256 * MIB
"""Fits the memory of any machine that this runs on, and is too large for the processor's caches."""


OF_THE_POOL = ("mount", "SDK", "cold")


class Line(NamedTuple):
    """One line of the table. `unit`: reads/s, files/s or MiB/s; `floor` names the line whose share this one is shown as."""

    name: str
    unit: str
    load: Callable[[], dict]
    goal: float | None = None
    floor: str | None = None
    prepare: Callable[[], None] | None = None


@contextlib.contextmanager
def awake():
    """Keep processors awake (/dev/cpu_dma_latency), as the pool's daemons do while they have requests.

    The floors are measured with it too.
    """
    try:
        device = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
    except OSError:
        yield
        return
    try:
        os.write(device, bytes(4))
        yield
    finally:
        os.close(device)


class Bench:
    def __init__(self, directory: Path, seconds: float):
        self.seconds = seconds
        self.directory = directory
        self.pool, self.mount, self.plain, self.floor = (
            directory / name for name in ("p", "mount", "plain", "floor")
        )
        self._ending: list[Callable[[], None]] = []

    # -- what runs -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for path in (self.mount, self.plain, self.floor):
            path.mkdir()
        self._ending.append(self._stop_pool)
        config = self.pool.with_suffix(".toml")
        config.write_text(PLAIN_TCP)
        nvpool(
            "dev", "up", str(self.pool), "--drives", "1", "--mount", str(self.mount), "--config", str(config)
        )
        content = os.urandom(MIB)
        for path in (self.plain / "file", self.mount / "file"):
            with open(path, "wb") as file:
                for at in range(FILE_BYTES // MIB):
                    file.write(at.to_bytes(8, "little") + content[8:])
                os.fsync(file.fileno())
        self._start_floor()

    def _start_floor(self) -> None:
        command = [sys.executable, str(HERE / "fuse_floor.py"), str(self.floor)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        def stop() -> None:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
            if os.path.ismount(self.floor):
                subprocess.run(["umount", "-l", str(self.floor)], check=False)

        self._ending.append(stop)
        if server.stdout.readline().strip() != "ready":
            raise SystemExit("the FUSE floor does not start")
        with open(self.floor / "file", "wb") as file:
            for _ in range(64):
                file.write(bytes(MIB))

    def _stop_pool(self) -> None:
        if self.pool.exists():
            nvpool("dev", "down", str(self.pool), check=False)
        if os.path.ismount(self.mount):
            subprocess.run(["umount", "-l", str(self.mount)], check=False)

    def stop(self) -> None:
        while self._ending:
            self._ending.pop()()

    # -- caches --------------------------------------------------------------------------------------------------------

    def warm(self) -> None:
        """Read the stores' files into memory, past the mount."""
        forget(files_below(self.pool / "targets"), keep=True)

    def cold(self) -> None:
        """Drop the stores' files from memory, and the kernel's cache of the mount."""
        forget(files_below(self.pool / "targets"))
        forget([self.mount / "file"])

    # -- the table -----------------------------------------------------------------------------------------------------

    def lines(self) -> list[Line]:
        s = self.seconds
        file, plain, floor = self.mount / "file", self.plain / "file", self.floor / "file"

        def fio(path, pattern, block, threads, **more):
            return lambda: loads.fio(path, pattern, block, threads, s, **more)

        def write(folder):
            return lambda: loads.fio(
                folder / "written", "write", MIB, 1, s, direct=False, size_bytes=FILE_BYTES, sync_at_end=True
            )

        def load(*words):
            return lambda: json.loads(run([sys.executable, str(HERE / "loads.py"), *words], timeout=s + 120))

        def create(folder):
            return load("create", str(folder / "created"), str(s))

        def read_many(*more):
            return load("read-many", str(self.pool), "/file", str(s), *more)

        def gone(folder):
            return lambda: (folder / "written").unlink(missing_ok=True)

        def no_files(folder):
            return lambda: shutil.rmtree(folder / "created", ignore_errors=True)

        return [
            Line(
                "drive 4 KiB random read, 1 thread, O_DIRECT", "reads/s", fio(plain, "randread", 4 * KIB, 1)
            ),
            Line(
                "drive 4 KiB random read, 16 threads, O_DIRECT",
                "reads/s",
                fio(plain, "randread", 4 * KIB, 16),
            ),
            Line(
                "drive 4 KiB random read, 1 thread, page cache",
                "reads/s",
                fio(plain, "randread", 4 * KIB, 1, direct=False),
            ),
            Line(
                "drive 128 KiB random read, 16 threads, O_DIRECT",
                "MiB/s",
                fio(plain, "randread", 128 * KIB, 16),
            ),
            Line("drive sequential 1 MiB read, O_DIRECT", "MiB/s", fio(plain, "read", MIB, 1)),
            Line(
                "drive sequential 1 MiB write and fsync", "MiB/s", write(self.plain), prepare=gone(self.plain)
            ),
            Line(
                "drive create, write, close 4 KiB files, 1 thread",
                "files/s",
                create(self.plain),
                prepare=no_files(self.plain),
            ),
            Line(
                "FUSE from memory 4 KiB random read, 1 thread", "reads/s", fio(floor, "randread", 4 * KIB, 1)
            ),
            Line(
                "FUSE from memory 4 KiB random read, 16 threads",
                "reads/s",
                fio(floor, "randread", 4 * KIB, 16),
            ),
            Line(
                "FUSE from memory 128 KiB random read, 16 threads",
                "MiB/s",
                fio(floor, "randread", 128 * KIB, 16),
            ),
            Line("FUSE from memory sequential 1 MiB read", "MiB/s", fio(floor, "read", MIB, 1)),
            Line(
                "FUSE from memory create, write, close 4 KiB files, 1 thread",
                "files/s",
                create(self.floor),
                prepare=no_files(self.floor),
            ),
            Line(
                "transport stream+unix, echo of batches of 64 reads",
                "reads/s",
                load("echo", "stream+unix", str(s)),
            ),
            Line("transport gRPC, echo of batches of 64 reads", "reads/s", load("echo", "grpc", str(s))),
            Line(
                "mount 4 KiB random read, 1 thread",
                "reads/s",
                fio(file, "randread", 4 * KIB, 1),
                4000,
                "FUSE from memory 4 KiB random read, 1 thread",
                self.warm,
            ),
            Line(
                "mount 4 KiB random read, 16 threads",
                "reads/s",
                fio(file, "randread", 4 * KIB, 16),
                13000,
                "FUSE from memory 4 KiB random read, 16 threads",
                self.warm,
            ),
            Line(
                "mount 128 KiB random read, 16 threads",
                "MiB/s",
                fio(file, "randread", 128 * KIB, 16),
                700,
                "FUSE from memory 128 KiB random read, 16 threads",
                self.warm,
            ),
            Line(
                "mount sequential 1 MiB read",
                "MiB/s",
                fio(file, "read", MIB, 1),
                700,
                "FUSE from memory sequential 1 MiB read",
                self.warm,
            ),
            Line(
                "mount sequential 1 MiB write and fsync",
                "MiB/s",
                write(self.mount),
                450,
                "drive sequential 1 MiB write and fsync",
                gone(self.mount),
            ),
            Line(
                "mount create, write, close 4 KiB files, 1 thread",
                "files/s",
                create(self.mount),
                1200,
                "FUSE from memory create, write, close 4 KiB files, 1 thread",
                no_files(self.mount),
            ),
            Line(
                "SDK read_many of 4 KiB, one process, one target",
                "reads/s",
                read_many(),
                80000,
                "transport stream+unix, echo of batches of 64 reads",
                self.warm,
            ),
            Line(
                "SDK read_many of 4 KiB over gRPC, one process, one target",
                "reads/s",
                read_many("grpc"),
                60000,
                "transport gRPC, echo of batches of 64 reads",
                self.warm,
            ),
            Line(
                "cold: mount 4 KiB random read, 1 thread",
                "reads/s",
                fio(file, "randread", 4 * KIB, 1),
                None,
                "drive 4 KiB random read, 1 thread, O_DIRECT",
                self.cold,
            ),
            Line(
                "cold: mount 4 KiB random read, 16 threads",
                "reads/s",
                fio(file, "randread", 4 * KIB, 16),
                None,
                "drive 4 KiB random read, 16 threads, O_DIRECT",
                self.cold,
            ),
            Line(
                "cold: mount sequential 1 MiB read",
                "MiB/s",
                lambda: loads.fio(file, "read", MIB, 1, s, direct=False, once=True),
                None,
                "drive sequential 1 MiB read, O_DIRECT",
                self.cold,
            ),
        ]


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def forget(files: list[Path], *, keep: bool = False) -> None:
    """Drop the files from the page cache, synced first; with `keep` read them into it instead."""
    for path in files:
        with open(path, "rb", buffering=0) as file:
            if keep:
                while file.read(MIB):
                    pass
            else:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(command: list[str], *, check: bool = True, timeout: float = 120) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def nvpool(*words: str, check: bool = True) -> str:
    return run(command(Program.CLI, *words), check=check)


def value_of(line: Line, found: dict) -> float:
    return found["bytes_rate"] / MIB if line.unit == "MiB/s" else found["rate"]


def medians(line: Line, rounds: list[dict]) -> dict:
    found = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    values = [value_of(line, r) for r in rounds]
    return {
        "name": line.name,
        "unit": line.unit,
        "goal": line.goal,
        "floor": line.floor,
        "value": value_of(line, found),
        "least": min(values),
        "most": max(values),
        "p50_us": found["p50_us"],
        "p99_us": found["p99_us"],
        "rounds": len(rounds),
    }


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(results: list[dict]) -> str:
    by_name = {result["name"]: result for result in results}
    rows = [
        "| work | measured | least–most | p50 | p99 | at least | share of its floor |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for r in results:
        goal = ""
        if r["goal"]:
            goal = f"{number(r['goal'])} {'✓' if r['value'] >= r['goal'] else '✗'}"
        share = ""
        if r["floor"] in by_name:
            share = f"{r['value'] / by_name[r['floor']]['value']:.0%} of {r['floor'].split(',')[0]}"
        rows.append(
            f"| {r['name']} | {number(r['value'])} {r['unit']} | {number(r['least'])}–{number(r['most'])} | "
            f"{number(r['p50_us'])} µs | {number(r['p99_us'])} µs | {goal} | {share} |"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load in each round")
    parser.add_argument("--only", default="", help="regular expression: only lines whose name has it")
    parser.add_argument(
        "--directory", type=Path, default=HERE.parent / "build", help="on the drive to measure"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--write", action="store_true", help="put the table into bench/README.md")
    arguments = parser.parse_args()
    arguments.directory.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=arguments.directory))
    bench = Bench(directory, arguments.seconds)
    rounds: dict[str, list[dict]] = {}
    lines = [line for line in bench.lines() if re.search(arguments.only, line.name)]
    try:
        bench.start()
        for turn in range(arguments.rounds):
            for line in lines:
                if line.prepare is not None:
                    line.prepare()
                with contextlib.nullcontext() if line.name.startswith(OF_THE_POOL) else awake():
                    found = line.load()
                rounds.setdefault(line.name, []).append(found)
                print(
                    f"round {turn + 1}: {line.name}: {number(value_of(line, found))} {line.unit}",
                    file=sys.stderr,
                )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        bench.stop()
        if not any(os.path.ismount(path) for path in (bench.mount, bench.floor)):
            shutil.rmtree(directory, ignore_errors=True)
    results = [medians(line, rounds[line.name]) for line in lines if line.name in rounds]
    text = f"{time.strftime('%Y-%m-%d')}, {machine()}\n\n{table(results)}\n"
    print("\n" + text)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    if arguments.write and len(results) == len(bench.lines()):
        put_into_readme("table", text)
    return 0 if results else 1


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
