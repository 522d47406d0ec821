"""Closed files and released quota reservations when messages are lost or late: nothing stays open or reserved."""

import asyncio
import os
from contextlib import asynccontextmanager

import pytest

from nvpool.client.rpc.deferred_close import RENEW_INODES_MAX
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.client.vfs.bulk_operations import NAMES_MAX
from nvpool.core.errors import Disconnected, InvalidRequest
from nvpool.core.ids import ROOT_INODE
from nvpool.meta.operations.listing import LIST_LIMIT_MAX
from nvpool.meta.server.service import MetaOptions
from nvpool.meta.sessions.table import (
    HELD_ALL_MAX,
    HELD_MAX,
    LISTED_INODES_MAX,
    Session,
    Sessions,
    handles_of,
    inodes_of,
)
from nvpool.meta.state.session_records import SessionRecord
from nvpool.rpc.v1 import wire_pb2
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(0, 0)
LEASE_S = 1.5
"""Sessions are renewed twice a second."""


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def until(holds) -> None:
    async with asyncio.timeout(30):
        while not (await holds() if asyncio.iscoroutinefunction(holds) else holds()):  # noqa: ASYNC110  (no event exists)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def pool_and_client():
    options = MetaOptions(session_lease_s=LEASE_S, linger_s=0.1, tick_s=0.1)
    async with InProcessPool(meta_options=options) as pool:
        client = await pool.client(options=ClientOptions(deadline_s=10.0, release_s=0.01))
        yield pool, client
        await client.close()


def on_the_way(client, method: int, what) -> None:
    """From now on `what(send)` sends the messages of that method and returns the reply."""
    before = client.vfs.meta.send

    async def send(state, asked, request, deadline_s):
        if asked != method:
            return await before(state, asked, request, deadline_s)
        return await what(lambda: before(state, asked, request, deadline_s))

    client.vfs.meta.send = send


def losing(times: int, *, sent: bool):
    lost = []

    async def lose(send):
        if len(lost) == times:
            return await send()
        lost.append(sent and await send())
        raise Disconnected("lost on the way")

    return lose, lost


def session_of(pool):
    return next(iter(pool.meta.parts.sessions.by_number.values()))


@pytest.mark.parametrize("sent", [True, False])
def test_file_with_a_lost_close_is_closed_at_the_renewal(sent):
    async def main() -> None:
        async with pool_and_client() as (pool, client):
            vfs = client.vfs
            attr, handle = await vfs.create(ROOT_INODE, b"f", 0o644, os.O_RDWR, ME)
            await vfs.unlink(ROOT_INODE, b"f", ME)
            lose, lost = losing(1, sent=sent)
            on_the_way(client, wire_pb2.META_RELEASE, lose)
            await vfs.release(handle)
            await until(lambda: lost)
            assert sent or session_of(pool).opens == {attr.inode: 1}
            await until(lambda: not session_of(pool).opens and not pool.meta.parts.collector.orphans)

    run(main())


def test_reopened_file_stays_open_after_a_lost_close():
    async def main() -> None:
        async with pool_and_client() as (pool, client):
            vfs = client.vfs
            attr, handle = await vfs.create(ROOT_INODE, b"f", 0o644, os.O_RDWR, ME)
            await vfs.write(handle, 0, b"still here")
            await vfs.fsync(handle, True)
            lose, lost = losing(1, sent=False)
            on_the_way(client, wire_pb2.META_RELEASE, lose)
            await vfs.release(handle)
            await until(lambda: lost)
            again = await vfs.open(attr.inode, os.O_RDWR, ME)
            await vfs.write(again, 0, b"s")  # notifies the service of the open that a lease allowed
            await vfs.fsync(again, True)
            await vfs.unlink(ROOT_INODE, b"f", ME)
            await asyncio.sleep(2 * LEASE_S)
            assert session_of(pool).opens[attr.inode] >= 1
            assert bytes(await vfs.read(again, 0, 10)) == b"still here"
            await vfs.release(again)
            await until(lambda: not session_of(pool).opens and not pool.meta.parts.collector.orphans)

    run(main())


def test_file_opened_by_a_late_reply_is_not_given_up():
    async def main() -> None:
        async with pool_and_client() as (pool, client):
            vfs, arrive = client.vfs, asyncio.Event()

            async def late(send):
                reply = await send()
                await arrive.wait()
                return reply

            await vfs.mkdir(ROOT_INODE, b"d", 0o755, ME)
            on_the_way(client, wire_pb2.META_CREATE, late)
            creating = asyncio.ensure_future(vfs.create(ROOT_INODE, b"f", 0o644, os.O_RDWR, ME))
            await until(lambda: session_of(pool).opens)
            state = next(iter(vfs.meta.shards.values()))
            await until(lambda: state.doubts)
            await vfs.unlink(ROOT_INODE, b"f", ME)
            await asyncio.sleep(2 * LEASE_S)
            assert len(session_of(pool).opens) == 1 and state.doubts
            arrive.set()
            attr, handle = await creating
            assert await vfs.write(handle, 0, b"x") == 1
            await vfs.fsync(handle, True)
            await asyncio.sleep(LEASE_S)
            assert session_of(pool).opens == {attr.inode: 1} and not state.doubts
            await vfs.release(handle)
            await until(lambda: not session_of(pool).opens and not pool.meta.parts.collector.orphans)

    run(main())


def test_only_opens_with_the_same_count_are_given_up():
    freed = []
    sessions = Sessions(None, 60.0, on_free=freed.append)
    session = Session(1, SessionRecord(b"s" * 16, 0, "client", False, 0), 60.0)
    for inode in (5, 5, 6, 7):
        sessions.open(session, inode)
    assert handles_of(sessions.held(session, ())) == {5: 2, 6: 1, 7: 1}
    sessions.name_open(session, (5, 6, 7))
    session.opens[5] = 2
    sessions.give_up_all(session, {5: 1, 6: 1, 8: 1})
    assert session.opens == {5: 2, 7: 1} and freed == [6]
    sessions.give_up_all(session, {5: 2})
    assert session.opens == {7: 1} and freed == [6, 5]

    for inode in range(100, 100 + 2 * HELD_MAX):
        sessions.open(session, inode)
    assert not sessions.held(session, ()) and len(session.opens) > HELD_ALL_MAX
    assert handles_of(sessions.held(session, (7, 8, 101))) == {7: 1, 101: 1}
    held_bytes = sessions.held(session, range(100, 100 + 2 * HELD_MAX))
    assert len(handles_of(held_bytes)) == HELD_MAX
    for wrong in (held_bytes + b"x", held_bytes + held_bytes[:12]):
        with pytest.raises(InvalidRequest):
            handles_of(wrong)
    assert inodes_of(b"") == ()


def test_handles_of_one_inode_are_given_up_in_one_step():
    freed = []
    sessions = Sessions(None, 60.0, on_free=freed.append)
    session = Session(1, SessionRecord(b"s" * 16, 0, "client", False, 0), 60.0)
    sessions.open(session, 5)
    session.opens[5] = 10**12
    sessions.give_up_all(session, {5: 10**12})
    assert not session.opens and freed == [5]


def test_service_accepts_the_largest_lists_of_a_client():
    assert RENEW_INODES_MAX <= LISTED_INODES_MAX
    assert NAMES_MAX <= LIST_LIMIT_MAX


# -- quota reservations in a volume -------------------------------------------------------------------------------------


@asynccontextmanager
async def volume():
    async with pool_and_client() as (pool, client):
        fs = AsyncFileSystem(client, ME)
        made = await fs.volumes.create("v", bytes_max=1 << 20)

        async def all_is_released() -> bool:
            return not (await fs.volumes.show("v")).bytes_reserved

        yield pool, client, made.inode, all_is_released


def test_reservation_of_an_interrupted_write_is_released():
    async def main() -> None:
        async with volume() as (pool, client, directory, all_is_released):
            vfs, asked = client.vfs, []

            async def stuck(send):
                reply = await send()
                if not asked:
                    asked.append(reply)
                    await asyncio.sleep(60)
                return reply

            on_the_way(client, wire_pb2.META_VOLUME_ROOM, stuck)
            _, handle = await vfs.create(directory, b"f", 0o644, os.O_RDWR, ME)
            writing = asyncio.ensure_future(vfs.write(handle, 0, b"x" * 1000))
            await until(lambda: asked)
            assert not await all_is_released()
            writing.cancel()
            await asyncio.wait([writing])
            await until(all_is_released)
            assert await vfs.write(handle, 0, b"x" * 1000) == 1000
            await vfs.release(handle)
            await until(all_is_released)

    run(main())


@pytest.mark.parametrize("late_method", ["META_VOLUME_ROOM", "META_REPORT"])
def test_reservations_are_released_despite_late_replies(late_method):
    """Late replies to reports reserve counted bytes once more; a writer comes during a late release."""

    async def main() -> None:
        async with volume() as (pool, client, directory, all_is_released):
            vfs = client.vfs

            async def late(send):
                reply = await send()
                await asyncio.sleep(1.2)
                return reply

            on_the_way(client, getattr(wire_pb2, late_method), late)
            for number in range(4):
                _, handle = await vfs.create(directory, b"f%d" % number, 0o644, os.O_RDWR, ME)
                for offset in range(0, 3000, 1000):
                    assert await vfs.write(handle, offset, b"x" * 1000) == 1000
                    await vfs.fsync(handle, True)
                await vfs.release(handle)
                await asyncio.sleep(0.2)
            await until(all_is_released)
            await until(lambda: not vfs.rooms.reservations)

    run(main())
