"""One metadata shard with 1, 10 and 100 million files: bytes of LMDB, rates, memory, starts and listings at each size.

    make bench-scale                                                        everything: an hour and 60 GB the first time
    python bench/scale.py --sizes 1e6 --shape many                          a first look: four minutes
    python bench/scale.py --keep DIR --make-only                            make the databases and keep them
    python bench/scale.py --keep DIR --reuse --results bench/results        measure those that are kept, and nothing else

Databases are made offline with the very records of the service (bench/millions/tree.py says of what files), with
pages as full as a service leaves them; up to --check files one is also made by a running service and compared. What is
measured is a copy in a pool of its own, served by a real metadata daemon and asked over its real transport; a kept database is
never changed. Needs no root. Ends and removes all it started, also when interrupted; what a killed one left is removed by the
next.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import report as machine_report
import uvloop
from millions import build, report
from millions.loads import Client
from millions.measure import Options, measured
from millions.shard import Failed, Shard
from millions.tree import PER_DIRECTORY
from subjects.contract import MARK
from workspace import say, warn_of_others, workspace

from nvpool.kv.engine import LmdbKv, LmdbOptions

HERE = Path(__file__).resolve().parent
MADE = "made.json"
MADE_FORMAT = 2
DENSE_FILES_MAX = 10_000_000
"""Up to here the records are laid without a gap too: bytes a file are the same with more of them."""


class Progress:
    """Progress of a step and its remaining time: one line on a terminal, sometimes a line elsewhere.

    Steps of less than a second are not shown.
    """

    LINE_S = 10.0

    def __init__(self, what: str) -> None:
        self._what = what
        self._terminal = sys.stderr.isatty()
        self._began_s = time.monotonic()
        self._next_s = self._began_s + 1.0

    def __call__(self, share: float) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        passed_s = now_s - self._began_s
        self._next_s = now_s + (0.5 if self._terminal else self.LINE_S)
        left = f", {passed_s / share * (1 - share):.0f} s left" if share > 0 else ""
        text = f"{self._what}: {share:.0%} after {passed_s:.0f} s{left}"
        print(
            f"\r\x1b[K{text}" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def run(work: Coroutine) -> Any:
    """Its outcome. An interruption comes out as one also where several tasks were at work."""
    try:
        return asyncio.run(work)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from None
        raise


class Bench:
    """`keep`: where databases stay; None: they are made in `work` and go with it."""

    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self.work, self.options = work, options
        self._databases = options.keep or work / "made"
        self._environment = {MARK: str(work)}
        self._shown: Progress | None = None

    def progress(self, what: str) -> Callable[[Callable[[float], None]], Progress]:
        def begin(part: str) -> Progress:
            if self._shown is not None:
                self._shown.end()
            self._shown = Progress(f"{what}: {part}")
            return self._shown

        return begin

    def database(self, shape: str, files: int) -> Path:
        return self._databases / f"{shape}-{files}"

    def made(self, shape: str, files: int) -> dict | None:
        """Description of a complete database, or None."""
        try:
            made = json.loads((self.database(shape, files) / MADE).read_text())
        except FileNotFoundError:
            return None
        return made if made.get("format") == MADE_FORMAT else None

    def make(self, shape: str, files: int) -> dict:
        place, begin = (
            self.database(shape, files),
            self.progress(f"{report.short(files)} files, {report.SHAPES[shape]}"),
        )
        shutil.rmtree(place, ignore_errors=True)
        self._databases.mkdir(exist_ok=True)
        self._refuse_without_room(self._databases, files, "to make")
        per_directory = PER_DIRECTORY if shape == "many" else 0
        dense = self.work / "dense" if files <= DENSE_FILES_MAX else None
        place.mkdir()
        try:
            made = build.build(place / "shard", files, per_directory, dense, begin("making"))
            if files <= self.options.check:
                made["by_service"] = run(self._by_service(place / "shard", files, per_directory, begin))
            made |= {"format": MADE_FORMAT, "commit": machine_report.commit()}
            (place / MADE).write_text(json.dumps(made, indent=1) + "\n")  # last: from here on it is whole
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        say(f"{place.name}: made in {made['made_s']:.0f} s, {made['used_bytes'] / files:.1f} bytes a file")
        return made

    async def _by_service(self, offline: Path, files: int, per_directory: int, begin) -> dict:
        """The same files made by a running service: what its database takes, and whether it holds the same."""
        empty = self.work / "empty"
        await build.begun(empty)
        shard = Shard(self.work / "served", empty, self._environment)
        began_s = time.monotonic()
        try:
            connection, _ = await shard.start()
            client = await Client(connection).begin()
            await client.make_tree(files, per_directory, begin("made once more by a service"))
            await shard.stop()
            took_s, found = time.monotonic() - began_s, build.pages(shard.path)
            kvs = [await LmdbKv.open(path, LmdbOptions()) for path in (offline, shard.path)]
            try:
                return {
                    "took_s": took_s,
                    **found,
                    **build.compared(*kvs, files, per_directory, begin("compared")),
                }
            finally:
                for kv in kvs:
                    await kv.close()
        finally:
            await shard.close()
            shard.end()
            shutil.rmtree(self.work / "served", ignore_errors=True)

    def measure(self, shape: str, files: int, made: dict) -> dict:
        database = self.database(shape, files)
        self._refuse_without_room(self.work, files, "to measure a copy of")
        begin = self.progress(f"{report.short(files)} files, {report.SHAPES[shape]}")
        options = Options(self.options.seconds, self.options.list_whole)
        figures = run(measured(self.work, database / "shard", made, options, self._environment, begin))
        return {"shape": shape, "files": files, "made": made, "figures": figures}

    def empty(self) -> dict:
        made = {"files": 0, "per_directory": 0, "name_key": bytes(16).hex()}
        return run(measured(self.work, None, made, Options(0, 0), self._environment, self.progress("empty")))

    @staticmethod
    def _refuse_without_room(place: Path, files: int, what: str) -> None:
        space = os.statvfs(place)
        free, needed = space.f_bavail * space.f_frsize, files * build.BYTES_A_FILE + build.ENGINE_BYTES
        if files <= DENSE_FILES_MAX:
            needed *= 2
        if free < needed:
            raise Failed(
                f"{place} has {free / (1 << 30):.1f} GiB free; {what} {report.short(files)} files may take "
                f"{needed / (1 << 30):.1f}; name another place with --directory and --keep, or smaller --sizes"
            )


def sizes(text: str) -> list[int]:
    found = [int(float(word)) for word in text.split(",")]
    if not all(0 < size < 1 << 32 for size in found):
        raise argparse.ArgumentTypeError("sizes are numbers of files, as 1e6,1e7")
    return found


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", type=sizes, default=[10**6, 10**7, 10**8], help="numbers of files, as 1e6,1e7,1e8"
    )
    parser.add_argument(
        "--shape",
        choices=("one", "many", "both"),
        default="both",
        help=f"all in one directory, or {PER_DIRECTORY} in each of many",
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load")
    parser.add_argument(
        "--list-whole",
        type=lambda text: int(float(text)),
        default=10**7,
        metavar="FILES",
        help="list a directory of so many files to its end",
    )
    parser.add_argument(
        "--check",
        type=lambda text: int(float(text)),
        default=10**6,
        metavar="FILES",
        help="of so many files also make a database through a service, and compare",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the databases there")
    parser.add_argument("--reuse", action="store_true", help="of --keep take what is there, and make nothing")
    parser.add_argument("--make-only", action="store_true", help="measure nothing")
    parser.add_argument(
        "--directory", type=Path, default=HERE.parent / "build", help="on the drive to measure"
    )
    parser.add_argument("--results", type=Path, help="write scale.json and scale.md there")
    parser.add_argument("--write", action="store_true", help="put the table into bench/README.md")
    options = parser.parse_args(words)
    if (options.reuse or options.make_only) and not options.keep:
        parser.error("--reuse and --make-only want --keep")
    return options


def main(words: list[str] | None = None) -> int:
    options = parsed(words)
    for place in filter(None, (options.directory, options.keep)):
        place.mkdir(parents=True, exist_ok=True)
    if options.keep:
        options.keep = options.keep.resolve()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    begin, code, cases, empty, busy_before = time.monotonic(), 130, [], None, warn_of_others()
    with workspace(options.directory) as (work, _):
        bench = Bench(work, options)
        shapes = list(report.SHAPES) if options.shape == "both" else [options.shape]
        try:
            if not options.make_only:
                empty = bench.empty()
            for files in options.sizes:
                for shape in shapes:
                    made = bench.made(shape, files)
                    if made is None and options.reuse:
                        say(f"{bench.database(shape, files)} is not there; left out")
                        continue
                    made = made or bench.make(shape, files)
                    if not options.make_only:
                        cases.append(bench.measure(shape, files, made))
            code = 0
        except Failed as failed:
            say(f"\n{failed}")
            code = 1
    if cases:
        results = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine_report.machine(),
            "commit": machine_report.commit(),
            "took_s": round(time.monotonic() - begin),
            "seconds": options.seconds,
            "busy_before": busy_before,
            "empty": empty,
            "cases": cases,
        }
        write_results(results, options, whole=not code)
    return code


def write_results(results: dict, options: argparse.Namespace, whole: bool) -> None:
    text = report.markdown(results)
    print(text)
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "scale.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.results / "scale.md").write_text(text)
        say(f"written to {options.results}")
    if options.write and whole:
        machine_report.put_into_readme("scale", text.partition("\n\n")[2].replace("## ", "### "))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
