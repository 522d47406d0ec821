"""Striped directories: names on several shards, the records of each shard, and the combined attributes."""

from __future__ import annotations

import asyncio
import os
import stat

import pytest
from msgspec.structs import replace

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import RENAME_EXCHANGE, Caller
from nvpool.core.errors import (
    AlreadyExists,
    CorruptRecord,
    DirectoryNotEmpty,
    NotFound,
    Unavailable,
    WouldLoop,
)
from nvpool.core.ids import ROOT_INODE
from nvpool.meta.dump import line_of, record_of
from nvpool.meta.state import records
from nvpool.meta.state.striped_dirs import StripeCounts, decode_part, encode_part, part_of
from nvpool.poolmap.model import changed
from nvpool.poolmap.shards import partition_moves
from nvpool.poolmap.shards.partitions import partition_of_name
from nvpool.rpc.v1 import wire_pb2
from nvpool.sdk.dump import dump, load
from nvpool.sdk.fsck.check import FsckReport, check_metadata
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(1000, 1000)
OPTIONS = ClientOptions(deadline_s=60.0, fresh_s=0.0, attr_s=0.0)
SHARDS = (1, 2, 3)
PART_KEY = "802000280000000000090003"
PART_VALUE = (
    "010400ed4501000000020000000212fcffffffffffffff0100000000000000070000000000000008"
    "000000000000000000000000010000"
)
"""This number is part of the format."""


class Wide:
    """A pool of three shards with an empty striped directory, and two clients."""

    def __init__(self, shards: int = 3) -> None:
        self.pool = InProcessPool(shards=shards)

    async def __aenter__(self) -> Wide:
        await self.pool.__aenter__()
        self.vfs = (await self.pool.client("first", OPTIONS)).vfs
        self.other = (await self.pool.client("second", OPTIONS)).vfs
        self.inode = (await self.vfs.mkdir(ROOT_INODE, b"wide", 0o2755, ME, wide=True)).inode
        self.home = self.vfs.meta.shard_of(self.inode)
        return self

    async def __aexit__(self, *failure) -> None:
        await self.pool.__aexit__(*failure)

    def names_at(self, shard: int, count: int, prefix: bytes = b"") -> list[bytes]:
        """Names whose partitions that shard owns."""
        found, number = [], 0
        while len(found) < count:
            name = b"%s%d" % (prefix, number)
            number += 1
            if self.shard_of(name) == shard:
                found.append(name)
        return found

    def shard_of(self, name: bytes) -> int:
        partition = partition_of_name(self.inode, True, self.vfs.meta.name_hash(self.inode, name))
        return self.vfs.view.map.shard_of_partition[partition]

    async def make(self, name: bytes, vfs=None) -> int:
        vfs = vfs or self.vfs
        attr, handle = await vfs.create(self.inode, name, 0o644, os.O_RDWR | os.O_EXCL, ME)
        await vfs.release(handle)
        return attr.inode

    async def names(self, vfs=None, step: int = 1000) -> dict[bytes, int]:
        vfs = vfs or self.vfs
        directory, cursor, more, found = await vfs.opendir(self.inode), 0, True, []
        while more:
            listed, more = await vfs.readdir(directory, cursor, step)
            found += zip(listed.names, listed.inodes, strict=True)
            if more:
                cursor = listed.cursor(-1)
        assert len(dict(found)) == len(found)
        return dict(found)

    async def quiet(self) -> None:
        """Wait until no record is locked and no notification is pending."""
        async with asyncio.timeout(60):
            while not self._is_quiet():  # noqa: ASYNC110 (no notification)
                await asyncio.sleep(0.01)

    def _is_quiet(self) -> bool:
        found = [meta.parts.cross_shard.counters() for meta in self.pool.metas.values()]
        return not any(one["held"] or one["spans_to_tell"] for one in found)

    def spans(self) -> float:
        return sum(meta.parts.cross_shard.counters()["spans"] for meta in self.pool.metas.values())

    def parts(self) -> int:
        return sum(len(kv.scan(*records.part_range(), 100)) for kv in self.pool.kvs.values())


def run(main, **options) -> None:
    async def whole() -> None:
        async with Wide(**options) as wide:
            await main(wide)
            await wide.quiet()

    asyncio.run(whole())


def test_removed_shard_has_no_stripe_attributes():
    async def main(wide: Wide) -> None:
        vfs, meta = wide.vfs, wide.pool.metas[wide.home % 3 + 1]
        for shard in SHARDS:
            await wide.make(wide.names_at(shard, 1)[0])
        await vfs.getattr(wide.inode)
        asked: list = []
        for method in (wire_pb2.META_PARTS, wire_pb2.META_SYNC):
            meta.routes[method] = asked.append
        calls = [
            asyncio.create_task(call)
            for call in (vfs.parts.inodes.fetch(wide.inode), vfs.fsyncdir(wide.inode))
        ]
        async with asyncio.timeout(60):
            while len(asked) < len(calls):  # noqa: ASYNC110 (no notification)
                await asyncio.sleep(0.01)
        now = vfs.view.map
        vfs.view.offer(
            changed(
                now,
                shards=tuple(shard for shard in now.shards if shard.id != meta.parts.shard),
                partitions=tuple(
                    replace(part, shard=wide.home) if part.shard == meta.parts.shard else part
                    for part in now.partitions
                ),
            )
        )
        for call in asked:
            call.fail(Unavailable("it has left"))
        attr, _ = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert attr.size == 2  # the count of the other two shards

    run(main)


def test_names_and_inodes_are_created_on_their_own_shard():
    async def main(wide: Wide) -> None:
        vfs = wide.vfs
        await vfs.getattr(wide.inode)
        for shard in SHARDS:
            await wide.make(wide.names_at(shard, 1, b"first")[0])
        before, made = wide.spans(), {}
        for shard in SHARDS:
            for name in wide.names_at(shard, 5):
                made[name] = await wide.make(name)
                assert vfs.meta.shard_of(made[name]) == shard
                with pytest.raises(AlreadyExists):
                    await wide.make(name, wide.other)
        for name, inode in made.items():
            assert (await wide.other.lookup(wide.inode, name)).inode == inode
            attr = await vfs.lookup(wide.inode, name)
            assert attr.gid == 1000
        shard = next(shard for shard in SHARDS if shard != wide.home)
        old, new = wide.names_at(shard, 2, b"moved")
        inode = await wide.make(old)
        await vfs.rename(wide.inode, old, wide.inode, new, 0, ME)
        assert (await wide.other.lookup(wide.inode, new)).inode == inode
        with pytest.raises(NotFound):
            await wide.other.lookup(wide.inode, old)
        await vfs.unlink(wide.inode, new, ME)
        assert wide.spans() == before

    run(main)


def test_attributes_show_each_change_to_all_clients():
    async def main(wide: Wide) -> None:
        vfs, seen = wide.vfs, (await wide.vfs.getattr(wide.inode)).change
        count = 0
        for shard in SHARDS * 3:
            name = wide.names_at(shard, 1, b"%d-" % count)[0]
            await wide.make(name)
            count += 1
            mine, theirs = await vfs.getattr(wide.inode), await wide.other.getattr(wide.inode)
            assert mine.size == theirs.size == count and mine.change == theirs.change > seen
            assert mine.mtime_ns == theirs.mtime_ns == mine.ctime_ns
            seen = mine.change
        assert (await wide.other.lookup(ROOT_INODE, b"wide")).size == count
        listed, _ = await wide.other.readdir(await wide.other.opendir(ROOT_INODE), 0, 10)
        assert listed.attr(0).size == count
        for shard in SHARDS:
            await vfs.mkdir(wide.inode, wide.names_at(shard, 1, b"directory")[0], 0o755, ME)
        assert (await wide.other.getattr(wide.inode)).links == 5
        assert wide.parts() == 3

    run(main)


def test_counts_are_summed_across_shards():
    async def main(wide: Wide) -> None:
        for count, (one, other) in enumerate(((3, 1), (1, 3), (2, 1), (3, 2))):
            for number in range(2):
                old, new = (
                    wide.names_at(one, 1, b"%d-%d-" % (count, number))[0],
                    wide.names_at(other, 1, b"new%d" % number)[0],
                )
                await wide.make(old)
                await wide.vfs.rename(wide.inode, old, wide.inode, new, 0, ME)
                assert (await wide.other.getattr(wide.inode)).size == 1
                await wide.other.unlink(wide.inode, new, ME)
                assert (
                    (await wide.other.getattr(wide.inode)).size
                    == (await wide.vfs.getattr(wide.inode)).size
                    == 0
                )
                directory = wide.names_at(one, 1, b"directory")[0]
                await wide.vfs.mkdir(wide.inode, directory, 0o755, ME)
                await wide.vfs.rename(wide.inode, directory, wide.inode, new, 0, ME)
                await wide.other.rmdir(wide.inode, new, ME)
                assert (await wide.other.getattr(wide.inode)).links == 2

    run(main)


def test_missing_names_are_found_after_another_client_creates():
    async def main(wide: Wide) -> None:
        for shard in SHARDS:
            for round_ in (b"a", b"b"):
                name = wide.names_at(shard, 1, round_)[0]
                with pytest.raises(NotFound):
                    await wide.other.lookup(wide.inode, name)
                inode = await wide.make(name)
                assert (await wide.other.lookup(wide.inode, name)).inode == inode
                await wide.other.unlink(wide.inode, name, ME)
                with pytest.raises(NotFound):
                    await wide.vfs.lookup(wide.inode, name)

    run(main)


def test_setattr_applies_to_all_shards():
    async def main(wide: Wide) -> None:
        vfs = wide.vfs
        for shard in SHARDS:
            await wide.make(wide.names_at(shard, 1)[0])
        assert wide.parts()
        attr = await wide.other.setattr(wide.inode, mode=0o755, gid=7, mtime_ns=5, caller=ME)
        assert (attr.size, attr.mtime_ns, stat.S_IMODE(attr.mode)) == (3, 5, 0o755)
        found = await vfs.getattr(wide.inode)
        assert (found.size, found.mtime_ns, found.gid, found.change) == (3, 5, 7, attr.change)
        assert not wide.parts()
        await wide.other.setattr(wide.inode, mode=0o2755, caller=ME)
        for shard in SHARDS:
            await wide.make(wide.names_at(shard, 2)[1])
            assert (await vfs.lookup(wide.inode, wide.names_at(shard, 2)[1])).gid == 7
        assert (await vfs.getattr(wide.inode)).size == 6

    run(main)


def test_listing_covers_all_shards_during_changes():
    async def main(wide: Wide) -> None:
        kept = {b"kept%d" % number: await wide.make(b"kept%d" % number) for number in range(150)}
        assert {wide.shard_of(name) for name in kept} == set(SHARDS)
        assert await wide.names() == kept
        gone = [b"gone%d" % number for number in range(60)]
        for name in gone:
            await wide.make(name)
        directory, cursor, more, found = await wide.other.opendir(wide.inode), 0, True, []
        while more:
            listed, more = await wide.other.readdir(directory, cursor, 7)
            found += listed.names
            assert all(listed.attr(at).mode for at in range(len(listed)))
            if gone:
                await wide.vfs.unlink(wide.inode, gone.pop(), ME)
                await wide.make(b"new%d" % len(found))
            if more:
                cursor = listed.cursor(-1)
        assert len(set(found)) == len(found) and set(kept) <= set(found)
        await wide.vfs.fsyncdir(wide.inode)

    run(main)


def test_directory_is_removed_only_when_empty_on_all_shards():
    async def main(wide: Wide) -> None:
        vfs = wide.vfs
        for shard in SHARDS:
            name = wide.names_at(shard, 1)[0]
            await wide.make(name)
            for client in (vfs, wide.other):
                with pytest.raises(DirectoryNotEmpty):
                    await client.rmdir(ROOT_INODE, b"wide", ME)
            await vfs.unlink(wide.inode, name, ME)
        await wide.other.rmdir(ROOT_INODE, b"wide", ME)
        for shard in SHARDS:
            with pytest.raises(NotFound):
                await wide.make(wide.names_at(shard, 1)[0])
        assert not wide.parts()
        with pytest.raises(NotFound):
            await vfs.lookup(ROOT_INODE, b"wide")

    run(main)


def test_concurrent_removal_and_creates_have_one_winner():
    async def main(wide: Wide) -> None:
        for round_ in range(6):
            path = b"round%d" % round_
            wide.inode = (await wide.vfs.mkdir(ROOT_INODE, path, 0o755, ME, wide=True)).inode
            if round_ % 2:  # all shards have a stripe already
                for shard in SHARDS:
                    await wide.make(wide.names_at(shard, 1)[0])
                    await wide.vfs.unlink(wide.inode, wide.names_at(shard, 1)[0], ME)
            names = [wide.names_at(shard, 1)[0] for shard in SHARDS]
            removed, *made = await asyncio.gather(
                wide.other.rmdir(ROOT_INODE, path, ME), *map(wide.make, names), return_exceptions=True
            )
            if removed is None:
                assert all(isinstance(one, NotFound) for one in made), made
            else:
                assert isinstance(removed, DirectoryNotEmpty), removed
                there = {
                    name: inode for name, inode in zip(names, made, strict=True) if isinstance(inode, int)
                }
                assert there and await wide.names() == there

    run(main)


def test_names_are_renamed_into_out_of_and_within():
    async def main(wide: Wide) -> None:
        vfs = wide.vfs
        plain = (await vfs.mkdir(ROOT_INODE, b"plain", 0o755, ME)).inode
        count = 0
        for shard in SHARDS:
            name, directory, other = wide.names_at(shard, 3)
            inode = await wide.make(name)
            await vfs.rename(wide.inode, name, plain, b"out", 0, ME)
            assert (await vfs.lookup(plain, b"out")).inode == inode
            await vfs.rename(plain, b"out", wide.inode, name, 0, ME)
            await vfs.link(inode, wide.inode, other, ME)
            below = (await vfs.mkdir(wide.inode, directory, 0o755, ME)).inode
            count += 3
            with pytest.raises(WouldLoop):
                await vfs.rename(ROOT_INODE, b"wide", below, b"loop", 0, ME)
            with pytest.raises(DirectoryNotEmpty):
                await vfs.rename(ROOT_INODE, b"plain", ROOT_INODE, b"wide", 0, ME)
            await vfs.rename(wide.inode, directory, plain, b"directory", 0, ME)
            await vfs.rename(plain, b"directory", wide.inode, directory, 0, ME)
            await vfs.rename(wide.inode, name, wide.inode, directory, RENAME_EXCHANGE, ME)
            assert (await wide.other.lookup(wide.inode, name)).inode == below
            found = await wide.other.getattr(wide.inode)
            assert (found.size, found.links) == (count, 2 + SHARDS.index(shard) + 1)
        one, two = wide.names_at(1, 1, b"x")[0], wide.names_at(2, 1, b"x")[0]
        inode = await wide.make(one)
        await vfs.rename(wide.inode, one, wide.inode, two, 0, ME)
        assert (await wide.other.lookup(wide.inode, two)).inode == inode
        assert (await wide.other.getattr(wide.inode)).size == count + 1
        assert (await vfs.getattr(plain)).size == 0
        assert len(await wide.names()) == count + 1

    run(main)


def test_directory_becomes_striped_while_clients_use_it():
    async def main(wide: Wide) -> None:
        vfs = wide.vfs
        wide.inode = (await vfs.mkdir(ROOT_INODE, b"narrow", 0o755, ME)).inode
        await wide.other.lookup(ROOT_INODE, b"narrow")
        await wide.make(b"first")
        with pytest.raises(DirectoryNotEmpty):
            await vfs.spread(wide.inode, ME)
        await vfs.unlink(wide.inode, b"first", ME)
        await vfs.spread(wide.inode, ME)
        wide.other.stripes.forget_wide()
        made = {}
        for number in range(12):
            name = b"name%d" % number
            made[name] = await wide.make(name, (vfs, wide.other)[number % 2])
            wide.other.stripes.forget_wide()
            assert (await wide.other.lookup(wide.inode, name)).inode == made[name]
        assert {vfs.meta.shard_of(inode) for inode in made.values()} == set(SHARDS)
        assert await wide.names(wide.other) == await wide.names() == made
        assert (await vfs.getattr(wide.inode)).size == 12

    run(main)


def test_single_shard_pool_needs_no_stripes():
    async def main(wide: Wide) -> None:
        made = {b"%d" % number: await wide.make(b"%d" % number) for number in range(20)}
        assert await wide.names(wide.other, 3) == made and not wide.parts()
        assert (await wide.other.getattr(wide.inode)).size == 20
        with pytest.raises(DirectoryNotEmpty):
            await wide.vfs.rmdir(ROOT_INODE, b"wide", ME)
        for name in made:
            await wide.vfs.unlink(wide.inode, name, ME)
        await wide.vfs.rmdir(ROOT_INODE, b"wide", ME)

    run(main, shards=1)


def test_stripe_is_a_record_and_a_line_of_a_dump():
    part = part_of(
        5 << 51 | 9,
        3,
        StripeCounts(-4, 1, 7, 8, 1 << 40),
        mode=0o42755,
        uid=1,
        gid=2,
        table=2,
        chunk_bits=18,
        flags=records.WIDE,
    )
    key, raw = records.part_key(part.number, 3), encode_part(part)
    assert (key.hex(), raw.hex()) == (PART_KEY, PART_VALUE)
    found = decode_part(key, raw)
    assert found.counts == part.counts and found == part and found.shard == 3
    line = line_of(key, raw)
    assert line["type"] == "part" and record_of(line) == (key, raw)
    for bad in (raw[:-1], b"\2" + raw[1:]):
        with pytest.raises(CorruptRecord):
            decode_part(key, bad)


async def checked(wide: Wide, repair: bool = False) -> list[tuple[str, bool]]:
    client = await wide.pool.client()
    checkup = FsckReport()
    await check_metadata(client, checkup, repair=repair)
    return [(problem.kind, problem.repaired) for problem in checkup.problems]


def test_check_sums_stripes_and_repairs_wrong_counts():
    async def main(wide: Wide) -> None:
        for number in range(30):
            await wide.make(b"%d" % number)
        await wide.vfs.mkdir(wide.inode, b"directory", 0o755, ME)
        assert await checked(wide) == []
        shard = next(shard for shard in SHARDS if shard != wide.home)
        key = records.part_key(wide.inode, shard)
        part = decode_part(key, wide.pool.kvs[shard].get(key))
        part.size -= 100
        part.links += 1
        wide.pool.kvs[shard].apply([(key, encode_part(part))])
        assert await checked(wide) == [("counts", False)]
        assert await checked(wide, repair=True) == [("counts", True)]
        assert await checked(wide) == []
        found = await wide.other.getattr(wide.inode)
        assert (found.size, found.links) == (31, 3)
        wide.pool.kvs[shard].apply([(records.part_key(wide.inode, 9), encode_part(part)), (key, b"nothing")])
        assert await checked(wide, repair=True) == [("undecodable", True)] * 2
        assert await checked(wide) == []

    run(main)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_dump_keeps_the_directory_striped_for_any_shard_count(tmp_path, shards):
    path, made = str(tmp_path / "dump"), {}

    async def dumped(wide: Wide) -> None:
        for number in range(30):
            made[b"%d" % number] = await wide.make(b"%d" % number)
        await wide.vfs.mkdir(wide.inode, b"directory", 0o755, ME)
        assert wide.parts()
        await dump(await wide.pool.client(), path)

    async def loaded() -> None:
        wide = Wide(shards=shards)
        async with wide.pool:
            await load(await wide.pool.client(), path)
            wide.vfs = wide.other = (await wide.pool.client("first", OPTIONS)).vfs
            wide.inode = (await wide.vfs.lookup(ROOT_INODE, b"wide")).inode
            found = await wide.vfs.getattr(wide.inode)
            assert (found.size, found.links) == (31, 3)
            assert await checked(wide) == []
            assert (await wide.names()).items() > made.items()
            for name in made:
                await wide.vfs.unlink(wide.inode, name, ME)
            await wide.vfs.rmdir(wide.inode, b"directory", ME)
            assert await checked(wide) == []
            await wide.vfs.rmdir(ROOT_INODE, b"wide", ME)
            await wide.quiet()

    run(dumped)
    asyncio.run(loaded())


def test_shard_with_an_older_map_does_not_remove_the_directory():
    """Its map is older: a new shard has created a name that the shards of the older map do not know."""

    async def main() -> None:
        async with InProcessPool(shards=2, serves_map=True) as pool:
            vfs = (await pool.client("first", OPTIONS)).vfs
            decides, wide, number = vfs.meta.shard_of(ROOT_INODE), 0, 0
            while (
                not wide or vfs.meta.shard_of(wide) != decides
            ):  # it stays there: a deaf shard migrates no partitions
                number += 1
                removed = b"wide-%d" % number
                wide = (await vfs.mkdir(ROOT_INODE, removed, 0o755, ME, wide=True)).inode
            pool.deaf.add(decides)
            await pool.change_map(lambda now: partition_moves.shard_added(now, pool.new_shard(3)))
            await pool.start_shard(3)
            async with asyncio.timeout(60):
                while (  # noqa: ASYNC110
                    not pool.metas[3].moving.destination.taken
                    or pool.metas[3].moving.counters()["partitions_coming"]
                ):
                    await asyncio.sleep(0.01)
            owners = pool.pool_map.shard_of_partition
            assert 3 in owners and 3 not in pool.metas[decides].parts.view.shards
            other = (await pool.client("second", OPTIONS)).vfs
            await other.getattr(wide)
            name = next(
                name
                for name in map(str.encode, map(str, range(100_000)))
                if owners[partition_of_name(wide, True, vfs.meta.name_hash(wide, name))] == 3
            )
            _, handle = await other.create(wide, name, 0o644, os.O_RDWR | os.O_EXCL, ME)
            await other.release(handle)
            assert pool.kvs[3].scan(*records.part_range(), 1)
            removing = asyncio.create_task(vfs.rmdir(ROOT_INODE, removed, ME))
            while not removing.done() and not pool.metas[decides].parts.cross_shard.coordinator.begun_again:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not removing.done()
            pool.deaf.clear()
            pool.metas[decides].update_map(pool.pool_map)
            with pytest.raises(DirectoryNotEmpty):
                await asyncio.wait_for(removing, 60)
            assert (await vfs.lookup(wide, name)).inode

    asyncio.run(main())


def test_counted_name_that_no_shard_lists_keeps_the_directory():
    """Such as a name whose partition migrates between the queries of its owners."""

    async def main(wide: Wide) -> None:
        shard = next(shard for shard in SHARDS if shard != wide.home)
        await wide.vfs.getattr(wide.inode)
        (name,) = wide.names_at(shard, 1)
        await wide.make(name)
        name_hash = wide.vfs.meta.name_hash(wide.inode, name)
        key = records.dentry_key(partition_of_name(wide.inode, True, name_hash), wide.inode, name_hash, name)
        kv = wide.pool.kvs[shard]
        raw = kv.get(key)
        kv.apply([(key, None)])
        with pytest.raises(DirectoryNotEmpty):
            await wide.vfs.rmdir(ROOT_INODE, b"wide", ME)
        kv.apply([(key, raw)])
        await wide.vfs.unlink(wide.inode, name, ME)
        await wide.vfs.rmdir(ROOT_INODE, b"wide", ME)

    run(main)
