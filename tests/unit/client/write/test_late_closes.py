"""Late closes: a close completes before the stores have the data, and other clients see all of it nevertheless."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.client.vfs.takeover import PredecessorFile
from nvpool.client.write import late_closes
from nvpool.core.errors import NoSpace
from nvpool.core.ids import ROOT_INODE
from nvpool.meta.server.service import MetaOptions
from nvpool.meta.sessions import lease_table
from nvpool.rpc.v1.wire_pb2 import DATA_WRITE
from nvpool.shm.mount_state import KeptMemory
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(1000, 1000)
OPTIONS = ClientOptions(deadline_s=20.0, fresh_s=0.0, attr_s=0.0, release_s=0.01, short_circuit=False)
WATCHES = MetaOptions(watch_s=30.0)
"""A recall that is not acknowledged would be waited for so long that the test would end first."""
CONTENT = os.urandom(9000)


class HeldPool(InProcessPool):
    """A pool whose stores take no write while `held` is a list: it has the calls."""

    held: list | None = None
    refused: Exception | None = None

    async def listen(self, role: str, number: int, handler) -> None:
        def handle(call) -> None:
            if call.method == DATA_WRITE and self.refused is not None:
                call.fail(self.refused)
            elif call.method == DATA_WRITE and self.held is not None:
                call.payload = bytes(call.payload)
                self.held.append((handler, call))
            else:
                handler(call)

        await super().listen(role, number, handle)

    def hold(self) -> None:
        self.held = []

    def let_go(self) -> None:
        waiting, self.held = self.held or [], None
        for handler, call in waiting:
            handler(call)


class Case:
    def __init__(self, pool: HeldPool, memory: KeptMemory, one: Client, other: Client) -> None:
        self.pool, self.memory, self.client = pool, memory, one
        self.one, self.other = one.vfs, other.vfs

    async def written(self, name: bytes = b"new", content: bytes = CONTENT) -> FileHandle:
        _, handle = await self.one.create(ROOT_INODE, name, 0o644, os.O_RDWR, ME)
        await self.one.write(handle, 0, content)
        return handle

    async def closed(self, name: bytes = b"new") -> FileHandle:
        """A file whose close has completed while the stores are held."""
        handle = await self.written(name)
        await within(self.one.flush(handle))
        return handle


async def within(work, seconds: float = 10.0):
    return await asyncio.wait_for(work, seconds)


async def is_waiting(work: asyncio.Task) -> bool:
    await asyncio.sleep(0.1)
    return not work.done()


async def read_all(vfs, name: bytes) -> bytes:
    attr = await vfs.lookup(ROOT_INODE, name)
    handle = await vfs.open(attr.inode, os.O_RDONLY, ME)
    try:
        return bytes(await vfs.read(handle, 0, 1 << 20))
    finally:
        await vfs.release(handle)


@asynccontextmanager
async def case(options: ClientOptions = OPTIONS, keeps: bool = True) -> AsyncIterator[Case]:
    descriptor = KeptMemory.make(1 << 24)
    try:
        async with HeldPool(meta_options=WATCHES) as pool:
            memory = KeptMemory(descriptor)
            one = await pool.client("one", options, kept=memory if keeps else None)
            other = await pool.client("other", options)
            for client in (one, other):
                await client.vfs.getattr(ROOT_INODE)  # a session with a watch
            while keeps and not one.vfs.parts.late_closes.has_room():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            yield Case(pool, memory, one, other)
            pool.refused = None
            pool.let_go()
    finally:
        os.close(descriptor)


async def find(vfs) -> int:
    return (await vfs.lookup(ROOT_INODE, b"new")).size


async def examine_by_number(vfs, inode: int) -> int:
    return (await vfs.getattr(inode)).size


async def list_with_attributes(vfs) -> int:
    handle = await vfs.opendir(ROOT_INODE)
    listed, _ = await vfs.readdir(handle, 0, 100)
    await vfs.releasedir(handle)
    return listed.attr(listed.names.index(b"new")).size


async def open_by_create(vfs) -> int:
    attr, handle = await vfs.create(ROOT_INODE, b"new", 0o644, os.O_RDWR, ME)
    await vfs.release(handle)
    return attr.size


def test_close_completes_while_the_stores_are_silent():
    async def main() -> None:
        async with case() as here:
            here.pool.hold()
            handle = await here.closed()
            assert here.memory.writes.valid() and here.one.getattr_now(handle.inode) is None
            assert bytes(await within(here.one.read(handle, 0, 1 << 20))) == CONTENT
            releasing = asyncio.create_task(here.one.release(handle))
            assert await is_waiting(releasing), "an open handle stands for data that is not reported"
            here.pool.let_go()
            await within(releasing)
            assert not here.memory.writes.valid() and not here.one.writer.files
            assert await read_all(here.other, b"new") == CONTENT

    asyncio.run(main())


@pytest.mark.parametrize("see", [find, list_with_attributes, open_by_create])
def test_other_client_waits_for_the_data(see):
    async def main() -> None:
        async with case() as here:
            here.pool.hold()
            handle = await here.closed()
            seeing = asyncio.create_task(see(here.other))
            assert await is_waiting(seeing)
            here.pool.let_go()
            assert await within(seeing) == len(CONTENT)
            await here.one.release(handle)

    asyncio.run(main())


def test_attributes_by_number_wait_for_the_data():
    async def main() -> None:
        async with case() as here:
            here.pool.hold()
            handle = await here.closed()
            seeing = asyncio.create_task(examine_by_number(here.other, handle.inode))
            assert await is_waiting(seeing)
            here.pool.let_go()
            assert await within(seeing) == len(CONTENT)

    asyncio.run(main())


def test_listing_recalls_all_files_of_a_directory_together():
    async def main() -> None:
        async with case() as here:
            here.pool.hold()
            for number in range(late_closes.LATE_MAX // 2):
                await here.closed(b"%d" % number)
            handle, watches = await here.other.opendir(ROOT_INODE), here.pool.meta.parts.watches
            before = watches.recalled
            listing = asyncio.create_task(here.other.readdir(handle, 0, 100))
            assert await is_waiting(listing)
            here.pool.let_go()
            listed, _ = await within(listing)
            assert [listed.attr(at).size for at in range(len(listed.names))] == [len(CONTENT)] * len(
                listed.names
            )
            assert watches.recalled - before == late_closes.LATE_MAX // 2

    asyncio.run(main())


def test_after_a_recall_the_next_close_waits():
    async def main() -> None:
        async with case() as here:
            handle = await here.written()
            assert await find(here.other) in (0, len(CONTENT))  # open: what others see is not promised yet
            here.pool.hold()
            await here.one.write(handle, len(CONTENT), b"more")
            closing = asyncio.create_task(here.one.flush(handle))
            assert await is_waiting(closing)
            here.pool.let_go()
            await within(closing)
            assert await read_all(here.other, b"new") == CONTENT + b"more"

    asyncio.run(main())


def test_after_the_first_report_the_next_close_waits():
    async def main() -> None:
        async with case() as here:
            handle = await here.written()
            await here.one.fsync(handle, False)
            here.pool.hold()
            await here.one.write(handle, len(CONTENT), b"more")
            closing = asyncio.create_task(here.one.flush(handle))
            assert await is_waiting(closing)
            here.pool.let_go()
            await within(closing)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "keeps"), [(OPTIONS._replace(late_closes=False), True), (OPTIONS, False)]
)
def test_close_waits_where_it_must(options, keeps):
    async def main() -> None:
        async with case(options, keeps) as here:
            here.pool.hold()
            handle = await here.written()
            closing = asyncio.create_task(here.one.flush(handle))
            assert await is_waiting(closing)
            here.pool.let_go()
            await within(closing)

    asyncio.run(main())


def test_late_closes_are_bounded():
    async def main() -> None:
        async with case() as here:
            here.pool.hold()
            for number in range(late_closes.LATE_MAX):
                await here.closed(b"%d" % number)
            handle = await here.written(b"one too many")
            closing = asyncio.create_task(here.one.flush(handle))
            assert await is_waiting(closing)
            here.pool.let_go()
            await within(closing)

    asyncio.run(main())


def test_file_without_a_delegation_gets_no_lease(monkeypatch):
    monkeypatch.setattr(lease_table, "DELEGATED_MAX", 1)

    async def main() -> None:
        async with case() as here:
            first = await here.written(b"first")
            second = await here.written(b"second")
            assert here.one.leases.held(first.inode) and not here.one.leases.held(second.inode)
            assert first.file.delegation is not None and second.file.delegation is None

    asyncio.run(main())


def test_later_error_is_logged_and_meets_the_next_user(caplog):
    async def main() -> None:
        async with case() as here:
            here.pool.hold()
            handle = await here.closed()
            here.pool.refused = NoSpace("no target of the chain has room")
            held, here.pool.held = here.pool.held, None
            for _, call in held:
                call.fail(here.pool.refused)
            with caplog.at_level(logging.ERROR):
                await within(here.one.release(handle))
            assert "was closed, and its data cannot be stored" in caplog.text
            here.pool.refused = None
            again = await here.one.open(handle.inode, os.O_RDWR, ME)
            with pytest.raises(NoSpace):
                await here.one.fsync(again, False)
            await here.one.fsync(again, False)
            await here.one.release(again)
            third = await here.written(b"third")
            here.pool.hold()
            await here.one.write(third, 0, b"later")
            closing = asyncio.create_task(here.one.flush(third))
            assert await is_waiting(closing), "closes wait again where the stores refuse writes"
            here.pool.let_go()
            await within(closing)

    asyncio.run(main())


def test_restarted_shard_shows_nothing_before_the_data_is_reported():
    async def main() -> None:
        async with case() as here:
            here.pool.hold()
            handle = await here.closed()
            await here.pool.stop_shard()
            await here.pool.start_shard()
            seeing = asyncio.create_task(find(here.other))
            await asyncio.sleep(0.5)
            assert not seeing.done()
            here.pool.let_go()
            assert await within(seeing, 20.0) == len(CONTENT)
            await here.one.release(handle)

    asyncio.run(main())


def test_successor_reports_before_it_watches():
    async def main() -> None:
        async with case() as here:
            here.pool.hold()
            handle = await here.closed()
            memory, here.pool.held = here.memory, []  # what was on its way is lost
            await here.one.meta.close(0.0, say_so=False)
            successor = await here.pool.client("one", OPTIONS, kept=memory)
            opened = [PredecessorFile(0, handle.inode, os.O_RDWR)]
            taking = asyncio.create_task(successor.vfs.take_over(opened))
            seeing = asyncio.create_task(find(here.other))
            handles = await within(taking)
            assert await is_waiting(seeing)
            here.pool.let_go()
            assert await within(seeing) == len(CONTENT)
            await successor.vfs.release(handles[0])

    asyncio.run(main())


def test_close_waits_in_a_pool_that_is_nearly_full(monkeypatch):
    monkeypatch.setattr(late_closes, "ROOM_SHARE", 1.1)
    monkeypatch.setattr(late_closes, "ROOM_S", 0.05)

    async def main() -> None:
        async with case(keeps=False) as here:
            late = late_closes.LateCloses(
                here.one.writer, here.one.leases, here.one.clock, here.one.parts.tasks, True
            )
            late.use_room(here.one.space.statfs_of_pool)
            for _ in range(20):
                assert not late.has_room()
                await asyncio.sleep(0.01)
            monkeypatch.setattr(late_closes, "ROOM_SHARE", 0.05)
            async with asyncio.timeout(10.0):
                while not late.has_room():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    asyncio.run(main())
