"""Short-circuit reads with real stores behind unix sockets: correct bytes or none, with concurrent changes of the file."""

import asyncio
import grp
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque

import pytest

from nvpool.blockio.reader import cached_pages
from nvpool.client.data import short_circuit
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, Caller
from nvpool.core.errors import AccessDenied, ChecksumMismatch, NotSupported, Unreachable
from nvpool.core.units import KIB, MIB
from nvpool.rpc.fd_passing import Handover, path_beside, take
from nvpool.rpc.peer_roles import credentials_of
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.store.chunks import api as store_api
from nvpool.store.chunks import block_store
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(0, 0)
BLOCK = 4096
QUICK = ClientOptions(deadline_s=10.0)


class Host:
    """A pool whose daemons listen at unix sockets, with clients on the same host."""

    def __init__(self, **pool_options):
        self.directory = tempfile.mkdtemp(prefix="shortcut-", dir="/tmp")
        self.pool = InProcessPool(
            self.directory,
            endpoints=lambda role, number: f"stream+unix://{self.directory}/{role}{number}.sock",
            **pool_options,
        )

    async def __aenter__(self):
        await self.pool.__aenter__()
        self.client = await self.pool.client("reader", QUICK)
        self.vfs = self.client.vfs
        self.short = self.vfs.chunks.short
        return self

    async def __aexit__(self, *failure):
        await self.pool.__aexit__(*failure)
        subprocess.run(["rm", "-rf", self.directory], check=True)  # noqa: ASYNC221

    async def writer(self):
        """Another client."""
        return (await self.pool.client("writer", QUICK)).vfs

    async def file(self, content: bytes, vfs=None, name=b"file"):
        vfs = vfs or self.vfs
        _, handle = await vfs.create(1, name, 0o644, os.O_RDWR, ME)
        for at in range(0, len(content), MIB):
            await vfs.write(handle, at, content[at : at + MIB])
        await vfs.flush(handle)
        return handle

    async def located(self, handle, count=1):
        """Read until that many chunks of the file are located."""
        async with asyncio.timeout(120):
            while len(handle.file.located) < count:
                for index in range(count):
                    await self.vfs.read(handle, index * MIB + 8, 100)
                await asyncio.sleep(0.01)

    async def read_cached(self, handle, offset, length):
        """The bytes by a short-circuit read, once they are in the page cache."""
        async with asyncio.timeout(120):
            while (found := self.vfs.read_now(handle, offset, length)) is None:
                await self.vfs.read(handle, offset, length)
                await asyncio.sleep(0.005)
        return bytes(found)

    def place_of(self, handle, block):
        located = handle.file.located[block >> 8]
        store = self.pool.stores[located.source.target].store
        return store, (located.base + (block & 255)) if located.base else located.places[block & 255]


def run_whole(work, wait_s):
    """Run `work`; it must end in time and leave no descriptor open."""
    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(asyncio.wait_for(work, wait_s))
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1, "descriptors are left"


def hosted(**pool_options):
    def wrap(test):
        def run():
            async def main():
                async with Host(**pool_options) as host:
                    await test(host)

            run_whole(main(), 90)

        run.__name__ = test.__name__
        return run

    return wrap


def some(count, seed=1):
    return random.Random(seed).randbytes(count)


def evict(path):
    """Drop the file from the page cache. The kernel keeps pages that it is using: try again until none is left."""
    fd = os.open(path, os.O_RDWR)
    for _ in range(1000):
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_pages(fd, 0, 1 << 62) <= 0:
            break
        time.sleep(0.001)
    os.close(fd)


@hosted()
async def test_cached_bytes_are_correct_at_every_boundary(host):
    content = some(3 * MIB + 1234)
    handle = await host.file(content)
    await host.located(handle, 4)
    chance = random.Random(2)
    for _ in range(300):
        offset = chance.randrange(len(content))
        length = chance.choice([1, 4096, 10_000, 131072, MIB])
        assert await host.read_cached(handle, offset, length) == content[offset : offset + length]
    for offset, length in (
        (0, 4096),
        (MIB - 1, 2),
        (MIB - 4096, 8192),
        (2 * MIB, MIB),
        (3 * MIB, 4096),
        (len(content) - 1, 99),
    ):
        assert await host.read_cached(handle, offset, length) == content[offset : offset + length]
    assert host.vfs.read_now(handle, len(content), 10) in (None, b"")
    assert host.vfs.read_now(handle, 0, 0) is None
    assert host.short.counters["hits"] > 300 and not host.short.counters["mismatches"]
    places = list(range(0, MIB, BLOCK))
    chance.shuffle(places)
    for at in places:
        await host.read_cached(handle, at, BLOCK)
    sent = host.vfs.chunks.counters["messages"]
    for at in places:
        assert host.vfs.read_now(handle, at, BLOCK) == content[at : at + BLOCK]
    assert host.vfs.chunks.counters["messages"] == sent


@hosted()
async def test_uncached_bytes_are_read_from_the_drive_directly(host):
    content = some(4 * MIB)
    handle = await host.file(content)
    await host.vfs.fsync(handle, False)
    await host.located(handle, 4)
    for service in host.pool.stores.values():
        evict(service.store.path)
    sent, cold = host.vfs.chunks.counters["messages"], host.short.counters["cold"]
    offsets = [at * BLOCK for at in random.Random(3).sample(range(1024), 60)]
    for offset, part in zip(
        offsets, await asyncio.gather(*[host.vfs.read(handle, at, 5000) for at in offsets]), strict=True
    ):
        assert bytes(part) == content[offset : offset + 5000]
    assert host.vfs.chunks.counters["messages"] == sent
    assert host.short.counters["cold"] > cold, (
        "a tmpfs has no drive below it" if host.directory.startswith("/dev/shm") else ""
    )
    into = memoryview(bytearray(64 * BLOCK))
    evict(next(iter(host.pool.stores.values())).store.path)
    await host.vfs.read_many([(handle, at * 16 * BLOCK + at % 3 * 100, BLOCK) for at in range(64)], into)
    for at in range(64):
        offset = at * 16 * BLOCK + at % 3 * 100
        assert into[at * BLOCK : at * BLOCK + BLOCK] == content[offset : offset + BLOCK]


@hosted(capacities=(64 * MIB,))
async def test_first_reads_locate_all_chunks_of_a_file(host):
    content = some(8 * MIB)
    handle = await host.file(content)
    await host.located(handle)
    assert len(handle.file.located) == 8
    for index in range(8):
        assert (
            await host.read_cached(handle, index * MIB + 4096, 4096) == content[index * MIB + 4096 :][:4096]
        )


@hosted()
async def test_cold_reads_reduce_probes_of_the_page_cache(host):
    content = some(2 * MIB)
    handle = await host.file(content)
    await host.located(handle, 2)
    short = host.short
    assert await host.read_cached(handle, 0, 4096) == content[:4096]
    short.cold_reads = short_circuit.COLD
    short.waiting[0] = float("inf"), lambda found: None  # a read waits for the drive
    found = [host.vfs.read_now(handle, 0, 4096) for _ in range(short_circuit.PROBE)]
    del short.waiting[0]
    assert found.count(None) == short_circuit.PROBE - short_circuit.COLD - 1, (
        "then one probed, and hit: so did all reads after it"
    )
    places = random.Random(5).sample(range(4096, 2 * MIB - 4096, 8192), 40)
    ended = asyncio.Event()
    reads = [(at, host.vfs.begin_read(handle, at, 4000)) for at in places]
    for _, coming in reads:
        coming.on_end = lambda found, error: all(coming.done() for _, coming in reads) and ended.set()
    if not all(coming.done() for _, coming in reads):
        await asyncio.wait_for(ended.wait(), 120)
    assert all(bytes(coming.outcome[0]) == content[at : at + 4000] for at, coming in reads)


@hosted()
async def test_read_many_reads_cached_parts_and_requests_the_rest(host):
    content = some(4 * MIB + 100)
    handle = await host.file(content)
    _, unknown = None, await host.file(content[: BLOCK * 3], name=b"unknown")
    await host.located(handle, 3)
    chance = random.Random(4)
    for _ in range(30):
        reads = []
        for _ in range(200):
            length = chance.choice([BLOCK, BLOCK, 100, 5000, 8 * BLOCK])
            reads.append(
                (handle, chance.randrange(len(content) // BLOCK) * BLOCK + chance.choice([0, 0, 77]), length)
            )
        reads.append((unknown, 4096, 5000))
        into = bytearray(sum(length for _, _, length in reads))
        lengths = await host.vfs.read_many(reads, memoryview(into))
        place = 0
        for (which, offset, asked), length in zip(reads, lengths, strict=True):
            expected = (content if which is handle else content[: 3 * BLOCK])[offset : offset + asked]
            assert length == len(expected) and into[place : place + length] == expected
            place += asked
    assert host.short.counters["hits"] > 1000


def _spoil(located, block):
    """Make the stored checksum of a block differ from its bytes."""
    at = 4 * block
    located.sums = (
        located.sums[:at] + bytes(byte ^ 255 for byte in located.sums[at : at + 4]) + located.sums[at + 4 :]
    )


async def read_batch(vfs, reads, contents):
    """Read (handle, offset, length) with one read_many; each must return its part of contents[handle]."""
    into = bytearray(sum(length for _, _, length in reads))
    assert await vfs.read_many(reads, memoryview(into)) == [length for _, _, length in reads]
    place = 0
    for handle, offset, length in reads:
        assert into[place : place + length] == contents[handle][offset : offset + length], (offset, length)
        place += length


async def cached_file(host, content, name=b"file"):
    """A file whose chunks are located and whose blocks are in the page cache."""
    handle = await host.file(content, name=name)
    await host.located(handle, -(-len(content) // MIB))
    for at in range(0, len(content), MIB):
        await host.read_cached(handle, at, min(MIB, len(content) - at))
    return handle


@hosted()
async def test_mismatch_in_a_batch_is_read_again_through_the_store(host):
    content = some(2 * MIB)
    handle = await cached_file(host, content)
    located, counters = handle.file.located[0], host.short.counters
    _spoil(located, 4)
    hits, requested = counters["hits"], host.vfs.chunks.counters["reads"]
    # the part of a block makes the places of the whole blocks in the buffer not adjacent
    reads = [
        (handle, 0, BLOCK),
        (handle, 3 * BLOCK, BLOCK),
        (handle, 20 * BLOCK + 50, 100),
        (handle, 4 * BLOCK, BLOCK),
        (handle, 9 * BLOCK, 3 * BLOCK),
        (handle, 300 * BLOCK, BLOCK),
        (handle, 3 * BLOCK, BLOCK),
    ]
    await read_batch(host.vfs, reads, {handle: content})
    assert counters["mismatches"] == 1 and counters["hits"] == hits + len(reads) - 1
    assert host.vfs.chunks.counters["reads"] == requested + 1, "only the bad block is requested"
    assert 0 not in handle.file.located and 1 in handle.file.located, "the location is not used again"
    assert not located.read_bytes, "the good reads of the dropped location are reported to its store"


@hosted()
async def test_mismatches_of_a_chunk_in_a_batch_count_once(host):
    content = some(MIB)
    handle = await cached_file(host, content)
    located = handle.file.located[0]
    located.sums = bytes(len(located.sums))
    reads = [(handle, block * BLOCK, BLOCK) for block in range(0, 60, 3)]
    await read_batch(host.vfs, reads, {handle: content})
    assert host.short.counters["mismatches"] == 1


@hosted()
async def test_late_location_in_a_batch_leaves_other_files_alone(host):
    one_content, other_content = some(MIB), some(MIB, 2)
    one = await cached_file(host, one_content, b"one")
    other = await cached_file(host, other_content, b"other")
    counters = host.short.counters
    one.file.located[0].until = host.short.now_s() - 1.0
    hits, requested = counters["hits"], host.vfs.chunks.counters["reads"]
    reads = []
    for block in range(16):
        reads += [(one, block * BLOCK, BLOCK), (other, (15 - block) * BLOCK, (1 + block % 2) * BLOCK)]
    await read_batch(host.vfs, reads, {one: one_content, other: other_content})
    assert counters["hits"] == hits + 16 and counters["late"] and not counters["mismatches"]
    assert host.vfs.chunks.counters["reads"] == requested + 16, "all reads of the late location, no other"
    assert not one.file.located and 0 in other.file.located


@hosted()
async def test_fragmented_reads_of_a_batch_are_checked_whole(host):
    content = bytearray(some(MIB))
    handle = await host.file(bytes(content))
    for block in (5, 7, 30):  # rewritten blocks lie elsewhere on the drive
        content[block * BLOCK : (block + 1) * BLOCK] = some(BLOCK, block)
        await host.vfs.write(handle, block * BLOCK, some(BLOCK, block))
        await host.vfs.flush(handle)
    await host.located(handle)
    await host.read_cached(handle, 0, MIB)
    located = handle.file.located[0]
    assert len(host.short.runs(located, 4, 6)) > 2
    hits = host.short.counters["hits"]
    reads = [(handle, 4 * BLOCK, 6 * BLOCK), (handle, 29 * BLOCK, 2 * BLOCK), (handle, 0, BLOCK)]
    await read_batch(host.vfs, reads, {handle: bytes(content)})
    assert host.short.counters["hits"] == hits + 3
    _spoil(located, 8)  # in the last run of the first read
    await read_batch(host.vfs, reads, {handle: bytes(content)})
    assert host.short.counters["mismatches"] == 1 and host.short.counters["hits"] == hits + 5


@hosted()
async def test_batch_check_finds_the_read_wherever_its_bytes_are(host):
    content = some(MIB)
    handle = await cached_file(host, content)
    located, into = handle.file.located[0], memoryview(bytearray(40 * BLOCK + 9))
    # (block, blocks, place): adjacent, apart, backwards, and not at a block border of the buffer
    wanted = [
        (2, 1, 0),
        (200, 2, BLOCK),
        (7, 3, 20 * BLOCK + 9),
        (4, 1, 10 * BLOCK),
        (5, 2, 8 * BLOCK),
        (2, 1, 30 * BLOCK + 1),
    ]
    reads = [
        (located, block, (handle.file, block * BLOCK, count * BLOCK, place)) for block, count, place in wanted
    ]

    def fill():
        for block, count, place in wanted:
            into[place : place + count * BLOCK] = content[block * BLOCK : (block + count) * BLOCK]

    for number, (_, count, place) in enumerate(wanted):
        for at in (place, place + count * BLOCK - 1):
            fill()
            assert host.short.wrong_reads(reads, into) == set()
            into[at] ^= 1
            until = located.until
            assert host.short.wrong_reads(reads, into) == {number}
            assert located.until == 0.0
            located.until = until


def test_batch_of_an_encrypted_volume_is_decrypted_once(tmp_path):
    key = tmp_path / "pool.key"
    key.write_text(f"{bytes(range(32)).hex()}\n")
    key.chmod(0o600)

    async def main():
        async with Host(key_file=str(key)) as host:
            files = AsyncFileSystem(host.client, ME)
            await files.volumes.create("secret", encrypted=True)
            content, plain_content = some(MIB), some(MIB, 2)
            await files.write_bytes("/volumes/secret/file", content)
            inode = (await files.stat("/volumes/secret/file")).st_ino
            handle = await host.vfs.open(inode, os.O_RDONLY, ME)
            plain = await cached_file(host, plain_content, b"plain")
            await host.located(handle)
            await host.read_cached(handle, 0, MIB)
            located = handle.file.located[0]
            _spoil(located, 6)
            hits = host.short.counters["hits"]
            reads = []
            for block in range(4, 12):
                reads += [(handle, block * BLOCK, BLOCK), (plain, block * BLOCK, BLOCK)]
            await read_batch(host.vfs, reads, {handle: content, plain: plain_content})
            assert host.short.counters["mismatches"] == 1
            assert host.short.counters["hits"] == hits + len(reads) - 1

    run_whole(main(), 90)


def test_encrypted_file_without_its_key_has_no_locations(tmp_path):
    """A sequential reader requests locations ahead, perhaps before the shard has returned the volume's key."""
    key = tmp_path / "pool.key"
    key.write_text(f"{bytes(range(32)).hex()}\n")
    key.chmod(0o600)

    async def main():
        async with Host(key_file=str(key)) as host:
            writer = AsyncFileSystem(await host.pool.client("writer", QUICK), ME)
            await writer.volumes.create("secret", encrypted=True)
            content = some(4 * MIB)
            await writer.write_bytes("/volumes/secret/file", content)
            inode = (await writer.stat("/volumes/secret/file")).st_ino
            await cached_file(host, some(8 * MIB, 2), b"plain")  # this client may read all drives
            handle = await host.vfs.open(inode, os.O_RDONLY, ME)
            assert handle.file.encrypted and handle.file.key is None
            for _ in range(20):
                host.short.want_ahead(handle.file, 0, 3)
                await asyncio.sleep(0.01)
                assert not handle.file.located
            assert bytes(await host.vfs.read(handle, 100, 5000)) == content[100:5100]
            await host.located(handle, 4)
            assert await host.read_cached(handle, MIB, MIB) == content[MIB : 2 * MIB]

    run_whole(main(), 90)


@hosted()
async def test_write_of_another_client_is_seen_without_reopening(host):
    other = await host.writer()
    content = some(2 * MIB)
    handle = await host.file(content)
    theirs = await other.open(handle.inode, os.O_RDWR, ME)
    await host.located(handle, 2)
    for round_number in range(50):
        offset = random.Random(round_number).randrange(2 * MIB - 6000)
        await host.read_cached(handle, offset, 3000)
        new = some(3000, 100 + round_number)
        await other.write(theirs, offset, new)
        await other.flush(theirs)
        found = host.vfs.read_now(handle, offset, 3000)
        assert found is None or found == new
        assert bytes(await host.vfs.read(handle, offset, 3000)) == new
    assert host.short.counters["late"]


@hosted()
async def test_own_writes_are_read_stored_or_not(host):
    content = bytearray(some(2 * MIB))
    handle = await host.file(bytes(content))
    await host.located(handle, 2)
    chance = random.Random(7)
    for _ in range(200):
        offset = chance.randrange(2 * MIB - 9000)
        new = chance.randbytes(chance.choice([10, 4096, 9000]))
        await host.vfs.write(handle, offset, new)
        content[offset : offset + len(new)] = new
        if chance.random() < 0.5:
            await host.vfs.flush(handle)
        for _ in range(3):
            at = max(0, offset + chance.randrange(-5000, 5000))
            found = host.vfs.read_now(handle, at, 4000)
            if found is None:
                found = await host.vfs.read(handle, at, 4000)
            assert found == content[at : at + 4000]


@hosted()
async def test_truncated_bytes_are_never_read_again(host):
    other = await host.writer()
    for round_number in range(12):
        content = some(2 * MIB, round_number)
        handle = await host.file(content, name=b"cut-%d" % round_number)
        await host.located(handle, 2)
        await host.read_cached(handle, MIB, BLOCK)
        size = random.Random(round_number).choice([0, 10, BLOCK, MIB, MIB + 50])
        await other.setattr(handle.inode, size=size, caller=ME)
        for offset in (0, BLOCK, MIB - BLOCK, MIB, MIB + BLOCK):
            for found in (
                host.vfs.read_now(handle, offset, BLOCK),
                await host.vfs.read(handle, offset, BLOCK),
            ):
                if found is not None:
                    assert not bytes(found)[max(0, size - offset) :].strip(b"\0"), "cut"
                    kept = max(0, min(BLOCK, size - offset))
                    assert bytes(found)[:kept] == content[offset : offset + kept]


@hosted()
async def test_holes_and_copies_are_seen_without_reopening(host):
    content = bytearray(some(2 * MIB))
    theirs = await host.file(bytes(content), await host.writer())
    writer = await host.writer()
    target = await writer.open(theirs.inode, os.O_RDWR, ME)
    source = await host.file(some(MIB, 2), writer, b"source")
    mine = await host.vfs.open(theirs.inode, os.O_RDONLY, ME)
    for mode, offset, length in (
        (PUNCH_HOLE | KEEP_SIZE, 5000, 9000),
        (None, 20 * BLOCK, 7 * BLOCK),
        (None, MIB, MIB),
        (ZERO_RANGE, MIB - 5, 10 * BLOCK),
    ):
        await host.located(mine, 2)
        for place in range(offset - offset % BLOCK, offset + length, BLOCK):
            assert await host.read_cached(mine, place, BLOCK) == content[place : place + BLOCK]
        if mode is None:
            assert await writer.copy_range(source, 0, target, offset, length) == length
            await writer.flush(target)
            content[offset : offset + length] = some(MIB, 2)[:length]
        else:
            await writer.fallocate(target, offset, length, mode)
            content[offset : offset + length] = bytes(length)
        for place in range(offset - offset % BLOCK, offset + length, BLOCK):
            found = host.vfs.read_now(mine, place, BLOCK)
            if found is None:
                found = await host.vfs.read(mine, place, BLOCK)
            assert found == content[place : place + BLOCK]
    for vfs, handle in ((writer, target), (writer, source), (host.vfs, mine)):
        await vfs.release(handle)


@hosted()
async def test_open_unlinked_file_keeps_its_blocks(host):
    other = await host.writer()
    content = some(2 * MIB)
    handle = await host.file(content)
    await host.located(handle, 2)
    await other.unlink(1, b"file", ME)
    filler = await host.file(some(4 * MIB, 9), other, b"filler")
    for at in range(0, 2 * MIB, 64 * BLOCK):
        assert await host.read_cached(handle, at, BLOCK) == content[at : at + BLOCK]
    await host.vfs.release(handle)
    assert (
        not handle.file.located
        and bytes(await other.read(filler, MIB, 100)) == some(4 * MIB, 9)[MIB : MIB + 100]
    )


@hosted()
async def test_flipped_byte_is_an_error_and_reported_to_the_store(host):
    content = some(MIB)
    handle = await host.file(content)
    await host.vfs.fsync(handle, False)
    await host.located(handle)
    assert await host.read_cached(handle, 5 * BLOCK, BLOCK) == content[5 * BLOCK : 6 * BLOCK]
    store, place = host.place_of(handle, 5)
    fd = os.open(store.path, os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, place * BLOCK + 9)[0] ^ 1]), place * BLOCK + 9)
    os.close(fd)
    assert host.vfs.read_now(handle, 5 * BLOCK, BLOCK) is None
    for _ in range(3):
        with pytest.raises(ChecksumMismatch):
            await host.vfs.read(handle, 5 * BLOCK, BLOCK)
        with pytest.raises(ChecksumMismatch):
            await host.vfs.read_many([(handle, 5 * BLOCK, BLOCK)], memoryview(bytearray(BLOCK)))
    assert [(bad.inode, bad.block) for bad in store.bad_blocks()] == [(handle.inode, 5)]
    assert bytes(await host.vfs.read(handle, 6 * BLOCK, BLOCK)) == content[6 * BLOCK : 7 * BLOCK]
    assert not handle.file.located, "a chunk with a bad block has no location lease"
    await host.vfs.write(handle, 5 * BLOCK, content[:BLOCK])
    await host.vfs.flush(handle)
    assert bytes(await host.vfs.read(handle, 5 * BLOCK, BLOCK)) == content[:BLOCK]


@hosted()
async def test_bytes_read_after_the_lease_are_discarded(host):
    content = some(MIB)
    handle = await host.file(content)
    await host.located(handle)
    await host.read_cached(handle, 0, BLOCK)
    located = handle.file.located[0]
    real, ended = host.short.now_s, located.until

    def stopped_in_between():  # SIGSTOP, suspend: the read was in time, its check is not
        return ended + 0.001

    host.short.now_s = stopped_in_between
    assert host.vfs.read_now(handle, 0, BLOCK) is None and host.vfs.read_now(handle, 0, 2 * BLOCK) is None
    host.short.now_s = real
    assert not handle.file.located
    assert bytes(await host.vfs.read(handle, 0, BLOCK)) == content[:BLOCK]
    assert located.until == 0.0 and ended <= real() + store_api.LOCATION_LEASE_S


@hosted()
async def test_used_locations_are_renewed_and_others_are_dropped(host):
    content = some(2 * MIB)
    handle = await host.file(content)
    await host.located(handle, 2)
    deadline = host.short.now_s() + store_api.LOCATION_LEASE_S + 1.5
    while host.short.now_s() < deadline or 1 in handle.file.located:
        assert await host.read_cached(handle, 0, BLOCK) == content[:BLOCK]
        await asyncio.sleep(0.1)
    assert host.short.counters["late"] == 0
    assert 1 not in handle.file.located and 0 in handle.file.located
    assert host.short.byte_count == handle.file.located[0].bytes


@hosted()
async def test_restarted_store_grants_locations_again(host):
    content = bytearray(some(2 * MIB))
    handle = await host.file(bytes(content))
    await host.located(handle, 2)
    for round_number in range(3):
        for target in list(host.pool.stores):
            service = host.pool.stores.pop(target)
            await host.pool.hang_up("target", target, 0.0)
            service.tending.cancel()
            service.handover.close()
            await service.store.abandon()  # the state that kill -9 leaves
            await host.pool.start_store(target)
        new = some(5000, round_number + 50)
        other = await host.writer()
        theirs = await other.open(handle.inode, os.O_RDWR, ME)
        await other.write(theirs, 100, new)
        await other.flush(theirs)
        content[100:5100] = new
        assert bytes(await host.vfs.read(handle, 100, 5000)) == new
        async with asyncio.timeout(120):
            hits = host.short.counters["hits"]
            while host.short.counters["hits"] == hits:
                assert bytes(await host.vfs.read(handle, BLOCK, BLOCK)) == content[BLOCK : 2 * BLOCK]
                await asyncio.sleep(0.05)
    assert not host.short.counters["mismatches"]


@hosted()
async def test_locations_are_bounded_in_memory(host):
    content = some(8 * MIB)
    handle = await host.file(content)
    host.short.bytes_max = 5000
    for at in list(range(0, 8 * MIB, 64 * BLOCK)) * 3:
        assert bytes(await host.vfs.read(handle, at + 5, 50)) == content[at + 5 : at + 55]
        await asyncio.sleep(0.001)
        assert host.short.byte_count <= 5000 and len(handle.file.located) <= 3
    assert host.short.counters["located"] > 5


@hosted()
async def test_sequential_reader_finds_the_next_chunks_located(host):
    content = some(12 * MIB)
    handle = await host.file(content)
    for _ in range(2):
        found = bytearray()
        while len(found) < len(content):
            part = host.vfs.read_now(handle, len(found), 128 << 10)
            found += part if part is not None else await host.vfs.read(handle, len(found), 128 << 10)
            await asyncio.sleep(0)
        assert found == content
    assert host.short.counters["hits"] > 20


@hosted(chunk_bytes=64 * KIB, capacities=(96 * MIB,))
async def test_locations_arrive_in_time_for_a_sequential_reader(host):
    chunks = 512
    content = some(chunks * 64 * KIB)
    inode = (await host.file(content)).inode
    reader = (await host.pool.client("streamer", QUICK._replace(read_ahead_bytes=512 * KIB))).vfs
    for service in host.pool.stores.values():
        answer_in_turn(service)
    handle = await reader.open(inode, os.O_RDONLY, ME)
    found = bytearray()
    while len(found) < len(content):
        found += await reader.read(handle, len(found), 64 * KIB)
    assert found == content
    assert reader.chunks.short.counters["hits"] > chunks * 2 // 3


def answer_in_turn(service):
    """Make the store process one request at a time, 3 ms each."""
    kinds = {method: service.methods[method] for method in (Method.DATA_LOCATE, Method.DATA_READ)}
    waiting = deque()

    def come(call):
        waiting.append(call)
        if len(waiting) == 1:
            asyncio.get_running_loop().call_later(0.003, answer)

    def answer():
        kinds[waiting[0].method](waiting[0])
        waiting.popleft()
        if waiting:
            asyncio.get_running_loop().call_later(0.003, answer)

    service.methods.update(dict.fromkeys(kinds, come))


DIRECT = QUICK._replace(direct_reads=True)


async def opened_direct(host, inode):
    """Open the file at a client that bypasses the page cache, with all its chunks located."""
    vfs = (await host.pool.client("past", DIRECT)).vfs
    handle = await vfs.open(inode, os.O_RDONLY, ME)
    async with asyncio.timeout(120):
        while len(handle.file.located) < handle.file.size >> 20:
            await asyncio.gather(
                *[vfs.read(handle, index * MIB + 8, 100) for index in range(handle.file.size >> 20)]
            )
    source = handle.file.located[0].source
    if source.direct_fd < 0:
        pytest.skip("this file system or kernel has no reads past the page cache")
    return vfs, handle


def in_memory(host):
    """Number of pages of all stores' data files in the page cache."""
    found = 0
    for service in host.pool.stores.values():
        descriptor = os.open(service.store.path, os.O_RDONLY)
        found += cached_pages(descriptor, 0, 1 << 40)
        os.close(descriptor)
    return found


@hosted()
async def test_large_direct_reads_leave_the_page_cache_alone(host):
    content = some(8 * MIB)
    inode = (await host.file(content)).inode
    vfs, handle = await opened_direct(host, inode)
    for service in host.pool.stores.values():
        evict(service.store.path)
    before, sent = in_memory(host), vfs.chunks.counters["messages"]
    for offset, length in (
        (0, MIB),
        (3 * MIB + 5, 200_000),
        (MIB, MIB),
        (2 * MIB, 128 * KIB),
        (5 * MIB, 2 * MIB),
    ):
        assert bytes(await vfs.read(handle, offset, length)) == content[offset : offset + length]
    assert in_memory(host) < before + 32, "except for pages of small reads"
    assert vfs.chunks.counters["messages"] == sent
    other = await host.vfs.open(inode, os.O_RDONLY, ME)
    for at in range(0, 8 * MIB, MIB):
        assert bytes(await host.vfs.read(other, at, MIB)) == content[at : at + MIB]
    assert in_memory(host) > before + 1000, "a client without a cache fills the page cache"
    for _ in range(10):  # the kernel may reclaim the memory
        await host.vfs.read(other, 4 * MIB, MIB)
        found = vfs.read_now(handle, 4 * MIB, MIB)
        if found is not None:
            break
    assert bytes(found) == content[4 * MIB : 5 * MIB], "cached pages are used"


@hosted()
async def test_direct_read_returns_what_was_written_to_the_cache(host):
    chance = random.Random(5)
    content = bytearray(some(2 * MIB))
    theirs = await host.file(bytes(content))
    for _ in range(8):
        vfs, handle = await opened_direct(host, theirs.inode)
        at, length = chance.randrange(2 * MIB - 9000), chance.randrange(1, 9000)
        content[at : at + length] = new = chance.randbytes(length)
        await host.vfs.write(theirs, at, new)
        await host.vfs.flush(theirs)
        assert bytes(await vfs.read(handle, at >> 20 << 20, MIB)) == content[at >> 20 << 20 :][:MIB]
        await vfs.release(handle)


@hosted()
async def test_drive_without_direct_reads_is_read_through_the_cache(host):
    content = some(3 * MIB)
    vfs, handle = await opened_direct(host, (await host.file(content)).inode)
    for source in {id(located.source): located.source for located in handle.file.located.values()}.values():
        directory = os.open(host.directory, os.O_RDONLY)
        os.dup2(directory, source.direct_fd)
        os.close(directory)
    for _ in range(2):
        for service in host.pool.stores.values():
            evict(service.store.path)
        for at in range(0, 3 * MIB, MIB):
            assert bytes(await vfs.read(handle, at + 1, MIB - 1)) == content[at + 1 : at + MIB]
    assert not any(located.source.takes_direct for located in handle.file.located.values())


@hosted()
async def test_holes_and_bytes_past_the_known_end_are_requested(host):
    other = await host.writer()
    handle = await host.file(some(3 * BLOCK))
    await host.vfs.write(handle, 10 * BLOCK, b"end" * 2000)
    await host.vfs.flush(handle)
    await host.located(handle)
    assert host.vfs.read_now(handle, 5 * BLOCK, BLOCK) is None
    assert bytes(await host.vfs.read(handle, 5 * BLOCK, BLOCK)) == bytes(BLOCK)
    theirs = await other.open(handle.inode, os.O_RDWR, ME)
    await other.write(theirs, 20 * BLOCK, b"behind")
    await other.flush(theirs)
    again = await host.vfs.open(handle.inode, os.O_RDONLY, ME)
    assert bytes(await host.vfs.read(again, 20 * BLOCK, 100)) == b"behind"


@pytest.mark.parametrize("how", ["client", "store", "direct"])
def test_each_side_can_switch_short_circuit_reads_off(how, monkeypatch):
    options = {"store": {"location_lease_s": 0.0}, "direct": {"direct": True}}.get(how, {})
    if options:
        opened = block_store.open_chunk_store
        monkeypatch.setattr(
            block_store,
            "open_chunk_store",
            lambda path, target, clock: opened(path, target, store_api.StoreOptions(**options), clock=clock),
        )

    async def main():
        async with Host() as host:
            if how == "client":
                host.vfs = (await host.pool.client("plain", QUICK._replace(short_circuit=False))).vfs
            handle = await host.file(some(MIB))
            for at in range(0, MIB, 16 * BLOCK):
                assert host.vfs.read_now(handle, at, 100) is None
                assert bytes(await host.vfs.read(handle, at, 100)) == some(MIB)[at : at + 100]
            assert not handle.file.located and not host.vfs.chunks.short.sources
            path = path_beside(f"{host.directory}/target1.sock")
            assert (os.path.basename(path) in os.listdir(host.directory)) == (how == "client")

    asyncio.run(asyncio.wait_for(main(), 120))


LONG_S = 6.0


def test_concurrent_reads_never_see_old_or_mixed_blocks():
    read_while_written(2.0)


@pytest.mark.few(0)
def test_concurrent_reads_never_see_old_blocks_for_longer():
    read_while_written(LONG_S)


def read_while_written(least_s):
    """Each block contains its number and how often it was written. A read returns nothing older than what was acknowledged
    when it began. The reads take `least_s`, and up to LONG_S where too few of them met a write."""

    async def main():
        async with Host(capacities=(24 * MIB,)) as host:
            other = await host.writer()
            blocks, chance = 512, random.Random(11)

            def block(number, count):
                return (struct.pack("<QQ", number, count) * 256)[:BLOCK]

            handle = await host.file(b"".join(block(number, 0) for number in range(blocks)))
            theirs = await other.open(handle.inode, os.O_RDWR, ME)
            acknowledged, begun = [0] * blocks, [0] * blocks
            counters, loop = host.short.counters, asyncio.get_running_loop()
            began_s = loop.time()

            def goes_on():
                passed_s = loop.time() - began_s
                enough = counters["hits"] > 200 and counters["late"] > 10
                return passed_s < least_s or (passed_s < LONG_S and not enough)

            async def write():
                while goes_on():
                    first, count = chance.randrange(blocks), chance.choice([1, 1, 3, 40])
                    numbers = range(first, min(first + count, blocks))
                    for number in numbers:
                        begun[number] += 1
                    now = [begun[number] for number in numbers]
                    await other.write(theirs, first * BLOCK, b"".join(map(block, numbers, now)))
                    await other.flush(theirs)
                    for number, generation in zip(numbers, now, strict=True):
                        acknowledged[number] = generation

            async def read():
                while goes_on():
                    first, count = chance.randrange(blocks), chance.choice([1, 1, 1, 5])
                    numbers = range(first, min(first + count, blocks))
                    least = [acknowledged[number] for number in numbers]
                    found = host.vfs.read_now(handle, first * BLOCK, len(numbers) * BLOCK)
                    if found is None:
                        found = await host.vfs.read(handle, first * BLOCK, len(numbers) * BLOCK)
                    for at, (number, low) in enumerate(zip(numbers, least, strict=True)):
                        part = bytes(found[at * BLOCK : at * BLOCK + BLOCK])
                        its_number, generation = struct.unpack_from("<QQ", part)
                        assert its_number == number and part == block(number, generation)
                        assert low <= generation <= begun[number], (low, generation, begun[number])
                    if not chance.randrange(20):
                        await asyncio.sleep(0)

            await asyncio.gather(write(), *[read() for _ in range(4)])
            assert counters["hits"] > 200 and counters["late"] > 10 and not counters["mismatches"], counters

    asyncio.run(asyncio.wait_for(main(), 120))


# -- access to descriptors --------------------------------------------------------------------------------------------------


def descriptors_for(path: str, uid: int = 0, gid: int = 0, groups: tuple[int, ...] = ()) -> str:
    """Result of a process of another user that takes descriptors at `path`."""
    program = (
        "import asyncio, os, sys; from nvpool.rpc.fd_passing import take\n"
        f"asyncio; os.setgroups({list(groups)}); os.setgid({gid}); os.setuid({uid})\n"
        "try:\n  said, fds = asyncio.run(take(sys.argv[1], 5)); print('given', said.decode(), len(fds))\n"
        "except Exception as error: print(type(error).__name__)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=240, check=True
    ).stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_descriptors_are_for_root_and_the_configured_group():
    group = grp.getgrnam("daemon").gr_gid

    async def main(directory):
        path = f"{directory}/target.fd"
        os.chmod(directory, 0o755)
        handover = Handover(path, lambda: (b"hello", [os.open("/dev/null", os.O_RDONLY)]), group=group)
        handover.start()
        try:
            assert os.stat(path).st_mode & 0o777 == 0o660 and os.stat(path).st_gid == group
            assert await asyncio.to_thread(descriptors_for, path) == "given hello 1"
            assert await asyncio.to_thread(descriptors_for, path, 65534, 65534) == "AccessDenied", (
                "by the mode of the socket"
            )
            os.chmod(path, 0o666)
            assert await asyncio.to_thread(descriptors_for, path, 65534, 65534) == "AccessDenied", (
                "by its credentials"
            )
            assert await asyncio.to_thread(descriptors_for, path, 65534, 65534, (group,)) == "given hello 1"
            assert await asyncio.to_thread(descriptors_for, path, 65534, group) == "given hello 1"
        finally:
            handover.close()
        assert not os.listdir(directory)

    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        asyncio.run(asyncio.wait_for(main(directory), 120))


def test_missing_silent_and_refusing_handovers_differ(tmp_path):
    async def main():
        with pytest.raises(NotSupported):
            await take(str(tmp_path / "none.fd"), 1.0)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(tmp_path / "silent.fd"))
            silent.listen(8)
            with pytest.raises(Unreachable):
                await take(str(tmp_path / "silent.fd"), 0.1)
        with pytest.raises(Unreachable):
            await take(str(tmp_path / "silent.fd"), 1.0)

        def refuse():
            raise NotSupported("short-circuit reads are off here")

        handover = Handover(str(tmp_path / "refusing.fd"), refuse)
        handover.start()
        with pytest.raises(NotSupported):
            await take(handover.path, 1.0)
        handover.allows = lambda uid, groups: False
        with pytest.raises(AccessDenied):
            await take(handover.path, 1.0)
        handover.close()
        one, other = socket.socketpair()
        with one, other:
            found = credentials_of(one)
            assert (found.uid, found.pid) == (os.geteuid(), os.getpid()) and os.getegid() in found.gids
            with pytest.raises(NotSupported):
                read, _ = os.pipe()
                os.close(_)
                short_circuit.LocalDrive(1, b"nonsense", [read], asked_s=0.0)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_descriptors_are_read_only():
    async def main():
        async with Host() as host:
            said, (data, table) = await take(f"{host.directory}/target1.fd", 2.0)
            for fd in (data, table):
                assert not os.get_inheritable(fd)
                with pytest.raises(OSError):
                    os.pwrite(fd, b"x", 0)
            with pytest.raises(OSError):
                os.ftruncate(table, 0)
            again = os.open(f"/proc/self/fd/{table}", os.O_RDWR)  # root may open it; the seal still holds
            with pytest.raises(OSError):
                os.pwrite(again, b"x", 0)
            for fd in (data, table, again):
                os.close(fd)

    asyncio.run(asyncio.wait_for(main(), 120))
