"""The direct engine on kernels that do not resend requests, with a socket for /dev/fuse: kept requests and their successor."""

import asyncio
import errno
import os
import struct
from types import SimpleNamespace

import pytest

from nvpool.fuse.kernel.connection import KernelEngine
from nvpool.fuse.kernel.replay_engine import ReplayEngine
from nvpool.fuse.mount_point import MountOptions
from nvpool.fuse.ops.operations import FuseOps
from nvpool.fuse.protocol import replies, requests
from nvpool.fuse.protocol.constants import Init, Op
from nvpool.fuse.protocol.requests import FORMS, FuseRequest
from nvpool.fuse.request_state import FIRST
from nvpool.shm.mount_state import Word
from nvpool.shm.request_log import Unanswered
from tests.fuse.test_kernel_engine import Kernel, SlowVfs


@pytest.fixture
def memory():
    made = []

    def keep(request_bytes):
        if not made:
            made.append(Unanswered.make(request_bytes))
        return Unanswered(made[0])

    yield keep
    for descriptor in made:
        os.close(descriptor)


class KeepingKernel(Kernel):
    """`awaited`: numbers of requests for which the kernel still waits."""

    def __init__(self, vfs, keep, awaited=(), before=None):
        super().__init__(vfs)
        ops = self.engine.ops if before is None else before.engine.ops  # open files are taken over
        self.came_again = None
        engine = ReplayEngine(ops, None, MountOptions("p"), lambda: self.ready.append(1), lambda: None, keep)
        self.engine = engine
        engine.adopt(self.theirs.fileno())
        if before is not None:
            words = {Word.GREETED: 1, Word.INIT_FLAGS: int(Init.ASYNC_READ)}
            ops.kept = SimpleNamespace(word=lambda word: words[word])
            self.last = before.last
            engine.asked_again = True
            ops.invalidate_inherited = lambda: None
            ops.all_came_again = lambda in_work: setattr(self, "came_again", in_work)
            engine.is_awaited = lambda unique: unique in awaited


def run(test):
    asyncio.run(test())


async def until(condition):
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("not within a minute")


async def waits(vfs, count):
    await until(lambda: vfs.waiting >= count)


def test_successor_answers_the_kept_requests(memory):
    async def test():
        vfs = SlowVfs()
        first = KeepingKernel(vfs, memory)
        serving = asyncio.ensure_future(first.engine.serve())
        said = await first.init()
        assert not (said.flags | said.flags2 << 32) & Init.HAS_RESEND
        inode, handle = await first.create(b"f")
        await first.request(Op.WRITE, (handle, 0, 6, 0, 0, 0), node=inode, payload=b"abcdef")
        asked = [first.send(Op.READ, (handle, at, 2, 0, 0, 0), node=inode) for at in (0, 2, 4)]
        await waits(vfs, 3)
        await first.expect_no_reply()
        kept = first.engine.kept_requests
        assert kept.count == 3
        serving.cancel()  # the process is gone: none of its tasks continues
        await asyncio.gather(serving, return_exceptions=True)
        await until(lambda: not first.engine.requests.work)
        # as if killed: its records remain
        for unique, at in zip(asked, (0, 2, 4), strict=True):
            kept.keep(unique, memoryview(_read(unique, handle, at, inode)))
        vfs.go.set()
        second = KeepingKernel(vfs, memory, {*asked[1:]}, first)
        async with second:
            heard = dict([(await second.receive())[::2] for _ in range(2)])
            assert heard == {
                asked[1]: b"cd",
                asked[2]: b"ef",
            }  # by the kernel's numbers; the first one was answered before
            await second.expect_no_reply()
            assert second.engine.kept_requests.count == 0 and second.ready == [1]
            assert second.came_again is not None

    run(test)


def _read(unique, handle, at, inode):
    return requests.encode(
        FuseRequest(Op.READ, unique, inode, 0, 0, 0, FORMS[Op.READ].body(handle, at, 2, 0, 0, 0), (), b"")
    )


def test_interrupt_finds_a_request_by_the_kernels_number(memory):
    async def test():
        vfs = SlowVfs()
        first = KeepingKernel(vfs, memory)
        async with first:
            await first.init()
            inode, handle = await first.create(b"f")
        asked = 1000
        first.engine.kept_requests.keep(asked, memoryview(_read(asked, handle, 0, inode)))
        second = KeepingKernel(vfs, memory, {asked}, first)
        async with second:
            await waits(vfs, 1)
            assert second.came_again == {asked} and [
                unique & FIRST for unique in second.engine.requests.work
            ] == [asked]
            second.send(Op.INTERRUPT, (asked,), unique=asked | 1)
            unique, error, _ = await second.receive()  # its caller, process 0, does not exist
            assert (unique, error) == (asked, -errno.EINTR) and second.engine.kept_requests.count == 0

    run(test)


def test_engine_reads_nothing_while_its_log_is_full(memory, monkeypatch):
    async def test():
        vfs = SlowVfs()
        monkeypatch.setattr("nvpool.shm.request_log.SMALL_COUNT", 2)
        kernel = KeepingKernel(vfs, memory)
        async with kernel:
            await kernel.init()
            inode, handle = await kernel.create(b"f")
            await kernel.request(Op.WRITE, (handle, 0, 6, 0, 0, 0), node=inode, payload=b"abcdef")
            kept = kernel.engine.kept_requests
            asked = [kernel.send(Op.READ, (handle, at, 2, 0, 0, 0), node=inode) for at in (0, 2, 4)]
            await waits(vfs, 2)
            await asyncio.sleep(0.05)
            assert vfs.waiting == 2 and not kept.has_room
            vfs.go.set()
            heard = dict([(await kernel.receive())[::2] for _ in range(3)])
            assert heard == dict(zip(asked, (b"ab", b"cd", b"ef"), strict=True)) and kept.count == 0

    run(test)


@pytest.mark.parametrize(
    "code, awaited", [(0, True), (errno.EINVAL, True), (errno.ENOENT, False), (errno.ENODEV, False)]
)
def test_kernel_is_queried_whether_it_still_waits(memory, monkeypatch, code, awaited):
    engine = ReplayEngine(FuseOps(SlowVfs()), None, MountOptions("p"), lambda: None, lambda: None, memory)
    said = []

    def write(fd, answer):
        said.append(bytes(answer))
        if code:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr("nvpool.fuse.kernel.replay_engine.os", SimpleNamespace(write=write))
    assert engine.is_awaited(100) is awaited
    assert said == [struct.pack("=IiQ", 16, -errno.EAGAIN, 101)] and replies.HEADER_BYTES == 16


def test_resend_is_not_negotiated():
    assert (
        KernelEngine.flags & Init.HAS_RESEND and ReplayEngine.flags == KernelEngine.flags & ~Init.HAS_RESEND
    )
