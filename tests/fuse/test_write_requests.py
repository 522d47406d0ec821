"""Writes and closes of small files through the direct engine: replies to the kernel, and the state of the client."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from contextlib import asynccontextmanager

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.errors import NoSpace, StaleSession, TooManyOpen
from nvpool.fuse.protocol import replies
from nvpool.fuse.protocol.constants import RESENT, WRITE_KILL_SUIDGID, Op, Valid
from nvpool.rpc.error_codec import encode_error
from nvpool.rpc.messages.read_write_codec import encode_write_reply
from nvpool.rpc.transports.frame import EMPTY
from nvpool.rpc.v1.wire_pb2 import META_REPORT
from nvpool.shm.mount_state import KeptMemory
from nvpool.testing.fakes.in_process_pool import InProcessPool
from tests.fuse.test_kernel_engine import Kernel, sleeping_process

OPTIONS = ClientOptions(deadline_s=20.0, retry_first_s=0.001, short_circuit=False, late_closes=False)


class Mounted(Kernel):
    """Over a pool behind unix sockets, with a client that keeps its writes."""

    def __init__(self, vfs, kept) -> None:
        super().__init__(vfs)
        self.vfs, self.kept = vfs, kept
        self.held: list = []

    async def receive(self):
        while not (heard := await super().receive())[0]:
            pass  # a notification
        return heard

    async def expect_no_reply(self):
        await self.request(Op.GETATTR, (0, 0))

    async def new(self, name: bytes = b"f", flags: int = os.O_RDWR) -> tuple[int, int]:
        answer = replies.read(
            "create",
            await self.request(
                Op.CREATE, (flags | os.O_CREAT | os.O_EXCL, 0o100644, 0o22, 0), node=1, names=(name,)
            ),
        )
        return answer.nodeid, answer.fh

    def send_write(self, handle: int, content: bytes, offset: int = 0, flags: int = 0, **more) -> int:
        return self.send(Op.WRITE, (handle, offset, len(content), flags, 0, 0), payload=content, **more)

    async def write(self, handle: int, content: bytes, offset: int = 0, flags: int = 0) -> int:
        answer = await self.request(Op.WRITE, (handle, offset, len(content), flags, 0, 0), payload=content)
        return replies.read("count", answer).size

    async def flush(self, handle: int) -> None:
        assert await self.request(Op.FLUSH, (handle, 0, 77)) == b""

    async def read(self, handle: int, size: int = 1 << 16) -> bytes:
        return bytes(await self.request(Op.READ, (handle, 0, size, 0, 0, 0)))

    async def hold_stores(self) -> None:
        """Hold back the messages to stores from now on."""
        for target in self.vfs.view.map.targets:
            connection = await self.vfs.chunks.dialer.connect(target.endpoints, SYSTEM_CLOCK.boottime_s() + 5)
            connection.frames.transport = Holding(connection.frames.transport, self.held)

    async def release_stores(self) -> None:
        for connection in self.vfs.chunks.dialer.by_endpoints.values():
            if type(connection.frames.transport) is Holding:
                connection.frames.transport = connection.frames.transport.transport
        for transport, frame in self.held:
            transport.write(frame)
        self.held.clear()

    def reply_from_stores(self, status: int) -> None:
        """Reply with this status to all messages that were sent to stores."""
        message = encode_write_reply(1, status.to_bytes(2, "little") + bytes(14))
        for connection in self.vfs.chunks.dialer.by_endpoints.values():
            if type(connection.frames.transport) is Holding:
                connection.frames.transport = connection.frames.transport.transport
                for number in list(connection.in_flight):
                    connection.answered(number, 0, message, EMPTY)
        self.held.clear()

    def assert_nothing_left(self) -> None:
        writer = self.vfs.writer
        assert not self.engine.requests.work and not self.kept.writes.valid() and not writer.begun
        assert writer.held == writer.in_flight == 0 and len(self.vfs.chunks.slots) == 64


class Holding:
    def __init__(self, transport, held: list) -> None:
        self.transport = transport
        self.held = held

    def write(self, frame) -> None:
        self.held.append((self.transport, bytes(frame)))

    def __getattr__(self, name):
        return getattr(self.transport, name)


@asynccontextmanager
async def mounted(options: ClientOptions = OPTIONS):
    descriptor = KeptMemory.make(1 << 24)
    try:
        with tempfile.TemporaryDirectory() as directory:
            async with InProcessPool(
                endpoints=lambda role, number: f"stream+unix://{directory}/{role}{number}"
            ) as pool:
                kept = KeptMemory(descriptor)
                client = await pool.client("mount", options, kept=kept)
                async with Mounted(client.vfs, kept) as kernel:
                    await kernel.init()
                    yield kernel
                kernel.assert_nothing_left()
    finally:
        os.close(descriptor)


def in_loop(test):
    def run():
        async def whole() -> None:
            async with mounted() as kernel:
                await test(kernel)

        asyncio.run(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_small_file_is_written_closed_and_read(kernel):
    ops, engine = kernel.engine.ops, kernel.engine
    for number, length in enumerate((4096, 5000, 32768, 100, 40_000)):
        content = os.urandom(length)
        inode, handle = await kernel.new(b"%d" % number)
        changes, written_bytes = ops.changes.count, engine.requests.written_bytes
        assert await kernel.write(handle, content) == length
        assert ops.changes.count == changes + 1 and engine.requests.written_bytes == written_bytes + length
        assert inode in ops.cached_pages.paged
        await kernel.flush(handle)
        assert (
            ops.changes.count == changes + 2
            and not engine.requests.work
            and ops.cached_pages.seen[inode][0] == ops.files.by_handle[handle].attr.change
        )
        await kernel.flush(handle)  # nothing is left to report
        assert ops.changes.count == changes + 2
        assert await kernel.read(handle) == content
        assert await kernel.write(handle, b"more", length) == 4  # the file is no longer empty
        await kernel.flush(handle)
        assert await kernel.read(handle) == content + b"more"
        await kernel.request(Op.RELEASE, (handle, 0, 0, 0))
    times = engine.requests.spent.times
    assert sum(times[Op.WRITE].counts) == 10 and sum(times[Op.FLUSH].counts) == 15


@in_loop
async def test_close_waits_for_the_store_without_blocking_others(kernel):
    _, handle = await kernel.new()
    _, other = await kernel.new(b"g")
    await kernel.hold_stores()
    content = os.urandom(4096)
    assert await kernel.write(handle, content) == 4096
    assert len(kernel.held) == 1 and len(kernel.kept.writes.valid()) == 1
    asked = kernel.send(Op.FLUSH, (handle, 0, 0))
    await kernel.expect_no_reply()
    assert list(kernel.engine.requests.work) == [asked]
    await kernel.flush(other)  # no write to this file
    await kernel.release_stores()
    assert (await kernel.receive())[:2] == (asked, 0)
    assert await kernel.read(handle) == content


@in_loop
async def test_dying_caller_is_not_waited_for(kernel):
    _, handle = await kernel.new()
    await kernel.hold_stores()
    assert await kernel.write(handle, bytes(4096)) == 4096
    child = sleeping_process()
    asked = kernel.send(Op.FLUSH, (handle, 0, 0), pid=child.pid)
    kernel.send(Op.INTERRUPT, (asked,))
    await kernel.expect_no_reply()
    child.kill()
    assert (await kernel.receive())[:2] == (asked, -errno.EINTR)
    child.wait()
    await kernel.release_stores()
    await kernel.flush(handle)
    assert await kernel.read(handle) == bytes(4096)


@in_loop
async def test_failed_write_is_reported_by_one_close(kernel):
    inode, handle = await kernel.new()
    await kernel.hold_stores()
    assert await kernel.write(handle, bytes(4096)) == 4096
    asked = kernel.send(Op.FLUSH, (handle, 0, 0))
    await kernel.expect_no_reply()
    kernel.reply_from_stores(NoSpace.wire_code)
    assert (await kernel.receive())[:2] == (asked, -errno.ENOSPC)
    assert inode not in kernel.engine.ops.cached_pages.seen
    await kernel.flush(handle)


@in_loop
async def test_write_without_a_free_record_is_refused(kernel):
    inode, handle = await kernel.new()

    files = kernel.kept.files
    taken = [files.take() for _ in range(files.free)]
    with pytest.raises(OSError) as refused:
        await kernel.write(handle, bytes(4096))
    assert refused.value.errno == TooManyOpen.errno and inode not in kernel.engine.ops.cached_pages.seen
    for index in taken:
        files.give_back(index)
    assert await kernel.write(handle, bytes(4096)) == 4096
    await kernel.flush(handle)


@in_loop
async def test_malformed_requests_and_wrong_handles_are_refused(kernel):
    _, handle = await kernel.new(flags=os.O_RDONLY)
    for number in (handle, handle + 1000):
        with pytest.raises(OSError) as refused:
            await kernel.write(number, bytes(4096))
        assert refused.value.errno == (errno.EBADF if number == handle else errno.EIO)
    asked = kernel.send(Op.WRITE, (handle, 0, 4096, 0, 0, 0), payload=bytes(4096) + b"x")
    assert (await kernel.receive())[:2] == (asked, -errno.EINVAL)
    with pytest.raises(OSError):
        await kernel.request(Op.FLUSH, (handle + 1000, 0, 0))
    await kernel.flush(handle)


@in_loop
async def test_resent_write_is_answered_from_the_mount_state(kernel):
    _, handle = await kernel.new()
    content = os.urandom(4096)
    asked = kernel.send_write(handle, content)
    assert (await kernel.receive())[:2] == (asked, 0)
    ((_, _, _, _, unique, _, _, _),) = [
        record for record in kernel.kept.writes.all() if record[4] == asked
    ] or [(0,) * 8]
    assert unique == asked
    again = kernel.send_write(handle, content, unique=asked | RESENT)
    heard, error, answer = await kernel.receive()
    assert (heard, error) == (again, 0) and replies.read("count", answer).size == 4096
    await kernel.flush(handle)
    flushed = kernel.send(Op.FLUSH, (handle, 0, 0), unique=4000 | RESENT)
    assert (await kernel.receive())[:2] == (flushed, 0)
    assert await kernel.read(handle) == content


@in_loop
async def test_first_write_clears_set_id_bits(kernel):
    inode, handle = await kernel.new()
    await kernel.request(Op.SETATTR, (Valid.MODE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0o104755, 0, 0), node=inode)
    assert await kernel.write(handle, bytes(4096), flags=WRITE_KILL_SUIDGID) == 4096
    await kernel.flush(handle)
    assert (await kernel.vfs.getattr(inode)).mode & 0o7777 == 0o755
    inode, handle = await kernel.new(b"g")
    assert await kernel.write(handle, bytes(4096), flags=WRITE_KILL_SUIDGID) == 4096
    await kernel.flush(handle)


@in_loop
async def test_close_after_a_write_ends_record_locks(kernel):
    inode, handle = await kernel.new()
    await kernel.request(Op.SETLK, (handle, 77, 0, 10, 1, 5, 0))
    assert await kernel.write(handle, bytes(4096)) == 4096
    assert kernel.vfs.is_locked(inode)
    await kernel.flush(handle)
    assert not kernel.vfs.is_locked(inode)


@in_loop
async def test_many_files_are_written_and_closed_concurrently(kernel):
    made = [await kernel.new(b"%d" % number) for number in range(40)]
    contents = [os.urandom(4096) for _ in made]
    asked = {
        kernel.send_write(handle, content): 0 for (_, handle), content in zip(made, contents, strict=True)
    }
    asked |= {kernel.send(Op.FLUSH, (handle, 0, 0)): 0 for _, handle in made}
    for _ in range(len(asked)):
        heard, error, _ = await kernel.receive()
        assert not error
        del asked[heard]
    for (inode, handle), content in zip(made, contents, strict=True):
        assert await kernel.read(handle) == content and (await kernel.vfs.getattr(inode)).size == 4096


@in_loop
async def test_refusal_of_an_old_session_keeps_the_new_one(kernel):
    meta = kernel.vfs.meta
    handles = [(await kernel.new(name))[1] for name in (b"a", b"b")]
    for handle in handles:
        await kernel.write(handle, bytes(4096))
    connection = meta.shards[1].met
    connection.frames.transport = Holding(connection.frames.transport, kernel.held)
    asked = [kernel.send(Op.FLUSH, (handle, 0, 77)) for handle in handles]
    numbers = []
    async with asyncio.timeout(60):
        while len(numbers) < 2:
            await asyncio.sleep(0.001)
            numbers = [number for number, one in connection.in_flight.items() if one[4] == META_REPORT]
    connection.frames.transport = connection.frames.transport.transport
    refusal = (*encode_error(StaleSession()), EMPTY)
    first = meta.session_of(1)
    connection.answered(numbers[0], *refusal)
    assert (await kernel.receive())[:2] == (asked[0], 0)
    second, count, lost = meta.session_of(1), meta.counters["sessions"], []
    assert second not in (0, first)
    meta.events.session_lost.append(lost.append)
    connection.answered(numbers[1], *refusal)
    assert (await kernel.receive())[:2] == (asked[1], 0)
    assert (meta.session_of(1), meta.counters["sessions"], lost) == (second, count, [])
    meta.events.session_lost.remove(lost.append)
