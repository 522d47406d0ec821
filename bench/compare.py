"""nvpool beside the drive, the road and the peers: the same loads, on one machine, in one go.

    make bench                                            three rounds of everything
    python bench/compare.py --rounds 1 --seconds 1 --file-mib 256 --files 2000 --no-awake-peers          a first look
    python bench/compare.py --subjects 'plain|nvpool$' --only 'read4k|stat'                              a part of it
    python bench/compare.py --list                                                                       what there is

Subjects (bench/subjects) all run at once, each with its own files on the drive of --directory, and take turns load by load
within a round, another one first each time: what the drive does meanwhile hits all of them. A figure is the median of the
rounds. Peers, floors and drive are measured twice, the second time with /dev/cpu_dma_latency held at 0, as nvpool's own daemons
hold it while they have requests; the better of the two counts. A peer that is not installed (make bench-peers) or does not work
is named as missing. Needs root: it drops the page cache of the machine, and mounts. Ends and removes all it started, also when
interrupted; what a killed one left is removed by the next.

A whole run writes JSON, tables and a chart to bench/results; a part of one only where --results says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import struct
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import report  # noqa: E402
from subjects import every_subject  # noqa: E402
from subjects.contract import OWNER, Failed, Subject, mounted_below, sweep, sweep_left, write_out  # noqa: E402
from subjects.local import compile_c  # noqa: E402
from workloads import LOADS, MIB, Load, Place, Sizes, value_of  # noqa: E402

HERE = Path(__file__).resolve().parent
FAILURES_MAX = 3
"""In a row; each may have taken minutes."""
PREFIX = "compare-"
BUSY_MAX = 0.05
"""Of the processors, before anything of ours is started."""
CPU_LATENCY = Path("/dev/cpu_dma_latency")


class Comparison:
    """`places`, `missing`, `figures` and `failures` are what came of it; `figures[subject, load][awake]` has a dict a round."""

    def __init__(self, directory: Path, subjects: list[Subject], sizes: Sizes, awake_too: bool) -> None:
        self.directory, self.subjects, self.sizes, self.awake_too = directory, subjects, sizes, awake_too
        self.places: dict[str, Place] = {}
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.figures: dict[tuple[str, str], dict[bool, list[dict]]] = defaultdict(lambda: defaultdict(list))
        self.failures: dict[tuple[str, str], str] = {}
        self._in_a_row: dict[str, int] = defaultdict(int)
        self.busy_before = self.busy_idle = 0.0

    def start(self) -> None:
        self.busy_before = busy_share(2.0)
        if self.busy_before > BUSY_MAX:
            say(f"others keep {self.busy_before:.0%} of the processors busy: do not keep the figures of this run")
        if os.nice(0) > 0:
            say("started with `nice`: so are all but MooseFS, which raises itself; do not keep the figures of this run")
        program = compile_c(HERE / "files_load.c", self.directory / "files_load")
        for subject in self.subjects:
            begin = time.monotonic()
            try:
                reason = subject.missing()
                if reason is not None:
                    raise Failed(reason)
                mount = subject.start(self.directory / subject.name)
                outside = self.directory / f"names-{subject.name}"
                outside.mkdir()
                place = Place(subject, mount, outside, program, self.sizes)
                place.prepare()
                self.versions[subject.name] = subject.version()
            except (Failed, OSError) as failed:
                self.missing[subject.name] = str(failed)
                subject.stop()
                say(f"{subject.name}: missing: {failed}")
                continue
            self.places[subject.name] = place
            say(f"{subject.name}: ready with its files after {time.monotonic() - begin:.1f} s")
        self.busy_idle = busy_share(2.0)
        say(f"{self.busy_idle:.1%} of the processors are busy while nothing is asked of any of them")

    def stop(self) -> None:
        for subject in self.subjects:
            subject.stop()

    def round(self, turn: int, loads: list[Load]) -> None:
        for at, load in enumerate(loads):
            names = [name for name in self.places if name not in self.missing]
            first = (turn + at) % max(len(names), 1)
            for name in names[first:] + names[:first]:
                awake_too = self.awake_too and self.places[name].subject.kind != "nvpool"
                for awake in (False, True)[: 1 + awake_too]:
                    if name not in self.missing:
                        self._measure(name, load, turn, awake)

    def _measure(self, name: str, load: Load, turn: int, awake: bool) -> None:
        place = self.places[name]
        try:
            if not place.subject.attached():
                place.subject.attach()
            if load.cold:
                place.subject.forget()
            else:
                write_out(self.directory)  # what the one before left in memory is not to be written at the cost of this one
            with processors_awake(awake):
                found = load.do(place, f"{turn}{'-awake' if awake else ''}")
            if not place.subject.attached():
                raise Failed("its mount went away under the load")
        except (Failed, OSError, KeyError, ValueError) as failed:
            self.failures[name, load.key] = str(failed)
            say(f"round {turn + 1}: {load.name}: {name}: failed: {failed}")
            self._in_a_row[name] += 1
            if self._in_a_row[name] >= FAILURES_MAX:
                self.missing[name] = f"given up after {FAILURES_MAX} failures in a row, the last: {failed}"
            return
        self._in_a_row[name] = 0
        self.figures[name, load.key][awake].append(found)
        say(f"round {turn + 1}: {load.name}: {name}{', processors awake' if awake else ''}: "
            f"{report.number(value_of(load, found))} {load.unit}")


@contextlib.contextmanager
def processors_awake(wanted: bool):
    """The wish holds until the descriptor is closed (Documentation/power/pm_qos_interface.rst of Linux)."""
    if not wanted:
        yield
        return
    with open(CPU_LATENCY, "wb", buffering=0) as file:
        file.write(struct.pack("i", 0))
        yield


def busy_share(seconds: float) -> float:
    def ticks() -> tuple[int, int]:
        with open("/proc/stat") as file:
            fields = [int(word) for word in file.readline().split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # proc(5): the fourth and fifth are idle and waiting for I/O

    all_before, idle_before = ticks()
    time.sleep(seconds)
    all_after, idle_after = ticks()
    return 1 - (idle_after - idle_before) / max(all_after - all_before, 1)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def room_needed(sizes: Sizes, rounds: int, subjects: int, awake_too: bool) -> int:
    turns = rounds * (2 if awake_too else 1)
    # A block of the drive for each file, and as much again for its name, its inode and what a peer keeps of it.
    return subjects * (sizes.file_bytes * 2 + turns * sizes.write_bytes + (turns * 3 + 1) * sizes.files * 8192)


def chosen_loads(pattern: str) -> list[Load]:
    chosen = [load for load in LOADS if re.search(pattern, load.key) or re.search(pattern, load.name)]
    needed = {load.needs for load in chosen}
    return [load for load in LOADS if load in chosen or load.key in needed]


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load in each round, at most")
    parser.add_argument("--file-mib", type=int, default=1024, help="the large file")
    parser.add_argument("--files", type=int, default=10_000, help="4 KiB files in the one directory")
    parser.add_argument("--only", default="", help="regular expression: only loads whose key or name has it")
    parser.add_argument("--subjects", default="", help="regular expression: only subjects whose name has it")
    parser.add_argument("--awake-peers", action=argparse.BooleanOptionalAction, default=True,
                        help="measure all but nvpool a second time with the processors kept awake")
    parser.add_argument("--directory", type=Path, default=HERE.parent / "build", help="on the drive to measure")
    parser.add_argument("--results", type=Path, help="write peers.json, peers.md and peers.svg there")
    parser.add_argument("--list", action="store_true", help="name subjects and loads, and what is missing")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = parsed(words)
    subjects = [subject for subject in every_subject() if re.search(options.subjects, subject.name)]
    loads = chosen_loads(options.only)
    if options.list:
        for subject in subjects:
            print(f"{subject.name:16} {subject.kind:8} {subject.missing() or 'can run here'}")
        for load in loads:
            print(f"{load.key:16} {load.name}")
        return 0
    if os.geteuid() != 0:
        raise SystemExit("this needs root: to drop the page cache, to mount, and for the peers")
    if not subjects or not loads:
        raise SystemExit("nothing is left of the subjects or of the loads; --list names them")
    awake_too = options.awake_peers and os.access(CPU_LATENCY, os.W_OK)
    file_bytes = options.file_mib * MIB
    sizes = Sizes(options.seconds, file_bytes, file_bytes // 2, options.files)
    options.directory.mkdir(parents=True, exist_ok=True)
    sweep_left(options.directory.resolve(), PREFIX, say)
    space = os.statvfs(options.directory)
    needed = room_needed(sizes, options.rounds, len(subjects), awake_too)
    if space.f_bavail * space.f_frsize < needed:
        raise SystemExit(f"{options.directory} has {space.f_bavail * space.f_frsize >> 30} GiB free and this run may need "
                         f"{needed >> 30}; a smaller --file-mib or fewer --rounds or --subjects take less")
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=options.directory)).resolve()
    (directory / OWNER).write_text(str(os.getpid()))
    comparison, begin, whole = Comparison(directory, subjects, sizes, awake_too), time.monotonic(), False

    def interrupted(number, frame):
        raise KeyboardInterrupt

    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in ends:
        signal.signal(number, interrupted)
    try:
        comparison.start()
        for last in (False, True):
            for turn in range(options.rounds):
                comparison.round(turn, [load for load in loads if load.last == last])
        whole = options.rounds >= 3 and not options.only and not options.subjects
    except KeyboardInterrupt:
        say("interrupted; stopping what was started, which takes a few seconds")
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_IGN)
        comparison.stop()
        sweep(directory)
        if directory.exists():
            say(f"{directory} could not be removed; mounted below it: {mounted_below(directory)}")
    results = report.summary(comparison, loads, options, time.monotonic() - begin)
    text = report.markdown(results)
    print(text)
    kept = options.results or (HERE / "results" if whole else None)
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "peers.json").write_text(json.dumps(results, indent=1) + "\n")
        (kept / "peers.md").write_text(text + "\n![times the best peer](peers.svg)\n")
        (kept / "peers.svg").write_text(report.chart(results))
        say(f"written to {kept}")
    return 0 if comparison.figures else 1


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
