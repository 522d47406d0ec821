"""Speed of the client layer alone, beside a floor: reads from a store in a second process.

    python bench/client_layer.py [--transport stream|stream+unix|grpc] [--seconds 3]
    python bench/client_layer.py --short-circuit [--seconds 3]

With --short-circuit the store keeps its blocks in a data file. The same 4 KiB reads are measured in turns, warm and
cold: a plain preadv loop over the data file (the floor), short-circuit reads, and reads through the store's unix
socket.

One process serves a shard and one store from memory; this one is a client on one core. The floor is an echo on the
same transport: as many messages with as many bytes as the reads need, answered unread.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

import uvloop

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.units import KIB, MIB
from nvpool.poolmap.model import decode_map, encode_map
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.transport_registry import listen
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(os.getuid(), os.getgid())
FILE_BYTES = 64 * MIB
ECHO = 999
BATCH = 1024


def places(transport: str, port: int):
    def endpoint(role: str, number: int) -> str:
        if transport == "stream+unix":
            return f"stream+unix:///tmp/nvpool-bench-{port}-{role}-{number}.sock"
        return f"{transport}://127.0.0.1:{port + {'meta': 0, 'target': 1, 'echo': 2}[role]}"

    return endpoint


async def serve(transport: str, port: int, directory: str | None) -> None:
    endpoint = places(transport, port)

    def echo(call) -> None:
        call.reply(b"", [block[: int.from_bytes(call.message, "little")]])

    block = memoryview(bytes(4 * MIB))
    async with InProcessPool(directory, capacities=(512 * MIB,), endpoints=endpoint) as pool:
        listener = await listen(endpoint("echo", 1), Greeting("echo"), echo)
        sys.stdout.buffer.write(encode_map(pool.pool_map) + b"\n")
        sys.stdout.buffer.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await listener.close()


async def rate(seconds: float, step) -> float:
    """Calls of `step` per second, one at a time."""
    await step()
    gc.collect()
    count, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < seconds:
        await step()
        count += 1
    return count / (now - begin)


async def measure(transport: str, port: int, pool_map, seconds: float) -> None:
    client = await Client.open(pool_map, "bench")
    vfs = client.vfs
    _, handle = await vfs.create(1, b"file", 0o644, os.O_RDWR, ME)
    begin = time.perf_counter()
    for at in range(0, FILE_BYTES, MIB):
        await vfs.write(handle, at, os.urandom(MIB))
    await vfs.fsync(handle, False)
    print(
        f"{transport}: write and fsync           {FILE_BYTES / MIB / (time.perf_counter() - begin):8.0f} MiB/s"
    )

    dialer = Dialer(Greeting("bench"))
    echo = await dialer.connect(
        (places(transport, port)("echo", 1),), time.clock_gettime(time.CLOCK_BOOTTIME) + 10
    )
    soon = time.clock_gettime(time.CLOCK_BOOTTIME) + 1000

    async def echo_one() -> None:
        await echo.call(ECHO, (4096).to_bytes(4, "little"), deadline_s=soon)

    async def echo_batch() -> None:
        size = (256 * 4096).to_bytes(4, "little")
        await asyncio.gather(*[echo.call(ECHO, size, deadline_s=soon) for _ in range(BATCH // 256)])

    floor_one = await rate(seconds, echo_one)
    floor_batch = await rate(seconds, echo_batch) * BATCH
    choose = random.Random(7)
    blocks = FILE_BYTES // 4096
    into = memoryview(bytearray(BATCH * 4096))

    async def one() -> None:
        await vfs.read(handle, choose.randrange(blocks) * 4096, 4096)

    async def many() -> None:
        await vfs.read_many([(handle, choose.randrange(blocks) * 4096, 4096) for _ in range(BATCH)], into)

    async def crowd() -> None:
        await asyncio.gather(*[one() for _ in range(16)])

    print(f"{transport}: echo, one 4 KiB answer    {floor_one:8.0f} /s    (floor)")
    alone = await rate(seconds, one)
    print(f"{transport}: one 4 KiB read            {alone:8.0f} /s    {alone / floor_one:5.0%} of the floor")
    print(f"{transport}: 16 reads in parallel      {await rate(seconds, crowd) * 16:8.0f} /s")
    print(f"{transport}: echo of 1 MiB, as reads   {floor_batch:8.0f} /s    (floor)")
    batched = await rate(seconds, many)
    print(
        f"{transport}: read_many of {BATCH} x 4 KiB {batched * BATCH:8.0f} /s    "
        f"{batched * BATCH / floor_batch:5.0%} of the floor"
    )
    place = 0

    async def follow() -> None:
        nonlocal place
        part = await vfs.read(handle, place, MIB)
        place = place + len(part) if place + len(part) < FILE_BYTES else 0

    print(f"{transport}: 1 MiB reads in sequence   {await rate(seconds, follow):8.0f} MiB/s")

    async def birth() -> None:
        nonlocal place
        place += 1
        _, born = await vfs.create(1, b"small-%d" % place, 0o644, os.O_WRONLY, ME)
        await vfs.write(born, 0, bytes(4 * KIB))
        await vfs.flush(born)
        await vfs.release(born)

    print(f"{transport}: create, write 4 KiB, close{await rate(seconds, birth):8.0f} /s")
    await measure_small(transport, pool_map)
    await dialer.close()
    await client.close()


async def measure_short_circuit(pool_map, seconds: float, directory: str) -> None:
    by_ours = await Client.open(pool_map, "short-circuit", ClientOptions(short_circuit=True))
    by_socket = await Client.open(pool_map, "socket", ClientOptions(short_circuit=False))
    _, handle = await by_ours.vfs.create(1, b"file", 0o644, os.O_RDWR, ME)
    for at in range(0, FILE_BYTES, MIB):
        await by_ours.vfs.write(handle, at, os.urandom(MIB))
    await by_ours.vfs.fsync(handle, False)
    ours = await by_ours.vfs.open(handle.inode, os.O_RDONLY, ME)
    theirs = await by_socket.vfs.open(handle.inode, os.O_RDONLY, ME)
    data = os.open(os.path.join(directory, "targets", "1", "data"), os.O_RDONLY)
    choose, blocks = random.Random(7), FILE_BYTES // 4096
    read_now, read, buffer = by_ours.vfs.read_now, by_ours.vfs.read, bytearray(4096)

    def cold() -> None:
        os.fsync(data)
        os.posix_fadvise(data, 0, 0, os.POSIX_FADV_DONTNEED)

    async def preadv() -> None:
        os.preadv(data, (buffer,), choose.randrange(blocks) << 12)

    async def cached_or_read() -> None:
        offset = choose.randrange(blocks) << 12
        if read_now(ours, offset, 4096) is None:
            await read(ours, offset, 4096)

    async def awaited() -> None:
        await read(ours, choose.randrange(blocks) << 12, 4096)

    async def socket() -> None:
        await by_socket.vfs.read(theirs, choose.randrange(blocks) << 12, 4096)

    into = memoryview(bytearray(BATCH * 4096))

    async def many(vfs, which) -> None:
        await vfs.read_many([(which, choose.randrange(blocks) * 4096, 4096) for _ in range(BATCH)], into)

    rows = [
        ("plain preadv", preadv, 1),
        ("read_now, else read", cached_or_read, 1),
        ("read", awaited, 1),
        ("16 reads in parallel", lambda: asyncio.gather(*[awaited() for _ in range(16)]), 16),
        ("through the socket", socket, 1),
        ("16 through the socket", lambda: asyncio.gather(*[socket() for _ in range(16)]), 16),
        ("read_many", lambda: many(by_ours.vfs, ours), BATCH),
        ("read_many through the socket", lambda: many(by_socket.vfs, theirs), BATCH),
    ]
    for state in ("warm", "cold"):
        for name, step, reads in rows:
            if state == "warm":
                for at in range(0, FILE_BYTES, MIB):  # all of it is in memory and located
                    os.pread(data, MIB, at)
                    await read(ours, at, 1)
                await asyncio.sleep(0.1)
            else:
                cold()
            used = time.process_time()
            count = await rate(seconds if state == "warm" else min(seconds, 0.5), step) * reads
            used = (time.process_time() - used) / (seconds if state == "warm" else min(seconds, 0.5)) / count
            print(
                f"{state}: {name:<30} {count:9.0f} reads/s   {used * 1e6:6.1f} µs of the client's processor"
            )
    print(by_ours.vfs.chunks.short.counters)
    os.close(data)
    await by_ours.close()
    await by_socket.close()


SMALL_FILES = 4000


async def measure_small(transport: str, pool_map) -> None:
    """Measure whole files of 4 KiB and look-ups of names, each with a new client, then again with the same one."""
    maker = await Client.open(pool_map, "maker")
    parent = (await maker.vfs.mkdir(1, b"small", 0o755, ME)).inode

    async def make(number: int) -> None:
        _, born = await maker.vfs.create(parent, b"%d" % number, 0o644, os.O_WRONLY, ME)
        await maker.vfs.write(born, 0, bytes(4 * KIB))
        await maker.vfs.flush(born)
        await maker.vfs.release(born)

    for first in range(0, SMALL_FILES, 16):
        await asyncio.gather(*[make(number) for number in range(first, first + 16)])
    listed, more = [], True
    while more:
        entries, more = await maker.vfs.readdir(
            await maker.vfs.opendir(parent), listed[-1].cursor if listed else 0, 1000
        )
        listed += entries
    await maker.close()
    in_order = [entry.name for entry in listed]
    at_random = random.Random(7).sample(in_order, len(in_order))

    async def whole(client: Client, name: bytes) -> None:
        handle = await client.vfs.open((await client.vfs.lookup(parent, name)).inode, os.O_RDONLY, ME)
        assert len(await client.vfs.read(handle, 0, 4 * KIB)) == 4 * KIB
        await client.vfs.release(handle)

    async def look(client: Client, name: bytes) -> None:
        await client.vfs.lookup(parent, name)

    async def over(names: list[bytes], in_parallel: int, step) -> list[float]:
        client = await Client.open(pool_map, "cold")
        await client.vfs.getattr(parent)
        found = []
        for _ in range(2):
            gc.collect()
            began = time.perf_counter()
            for first in range(0, len(names), in_parallel):
                if in_parallel == 1:
                    await step(client, names[first])
                else:
                    await asyncio.gather(*[step(client, name) for name in names[first : first + in_parallel]])
            found.append(len(names) / (time.perf_counter() - began))
        await client.close()
        return found

    async def by_path() -> list[float]:
        client = await Client.open(pool_map, "cold")
        pool, found = AsyncFileSystem(client, ME), []
        paths = [b"/small/" + name for name in at_random]
        for _ in range(2):
            await pool.stat("/small")
            gc.collect()
            began = time.perf_counter()
            for first in range(0, len(paths), 500):
                await pool.read_many(paths[first : first + 500])
            found.append(len(paths) / (time.perf_counter() - began))
        await client.close()
        return found

    for what, figures in (
        ("open, read, close 4 KiB", await over(at_random, 1, whole)),
        ("the same, 16 in parallel", await over(at_random, 16, whole)),
        ("read_many of 500 paths", await by_path()),
        ("stat, order of a listing", await over(in_order, 1, look)),
        ("stat at random", await over(at_random, 1, look)),
    ):
        print(f"{transport}: {what:25} {figures[0]:8.0f} /s    again {figures[1]:8.0f} /s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--transport", default="stream")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--short-circuit", action="store_true")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        uvloop.run(serve(chosen.transport, chosen.serve, chosen.directory))
        return
    if chosen.short_circuit:
        chosen.transport, chosen.directory = "stream+unix", tempfile.mkdtemp(prefix="nvpool-bench-")
    port = random.randrange(20000, 30000)
    server = subprocess.Popen(
        [
            sys.executable,
            __file__,
            "--transport",
            chosen.transport,
            "--serve",
            str(port),
            *(["--directory", chosen.directory] if chosen.directory else []),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        pool_map = decode_map(server.stdout.readline())
        if chosen.short_circuit:
            uvloop.run(measure_short_circuit(pool_map, chosen.seconds, chosen.directory))
        else:
            uvloop.run(measure(chosen.transport, port, pool_map, chosen.seconds))
    finally:
        server.stdin.close()
        server.wait(20)
        if chosen.directory:
            shutil.rmtree(chosen.directory)


if __name__ == "__main__":
    main()
