"""Locks between the kernel and the Vfs: requests to the direct engine, and invalidations of the kernel."""

import asyncio
import errno
import fcntl
import os

import pytest

from nvpool.client.state.vfs_types import Caller
from nvpool.core.clock import ManualClock
from nvpool.core.errors import InvalidRequest
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, LAST_BYTE, RECORD
from nvpool.fuse.ops import locks as lock_operations
from nvpool.fuse.ops.operations import FuseOps, FuseOptions
from nvpool.fuse.pending_requests import IN_WORK_MAX
from nvpool.fuse.protocol import replies
from nvpool.fuse.protocol.constants import LOCK_FLOCK, Init, Notice, Op
from nvpool.meta.state.lock_table import Owner
from nvpool.testing.fakes.vfs import MemoryVfs
from tests.fuse.test_kernel_engine import Kernel, SlowVfs, on_kernel

ME = Caller(0, 0)
READ, WRITE, NONE = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK


def body(handle, owner, kind, start=0, end=LAST_BYTE, flags=0, pid=1):
    return handle, owner, start, end, kind, pid, flags


async def new_file(kernel):
    await kernel.init()
    return await kernel.create(b"f")


@on_kernel()
async def test_lock_support_is_negotiated(kernel):
    said = await kernel.init()
    assert said.flags & Init.POSIX_LOCKS and said.flags & Init.FLOCK_LOCKS


@on_kernel()
async def test_conflicting_lock_is_eagain_and_shown_by_getlk(kernel):
    inode, handle = await new_file(kernel)
    await kernel.request(Op.SETLK, body(handle, 1, WRITE, 10, 19, pid=77), node=inode)
    with pytest.raises(BlockingIOError):
        await kernel.request(Op.SETLK, body(handle, 2, READ, 0, 10), node=inode)
    found = replies.read("lock", await kernel.request(Op.GETLK, body(handle, 2, READ), node=inode))
    assert (found.start, found.end, found.type, found.pid) == (10, 19, WRITE, 77)
    assert (
        replies.read("lock", await kernel.request(Op.GETLK, body(handle, 1, WRITE), node=inode)).type == NONE
    )
    await kernel.request(Op.SETLK, body(handle, 1, NONE, 10, 10), node=inode)
    await kernel.request(Op.SETLK, body(handle, 2, READ, 0, 10), node=inode)
    await kernel.request(Op.SETLK, body(handle, 3, WRITE, flags=LOCK_FLOCK), node=inode)
    with pytest.raises(BlockingIOError):
        await kernel.request(Op.SETLK, body(handle, 4, READ, flags=LOCK_FLOCK), node=inode)


@on_kernel()
async def test_close_ends_record_locks_and_release_ends_flock(kernel):
    inode, handle = await new_file(kernel)
    await kernel.request(Op.SETLK, body(handle, 1, WRITE), node=inode)
    await kernel.request(Op.SETLK, body(handle, 2, WRITE, flags=LOCK_FLOCK), node=inode)
    await kernel.request(Op.FLUSH, (handle, 0, 9), node=inode)
    locks = kernel.engine.ops.vfs.lock_table
    assert len(list(locks.locks_on(inode))) == 2
    await kernel.request(Op.FLUSH, (handle, 0, 1), node=inode)
    assert [one.owner.owner for one in locks.locks_on(inode)] == [2]
    await kernel.request(Op.RELEASE, (handle, 0, 2, 2), node=inode)
    assert not list(locks.locks_on(inode))


@on_kernel()
async def test_waiting_lock_is_granted_without_blocking_others(kernel):
    inode, handle = await new_file(kernel)
    await kernel.request(Op.SETLK, body(handle, 1, WRITE), node=inode)
    asked = kernel.send(Op.SETLKW, body(handle, 2, WRITE), node=inode)
    await kernel.expect_no_reply()
    released = kernel.send(Op.SETLK, body(handle, 1, NONE), node=inode)
    assert {(await kernel.receive())[:2], (await kernel.receive())[:2]} == {(released, 0), (asked, 0)}


@on_kernel()
async def test_interrupt_ends_a_waiting_lock(kernel):
    inode, handle = await new_file(kernel)
    await kernel.request(Op.SETLK, body(handle, 1, WRITE), node=inode)
    asked = kernel.send(Op.SETLKW, body(handle, 2, WRITE), node=inode, pid=os.getpid())
    await kernel.expect_no_reply()
    kernel.send(Op.INTERRUPT, (asked,))
    assert (await kernel.receive())[:2] == (asked, -errno.EINTR)
    await kernel.request(Op.SETLK, body(handle, 1, NONE), node=inode)
    assert not kernel.engine.ops.vfs.lock_table.files and not kernel.engine.pending.lock_waits


class InterruptedVfs(MemoryVfs):
    """Others have always changed the file; the lock is granted immediately."""

    async def setlk(self, *arguments, **fields):
        await super().setlk(*arguments, **fields)
        return True


@on_kernel(InterruptedVfs)
async def test_interrupt_after_the_grant_keeps_the_lock(kernel):
    inode, handle = await new_file(kernel)
    forgotten = asyncio.Event()

    async def forgetting(_names, _inodes):
        await forgotten.wait()

    kernel.engine.ops.notices.connect(invalidate=forgetting)
    asked = kernel.send(Op.SETLKW, body(handle, 2, WRITE), node=inode)
    await kernel.expect_no_reply()
    kernel.send(Op.INTERRUPT, (asked,))
    await kernel.expect_no_reply()
    forgotten.set()
    assert (await kernel.receive())[:2] == (asked, 0)


def test_unmount_ends_waiting_locks_with_eio():
    async def main():
        async with Kernel(MemoryVfs()) as kernel:
            inode, handle = await new_file(kernel)
            await kernel.request(Op.SETLK, body(handle, 1, WRITE), node=inode)
            asked = kernel.send(Op.SETLKW, body(handle, 2, WRITE), node=inode)
            await kernel.expect_no_reply()
            kernel.engine.stop()
            assert (await kernel.receive())[:2] == (asked, -errno.EIO)
            await asyncio.wait_for(kernel.serving, 120)

    asyncio.run(main())


@on_kernel(SlowVfs)
async def test_waiting_locks_do_not_exhaust_the_request_limit(kernel):
    inode, handle = await new_file(kernel)
    await kernel.request(Op.SETLK, body(handle, 1, WRITE), node=inode)
    waiting = IN_WORK_MAX + 100
    for number in range(waiting):
        while True:
            try:
                kernel.send(Op.SETLKW, body(handle, 2 + number, READ), node=inode)
                break
            except BlockingIOError:
                await asyncio.sleep(0)
    await kernel.expect_no_reply()
    kernel.send(Op.SETLK, body(handle, 1, NONE), node=inode)
    for _ in range(waiting + 1):
        assert not (await kernel.receive())[1]


@on_kernel()
async def test_invalid_lock_is_refused(kernel):
    inode, handle = await new_file(kernel)
    for opcode in (Op.SETLK, Op.SETLKW, Op.GETLK):
        with pytest.raises(OSError) as refused:
            await kernel.request(opcode, body(handle, 1, 9), node=inode)
        assert refused.value.errno == errno.EINVAL


@on_kernel(InterruptedVfs)
async def test_pages_are_dropped_before_the_lock_is_granted(kernel):
    inode, handle = await new_file(kernel)
    asked = kernel.send(Op.SETLK, body(handle, 1, WRITE), node=inode)
    unique, code, notice = await kernel.receive()
    assert (unique, code) == (0, Notice.INVAL_INODE)
    assert notice == replies.inval_inode(inode, 0, 0)[replies.HEADER_BYTES :]
    assert (await kernel.receive())[:2] == (asked, 0)


@on_kernel(options=FuseOptions(negative_timeout_s=1.0))
async def test_negative_entries_are_invalidated_under_a_lock(kernel):
    inode, handle = await new_file(kernel)
    assert replies.read("entry", await kernel.request(Op.LOOKUP, names=(b"journal",))).nodeid == 0
    asked = kernel.send(Op.SETLK, body(handle, 1, WRITE), node=inode)
    unique, code, notice = await kernel.receive()
    assert (unique, code) == (0, Notice.INVAL_ENTRY) and b"journal\0" in notice
    assert (await kernel.receive())[:2] == (asked, 0)
    await kernel.request(Op.SETLK, body(handle, 2, READ, 0, 0, LOCK_FLOCK), node=inode)  # and only once


def test_negative_entries_are_bounded_and_expire(monkeypatch):
    monkeypatch.setattr(lock_operations, "ABSENT_MAX", 3)

    async def main():
        clock = ManualClock()
        ops = FuseOps(MemoryVfs(), FuseOptions(negative_timeout_s=1.0), clock=clock)
        asked = []

        async def invalidate(names, _inodes):
            asked.append(sorted(name for _, name in names))

        ops.notices.connect(invalidate=invalidate)
        _, opened = await ops.create(1, b"f", 0o644, os.O_RDWR, ME)
        for name in (b"a", b"b"):
            assert await ops.lookup(1, name) is None
        clock.advance(0.6)
        assert await ops.lookup(1, b"b") is None and await ops.lookup(1, b"c") is None
        with pytest.raises(Exception, match="No such"):
            await ops.lookup(1, b"d")  # not recorded
        clock.advance(0.6)
        await ops.setlk(opened.handle, 1, 0, 9, WRITE, 1, False)
        assert asked == [[b"b", b"c"]]
        await ops.setlk(opened.handle, 1, 0, 9, NONE, 1, False)
        await ops.setlk(opened.handle, 1, 0, 9, READ, 1, False)
        assert len(asked) == 1
        with pytest.raises(InvalidRequest):
            await ops.flock(opened.handle, 1, 5, 1, False)

    asyncio.run(main())


def test_changed_attributes_are_invalidated_under_a_lock():
    async def main():
        vfs = MemoryVfs()
        ops = FuseOps(vfs)
        asked = []
        ops.notices.connect(invalidate_attributes=asked.append)
        attr, opened = await ops.create(1, b"f", 0o644, os.O_RDWR, ME)
        await ops.setlk(opened.handle, 1, 0, 9, WRITE, 1, False)
        assert asked == []
        vfs.touch(vfs.nodes[attr.inode])  # as another node would
        await ops.setlk(opened.handle, 1, 0, 9, WRITE, 1, False)
        assert asked == [attr.inode]

    asyncio.run(main())


def test_pages_of_a_file_with_lost_locks_are_dropped():
    async def main():
        vfs = MemoryVfs()
        ops = FuseOps(vfs)
        dropped = []

        async def drop(_names, inodes):
            dropped.extend(inodes)

        ops.notices.connect(invalidate=drop)
        vfs.on_lost(7)
        await asyncio.sleep(0)
        assert dropped == [7]

    asyncio.run(main())


def test_memory_fake_grants_locks_in_order():
    async def main():
        vfs = MemoryVfs()
        _, handle = await vfs.create(1, b"f", 0o644, os.O_RDWR, ME)
        await vfs.setlk(handle, 1, 0, 9, EXCLUSIVE)
        order = []

        async def wait(owner):
            await vfs.setlk(handle, owner, 0, 9, EXCLUSIVE, wait=True)
            order.append(owner)
            await vfs.setlk(handle, owner, 0, 9, 0)

        waiting = [asyncio.create_task(wait(owner)) for owner in (2, 3, 4)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        await vfs.flush(handle, 1)
        await asyncio.gather(waiting[0], waiting[2])
        assert order == [2, 4] and not list(
            vfs.lock_table.in_the_way(handle.inode, Owner(RECORD, 0, 9), 0, 9, EXCLUSIVE)
        )

    asyncio.run(main())
