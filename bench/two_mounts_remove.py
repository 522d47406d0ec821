"""Removal of one tree by two `rm -rf` at the same time: from two mounts beside two processes on one mount, in turns.

    python bench/two_mounts_remove.py                                     three rounds, below the current directory
    python bench/two_mounts_remove.py --rounds 5 --directories 200 --files 100 /srv
    python bench/two_mounts_remove.py --directories 10 --files 10         a first look

A pool of its own below DIRECTORY, mounted twice by a process each: for the metadata service these are two nodes. A round makes
the same tree twice, through the first mount, and each time two `rm -rf` begin together to remove it. Prints one JSON object:
the seconds until both have ended, on one mount and on two, and the quotient of the two, medians of the rounds; --results writes
it to a file. An `rm` that does not end with 0, or says something, ends the program with 1. Removes all it made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from subjects.contract import wait_until

from nvpool.core.programs import Program, command

WAYS = ("one mount", "two mounts")
QUOTIENT_MAX = 5.0
"""Goal: two mounts take at most so many times as long as two processes on one mount."""


def nvpool(*words: object) -> None:
    subprocess.run(command(Program.CLI, *map(str, words)), check=True, stdout=subprocess.DEVNULL)


def make_tree(top: Path, directories: int, files: int) -> None:
    """A tree of two levels: some ten directories at the top, the others and their files below."""
    for directory in range(directories):
        place = top / str(directory % 10) / str(directory)
        place.mkdir(parents=True)
        for name in range(files):
            (place / str(name)).touch()


def remove(places: list[Path]) -> float:
    """Remove the tree by one `rm -rf` for each of its paths, all at the same time; seconds until the last has ended."""
    began_s = time.perf_counter()
    running = [
        subprocess.Popen(["rm", "-rf", "--", place], stderr=subprocess.PIPE, text=True) for place in places
    ]
    ends = [(process.communicate()[1], process.returncode) for process in running]
    took_s = time.perf_counter() - began_s
    for place, (said, code) in zip(places, ends, strict=True):
        if code or said:
            raise SystemExit(f"rm -rf {place} ended with {code}: {said}")
        wait_until(lambda place=place: not place.exists(), f"{place} is still there after rm -rf")
    return took_s


def measure(options: argparse.Namespace, directory: Path) -> list[dict[str, float]]:
    """Seconds of each way, for each round."""
    mounts = [directory / name for name in ("m1", "m2")]
    rounds = []
    nvpool("dev", "up", directory / "pool", "--size", "4G")
    try:
        for place in mounts:
            place.mkdir()
            nvpool("mount", directory / "pool", place)
            wait_until(lambda place=place: os.path.ismount(place), f"{place} is not mounted")
        for turn in range(options.rounds):
            took_s = {}
            for way in WAYS[:: -1 if turn % 2 else 1]:
                name = f"{way.replace(' ', '-')}-{turn}"
                make_tree(mounts[0] / name, options.directories, options.files)
                used = mounts if way == "two mounts" else [mounts[0]] * 2
                took_s[way] = remove([place / name for place in used])
            rounds.append(took_s)
            print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
    finally:
        for place in filter(os.path.ismount, mounts):
            nvpool("umount", place)
        nvpool("dev", "down", directory / "pool")
    return rounds


def result_of(rounds: list[dict[str, float]]) -> dict:
    """The medians of the rounds, and of the rounds' quotients."""
    quotient = median(one["two mounts"] / one["one mount"] for one in rounds)
    return {
        **{f"{way} s": round(median(one[way] for one in rounds), 3) for way in WAYS},
        "quotient": round(quotient, 2),
        "goal": QUOTIENT_MAX,
        "meets the goal": quotient <= QUOTIENT_MAX,
        "rounds": [{way: round(one[way], 3) for way in WAYS} for one in rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", default=".", type=Path, metavar="DIRECTORY")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directories", type=int, default=100, help="directories of a tree [100]")
    parser.add_argument("--files", type=int, default=50, help="empty files in each of them [50]")
    parser.add_argument("--results", type=Path, help="also write the object to this file")
    options = parser.parse_args()
    if min(options.rounds, options.directories) < 1 or options.files < 0:
        parser.error("give at least one round and one directory, and no negative number of files")
    with tempfile.TemporaryDirectory(prefix="two-mounts-", dir=options.directory) as name:
        rounds = measure(options, Path(name).resolve())
    text = json.dumps(
        {"directories": options.directories, "files": options.files} | result_of(rounds), indent=1
    )
    print(text)
    if options.results:
        options.results.write_text(text + "\n")


if __name__ == "__main__":
    main()
