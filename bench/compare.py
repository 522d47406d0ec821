"""Comparison of nvpool with the drive, FUSE alone and its peers: the same loads, on one machine, in one run.

    make bench                                            three rounds of everything
    python bench/compare.py --rounds 1 --seconds 1 --file-mib 256 --files 2000 --no-awake-peers          a first look
    python bench/compare.py --subjects 'plain|nvpool$' --only 'read4k|stat'                              a part of it
    python bench/compare.py --copies 2                                   the same with two copies of each byte, on the one drive
    python bench/compare.py --list                                                                       what there is

All subjects (bench/subjects) run, each with its own files on the drive of --directory. Within a round they take turns
load by load, and another one is first each time, so that disturbances of the drive affect all of them. A figure is the
median of the rounds. Floors and drive are measured with /dev/cpu_dma_latency held at 0, as nvpool's daemons hold it
while they have requests; peers are measured without and with it, and the better of the two counts. A peer that is not
installed (make bench-peers) or does not work is named as missing. Needs root: it drops the page cache of the machine,
and mounts. Ends and removes all it started, also when interrupted; the next run removes the files of a killed one.
Prints at the start how long it will take.

A whole run writes JSON, tables and a chart to bench/results; a part of a run only to --results. The goals are for one
copy, so a run with two copies has none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import report
from subjects import every_subject
from subjects.contract import Failed, Subject, write_out
from subjects.local import compile_c
from workloads import LOADS, MIB, Load, Place, Sizes, value_of
from workspace import busy_share, can_keep_awake, minutes, processors_awake, say, warn_of_others, workspace

HERE = Path(__file__).resolve().parent
STEM = {1: "peers", 2: "peers-two-copies"}
"""Copies -> file name of the results, without its suffix."""
FAILURES_MAX = 3
"""Failures of a subject in a row after which it is skipped; each may have taken minutes."""
START_S = {"socket": 1.0, "mount": 20.0}
"""Seconds to start a subject and make its files on two cores, by its first way; for the expected time."""


class Comparison:
    """One comparison. Its results are `places`, `missing`, `figures` and `failures`.

    `figures[subject, load][awake]` has a dict for each round."""

    def __init__(self, directory: Path, subjects: list[Subject], sizes: Sizes, awake_too: bool) -> None:
        self.directory, self.subjects, self.sizes, self.awake_too = directory, subjects, sizes, awake_too
        self.places: dict[str, Place] = {}
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.figures: dict[tuple[str, str], dict[bool, list[dict]]] = defaultdict(lambda: defaultdict(list))
        self.failures: dict[tuple[str, str], str] = {}
        self._in_a_row: dict[str, int] = defaultdict(int)
        self.busy_before = self.busy_idle = 0.0
        self._done = self._planned = 0
        self._begun_s = 0.0

    def start(self) -> None:
        self.busy_before = warn_of_others()
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
        self._begun_s = time.monotonic()
        self.busy_idle = busy_share(2.0)
        say(f"{self.busy_idle:.1%} of the processors are busy while nothing is asked of any of them")

    def stop(self) -> None:
        for subject in self.subjects:
            subject.stop()

    def ways(self, subject: Subject) -> tuple[bool, ...]:
        """Whether to measure with processors kept awake by the bench, without, or both. nvpool keeps them awake itself."""
        if not self.awake_too or subject.kind == "nvpool":
            return (False,)
        return (False, True) if subject.kind == "peer" else (True,)

    def plan(self, rounds: int, loads: list[Load]) -> float:
        """Count the measurements; return the expected seconds, with starts and stops."""
        subjects = [subject for subject in self.subjects if subject.missing() is None]
        self._planned = rounds * sum(
            len(self.ways(subject)) for load in loads for subject in subjects if load.suits(subject)
        )
        # most loads of many files end sooner; mounting again and dropping caches takes about a second
        return (
            sum(START_S[subject.offers[0]] for subject in subjects)
            + self._planned * (0.65 * self.sizes.seconds + 1.0)
            + 20
        )

    def left(self) -> str:
        """Progress, and the remaining time at the pace so far."""
        seconds = (time.monotonic() - self._begun_s) / max(self._done, 1) * (self._planned - self._done)
        return f"{self._done} of {self._planned}, {minutes(seconds)} left"

    def round(self, turn: int, loads: list[Load]) -> None:
        for at, load in enumerate(loads):
            names = [name for name, place in self.places.items() if load.suits(place.subject)]
            first = (turn + at) % max(len(names), 1)
            for name in names[first:] + names[:first]:
                for awake in self.ways(self.places[name].subject):
                    self._done += 1
                    if name not in self.missing:
                        self._measure(name, load, turn, awake)
            if names:
                say(f"round {turn + 1}: {load.name}: {self.left()}")

    def _measure(self, name: str, load: Load, turn: int, awake: bool) -> None:
        place = self.places[name]
        try:
            if not place.subject.attached():
                place.subject.attach()
            if load.cold:
                place.subject.forget()
            else:
                write_out(
                    self.directory
                )  # what the one before left in memory is not to be written at the cost of this one
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
        say(
            f"round {turn + 1}: {load.name}: {name}{', processors awake' if awake else ''}: "
            f"{report.number(value_of(load, found))} {load.unit}"
        )


def room_needed(sizes: Sizes, turns: int, copies: int) -> int:
    """Bytes on the drive for a subject when each load is run so many times."""
    # A block of the drive for each file, and as much again for its name, its inode and what a peer keeps of it.
    files = (turns * 3 + 1) * sizes.files * 8192
    return copies * (sizes.file_bytes * 2 + turns * sizes.write_bytes + files)


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
    parser.add_argument("--copies", type=int, choices=sorted(STEM), default=1, help="of each byte")
    parser.add_argument("--only", default="", help="regular expression: only loads whose key or name has it")
    parser.add_argument("--subjects", default="", help="regular expression: only subjects whose name has it")
    parser.add_argument(
        "--awake-peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure peers a second time with the processors kept awake, floors and drive only so",
    )
    parser.add_argument(
        "--directory", type=Path, default=HERE.parent / "build", help="on the drive to measure"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="write peers.json, peers.md and peers.svg there (two copies: peers-two-copies)",
    )
    parser.add_argument("--list", action="store_true", help="name subjects and loads, and what is missing")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = parsed(words)
    every = every_subject(options.copies)
    subjects = [subject for subject in every if re.search(options.subjects, subject.name)]
    loads = chosen_loads(options.only)
    if options.list:
        for subject in subjects:
            print(f"{subject.name:16} {subject.kind:8} {subject.missing() or 'can run here'}")
        for load in loads:
            print(f"{load.key:16} {load.by:8} {load.name}")
        return 0
    if os.geteuid() != 0:
        raise SystemExit("this needs root: to drop the page cache, to mount, and for the peers")
    if not subjects or not loads:
        raise SystemExit("nothing is left of the subjects or of the loads; --list names them")
    awake_too = options.awake_peers and can_keep_awake()
    file_bytes = options.file_mib * MIB
    sizes = Sizes(options.seconds, file_bytes, file_bytes // 2, options.files)
    comparison, begin, whole = None, time.monotonic(), False
    with workspace(options.directory) as (directory, ends):
        comparison = Comparison(directory, subjects, sizes, awake_too)
        space = os.statvfs(directory)
        needed = sum(
            room_needed(sizes, options.rounds * len(comparison.ways(subject)), subject.copies)
            for subject in subjects
            if "mount" in subject.offers and subject.missing() is None
        )
        if space.f_bavail * space.f_frsize < needed:
            raise SystemExit(
                f"{options.directory} has {space.f_bavail * space.f_frsize >> 30} GiB free and this run may need "
                f"{needed >> 30}; a smaller --file-mib or fewer --rounds or --subjects take less"
            )
        ends.append(comparison.stop)
        say(
            f"{len(subjects)} subjects, {len(loads)} loads, {options.rounds} rounds, copies: {options.copies}: "
            f"this takes about {minutes(comparison.plan(options.rounds, loads))}"
        )
        comparison.start()
        for last in (False, True):
            for turn in range(options.rounds):
                comparison.round(turn, [load for load in loads if load.last == last])
        whole = options.rounds >= 3 and not options.only and not options.subjects
    if comparison is None:
        return 1
    results = report.summary(comparison, loads, options, time.monotonic() - begin)
    text = report.markdown(results)
    print(text)
    kept = options.results or (HERE / "results" if whole else None)
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        stem = STEM[options.copies]
        (kept / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
        (kept / f"{stem}.md").write_text(text + f"\n![times the best peer]({stem}.svg)\n")
        (kept / f"{stem}.svg").write_text(report.chart(results))
        say(f"written to {kept}")
    return 0 if comparison.figures else 1


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
