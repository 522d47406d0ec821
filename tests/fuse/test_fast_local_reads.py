"""Short-circuit reads on the compiled fast path: bytes and errors as on the slow path, whatever happens meanwhile."""

import asyncio
import errno
import os
import random
import socket
from contextlib import asynccontextmanager

import pytest

from nvpool.blockio.reader import cached_pages
from nvpool.client.data import short_circuit
from nvpool.core.units import KIB, MIB
from nvpool.fuse.fast_path import local_reads
from nvpool.fuse.protocol import requests
from nvpool.fuse.protocol.constants import Op
from tests.fuse.read_kernel import CONTENT, WAYS, Reading, path_decorators, places
from tests.unit.client.data.test_short_circuit import BLOCK, ME, Host, evict, run_whole


class Mounted(Reading):
    """With short-circuit reads."""

    def __init__(self, host):
        super().__init__(host)
        self.short = host.short

    async def open(self):
        """As `open_theirs`, with locations of all its chunks."""
        number = await self.open_theirs()
        await self.host.located(self.handle(number), 6)
        await self.read(number, len(CONTENT) - 1, 1)  # its pages are validated from now on
        return number

    @property
    def plain(self):
        plan = self.engine.fast_paths.reads.plan
        return None if plan is None else plan.local

    def forget_pages(self):
        for service in self.host.pool.stores.values():
            evict(service.store.path)

    def pages(self):
        return sum(cached_pages(source.fd, 0, 1 << 40) for source in self.short.sources.values())


@asynccontextmanager
async def mounted(way="compiled"):
    async with Host() as host, Mounted(host) as kernel:
        await kernel.init()
        if way == "ordinary":
            await kernel.engine.fast_paths.stop()
        yield kernel


on_a_mount, on_both_paths, on_fast_path = path_decorators(mounted)


@on_both_paths
async def test_bytes_are_right_at_every_border_and_length(kernel):
    number = await kernel.open()
    for offset, length in [
        *places(400, 1),
        (MIB - 1, 2),
        (MIB - BLOCK, BLOCK),
        (MIB - BLOCK, 2 * BLOCK),
        (len(CONTENT), 10),
        (len(CONTENT) - 1, 1),
        (len(CONTENT) - 5, 100),
        (5 * MIB, 4 * KIB),
    ]:
        assert await kernel.read(number, offset, length) == CONTENT[offset : offset + length]
    if kernel.plain is not None:
        assert kernel.engine.fast_paths.read_bytes > 5 * MIB


@on_both_paths
async def test_concurrent_reads_from_drive_and_memory(kernel):
    number = await kernel.open()
    for seed in range(6):
        if seed % 2 == 0:
            kernel.forget_pages()
        await kernel.check_reads(
            {
                kernel.send_read(number, offset, length): (offset, length)
                for offset, length in places(60, seed)
            }
        )
    assert not kernel.engine.requests.work and not kernel.short.waiting
    assert kernel.plain is None or not kernel.plain.inside


@on_both_paths
async def test_writes_of_all_clients_are_seen_by_the_next_read(kernel):
    content = bytearray(CONTENT)
    number = await kernel.open()
    other = await kernel.host.writer()
    inode = kernel.handle(number).inode
    theirs = await other.open(inode, os.O_RDWR, ME)
    handle = None
    chance = random.Random(3)
    for turn in range(60):
        offset, new = chance.randrange(4 * MIB), chance.randbytes(chance.choice([10, BLOCK, 9000]))
        if turn >= 30 and turn % 2:
            handle = handle or await kernel.vfs.open(inode, os.O_RDWR, ME)
            await kernel.vfs.write(handle, offset, new)
            if turn % 3:
                await kernel.vfs.flush(handle)
        else:
            if handle is not None:
                await kernel.vfs.flush(handle)
            await other.write(theirs, offset, new)
            await other.flush(theirs)
        content[offset : offset + len(new)] = new
        for _ in range(3):
            at = max(0, offset + chance.randrange(-5000, 5000))
            assert await kernel.read(number, at, 4000) == content[at : at + 4000]
    for vfs, opened in ((kernel.vfs, handle), (other, theirs)):
        await vfs.release(opened)


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_flipped_byte_is_an_error(way, cold):
    @on_a_mount
    async def flipped(kernel):
        number = await kernel.open()
        store, place = kernel.host.place_of(kernel.handle(number), 5)
        fd = os.open(store.path, os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, place * BLOCK + 9)[0] ^ 1]), place * BLOCK + 9)
        os.close(fd)
        if cold:
            kernel.forget_pages()
        for _ in range(3):
            with pytest.raises(OSError) as refused:
                await kernel.read(number, 5 * BLOCK, BLOCK)
            assert refused.value.errno == errno.EIO
        assert await kernel.read(number, 7 * BLOCK, BLOCK) == CONTENT[7 * BLOCK : 8 * BLOCK]
        assert kernel.short.counters["mismatches"] >= 1

    flipped(way)


@on_both_paths
async def test_invalid_reads_are_refused_as_on_the_slow_path(kernel):
    number = await kernel.open()
    unique = kernel.send_read(number + 1000, 0, BLOCK)
    heard, error, _ = await kernel.receive()
    assert heard == unique and error
    whole = requests.encode(
        requests.FuseRequest(
            Op.READ, 777, 1, 0, 0, 0, requests.FORMS[Op.READ].body(number, 0, BLOCK, 0, 0, 0), (), b""
        )
    )
    for broken in (whole[:60], whole + b"12345678", bytes([len(whole) + 8]) + whole[1:]):
        kernel.ours.send(broken)
        heard, error, _ = await kernel.receive()
        assert error == -errno.EINVAL and heard == 777
    chance = random.Random(4)
    for _ in range(300):
        at, value = chance.choice([*range(40, 58), *range(60, len(whole))]), chance.randrange(256)
        kernel.ours.send(whole[:at] + bytes([value]) + whole[at + 1 :])
        heard, error, answer = await kernel.receive()
        assert heard == 777 and (error or answer == CONTENT[:BLOCK] or at >= 48)
    assert await kernel.read(number, 3 * BLOCK, BLOCK) == CONTENT[3 * BLOCK : 4 * BLOCK]


@on_fast_path
async def test_small_reads_leave_the_page_cache_alone(kernel):
    number = await kernel.open()
    if not all(source.takes_direct for source in kernel.short.sources.values()):
        for source in kernel.short.sources.values():  # a test's client does not open for direct I/O
            source.direct_fd = os.open(f"/proc/self/fd/{source.fd}", os.O_RDONLY | os.O_DIRECT)
            source.takes_direct = True
            os.posix_fadvise(source.fd, 0, 0, os.POSIX_FADV_RANDOM)
    kernel.forget_pages()
    # the first read checks whether the block is cached, and so caches it
    await kernel.read(number, 9 * BLOCK, BLOCK)
    kernel.forget_pages()
    blocks = random.Random(5).sample(range(20, 1000), 200)
    for block in blocks:
        assert await kernel.read(number, block * BLOCK, BLOCK) == CONTENT[block * BLOCK : (block + 1) * BLOCK]
    assert kernel.pages() < 20
    for block in blocks:
        assert await kernel.read(number, block * BLOCK, BLOCK) == CONTENT[block * BLOCK : (block + 1) * BLOCK]
    assert kernel.pages() >= 190, "what is read again comes into it"
    cold = kernel.short.counters["cold"]
    for block in blocks:
        assert await kernel.read(number, block * BLOCK, BLOCK) == CONTENT[block * BLOCK : (block + 1) * BLOCK]
    assert kernel.short.counters["cold"] < cold + 20


async def pending_read(kernel, number, offset, pid=0):
    """A read that waits for the drive, without a reply yet.

    On a busy machine a read may be answered in another way, and is then sent again: the validity of the file's pages has
    ended, its location has been dropped, or the block is in the page cache.
    """
    async with asyncio.timeout(60):
        while True:
            kernel.forget_pages()
            unique = kernel.send_read(number, offset, BLOCK, pid=pid)
            kernel.engine.take_requests()
            if kernel.plain.inside:
                assert unique in kernel.engine.requests.work and kernel.plain.inside == 1
                return unique
            assert await kernel.receive() == (unique, 0, CONTENT[offset : offset + BLOCK])


@on_fast_path
async def test_interrupted_read_ignores_its_late_data(kernel):
    number = await kernel.open()
    unique = await pending_read(kernel, number, 8 * BLOCK, pid=1 << 22)  # there is no such process
    kernel.send(Op.INTERRUPT, (unique,))
    kernel.engine.take_requests()
    heard, error, _ = await kernel.receive()
    assert (
        (heard, error) == (unique, -errno.EINTR)
        and unique not in kernel.engine.requests.work
        and not kernel.short.waiting
    )
    assert await kernel.read(number, 6 * BLOCK, BLOCK) == CONTENT[6 * BLOCK : 7 * BLOCK]
    async with asyncio.timeout(60):
        while kernel.plain.inside:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@on_fast_path
async def test_slow_drive_is_read_through_its_store(kernel):
    number = await kernel.open()
    unique = await pending_read(kernel, number, 8 * BLOCK)
    real, sent = kernel.short.now_s, kernel.vfs.chunks.counters["messages"]
    kernel.short.now_s = lambda: real() + short_circuit.SLOW_S + 0.1
    kernel.short.run_once()
    kernel.short.now_s = real
    assert await kernel.receive() == (unique, 0, CONTENT[8 * BLOCK : 9 * BLOCK])
    assert kernel.vfs.chunks.counters["messages"] > sent and not kernel.short.waiting
    await kernel.expect_no_reply()


@on_fast_path
async def test_read_interrupted_before_its_store_request(kernel):
    number = await kernel.open()
    unique = await pending_read(kernel, number, 8 * BLOCK)
    real, sent = kernel.short.now_s, kernel.vfs.chunks.counters["messages"]
    kernel.short.now_s = lambda: real() + short_circuit.SLOW_S + 0.1
    kernel.short.run_once()
    kernel.short.now_s = real
    waiting = kernel.engine.requests.work[unique][0]
    assert waiting.cancel() and not waiting.cancel()
    assert (await kernel.receive())[:2] == (unique, -errno.EINTR)
    await kernel.expect_no_reply()
    assert kernel.vfs.chunks.counters["messages"] == sent and not kernel.engine.requests.work


@on_fast_path
async def test_failing_drive_is_read_through_its_store(kernel):
    number = await kernel.open()
    kernel.forget_pages()
    await kernel.read(number, 30 * BLOCK, BLOCK)
    directory = os.open("/", os.O_RDONLY)
    for other in kernel.short.sources.values():
        os.dup2(directory, other.fd)
        other.takes_direct = False
    for block in (8, 300, 600):
        assert await kernel.read(number, block * BLOCK, BLOCK) == CONTENT[block * BLOCK : (block + 1) * BLOCK]
    os.close(directory)


@on_fast_path
async def test_reply_that_the_kernel_does_not_take_is_an_error(kernel):
    number = await kernel.open()
    kernel.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * KIB)
    for _ in range(2):  # from memory, and from the drive
        unique = kernel.send_read(number, 200 * BLOCK, 128 * KIB)
        assert (await kernel.receive())[:2] == (unique, -errno.EIO)
        kernel.forget_pages()
    assert await kernel.read(number, 6 * BLOCK, 100) == CONTENT[6 * BLOCK :][:100]


@pytest.mark.compiled
def test_ending_mount_waits_for_direct_reads_into_its_memory(monkeypatch):
    monkeypatch.setattr(local_reads, "DRIVE_WAIT_S", 60.0)  # the drive of a busy machine may be slow

    async def work():
        async with Host() as host:
            kernel = Mounted(host)
            async with kernel:
                await kernel.init()
                number = await kernel.open()
                await pending_read(kernel, number, 8 * BLOCK)
                for block in range(50, 1000, 50):
                    kernel.send_read(number, block * BLOCK, BLOCK)
                kernel.engine.take_requests()
                plain = kernel.plain
                assert plain.inside
            assert not plain.inside and not plain.is_open

    run_whole(work(), 120)
