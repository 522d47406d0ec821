"""Checks, dumps and loads of a pool of several shards: references between shards, and one consistent snapshot of all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from nvpool.core.ids import ROOT_INODE
from nvpool.meta.state import records
from nvpool.meta.state.striped_dirs import decode_part, encode_part
from nvpool.poolmap.shards.partitions import partition_of_name
from nvpool.sdk.admin.daemon_calls import AdminCalls
from nvpool.sdk.dump import dump, load
from nvpool.sdk.fsck.check import FsckReport, check_metadata
from nvpool.sdk.fsck.directory_loops import DirectoryLoops
from nvpool.testing.fakes.in_process_pool import InProcessPool
from tests.unit.meta.transactions.test_cross_shard_transactions import ME, OPTIONS, CrossShardNames


async def checked(names: CrossShardNames, repair: bool = False) -> FsckReport:
    found = FsckReport()
    await check_metadata(names.pool.clients[0], found, repair=repair)
    return found


class Planted:
    """A directory and a file of shard 3, both named in a directory of shard 2, and ways to damage them."""

    def __init__(self, names: CrossShardNames) -> None:
        self.names = names

    async def begin(self) -> Planted:
        names, at = self.names, self.names.at
        self.dir = await names.directory(3, at[2], b"x")
        self.inside = await names.file(self.dir, b"inside", b"kept")
        self.file = await names.file(at[3], b"file", b"bytes")
        await names.vfs.rename(at[3], b"file", at[2], b"file", 0, ME)
        self.name = next(name for name, inode in (await names.names(at[2])).items() if inode == self.dir)
        await names.quiet()
        return self

    def key(self, name: bytes) -> bytes:
        view = self.names.pool.metas[2].parts.view
        return view.place(view.directory(self.names.at[2]), name)[2]

    def put(self, shard: int, *effects: tuple[bytes, bytes | None]) -> None:
        self.names.pool.kvs[shard].apply(list(effects))

    def change(self, shard: int, number: int, **fields) -> None:
        inode = self.names.pool.metas[shard].parts.view.inode(number)
        for field, value in fields.items():
            setattr(inode, field, value)
        self.put(shard, (records.inode_key(number), records.encode_inode(inode)))

    def lose_names(self) -> None:
        self.put(2, (self.key(self.name), None), (self.key(b"file"), None))
        self.change(2, self.names.at[2], size=0, links=2)

    def lose_inode(self) -> None:
        self.put(3, (records.inode_key(self.file), None))

    def miscount_links(self) -> None:
        self.change(3, self.file, links=3)

    def misplace(self) -> None:
        self.change(3, self.dir, parent=self.names.at[1])


DAMAGE = {
    "names are lost": Planted.lose_names,
    "an inode is lost": Planted.lose_inode,
    "links are miscounted": Planted.miscount_links,
    "a directory names another parent": Planted.misplace,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_between_shards_is_found_and_repaired(damage: Callable[[Planted], None]):
    async def main() -> None:
        async with CrossShardNames() as names:
            planted = await Planted(names).begin()
            assert not (await checked(names)).problems
            damage(planted)
            found = await checked(names)
            assert found.problems and found.unrepaired == found.found
            again = await checked(names)  # a check without repair changes nothing
            assert {problem.text for problem in again.problems} == {
                problem.text for problem in found.problems
            }
            for _ in range(3):
                if not (await checked(names, repair=True)).problems:
                    break
            await names.quiet()
            assert not (await checked(names)).problems
            other = (await names.pool.client("after", OPTIONS)).vfs
            assert (await other.getattr(planted.inside)).links == 1
            top = await names.names(ROOT_INODE)
            if damage is Planted.lose_names:
                lost = await names.names(top[b"lost+found"])
                assert set(lost.values()) == {planted.dir, planted.file}
                assert await names.content(planted.file) == b"bytes"
            elif damage is Planted.lose_inode:
                assert b"file" not in await names.names(names.at[2])

    asyncio.run(main())


def test_check_during_cross_shard_renames_finds_no_problem():
    async def main() -> None:
        async with CrossShardNames() as names:
            for number in range(9):
                await names.file(names.at[number % 3 + 1], b"f%d" % number)
            stop = asyncio.Event()

            async def move(number: int) -> None:
                place = number % 3
                while not stop.is_set():
                    to = (place + 1) % 3
                    await names.vfs.rename(
                        names.at[place + 1], b"f%d" % number, names.at[to + 1], b"f%d" % number, 0, ME
                    )
                    place = to

            moving = [asyncio.ensure_future(move(number)) for number in range(9)]
            for _ in range(5):
                assert not (await checked(names)).problems
            stop.set()
            await asyncio.gather(*moving)
            await names.quiet()
            assert not (await checked(names)).problems

    asyncio.run(main())


async def entries(vfs, directory: int) -> list[int]:
    """The inodes that have names in the directory, striped or not."""
    opened, cursor, more, found = await vfs.opendir(directory), 0, True, []
    while more:
        listed, more = await vfs.readdir(opened, cursor, 1000)
        found += listed.inodes
        cursor = listed.cursor(-1) if more else 0
    return found


class Chain:
    """Nested directories on alternating shards with a file in the last one; `close` puts the first below the last."""

    def __init__(self, names: CrossShardNames, spread: bool) -> None:
        self.names = names
        self.spread = spread

    async def begin(self) -> Chain:
        names = self.names
        self.dirs = [await names.directory(2, ROOT_INODE, b"first")]
        for shard in (3, 1, 2):
            self.dirs.append(await names.directory(shard, self.dirs[-1], b"next"))
        if self.spread:
            made = await names.vfs.mkdir(self.dirs[-1], b"wide", 0o755, ME, wide=True)
            self.dirs.append(made.inode)
        self.inside = await names.file(self.dirs[-1], b"inside", b"kept")
        await names.quiet()
        return self

    def _meta(self, inode: int):
        return self.names.pool.metas[self.names.vfs.meta.shard_of(inode)]

    def _put(self, inode: int, **fields: int) -> None:
        meta = self._meta(inode)
        now = meta.parts.view.inode(inode)
        for field, value in fields.items():
            setattr(now, field, value)
        meta.parts.kv.apply([(records.inode_key(inode), records.encode_inode(now))])

    def close(self) -> None:
        """Each name, count and parent is consistent, but the root is not their ancestor."""
        first, last = self.dirs[0], self.dirs[-1]
        root, below = (self._meta(inode).parts.view.inode(inode) for inode in (ROOT_INODE, last))
        pool = self.names.pool
        for kv in pool.kvs.values():
            for key, raw in kv.scan(b"\0", b"\x80", 10_000):
                if records.kind_of(key) == records.DENTRY:
                    named, _ = records.decode_dentry(records.partition_of_key(key), raw)
                    kv.apply([(key, None)] if named == first else [])
        view = self._meta(last).parts.view
        name_hash = view.name_hash(last, b"up")
        partition = partition_of_name(last, self.spread, name_hash)
        holder = pool.kvs[pool.pool_map.shard_of_partition[partition]]
        holder.apply(
            [
                (
                    records.dentry_key(partition, last, name_hash, b"up"),
                    records.encode_dentry(partition, first, 4),
                )
            ]
        )
        self._put(ROOT_INODE, size=root.size - 1, links=root.links - 1)
        self._put(last, size=below.size + 1, links=below.links + 1)
        self._put(first, parent=last)


@pytest.mark.parametrize("spread", [False, True], ids=["plain", "wide"])
def test_directory_loop_across_shards_is_found_and_repaired(spread: bool):
    async def main() -> None:
        async with CrossShardNames() as names:
            chain = await Chain(names, spread).begin()
            assert not (await checked(names)).problems
            chain.close()
            for _ in range(2):
                found = (await checked(names)).problems
                assert [(problem.kind, problem.repaired) for problem in found] == [("loop", False)], found
            mended = (await checked(names, repair=True)).problems
            assert [(problem.kind, problem.repaired) for problem in mended] == [("loop", True)], mended
            await names.quiet()
            found = (await checked(names)).problems
            assert not found, found
            vfs = (await names.pool.client("after", OPTIONS)).vfs
            lost = (await vfs.lookup(ROOT_INODE, b"lost+found")).inode
            (loose,) = (await names.names(lost)).values()
            place = chain.dirs.index(loose)
            for inode in (
                chain.dirs[place + 1 :] + chain.dirs[:place]
            ):  # all of them are below the one that was detached
                assert inode in await entries(vfs, loose)
                loose = inode
            assert await names.content(chain.inside) == b"kept"

    asyncio.run(main())


def test_apparent_loop_during_renames_is_no_problem(monkeypatch):
    """Parents that were read at different moments are traced twice before a loop is reported."""

    async def main() -> None:
        async with CrossShardNames() as names:
            a = await names.directory(2, ROOT_INODE, b"a")
            b = await names.directory(3, ROOT_INODE, b"b")
            climbs = DirectoryLoops(names.pool.clients[0], AdminCalls(names.pool.clients[0]))

            async def both_ways() -> dict[int, int]:
                return {a: b, b: a}

            monkeypatch.setattr(climbs, "climb", both_ways)
            assert [problem async for problem in climbs.loops(repair=True)] == []

    asyncio.run(main())


def test_stripe_with_wrong_attributes_is_found_and_repaired():
    async def main() -> None:
        async with CrossShardNames() as names:
            wide = (await names.vfs.mkdir(ROOT_INODE, b"wide", 0o750, ME, wide=True)).inode
            for number in range(40):
                await names.file(wide, b"%d" % number)
            await names.quiet()
            assert not (await checked(names)).problems
            kv = next(kv for kv in names.pool.kvs.values() if kv.scan(*records.part_range(), 1))
            key, raw = kv.scan(*records.part_range(), 1)[0]
            part = decode_part(key, raw)
            part.mode, part.gid = 0o40777, 12
            kv.apply([(key, encode_part(part))])
            assert [(one.kind, one.repaired) for one in (await checked(names)).problems] == [("part", False)]
            assert [(one.kind, one.repaired) for one in (await checked(names, repair=True)).problems] == [
                ("part", True)
            ]
            await names.quiet()
            assert not (await checked(names)).problems
            seen = await (await names.pool.client("after", OPTIONS)).vfs.getattr(wide)
            assert seen.size == 40 and seen.mode == 0o40750 and seen.gid == ME.gid

    asyncio.run(main())


def test_dump_under_load_is_one_consistent_snapshot(tmp_path):
    """Files move between directories of different shards, followed by a link and a second name; the dump never has a later name
    of a client without its earlier ones."""

    async def main() -> None:
        paths = [str(tmp_path / f"dump-{number}") for number in range(4)]
        async with CrossShardNames() as names:
            at, stop = names.at, False
            inodes = {number: await names.file(at[number % 3 + 1], b"f%d" % number) for number in range(9)}

            async def move(number: int) -> None:
                place, linked, vfs = (
                    number % 3,
                    None,
                    (await names.pool.client(f"mover {number}", OPTIONS)).vfs,
                )
                while not stop:
                    to = (place + 1) % 3
                    await vfs.rename(at[place + 1], b"f%d" % number, at[to + 1], b"f%d" % number, 0, ME)
                    await vfs.link(inodes[number], at[place + 1], b"link-%d" % number, ME)
                    if linked:
                        await vfs.unlink(linked, b"link-%d" % number, ME)
                    place, linked = to, at[place + 1]

            async def follow(number: int) -> None:
                vfs, turn = (await names.pool.client(f"follower {number}", OPTIONS)).vfs, 0
                while not stop:
                    for shard in at:
                        attr, handle = await vfs.create(
                            at[shard], b"step-%d-%d" % (number, turn), 0o644, os.O_RDWR, ME
                        )
                        await vfs.release(handle)
                        turn += 1

            async with asyncio.TaskGroup() as group:
                for number in inodes:
                    group.create_task(move(number))
                for number in range(2):
                    group.create_task(follow(number))
                for path in paths:
                    await dump(names.pool.clients[0], path)
                stop = True
        for path in paths:
            async with InProcessPool(shards=3) as pool:
                client = await pool.client("loads", OPTIONS)
                loaded = await load(client, path)
                assert not loaded.problems, loaded.problems
                found: dict[bytes, list[int]] = {}
                for place in at.values():
                    listed, more = await client.vfs.readdir(await client.vfs.opendir(place), 0, 100_000)
                    assert not more
                    for name, inode in zip(listed.names, listed.inodes, strict=True):
                        found.setdefault(name, []).append(inode)
                for number, inode in inodes.items():
                    assert found[b"f%d" % number] == [inode]
                    links = found.get(b"link-%d" % number, [])
                    assert set(links) <= {inode} and len(links) <= 2
                    assert (await client.vfs.getattr(inode)).links == 1 + len(links)
                for number in range(2):
                    turns = sorted(
                        int(name.split(b"-")[2]) for name in found if name.startswith(b"step-%d-" % number)
                    )
                    assert turns == list(range(len(turns)))

    asyncio.run(main())


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_dump_is_loaded_into_a_pool_of_any_shard_count(shards: int, tmp_path):
    async def main() -> None:
        path = str(tmp_path / "dump")
        async with CrossShardNames() as names:
            planted = await Planted(names).begin()
            before = {
                inode: await names.names(inode) for inode in (ROOT_INODE, *names.at.values(), planted.dir)
            }
            count = await dump(names.pool.clients[0], path)
        async with InProcessPool(shards=shards) as pool:
            client = await pool.client("loads", OPTIONS)
            loaded = await load(client, path)
            assert not loaded.left and not loaded.problems
            assert loaded.records == count or shards != 3
            for directory, names_there in before.items():
                listed, _ = await client.vfs.readdir(await client.vfs.opendir(directory), 0, 1000)
                assert dict(zip(listed.names, listed.inodes, strict=True)) == names_there
            await client.vfs.mkdir(planted.dir, b"new", 0o755, ME)
            files = sum(meta.parts.view.inode_count for meta in pool.metas.values())
            seen = await client.vfs.statfs()
            assert files == seen.files_total - seen.files_free

    asyncio.run(main())
