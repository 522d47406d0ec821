"""Loads of the benchmark, each the only work of one process: fio where it can, else a small loop here.

    python bench/loads.py create DIRECTORY SECONDS
    python bench/loads.py read-many POOL PATH SECONDS [grpc]
    python bench/loads.py echo SCHEME SECONDS

prints one JSON object {"rate": per second, "bytes_rate": bytes per second, "p50_us": …, "p99_us": …}. fio runs are made by
`fio` below with its threads, since sixteen Python threads would measure Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

PIECE_BYTES = 4096
PIECES_A_CALL = 64
CALLS_IN_FLIGHT = 4
"""Together 256 reads in flight, like a data loader that fetches the next batches while it uses this one."""


def fio(
    path: Path,
    pattern: str,
    block_bytes: int,
    threads: int,
    seconds: float,
    *,
    direct: bool = True,
    size_bytes: int | None = None,
    sync_at_end: bool = False,
    once: bool = False,
    prefix: list[str] | None = None,
) -> dict:
    """One closed loop of fio's threads, each with one read or write under way (psync), over one file; `once`: one pass over it
    instead of so many seconds; `prefix`: words before the command, of another machine with a mount of its own, say."""
    command = [
        *(prefix or ()),
        "fio",
        "--name=load",
        f"--filename={path}",
        f"--rw={pattern}",
        f"--bs={block_bytes}",
        "--ioengine=psync",
        "--thread",
        f"--numjobs={threads}",
        "--group_reporting",
        f"--direct={int(direct)}",
        "--norandommap",
        "--randrepeat=0",
        "--invalidate=0",
        "--percentile_list=50:99",
        "--output-format=json",
        f"--size={size_bytes or path.stat().st_size}",
    ]
    if sync_at_end:
        command += ["--end_fsync=1", "--fallocate=none", "--refill_buffers"]
    elif not once:
        command += ["--time_based", f"--runtime={seconds}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    # fio may say something before its JSON.
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][
        "read" if "read" in pattern else "write"
    ]
    latency = found["clat_ns"]["percentile"]
    return {
        "rate": found["iops"],
        "bytes_rate": found["bw_bytes"],
        "p50_us": latency["50.000000"] / 1e3,
        "p99_us": latency["99.000000"] / 1e3,
    }


def measured(count: int, seconds: float, latencies: list[float], size_bytes: int) -> dict:
    latencies.sort()
    return {
        "rate": count / seconds,
        "bytes_rate": count * size_bytes / seconds,
        "p50_us": latencies[len(latencies) // 2] * 1e6,
        "p99_us": latencies[len(latencies) * 99 // 100] * 1e6,
    }


def create(directory: Path, seconds: float) -> dict:
    """Create, write and close 4 KiB files in one thread; new names in one directory that grows."""
    directory.mkdir(exist_ok=True)
    content, latencies = os.urandom(PIECE_BYTES), []
    begin = now = time.perf_counter()
    place = f"{directory}/{os.getpid()}-"
    while now - begin < seconds:
        descriptor = os.open(f"{place}{len(latencies)}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(descriptor, content)
        os.close(descriptor)
        before, now = now, time.perf_counter()
        latencies.append(now - before)
    return measured(len(latencies), now - begin, latencies, PIECE_BYTES)


async def read_many(pool: str, path: bytes, seconds: float, transport: str | None) -> dict:
    """Read random 4 KiB pieces of one file with read_many; a latency is that of a whole call of 64 pieces."""
    from nvpool.client.pool_client import Client
    from nvpool.client.state.vfs_types import Caller
    from nvpool.poolmap.model import decode_map

    where = (
        pool
        if transport is None
        else narrowed(decode_map(Path(pool, "poolmap.json").read_bytes()), transport)  # noqa: ASYNC240
    )
    client = await Client.open(where, name="bench")
    try:
        vfs, inode = client.vfs, 1
        for name in filter(None, path.split(b"/")):
            attr = await vfs.lookup(inode, name)
            inode = attr.inode
        handle = await vfs.open(inode, os.O_RDONLY, Caller(0, 0))
        latencies, blocks = [], attr.size // PIECE_BYTES
        begin = time.perf_counter()

        async def reader(seed: int) -> None:
            places, into = random.Random(seed), memoryview(bytearray(PIECES_A_CALL * PIECE_BYTES))
            now = time.perf_counter()
            while now - begin < seconds:
                pieces = [
                    (handle, places.randrange(blocks) * PIECE_BYTES, PIECE_BYTES)
                    for _ in range(PIECES_A_CALL)
                ]
                lengths = await vfs.read_many(pieces, into=into)
                if sum(lengths) != len(into):
                    raise SystemExit(f"read_many brought {sum(lengths)} bytes of {len(into)}")
                before, now = now, time.perf_counter()
                latencies.append(now - before)

        await asyncio.gather(*(reader(seed) for seed in range(CALLS_IN_FLIGHT)))
        seconds = time.perf_counter() - begin
        await vfs.release(handle)
        return measured(len(latencies) * PIECES_A_CALL, seconds, latencies, PIECE_BYTES)
    finally:
        await client.close()


async def echo(scheme: str, seconds: float) -> dict:
    """Echo the bytes of a read_many from memory over the same transport; the latency is that of a single read."""
    import tempfile

    import transport_echo

    from nvpool.rpc import transport_registry
    from nvpool.rpc.api import Greeting

    with tempfile.TemporaryDirectory(prefix="nvpool-echo-") as directory:
        child, endpoint = transport_echo.server_process(
            f"{scheme}://{directory}/s" if scheme.endswith("+unix") else f"{scheme}://127.0.0.1:0"
        )
        try:
            connection = await transport_registry.transport(scheme).connect(
                endpoint, Greeting("bench"), deadline_s=transport_echo.deadline()
            )
            single = await transport_echo.latency(connection, min(1.0, seconds))
            calls = await transport_echo.in_flight(
                connection, CALLS_IN_FLIGHT, transport_echo.BATCH_REQUEST, 4 * PIECES_A_CALL, seconds
            )
            await connection.close()
        finally:
            child.communicate()
    rate = calls * PIECES_A_CALL
    return {
        "rate": rate,
        "bytes_rate": rate * PIECE_BYTES,
        "p50_us": single["p50_us"],
        "p99_us": single["p99_us"],
    }


def narrowed(pool_map, scheme: str):
    """The map with only the endpoints of one transport; members without such an endpoint keep theirs."""
    import msgspec

    def only(owner):
        kept = tuple(endpoint for endpoint in owner.endpoints if endpoint.split(":")[0] == scheme)
        return msgspec.structs.replace(owner, endpoints=kept or owner.endpoints)

    return msgspec.structs.replace(pool_map, targets=tuple(map(only, pool_map.targets)))


def main(words: list[str]) -> None:
    if words[0] == "create":
        found = create(Path(words[1]), float(words[2]))
    elif words[0] == "read-many":
        import uvloop

        found = uvloop.run(
            read_many(words[1], words[2].encode(), float(words[3]), words[4] if len(words) > 4 else None)
        )
    elif words[0] == "echo":
        import uvloop

        found = uvloop.run(echo(words[1], float(words[2])))
    else:
        raise SystemExit(__doc__)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
