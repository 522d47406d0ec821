"""Volumes in migrating partitions: quotas hold, and rights, trash and seal move along."""

from __future__ import annotations

import asyncio
import errno

import pytest

from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import QuotaExceeded, ReadOnly
from nvpool.core.ids import partition_of
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.sdk.fsck.check import check_metadata
from nvpool.sdk.fsck.report import FsckReport
from tests.unit.meta.migration.test_partition_migration import OPTIONS, Moving, run

ROOT = Caller(0, 0)
QUOTA, PIECE = 2_000_000, 10_000


def holder(moving: Moving, inode: int) -> int:
    return moving.pool.pool_map.shard_of_partition[partition_of(inode)]


async def all_away(moving: Moving) -> int:
    """Move all partitions to a new shard."""
    first = next(iter(moving.pool.metas))
    new = await moving.add()
    await moving.request(first, "remove")
    await moving.settled()
    return new


async def finds_nothing(moving: Moving) -> None:
    found = FsckReport()
    await check_metadata(moving.client, found)
    assert not found.found, found.problems


def test_quota_reservations_hold_after_a_migration():
    async def main(moving: Moving) -> None:
        one = AsyncFileSystem(moving.client, ROOT)
        other = AsyncFileSystem(await moving.pool.client("other", OPTIONS), ROOT)
        made = await one.volumes.create("v", bytes_max=1_000_000)
        async with await one.open("/volumes/v/f", "wb") as file:
            await file.write(0, b"x" * 900_000)
            shown = await other.volumes.show("v")
            assert shown.bytes_used + shown.bytes_reserved >= 900_000
            new = await all_away(moving)
            assert holder(moving, made.inode) == new
            # the second client waits there until the first has reported its reservations again
            with pytest.raises(OSError) as refused:
                await other.write_bytes("/volumes/v/g", b"y" * 200_000)
            assert (
                refused.value.errno == errno.EDQUOT and (await other.stat("/volumes/v/g")).st_size <= 100_000
            )
            await file.flush()
        assert (await one.stat("/volumes/v/f")).st_size == 900_000
        assert (await one.volumes.show("v")).bytes_used <= 1_000_000
        await finds_nothing(moving)

    run(main)


def test_writers_stay_within_the_quota_of_a_migrating_volume():
    async def main(moving: Moving) -> None:
        systems = [
            AsyncFileSystem(moving.client, ROOT),
            AsyncFileSystem(await moving.pool.client("other", OPTIONS), ROOT),
        ]
        made = await systems[0].volumes.create("v", bytes_max=QUOTA, trash_s=3600)
        await moving.add()
        seen, taken = set(), [0, 0]

        async def fill(number: int, fs: AsyncFileSystem) -> None:
            async with await fs.open(f"/volumes/v/{number}", "wb") as file:
                while True:
                    try:
                        taken[number] += await fs.vfs.write(file.handle, taken[number], b"x" * PIECE)
                    except QuotaExceeded:
                        return
                    await asyncio.sleep(0.02)

        async def to_and_fro() -> None:
            for request in ("remove", "share", "remove"):
                await moving.request(1, request)
                await moving.settled()
                seen.add(holder(moving, made.inode))
                await asyncio.sleep(
                    1
                )  # some bytes are reserved again meanwhile, but the reservation has not expired

        await asyncio.gather(to_and_fro(), *(fill(number, fs) for number, fs in enumerate(systems)))
        assert seen >= {2}
        assert QUOTA - QUOTA // 8 <= sum(taken) <= QUOTA
        assert (await systems[0].volumes.show("v")).bytes_used == sum(taken)
        await finds_nothing(moving)

    run(main)


def test_rights_trash_and_seal_are_migrated():
    async def main(moving: Moving) -> None:
        fs = AsyncFileSystem(moving.client, ROOT)
        await fs.volumes.create("kept", files_max=3, trash_s=3600)
        await fs.write_bytes("/volumes/kept/f", b"1" * 1000)
        await fs.remove("/volumes/kept/f")
        await fs.volumes.create("sealed")
        await fs.write_bytes("/volumes/sealed/f", b"1")
        await fs.volumes.seal("sealed")
        await fs.volumes.create("listed")
        await fs.volumes.grant("listed", "client/reader.0a1b2c3d", "ro")
        before = await fs.volumes.list()
        await all_away(moving)
        assert await fs.volumes.list() == before
        assert [one.grants for one in before if one.name == "listed"] == [{"client/reader.0a1b2c3d": "ro"}]
        with pytest.raises(OSError) as found:
            await fs.write_bytes("/volumes/sealed/g", b"1")
        assert found.value.errno == ReadOnly.errno
        entries = await fs.volumes.trash("kept")
        assert [entry.path for entry in entries] == ["/volumes/kept/f"]
        await fs.volumes.restore("kept", entries[0].inode)
        assert await fs.read_bytes("/volumes/kept/f") == b"1" * 1000
        for name in ("a", "b"):
            await fs.mkdir(f"/volumes/kept/{name}")
        with pytest.raises(OSError) as found:
            await fs.mkdir("/volumes/kept/c")
        assert found.value.errno == errno.EDQUOT
        await finds_nothing(moving)

    run(main)
