"""What a client that floods a pool costs another one: latency of small reads and looks with and without it.

    python bench/flood.py                          three rounds of each kind, in a directory below /tmp that is removed
    python bench/flood.py --kinds requests,slow --rounds 5 --seconds 10

A pool of one node is started as processes. One client (root, or the user of this program, by unix socket) reads 4 KiB
at random places of a file without short-circuit reads, and asks for missing names, one request at a time. Another
process floods the store and the shard from an address without a certificate, or where those do not listen on TCP as
the user `nobody`, by kind:

    requests      8 connections with 256 small requests in flight each
    connections   as many connections as it is given, and more all the time
    slow          200 connections that send a byte a second
    unread        50 connections that ask for a mebibyte each, again and again, and never read
    busy          the floor: a process that only computes and knows no pool. What it costs, no daemon can prevent: the flooding
                  client's own work on the same processors

Rounds with and without a flood go by turns. Prints one JSON object with p50 and p99 in microseconds, their quotients, and the
load of the machine; --results writes it to a file. Ends and removes all it started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pwd
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nvpool.client.state.options import ClientOptions
from nvpool.core.endpoint import parse_endpoint
from nvpool.core.units import KIB, MIB
from nvpool.poolmap.model import decode_map
from nvpool.rpc.api import Greeting
from nvpool.rpc.handshake import encode_hello
from nvpool.rpc.transports.frame import HELLO, REQUEST, pack_head
from nvpool.rpc.v1.wire_pb2 import DATA_READ, META_STATFS
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.env.pool import RealPool

KINDS = ("requests", "connections", "slow", "unread", "busy")
GREETING = pack_head(HELLO, 0, 0, 0, encode_hello(Greeting("flood")), 0)


# -- the flood: a process of its own


async def connected(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = parse_endpoint(endpoint)
    reader, writer = await (
        asyncio.open_unix_connection(where.path)
        if where.path
        else asyncio.open_connection(where.host, where.port)
    )
    writer.write(GREETING)
    await reader.readexactly(32)
    return reader, writer


async def requests(endpoint: str, method: int, in_flight: int = 256) -> None:
    reader, writer = await connected(endpoint)
    asked = b"".join(pack_head(REQUEST, method, number, 60_000, b"", 0) for number in range(1, in_flight + 1))
    while True:
        writer.write(asked)
        await writer.drain()
        taken = 0
        while taken < 32 * in_flight:  # an answer is as long or longer
            raw = await reader.read(1 << 20)
            if not raw:
                return
            taken += len(raw)


async def connections(endpoint: str, method: int) -> None:
    held = []
    while True:
        try:
            held.append(await connected(endpoint))
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.01)


async def slow(endpoint: str, method: int) -> None:
    while True:
        _, writer = await connected(endpoint)
        for byte in pack_head(REQUEST, method, 1, 60_000, bytes(4000), 0):
            writer.write(bytes([byte]))
            await asyncio.sleep(1)


async def unread(endpoint: str, method: int) -> None:
    reader, writer = await connected(endpoint)
    writer.transport.pause_reading()
    for number in range(1, 1 << 30):
        writer.write(pack_head(REQUEST, method, number, 60_000, bytes(100), 0))
        await writer.drain()


async def busy(endpoint: str, method: int) -> None:
    while True:
        sum(range(10_000))
        await asyncio.sleep(0)


async def again(work, endpoint: str, method: int) -> None:
    while True:
        try:
            await work(endpoint, method)
        except (OSError, asyncio.IncompleteReadError, RuntimeError):
            await asyncio.sleep(0.05)


async def flood(kind: str, places: list[tuple[str, int]]) -> None:
    work, count = WORKS[kind]
    print("floods", flush=True)
    await asyncio.gather(*[again(work, *place) for place in places for _ in range(count)])


WORKS = {
    "requests": (requests, 4),
    "connections": (connections, 4),
    "slow": (slow, 100),
    "unread": (unread, 25),
    "busy": (busy, 1),
}
"""With the number of tasks for each of the two daemons."""


def start_flood(kind: str, places: list[tuple[str, int]]) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, __file__, "--flood", json.dumps([kind, places])], stdout=subprocess.PIPE
    )
    child.stdout.readline()
    return child


def be_nobody() -> None:
    if os.getuid() == 0:
        user = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)


# -- the other client


async def latencies(fs: AsyncFileSystem, seconds: float, file_bytes: int) -> dict[str, list[float]]:
    dice, found = random.Random(1), {"read": [], "look": []}
    end_s = time.perf_counter() + seconds
    async with await fs.open("/file") as file:
        while time.perf_counter() < end_s:
            begun_s = time.perf_counter()
            await file.read(dice.randrange(file_bytes // 4096) * 4096, 4096)
            found["read"].append(time.perf_counter() - begun_s)
            begun_s = time.perf_counter()
            await fs.exists(f"/none-{dice.getrandbits(60)}")
            found["look"].append(time.perf_counter() - begun_s)
    return found


def summary(times: list[float]) -> dict[str, float]:
    parts = quantiles(times, n=100)
    return {"count": len(times), "p50 us": round(parts[49] * 1e6), "p99 us": round(parts[98] * 1e6)}


async def measure(
    pool: str, places: list[tuple[str, int]], kinds: list[str], rounds: int, seconds: float
) -> dict:
    file_bytes = 64 * MIB
    options = ClientOptions(short_circuit=False, read_ahead_bytes=0)
    found: dict = {}
    async with await AsyncFileSystem.connect(pool, options=options) as fs:
        await fs.write_bytes("/file", random.Random(2).randbytes(file_bytes))
        await latencies(fs, 1.0, file_bytes)  # warm
        for kind in kinds:
            sides: dict[str, list[dict]] = {"without": [], "with": []}
            for _ in range(rounds):
                for side in sides:
                    child = await asyncio.to_thread(start_flood, kind, places) if side == "with" else None
                    await asyncio.sleep(1.0)
                    try:
                        got = await latencies(fs, seconds, file_bytes)
                    finally:
                        if child is not None:
                            child.kill()
                            child.wait()
                            child.stdout.close()
                    sides[side].append(
                        {what: summary(times) for what, times in got.items()}
                        | {"load": round(os.getloadavg()[0], 1)}
                    )
            found[kind] = {
                what: compared({side: [one[what] for one in taken] for side, taken in sides.items()})
                for what in ("read", "look")
            } | {"rounds": sides}
    return found


def compared(sides: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    found = {
        f"{figure} {side}": median(one[figure] for one in taken)
        for figure in ("p50 us", "p99 us")
        for side, taken in sides.items()
    }
    return found | {"p99 quotient": round(found["p99 us with"] / found["p99 us without"], 2)}


def places_of(pool: RealPool) -> list[tuple[str, int]]:
    """Endpoints of the store and the shard that an unprivileged process reaches, with a method of each."""
    known = decode_map((pool.path / "poolmap.json").read_bytes())
    return [
        (next((one for one in endpoints if one.startswith("stream://")), endpoints[0]), method)
        for endpoints, method in (
            (known.targets[0].endpoints, DATA_READ),
            (known.shards[0].endpoints, META_STATFS),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flood:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        be_nobody()
        asyncio.run(flood(*json.loads(arguments.flood)))
        return
    kinds = arguments.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"there is no kind {', '.join(sorted(unknown))}; write some of {', '.join(KINDS)}")
    place = Path(tempfile.mkdtemp(prefix="nvpool-bench-flood-", dir=arguments.directory))
    place.chmod(0o755)
    try:
        with RealPool(place / "pool", sizes=(512 * MIB,)) as pool:
            pool.make()
            pool.start()
            found = {
                "processors": os.cpu_count(),
                "block": 4 * KIB,
                **asyncio.run(
                    measure(str(place / "pool"), places_of(pool), kinds, arguments.rounds, arguments.seconds)
                ),
            }
    finally:
        shutil.rmtree(place, ignore_errors=True)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.results:
        arguments.results.write_text(text + "\n")


if __name__ == "__main__":
    main()
