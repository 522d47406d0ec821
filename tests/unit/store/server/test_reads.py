"""Reads of a store from frame to frame: same bytes and counts as the service, or left to the service."""

import asyncio
import inspect
import os
import random
from contextlib import asynccontextmanager
from mmap import MAP_POPULATE, MAP_SHARED, PROT_READ, mmap

import pytest

from nvpool.core import grants
from nvpool.core.checksum import block_checksums, crc32c, piece_checksums
from nvpool.core.clock import SYSTEM_CLOCK, ManualClock
from nvpool.poolmap.chains.placement import build_table
from nvpool.poolmap.grant_revocation import taken
from nvpool.poolmap.model import MAP_FORMAT, Drive, Node, PoolMap, PoolSettings, Target
from nvpool.rpc.api import Greeting
from nvpool.rpc.messages.read_write_codec import encode_read_request
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX, ServerConnection
from nvpool.rpc.peer_roles import Peer
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.transport_registry import transport
from nvpool.rpc.transports.frame import EMPTY, REPLY, REQUEST, pack_head, read_head
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import DATA_READ, DATA_WRITE
from nvpool.store.chunks import block_store
from nvpool.store.chunks.api import StoreOptions, create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.chunks.memory_store import MemoryChunkStore
from nvpool.store.chunks.read_batch import READ
from nvpool.store.disk.device import FileDevice
from nvpool.store.server import reads as reads_module
from nvpool.store.server.io_stats import IoStats
from nvpool.store.server.service import StoreService
from nvpool.store.server.serving_lease import ServingLease

SECRET = b"k" * 32
BLOCKS = 200
"""Written blocks of the chunk: three whole segments and a part of one."""
HOLE = 150


class DeviceAlone(FileDevice):
    """A device that is read by its methods alone, like a simulated drive."""


DEVICES = {"descriptor": FileDevice, "device": DeviceAlone}


class Ordinary(ServerConnection):
    """Replies of the service on the slow path."""

    def __init__(self, service):
        super().__init__(service.handle, Peer("test", "", True), service.clock)
        self.reply_stats = ReplyStats()
        self.sent = []

    def _send_answer(self, number, status, message, payload, payload_bytes):
        self.sent.append(pack_head(REPLY, status, number, 0, message, payload_bytes) + b"".join(payload))

    def ask(self, frame):
        kind, method, number, deadline_ms, message, _ = read_head(bytearray(frame), 0, len(frame), 0)
        assert kind == REQUEST
        self.arrived(number, method, deadline_ms, message, EMPTY)
        return self.sent.pop()


class Bench:
    def __init__(self, store, clock):
        self.clock = clock
        self.service = StoreService(store, target=1, grant_secret=SECRET, clock=clock)
        self.reads = self.service.fast_path
        self.reads.writes = None
        self.service.update_map(pool_map(5))
        self.counters = ReplyStats()
        self.grant = self.signed()
        self.ordinary = Ordinary(self.service)

    def signed(self, rights=grants.READ, inode=1, life_s=60.0):
        ends_ms = self.clock.wall_ns() // 1_000_000 + int(life_s * 1000)
        return grants.sign(grants.Grant(rights, 0, 9, inode, 0, ends_ms), SECRET)

    def frame(
        self,
        block=0,
        count=1,
        *,
        inode=1,
        index=0,
        number=7,
        epoch=5,
        target=1,
        grant=None,
        offset=None,
        length=None,
        place=0,
        flags=0,
        deadline_ms=1000,
        method=DATA_READ,
        verify=False,
    ):
        read = READ.pack(
            inode,
            index,
            block << 12 if offset is None else offset,
            count << 12 if length is None else length,
            place,
            flags,
        )
        message = encode_read_request(epoch, target, [grant or self.grant], read, verify)
        return pack_head(REQUEST, method, number, deadline_ms, message, 0)

    def fast_reply(self, frame, in_work=None):
        """Reply on the fast path: the frames, and how many bytes of `frame` they took."""
        out = []
        taken = self.reads.answer(bytearray(frame), len(frame), in_work or {}, self.counters, out)
        return taken, out

    def same(self, frame):
        """Whether the fast path answers it; then with the bytes of the slow path."""
        taken, out = self.fast_reply(frame)
        if not taken:
            assert not out
            return False
        assert taken == len(frame)
        assert out == [self.ordinary.ask(frame)]
        return True


def pool_map(epoch):
    node = Node(1, "here", "h", ("inproc://n",))
    drives, targets = (Drive(1, 1, "/d1", 1 << 40),), (Target(1, 1, 1, 1 << 40, ("inproc://t",)),)
    return PoolMap(
        MAP_FORMAT, "p", "pool", epoch, PoolSettings(), (node,), drives, targets, (build_table(targets, 1),)
    )


@asynccontextmanager
async def open_bench(path, device=FileDevice):
    """A store in a directory with a chunk of some segments with a hole, all in the page cache."""
    create_chunk_store(path / "t", 1, "pool", 64 << 20)
    clock = ManualClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_store, "FileDevice", device)
        store = await open_chunk_store(path / "t", 1, clock=clock)
    one = Bench(store, clock)
    draw = random.Random(1)
    for first, count in ((0, HOLE), (HOLE + 1, BLOCKS - HOLE - 1)):
        data = draw.randbytes(count << 12)
        store.write_now(1, 0, first << 12, memoryview(data), piece_checksums(data, first << 12))
    await store.flush()
    # Mapped pages stay in the page cache, even if another process empties the cache meanwhile.
    one.mapped = mmap(store.device.fd, 0, prot=PROT_READ, flags=MAP_SHARED | MAP_POPULATE)
    for at in range(0, BLOCKS, 8):  # fills the index and the verified tokens
        one.ordinary.ask(one.frame(at, 8))
    try:
        yield one
    finally:
        one.mapped.close()
        await one.service.close()


def with_bench(test):
    """Run it with a file descriptor and with the methods of the device alone."""

    @pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
    def run(device, tmp_path, **more):
        async def served():
            async with open_bench(tmp_path, device) as bench:
                await test(bench, **more)

        asyncio.run(served())

    more = [name for name in inspect.signature(test).parameters if name != "bench"]
    run.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("device", "tmp_path", *more)
        ]
    )
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@with_bench
async def test_cached_whole_blocks_get_the_bytes_of_the_slow_path(
    bench,
):
    for block in (0, 1, 63, 64, 100, HOLE - 1, HOLE + 1, BLOCKS - 1):
        assert bench.same(bench.frame(block)), block
    for block, count in ((0, 2), (5, 7), (56, 8), (64, 8)):
        assert bench.same(bench.frame(block, count)), (block, count)
    assert bench.same(bench.frame(3, number=2**32 - 1, deadline_ms=2**32 - 1, flags=1))


@with_bench
async def test_large_read_needs_a_connection_that_replies_later(bench):
    side = bench.ordinary
    for first, count, answers in (
        (0, 9, True),
        (16, 32, True),
        (64, 32, True),
        (0, 33, False),
        (40, 32, False),
    ):
        frame, out = bench.frame(first, count), []
        assert bench.fast_reply(frame) == (0, [])
        taken = bench.reads.answer(bytearray(frame), len(frame), {}, bench.counters, out, side)
        assert taken == (len(frame) if answers else 0), (first, count)
        assert list(map(bytes, out)) == ([bench.ordinary.ask(frame)] if answers else [])
    assert not side.in_work and not bench.reads.waiting


@with_bench
async def test_frames_beyond_the_received_bytes_are_refused(bench):
    frame = bytearray(bench.frame())
    with pytest.raises(ValueError):
        bench.reads.answer(frame, len(frame) + 1, {}, bench.counters, [])


@with_bench
async def test_read_with_a_grant_of_a_service_is_left_to_the_slow_path(bench):
    for rights, inode in ((grants.SERVICE, 0), (grants.SERVICE | grants.READ, 1)):
        frame = bench.frame(0, grant=bench.signed(rights, inode=inode))
        bench.ordinary.ask(frame)
        assert not bench.same(frame)


@with_bench
async def test_reply_is_the_golden_frame(bench):
    """Head and message byte by byte, as docs/internals/formats define them; the checksums come from the library."""
    taken, [reply] = bench.fast_reply(bench.frame(1, number=0x01020304))
    version = bench.service.store.held(1, 0).version
    block = reply[-4096:]
    message = (
        b"\x09"
        + (5).to_bytes(8, "little")
        + b"\x12\x10\0\0\1\0"
        + (4096).to_bytes(4, "little")
        + version.to_bytes(8, "little")
        + b"\x1a\x04"
        + block_checksums(block)
    )
    head = (
        b"NP\3\0\0\0\0\0\4\3\2\1\0\0\0\0"
        + len(message).to_bytes(4, "little")
        + (4096).to_bytes(4, "little")
        + crc32c(message).to_bytes(4, "little")
    )
    assert reply == head + crc32c(head).to_bytes(4, "little") + message + block
    assert taken == reads_module.FRAME_BYTES == len(bench.frame(1))


@with_bench
async def test_random_read_is_answered_as_by_the_slow_path_or_left(bench):
    draw = random.Random(7)
    answered = 0
    for number in range(1, 3000):
        count = draw.choice((1, 1, 2, 3, 8, 9, 64))
        answered += bench.same(
            bench.frame(draw.randrange(BLOCKS + 80), count, number=number, flags=draw.randrange(2))
        )
    assert 1000 < answered < 2900


LEFT = {
    "of another inode than the grant's": {"inode": 2},
    "of a chunk that is not there": {"index": 1},
    "a hole": {"block": HOLE},
    "with a hole in it": {"block": HOLE - 1, "count": 2},
    "behind the end": {"block": BLOCKS},
    "across the end": {"block": BLOCKS - 1, "count": 2},
    "across a segment": {"block": 63, "count": 2},
    "too long": {"count": 9},
    "nothing": {"length": 0},
    "in the middle of a block": {"offset": 4097},
    "a part of a block": {"length": 100},
    "behind every chunk": {"offset": 0xFFFFF000},
    "of an older map": {"epoch": 4},
    "of a newer map": {"epoch": 6},
    "of no map": {"epoch": 0},
    "for another target": {"target": 2},
    "by a grant that is not there": {"place": 1},
    "late": {"deadline_ms": 0},
    "no read": {"method": DATA_WRITE},
    "to be checked": {"verify": True},
}


@pytest.mark.parametrize("why", LEFT)
@with_bench
async def test_special_read_is_left_to_the_slow_path(bench, why):
    assert bench.same(bench.frame())
    assert not bench.same(bench.frame(**LEFT[why]))


@with_bench
async def test_access_token_is_checked_as_by_the_slow_path(bench):
    unverified, writer, short = bench.signed(life_s=70), bench.signed(grants.WRITE), bench.signed(life_s=1)
    assert not bench.same(bench.frame(grant=unverified)), "this token is not verified yet"
    for grant in (unverified, writer, short):
        bench.ordinary.ask(bench.frame(grant=grant))
    assert bench.same(bench.frame(grant=unverified)) and bench.same(bench.frame(grant=short))
    assert not bench.same(bench.frame(grant=writer))
    assert not bench.same(bench.frame(grant=unverified[:-1] + b"x"))
    bench.clock.advance(6.0)
    assert bench.same(bench.frame(grant=short)), "clocks may differ by this much"
    bench.clock.advance(0.01)
    assert not bench.same(bench.frame(grant=short)) and bench.same(bench.frame(grant=unverified))
    endless = grants.sign(grants.Grant(grants.READ, 0, 9, 1, 0, 2**64 - 1), SECRET)
    bench.ordinary.ask(bench.frame(grant=endless))
    assert bench.same(bench.frame(grant=endless))


@with_bench
async def test_token_of_a_revoked_right_is_left(bench):
    def of(volume):
        ends_ms = bench.clock.wall_ns() // 1_000_000 + 60_000
        return grants.sign(
            grants.Grant(grants.READ, 0, 9, 1, 0, ends_ms, 1, 5, grants.volume_tag(volume)), SECRET
        )

    revoked, other = bench.frame(grant=of(77)), bench.frame(grant=of(78))
    for frame in (revoked, other):
        assert not bench.same(frame)  # not verified yet
        bench.ordinary.ask(frame)
        assert bench.same(frame)
    bench.service.update_map(
        taken(pool_map(5), 77, "", grants.READ, bench.clock.wall_ns() // 1_000_000, 60_000)
    )
    revoked, other = bench.frame(grant=of(77), epoch=6), bench.frame(grant=of(78), epoch=6)
    for frame in (revoked, other):
        assert not bench.same(frame)
        bench.ordinary.ask(frame)
    assert not bench.same(revoked) and bench.same(other)


@with_bench
async def test_fast_path_needs_a_healthy_store_and_service(bench):
    service, store = bench.service, bench.service.store
    frame = bench.frame()

    def left():
        assert bench.fast_reply(frame) == (0, [])

    assert bench.same(frame)
    service.replica.pending[1, 0] = object()
    left()
    del service.replica.pending[1, 0]
    store.quarantine.chunks.add((1, 0))
    left()
    store.quarantine.chunks.clear()
    service.serving_lease.vouched = False
    left()
    service.serving_lease.vouched, service.serving_lease.shared, service.serving_lease.until_s = (
        True,
        True,
        bench.clock.boottime_s() - 1,
    )
    left()
    service.serving_lease.until_s = bench.clock.boottime_s() + 1
    assert bench.same(frame)
    service.use.report(pb.UseRequest(for_s=5))
    left()
    service.use.on = False
    store.fenced_because = "a test"
    left()
    store.fenced_because = ""
    assert bench.same(frame)
    service.update_map(pool_map(6))
    left()
    assert bench.same(bench.frame(epoch=6))
    store.index.clear()
    assert not bench.same(bench.frame(epoch=6))
    bench.ordinary.ask(bench.frame(epoch=6))
    assert bench.same(bench.frame(epoch=6))
    await service.close()
    assert bench.fast_reply(bench.frame(epoch=6)) == (0, [])


@with_bench
async def test_block_outside_the_page_cache_is_left(bench):
    """As bytes outside the page cache: there too fewer bytes come. (The kernel decides what is cached, so here the file ends
    within the block.)"""
    store, frame = bench.service.store, bench.frame(20)
    assert bench.same(frame)
    before = store.reader.read_count, bench.counters.begun, bench.counters.ended
    bench.mapped.close()
    os.ftruncate(store.device.fd, (store.index.chunk(1, 0).segments[0].disk[20] << 12) + 4095)
    assert bench.fast_reply(frame) == (0, [])
    assert (store.reader.read_count, bench.counters.begun, bench.counters.ended) == before


@with_bench
async def test_rewritten_chunk_is_read_again(bench):
    frame = bench.frame(9)
    before = bench.fast_reply(frame)[1][0]
    data = b"new!" * 1024
    bench.service.store.write_now(1, 0, 9 << 12, memoryview(data), piece_checksums(data, 0))
    assert bench.same(frame)
    after = bench.fast_reply(frame)[1][0]
    assert after.endswith(data) and after != before


@with_bench
async def test_batched_frames_are_answered_up_to_the_first_left_one(bench):
    frames = [bench.frame(block, number=block + 1) for block in range(5)]
    taken, out = bench.fast_reply(b"".join(frames))
    assert taken == sum(map(len, frames)) and out == [bench.ordinary.ask(frame) for frame in frames]
    mixed = [*frames[:2], bench.frame(HOLE, number=9), *frames[3:]]
    taken, out = bench.fast_reply(b"".join(mixed))
    assert taken == 2 * len(frames[0]) and len(out) == 2
    taken, out = bench.fast_reply(b"".join(frames)[:-1])
    assert taken == 4 * len(frames[0]) and len(out) == 4
    many = bench.frame(0, 8) * 100
    taken, out = bench.fast_reply(many)
    assert len(out) == taken // len(frames[0]) == 8, "a bound on the replies of one call"


@with_bench
async def test_request_number_in_progress_is_left(bench):
    assert bench.fast_reply(bench.frame(number=7), {7: None}) == (0, [])
    assert bench.fast_reply(bench.frame(number=8), {7: None})[0]
    assert bench.fast_reply(bench.frame(number=8), dict.fromkeys(range(100, 100 + IN_FLIGHT_MAX))) == (0, [])


@with_bench
async def test_frame_with_any_changed_byte_is_left(bench):
    """In any case: a head or message with a wrong checksum is not decoded."""
    frame = bench.frame(3)
    for at in range(len(frame)):
        for bit in (0, 3, 7):
            changed = bytearray(frame)
            changed[at] ^= 1 << bit
            assert bench.fast_reply(changed) == (0, []), (at, bit)
    for length in range(len(frame)):
        assert bench.fast_reply(frame[:length]) == (0, []), length


@with_bench
async def test_random_message_is_answered_as_by_the_slow_path_or_left(bench):
    draw = random.Random(3)
    good = bench.frame(3)[32:]
    answered = 0
    for turn in range(4000):
        message = bytearray(good)
        for _ in range(draw.choice((0, 1, 1, 2))):
            message[draw.randrange(len(message))] = draw.choice(
                (0, 1, 16, 24, 60, 127, 128, 255, draw.randrange(256))
            )
        if draw.random() < 0.1:
            message = message[: draw.randrange(len(message))] + bytes(draw.randrange(3))
        answered += bench.same(pack_head(REQUEST, DATA_READ, turn + 1, 1000, bytes(message), 0))
    assert 1000 < answered < 3500


@with_bench
async def test_fast_path_counts_like_the_slow_path(bench):
    reader, counters, frame = bench.service.store.reader, bench.counters, bench.frame(0, 2)
    counted = []
    for ask in (bench.ordinary.ask, bench.fast_reply, bench.ordinary.ask):
        before = reader.read_count, reader.read_bytes
        ask(frame)
        counted.append((reader.read_count - before[0], reader.read_bytes - before[1]))
    assert counted == [(1, 8192)] * 3
    steps = [2000.0, 2000.0 + 300e-6]
    bench.clock.boottime_s = lambda: steps.pop(0)
    bench.fast_reply(frame)
    del bench.clock.boottime_s
    bench.fast_reply(frame)
    found = counters.by_method[DATA_READ]
    assert (counters.begun, counters.ended, counters.given_up, counters.errors) == (3, 3, 0, {})
    assert (found.bytes_in, found.bytes_out) == (0, 3 * 8192)
    assert found.times.counts[0] == 2 and found.times.counts[9] == 1 and sum(found.times.counts) == 3
    assert found.times.sum_s == pytest.approx(300e-6)


@with_bench
async def test_listener_uses_the_fast_path_first(bench):
    asked = []

    def handle(call):
        asked.append(call.message)
        bench.service.handle(call)

    class Handling:
        __call__ = staticmethod(handle)
        fast_path = staticmethod(bench.reads.answer)

    stream = transport("stream")
    greeting = Greeting("test", "f")
    listener = await stream.listen("stream://127.0.0.1:0", greeting, Handling())
    deadline_s = SYSTEM_CLOCK.boottime_s() + 20
    connection = await stream.connect(listener.endpoint, greeting, deadline_s=deadline_s)

    def message(block):
        return bench.frame(block)[32:]

    first = await connection.call(DATA_READ, message(3), deadline_s=deadline_s)
    assert not asked and bytes(first.payload) == bench.ordinary.ask(bench.frame(3))[-4096:]
    blocks = [*range(100, HOLE + 10)]
    replies = await asyncio.gather(
        *[connection.call(DATA_READ, message(block), deadline_s=deadline_s) for block in blocks]
    )
    for block, reply in zip(blocks, replies, strict=True):
        expected = bench.ordinary.ask(bench.frame(block))
        assert expected.endswith(bytes(reply.message) + bytes(reply.payload)), block
    assert message(HOLE) in asked and len(asked) < len(blocks), "reads behind the hole may be left with it"
    await connection.close()
    await listener.close()


def test_reads_need_a_store_with_a_page_cache(tmp_path):
    async def main():
        create_chunk_store(tmp_path / "t", 1, "pool", 64 << 20)

        async def opened(target=1, **options):
            store = await open_chunk_store(tmp_path / "t", 1, StoreOptions(**options))
            found = reads_module.open_reads(target, {}, store, {}, lease, use, SYSTEM_CLOCK)
            await store.close()
            return found

        lease, use = ServingLease(1), IoStats(SYSTEM_CLOCK, {})
        memory = MemoryChunkStore(1 << 22)
        assert reads_module.open_reads(1, {}, memory, {}, lease, use, SYSTEM_CLOCK) is None
        assert type(await opened()) is reads_module.Reads
        assert await opened(direct=True) is None and await opened(target=128) is None

    asyncio.run(main())
