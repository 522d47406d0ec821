"""Cached contents of small files with locks, ended sessions and failed writes: no stale content is shown."""

from __future__ import annotations

import os

import pytest

from nvpool.core.errors import Disconnected, LockLost, NvpoolError
from nvpool.core.ids import ROOT_INODE
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, LAST_BYTE, SHARED, UNLOCKED
from tests.unit.client.state.test_small_file_cache import EXACT, ME, Case, get, put, run


def test_lock_discards_leases_and_content_from_before_it():
    async def main() -> None:
        async with Case() as case:
            inode = await put(case.other, b"file", b"a" * 100)
            handle = await case.one.open((await case.one.lookup(ROOT_INODE, b"file")).inode, os.O_RDONLY, ME)
            assert (
                bytes(await case.one.read(handle, 0, 100)) == b"a" * 100
                and case.one.read_now(handle, 0, 100) is not None
            )
            locker = await case.other.open(inode, os.O_RDWR, ME)
            for content in (
                b"b" * 100,
                b"c" * 50,
            ):  # written and truncated, and the writer keeps the file open
                assert case.one.reader.content(handle.file) is not None
                await case.other.setlk(locker, 1, 0, LAST_BYTE, EXCLUSIVE, wait=True)
                await case.other.setattr(inode, size=len(content), caller=ME, handle=locker)
                await case.other.write(locker, 0, content)
                await case.other.setlk(locker, 1, 0, LAST_BYTE, UNLOCKED)
                await case.one.setlk(handle, 1, 0, LAST_BYTE, SHARED, wait=True)
                assert case.one.leases.held(inode) is None and case.one.read_now(handle, 0, 100) is None
                assert bytes(await case.one.read(handle, 0, 100)) == content
                await case.one.setlk(handle, 1, 0, LAST_BYTE, UNLOCKED)
            await case.other.release(locker)
            await case.one.release(handle)

    run(main())


@pytest.mark.parametrize("locked", [False, True])
def test_content_is_dropped_when_a_session_ends(locked):
    async def main() -> None:
        async with Case() as case:
            inode = await put(case.other, b"file", b"a" * 100)
            handle = await case.one.open((await case.one.lookup(ROOT_INODE, b"file")).inode, os.O_RDONLY, ME)
            if locked:
                await case.one.setlk(handle, 1, 0, LAST_BYTE, SHARED)
            await case.one.read(handle, 0, 100)
            assert case.one.read_now(handle, 0, 100) is not None
            meta = case.pool.meta
            meta.session_handlers.end_session(
                meta.parts.sessions.get(case.one.meta.session_of(inode)), meta.parts.options.grant_s
            )
            await case.one.getattr(ROOT_INODE)  # learns that the session ended
            assert case.one.read_now(handle, 0, 100) is None and case.one.leases.held(inode) is None
            if locked:
                with pytest.raises(LockLost):
                    await case.one.read(handle, 0, 100)
            _, sent = await case.counted(get(case.one, b"file"))
            assert sent["DATA_READ"] == 1
            await case.one.release(handle)

    run(main())


def test_unreported_write_replaces_cached_content():
    async def main() -> None:
        async with Case(EXACT._replace(deadline_s=1.0)) as case:
            inode = await put(case.other, b"file", b"a" * 4096)
            assert await get(case.one, b"file") == b"a" * 4096
            handle = await case.one.open(inode, os.O_RDWR, ME)
            await case.one.write(handle, 0, b"b" * 4096)
            await case.one.writer.store(handle.file)
            case.one.meta.change, change = _fails, case.one.meta.change
            with pytest.raises(NvpoolError):
                await case.one.release(handle)
            case.one.meta.change = change
            assert await get(case.one, b"file") == b"b" * 4096

    run(main())


async def _fails(*arguments, **named):
    raise Disconnected("as when the shard is away")
