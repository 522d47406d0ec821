"""read_many over the transport rdma (UCX's shared memory) beside the same over stream on a unix socket, from one pool.

    .venv/bin/python bench/rdma.py [--rounds 15] [--seconds 0.4] [--json FILE] [--profile]

One process reads with one client for each transport, in turns, from the same store processes, so that what else happens on the
machine happens to both. A round's figure is the ratio of the two neighbors; reported are medians over the rounds, with the
processor time of reader and stores beside them. Short-circuit reads are off. `--profile`: where the time goes, per transport.
No RDMA hardware is needed, and nothing is said about any.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import uvloop

from nvpool.client.state.options import ClientOptions
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.rpc.api import Greeting
from nvpool.rpc.transports import ucx
from nvpool.rpc.transports.rdma import RdmaSettings, RdmaUnixTransport
from nvpool.rpc.transports.stream import UnixStreamTransport
from nvpool.sdk.async_filesystem import AsyncFileSystem

MIB = 1 << 20
REGION = 64 * MIB
TRANSPORTS = ("stream+unix", "rdma")
SHAPES = {"1024 x 4 KiB": (1024, 4096, 1.2), "16 x 1 MiB": (16, MIB, 1.5)}
"""Reads of a call, bytes of each, and what is to be reached against stream+unix."""
PLANS = 32


def plans(file, count: int, size: int) -> list[list[tuple]]:
    draw = random.Random(1)
    return [[(file, draw.randrange(REGION // size) * size, size) for _ in range(count)] for _ in range(PLANS)]


def processor_s(pids: list[int]) -> float:
    ticks = os.sysconf("SC_CLK_TCK")
    return (
        sum(
            sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
            for pid in pids
        )
        / ticks
    )


async def calls(pool, batches, into, seconds: float, stores: list[int]) -> tuple[float, float, float]:
    """(bytes a second, processor seconds of the reader and of the stores per GiB)"""
    count, before, ours, began = 0, processor_s(stores), process_time(), perf_counter()
    while (took := perf_counter() - began) < seconds:
        await pool.read_many(batches[count % PLANS], into)
        count += 1
    gib = count * len(into) / (1 << 30)
    return count * len(into) / took, (process_time() - ours) / gib, (processor_s(stores) - before) / gib


async def measure(directory: str, options: argparse.Namespace, stores: list[int]) -> dict:
    pools = {
        name: await AsyncFileSystem.connect(
            directory, options=ClientOptions(transport=name, short_circuit=False)
        )
        for name in TRANSPORTS
    }
    async with await pools["rdma"].open("/bench", "w+b") as file:
        for at in range(0, REGION, MIB):
            await file.write(at, os.urandom(MIB))
        await file.flush()
    found = {}
    for shape, (count, size, wanted) in SHAPES.items():
        into = bytearray(count * size)
        files = {name: await pools[name].open("/bench") for name in TRANSPORTS}
        batches = {name: plans(files[name], count, size) for name in TRANSPORTS}
        first = {}
        for name in TRANSPORTS:
            await calls(
                pools[name], batches[name], into, options.seconds, stores
            )  # caches, connections, memory
            await pools[name].read_many(batches[name][0], into)
            first[name] = bytes(into)
        assert first["rdma"] == first["stream+unix"], "the two read different bytes"
        rounds = {name: [] for name in TRANSPORTS}
        for number in range(options.rounds):
            for name in TRANSPORTS[:: 1 if number % 2 else -1]:
                rounds[name].append(await calls(pools[name], batches[name], into, options.seconds, stores))
        found[shape] = summary(rounds) | {"wanted": wanted}
        if options.profile:
            for name in TRANSPORTS:
                profile = cProfile.Profile()
                profile.enable()
                await calls(pools[name], batches[name], into, 2.0, stores)
                profile.disable()
                print(f"-- {shape} over {name}", file=sys.stderr)
                pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(12)
        for file in files.values():
            await file.close()
    placed = [
        connection.placed_bytes
        for connection in pools["rdma"].client.dialer.by_endpoints.values()
        if getattr(connection, "upgraded", False)
    ]
    assert placed and all(placed), "nothing was written one-sidedly"
    for pool in pools.values():
        await pool.close()
    return found


BARE = {"256 x 4 KiB a message": (256, 4096), "2 x 1 MiB a message": (2, MIB)}
IN_FLIGHT = 4


def serve_bare(directory: str) -> None:
    """Answer from memory, over both transports, until our parent closes our input."""
    memory = memoryview(os.urandom(2 * MIB))
    answers = {
        count: [memory[at * size : (at + 1) * size] for at in range(count)] for count, size in BARE.values()
    }

    async def main() -> None:
        listener = await RdmaUnixTransport(RdmaSettings(local=True)).listen(
            f"rdma+unix://{directory}/s", Greeting("bare"), lambda call: call.reply(b"", answers[call.method])
        )
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await listener.close()

    uvloop.run(main())


async def bare_calls(
    connection, count: int, into: memoryview, seconds: float, server: int
) -> tuple[float, float, float]:
    """As `calls`: answers received where they are wanted, and not looked at."""
    done, before, ours, began = 0, processor_s([server]), process_time(), perf_counter()
    parts = [into[at : at + len(into) // IN_FLIGHT] for at in range(0, len(into), len(into) // IN_FLIGHT)]

    async def loop(part: memoryview) -> None:
        nonlocal done
        while perf_counter() - began < seconds:
            await connection.call(count, b"", deadline_s=SYSTEM_CLOCK.boottime_s() + 60, into=part)
            done += 1

    await asyncio.gather(*map(loop, parts))
    gib = done * len(parts[0]) / (1 << 30)
    return (
        gib * (1 << 30) / (perf_counter() - began),
        (process_time() - ours) / gib,
        (processor_s([server]) - before) / gib,
    )


async def measure_bare(directory: str, options: argparse.Namespace, server: int) -> dict:
    """The transports alone: what of the figures above is theirs."""
    greeting, until_s = Greeting("bench"), SYSTEM_CLOCK.boottime_s() + 10
    connections = {
        "stream+unix": await UnixStreamTransport().connect(
            f"stream+unix://{directory}/s", greeting, deadline_s=until_s
        ),
        "rdma": await RdmaUnixTransport().connect(f"rdma+unix://{directory}/s", greeting, deadline_s=until_s),
    }
    found = {}
    for shape, (count, size) in BARE.items():
        into = memoryview(bytearray(count * size * IN_FLIGHT))
        rounds = {name: [] for name in TRANSPORTS}
        for number in range(-1, options.rounds):
            for name in TRANSPORTS[:: 1 if number % 2 else -1]:
                one = await bare_calls(connections[name], count, into, options.seconds, server)
                if number >= 0:
                    rounds[name].append(one)
        found[shape] = summary(rounds)
    for connection in connections.values():
        await connection.close()
    return found


def summary(rounds: dict[str, list[tuple]]) -> dict:
    ratios = [new[0] / old[0] for new, old in zip(rounds["rdma"], rounds["stream+unix"], strict=True)]
    return {
        name: dict(
            zip(
                ("bytes_rate", "reader_s_per_gib", "stores_s_per_gib"),
                map(statistics.median, zip(*rounds[name], strict=True)),
                strict=True,
            )
        )
        for name in TRANSPORTS
    } | {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument(
        "--drives", type=int, default=1, help="with several, what a call reads comes in parts"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve-bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_bare:
        serve_bare(options.serve_bare)
        return
    if reason := ucx.missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="nvpool-rdma-") as place:
        directory, config = f"{place}/pool", Path(place, "node.toml")
        config.write_text("[rdma]\nlocal = true\n")
        nvpool = str(Path(sys.executable).with_name("nvpool"))
        subprocess.run(
            [nvpool, "dev", "up", directory, "--config", str(config), "--drives", str(options.drives)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            stores = [
                int(json.loads(path.read_text())["pid"])
                for path in Path(directory, "run").glob("target-*.json")
            ]
            found = uvloop.run(measure(directory, options, stores))
        finally:
            subprocess.run([nvpool, "dev", "down", directory], check=True, stdout=subprocess.DEVNULL)
        with subprocess.Popen(
            [sys.executable, __file__, "--serve-bare", place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            server.stdout.readline()
            found["transports alone"] = uvloop.run(measure_bare(place, options, server.pid))
            server.stdin.close()
    found |= {
        "ucx": ucx.version(),
        "rounds": options.rounds,
        "drives": options.drives,
        "load": os.getloadavg()[0],
    }
    for shape, (_, _, wanted) in SHAPES.items():
        this = found[shape]
        print(
            f"{shape}: rdma {this['rdma']['bytes_rate'] / 1e6:.0f} MB/s, stream+unix "
            f"{this['stream+unix']['bytes_rate'] / 1e6:.0f} MB/s, ratio {this['ratio']:.2f} (wanted {wanted})"
        )
    for shape, this in found["transports alone"].items():
        print(
            f"transports alone, {shape}: rdma {this['rdma']['bytes_rate'] / 1e6:.0f} MB/s, stream+unix "
            f"{this['stream+unix']['bytes_rate'] / 1e6:.0f} MB/s, ratio {this['ratio']:.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    else:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
