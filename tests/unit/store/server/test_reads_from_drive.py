"""Reads from frame to frame that need the drive: the reply comes later with the bytes of the slow path, and events in between
have the effect that they have on the slow path."""

import asyncio
import math
import os
import random

import pytest

from nvpool.blockio.reader import cached_pages
from nvpool.core.checksum import piece_checksums
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import Draining, DriveFailed, StaleEpoch, StaleTenure
from nvpool.rpc.api import Greeting
from nvpool.rpc.transport_registry import transport
from nvpool.rpc.transports.frame import read_head
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import DATA_READ
from tests.unit.client.data.test_short_circuit import evict
from tests.unit.store.server.test_reads import BLOCKS, HOLE, Ordinary, open_bench, pool_map

pytestmark = pytest.mark.compiled


class Later(Ordinary):
    """The replying end of a connection, like that of the listener."""

    def __init__(self, service):
        super().__init__(service)
        self.frames = self
        self.out, self.out_bytes = [], 0

    def flush(self):
        self.sent += self.out
        self.out, self.out_bytes = [], 0


class DriveWasQuicker(Exception):
    """A read without waiting makes the kernel ask the drive, and looks again: without a pause in between, the bytes may
    already be there. Then the test starts again."""


class Cold:
    """A store without any block of its chunk in memory."""

    def __init__(self, bench):
        self.bench, self.reads, self.store, self.service = (
            bench,
            bench.reads,
            bench.service.store,
            bench.service,
        )
        self.side = Later(bench.service)
        self.waited = 0
        """Number of slow-path replies that needed the drive."""
        self.answers = {
            block: bench.ordinary.ask(bench.frame(block)) for block in range(BLOCKS) if block != HOLE
        }
        bench.mapped.close()
        os.posix_fadvise(
            self.store.device.fd, 0, 0, os.POSIX_FADV_RANDOM
        )  # so that no read caches the blocks of the next one

    async def expected(self, *frames):
        """Replies of the slow path: from memory, unless the kernel has evicted pages again."""
        with open(self.store.device.path, "rb") as file:  # noqa: ASYNC230
            while file.read(1 << 20):
                pass
        return [await self._said(frame) for frame in frames]

    async def _said(self, frame):
        ordinary = self.bench.ordinary
        _, method, number, deadline_ms, message, _ = read_head(bytearray(frame), 0, len(frame), 0)
        ordinary.arrived(number, method, deadline_ms, message, b"")
        self.waited += not ordinary.sent
        async with asyncio.timeout(60):
            while not ordinary.sent:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return ordinary.sent.pop()

    def begin(self, *frames, side=None):
        """Reads them from the drive, which has not replied yet."""
        evict(self.store.device.path)
        waiting, out = self.reads.waiting, []
        side = side or self.side
        taken = self.reads.answer(
            bytearray(b"".join(frames)), sum(map(len, frames)), side.in_work, side.reply_stats, out, side
        )
        assert taken == sum(map(len, frames))
        if out:
            raise DriveWasQuicker
        assert self.reads.waiting == waiting + len(frames)

    async def come(self):
        async with asyncio.timeout(60):
            while self.reads.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        sent, self.side.sent = list(map(bytes, self.side.sent)), []
        assert not self.side.in_work and self.store.readings.oldest() == math.inf
        assert self.side.reply_stats.begun == self.side.reply_stats.ended + self.side.reply_stats.given_up
        return sent


def with_cold(test):
    def run(tmp_path):
        async def served(place):
            place.mkdir()
            async with open_bench(place) as bench:
                if bench.service.store.device.read_path != "io_uring":
                    pytest.skip("no io_uring here")
                await test(Cold(bench))

        for turn in range(50):
            try:
                asyncio.run(served(tmp_path / str(turn)))
                return
            except DriveWasQuicker:
                pass
        pytest.fail("the drive was always faster")

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def status(frame):
    return read_head(bytearray(frame), 0, len(frame), 1 << 20)[1]


@with_cold
async def test_uncached_read_gets_the_bytes_of_the_slow_path(cold):
    draw = random.Random(1)
    missed, asked = cold.store.reader.missed_count, 0
    for count in (1, 1, 3, 4, 5, 16, 100):
        frames = [
            cold.bench.frame(block, number=block + 1) for block in draw.sample(sorted(cold.answers), count)
        ]
        cold.begin(*frames)
        assert (
            cold.service.waiting
            and cold.service.waiting_count == count
            and cold.store.readings.oldest() < math.inf
        )
        assert sorted(await cold.come()) == sorted(await cold.expected(*frames))
        asked += count
    for first, count in ((0, 8), (56, 8), (5, 2)):
        frame = cold.bench.frame(first, count)
        cold.begin(frame)
        assert await cold.come() == await cold.expected(frame)
        asked += 1
    assert cold.store.reader.missed_count - missed == asked + cold.waited
    assert cold.side.reply_stats.by_method[DATA_READ].bytes_out == (asked + 15) * 4096
    assert not cold.service.waiting


def cached(cold):
    return cached_pages(cold.store.device.fd, 0, 1 << 40)


@with_cold
async def test_large_reads_bypass_the_page_cache_until_repeated(cold):
    if not cold.store.device.direct_reads.on:
        pytest.skip("no reads past the page cache here")
    places = ((0, 32), (32, 32), (64, 16), (80, 31), (3, 17), (7, 9))
    for flags in (1, 0):
        for first, count in places:
            frame = cold.bench.frame(first, count, number=first + 1, flags=flags)
            cold.begin(frame)
            assert cached(cold) < count or not flags or count < 16
            assert await cold.come() == await cold.expected(frame)
    evict(cold.store.device.path)
    frames = [cold.bench.frame(first, count, number=first + 1, flags=1) for first, count in places]
    for again in (False, True):
        cold.store.device.direct_reads.young.clear()
        cold.store.device.direct_reads.old.clear()
        cold.begin(*frames)
        sent = await cold.come()
        assert sorted(sent) == sorted(await cold.expected(*frames)), again
    cold.begin(frames[0])
    await cold.come()
    assert cached(cold) >= 32, "repeated reads of the same ranges are cached"


@with_cold
async def test_drive_without_direct_reads_is_read_through_the_cache(cold):
    direct = cold.store.device.direct_reads
    if not direct.on:
        pytest.skip("no reads past the page cache here")
    directory = os.open("/", os.O_RDONLY)
    os.dup2(directory, direct.direct_fd)
    os.close(directory)
    frame = cold.bench.frame(0, 32, flags=1)
    cold.begin(frame)
    async with asyncio.timeout(60):
        while not cold.side.sent:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await cold.come() == await cold.expected(frame) and not direct.on


@with_cold
async def test_queued_large_replies_keep_their_memory(cold):
    places = ((0, 32), (32, 32), (64, 16), (80, 31), (3, 17))
    frames = [
        cold.bench.frame(first, count, number=number + 1, flags=1)
        for number, (first, count) in enumerate(places)
    ]
    expected, direct = sorted(await cold.expected(*frames)), cold.store.device.direct_reads
    kept = []  # no consumer takes them
    for turn in range(20):
        direct.young.clear(), direct.old.clear()
        cold.begin(*frames)
        async with asyncio.timeout(60):
            while cold.reads.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        kept += cold.side.sent
        cold.side.sent = []
        assert sorted(map(bytes, kept)) == sorted(expected * (len(kept) // 5)), turn
        if turn == 16:
            kept.clear()
    assert len(kept) == 15
    await cold.expected()
    out, sent = [], bytearray(b"".join(frames[:2]))  # in memory now
    assert cold.reads.answer(sent, len(sent), {}, cold.side.reply_stats, out, cold.side) == len(sent)
    assert list(map(bytes, out)) == await cold.expected(*frames[:2])


@with_cold
async def test_read_without_a_deferred_reply_is_not_started(cold):
    evict(cold.store.device.path)
    taken, answered = cold.bench.fast_reply(cold.bench.frame(3))
    if answered:
        raise DriveWasQuicker
    assert not taken and not cold.reads.waiting


@with_cold
async def test_closed_connection_gets_no_reply_and_keeps_its_memory(cold):
    gone = Later(cold.service)
    cold.begin(*[cold.bench.frame(block, number=block + 1) for block in range(20)], side=gone)
    cold.begin(cold.bench.frame(30, number=1), cold.bench.frame(31, number=2))
    gone.client_gone()
    cold.side.cancel_request(2)
    assert await cold.come() == await cold.expected(cold.bench.frame(30, number=1))
    assert not gone.sent and gone.reply_stats.given_up == 20 and cold.side.reply_stats.given_up == 1


@with_cold
async def test_request_number_in_progress_is_refused(cold):
    cold.begin(cold.bench.frame(3, number=5))
    with pytest.raises(Exception, match="sent twice"):
        cold.side.ask(cold.bench.frame(4, number=5))
    frame = cold.bench.frame(4, number=5)
    assert (
        cold.reads.answer(
            bytearray(frame), len(frame), cold.side.in_work, cold.side.reply_stats, [], cold.side
        )
        == 0
    )
    assert len(await cold.come()) == 1


@with_cold
async def test_read_of_a_changed_chain_gives_no_bytes(cold):
    frame = cold.bench.frame(3)
    cold.begin(frame)
    cold.service.update_map(pool_map(6))
    assert [part[-4096:] for part in await cold.come()] == [cold.answers[3][-4096:]], (
        "its chain has not changed"
    )
    cold.begin(cold.bench.frame(3, epoch=6))
    cold.service.update_map(pool_map(7))
    cold.service.map_state.changed_at = dict.fromkeys(range(1024), 7)
    [sent] = await cold.come()
    assert status(sent) == StaleEpoch.wire_code


@with_cold
async def test_read_after_the_serving_lease_ended_gives_no_bytes(cold):
    cold.begin(cold.bench.frame(3))
    cold.service.serving_lease.shared, cold.service.serving_lease.until_s = (
        True,
        cold.bench.clock.boottime_s() - 1,
    )
    [sent] = await cold.come()
    assert status(sent) == StaleTenure.wire_code


@with_cold
async def test_usage_report_includes_reads_started_before(cold):
    cold.begin(cold.bench.frame(3))
    cold.service.use.report(pb.UseRequest(for_s=5))
    assert await cold.come() == [cold.answers[3]]
    assert cold.service.use.report(pb.UseRequest()).rows


@with_cold
async def test_failed_drive_is_reported_as_on_the_slow_path(cold):
    device, frame = cold.store.device, cold.bench.frame(20)
    kept = os.dup(device.fd)
    size = os.fstat(kept).st_size
    cold.begin(frame)
    await cold.come()
    os.ftruncate(kept, (cold.store.index.chunk(1, 0).segments[0].disk[20] << 12) + 100)
    os.close(kept)
    cold.begin(frame)
    async with asyncio.timeout(60):
        while not cold.side.sent:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert int.from_bytes(cold.side.sent[0][43:45], "little") == DriveFailed.wire_code, (
        "the error belongs to that read"
    )
    assert not await cold.come() or not cold.side.sent
    os.truncate(cold.store.device.path, size)


@with_cold
async def test_blocks_under_a_read_are_not_reallocated(cold):
    before = cold.store.kv.sequence
    cold.begin(cold.bench.frame(9))
    assert cold.store.readings.oldest() == before
    data = b"new!" * 1024
    cold.store.write_now(1, 0, 9 << 12, memoryview(data), piece_checksums(data, 0))
    assert await cold.come() == [cold.answers[9]], "as it was when the read was sent"


@with_cold
async def test_draining_store_completes_its_reads(cold):
    cold.begin(*[cold.bench.frame(block, number=block + 1) for block in range(50)])
    await cold.service.close(drain_s=60)
    sent = await cold.come()
    assert len(sent) == 50 and not any(map(status, sent))


@with_cold
async def test_closing_store_refuses_reads_and_waits_for_the_drive(cold):
    cold.begin(*[cold.bench.frame(block, number=block + 1) for block in range(50)])
    await cold.service.close()
    sent = await cold.come()
    assert len(sent) == 50 and {status(frame) for frame in sent} <= {Draining.wire_code, 0}
    assert not cold.reads.waiting


@with_cold
async def test_reap_without_reads_does_nothing(cold):
    cold.reads.reap()
    cold.begin(cold.bench.frame(3))
    assert len(await cold.come()) == 1
    cold.reads.close()
    cold.reads.reap()
    cold.reads.submit()


@with_cold
async def test_reads_beyond_the_ring_size_are_left(cold):
    frames = [
        cold.bench.frame(block, number=turn * BLOCKS + block + 1)
        for turn in range(3)
        for block in cold.answers
    ]
    evict(cold.store.device.path)
    sent = bytearray(b"".join(frames))
    out = []
    taken = cold.reads.answer(sent, len(sent), cold.side.in_work, cold.side.reply_stats, out, cold.side)
    assert cold.reads.waiting <= 512 and taken <= len(sent)
    await cold.come()


@with_cold
async def test_listener_uses_the_fast_path_and_drains(cold):
    asked = []

    def handle(call):
        asked.append(call)
        cold.service.handle(call)

    class Handling:
        __call__ = staticmethod(handle)
        fast_path = staticmethod(cold.reads.answer)

    stream, greeting = transport("stream"), Greeting("test", "f")
    listener = await stream.listen("stream://127.0.0.1:0", greeting, Handling())
    deadline_s = SYSTEM_CLOCK.boottime_s() + 60
    connection = await stream.connect(listener.endpoint, greeting, deadline_s=deadline_s)

    def ask(block, count=1):
        return connection.call(DATA_READ, cold.bench.frame(block, count)[32:], deadline_s=deadline_s)

    draw = random.Random(2)
    for count in (1, 2, 16, 60):
        evict(cold.store.device.path)
        blocks = draw.sample(sorted(cold.answers), count)
        replies = await asyncio.gather(*[ask(block) for block in blocks])
        for block, reply in zip(blocks, replies, strict=True):
            assert cold.answers[block].endswith(bytes(reply.message) + bytes(reply.payload))
    assert not asked and cold.store.reader.missed_count
    evict(cold.store.device.path)
    given_up = [asyncio.ensure_future(ask(block)) for block in range(30)]
    await asyncio.sleep(0)
    for task in given_up:
        task.cancel()
    assert bytes((await ask(50)).payload) == cold.answers[50][-4096:]
    evict(cold.store.device.path)
    last = [asyncio.ensure_future(ask(block)) for block in range(60, 100)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await listener.close(drain_s=30)
    for block, task in zip(range(60, 100), last, strict=True):
        assert task.exception() is not None or bytes(task.result().payload) == cold.answers[block][-4096:]
    await connection.close()
    assert not cold.reads.waiting
