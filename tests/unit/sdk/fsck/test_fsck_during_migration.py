"""Checks of a pool while partitions migrate under a load of name changes: no false problems, real damage found and repaired."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from nvpool.core.ids import ROOT_INODE, partition_of
from nvpool.meta.state import records
from nvpool.sdk.fsck.check import check_metadata
from nvpool.sdk.fsck.report import FsckReport
from tests.unit.meta.migration.test_partition_migration import ME, OPTIONS, Moving, run

WAIT_S = 120.0


@pytest.fixture(autouse=True)
def many_steps(monkeypatch):
    """A check of a small pool takes as many steps as one of a large pool, so that partitions migrate during it."""
    monkeypatch.setattr("nvpool.sdk.fsck.metadata.RECORDS_A_STEP", 15)


async def checked(moving: Moving, repair: bool = False) -> FsckReport:
    found = FsckReport()
    await check_metadata(moving.client, found, repair=repair)
    return found


def given(moving: Moving) -> int:
    return sum(meta.moving.source.given for meta in moving.pool.metas.values())


async def to_and_fro(moving: Moving) -> None:
    """Move a third of the partitions to the third shard, and back."""
    for request in ("share", "remove"):
        await moving.request(3, request)
        await moving.settled()


async def while_moving(moving: Moving, look: Callable[[], Awaitable[None]], times: int = 3) -> None:
    """Call `look` while partitions migrate, until `times` calls had a migration in their middle."""
    looked = 0
    if 3 not in moving.pool.metas:
        await moving.add()

    async def go() -> None:
        while looked < times:
            await to_and_fro(moving)

    async with asyncio.TaskGroup() as group:
        going = group.create_task(go())
        while looked < times and not going.done():
            before = given(moving)
            await look()
            looked += given(moving) != before


class Load:
    """Creates, renames, links and unlinks in all directories, until `stop`."""

    def __init__(self, moving: Moving, vfs, number: int) -> None:
        self.moving, self.vfs, self.number = moving, vfs, number
        self.stop, self.turns = False, 0

    async def run(self) -> None:
        vfs, places = self.vfs, self.moving.directories
        while not self.stop:
            self.turns += 1
            here, there = (places[(self.number * step + self.turns) % len(places)] for step in (3, 5))
            name = b"%d-%d" % (self.number, self.turns)
            attr, handle = await vfs.create(here, name, 0o644, os.O_RDWR | os.O_EXCL, ME)
            await vfs.release(handle)
            made = await vfs.mkdir(here, b"dir-" + name, 0o755, ME)
            await vfs.rename(here, b"dir-" + name, there, b"to-" + name, 0, ME)
            await vfs.link(attr.inode, made.inode, b"link", ME)
            await vfs.rename(here, name, made.inode, b"moved", 0, ME)
            await vfs.unlink(made.inode, b"link", ME)
            await vfs.unlink(made.inode, b"moved", ME)
            await vfs.rmdir(there, b"to-" + name, ME)


@pytest.mark.t3
def test_check_under_load_during_migration_finds_nothing():
    async def main(moving: Moving) -> None:
        await moving.fill()
        loads = [Load(moving, (await moving.pool.client(f"client {n}", OPTIONS)).vfs, n) for n in range(3)]

        async def look() -> None:
            found = await checked(moving)
            assert not found.problems, found.problems

        async with asyncio.TaskGroup() as group:
            for load in loads:
                group.create_task(load.run())
            await while_moving(moving, look)
            for load in loads:
                load.stop = True
        assert min(load.turns for load in loads) > 1
        await look()
        await moving.check_with_new_client()

    run(main, shards=2)


class Damage:
    """Damage in many partitions of a pool, several of each kind; the problem's text does not depend on the shard."""

    def __init__(self, moving: Moving) -> None:
        self.moving = moving
        self.kept: list[int] = []

    def _meta(self, partition: int):
        return self.moving.pool.metas[self.moving.pool.pool_map.shard_of_partition[partition]]

    def _change(self, number: int, **fields) -> None:
        meta = self._meta(partition_of(number))
        inode = meta.parts.view.inode(number)
        for field, value in fields.items():
            setattr(inode, field, value)
        meta.parts.kv.apply([(records.inode_key(number), records.encode_inode(inode))])

    async def plant(self) -> None:
        places = self.moving.directories[1:]
        for directory in places[0::4]:
            self._change(self.moving.inodes[directory, b"f0"], links=4)
        for directory in places[1::4]:
            self._change(directory, parent=places[0])
        for directory in places[2::4]:
            number = self.moving.inodes[directory, b"f1"]
            self._change(number, flags=records.HAS_XATTRS)
            meta = self._meta(partition_of(directory))
            key = meta.parts.view.place(meta.parts.view.directory(directory), b"f2")[2]
            meta.parts.kv.apply([(key, None)])
            self._change(directory, size=2)
        for directory in places[3::4]:
            number = self.moving.inodes[directory, b"f0"]
            meta = self._meta(partition_of(number))
            meta.parts.kv.apply(
                [
                    (records.inode_key(number), None),
                    (records.COUNTS_KEY, records.encode_counts(meta.parts.view.inode_count - 1)),
                ]
            )
            meta.parts.view.inode_count -= 1


@pytest.mark.t3
def test_damage_is_found_and_repaired_during_migration():
    async def main(moving: Moving) -> None:
        await moving.fill(20)
        await Damage(moving).plant()
        expected = {(problem.kind, problem.text) for problem in (await checked(moving)).problems}
        assert len(expected) == 25 and {kind for kind, _ in expected} == {
            "links",
            "parent",
            "xattr",
            "dentry",
        }

        async def look() -> None:
            found = {(problem.kind, problem.text) for problem in (await checked(moving)).problems}
            assert found == expected, (found - expected, expected - found)

        await while_moving(moving, look)

        async def mend() -> None:
            await checked(moving, repair=True)

        await while_moving(moving, mend)
        found = await checked(moving)
        assert not found.problems, found.problems
        vfs = (await moving.pool.client("after", OPTIONS)).vfs
        for place, directory in enumerate(moving.directories[1:]):
            assert (await vfs.lookup(ROOT_INODE, b"d%d" % (place + 1))).inode == directory
            listed, _ = await vfs.readdir(await vfs.opendir(directory), 0, 1000)
            lost = {2: b"f2", 3: b"f0"}.get(place % 4)
            assert sorted(listed.names) == [name for name in (b"f0", b"f1", b"f2") if name != lost]

    run(main, shards=2)
