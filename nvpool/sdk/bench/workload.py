"""Short benchmark loads for a pool through the SDK, a mount, and a local directory.

The loads are the same in each place, so that the results can be compared. `nvpool bench` uses this module. It
works in one new directory in each place and removes that directory again, also after an error. The loads, in
order: write 1 MiB pieces and sync; read them; random reads of 4 KiB and of 128 KiB, one at a time; many
parallel 4 KiB reads; create small files. The data was just written, so it comes from memory unless the name
of a load says direct or cold.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from nvpool.client.state.vfs_types import Caller
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import InvalidRequest, NvpoolError
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import BLOCK_BYTES, KIB, MIB
from nvpool.sdk.bench.random_reads import Measured, Places, read_local, read_pool, time_each, time_each_async

if TYPE_CHECKING:
    from nvpool.client.vfs.filesystem import Vfs

WRITE, READ = "sequential 1 MiB write and fsync", "sequential 1 MiB read"
SMALL, LARGE = "4 KiB random read, one at a time", "128 KiB random read, one at a time"
SMALL_COLD = "4 KiB random read, one at a time, O_DIRECT"
MANY = "4 KiB random reads, in parallel"
CREATE = "create, write and close 4 KiB files"
LOADS = (WRITE, READ, SMALL, SMALL_COLD, LARGE, MANY, CREATE)
MANY_THREADS = 16


def _name() -> str:
    return f".nvpool-bench-{os.getpid()}-{SYSTEM_CLOCK.secret(4).hex()}"


def local(parent: str, file_bytes: int, seconds: float) -> Iterator[tuple[str, Measured]]:
    """Run the loads in a local directory; iterate over (load, result). The directory may be on a mount."""
    place = os.path.join(parent, _name())
    os.mkdir(place)
    try:
        piece, path = os.urandom(MIB), os.path.join(place, "file")
        count = file_bytes // MIB
        with open(path, "wb", buffering=0) as file:

            def write(number: int) -> None:
                file.write(piece)
                if number == count - 1:
                    os.fsync(file.fileno())

            yield WRITE, time_each(write, MIB, count=count)
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(MIB)
            yield READ, time_each(lambda number: file.readinto(buffer), MIB, count=count)
        yield SMALL, read_local([path], seconds=seconds)
        try:
            yield SMALL_COLD, read_local([path], seconds=seconds, direct=True)
        except NvpoolError:
            pass  # a file system without O_DIRECT
        yield LARGE, read_local([path], seconds=seconds, piece_bytes=128 * KIB)
        yield MANY, read_local([path], seconds=seconds, threads=MANY_THREADS)

        def create(number: int) -> None:
            descriptor = os.open(f"{place}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(descriptor, piece[:BLOCK_BYTES])
            os.close(descriptor)

        yield CREATE, time_each(create, BLOCK_BYTES, seconds=seconds)
    finally:
        shutil.rmtree(place)


async def pool(vfs: Vfs, file_bytes: int, seconds: float) -> AsyncIterator[tuple[str, Measured]]:
    """Run the loads on a pool through the SDK; iterate over (load, result). They work in a directory below
    the root."""
    caller, name = Caller(os.geteuid(), os.getegid()), _name().encode()
    place = (await vfs.mkdir(ROOT_INODE, name, 0o700, caller)).inode
    made: list[bytes] = []
    try:
        piece = os.urandom(MIB)
        count = file_bytes // MIB
        _attr, handle = await vfs.create(place, b"file", 0o600, os.O_RDWR, caller)
        made.append(b"file")

        async def write(number: int) -> None:
            await vfs.write(handle, number * MIB, piece)
            if number == count - 1:
                await vfs.fsync(handle, False)

        yield WRITE, await time_each_async(write, MIB, count=count)
        yield (
            READ,
            await time_each_async(lambda number: vfs.read(handle, number * MIB, MIB), MIB, count=count),
        )
        for load, piece_bytes in ((SMALL, BLOCK_BYTES), (LARGE, 128 * KIB)):
            places = Places([file_bytes], piece_bytes)

            async def read(number: int, places: Places = places, piece_bytes: int = piece_bytes) -> None:
                await vfs.read(handle, places.next()[1], piece_bytes)

            yield load, await time_each_async(read, piece_bytes, seconds=seconds)
        yield MANY, await read_pool(vfs, [handle], seconds=seconds)
        await vfs.release(handle)

        async def create(number: int) -> None:
            made.append(b"%d" % number)
            _, small = await vfs.create(place, made[-1], 0o644, os.O_WRONLY | os.O_EXCL, caller)
            await vfs.write(small, 0, piece[:BLOCK_BYTES])
            await vfs.flush(small)
            await vfs.release(small)

        yield CREATE, await time_each_async(create, BLOCK_BYTES, seconds=seconds)
    finally:
        for begin in range(0, len(made), 64):
            await asyncio.gather(
                *(vfs.unlink(place, one, caller) for one in made[begin : begin + 64]), return_exceptions=True
            )
        await vfs.rmdir(ROOT_INODE, name, caller)


def check_room(parent: str, file_bytes: int) -> None:
    """Check the free space. InvalidRequest: `parent` cannot hold the files of a benchmark three times."""
    free = os.statvfs(parent)
    if free.f_bavail * free.f_frsize < 3 * file_bytes:
        raise InvalidRequest(f"{parent} has too little room; choose a smaller --size")
