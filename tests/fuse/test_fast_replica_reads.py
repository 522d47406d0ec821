"""Fast reads of a mount in a pool with two replicas: the choice of the replica, silent targets, errors."""

import asyncio
import gc
import os
import random

import pytest

from nvpool.client.data.hedged_reads import LATE_S, SentRead
from nvpool.core import errors
from nvpool.core.units import KIB, MIB
from nvpool.fuse.protocol.constants import Op
from tests.fuse import test_fast_remote_reads as remote
from tests.fuse import test_fast_small_reads as small
from tests.fuse.read_kernel import CONTENT, TYPED_WAYS, path_decorators, places, until
from tests.unit.client.data.test_short_circuit import BLOCK, ME, some

on_large_files, on_large_files_both_ways, on_large_files_compiled = path_decorators(
    lambda way: remote.mounted(way, remote.FAR, 2), TYPED_WAYS
)
on_small_files, on_small_files_both_ways, _ = path_decorators(lambda way: small.mounted(way, remote.FAR, 2))


class SilentTarget:
    """A target that keeps the reads that it gets unanswered until `answer`."""

    def __init__(self, kernel, target):
        self._proxy = kernel.host.proxies[target]
        self.calls = []
        self._proxy.instead = self.calls.append

    def answer(self):
        self._proxy.instead = None
        calls, self.calls = self.calls, []
        for call in calls:
            self._proxy.service.handle(call)


def hedged(kernel):
    return kernel.vfs.chunks.hedging.counters["hedged"]


async def replies_have_come(kernel):
    await until(lambda: not any(lane.in_flight for lane in kernel.vfs.chunks.lanes.values()))


def lane_of(kernel, number, index=0):
    file = kernel.handle(number).file
    return file.lanes.get(index) or kernel.vfs.chunks.find_lane(file, index)


@on_large_files_both_ways
async def test_reads_of_both_replicas_are_right(kernel):
    number = await kernel.open()
    for seed in range(4):
        if seed % 2 == 0:
            kernel.forget_pages()
        await kernel.check_reads(
            {
                kernel.send_read(number, offset, length): (offset, length)
                for offset, length in places(60, seed)
            }
        )
    assert {lane.target for lane in kernel.handle(number).file.lanes.values()} == {1, 2}
    before = kernel.far.read_bytes if kernel.far is not None else 0
    for block in range(3, 1200, 50):
        assert await kernel.read(number, block * BLOCK, BLOCK) == CONTENT[block * BLOCK :][:BLOCK]
    if kernel.far is not None:
        assert kernel.far.read_bytes == before + 24 * BLOCK
    assert not kernel.vfs.chunks.hedging.sent


@on_large_files_both_ways
async def test_silent_replica_delays_no_read(kernel):
    number = await kernel.open()
    silent = SilentTarget(kernel, lane_of(kernel, number).target)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for block in range(3, 40, 4):
        assert await kernel.read(number, block * BLOCK + 5, 1000) == CONTENT[block * BLOCK + 5 :][:1000]
    assert loop.time() - began_s < LATE_S + 4 and hedged(kernel)  # ten reads; one of them may be late
    silent.answer()
    await replies_have_come(kernel)
    assert not kernel.vfs.chunks.hedging.sent
    await kernel.expect_no_reply()


@on_large_files_both_ways
async def test_target_that_stays_silent_is_avoided(kernel):
    number = await kernel.open()
    silent = SilentTarget(kernel, lane_of(kernel, number).target)
    assert await kernel.read(number, 3 * BLOCK, BLOCK) == CONTENT[3 * BLOCK : 4 * BLOCK]
    await until(lambda: kernel.vfs.chunks.hedging.counters["late"])
    sent = len(silent.calls)
    asked = {
        kernel.send_read(number, block * BLOCK, BLOCK): (block * BLOCK, BLOCK) for block in range(5, 100, 9)
    }
    await kernel.check_reads(asked)
    assert len(silent.calls) == sent
    silent.answer()
    await replies_have_come(kernel)


@pytest.mark.parametrize("winner", [1, 2])
@pytest.mark.parametrize("way", TYPED_WAYS)
def test_first_reply_counts_and_the_second_is_dropped(way, winner):
    @on_large_files
    async def race(kernel):
        number = await kernel.open()
        silent = {target: SilentTarget(kernel, target) for target in (1, 2)}
        unique = kernel.send_read(number, 3 * BLOCK, BLOCK)
        kernel.engine.take_requests()
        await until(lambda: all(target.calls for target in silent.values()))
        silent[winner].answer()
        assert await kernel.receive() == (unique, 0, CONTENT[3 * BLOCK : 4 * BLOCK])
        silent[3 - winner].answer()
        await replies_have_come(kernel)
        await kernel.expect_no_reply()

    race(way)


@on_large_files_both_ways
async def test_interrupted_read_is_not_sent_again(kernel):
    number = await kernel.open()
    silent = SilentTarget(kernel, lane_of(kernel, number).target)
    gone = 1 << 22  # there is no such process
    late = [kernel.send_read(number, block * BLOCK, BLOCK, pid=gone) for block in range(8, 100, 7)]
    kernel.engine.take_requests()
    for unique in late:
        kernel.send(Op.INTERRUPT, (unique,))
    kernel.engine.take_requests()
    for _ in late:
        heard, error, _ = await kernel.receive()
        assert heard in late and error
    await until(lambda: kernel.vfs.chunks.hedging.counters["late"])
    silent.answer()
    await replies_have_come(kernel)
    assert await kernel.read(number, 6 * BLOCK, BLOCK) == CONTENT[6 * BLOCK : 7 * BLOCK]
    await kernel.expect_no_reply()


async def interrupt_when_hedged(kernel, number, length):
    """Interrupt a read that both replicas leave unanswered; both replies arrive afterwards."""
    silent = SilentTarget(kernel, 1), SilentTarget(kernel, 2)
    unique = kernel.send_read(number, 0, length, pid=1 << 22)  # there is no such process
    kernel.engine.take_requests()
    await until(lambda: all(target.calls for target in silent))
    kernel.send(Op.INTERRUPT, (unique,))
    kernel.engine.take_requests()
    answered, error, _ = await kernel.receive()
    assert answered == unique and error
    for target in silent:
        target.answer()
    await replies_have_come(kernel)
    assert not kernel.vfs.chunks.hedging.sent
    await kernel.expect_no_reply()


@on_large_files_both_ways
async def test_hedged_read_can_be_interrupted(kernel):
    number = await kernel.open()
    await interrupt_when_hedged(kernel, number, BLOCK)
    assert await kernel.read(number, 0, BLOCK) == CONTENT[:BLOCK]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "error", [errors.Busy, errors.StaleTenure, errors.ChecksumMismatch, errors.Unavailable]
)
@pytest.mark.parametrize("way", TYPED_WAYS[::-1])
def test_refused_read_goes_to_the_other_replica(way, error):
    @on_large_files
    async def refused(kernel):
        number = await kernel.open()
        first = lane_of(kernel, number).target
        proxy, asked = kernel.host.proxies[first], []

        def instead(call):
            asked.append(call)
            call.fail(error())

        proxy.instead = instead
        assert await kernel.read(number, 3 * BLOCK, BLOCK) == CONTENT[3 * BLOCK : 4 * BLOCK]
        assert len(asked) == 1
        proxy.instead = None

    refused(way)


@on_large_files_both_ways
async def test_flipped_byte_is_read_from_the_other_replica(kernel):
    number = await kernel.open()
    file = kernel.handle(number).file
    store = kernel.host.pool.stores[lane_of(kernel, number).target].store
    place = store.index.chunk(file.inode, 0).segments[0].disk[5]
    fd = os.open(store.device.path, os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, place * BLOCK + 9)[0] ^ 1]), place * BLOCK + 9)
    os.close(fd)
    assert await kernel.read(number, 5 * BLOCK, BLOCK) == CONTENT[5 * BLOCK : 6 * BLOCK]
    assert kernel.vfs.chunks.counters["mismatches"] == 1


@on_large_files_both_ways
async def test_reads_survive_lost_connections(kernel):
    number = await kernel.open()
    first, second = SilentTarget(kernel, 1), SilentTarget(kernel, 2)
    asked = {
        kernel.send_read(number, block * BLOCK, BLOCK): (block * BLOCK, BLOCK) for block in range(3, 1200, 40)
    }
    kernel.engine.take_requests()
    await until(lambda: first.calls)
    for target in (first, second):
        target.calls.clear()
        target.answer()
    for connection in kernel.connections():
        connection.frames.transport.abort()
    await kernel.check_reads(asked)


@on_large_files_both_ways
async def test_writes_are_seen_by_the_next_read_of_a_replica(kernel):
    content = bytearray(CONTENT)
    number = await kernel.open()
    other = await kernel.host.writer()
    theirs = await other.open(kernel.handle(number).inode, os.O_RDWR, ME)
    chance = random.Random(3)
    for _ in range(30):
        offset, new = chance.randrange(4 * MIB), chance.randbytes(chance.choice([10, BLOCK, 9000]))
        await other.write(theirs, offset, new)
        await other.flush(theirs)
        content[offset : offset + len(new)] = new
        for _ in range(3):
            at = max(0, offset + chance.randrange(-5000, 5000))
            assert await kernel.read(number, at, 4000) == content[at : at + 4000]
    await other.release(theirs)


# -- whole small files -------------------------------------------------------------------------------------------------


async def small_files(kernel, count=40):
    contents = [some(size, seed) for seed, size in zip(range(count), small.SIZES * count, strict=False)]
    inodes = await kernel.make(contents)
    return [(await kernel.open(inode), content) for inode, content in zip(inodes, contents, strict=True)]


async def check_files(kernel, files):
    asked = {kernel.send_read(number, 0, 128 * KIB): content for number, content in files}
    for unique, (error, answer) in (await kernel.answers(asked)).items():
        assert not error and answer == asked[unique]


@on_small_files_both_ways
async def test_small_files_of_both_replicas_are_right(kernel):
    files = await small_files(kernel)
    began = kernel.began
    await check_files(kernel, files)
    assert {lane_of(kernel, number).target for number, _ in files} == {1, 2}
    assert kernel.began - began == (len(files) if kernel.engine.fast_paths.small_files.compiled else 0)
    assert kernel.vfs.reader.contents.counters["small_reads"] >= len(files)
    assert not kernel.vfs.chunks.hedging.sent


@on_small_files_both_ways
async def test_silent_replica_delays_no_small_file(kernel):
    files = await small_files(kernel)
    silent = SilentTarget(kernel, 1)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await check_files(kernel, files[:3])
    await check_files(kernel, files[3:])
    assert loop.time() - began_s < 2 * LATE_S + 4 and hedged(kernel)
    for number, content in files:  # cached once, by the reply that came first
        assert kernel.vfs.reader.contents.kept[kernel.handle(number).file.inode][1] == content
    silent.answer()
    await replies_have_come(kernel)
    assert not kernel.vfs.chunks.hedging.sent
    await kernel.expect_no_reply()


@on_small_files_both_ways
async def test_small_file_changed_while_a_replica_is_silent(kernel):
    (number, content), *_ = await small_files(kernel, 1)
    first, second = SilentTarget(kernel, 1), SilentTarget(kernel, 2)
    unique = kernel.send_read(number, 0, 128 * KIB)
    kernel.engine.take_requests()
    await until(lambda: first.calls and second.calls)
    kernel.vfs.reader.changed(kernel.handle(number).file)
    first.answer()
    second.answer()
    assert await kernel.receive() == (unique, 0, content)
    assert not kernel.vfs.reader.has_content(kernel.handle(number).file)
    await replies_have_come(kernel)


@on_small_files_both_ways
async def test_refused_small_files_go_to_the_other_replica(kernel):
    files = await small_files(kernel)
    kernel.host.proxies[1].instead = lambda call: call.fail(errors.StaleTenure())
    await check_files(kernel, files)
    kernel.host.proxies[1].instead = None


@on_small_files_both_ways
async def test_hedged_small_file_can_be_interrupted(kernel):
    (number, content), other = await small_files(kernel, 2)
    await check_files(kernel, [other])  # connects
    await interrupt_when_hedged(kernel, number, 128 * KIB)
    await check_files(kernel, [(number, content)])


@on_large_files_compiled
async def test_ended_reads_are_not_kept(kernel):
    def messages():  # without the spares, which have no lane
        gc.collect()
        return [one for one in gc.get_objects() if isinstance(one, SentRead) and one.lane]

    number = await kernel.open()
    silent = SilentTarget(kernel, lane_of(kernel, number).target)
    for block in range(3, 30, 4):
        assert await kernel.read(number, block * BLOCK, BLOCK) == CONTENT[block * BLOCK :][:BLOCK]
    assert hedged(kernel) and messages()
    silent.answer()
    await replies_have_come(kernel)
    assert not messages()
