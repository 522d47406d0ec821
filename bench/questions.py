"""Latency against concurrency, cost of a read by layer, throughput against targets and clients.

    make bench-questions                                           three rounds of everything
    python bench/questions.py --rounds 1 --seconds 0.5             a first look
    python bench/questions.py --only layers                        one of: concurrency, layers, throughput

4 KiB random reads (throughput: 128 KiB too) of a file that fits into memory; floors and pools are on the drive of
--directory and take turns, and the processors are kept awake for all of them (/dev/cpu_dma_latency). For what is "cold" the
page cache of the machine is dropped before. A figure is the median of the rounds. concurrency.py, layers.py and throughput.py
say what is measured and why. Needs root: it mounts, and drops the page cache. Ends and removes all it started, also when
interrupted.

A whole run writes JSON, tables and charts to bench/results (questions.json, .md, .svg); a part of one where --results says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
import concurrency
import layers
import loads
import throughput
from compare import Comparison
from drawing import Line, Sheet
from report import commit, machine
from sdk_loads import COLD_PARTS
from subjects.contract import MARK, Failed, drop_page_cache, run
from subjects.local import FuseBare, FuseFromMemory, PlainDirectory
from subjects.pool import VARIANTS, Pool
from workloads import KIB, MIB, Sizes, fio
from workspace import can_keep_awake, minutes, processors_awake, say, workspace

HERE = Path(__file__).resolve().parent
QUESTIONS = ("concurrency", "layers", "throughput")
BY_COLUMN = {variant.column: variant for variant in VARIANTS if variant.column}
SHORT, STREAM = BY_COLUMN["same host"], BY_COLUMN["tcp"]


class Asked:
    """The subjects of the first two questions, started, and what they are asked. `region` bytes of each file are read."""

    def __init__(self, directory: Path, seconds: float, region: int, rounds: int) -> None:
        self.seconds, self.region, self.rounds = seconds, region, rounds
        self.directory = directory
        self.plain, self.memory, self.bare = PlainDirectory(), FuseFromMemory(), FuseBare()
        self.short, self.stream = Pool(SHORT), Pool(STREAM)
        self.comparison = Comparison(
            directory,
            [self.plain, self.memory, self.bare, self.short, self.stream],
            Sizes(seconds, region, 0, 1),
            False,
        )

    def start(self) -> None:
        self.comparison.start()
        if self.comparison.missing:
            raise Failed("; ".join(f"{name}: {reason}" for name, reason in self.comparison.missing.items()))

    def stop(self) -> None:
        self.comparison.stop()

    def mounted(self, subject, threads: int, direct: bool = True) -> dict:
        """fio's threads for so many seconds, on bytes that the server has in memory."""
        run(
            "dd",
            f"if={subject.mount / 'large'}",
            "of=/dev/null",
            "bs=1M",
            f"count={self.region // MIB}",
            "status=none",
            *(["iflag=direct"] if direct else []),
        )
        return loads.fio(
            subject.mount / "large",
            "randread",
            4 * KIB,
            threads,
            self.seconds,
            direct=direct,
            size_bytes=self.region,
        )

    def sdk(self, pool: Pool, verb: str, *words: object) -> dict:
        return json.loads(pool.sdk(verb, "/large", "--region", self.region, *words, seconds=self.seconds))

    # -- latency against concurrency ---------------------------------------------------------------------------------------

    def concurrency(self, levels: list[int]) -> dict:
        ways = {
            "SDK, short cut": lambda level: self.sdk(self.short, "flight", "--in-flight", level),
            "SDK, stream": lambda level: self.sdk(self.stream, "flight", "--in-flight", level),
            "mount, short cut": lambda level: self.mounted(self.short, level),
            "mount, stream": lambda level: self.mounted(self.stream, level),
        }
        return concurrency.measure(ways, levels, self.rounds, say)

    # -- layer by layer ----------------------------------------------------------------------------------------------------

    def layers(self) -> dict:
        found: dict[str, list[float]] = {}
        steps = self._steps()
        for turn in range(self.rounds):
            for name, step in steps.items():
                found.setdefault(name, []).append(step()["p50_us"])
                say(f"round {turn + 1}: {name}: p50 {found[name][-1]:,.1f} µs")
        p50_us = {name: median(values) for name, values in found.items()}
        return {"p50_us": p50_us, "rounds": found, "rows": layers.split(p50_us)}

    def _steps(self) -> dict[str, Callable[[], dict]]:
        """Measurements for layers.split, in this order: cold ones come last."""
        pools = {"stream": self.stream, "short cut": self.short}
        steps: dict[str, Callable[[], dict]] = {
            "bare": lambda: self.mounted(self.bare, 1),
            "floor": lambda: self.mounted(self.memory, 1),
            "wire": lambda: json.loads(
                self.stream.run(sys.executable, HERE / "loads.py", "echo", "stream", self.seconds)
            ),
            "drive warm": lambda: self.mounted(self.plain, 1, direct=False),
            "raw warm": lambda: self.sdk(self.stream, "raw"),
        }
        steps |= {f"sdk {road} warm": lambda pool=pool: self.sdk(pool, "one") for road, pool in pools.items()}
        steps |= {
            f"mount {road} warm": lambda pool=pool: self.mounted(pool, 1) for road, pool in pools.items()
        }
        steps |= {
            "drive cold": lambda: self._cold(self.plain),
            "raw cold": lambda: self._cold_sdk(self.stream, "raw"),
        }
        steps |= {
            f"sdk {road} cold": lambda pool=pool: self._cold_sdk(pool, "one") for road, pool in pools.items()
        }
        steps |= {f"mount {road} cold": lambda pool=pool: self._cold(pool) for road, pool in pools.items()}
        return steps

    def _cold(self, subject) -> dict:
        """O_DIRECT reads of a file that is in nobody's memory, each block at most once, and few of them (see COLD_PARTS)."""
        subject.forget()
        place = self.comparison.places[subject.name]
        return fio(place, place.large, "randread", 4 * KIB, 1, direct=True, parts=COLD_PARTS)

    def _cold_sdk(self, pool: Pool, verb: str) -> dict:
        drop_page_cache(self.directory)
        return self.sdk(pool, verb, "--cold")


def scaled(directory: Path, options: argparse.Namespace, ends: list) -> dict:
    """Throughput of pools of so many targets, one after the other, by so many client processes."""
    rows, region = [], options.region_mib * MIB
    for targets in options.targets:
        pool = Pool(STREAM._replace(name=f"targets-{targets}"), targets)
        ends.append(pool.stop)
        with open(pool.start(directory / pool.name) / "large", "wb") as file:
            for _ in range(region // MIB):
                file.write(os.urandom(MIB))
            os.fsync(file.fileno())
        found: dict[tuple, list[dict]] = {}
        for turn in range(options.rounds):
            for variant, way in ((STREAM, "stream"), (SHORT, "short cut")):
                for block, block_bytes in throughput.BLOCKS.items():
                    command = pool.sdk_command(
                        "flight",
                        "/large",
                        "--region",
                        region,
                        "--block",
                        block_bytes,
                        "--in-flight",
                        throughput.IN_FLIGHT,
                        "--seconds",
                        options.seconds,
                        "--wait",
                        variant=variant,
                    )
                    for processes in options.clients:
                        one = throughput.together([command] * processes, pool.environment(), options.seconds)
                        found.setdefault((way, block, processes), []).append(one)
                        say(
                            f"round {turn + 1}: {targets} targets, {processes} clients, {way}, {block}: "
                            f"{one['rate']:,.0f} reads/s"
                        )
        rows += [
            {"way": way, "block": block, "targets": targets, "processes": processes}
            | throughput.medians(ones)
            for (way, block, processes), ones in found.items()
        ]
        pool.stop()
    return {"rows": rows}


# -- what came of it -------------------------------------------------------------------------------------------------------


def markdown(results: dict) -> str:
    parts = [
        "# Questions",
        f"{results['date']}, {results['machine']}; nvpool {results['commit']}; medians of "
        f"{results['rounds']} rounds of {results['seconds']:g} s, 4 KiB random reads of {results['region_mib']} MiB in "
        f"memory unless said otherwise; {minutes(results['took_s'])}.",
    ]
    if "concurrency" in results:
        knees = ", ".join(f"{name}: {found['knee']}" for name, found in results["concurrency"].items())
        parts += [
            "## Latency against concurrency",
            concurrency.table(results["concurrency"]),
            f"The knee is the smallest number in flight with nine tenths of the largest rate: {knees}.",
        ]
    if "layers" in results:
        parts += [
            "## Cost of a read, layer by layer",
            layers.table(results["layers"]["rows"]),
            "By subtraction of floors of the same run, see layers.py; the client is what is left: less than nothing "
            "where one compiled step does the engine's part too. Of what is cold a quarter of the region is read.",
        ]
    if "throughput" in results:
        parts += [
            "## Targets and client processes",
            throughput.table(results["throughput"]["rows"]),
            f"All on one drive and the same processors; {throughput.IN_FLIGHT} reads in flight a process.",
        ]
    return "\n\n".join(parts) + "\n"


def chart(results: dict) -> str:
    sheet = Sheet(f"Questions, {results['date']}")
    if "concurrency" in results:
        series = list(results["concurrency"].items())

        def line(at: int, key: str, dashed: bool = False, note: str = "") -> Line:
            name, found = series[at]
            points = [(point["in_flight"], point[key]) for point in found["points"]]
            return Line(name + note, points, None if dashed else found["knee"], dashed, at)

        sheet.lines(
            "4 KiB random reads a second, by reads in flight; rings: the knee",
            [line(at, "rate") for at in range(len(series))],
        )
        sheet.lines(
            "their latency in µs, by reads in flight",
            [
                line(at, key, dashed, note)
                for at in range(len(series))
                for key, dashed, note in (("p50_us", False, ", p50"), ("p99_us", True, ", p99"))
            ],
            log_y=True,
        )
    if "layers" in results:
        rows = results["layers"]["rows"]
        sheet.stacked(
            "Cost of a 4 KiB read, one at a time, in µs",
            [(layers.name_of(row), [row["layers"][name] for name in layers.LAYERS]) for row in rows],
            layers.LAYERS,
            "µs",
        )
    if "throughput" in results:
        for block in throughput.BLOCKS:
            for way in ("stream", "short cut"):
                groups: dict[int, dict[int, float]] = {}
                for row in results["throughput"]["rows"]:
                    if (row["block"], row["way"]) == (block, way):
                        groups.setdefault(row["targets"], {})[row["processes"]] = row["rate"]
                sheet.bars(
                    f"{block} reads a second, {way}, by targets and client processes",
                    [
                        (f"{targets} target{'s' * (targets > 1)}", [found[count] for count in sorted(found)])
                        for targets, found in groups.items()
                    ],
                    [f"{count} client{'s' * (count > 1)}" for count in sorted(next(iter(groups.values())))],
                    "/s",
                )
    return sheet.svg()


def numbers(text: str) -> list[int]:
    return sorted({int(word) for word in text.split(",")})


def expected_s(options: argparse.Namespace, wanted: list[str]) -> float:
    """A step takes its seconds and about one more: for a process to start, or a mount to be created again."""
    steps = {
        "concurrency": 4 * len(options.in_flight),
        "layers": 15,
        "throughput": 4 * len(options.targets) * len(options.clients),
    }
    return 60 + options.rounds * (options.seconds + 1.2) * sum(steps[name] for name in wanted)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each step")
    parser.add_argument("--region-mib", type=int, default=64, help="the part of each file that is read")
    parser.add_argument("--only", choices=QUESTIONS, action="append", help="one question; repeat it")
    for name, default in (
        ("in-flight", concurrency.LEVELS),
        ("targets", throughput.TARGETS),
        ("clients", throughput.PROCESSES),
    ):
        parser.add_argument(f"--{name}", type=numbers, default=default, metavar="N,…")
    parser.add_argument(
        "--directory", type=Path, default=HERE.parent / "build", help="on the drive to measure"
    )
    parser.add_argument(
        "--results", type=Path, help="write questions.json, questions.md and questions.svg there"
    )
    options = parser.parse_args(words)
    if os.geteuid() != 0:
        raise SystemExit("this needs root: to drop the page cache, and to mount")
    wanted = [name for name in QUESTIONS if not options.only or name in options.only]
    say(f"{', '.join(wanted)}: this takes about {minutes(expected_s(options, wanted))}")
    results: dict = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "commit": commit(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "region_mib": options.region_mib,
    }
    begin, whole = time.monotonic(), False
    with workspace(options.directory) as (directory, ends), processors_awake(can_keep_awake()):
        os.environ[MARK] = str(directory)  # also what is started without a subject is ended with the rest
        if {"concurrency", "layers"} & set(wanted):
            asked = Asked(directory, options.seconds, options.region_mib * MIB, options.rounds)
            ends.append(asked.stop)
            asked.start()
            if "concurrency" in wanted:
                results["concurrency"] = asked.concurrency(options.in_flight)
            if "layers" in wanted:
                results["layers"] = asked.layers()
            asked.stop()
        if "throughput" in wanted:
            results["throughput"] = scaled(directory, options, ends)
        whole = options.rounds >= 3 and not options.only
    results["took_s"] = round(time.monotonic() - begin)
    print(markdown(results))
    kept = options.results or (HERE / "results" if whole else None)
    answered = all(name in results for name in wanted)
    if kept is not None and answered:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "questions.json").write_text(json.dumps(results, indent=1) + "\n")
        (kept / "questions.md").write_text(markdown(results) + "\n![questions](questions.svg)\n")
        (kept / "questions.svg").write_text(chart(results))
        say(f"written to {kept}")
    return 0 if answered else 1


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
