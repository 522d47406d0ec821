"""Reads that a store begins where they arrive, since the drive has to be asked: answered when it has answered, with the bytes
of the ordinary way; and whatever happens meanwhile, as that way would have it."""

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
from nvpool.rpc.registry import transport
from nvpool.rpc.transports.frame import read_head
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import DATA_READ
from nvpool.store.server import fast_reads
from tests.unit.test_client_shortcut import evict
from tests.unit.test_store_atonce import BLOCKS, HOLE, Ordinary, open_bench, pool_map

pytestmark = pytest.mark.skipif(fast_reads._fast_reads is None, reason="_fast_reads is not compiled here")


class Later(Ordinary):
    """The answering end of a connection, as the listener's is."""

    def __init__(self, service):
        super().__init__(service)
        self._out, self._out_bytes = [], 0

    def _flush(self):
        self.sent += self._out
        self._out, self._out_bytes = [], 0


class DriveWasQuicker(Exception):
    """A read without waiting makes the kernel ask the drive, and looks once more: where nobody let us go on in between, the
    bytes are there. Then the test begins anew."""


class Cold:
    """A store that has nothing of its chunk in memory."""

    def __init__(self, bench):
        self.bench, self.reads, self.store, self.service = (
            bench,
            bench.reads,
            bench.service.store,
            bench.service,
        )
        self.side = Later(bench.service)
        self.waited = 0
        """Of the ordinary way's answers, for the drive."""
        self.answers = {
            block: bench.ordinary.ask(bench.frame(block)) for block in range(BLOCKS) if block != HOLE
        }
        bench.mapped.close()
        os.posix_fadvise(
            self.store.device.fd, 0, 0, os.POSIX_FADV_RANDOM
        )  # so that no read brings what the next is for

    async def expected(self, *frames):
        """What the ordinary way answers: from memory, unless the kernel has taken something away again."""
        with open(self.store.device.path, "rb") as file:  # noqa: ASYNC230
            while file.read(1 << 20):
                pass
        return [await self._said(frame) for frame in frames]

    async def _said(self, frame):
        ordinary = self.bench.ordinary
        _, method, number, deadline_ms, message, _ = read_head(bytearray(frame), 0, len(frame), 0)
        ordinary._arrived(number, method, deadline_ms, message, b"")
        self.waited += not ordinary.sent
        async with asyncio.timeout(60):
            while not ordinary.sent:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return ordinary.sent.pop()

    def begin(self, *frames, side=None):
        """They are read from the drive; it has not answered."""
        evict(self.store.device.path)
        waiting, out = self.reads.waiting, []
        side = side or self.side
        taken = self.reads.answer(
            bytearray(b"".join(frames)), sum(map(len, frames)), side._in_work, side._tally, out, side
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
        assert not self.side._in_work and self.store.readings.oldest() == math.inf
        assert self.side._tally.begun == self.side._tally.ended + self.side._tally.given_up
        return sent


def with_cold(test):
    def run(tmp_path):
        async def served(place):
            place.mkdir()
            async with open_bench(fast_reads.Reads, place) as bench:
                if bench.service.store.device.read_path != "io_uring":
                    pytest.skip("no io_uring here")
                await test(Cold(bench))

        for turn in range(50):
            try:
                asyncio.run(served(tmp_path / str(turn)))
                return
            except DriveWasQuicker:
                pass
        pytest.fail("the drive was always quicker")

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def status(frame):
    return read_head(bytearray(frame), 0, len(frame), 1 << 20)[1]


@with_cold
async def test_what_is_not_in_memory_comes_from_the_drive_with_the_bytes_of_the_ordinary_way(cold):
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
    assert cold.side._tally.by_method[DATA_READ].bytes_out == (asked + 15) * 4096
    assert not cold.service.waiting


def cached(cold):
    return cached_pages(cold.store.device.fd, 0, 1 << 40)


@with_cold
async def test_larger_reads_of_who_keeps_them_go_past_the_page_cache_until_they_are_repeated(cold):
    if not cold.store.device.direct_reads._on:
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
        cold.store.device.direct_reads._new.clear()
        cold.store.device.direct_reads._old.clear()
        cold.begin(*frames)
        sent = await cold.come()
        assert sorted(sent) == sorted(await cold.expected(*frames)), again
    cold.begin(frames[0])
    await cold.come()
    assert cached(cold) >= 32, "what is read again in the same pieces is worth keeping"


@with_cold
async def test_a_drive_that_takes_no_reads_past_the_cache_is_read_as_always(cold):
    direct = cold.store.device.direct_reads
    if not direct._on:
        pytest.skip("no reads past the page cache here")
    directory = os.open("/", os.O_RDONLY)
    os.dup2(directory, direct._direct)
    os.close(directory)
    frame = cold.bench.frame(0, 32, flags=1)
    cold.begin(frame)
    async with asyncio.timeout(60):
        while not cold.side.sent:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await cold.come() == await cold.expected(frame) and not direct._on


@with_cold
async def test_large_answers_that_wait_for_their_socket_keep_their_memory_however_many_they_are(cold):
    places = ((0, 32), (32, 32), (64, 16), (80, 31), (3, 17))
    frames = [
        cold.bench.frame(first, count, number=number + 1, flags=1)
        for number, (first, count) in enumerate(places)
    ]
    expected, direct = sorted(await cold.expected(*frames)), cold.store.device.direct_reads
    kept = []  # for nobody takes them
    for turn in range(20):
        direct._new.clear(), direct._old.clear()
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
    assert cold.reads.answer(sent, len(sent), {}, cold.side._tally, out, cold.side) == len(sent)
    assert list(map(bytes, out)) == await cold.expected(*frames[:2])


@with_cold
async def test_without_an_end_to_answer_later_nothing_is_begun(cold):
    evict(cold.store.device.path)
    taken, told = cold.bench.at_once(cold.bench.frame(3))
    if told:
        raise DriveWasQuicker
    assert not taken and not cold.reads.waiting


@with_cold
async def test_who_has_gone_meanwhile_is_told_nothing_and_no_memory_of_his_is_used_again(cold):
    gone = Later(cold.service)
    cold.begin(*[cold.bench.frame(block, number=block + 1) for block in range(20)], side=gone)
    cold.begin(cold.bench.frame(30, number=1), cold.bench.frame(31, number=2))
    gone._asker_gone()
    cold.side._cancelled(2)
    assert await cold.come() == await cold.expected(cold.bench.frame(30, number=1))
    assert not gone.sent and gone._tally.given_up == 20 and cold.side._tally.given_up == 1


@with_cold
async def test_a_number_that_is_in_work_is_refused_as_always(cold):
    cold.begin(cold.bench.frame(3, number=5))
    with pytest.raises(Exception, match="sent twice"):
        cold.side.ask(cold.bench.frame(4, number=5))
    frame = cold.bench.frame(4, number=5)
    assert (
        cold.reads.answer(bytearray(frame), len(frame), cold.side._in_work, cold.side._tally, [], cold.side)
        == 0
    )
    assert len(await cold.come()) == 1


@with_cold
async def test_a_chain_that_has_gone_on_without_this_target_meanwhile_gives_no_bytes(cold):
    frame = cold.bench.frame(3)
    cold.begin(frame)
    cold.service.update_map(pool_map(6))
    assert [part[-4096:] for part in await cold.come()] == [cold.answers[3][-4096:]], (
        "nothing of its chain has changed"
    )
    cold.begin(cold.bench.frame(3, epoch=6))
    cold.service.update_map(pool_map(7))
    cold.service._changed_at = dict.fromkeys(range(1024), 7)
    [sent] = await cold.come()
    assert status(sent) == StaleEpoch.wire_code


@with_cold
async def test_a_target_whose_time_is_over_meanwhile_gives_no_bytes(cold):
    cold.begin(cold.bench.frame(3))
    cold.service.tenure.shared, cold.service.tenure.until_s = True, cold.bench.clock.boottime_s() - 1
    [sent] = await cold.come()
    assert status(sent) == StaleTenure.wire_code


@with_cold
async def test_who_watches_sees_also_what_was_begun_before(cold):
    cold.begin(cold.bench.frame(3))
    cold.service.use.tell(pb.UseRequest(for_s=5))
    assert await cold.come() == [cold.answers[3]]
    assert cold.service.use._rows


@with_cold
async def test_a_drive_that_fails_is_an_error_as_always(cold):
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
    assert int.from_bytes(cold.side.sent[0][43:45], "little") == DriveFailed.wire_code, "of that read"
    assert not await cold.come() or not cold.side.sent
    os.truncate(cold.store.device.path, size)


@with_cold
async def test_what_is_read_is_given_to_no_write_meanwhile(cold):
    before = cold.store.kv.sequence
    cold.begin(cold.bench.frame(9))
    assert cold.store.readings.oldest() == before
    data = b"new!" * 1024
    cold.store.write_now(1, 0, 9 << 12, memoryview(data), piece_checksums(data, 0))
    assert await cold.come() == [cold.answers[9]], "as it was when it was asked for"


@with_cold
async def test_a_store_that_ends_answers_what_the_drive_brings_in_time(cold):
    cold.begin(*[cold.bench.frame(block, number=block + 1) for block in range(50)])
    await cold.service.close(drain_s=60)
    sent = await cold.come()
    assert len(sent) == 50 and not any(map(status, sent))


@with_cold
async def test_a_store_that_ends_at_once_refuses_what_it_has_begun_and_waits_for_the_drive(cold):
    cold.begin(*[cold.bench.frame(block, number=block + 1) for block in range(50)])
    await cold.service.close()
    sent = await cold.come()
    assert len(sent) == 50 and {status(frame) for frame in sent} <= {Draining.wire_code, 0}
    assert not cold.reads.waiting


@with_cold
async def test_where_nothing_was_ever_begun_and_when_all_is_over_nothing_comes(cold):
    cold.reads.reap()
    cold.begin(cold.bench.frame(3))
    assert len(await cold.come()) == 1
    cold.reads.close()
    cold.reads.reap()
    cold.reads.submit()


@with_cold
async def test_what_the_ring_has_no_room_for_is_left(cold):
    frames = [
        cold.bench.frame(block, number=turn * BLOCKS + block + 1)
        for turn in range(3)
        for block in cold.answers
    ]
    evict(cold.store.device.path)
    sent = bytearray(b"".join(frames))
    out = []
    taken = cold.reads.answer(sent, len(sent), cold.side._in_work, cold.side._tally, out, cold.side)
    assert cold.reads.waiting <= 512 and taken <= len(sent)
    await cold.come()


@with_cold
async def test_a_listener_answers_by_it_and_drains(cold):
    asked = []

    def handle(call):
        asked.append(call)
        cold.service.handle(call)

    class Handling:
        __call__ = staticmethod(handle)
        at_once = staticmethod(cold.reads.answer)

    door, greeting = transport("stream"), Greeting("test", "f")
    listener = await door.listen("stream://127.0.0.1:0", greeting, Handling())
    deadline_s = SYSTEM_CLOCK.boottime_s() + 60
    connection = await door.connect(listener.endpoint, greeting, deadline_s=deadline_s)

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
