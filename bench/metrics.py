"""Cost of metrics for 4 KiB random reads: with counting and a scrape every five seconds, and without.

    .venv/bin/python bench/metrics.py [--rounds 8] [--seconds 3] [DIRECTORY]

Sixteen threads read. "Without" is a copy of this checkout from which every statement that counts was removed (see
`UNCOUNTED`), so that nothing else differs. Each has its own pool below DIRECTORY (the current one) and two mounts: with
short-circuit reads, and over `stream`. Rounds alternate which comes first. Prints reads per second, medians of the rounds
and the median of the rounds' ratios, which mean something only on a quiet machine; and the least processor time per read
of all of nvpool's processes in any round, which other processes disturb least. Needs root and fio.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

from nvpool.cli.pool_connection import ask
from nvpool.core.programs import Program, command, processes
from nvpool.metrics.exposition import Page
from nvpool.rpc.v1.pool_pb2 import MetricsReply, MetricsRequest
from nvpool.rpc.v1.wire_pb2 import PROCESS_METRICS
from nvpool.testing.env.pool import PLAIN_TCP

ROOT = Path(__file__).resolve().parents[1]
UNCOUNTED = {
    "rpc/multiplexer.py": {"reply_stats", "calls"},
    "fuse/kernel/connection.py": {"spent", "_begin_run", "_end_run", "deferred", "run", "now_s"},
    "fuse/dispatch.py": {"written_bytes"},
    "fuse/kernel/read_worker.py": {"deferred"},
    "fuse/pending_requests.py": {"deferred", "spent"},
    "fuse/reply_sender.py": {"read_bytes"},
    "client/data/short_circuit.py": {"past", "figures", "_note_reads", "read_bytes"},
    "store/chunks/read_batch.py": {"read_bytes"},
    "store/server/service.py": {"use"},
}
"""File -> names: statements that use one of them count, and nothing else."""
MOUNTS = {"short cut": (), "stream": ("--no-short-circuit", "--transport", "stream")}
FILE_BYTES = 64 << 20
SCRAPE_S = 5.0
"""Seconds between scrapes; Prometheus scrapes every 15 to 60 seconds."""


class Uncounting(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.removed = 0

    def _counts(self, node: ast.AST) -> bool:
        return any(
            (isinstance(part, ast.Attribute) and part.attr in self.names)
            or (isinstance(part, ast.Name) and part.id in self.names)
            for part in ast.walk(node)
        )

    def generic_visit(self, node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "measure"):
            return node  # others look at what is there
        if (
            isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign) and self._counts(node)
        ) or (isinstance(node, ast.If) and self._counts(node.test)):
            self.removed += 1
            return None
        super().generic_visit(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If | ast.With) and not node.body:
            node.body = [ast.Pass()]
        return node


def uncounted_copy(place: Path) -> Path:
    """Return a directory with a copy of nvpool that counts nothing."""
    shutil.copytree(ROOT / "nvpool", place / "nvpool", ignore=shutil.ignore_patterns("__pycache__"))
    for name, names in UNCOUNTED.items():
        path = place / "nvpool" / name
        source = path.read_text()
        changing = Uncounting(names)
        tree = changing.visit(ast.parse(source))
        assert changing.removed, f"{name} does not count: is UNCOUNTED still right?"
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    return place


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Arm:
    def __init__(self, place: Path, counts: bool) -> None:
        self.counts = counts
        self.pool = place / ("with" if counts else "without")
        self.env = os.environ | ({} if counts else {"PYTHONPATH": str(uncounted_copy(place / "copy"))})
        self.mounts = {kind: place / f"{self.pool.name}-{kind.replace(' ', '-')}" for kind in MOUNTS}
        self.pages: list[str] = []

    def nvpool(self, *words: object) -> str:
        done = subprocess.run(
            command(Program.CLI, *map(str, words)), env=self.env, text=True, capture_output=True, timeout=240
        )
        if done.returncode:
            raise SystemExit(f"nvpool {' '.join(map(str, words))}: {done.stderr}")
        return done.stdout

    def start(self) -> None:
        config = self.pool.with_suffix(".toml")
        config.write_text(PLAIN_TCP)
        self.nvpool("dev", "up", self.pool, "--size", "1GiB", "--config", config)
        for kind, place in self.mounts.items():
            words = []
            if self.counts:
                port = free_port()
                words = ["--metrics", f"127.0.0.1:{port}"]
                self.pages.append(f"http://127.0.0.1:{port}/metrics")
            place.mkdir()
            self.nvpool("mount", self.pool, place, *MOUNTS[kind], *words)
        file = self.mounts["stream"] / "data"
        file.write_bytes(os.urandom(FILE_BYTES))
        with open(file, "rb") as written:
            os.fsync(written.fileno())

    def end(self) -> None:
        for place in self.mounts.values():
            if os.path.ismount(place):
                self.nvpool("umount", place)
        if self.pool.exists():
            self.nvpool("dev", "down", self.pool)

    def scrape(self) -> None:
        for page in self.pages:
            with urllib.request.urlopen(page, timeout=10) as answer:
                answer.read()
        if self.counts:
            reply = asyncio.run(
                ask(str(self.pool), PROCESS_METRICS, MetricsRequest(node=True), MetricsReply, wait_s=10.0)
            )
            assert Page.unpack(reply.page).text()

    def cpu_s(self) -> float:
        """Processor time of all processes of the pool and its mounts."""
        total = 0
        for pid, _ in processes(naming=self.pool):
            with contextlib.suppress(OSError):
                fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def measure(self, kind: str, seconds: float) -> tuple[float, float]:
        """Reads per second, and microseconds of processor time for each."""
        ended = threading.Event()

        def scrape() -> None:
            while not ended.wait(SCRAPE_S):
                self.scrape()

        scraping = threading.Thread(target=scrape)
        scraping.start()
        began_s = self.cpu_s()
        try:
            done = subprocess.run(
                [
                    "fio",
                    "--name=r",
                    f"--filename={self.mounts[kind] / 'data'}",
                    "--ioengine=psync",
                    "--direct=1",
                    "--rw=randread",
                    "--bs=4k",
                    "--numjobs=16",
                    "--thread",
                    "--group_reporting",
                    "--time_based",
                    f"--runtime={seconds}",
                    f"--size={FILE_BYTES}",
                    "--norandommap",
                    "--randrepeat=0",
                    "--output-format=json",
                ],
                capture_output=True,
                text=True,
                timeout=seconds + 60,
                check=True,
            )
        finally:
            ended.set()
            scraping.join()
        read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
        return read["iops"], (self.cpu_s() - began_s) / max(1, read["total_ios"]) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", default=".", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="metrics-", dir=arguments.directory.resolve()))
    arms: list[Arm] = []
    try:
        for counts in (True, False):
            arms.append(Arm(place, counts))
            arms[-1].start()
        results = {}
        for kind in MOUNTS:
            seen: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for arm in arms:
                arm.measure(
                    kind, 2.0
                )  # what is read for the first time is located, and its bytes come into memory
            for number in range(arguments.rounds):
                for arm in arms if number % 2 else reversed(arms):
                    seen[arm.counts].append(arm.measure(kind, arguments.seconds))
            ratios = [on[0] / off[0] for on, off in zip(seen[True], seen[False], strict=True)]
            least = {counts: min(one[1] for one in seen[counts]) for counts in seen}
            results[kind] = {
                "reads_s": {
                    name: round(statistics.median(one[0] for one in seen[counts]))
                    for name, counts in (("with", True), ("without", False))
                },
                "cpu_us": {"with": round(least[True], 2), "without": round(least[False], 2)},
                "reads_ratio": round(statistics.median(ratios), 4),
                "cpu_ratio": round(least[True] / least[False], 4),
                "ratios": [round(one, 3) for one in ratios],
            }
            if not arguments.json:
                one = results[kind]
                print(
                    f"{kind}: {one['reads_s']['with']:,} reads/s with, {one['reads_s']['without']:,} without: ratio "
                    f"{one['reads_ratio']} (rounds {one['ratios']}); processor time a read {one['cpu_us']['with']} and "
                    f"{one['cpu_us']['without']} µs: ratio {one['cpu_ratio']}",
                    flush=True,
                )
        if arguments.json:
            print(json.dumps(results, indent=2))
        return 0
    finally:
        for arm in arms:
            arm.end()
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
