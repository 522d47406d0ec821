"""Cost of a client that floods a pool for another client: latency and rate with and without the flood.

    sudo python bench/flood.py --write             all kinds, three rounds, some five minutes; its table in bench/README.md
    sudo python bench/flood.py --kinds reads,creates --rounds 5 --seconds 10

A pool of one node, with one store and one shard, is started as processes, in a directory that is removed at the end. Two
users without the rights of a node connect to it through unix sockets. One floods (`flood_loads.py`); the other reads
4 KiB at random places of a file without short-circuit reads and looks up missing names, one request at a time, through
the SDK. The flood has a session, open files and grants, and its requests are served: `flood_loads.KINDS` has the kinds
and their requests. A kind whose requests are all refused proves nothing; the program says so and exits with 1.

    busy, busy-two    the floors: one or two processes that compute and know no pool. A flood takes the processor of its own
                      process, and one of a daemon that works for it; what these cost the other client on the same
                      processors, no limit of a daemon can prevent. What a kind costs beyond its floor, a limit could.

All kinds, the floors and twice no flood at all go by turns in each round. Goals: p99 with a flood is at most twice that
without, and the other client keeps nine tenths of its rate. Prints a table; --results writes the figures as JSON. Needs
root, to act as the two users. Ends and removes all it started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from flood_loads import KINDS, PARTS, Place, become
from report import commit, judged, machine, publish, times
from workspace import minutes, not_final, say, warn_of_others

from nvpool.client.state.options import ClientOptions
from nvpool.core.units import KIB, MIB
from nvpool.sdk.async_filesystem import AsyncFile, AsyncFileSystem
from nvpool.testing.env.pool import RealPool

HERE = Path(__file__).resolve().parent
CLIENT_UID = 65533
FILE_BYTES = 64 * MIB
NAMES, CLOSED = 10_000, 1024
"""Files of /many, which everybody may list, and of /closed, which root alone may search."""
WITHOUT = "without"
P99_GOAL, RATE_GOAL = 2.0, 0.9
SETTLES_S = 0.5
KINDS_OF_REQUEST = ("read", "look")
ENDS_S = 30.0


# -- the pool, and what lies in it


async def fill(pool: str) -> list[int]:
    """Make what both clients use, as root. Return the inodes of the files in /closed."""
    async with await AsyncFileSystem.connect(pool) as fs:
        await fs.write_bytes("/file", random.Random(2).randbytes(FILE_BYTES))
        for name, mode in (("/own", 0o777), ("/many", 0o755), ("/closed", 0o700)):
            await fs.mkdir(name)
            await fs.chmod(name, mode)
        for directory, count in (("/many", NAMES), ("/closed", CLOSED)):
            paths = [f"{directory}/name-{number:06d}" for number in range(count)]
            for first in range(0, count, 64):
                await asyncio.gather(*[fs.write_bytes(path, b"") for path in paths[first : first + 64]])
        return [(await fs.stat(path)).st_ino for path in paths]


def place_of(pool: RealPool, closed: list[int]) -> Place:
    known = pool.pool_map

    def socket_of(endpoints: tuple[str, ...]) -> str:
        return next(one for one in endpoints if one.startswith("stream+unix://"))

    return Place(
        socket_of(known.targets[0].endpoints),
        socket_of(known.shards[0].endpoints),
        known.targets[0].id,
        known.epoch,
        FILE_BYTES,
        closed,
    )


# -- the flood


@contextlib.contextmanager
def flooded(kind: str, place: Place) -> Iterator[dict]:
    """Run the flood while the body runs. On exit the dictionary has its replies and the processors that it used."""
    found: dict = {"replies": {}, "processors": 0.0}
    if kind == WITHOUT:
        yield found
        return
    words = [sys.executable, str(HERE / "flood_loads.py"), kind, json.dumps(place._asdict())]
    floods = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(KINDS[kind].processes)
    ]
    try:
        for flood in floods:
            if flood.stdout.readline().strip() != "floods":
                raise SystemExit(f"the flood {kind} has not begun; what its process printed says why")
        yield found
        for flood in floods:
            flood.send_signal(signal.SIGTERM)
        for flood in floods:
            line = flood.stdout.readline()
            if not line.startswith("{"):
                raise SystemExit(f"the flood {kind} has ended early; what its process printed says why")
            said = json.loads(line)
            found["replies"] = said["replies"]
            found["processors"] = round(found["processors"] + said["processors"], 2)
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()
            flood.stdout.close()


# -- the other client: a process that measures for so many seconds whenever it reads their number


async def latencies(fs: AsyncFileSystem, file: AsyncFile, seconds: float) -> dict:
    """Count, p50 and p99 in microseconds by kind of request; operations a second; errors."""
    dice, errors = random.Random(), 0  # names of earlier rounds may be in the client's cache
    found: dict[str, list[float]] = {kind: [] for kind in KINDS_OF_REQUEST}

    async def ask(kind: str) -> None:
        if kind == "read":
            await file.read(dice.randrange(FILE_BYTES // 4096) * 4096, 4096)
        else:
            await fs.exists(f"/none-{dice.getrandbits(60)}")

    begun_s = time.perf_counter()
    while time.perf_counter() < begun_s + seconds or not found["look"]:
        for kind in KINDS_OF_REQUEST:
            asked_s = time.perf_counter()
            try:
                await ask(kind)
            except OSError:
                errors += 1
            found[kind].append(time.perf_counter() - asked_s)
    rate = sum(map(len, found.values())) / (time.perf_counter() - begun_s)
    summaries = {
        kind: {
            "count": len(taken),
            "p50_us": round(share_of(taken, 0.5) * 1e6, 1),
            "p99_us": round(share_of(taken, 0.99) * 1e6, 1),
        }
        for kind, taken in found.items()
    }
    return summaries | {"rate": round(rate, 1), "errors": errors}


def share_of(values: list[float], share: float) -> float:
    """Quantile: the smallest value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def client(pool: str) -> None:
    options = ClientOptions(short_circuit=False, read_ahead_bytes=0)
    async with await AsyncFileSystem.connect(pool, options=options) as fs, await fs.open("/file") as file:
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            await latencies(fs, file, SETTLES_S)
            print(json.dumps(await latencies(fs, file, float(line))), flush=True)


@contextlib.contextmanager
def other_client(pool: str) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--client", pool],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if process.stdout.readline().strip() != "ready":
            raise SystemExit("the other client could not connect; what its process printed says why")
        yield process
        process.stdin.close()
        process.wait(ENDS_S)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def measured(process: subprocess.Popen, seconds: float) -> dict:
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("the other client has ended; what its process printed says why")
    return json.loads(line)


# -- rounds, and what came of them


def measure(pool: RealPool, kinds: list[str], rounds: int, seconds: float) -> dict[str, list[dict]]:
    """Measurements of each round by kind, WITHOUT included."""
    place = place_of(pool, asyncio.run(fill(str(pool.path))))
    found: dict[str, list[dict]] = {kind: [] for kind in (WITHOUT, *kinds)}
    middle = (len(kinds) + 1) // 2
    with other_client(str(pool.path)) as process:
        measured(process, 1.0)  # warm
        for number in range(rounds):
            turn = kinds[number % len(kinds) :] + kinds[: number % len(kinds)]
            for kind in (WITHOUT, *turn[:middle], WITHOUT, *turn[middle:]):
                with flooded(kind, place) as flood:
                    one = measured(process, seconds)
                found[kind].append(one | flood | {"load": round(os.getloadavg()[0], 1)})
                say(
                    f"round {number + 1} of {rounds}, {kind}: p99 of a read {one['read']['p99_us']:,.0f} µs, of a look "
                    f"{one['look']['p99_us']:,.0f} µs; {one['rate']:,.0f}/s; {flood['processors']} processors"
                )
    return found


def compared(rounds: dict[str, list[dict]]) -> dict[str, dict]:
    """Medians of the rounds of each kind, with their quotients to no flood and to the floors."""

    def of(kind: str, request: str, figure: str) -> float:
        return median(one[request][figure] for one in rounds[kind])

    def rate(kind: str) -> float:
        return median(one["rate"] for one in rounds[kind])

    bases = [base for base in (WITHOUT, "busy", "busy-two") if rounds.get(base)]
    found: dict[str, dict] = {}
    for kind, ones in rounds.items():
        row: dict = {"rate": rate(kind), "errors": sum(one["errors"] for one in ones)}
        row["rate_share"] = {base: round(rate(kind) / rate(base), 3) for base in bases}
        for request in KINDS_OF_REQUEST:
            row[request] = {figure: of(kind, request, figure) for figure in ("p50_us", "p99_us")}
            row[request]["p99_quotient"] = {
                base: round(row[request]["p99_us"] / of(base, request, "p99_us"), 2) for base in bases
            }
        row["processors"] = median(one["processors"] for one in ones)
        row["replies"] = merged([one["replies"] for one in ones])
        found[kind] = row
    return found


def merged(all_replies: list[dict]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for replies in all_replies:
        for method, results in replies.items():
            of_method = found.setdefault(method, {})
            for result, count in results.items():
                of_method[result] = of_method.get(result, 0) + count
    return found


def unserved(kinds: dict[str, dict]) -> list[str]:
    """Kinds with a method, or a part of one, that was never served although its requests are valid."""
    return [
        f"{kind}: {method} were not served ({', '.join(sorted(results))})"
        for kind, row in kinds.items()
        if kind != WITHOUT and KINDS[kind].is_served
        for method, results in row["replies"].items()
        if method != "connections" and (not results.get("served") or (method == PARTS and len(results) > 1))
    ]


def markdown(results: dict) -> str:
    head = (
        "| flood | served a second (refused) | its processors | p99 of a read, µs | × without (× busy) | "
        "p99 of a look, µs | × without (× busy) | rate, share of without (of busy) |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    lines, kinds = [head], results["kinds"]
    for kind, row in kinds.items():
        if kind == WITHOUT:
            p99 = [f"{row[request]['p99_us']:,.0f} | " for request in KINDS_OF_REQUEST]
            lines.append(f"| none | | | {' | '.join(p99)} | {row['rate']:,.0f}/s |")
            continue
        cells = [f"{kind}: {KINDS[kind].what}", answered(row["replies"], results), f"{row['processors']:.1f}"]
        for request in KINDS_OF_REQUEST:
            cells += [
                f"{row[request]['p99_us']:,.0f}",
                beside_floor(row[request]["p99_quotient"], P99_GOAL, at_most=True),
            ]
        cells.append(beside_floor(row["rate_share"], RATE_GOAL))
        lines.append(f"| {' | '.join(cells)} |")
    errors = sum(row["errors"] for row in kinds.values())
    return (
        f"{results['date']}, {results['machine']}; nvpool {results['commit']}; medians of {results['rounds']} rounds of "
        f"{results['seconds']:g} s, {minutes(results['took_s'])}. Errors of the other client: {errors}."
        f"{not_final(results['busy_before'])}\n\n" + "\n".join(lines) + "\n"
    )


def beside_floor(quotients: dict[str, float], goal: float, at_most: bool = False) -> str:
    """The quotient to no flood with its goal, and in brackets that to the floor `busy`."""
    floor = f" ({times(quotients['busy'])})" if "busy" in quotients else ""
    return judged(quotients[WITHOUT], goal, at_most) + floor


def answered(replies: dict[str, dict[str, int]], results: dict) -> str:
    """Requests a second that the flood was served, and in brackets those that were refused."""
    if not replies:
        return ""
    counts = [results for method, results in replies.items() if method != PARTS]
    served = sum(results.get("served", 0) for results in counts)
    refused = sum(sum(results.values()) for results in counts) - served
    whole_s = results["rounds"] * (results["seconds"] + SETTLES_S)
    return f"{served / whole_s:,.0f} ({refused / whole_s:,.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each kind in each round")
    parser.add_argument("--results", type=Path, help="write the figures to this file, as JSON")
    parser.add_argument(
        "--write", action="store_true", help="and to results/flood.json, and the table into bench/README.md"
    )
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        import nvpool.client.pool_client
        import nvpool.rpc.transports.stream  # noqa: F401 later imports may lie where the user may not read

        become(CLIENT_UID)
        asyncio.run(client(arguments.client))
        return 0
    kinds = arguments.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"there is no kind {', '.join(sorted(unknown))}; write some of {', '.join(KINDS)}")
    if os.geteuid():
        raise SystemExit("this needs root: both clients act as users without the rights of a node")
    busy_before, began_s = warn_of_others(), time.monotonic()
    top = Path(tempfile.mkdtemp(prefix="nvpool-bench-flood-", dir=arguments.directory))
    top.chmod(0o755)
    try:
        with RealPool(top / "pool", sizes=(512 * MIB,), shards=1) as pool:
            pool.make()
            pool.start()
            rounds = measure(pool, kinds, arguments.rounds, arguments.seconds)
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
        "kinds": compared(rounds),
        "each": rounds,
    }
    publish("flood", results, markdown(results), arguments.results, arguments.write)
    if found := unserved(results["kinds"]):
        say("\n".join(["these floods prove nothing:", *found]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
