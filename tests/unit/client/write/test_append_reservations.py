"""Appends of two clients against a real shard: a reader sees a record completely or not at all, and none that failed."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import NoSpace, NvpoolError, WritesLost
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB, MIB
from nvpool.rpc.v1 import wire_pb2
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.store import PlainStore

ME = Caller(1000, 1000)
FAST = ClientOptions(deadline_s=20.0, fresh_s=0.0, attr_s=0.0, release_s=0.01)


class Case:
    """Clients `one` and `two` of a pool with in-memory stores, and a file that both have open for appending."""

    async def __aenter__(self) -> Case:
        self.chunks: dict[int, dict] = {}
        self.pool = InProcessPool(make_store=self.make)
        await self.pool.__aenter__()
        self.one, self.two = [(await self.pool.client(name, FAST)).vfs for name in ("one", "two")]
        self.inode = (await self.one.create(ROOT_INODE, b"log", 0o644, os.O_WRONLY, ME))[0].inode
        self.first, self.second = [
            await vfs.open(self.inode, os.O_RDWR | os.O_APPEND, ME) for vfs in (self.one, self.two)
        ]
        return self

    async def make(self, pool: InProcessPool, target: int) -> PlainStore:
        return PlainStore(target, pool.grant_secret, chunks=self.chunks.setdefault(target, {}))

    async def __aexit__(self, *failure) -> None:
        self.fault_writes(None)
        await self.pool.__aexit__(*failure)

    def fault_writes(self, fault) -> None:
        """Set what stores do with writes: raise an error, or wait so many seconds before the reply; None: neither."""

        def act(call):
            if call.method != wire_pb2.DATA_WRITE or fault is None:
                return None
            if isinstance(fault, NvpoolError):
                raise fault
            return fault

        for store in self.pool.stores.values():
            store.fault = act

    async def content(self, vfs) -> bytes:
        """What a process reads that opens the file now."""
        handle = await vfs.open(self.inode, os.O_RDONLY, ME)
        try:
            return bytes(await vfs.read(handle, 0, 8 * MIB))
        finally:
            await vfs.release(handle)


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def test_append_is_visible_only_completely():
    async def main() -> None:
        async with Case() as case:
            case.fault_writes(0.3)
            await case.one.write(case.first, 0, b"record\n")
            assert await case.content(case.one) == b"record\n"
            found = set()
            for _ in range(10_000):
                found.add(await case.content(case.two))
                if b"record\n" in found:
                    break
                await asyncio.sleep(0.005)
            assert found == {b"", b"record\n"}

    run(main())


@pytest.mark.parametrize("length", [40, 5000, MIB + 9000])
def test_readers_see_a_prefix_during_concurrent_appends(length):
    async def main() -> None:
        async with Case() as case:
            records = 20 if length < MIB else 3

            async def append(vfs, handle, mark: bytes) -> None:
                for _ in range(records):
                    await vfs.write(handle, 0, mark * length)

            case.fault_writes(0.002)
            writing = asyncio.gather(append(case.one, case.first, b"a"), append(case.two, case.second, b"b"))
            while not writing.done():
                for vfs in (case.one, case.two):
                    assert not (await case.content(vfs)).count(0)
                await asyncio.sleep(0.001)
            await writing
            for vfs, handle in ((case.one, case.first), (case.two, case.second)):
                await vfs.flush(handle)
            content = await case.content(case.one)
            assert (
                sorted(content[at : at + length] for at in range(0, len(content), length))
                == [b"a" * length] * records + [b"b" * length] * records
            )

    run(main())


def test_refused_append_leaves_the_file_unchanged():
    async def main() -> None:
        async with Case() as case:
            await case.one.write(case.first, 0, b"kept\n")
            await case.one.fsync(case.first, False)
            for _ in range(3):
                case.fault_writes(NoSpace("the drive is full"))
                await case.one.write(case.first, 0, b"lost\n" * 5000)
                with pytest.raises(NoSpace):
                    await case.one.fsync(case.first, False)
                case.fault_writes(None)
                assert case.first.size == 5
            await case.one.write(case.first, 0, b"more\n")
            await case.one.flush(case.first)
            await case.two.write(case.second, 0, b"other\n")
            await case.two.flush(case.second)
            assert await case.content(case.two) == await case.content(case.one) == b"kept\nmore\nother\n"

    run(main())


def test_append_after_a_partly_refused_append():
    """A piece that was stored after a refused piece does not become content when the file grows over it."""

    async def main() -> None:
        async with Case() as case:
            await case.one.write(case.first, 0, b"k" * 100)
            await case.one.flush(case.first)
            refused = iter([True])

            def first_fails(call):
                if call.method == wire_pb2.DATA_WRITE and next(refused, False):
                    raise NoSpace("the drive is full")

            for store in case.pool.stores.values():
                store.fault = first_fails
            await case.one.write(case.first, 0, b"l" * (2 * MIB))
            with pytest.raises(NoSpace):
                await case.one.fsync(case.first, False)
            await case.one.write(case.first, 0, b"m" * 10)
            await case.one.flush(case.first)
            await case.one.setattr(case.inode, size=3 * MIB, caller=ME)
            assert await case.content(case.two) == (b"k" * 100 + b"m" * 10).ljust(3 * MIB, b"\0")

    run(main())


def test_interrupted_append_releases_its_reservation():
    async def main() -> None:
        async with Case() as case:
            await case.one.write(case.first, 0, b"one\n")
            send, decided = case.one.meta.send, asyncio.Event()

            async def losing(of, method, request, deadline_s):
                answer = await send(of, method, request, deadline_s)
                if method == wire_pb2.META_RESERVE:
                    decided.set()
                    await asyncio.Event().wait()
                return answer

            case.one.meta.send = losing
            writing = asyncio.create_task(case.one.write(case.first, 0, b"never\n"))
            await decided.wait()
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing
            case.one.meta.send = send
            await case.two.write(case.second, 0, b"two\n")
            await case.two.flush(case.second)
            await case.one.write(case.first, 0, b"three\n")
            await case.one.flush(case.first)
            assert await case.content(case.two) == b"one\ntwo\nthree\n"

    run(main())


def test_bytes_after_a_withdrawn_append_report_writes_lost():
    """Bytes that another descriptor wrote after a reserved place are truncated when the reservation is released."""

    async def main() -> None:
        async with Case() as case:
            handle = await case.one.open(case.inode, os.O_WRONLY, ME)
            await case.one.write(handle, 1000, b"plain")
            case.one.writer.withdraw(handle.file, 0)
            with pytest.raises(WritesLost):
                await case.one.flush(handle)
            await case.one.write(case.first, 0, b"record")
            await case.one.flush(case.first)
            assert await case.content(case.two) == await case.content(case.one) == b"record"

    run(main())


def test_remote_truncation_discards_an_append_in_flight():
    """As by logrotate with copytruncate: earlier appends are discarded with the rest, and no hole remains in their place."""

    async def main() -> None:
        async with Case() as case:
            await case.one.write(case.first, 0, b"old\n" * 100)
            await case.one.flush(case.first)
            case.fault_writes(0.2)
            await case.one.write(case.first, 0, b"on its way\n")
            await case.two.setattr(case.inode, size=0, caller=ME)
            case.fault_writes(None)
            await case.one.write(case.first, 0, b"new\n")
            await case.one.flush(case.first)
            assert await case.content(case.two) == await case.content(case.one) == b"new\n"

    run(main())


def test_own_truncation_cuts_an_append_in_flight():
    async def main() -> None:
        async with Case() as case:
            await case.one.write(case.first, 0, b"0123456789")
            await case.one.setattr(case.inode, size=4, caller=ME)
            await case.one.write(case.first, 0, b"ab")
            await case.one.flush(case.first)
            assert await case.content(case.two) == b"0123ab"

    run(main())


def test_reported_end_never_covers_missing_bytes():
    """A sequential writer whose second piece is stored before its first."""

    async def main() -> None:
        async with Case() as case:
            handle = await case.one.open(case.inode, os.O_WRONLY, ME)
            delays = iter([0.5])

            def first_is_slow(call):
                return next(delays, None) if call.method == wire_pb2.DATA_WRITE else None

            for store in case.pool.stores.values():
                store.fault = first_is_slow
            await case.one.write(handle, 0, b"x" * (2 * MIB))
            await asyncio.sleep(0.2)
            await case.one.writer.settle(handle.file)
            assert not (await case.content(case.two)).count(0)
            await case.one.flush(handle)
            assert await case.content(case.two) == b"x" * (2 * MIB)

    run(main())


def test_bytes_written_past_the_end_precede_an_append():
    async def main() -> None:
        async with Case() as case:
            handle = await case.one.open(case.inode, os.O_WRONLY, ME)
            await case.one.write(handle, 100, b"plain")
            await case.one.write(case.first, 0, b"record")
            await case.one.flush(handle)
            assert await case.content(case.two) == bytes(100) + b"plainrecord"

    run(main())


def test_cleared_append_flag_writes_at_the_given_offset():
    async def main() -> None:
        async with Case() as case:
            await case.one.write(case.first, 0, b"0123456789")
            await case.one.write(case.first, 2, b"AB", False)
            assert await case.one.append(case.first, b"end") == 10
            await case.one.flush(case.first)
            assert await case.content(case.two) == b"01AB456789end"

    run(main())


def test_appends_of_many_tasks_are_not_mixed():
    async def main() -> None:
        async with Case() as case:

            async def append(number: int) -> None:
                for _ in range(10):
                    await case.one.write(case.first, 0, bytes([65 + number]) * (4 * KIB + 17))

            await asyncio.gather(*map(append, range(8)))
            await case.one.flush(case.first)
            content, length = await case.content(case.two), 4 * KIB + 17
            assert sorted(content[at : at + length] for at in range(0, len(content), length)) == [
                bytes([65 + number]) * length for number in range(8) for _ in range(10)
            ]

    run(main())
