"""Directories of which many names were looked up in no order: the client lists them, and misses no change."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.vfs import lookup_prefetch
from nvpool.client.vfs.lookup_prefetch import SHARE, LookupPrefetch
from nvpool.core.errors import CorruptFrame, NotFound
from nvpool.core.grants import GRANT_BYTES
from nvpool.core.ids import ROOT_INODE
from nvpool.meta.server.service import MetaOptions
from nvpool.meta.state.volume_records import LISTED, VolumeRecord
from nvpool.rpc.messages.direntries import DirectoryPage, pack_entry
from nvpool.rpc.v1.meta_pb2 import Attr
from nvpool.testing.fakes.in_process_pool import InProcessPool
from tests.unit.client.state.test_small_file_cache import EXACT, ME, Case, get, put, run
from tests.unit.client.vfs.test_lookup_batcher import outcome_of

META = MetaOptions(watch_s=30.0)


@pytest.fixture(autouse=True)
def only_by_name(monkeypatch):
    """Disable prefetching of successive names: these tests are about look-ups in no order."""
    monkeypatch.setattr(lookup_prefetch, "MISSES_MIN", 1 << 30)


async def filled(vfs, count: int, parent: int = ROOT_INODE, **named) -> tuple[int, list[bytes]]:
    there = (await vfs.mkdir(parent, b"there", 0o755, ME, **named)).inode
    names = [b"%d" % number for number in range(count)]
    for name in names:
        await put(vfs, name, b"content of " + name, there)
    random.Random(1).shuffle(names)
    return there, names


async def find(vfs, parent: int, name: bytes):
    attr = vfs.lookup_now(parent, name)
    if attr is not None:
        return attr
    asked = vfs.begin_lookup(parent, name)
    return await (vfs.lookup(parent, name) if asked is None else outcome_of(asked))


async def settled(vfs) -> None:
    while vfs.parts.tasks.running:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_listing_follows_look_ups_of_an_eighth_of_the_names():
    async def main() -> None:
        async with Case(EXACT, META) as case:
            there, names = await filled(case.other, 400)
            await case.one.getattr(there)

            async def look(some: list[bytes]) -> None:
                for name in some:
                    assert (await find(case.one, there, name)).size == len(b"content of " + name)

            _, sent = await case.counted(look(names[:64]))
            assert sent["META_LOOKUP_MANY"] == 64
            await settled(case.one)
            assert case.pool.sent["META_LIST"] == 4

            async def read(some: list[bytes]) -> None:
                for name in some:
                    handle = case.one.open_now((await find(case.one, there, name)).inode, os.O_RDONLY)
                    part = case.one.begin_read(handle, 0, 4096)
                    assert bytes(await outcome_of(part)) == b"content of " + name
                    assert case.one.release_now(handle)

            _, sent = await case.counted(read(names))
            assert sent == {"DATA_READ": 400}
            with pytest.raises(NotFound):
                await find(case.one, there, b"nothing")

    run(main())


def test_listed_files_without_a_grant_get_one():
    async def main() -> None:
        async with Case(EXACT, META) as case:
            there, names = await filled(case.other, 400)
            await case.one.getattr(there)
            listed, _ = await case.one.readdir(await case.one.opendir(there), 0, 50)
            known = listed.names
            inodes = {name: (await find(case.one, there, name)).inode for name in known}
            assert len(known) >= 20 and all(map(case.one.leases.lacks_grant, inodes.values()))
            changed, other = known[0], known[1]
            for name in [name for name in names if name not in inodes][:64]:
                await find(case.one, there, name)
            await put(case.other, changed, b"changed meanwhile", there)
            await settled(case.one)
            for name in known[2:]:
                assert not case.one.leases.lacks_grant(inodes[name])

            async def read(some: list[bytes]) -> None:
                for name in some:
                    handle = case.one.open_now(inodes[name], os.O_RDONLY)
                    assert (
                        bytes(await outcome_of(case.one.begin_read(handle, 0, 4096))) == b"content of " + name
                    )
                    assert case.one.release_now(handle)

            _, sent = await case.counted(read(known[2:]))
            assert sent == {"DATA_READ": len(known) - 2}
            assert await get(case.one, changed, there) == b"changed meanwhile"
            assert await get(case.one, other, there) == b"content of " + other

    run(main())


def test_changes_of_others_are_seen_after_a_listing():
    async def main() -> None:
        async with Case(EXACT, META) as case:
            there, names = await filled(case.other, 200)
            await case.one.getattr(there)
            for name in names[:64]:
                await find(case.one, there, name)
            while not case.pool.sent["META_LIST"]:  # noqa: ASYNC110 - changes also come during the listing
                await asyncio.sleep(0)
            changes = {name: b"another" * (at % 3) for at, name in enumerate(names[50:80])}
            for name, content in changes.items():
                await put(case.other, name, content, there)
            await case.other.unlink(there, names[81], ME)
            await case.other.rename(there, names[82], there, names[83], 0, ME)
            await settled(case.one)
            await put(case.other, names[90], b"later", there)
            await case.other.unlink(there, names[91], ME)
            for name, content in {
                **changes,
                names[83]: b"content of " + names[82],
                names[90]: b"later",
            }.items():
                assert await get(case.one, name, there) == content
            for name in (names[81], names[82], names[91]):
                with pytest.raises(NotFound):
                    await find(case.one, there, name)
            assert case.pool.meta.parts.watches.waited_out == 0

    run(main())


def test_open_and_dirty_files_are_not_changed_by_a_listing():
    async def main() -> None:
        async with Case(EXACT, META) as case:
            there, names = await filled(case.other, 200)
            handle = await case.one.open((await case.one.lookup(there, names[100])).inode, os.O_RDWR, ME)
            await case.one.write(handle, 0, b"x" * 100)
            await case.one.getattr(there)
            for name in names[:64]:
                await find(case.one, there, name)
            await settled(case.one)
            assert case.pool.sent["META_LIST"] == 2
            assert (await find(case.one, there, names[100])).size == 100
            assert bytes(await case.one.read(handle, 0, 1000)) == b"x" * 100
            await case.one.release(handle)
            assert await get(case.other, names[100], there) == b"x" * 100

    run(main())


def test_small_or_uncacheable_directory_is_not_listed():
    async def main() -> None:
        for options, count in ((EXACT._replace(cached_entries=400), 200), (EXACT, 60)):
            async with Case(options, META) as case:
                there, names = await filled(case.other, count)
                await case.one.getattr(there)
                case.pool.sent.clear()
                for name in names:
                    await find(case.one, there, name)
                await settled(case.one)
                assert not case.pool.sent["META_LIST"]

    run(main())


def test_files_without_grants_in_the_listing_are_looked_up():
    async def main() -> None:
        async with Case(EXACT, META) as case:
            there, names = await filled(case.other, 200)
            # a volume with its own rights
            case.pool.meta.parts.view.access.restricted[1 << 40] = VolumeRecord("other", flags=LISTED)
            await case.one.getattr(there)
            case.pool.sent.clear()
            for name in names:
                assert (await find(case.one, there, name)).size
            await settled(case.one)
            assert 1 <= case.pool.sent["META_LIST"] <= 3 and case.pool.sent["META_LOOKUP_MANY"] == 200

    run(main())


def test_missing_names_do_not_list_a_directory_repeatedly():
    async def main() -> None:
        async with Case(ClientOptions(leases=True, fresh_s=0.0, attr_s=0.0), META) as case:
            there, _ = await filled(case.other, 100)
            await case.one.getattr(there)
            case.pool.sent.clear()
            for number in range(1500):
                with pytest.raises(NotFound):
                    await find(case.one, there, b"no %d" % number)
            await settled(case.one)
            assert 1 <= case.pool.sent["META_LIST"] <= 4

    run(main())


def test_several_directories_are_each_listed():
    async def main() -> None:
        async with Case(EXACT, META) as case:
            places = []
            for number in range(2):
                above = (await case.other.mkdir(ROOT_INODE, b"above %d" % number, 0o755, ME)).inode
                there, names = await filled(case.other, 100, above)
                await case.one.getattr(there)
                places.append([(there, name) for name in names])
            case.pool.sent.clear()
            for pair in zip(*places, strict=True):
                for there, name in pair:
                    await find(case.one, there, name)
            await settled(case.one)
            assert case.pool.sent["META_LIST"] == 2 and case.pool.sent["META_LOOKUP_MANY"] < 120

    run(main())


@pytest.mark.parametrize("shards", [1, 3])
def test_striped_directory_is_listed_at_all_its_shards(shards):
    async def main() -> None:
        async with InProcessPool(shards=shards, meta_options=META) as pool:
            other, one = (await pool.client()).vfs, (await pool.client()).vfs
            there, names = await filled(other, 300, wide=True)
            await one.getattr(ROOT_INODE)
            await one.getattr(there)
            for shard in one.meta.shards.values():
                assert shard.session
            for name in names:
                assert (await find(one, there, name)).size == len(b"content of " + name)
            await settled(one)
            for name in names:
                assert await get(one, name, there) == b"content of " + name

    run(main())


def test_stopped_shard_leaves_no_error():
    async def main() -> None:
        async with Case(EXACT._replace(deadline_s=0.2), META) as case:
            there, names = await filled(case.other, 200)
            await case.one.getattr(there)
            for name in names[:31]:
                await find(case.one, there, name)
            case.one.begin_lookup(there, names[31]).cancel()
            assert case.one.parts.tasks.running
            await case.pool.stop_shard()
            await settled(case.one)
            await case.pool.start_shard()
            assert (await find(case.one, there, names[40])).size

    run(main())


def test_share_rises_after_a_useless_listing():
    class Clock:
        @staticmethod
        def boottime_s() -> float:
            return 1.0

    known = LookupPrefetch(Clock(), lambda *_: None)
    assert not known.is_to_be_known(1, 0)

    def missed(count: int) -> None:
        for number in range(count):
            known.missed_alone(1, b"%d" % number)

    missed(99)
    assert not known.is_to_be_known(1, 800)
    missed(1)
    assert known.is_to_be_known(1, 800) and not known.is_to_be_known(1, 800)
    missed(800)
    assert not known.is_to_be_known(1, 800)  # the listing is in progress
    known.went_through(1, 800)
    for _ in range(400):
        known.hit(1, b"x")
    missed(100)
    assert known.is_to_be_known(1, 800)  # half of the listing was used
    known.went_through(1, 800)
    missed(100)
    assert not known.is_to_be_known(1, 800)
    missed(300)
    assert known.is_to_be_known(1, 800) and known.directories[1].share == SHARE / 4


def test_grants_of_a_listing_belong_to_its_leased_files():
    entries = [
        (Attr(inode=1, mode=0o100644), True),
        (Attr(inode=2, mode=0o040755), True),
        (Attr(inode=3, mode=0o100644), False),
        (Attr(inode=4, mode=0o100600), True),
    ]
    listed = DirectoryPage(
        b"".join(pack_entry(at, attr, promised, b"n%d" % at) for at, (attr, promised) in enumerate(entries))
    )
    first, last = b"\1" * GRANT_BYTES, b"\2" * GRANT_BYTES
    assert listed.grants(first + last) == [first, b"", b"", last]
    for odd in (first, first + last + b"x", first + last + last, b""):
        with pytest.raises(CorruptFrame):
            listed.grants(odd)
    part = listed.only([1, 3])
    assert (part.names, part.inodes, part.changes, part.promised) == ([b"n1", b"n3"], [2, 4], [0, 0], 2)
    assert part.records[1] == listed.records[3] and len(part) == 2 and not listed.only([]).names
