"""Speed of the chunk store alone: batches of 4 KiB reads from the page cache beside a preadv loop, and writes.

    python -m bench.store_layer [--directory DIR] [--seconds S] [--json]

Figures are the loop thread's processor time, which other work of the machine disturbs little; only the cold line is wall
time. Everything runs in one process without a transport: `service` decodes a whole READ message, reads and encodes the
reply, `store` is read_now alone, and the floor is os.preadv in a loop over the same places.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import tempfile
import time

from nvpool.core import grants
from nvpool.core.checksum import block_checksums
from nvpool.core.ids import RequestId
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.chunks.api import StoreOptions, create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.chunks.read_batch import READ
from nvpool.store.server.service import StoreService
from nvpool.store.server.writes import WRITE
from nvpool.testing.fakes.meta_shard import PEER

MIB = 1 << 20
SECRET = b"s" * 32


class _Call:
    """A request as a transport would deliver it."""

    deadline_s = float("inf")
    cancelled = False
    peer = PEER

    def __init__(self, method: int, message: bytes, payload: bytes = b""):
        self.method, self.message, self.payload = method, message, memoryview(payload)
        self.answer: tuple | None = None

    def room(self, byte_count: int) -> None:
        """None: the transport has no memory that belongs to the client."""

    def reply(self, message=b"", payload=()) -> None:
        self.answer = message, payload

    def fail(self, error: BaseException) -> None:
        raise error


def _repeat(seconds: float, step) -> float:
    """Processor time of one call of `step`, in microseconds; `step` gets a running number."""
    count, begun, used = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - begun < seconds:
        for _ in range(10):
            step(count)
            count += 1
    return (time.thread_time() - used) / count * 1e6


async def measure(directory: str, seconds: float, options: StoreOptions) -> dict:
    create_chunk_store(directory, 1, "bench", 2 << 30)
    store = await open_chunk_store(directory, 1, options)
    service = StoreService(store, target=1, grant_secret=SECRET)
    found: dict = {"read_path": store.device.read_path}
    chunks = 256
    for index in range(chunks):
        bytes_ = random.randbytes(MIB)
        await store.write(1, index, 0, memoryview(bytes_), block_checksums(bytes_))
    await store.flush()
    grant = grants.sign(grants.Grant(grants.READ | grants.WRITE, 0, 1, 1, 0, 1 << 62), SECRET)
    chosen = random.Random(1)
    batches = [
        b"".join(
            READ.pack(1, chosen.randrange(chunks), chosen.randrange(256) << 12, 4096, 0, 0) for _ in range(64)
        )
        for _ in range(64)
    ]
    messages = [
        pb.ReadRequest(target=1, grants=[grant], reads=reads).SerializeToString() for reads in batches
    ]
    single = [
        pb.ReadRequest(target=1, grants=[grant], reads=reads[:24]).SerializeToString() for reads in batches
    ]
    large = [
        pb.ReadRequest(
            target=1, grants=[grant], reads=READ.pack(1, chosen.randrange(chunks), 0, size, 0, 0)
        ).SerializeToString()
        for size in (131072, MIB)
        for _ in range(64)
    ]
    fd = store.device.fd
    buffer = memoryview(bytearray(64 * 4096))
    places = [chosen.randrange(16, 256 * chunks) << 12 for _ in range(4096)]

    def floor(number: int) -> None:
        at = number * 64 % 4096
        for position, place in enumerate(places[at : at + 64]):
            os.preadv(fd, [buffer[position << 12 : position + 1 << 12]], place, os.RWF_NOWAIT)

    found["floor preadv 4 KiB, us"] = _repeat(seconds, floor) / 64
    found["store.read_now 64 x 4 KiB, us a read"] = (
        _repeat(seconds, lambda n: store.read_now(batches[n % 64], [1])) / 64
    )

    def served(messages):
        return _repeat(
            seconds, lambda n: service.handle(_Call(Method.DATA_READ, messages[n % len(messages)]))
        )

    found["service 64 x 4 KiB, us a read"] = served(messages) / 64
    found["service 1 x 4 KiB, us"] = served(single)
    found["service 1 x 128 KiB, us"] = served(large[:64])
    found["service 1 x 1 MiB, us"] = served(large[64:])

    block = random.randbytes(4096)
    checksum = block_checksums(block)
    sequence = iter(range(1, 1 << 40))

    async def writes(piece: bytes, checksums: bytes, name: str, new_inode: bool) -> None:
        count, begun, used = 0, time.perf_counter(), time.thread_time()
        while time.perf_counter() - begun < seconds:
            number = next(sequence)
            inode, index = (1000 + number, 0) if new_inode else (1, number % chunks)
            offset = 0 if new_inode or len(piece) > 4096 else number * 7919 % 256 << 12
            await store.write(
                inode, index, offset, memoryview(piece), checksums, request=RequestId(7, number % 64, number)
            )
            if not number % 64:
                await asyncio.sleep(0)
            count += 1
        found[name] = (time.thread_time() - used) / count * 1e6

    await writes(block, checksum, "store.write 4 KiB over old bytes, us", False)
    await writes(block, checksum, "store.write 4 KiB new file, us", True)
    whole = random.randbytes(MIB)
    await writes(whole, block_checksums(whole), "store.write 1 MiB, us", False)
    header = WRITE.pack(1, 0, 0, 0, 0, 4096, 0, 0)
    message = pb.WriteRequest(target=1, grants=[grant], writes=header, checksums=checksum).SerializeToString()
    found["service write 4 KiB, us"] = _repeat(
        seconds, lambda n: service.handle(_Call(Method.DATA_WRITE, message, block))
    )
    await store.flush()
    await store.kv.checkpoint()
    before = store.status()["counters"]["index_used_bytes"]
    count = 40_000
    for number in range(count):
        # As files are born: each partition counts its own, and a directory lies in one.
        inode = (number // 1000 % 16) << 51 | 1 << 30 | number
        await store.write(
            inode, 0, 0, memoryview(block), checksum, request=RequestId(7 << 40 | 1, number % 64, number + 1)
        )
    await store.kv.checkpoint()
    found["index bytes a 4 KiB file"] = (store.status()["counters"]["index_used_bytes"] - before) / count

    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        reads = b"".join(
            READ.pack(1, chosen.randrange(chunks), chosen.randrange(256) << 12, 4096, 0, 0) for _ in range(64)
        )
        batch = store.read_now(reads, [1])
        if batch.missed:
            await store.finish_read(batch)
        count += 64
        if not count % 4096:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    found["cold 64 x 4 KiB, us a read (passed)"] = (time.perf_counter() - begun) / count * 1e6
    await service.close()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--directory", default=None)
    options.add_argument("--seconds", type=float, default=1.0)
    options.add_argument("--no-uring", action="store_true")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    directory = tempfile.mkdtemp(prefix="nvpool-bench-", dir=chosen.directory)
    try:
        found = asyncio.run(measure(directory, chosen.seconds, StoreOptions(uring=not chosen.no_uring)))
    finally:
        shutil.rmtree(directory)
    if chosen.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:45} {value if isinstance(value, str) else format(value, '.2f')}")


if __name__ == "__main__":
    main()
