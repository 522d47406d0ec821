"""Checks, dumps and loads of a pool of several shards: what one of them can not tell of another's inodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from test_spanning import ME, OPTIONS, Names

from nvpool.base.ids import ROOT_INODE
from nvpool.meta import records
from nvpool.sdk import checkup as checking
from nvpool.sdk.checkup import Checkup, check_metadata
from nvpool.sdk.dumpfile import dump, load
from nvpool.testing.pool import LocalPool


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(checking, "AGAIN_S", 0.05)


async def checked(names: Names, repair: bool = False) -> Checkup:
    found = Checkup()
    await check_metadata(names.pool._clients[0], found, repair=repair)
    return found


class Planted:
    """A directory of shard 3 and a file of shard 3, both named in a directory of shard 2; and the means to do damage."""

    def __init__(self, names: Names) -> None:
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
        view = self.names.pool.metas[2]._view
        return view.place(view.directory(self.names.at[2]), name)[2]

    def put(self, shard: int, *effects: tuple[bytes, bytes | None]) -> None:
        self.names.pool.kvs[shard].apply(list(effects))

    def change(self, shard: int, number: int, **fields) -> None:
        inode = self.names.pool.metas[shard]._view.inode(number)
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


DAMAGE = {"names are lost": Planted.lose_names, "an inode is lost": Planted.lose_inode,
          "links are miscounted": Planted.miscount_links, "a directory names another parent": Planted.misplace}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_between_shards_is_found_and_mended(damage: Callable[[Planted], None]):
    async def main() -> None:
        async with Names() as names:
            planted = await Planted(names).begin()
            assert not (await checked(names)).problems
            damage(planted)
            found = await checked(names)
            assert found.problems and found.unrepaired == found.found
            again = await checked(names)  # to look changes nothing
            assert {problem.text for problem in again.problems} == {problem.text for problem in found.problems}
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


def test_a_check_while_names_move_between_shards_finds_nothing():
    async def main() -> None:
        async with Names() as names:
            for number in range(9):
                await names.file(names.at[number % 3 + 1], b"f%d" % number)
            stop = asyncio.Event()

            async def move(number: int) -> None:
                place = number % 3
                while not stop.is_set():
                    to = (place + 1) % 3
                    await names.vfs.rename(names.at[place + 1], b"f%d" % number, names.at[to + 1], b"f%d" % number, 0, ME)
                    place = to

            moving = [asyncio.ensure_future(move(number)) for number in range(9)]
            for _ in range(3):
                for problem in (await checked(names)).problems:
                    assert problem.kind == "links"  # what was seen in two walks while it moved both times
            stop.set()
            await asyncio.gather(*moving)
            await names.quiet()
            assert not (await checked(names)).problems
    asyncio.run(main())


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_a_dump_is_loaded_into_a_pool_of_any_division(shards: int, tmp_path):
    async def main() -> None:
        path = str(tmp_path / "dump")
        async with Names() as names:
            planted = await Planted(names).begin()
            before = {inode: await names.names(inode) for inode in (ROOT_INODE, *names.at.values(), planted.dir)}
            count = await dump(names.pool._clients[0], path)
        async with LocalPool(shards=shards) as pool:
            client = await pool.client("loads", OPTIONS)
            loaded = await load(client, path)
            assert not loaded.left and not loaded.problems
            assert loaded.records == count or shards != 3
            for directory, names_there in before.items():
                listed, _ = await client.vfs.readdir(await client.vfs.opendir(directory), 0, 1000)
                assert dict(zip(listed.names, listed.inodes, strict=True)) == names_there
            await client.vfs.mkdir(planted.dir, b"new", 0o755, ME)
            files = sum(meta._view.inode_count for meta in pool.metas.values())
            seen = await client.vfs.statfs()
            assert files == seen.files_total - seen.files_free
    asyncio.run(main())
