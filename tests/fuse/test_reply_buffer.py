"""Replies that compiled reads take from the receive buffer (rpc/transports/_frame.hear), of several engines and kinds.

They share a connection with other replies, and may arrive in pieces, changed or late.
"""

import asyncio
import random

import pytest

from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import InvalidRequest
from nvpool.core.units import KIB
from nvpool.rpc.stats import RPC_STATS
from nvpool.rpc.transports.frame import HEADER, HEADER_BYTES
from nvpool.rpc.v1.wire_pb2 import DATA_READ
from tests.fuse.read_kernel import CONTENT, replace_transports
from tests.fuse.test_fast_remote_reads import Far
from tests.fuse.test_fast_small_reads import Small
from tests.unit.client.data.test_short_circuit import BLOCK, run_whole, some
from tests.unit.rpc.transports.test_frame_fast_path import receive

pytestmark = pytest.mark.compiled


class HoldingTransport:
    """Takes the place of a store's transport: holds back its replies."""

    def __init__(self, transport):
        self.transport, self.held_frames = transport, bytearray()

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def write(self, content):
        self.held_frames += content

    def writelines(self, parts):
        for part in parts:
            self.held_frames += part


class Two:
    """Two engines on one client; the replies of its stores are held back from now on."""

    def __init__(self, host, first, second):
        self.host, self.kernels, self.errors = host, (first, second), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self.errors.append(context))

    async def begin(self):
        first, second = self.kernels
        for kernel in self.kernels:
            await kernel.init()
        await first.connect()
        self.large = [await first.open_theirs()]
        inode = first.handle(self.large[0]).inode
        self.large.append(await second.open(inode))
        for kernel, number in zip(self.kernels, self.large, strict=True):
            for at in range(0, len(CONTENT), 1 << 20):
                await kernel.read(number, at + 100, 1)
        self.contents = [
            some(size, seed) for seed, size in enumerate((1, 100, BLOCK, 5000, 3 * BLOCK, 30 * KIB) * 6)
        ]
        self.small = [[], []]
        for seed, inode in enumerate(await first.make(self.contents)):
            self.small[seed % 2].append((await self.kernels[seed % 2].open(inode), self.contents[seed]))
        self.kept = {}
        replace_transports(self.host, HoldingTransport)
        for (role, _), listener in self.host.pool.listeners.items():
            if role == "target":
                (connection,) = (one for one in first.connections() if one.peer.address == listener.endpoint)
                self.kept[connection] = [served.frames.transport for served in listener.connections]

    async def request(self, seed, lengths=(BLOCK, BLOCK, 5000, 64 * KIB, 128 * KIB)):
        """{unique: expected reply} for each engine; the requests are for large and small files alternately."""
        self.host.vfs.reader.forget_contents()
        asked = {}, {}
        chance = random.Random(seed)
        for turn in range(18):
            for of, kernel in enumerate(self.kernels):
                length = chance.choice(lengths)
                offset = chance.randrange(len(CONTENT) - length)
                asked[of][kernel.send_read(self.large[of], offset, length)] = CONTENT[
                    offset : offset + length
                ]
                number, content = self.small[of][turn]
                asked[of][kernel.send_read(number, 0, 64 * KIB)] = content
                if turn % 6 == 5:
                    await on_loop(kernel.engine.take_requests)
        return asked

    async def held_frames(self):
        """{connection: frames of its replies}."""
        found, before = {}, -1
        async with asyncio.timeout(60):
            while (
                (now := sum(len(kept.held_frames) for all_of in self.kept.values() for kept in all_of))
                != before
                or not now
                or any(len(found[connection]) < len(connection.in_flight) for connection in self.kept)
            ):
                before = now
                await asyncio.sleep(0.02)
                found = {
                    connection: [frame for kept in all_of for frame in frames(kept.held_frames)]
                    for connection, all_of in self.kept.items()
                }
        for kept in (kept for all_of in self.kept.values() for kept in all_of):
            kept.held_frames.clear()
        return found

    def release(self):
        """Deliver replies again from now on."""
        replace_transports(self.host, lambda kept: kept.transport)

    async def check_replies(self, asked):
        for kernel, its in zip(self.kernels, asked, strict=True):
            for unique, (error, answer) in (await kernel.answers(its)).items():
                assert not error and answer == its[unique]


async def on_loop(do, *arguments):
    """Call `do` as the event loop does."""
    ended = asyncio.get_running_loop().create_future()

    def work():
        try:
            ended.set_result(do(*arguments))
        except BaseException as error:
            ended.set_exception(error)

    asyncio.get_running_loop().call_soon(work)
    return await ended


def frames(said):
    at = 0
    while at < len(said):
        head = HEADER.unpack_from(said, at)
        end = at + HEADER_BYTES + head[7] + head[8]
        yield bytes(said[at:end])
        at = end


def on_two(test):
    def run():
        async def work():
            async with Far() as host, Small(host) as first, Small(host) as second:
                two = Two(host, first, second)
                await two.begin()
                await test(two)
                assert not two.errors
                for kernel in (first, second):
                    kernel.assert_nothing_left()

        run_whole(work(), 120)

    run.__name__ = test.__name__
    return run


@on_two
async def test_replies_of_two_engines_and_others_share_a_buffer(two):
    chance = random.Random(3)
    for turn, sizes in enumerate(((1 << 20,), (1, 31, 32, 33, 60, 4000, 4161, 20_000), (140_000, 5000, 100))):
        begun = [kernel.began for kernel in two.kernels]
        asked = await two.request(turn)
        errors = []
        for connection in two.kept:
            for _ in range(3):
                connection.submit(
                    DATA_READ,
                    b"no question",
                    deadline_s=SYSTEM_CLOCK.boottime_s() + 60,
                    on_done=lambda reply, error, errors=errors: errors.append(type(error)),
                )
        counts = RPC_STATS.calls.by_method[DATA_READ].counts
        ended = sum(counts)
        said = await two.held_frames()
        assert all(kernel.began > before for kernel, before in zip(two.kernels, begun, strict=True))
        count = 0
        for connection, its in said.items():
            count += len(its)
            chance.shuffle(its)
            await on_loop(
                receive, connection, b"".join(its), iter(lambda sizes=sizes: chance.choice(sizes), None)
            )
            assert (
                not connection.in_flight
                and not connection.frames.reader.end
                and not connection.frames.reading
            )
        await two.check_replies(asked)
        assert errors == [InvalidRequest] * 3 * len(two.kept)
        assert sum(counts) - ended == count


@on_two
async def test_most_replies_are_taken_without_parsing_each(two):
    asked = await two.request(4, (BLOCK, 5000, 30 * KIB))
    count, read = 0, []
    for connection, its in (await two.held_frames()).items():
        deliver = connection.frames.reader.deliver

        def delivered(*frame, deliver=deliver):
            read.append(frame)
            deliver(*frame)

        connection.frames.reader.deliver = delivered
        count += len(its)
        for frame in its:
            await on_loop(receive, connection, frame)
        connection.frames.reader.deliver = deliver
    await two.check_replies(asked)
    assert count > 20 and len(read) < count / 4  # reads over the end of a chunk, or longer than the buffer


@on_two
async def test_changed_message_closes_the_connection(two):
    asked = await two.request(5)
    said = await two.held_frames()
    two.release()
    for connection, its in said.items():
        count = len(its)
        last = bytearray(its.pop())
        last[HEADER_BYTES + 3] ^= 4
        await on_loop(receive, connection, b"".join([*its, last]))
        assert connection.closed and count > 4
    await two.check_replies(asked)


@on_two
async def test_changed_bytes_are_requested_again(two):
    asked = await two.request(6)
    said = await two.held_frames()
    two.release()
    for connection, its in said.items():
        for place in range(0, len(its), 3):
            changed = bytearray(its[place])
            changed[-5] ^= 1
            its[place] = bytes(changed)
        await on_loop(receive, connection, b"".join(its))
        assert not connection.closed
    await two.check_replies(asked)


@on_two
async def test_late_replies_of_an_ended_engine_are_dropped(two):
    first, second = two.kernels
    asked = await two.request(7)
    said = await two.held_frames()
    assert not first.engine.can_read_on(OSError(19, "it was unmounted"))
    await asyncio.wait_for(asyncio.gather(first.serving, return_exceptions=True), 60)
    assert (
        not first.engine.requests.work
        and first.engine.fast_paths.small_files.compiled is None
        and first.engine.fast_paths.reads.plan is None
    )
    for unique, (error, _) in (await first.answers(asked[0])).items():
        assert error == -4 and unique in asked[0]
    for connection, its in said.items():
        await on_loop(receive, connection, b"".join(its))
    for unique, (error, answer) in (await second.answers(asked[1])).items():
        assert not error and answer == asked[1][unique]
    await asyncio.sleep(0.05)
    with pytest.raises(BlockingIOError):
        first.ours.recv(1)


@on_two
async def test_engine_that_ends_halfway_keeps_its_replies(two):
    first, _ = two.kernels
    asked = await two.request(8)
    said = await two.held_frames()
    for connection, its in said.items():
        half = len(its) // 2
        await on_loop(receive, connection, b"".join(its[:half]))
        await first.engine.fast_paths.stop()
        await on_loop(receive, connection, b"".join(its[half:]))
    await two.check_replies(asked)


@on_two
async def test_connection_that_ends_halfway_answers_each_read_once(two):
    first, _ = two.kernels
    asked = await two.request(9, (BLOCK,))
    said = await two.held_frames()
    two.release()
    paths = first.engine.fast_paths.small_files, first.engine.fast_paths.reads
    some_ended, ended = paths[0].some_ended, []
    for connection, its in said.items():

        def end(connection=connection):
            if connection.frames.reading and not connection.frames.ended:
                ended.append(connection)
                connection.abandon("by who goes on")
            some_ended()

        for path in paths:
            path.some_ended = end
        frames, room = b"".join(its), connection.get_buffer(-1)
        count = min(len(frames), len(room))
        room[:count] = frames[:count]
        del room
        await on_loop(connection.buffer_updated, count)
    for path in paths:
        path.some_ended = some_ended
    assert ended
    await two.check_replies(asked)
