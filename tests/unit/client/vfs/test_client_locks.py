"""Locks as two clients of one pool see them: ownership, waiting, visibility of data, and failures."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import (
    BadHandle,
    BeyondData,
    Disconnected,
    InvalidRequest,
    LockLost,
    NotFound,
    Unavailable,
    WouldBlock,
    WouldDeadlock,
)
from nvpool.core.ids import ROOT_INODE
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, LAST_BYTE, SHARED, UNLOCKED
from nvpool.core.units import KIB
from nvpool.meta.server import service as meta_service
from nvpool.meta.server.service import MetaOptions
from nvpool.meta.state.lock_table import TURN_S
from nvpool.rpc.v1 import wire_pb2
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(0, 0)
OPTIONS = ClientOptions(deadline_s=5.0, release_s=0.01)
ALL = (0, LAST_BYTE)


class Case:
    """An in-memory pool with a file that two clients have open, each with two descriptors."""

    def __init__(self, **pool_options):
        self.pool = InProcessPool(**pool_options)

    async def __aenter__(self) -> Case:
        await self.pool.__aenter__()
        self.here = (await self.pool.client("here", OPTIONS)).vfs
        self.there = (await self.pool.client("there", OPTIONS)).vfs
        self.mine = (await self.here.create(ROOT_INODE, b"file", 0o644, os.O_RDWR, ME))[1]
        self.inode = self.mine.inode
        self.mine_too = await self.here.open(self.inode, os.O_RDWR, ME)
        self.theirs = await self.there.open(self.inode, os.O_RDWR, ME)
        return self

    async def __aexit__(self, *failure) -> None:
        await self.pool.__aexit__(*failure)

    async def held(self) -> list[tuple[int, int, int]]:
        """(start, end, mode) of all locks of the shard, of any kind and owner."""
        return sorted(
            (one.span.start, one.span.end, one.span.mode)
            for one in self.pool.meta.parts.view.locks.locks_on(self.inode)
        )

    async def until_held(self, expected) -> None:
        for _ in range(1000):
            if await self.held() == expected:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{await self.held()} are held, not {expected}")

    async def until_waiting(self, count: int) -> None:
        for _ in range(10_000):
            if self.pool.meta.parts.view.locks.waiting >= count:
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"there are fewer than {count} waiters")

    def end_session(self, vfs) -> None:
        """End the client's session, as if the shard had not heard of the client for a lease."""
        meta = self.pool.meta
        meta.session_handlers.end_session(
            meta.parts.sessions.get(vfs.meta.session_of(self.inode)), meta.parts.options.grant_s
        )


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def case(**pool_options):
    """Decorator: a test with a Case as its argument."""

    def wrap(function):
        def test():
            async def main() -> None:
                async with Case(**pool_options) as made:
                    await function(made)
                    problems = [problem.text for problem in await _fsck(made)]
                    assert problems == []

            run(main())

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return wrap


async def _fsck(made):
    from nvpool.testing.fakes.meta_shard import ShardClient

    return await ShardClient(made.pool.meta).fsck()


@case()
async def test_record_lock_conflicts_and_names_only_own_processes(c):
    assert await c.here.setlk(c.mine, 1, 10, 19, EXCLUSIVE, 4711) is False
    with pytest.raises(WouldBlock):
        await c.there.setlk(c.theirs, 1, 15, 15, SHARED)
    with pytest.raises(WouldBlock):
        await c.here.setlk(c.mine, 2, 15, 15, SHARED)
    assert await c.there.getlk(c.theirs, 1, 0, 99, SHARED) == (10, 19, EXCLUSIVE, 0)
    assert await c.here.getlk(c.mine, 2, 0, 99, SHARED) == (10, 19, EXCLUSIVE, 4711)
    assert await c.here.getlk(c.mine, 1, 0, 99, EXCLUSIVE) is None
    assert await c.there.getlk(c.theirs, 1, 20, 99, EXCLUSIVE) is None
    await c.here.setlk(c.mine, 1, 12, 13, UNLOCKED)
    await c.there.setlk(c.theirs, 1, 12, 13, EXCLUSIVE)
    assert await c.held() == [(10, 11, EXCLUSIVE), (12, 13, EXCLUSIVE), (14, 19, EXCLUSIVE)]


@case()
async def test_flock_conflicts_between_clients_not_with_record_locks(c):
    await c.here.flock(c.mine, 1, EXCLUSIVE)
    await c.there.setlk(c.theirs, 1, *ALL, EXCLUSIVE)
    with pytest.raises(WouldBlock):
        await c.there.flock(c.theirs, 1, SHARED)
    await c.here.flock(c.mine, 1, SHARED)
    await c.there.flock(c.theirs, 1, SHARED)
    with pytest.raises(WouldBlock):
        await c.here.flock(c.mine, 1, EXCLUSIVE)
    await c.there.flock(c.theirs, 1, EXCLUSIVE), "what could not be converted was lost, as on Linux"


@case()
async def test_waiters_get_the_lock_in_order(c):
    await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE)
    order = []

    async def wait(vfs, handle, owner):
        await vfs.setlk(handle, owner, *ALL, EXCLUSIVE, wait=True)
        order.append(owner)
        await asyncio.sleep(0.01)
        await vfs.setlk(handle, owner, *ALL, UNLOCKED)

    waiting = []
    for owner in range(2, 12):
        waiting.append(
            asyncio.create_task(wait(*((c.there, c.theirs) if owner % 2 else (c.here, c.mine)), owner))
        )
        await c.until_waiting(len(waiting))
    assert not order
    await c.here.setlk(c.mine, 1, *ALL, UNLOCKED)
    await asyncio.gather(*waiting)
    assert order == list(range(2, 12)) and await c.held() == []


@case()
async def test_hundreds_of_waiters_leave_room_for_the_release(c):
    await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE)
    done = []

    async def wait(owner):
        await c.here.setlk(c.mine, owner, *ALL, EXCLUSIVE, wait=True)
        done.append(owner)
        await c.here.setlk(c.mine, owner, *ALL, UNLOCKED)

    waiting = [asyncio.create_task(wait(owner)) for owner in range(2, 302)]
    await c.until_waiting(300)
    await c.here.setlk(c.mine, 1, *ALL, UNLOCKED)
    await asyncio.gather(*waiting)
    assert len(done) == 300 and await c.held() == []


@case()
async def test_interrupted_waiter_leaves_the_queue_immediately(c):
    await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE)
    first = asyncio.create_task(c.there.setlk(c.theirs, 1, *ALL, EXCLUSIVE, wait=True))
    await c.until_waiting(1)
    second = asyncio.create_task(c.there.setlk(c.theirs, 2, *ALL, EXCLUSIVE, wait=True))
    await c.until_waiting(2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await c.here.setlk(c.mine, 1, *ALL, UNLOCKED)
    async with asyncio.timeout(TURN_S - 1.0):  # otherwise the turn of the first has to pass
        await second
    await c.there.setlk(c.theirs, 2, *ALL, UNLOCKED)
    assert c.pool.meta.parts.view.locks.waiting == 0


async def slow_answers(vfs, seconds: float) -> None:
    """Delay replies to lock requests; the shard has carried them out by then."""
    send = vfs.meta.send

    async def slow(state, method, request, deadline_s):
        raw = await send(state, method, request, deadline_s)
        if method == wire_pb2.META_LOCK:
            await asyncio.sleep(seconds)
        return raw

    vfs.meta.send = slow


@pytest.mark.parametrize("before", [[], [(0, 4, SHARED)], [(3, 3, EXCLUSIVE), (7, 20, SHARED)]])
def test_grant_that_crosses_an_interrupt_is_undone(before):
    async def main() -> None:
        async with Case() as c:
            for start, end, mode in before:
                await c.here.setlk(c.mine, 1, start, end, mode)
            await slow_answers(c.here, 0.05)
            taking = asyncio.create_task(c.here.setlk(c.mine, 1, 0, 9, EXCLUSIVE, wait=True))
            await c.until_held(
                [(0, 9, EXCLUSIVE), *[lock for lock in [(10, 20, SHARED)] if len(before) == 2]]
            )
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            await c.until_held(before)
            await c.here.setlk(c.mine, 1, *ALL, UNLOCKED)
            assert await c.held() == [] and not c.here.locks.owned

    run(main())


@case()
async def test_same_owner_waits_until_the_interrupted_lock_is_undone(c):
    await slow_answers(c.here, 0.05)
    taking = asyncio.create_task(c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE, wait=True))
    await c.until_held([(*ALL, EXCLUSIVE)])
    taking.cancel()
    await c.here.setlk(c.mine, 1, 0, 9, SHARED)
    assert await c.held() == [(0, 9, SHARED)]


@case()
async def test_lock_with_a_lost_reply_is_released(c):
    send = c.here.meta.send

    async def losing(state, method, request, deadline_s):
        raw = await send(state, method, request, deadline_s)
        if method == wire_pb2.META_LOCK and request.mode:
            raise Disconnected("lost on the way back")
        return raw

    c.here.meta.send = losing
    c.here.meta.options = OPTIONS._replace(deadline_s=0.3)
    with pytest.raises(Unavailable):
        await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE)
    assert await c.held() == [(*ALL, EXCLUSIVE)]
    await c.until_held([])
    await c.there.setlk(c.theirs, 1, *ALL, EXCLUSIVE)


@case()
async def test_close_ends_record_locks_of_its_process_only(c):
    await c.here.setlk(c.mine, 1, 0, 9, EXCLUSIVE)
    await c.here.setlk(c.mine, 2, 20, 29, EXCLUSIVE)
    await c.here.flock(c.mine, 1, SHARED)
    await c.here.flush(c.mine_too, 1)
    assert await c.held() == [(*ALL, SHARED), (20, 29, EXCLUSIVE)]
    await c.here.flush(c.mine, 3)
    await c.here.flush(c.mine)
    assert len(await c.held()) == 2


@case()
async def test_last_close_ends_locks_of_the_open_file(c):
    await c.here.flock(c.mine, 77, EXCLUSIVE)
    await c.here.setlk(c.mine, 78, 0, 9, EXCLUSIVE)  # an open file description as owner: F_OFD_SETLK
    await c.here.setlk(c.mine_too, 79, 20, 29, EXCLUSIVE)
    await c.here.flush(c.mine, 1)
    assert len(await c.held()) == 3
    await c.here.release(c.mine)
    assert await c.held() == [(20, 29, EXCLUSIVE)]


@case()
async def test_late_release_ends_no_newer_lock(c):
    await c.here.setlk(c.mine, 1, 0, 9, EXCLUSIVE)
    await c.here.flush(c.mine, 1)
    await c.here.setlk(c.mine_too, 1, 0, 9, EXCLUSIVE)
    await c.here.release(c.mine)
    assert await c.held() == [(0, 9, EXCLUSIVE)]


@case()
async def test_data_size_and_names_are_visible_under_the_next_lock(c):
    for number in range(1, 21):
        vfs, handle, who = ((c.here, c.mine, b"x"), (c.there, c.theirs, b"y"))[number % 2]
        other, its = ((c.there, c.theirs), (c.here, c.mine))[number % 2]
        name = b"journal %d" % number
        with pytest.raises(NotFound):
            await other.lookup(ROOT_INODE, name)
        await vfs.setlk(handle, 1, *ALL, EXCLUSIVE)
        await vfs.write(handle, 0, who * number * 1000)
        await vfs.mknod(ROOT_INODE, name, 0o644, 0, ME)
        await vfs.setlk(handle, 1, *ALL, UNLOCKED)
        assert await other.setlk(its, 1, *ALL, SHARED) is True
        assert bytes(await other.read(its, 0, 1 << 20)) == who * number * 1000
        assert (await other.getattr(c.inode)).size == number * 1000
        assert (await other.lookup(ROOT_INODE, name)).inode
        await other.setlk(its, 1, *ALL, UNLOCKED)


@case()
async def test_lock_reports_no_change_when_only_this_client_wrote(c):
    for number in range(5):
        assert await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE) is False
        await c.here.write(c.mine, number * 100, b"x" * 100)
        await c.here.setlk(c.mine, 1, *ALL, UNLOCKED)
    assert await c.there.setlk(c.theirs, 1, *ALL, SHARED) is True
    assert await c.there.setlk(c.theirs, 1, *ALL, SHARED) is False


@case()
async def test_lock_invalidates_bytes_that_were_read_ahead(c):
    await c.here.write(c.mine, 0, b"old!" * 768 * KIB)
    await c.here.flush(c.mine)
    theirs = await c.there.open(c.inode, os.O_RDWR, ME)
    for at in range(0, 512 * KIB, 64 * KIB):
        assert bytes(await c.there.read(theirs, at, 64 * KIB)) == b"old!" * 16 * KIB
    assert c.there.reader.counters["ahead_bytes"]
    await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE)
    await c.here.write(c.mine, 1024 * KIB, b"new!" * 64 * KIB)
    await c.here.setlk(c.mine, 1, *ALL, UNLOCKED)
    await c.there.setlk(theirs, 1, *ALL, SHARED)
    assert bytes(await c.there.read(theirs, 1024 * KIB, 64 * KIB)) == b"new!" * 16 * KIB


@case()
async def test_deadlock_between_clients_is_reported(c):
    await c.here.setlk(c.mine, 1, 0, 0, EXCLUSIVE)
    await c.there.setlk(c.theirs, 1, 1, 1, EXCLUSIVE)
    waiting = asyncio.create_task(c.here.setlk(c.mine, 1, 1, 1, EXCLUSIVE, wait=True))
    await c.until_waiting(1)
    with pytest.raises(WouldDeadlock):
        await c.there.setlk(c.theirs, 1, 0, 0, EXCLUSIVE, wait=True)
    await c.there.setlk(c.theirs, 1, *ALL, UNLOCKED)
    await waiting


@case()
async def test_lock_needs_a_suitable_descriptor_and_range(c):
    reader = await c.here.open(c.inode, os.O_RDONLY, ME)
    with pytest.raises(BadHandle):
        await c.here.setlk(reader, 1, *ALL, EXCLUSIVE)
    await c.here.setlk(reader, 1, *ALL, SHARED)
    await c.here.flock(reader, 1, EXCLUSIVE)
    for start, end in ((5, 4), (-1, 4), (0, LAST_BYTE + 1)):
        with pytest.raises(InvalidRequest):
            await c.here.setlk(c.mine, 1, start, end, SHARED)


@case()
async def test_locks_and_waiters_survive_a_restart_of_the_shard(c):
    await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE)
    waiting = asyncio.create_task(c.there.setlk(c.theirs, 1, *ALL, EXCLUSIVE, wait=True))
    for _ in range(2):
        await c.until_waiting(1)
        await c.pool.stop_shard()
        await c.pool.start_shard()
    with pytest.raises(WouldBlock):
        await c.there.setlk(c.theirs, 2, *ALL, EXCLUSIVE)
    await c.here.write(c.mine, 0, b"under the lock")
    await c.here.setlk(c.mine, 1, *ALL, UNLOCKED)
    await waiting
    assert bytes(await c.there.read(c.theirs, 0, 100)) == b"under the lock"


@case()
async def test_unlock_is_sent_when_the_shard_is_back(c):
    await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE)
    c.here.meta.options = OPTIONS._replace(deadline_s=0.2)
    await c.pool.stop_shard()
    await c.here.flush(c.mine, 1)
    await c.pool.start_shard()
    await c.until_held([])


@case()
async def test_counter_under_a_lock_survives_shard_restarts(c):
    """Two clients increment a number in a file under a lock while the shard is restarted; no increment is lost."""

    async def add(vfs, handle, owner, count):
        for _ in range(count):
            await vfs.setlk(handle, owner, *ALL, EXCLUSIVE, wait=True)
            number = int(bytes(await vfs.read(handle, 0, 20)) or b"0")
            await vfs.write(handle, 0, b"%020d" % (number + 1))
            await vfs.setlk(handle, owner, *ALL, UNLOCKED)

    adding = [
        asyncio.create_task(add(vfs, handle, owner, 25))
        for vfs, handle in ((c.here, c.mine), (c.there, c.theirs))
        for owner in (1, 2)
    ]
    while not all(task.done() for task in adding):
        await asyncio.sleep(0.15)
        await c.pool.stop_shard()
        await c.pool.start_shard()
    await asyncio.gather(*adding)
    assert int(bytes(await c.here.read(c.mine, 0, 20))) == 100 and await c.held() == []


@case(meta_options=MetaOptions(session_lease_s=60, grant_s=0.5))
async def test_lost_locks_are_reported_and_writes_discarded(c):
    await c.here.write(c.mine, 0, b"before")
    await c.here.fsync(c.mine, False)
    await c.here.setlk(c.mine, 1, 0, 9, EXCLUSIVE)
    await c.here.write(c.mine, 0, b"unsent")
    _, sound = await c.here.create(ROOT_INODE, b"sound", 0o644, os.O_RDWR, ME)
    await c.here.write(sound, 0, b"sound")
    await c.here.flush(sound)
    lost = []
    c.here.on_lost = lost.append
    c.end_session(c.here)
    await c.here.lookup(ROOT_INODE, b"file")  # detects the end of the session
    assert lost == [c.inode]
    for handle in (c.mine, c.mine_too):
        for refused in (
            c.here.read(handle, 0, 10),
            c.here.write(handle, 0, b"x"),
            c.here.fsync(handle, False),
            c.here.setlk(handle, 1, 0, 9, UNLOCKED),
            c.here.setattr(c.inode, size=0, caller=ME, handle=handle),
            c.here.read_many([(handle, 0, 1)], memoryview(bytearray(1))),
            c.here.fallocate(handle, 0, 1, 3),
            c.here.fallocate(handle, 0, 1 << 20, 0),
            c.here.seek(handle, 0, os.SEEK_DATA),
            c.here.copy_range(handle, 0, sound, 0, 4),
            c.here.copy_range(sound, 0, handle, 0, 4),
        ):
            with pytest.raises(LockLost):
                await refused
    with pytest.raises(LockLost):
        await c.here.flush(c.mine, 1)
    await c.here.flush(c.mine, 1)
    reopened = await c.here.open(c.inode, os.O_RDWR, ME)
    assert bytes(await c.here.read(reopened, 0, 10)) == b"before"
    await c.here.release(c.mine)
    await c.here.release(c.mine_too)
    with pytest.raises(WouldBlock):
        await c.there.setlk(c.theirs, 1, 0, 9, EXCLUSIVE)
    await c.there.setlk(c.theirs, 1, 20, 29, EXCLUSIVE)
    await c.here.write(reopened, 0, b"next")
    await c.here.release(reopened)
    assert bytes(await c.there.read(c.theirs, 0, 10)) == b"nextre"


@case(meta_options=MetaOptions(session_lease_s=60, grant_s=0.5))
async def test_files_without_locks_survive_the_end_of_a_session(c):
    await c.here.setlk(c.mine, 1, 0, 9, EXCLUSIVE)
    await c.here.setlk(c.mine, 1, 0, 9, UNLOCKED)
    await c.here.write(c.mine, 0, b"goes on")
    c.end_session(c.here)
    await c.here.flush(c.mine, 1)
    assert bytes(await c.here.read(c.mine, 0, 10)) == b"goes on"
    await c.here.setlk(c.mine, 1, 0, 9, EXCLUSIVE)


def test_lock_of_a_vanished_client_is_free_after_its_grants(monkeypatch):
    monkeypatch.setattr(meta_service, "HOLD_BEYOND_GRANTS_S", 0.5)

    async def main() -> None:
        async with Case(meta_options=MetaOptions(session_lease_s=0.9, grant_s=1.0, tick_s=0.1)) as c:
            await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE)

            async def silent(*arguments):
                raise Disconnected("cut off")

            c.here.meta.send = silent
            began = asyncio.get_running_loop().time()
            await c.there.setlk(c.theirs, 1, *ALL, EXCLUSIVE, wait=True)
            assert asyncio.get_running_loop().time() - began > 1.0

    run(main())


@case()
async def test_closing_client_stores_writes_and_releases_locks(c):
    await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE)
    await c.here.write(c.mine, 0, b"last words")
    waiting = asyncio.create_task(c.there.setlk(c.theirs, 1, *ALL, EXCLUSIVE, wait=True))
    await c.until_waiting(1)
    for client in c.pool.clients:
        if client.vfs is c.here:
            await client.close()
    async with asyncio.timeout(30):  # half of the lease of the session
        await waiting
    assert bytes(await c.there.read(c.theirs, 0, 100)) == b"last words"


@pytest.mark.parametrize("seed", range(4))
def test_clients_agree_with_the_shard_on_locks(seed):
    chance = random.Random(seed)

    async def owner(vfs, handle, number):
        for _ in range(15):
            start = chance.randrange(12)
            mode = chance.choice((SHARED, EXCLUSIVE, UNLOCKED))
            asking = asyncio.create_task(
                vfs.setlk(handle, number, start, start + chance.randrange(6), mode, wait=True)
            )
            done, _ = await asyncio.wait((asking,), timeout=chance.choice((0.0, 0.001, 0.005, 0.02)))
            if not done:
                asking.cancel()
            try:
                await asking
            except (asyncio.CancelledError, WouldDeadlock):
                pass

    async def main() -> None:
        async with Case() as c:
            working = [
                asyncio.create_task(owner(vfs, handle, number))
                for vfs, handle in ((c.here, c.mine), (c.there, c.theirs))
                for number in range(4)
            ]
            for _ in range(2):
                await asyncio.sleep(0.05)
                await c.pool.stop_shard()
                await c.pool.start_shard()
            await asyncio.gather(*working)
            for vfs in (c.here, c.there):
                for key in list(vfs.locks.owned):
                    vfs.locks.unclaim(
                        key, await vfs.locks.claim(key)
                    )  # interrupted requests have been undone
                for _ in range(1000):
                    if not any(owned.doubtful or owned.asking.locked() for owned in vfs.locks.owned.values()):
                        break
                    await asyncio.sleep(0.01)
                known = {
                    (vfs.meta.session_of(c.inode), key.owner): owned.spans
                    for key, owned in vfs.locks.owned.items()
                }
                file = c.pool.meta.parts.view.locks.files.get(c.inode)
                has = {
                    (key.session, key.owner): spans
                    for key, spans in (file.spans if file else {}).items()
                    if key.session == vfs.meta.session_of(c.inode)
                }
                assert {who: [span[:3] for span in spans] for who, spans in known.items()} == {
                    who: [span[:3] for span in spans] for who, spans in has.items()
                }
            for vfs, handle in ((c.here, c.mine), (c.there, c.theirs)):
                for number in range(4):
                    await vfs.flush(handle, number)
            assert await c.held() == []

    run(main())


@case()
async def test_data_ranges_are_read_again_under_a_lock(c):
    _, other = await c.there.create(ROOT_INODE, b"other", 0o644, os.O_RDWR, ME)
    await c.there.setattr(other.inode, size=1 << 20, caller=ME)
    ours = await c.here.open(other.inode, os.O_RDWR, ME)
    with pytest.raises(BeyondData):
        await c.here.seek(ours, 0, os.SEEK_DATA)
    await c.there.setlk(c.theirs, 1, *ALL, EXCLUSIVE)
    await c.there.write(other, 4096, b"x" * 4096)
    await c.there.flush(other)
    await c.there.setlk(c.theirs, 1, *ALL, UNLOCKED)
    await c.here.setlk(c.mine, 1, *ALL, EXCLUSIVE)
    assert await c.here.seek(ours, 0, os.SEEK_DATA) == 4096
    await c.here.setlk(c.mine, 1, *ALL, UNLOCKED)
