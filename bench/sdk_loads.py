"""Loads on the SDK, each one process that is a client of its own: 4 KiB reads one at a time, many in flight, read_many.

    python bench/sdk_loads.py [--transport SCHEME] [--no-short-circuit] VERB POOL PATH [options]

    one         AsyncFile.read at random places, each after the one before
    one-thread  File.pread, the same from an ordinary thread
    flight      AsyncFile.read, --in-flight of them at any time
    raw         the request of such a read to the store itself, made beforehand, and its answer not looked at
    many        FileSystem.read_many of --batch reads a call; a latency is that of a call
    files       FileSystem.read_many of --batch paths a call, each a whole file of the directory PATH, no file twice

prints one JSON object {"rate": reads or files a second, "bytes_rate", "count", "p50_us", "p99_us"}. All but `files` read within
the first --region bytes of the file, which they read once before: the bytes are in the memory of the machine, unless
--cold says that they are not to be.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable

import uvloop

import nvpool
from nvpool.client.data.read_messages import encode_read
from nvpool.client.state.options import ClientOptions
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.units import parse_bytes
from nvpool.rpc.v1.wire_pb2 import DATA_READ
from nvpool.sdk.async_filesystem import AsyncFileSystem

MIB = 1 << 20
PLANS = 64
"""Batches that are prepared: a list of a thousand tuples costs time of the program, not of the pool."""


def figures(latencies: list[float], seconds: float, reads_a_call: int, block_bytes: int) -> dict:
    """Figures of latencies, which are in seconds, one for each call."""
    latencies.sort()
    count = len(latencies) * reads_a_call
    return {
        "rate": count / seconds,
        "bytes_rate": count * block_bytes / seconds,
        "count": count,
        "p50_us": latencies[len(latencies) // 2] * 1e6,
        "p99_us": latencies[len(latencies) * 99 // 100] * 1e6,
    }


COLD_PARTS = 4
"""One part of a cold region is read, in random order.

When most of a file was read, the kernel reads ahead, so that the rest is not cold.
"""


class Places:
    """Offsets to read at: random in the region; in a cold region none twice, and only one of COLD_PARTS parts."""

    def __init__(self, region: int, block: int, cold: bool) -> None:
        self._draw = random.Random()
        self._blocks, self._block = region // block, block
        self._order = self._draw.sample(range(self._blocks), self._blocks // COLD_PARTS) if cold else []

    def next(self) -> int:
        return (self._order.pop() if self._order else int(self._draw.random() * self._blocks)) * self._block

    def over(self, cold: bool) -> bool:
        return cold and not self._order


async def asynchronous(options: argparse.Namespace) -> dict:
    async with await AsyncFileSystem.connect(options.pool, options=client(options)) as pool:
        async with await pool.open(options.path) as file:
            if not options.cold:
                for at in range(0, options.region, MIB):
                    await file.read(at, min(MIB, options.region - at))
            read = file.read if options.verb != "raw" else await raw(pool, file, options)
            if not options.cold:
                await flight(read, options, 0.2)  # connections, locations, caches of the interpreter
            ready(options)
            return await flight(read, options, options.seconds)


async def raw(
    pool: AsyncFileSystem, file, options: argparse.Namespace
) -> Callable[[int, int], Awaitable[memoryview]]:
    """Read as file.read does, from one chunk store, with prepared messages."""
    chunks, opened = pool.vfs.chunks, file.handle.file
    lane = chunks.find_lane(opened, 0)
    connection = await pool.client.dialer.connect(lane.endpoints, SYSTEM_CLOCK.boottime_s() + 10)
    deadline_s = SYSTEM_CLOCK.boottime_s() + options.seconds + 100

    def message(place: int) -> bytes:
        index, within = place >> opened.chunk_bits, place & opened.chunk_mask
        return encode_read(
            chunks.epoch, lane.target, opened.inode, index, within, options.block, opened.grant, 0
        )

    messages = {place: message(place) for place in range(0, options.region, options.block)}

    async def read(place: int, block: int) -> memoryview:
        return (await connection.call(DATA_READ, messages[place], deadline_s=deadline_s)).payload

    return read


async def flight(read: Callable, options: argparse.Namespace, seconds: float) -> dict:
    places, block, many = (
        Places(options.region, options.block, options.cold),
        options.block,
        options.in_flight > 1,
    )
    latencies: list[float] = []
    begin = time.perf_counter()
    end = begin + seconds

    async def reader() -> None:
        began = time.perf_counter()
        while began < end and not places.over(options.cold):
            if many:
                await asyncio.sleep(
                    0
                )  # what is there immediately must not keep the others from asking: it waits its turn
            if len(await read(places.next(), block)) != block:
                raise SystemExit("a read brought less than was asked for")
            now = time.perf_counter()
            latencies.append(now - began)
            began = now

    await asyncio.gather(*(reader() for _ in range(options.in_flight)))
    return figures(latencies, time.perf_counter() - begin, 1, block)


def one_thread(options: argparse.Namespace) -> dict:
    with (
        nvpool.connect(options.pool, options=client(options)) as pool,
        pool.open(options.path, "rb", buffering=0) as file,
    ):
        warm(file, options)
        places, block, pread = Places(options.region, options.block, options.cold), options.block, file.pread

        def loop(seconds: float) -> dict:
            latencies: list[float] = []
            begin = began = time.perf_counter()
            while began - begin < seconds:
                if len(pread(block, places.next())) != block:
                    raise SystemExit("a read brought less than was asked for")
                now = time.perf_counter()
                latencies.append(now - began)
                began = now
            return figures(latencies, began - begin, 1, block)

        loop(0.2)
        ready(options)
        return loop(options.seconds)


def many(options: argparse.Namespace) -> dict:
    with (
        nvpool.connect(options.pool, options=client(options)) as pool,
        pool.open(options.path, "rb", buffering=0) as file,
    ):
        warm(file, options)
        places, block = Places(options.region, options.block, options.cold), options.block
        plans = [[(file, places.next(), block) for _ in range(options.batch)] for _ in range(PLANS)]
        into = memoryview(bytearray(options.batch * block))

        def loop(seconds: float) -> dict:
            latencies: list[float] = []
            begin = began = time.perf_counter()
            while began - begin < seconds:
                lengths = pool.read_many(plans[len(latencies) % PLANS], into)
                if sum(lengths) != len(into):
                    raise SystemExit("read_many brought less than was asked for")
                now = time.perf_counter()
                latencies.append(now - began)
                began = now
            return figures(latencies, began - begin, options.batch, block)

        loop(0.2)
        ready(options)
        return loop(options.seconds)


def whole_files(options: argparse.Namespace) -> dict:
    with nvpool.connect(options.pool, options=client(options)) as pool:
        names = pool.list(options.path)
        random.shuffle(names)
        paths = [f"{options.path}/{name}" for name in names]
        latencies: list[float] = []
        count = size = 0
        ready(options)
        begin = began = time.perf_counter()
        while count < len(paths) and began - begin < options.seconds:
            found = pool.read_many(paths[count : count + options.batch])
            size += sum(map(len, found))
            now = time.perf_counter()
            latencies.append(now - began)
            count, began = count + len(found), now
        took = began - begin
        return figures(latencies, took, 1, 0) | {
            "rate": count / took,
            "bytes_rate": size / took,
            "count": count,
        }


def ready(options: argparse.Namespace) -> None:
    gc.collect()
    gc.freeze()
    if options.wait:
        print("ready", flush=True)
        sys.stdin.readline()


def warm(file, options: argparse.Namespace) -> None:
    if not options.cold:
        for at in range(0, options.region, MIB):
            file.pread(min(MIB, options.region - at), at)


def client(options: argparse.Namespace) -> ClientOptions:
    return ClientOptions(transport=options.transport, short_circuit=not options.no_short_circuit)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--no-short-circuit", action="store_true")
    parser.add_argument("verb", choices=("one", "one-thread", "flight", "raw", "many", "files"))
    parser.add_argument("pool")
    parser.add_argument("path")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--region", type=parse_bytes, default=64 * MIB)
    parser.add_argument("--block", type=parse_bytes, default=4096)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument(
        "--cold", action="store_true", help="read no byte before, none twice, and end when a quarter was read"
    )
    parser.add_argument(
        "--wait", action="store_true", help="say `ready`, then wait for a line: so several begin together"
    )
    options = parser.parse_args(words)
    if options.verb in ("one", "flight", "raw"):
        found = uvloop.run(asynchronous(options))
    else:
        found = {"one-thread": one_thread, "many": many, "files": whole_files}[options.verb](options)
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
