"""Reads from remote stores on the fast path: bytes and errors as on the slow path, whatever happens meanwhile."""

import asyncio
import contextlib
import errno
import os
import random
import socket
from contextlib import asynccontextmanager

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.core import errors
from nvpool.core.units import KIB, MIB
from nvpool.fuse.protocol import requests
from nvpool.fuse.protocol.constants import Op
from nvpool.rpc.stats import RPC_STATS
from nvpool.rpc.v1.wire_pb2 import DATA_READ
from tests.fuse.read_kernel import (
    CONTENT,
    TYPED_WAYS,
    ChunkedTransport,
    Reading,
    path_decorators,
    places,
    replace_transports,
    until,
)
from tests.unit.client.data.test_short_circuit import BLOCK, ME, Host, evict, run_whole

FAR = ClientOptions(deadline_s=20.0, short_circuit=False)


class StoreProxy:
    """Handles requests of a store's listener: passes them to the service, unless a test replies to a read itself."""

    def __init__(self, service):
        self.service = service
        self.asked = 0
        self.instead = None
        reads = service.fast_path
        self.fast_path = None if reads is None else lambda *all: 0 if self.instead else reads.answer(*all)

    def __call__(self, call):
        if call.method == DATA_READ:
            self.asked += 1
            if self.instead is not None:
                self.instead(call)
                return
        self.service.handle(call)


class Far(Host):
    options = FAR

    async def __aenter__(self):
        await self.pool.__aenter__()
        self.proxies = {}
        for (role, number), listener in self.pool.listeners.items():
            if role == "target":
                listener.handler = self.proxies[number] = StoreProxy(self.pool.stores[number])
        self.client = await self.pool.client("reader", self.options)
        self.vfs, self.short = self.client.vfs, self.client.vfs.chunks.short
        return self

    def instead(self, answer):
        for proxy in self.proxies.values():
            proxy.instead = answer


class Mounted(Reading):
    """Its stores are behind sockets."""

    async def open(self, content=CONTENT, name=b"file"):
        """As `open_theirs`, with connected stores and validated pages."""
        number = await self.open_theirs(content, name)
        for at in range(0, len(content), MIB):
            await self.read(number, at + 100, 1)
        return number

    @property
    def far(self):
        plan = self.engine.fast_paths.reads.plan
        return None if plan is None else plan.reads

    def forget_pages(self):
        for service in self.host.pool.stores.values():
            evict(service.store.device.path)

    async def until_replied(self):
        """Late replies of interrupted reads may still be on their way."""
        async with asyncio.timeout(60):
            while any(lane.in_flight for lane in self.vfs.chunks.lanes.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def assert_nothing_left(self):
        assert not self.engine.requests.work
        for lane in self.vfs.chunks.lanes.values():
            assert not lane.in_flight
        for connection in self.connections():
            assert (not connection.in_flight and connection.closed) or not [
                one for one in connection.in_flight.values() if one[4] == DATA_READ
            ]

    def connections(self):
        return list(self.vfs.chunks.dialer.by_endpoints.values())


@asynccontextmanager
async def mounted(way="compiled", options=FAR, replicas=1):
    host = Far(replicas=replicas)
    host.options = options
    async with host, Mounted(host) as kernel:
        await kernel.init()
        if way == "ordinary":
            await kernel.engine.fast_paths.stop()
        yield kernel
        await kernel.until_replied()
        kernel.assert_nothing_left()


on_a_mount, on_both_paths, on_fast_path = path_decorators(mounted, TYPED_WAYS)


@on_both_paths
async def test_bytes_are_right_at_every_border_and_length(kernel):
    number = await kernel.open()
    for offset, length in [
        *places(300, 1),
        (MIB - 1, 2),
        (MIB - BLOCK, BLOCK),
        (MIB - BLOCK, 2 * BLOCK),
        (len(CONTENT), 10),
        (len(CONTENT) - 1, 1),
        (len(CONTENT) - 5, 100),
        (5 * MIB, 4 * KIB),
    ]:
        assert await kernel.read(number, offset, length) == CONTENT[offset : offset + length]
    if kernel.far is not None:
        assert kernel.far.read_bytes > MIB


@on_both_paths
async def test_concurrent_reads_from_drive_and_memory(kernel):
    number = await kernel.open()
    before = kernel.engine.fast_paths.read_bytes + kernel.engine.requests.read_bytes
    total = 0
    for seed in range(6):
        if seed % 2 == 0:
            kernel.forget_pages()
        asked = {
            kernel.send_read(number, offset, length): (offset, length) for offset, length in places(60, seed)
        }
        total += sum(len(CONTENT[offset : offset + length]) for offset, length in asked.values())
        await kernel.check_reads(asked)
    assert kernel.engine.fast_paths.read_bytes + kernel.engine.requests.read_bytes - before == total


@pytest.mark.compiled
@on_fast_path
async def test_large_replies_are_forwarded_from_the_receive_buffer(kernel):
    number = await kernel.open()
    for connection in kernel.connections():
        connection.answered = None  # as if received elsewhere
    for turn in range(3):
        asked = {
            kernel.send_read(number, at * MIB + turn * BLOCK, length): (at * MIB + turn * BLOCK, length)
            for at in range(4)
            for length in (17 * BLOCK, 32 * BLOCK, 32 * BLOCK - 7)
        }
        await kernel.check_reads(asked)
        kernel.forget_pages()
    for connection in kernel.connections():
        del connection.answered


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


@on_both_paths
async def test_holes_are_zeros(kernel):
    number = await kernel.open()
    other = await kernel.host.writer()
    theirs = await other.open(kernel.handle(number).inode, os.O_RDWR, ME)
    await other.write(theirs, 9 * MIB + 5, b"end")
    await other.fsync(theirs, False)
    await other.release(theirs)
    opened = await kernel.request(Op.OPEN, (os.O_RDONLY, 0), node=kernel.handle(number).inode)
    number = int.from_bytes(opened[:8], "little")
    for index in range(10):
        await kernel.read(number, index * MIB + 1, 1)
    for at, length in (
        (7 * MIB + 5000, 5000),
        (6 * MIB + 4 * BLOCK, BLOCK),
        (9 * MIB, 8),
        (5 * MIB + 1000, 300),
    ):
        expected = (CONTENT + bytes(9 * MIB + 5 - len(CONTENT)) + b"end")[at : at + length]
        assert await kernel.read(number, at, length) == expected


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("way", TYPED_WAYS)
def test_flipped_byte_on_the_drive_is_an_error(way, cold):
    @on_a_mount
    async def flipped(kernel):
        number = await kernel.open()
        file = kernel.handle(number).file
        target = file.lanes[0].target
        store = kernel.host.pool.stores[target].store
        place = store.index.chunk(file.inode, 0).segments[0].disk[5]
        fd = os.open(store.device.path, os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, place * BLOCK + 9)[0] ^ 1]), place * BLOCK + 9)
        os.close(fd)
        if cold:
            kernel.forget_pages()
        for _ in range(3):
            with pytest.raises(OSError) as refused:
                await kernel.read(number, 5 * BLOCK, BLOCK)
            assert refused.value.errno == errno.EIO
        assert await kernel.read(number, 7 * BLOCK, BLOCK) == CONTENT[7 * BLOCK : 8 * BLOCK]
        assert kernel.vfs.chunks.counters["mismatches"] >= 1

    flipped(way)


class ChangedCall:
    """A call whose reply differs from the service's."""

    def __init__(self, call, change):
        self._call, self._change = call, change

    def __getattr__(self, name):
        return getattr(self._call, name)

    def room(self, byte_count):
        return None

    def reply(self, message=b"", payload=()):
        self._call.reply(*self._change(bytes(message), b"".join(payload)))


@on_both_paths
async def test_changed_reply_gives_right_bytes_or_an_error(kernel):
    number = await kernel.open()
    chance = random.Random(9)
    changed = 0

    def change(message, payload):
        nonlocal changed
        changed += 1
        kind = changed % 4
        if kind == 0:
            at = chance.randrange(len(payload))
            payload = payload[:at] + bytes([payload[at] ^ 1 << chance.randrange(8)]) + payload[at + 1 :]
        elif kind == 1:
            at = chance.randrange(11, len(message))
            message = message[:at] + bytes([message[at] ^ 1 << chance.randrange(8)]) + message[at + 1 :]
        elif kind == 2:
            payload = payload[: chance.randrange(len(payload))]
        else:
            message, payload = (
                chance.choice([b"", message[:20], message + message, chance.randbytes(33)]),
                payload,
            )
        return message, [payload]

    proxies = kernel.host.proxies.values()

    def instead(call):
        proxy = next(
            proxy
            for proxy in proxies
            if proxy.service.target == kernel.vfs.chunks.lanes[proxy.service.target].target
        )
        for proxy in proxies:
            if bytes(call.message)[10] == proxy.service.target:
                break
        once[0] -= 1
        proxy.service.handle(ChangedCall(call, change) if once[0] == 0 else call)

    for turn in range(200):
        once = [1]
        kernel.host.instead(instead)
        offset = chance.choice([0, 1, 2, 3]) * MIB + chance.randrange(200) * BLOCK
        length = chance.choice([BLOCK, 3 * BLOCK, 17 * BLOCK, 32 * BLOCK])
        with contextlib.suppress(OSError):  # an error status is allowed
            assert await kernel.read(number, offset, length) == CONTENT[offset : offset + length], turn
        assert once[0] <= 0
    assert changed == 200


@pytest.mark.few(7)  # all on the compiled path
@pytest.mark.parametrize(
    "error",
    [
        errors.StaleGrant,
        errors.StaleEpoch,
        errors.Busy,
        errors.WrongTarget,
        errors.StaleTenure,
        errors.ChecksumMismatch,
        errors.Unavailable,
    ],
)
@pytest.mark.parametrize("way", TYPED_WAYS[::-1])
def test_temporary_refusal_is_retried(way, error):
    @on_a_mount
    async def refused(kernel):
        number = await kernel.open()
        repeats = kernel.vfs.chunks.counters["repeats"]

        def instead(call):
            kernel.host.instead(None)
            call.fail(error())

        for block in (3, 300):
            kernel.host.instead(instead)
            assert await kernel.read(number, block * BLOCK + 5, 1000) == CONTENT[block * BLOCK + 5 :][:1000]
        assert kernel.vfs.chunks.counters["repeats"] == repeats + 2

    refused(way)


@on_both_paths
async def test_permanent_refusal_is_an_error_without_retry(kernel):
    number = await kernel.open()
    asked = []

    def instead(call):
        asked.append(call)
        call.fail(errors.AccessDenied("a test"))

    kernel.host.instead(instead)
    with pytest.raises(OSError) as refused:
        await kernel.read(number, 3 * BLOCK, BLOCK)
    assert refused.value.errno == errno.EACCES and len(asked) == 1
    kernel.host.instead(None)
    assert await kernel.read(number, 5 * BLOCK, BLOCK) == CONTENT[5 * BLOCK : 6 * BLOCK]


@pytest.mark.parametrize("way", TYPED_WAYS)
def test_silent_store_is_an_error_at_the_deadline(way):
    async def silent(kernel):
        number = await kernel.open()
        kernel.host.instead(lambda call: None)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(OSError) as refused:
            await kernel.read(number, 3 * BLOCK, BLOCK)
        took_s = asyncio.get_running_loop().time() - began_s
        assert refused.value.errno == errors.DeadlineExceeded.errno and 2.5 < took_s < 5.5
        kernel.host.instead(None)
        assert await kernel.read(number, 5 * BLOCK, BLOCK) == CONTENT[5 * BLOCK : 6 * BLOCK]

    on_a_mount(silent, FAR._replace(deadline_s=3.0))(way)


@on_both_paths
async def test_interrupted_read_ignores_its_late_reply(kernel):
    number = await kernel.open()
    calls = []
    kernel.host.instead(calls.append)
    nobody = 1 << 22  # there is no such process
    late = [kernel.send_read(number, block * BLOCK, BLOCK, pid=nobody) for block in range(8, 100, 7)]
    kernel.engine.take_requests()
    async with asyncio.timeout(60):
        while len(calls) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    for unique in late:
        kernel.send(Op.INTERRUPT, (unique,))
    kernel.engine.take_requests()
    for _ in late:
        heard, error, _ = await kernel.receive()
        assert heard in late and error == -errno.EINTR
    assert not kernel.engine.requests.work
    await asyncio.sleep(0.05)
    kernel.host.instead(None)
    for call in calls:
        kernel.host.proxies[bytes(call.message)[10]].service.handle(call)
    assert await kernel.read(number, 6 * BLOCK, BLOCK) == CONTENT[6 * BLOCK : 7 * BLOCK]
    await kernel.expect_no_reply()


@on_both_paths
async def test_reads_survive_a_lost_connection(kernel):
    number = await kernel.open()
    kernel.host.instead(lambda call: None)
    asked = {
        kernel.send_read(number, block * BLOCK, BLOCK): (block * BLOCK, BLOCK) for block in range(3, 1200, 40)
    }
    kernel.engine.take_requests()
    await asyncio.sleep(0.05)
    kernel.host.instead(None)
    for connection in kernel.connections():
        connection.frames.transport.abort()
    await kernel.check_reads(asked)
    for served in [
        served for listener in kernel.host.pool.listeners.values() for served in list(listener.connections)
    ]:
        served.frames.transport.abort()
    asked = {
        kernel.send_read(number, block * BLOCK, BLOCK): (block * BLOCK, BLOCK) for block in range(5, 1200, 40)
    }
    await kernel.check_reads(asked)
    for offset, length in places(50, 4):
        assert await kernel.read(number, offset, length) == CONTENT[offset : offset + length]


@on_both_paths
async def test_replies_arrive_in_pieces(kernel):
    number = await kernel.open()
    chance = random.Random(5)
    replace_transports(kernel.host, lambda transport: ChunkedTransport(transport, chance))
    for seed in range(6):
        await kernel.check_reads(
            {
                kernel.send_read(number, offset, length): (offset, length)
                for offset, length in places(40, seed)
            }
        )


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
async def test_reply_that_the_kernel_does_not_take_is_an_error(kernel):
    number = await kernel.open()
    kernel.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * KIB)
    for _ in range(2):
        unique = kernel.send_read(number, 200 * BLOCK, 60 * KIB)
        assert (await kernel.receive())[:2] == (unique, -errno.EIO)
    assert await kernel.read(number, 6 * BLOCK, 100) == CONTENT[6 * BLOCK :][:100]


@on_fast_path
async def test_bug_before_the_request_is_an_error(kernel):
    number = await kernel.open()
    chunks, file = kernel.vfs.chunks, kernel.handle(number).file
    file.lanes.clear()
    chunks.find_lane = lambda *all: 1 / 0
    async with asyncio.timeout(20):
        for block in (3, 50, 9):
            with pytest.raises(OSError) as raised:
                await kernel.read(number, block * BLOCK, BLOCK)
            assert raised.value.errno == errno.EIO
    del chunks.find_lane
    assert await kernel.read(number, 6 * BLOCK, 100) == CONTENT[6 * BLOCK :][:100]


@on_fast_path
async def test_statistics_are_those_of_the_slow_path(kernel):
    number = await kernel.open()
    chunks, calls = kernel.vfs.chunks, RPC_STATS.calls

    def counted():
        reads = sum(calls.by_method[DATA_READ].counts)
        others = sum(sum(one.counts) for one in calls.by_method.values()) - reads  # requests of the sessions
        return (
            chunks.counters["reads"],
            calls.begun - others,
            calls.ended - others,
            reads,
            kernel.far.read_bytes,
        )

    before = counted()
    for block in range(3, 23, 2):
        await kernel.read(number, block * BLOCK, BLOCK)
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [*[10] * 4, 10 * BLOCK]


def test_unmounted_engine_does_not_wait_for_replies():
    async def work():
        async with Far() as host:
            kernel = Mounted(host)
            calls = []
            async with kernel:
                await kernel.init()
                number = await kernel.open()
                host.instead(calls.append)
                asked = [kernel.send_read(number, block * BLOCK, BLOCK) for block in range(3, 100, 7)]
                kernel.engine.take_requests()
                await asyncio.sleep(0.05)
                assert not kernel.engine.can_read_on(OSError(errno.ENODEV, "it was unmounted"))
                await asyncio.wait_for(asyncio.gather(kernel.serving, return_exceptions=True), 60)
                assert not kernel.engine.requests.work and kernel.far is None
                answered = [await kernel.receive() for _ in asked]
                assert {unique for unique, _, _ in answered} == set(asked)
                assert {error for _, error, _ in answered} == {-errno.EINTR}
            host.instead(None)
            for call in calls:
                host.proxies[bytes(call.message)[10]].service.handle(call)
            await until(lambda: not [lane for lane in host.vfs.chunks.lanes.values() if lane.in_flight])

    run_whole(work(), 120)


def test_leaving_engine_waits_for_replies():
    async def work():
        async with Far() as host, Mounted(host) as kernel:
            await kernel.init()
            number = await kernel.open()
            calls = []
            host.instead(calls.append)
            asked = {
                kernel.send_read(number, block * BLOCK, BLOCK): (block * BLOCK, BLOCK)
                for block in range(3, 100, 7)
            }
            kernel.engine.take_requests()
            await asyncio.sleep(0.05)
            leaving = asyncio.ensure_future(kernel.engine.leave(60))
            await asyncio.sleep(0.05)
            assert not leaving.done()
            host.instead(None)
            for call in calls:
                host.proxies[bytes(call.message)[10]].service.handle(call)
            await kernel.check_reads(asked)
            await asyncio.wait_for(leaving, 60)

    run_whole(work(), 120)


@on_fast_path
async def test_reads_beside_unstored_bytes_take_the_slow_path(kernel):
    number = await kernel.open()
    plan, inode = kernel.far, kernel.handle(number).inode
    content = bytearray(CONTENT)
    handle = await kernel.vfs.open(inode, os.O_RDWR, ME)
    await kernel.vfs.write(handle, 9 * BLOCK + 5, b"unstored")
    content[9 * BLOCK + 5 : 9 * BLOCK + 13] = b"unstored"
    before = plan.read_bytes
    for block in (3, 9, 20):
        assert await kernel.read(number, block * BLOCK, BLOCK) == content[block * BLOCK : (block + 1) * BLOCK]
    assert plan.read_bytes == before
    await kernel.vfs.flush(handle)
    file = kernel.handle(number).file
    assert file.written is not None and not file.written.dirty and not file.written.sending
    for block in (3, 9, 20):
        assert await kernel.read(number, block * BLOCK, BLOCK) == content[block * BLOCK : (block + 1) * BLOCK]
    assert plan.read_bytes > before
    await kernel.vfs.release(handle)
