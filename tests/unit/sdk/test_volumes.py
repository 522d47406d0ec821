"""Volumes: a pool and its clients in one process, through the SDK."""

from __future__ import annotations

import asyncio
import errno
import itertools
import stat
from contextlib import asynccontextmanager

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.errors import CrossesVolumes, InUse, InvalidRequest, NoSpace, NotFound, QuotaExceeded
from nvpool.core.ids import partition_of
from nvpool.core.units import MIB
from nvpool.sdk.async_filesystem import AsyncFileSystem
from nvpool.testing.fakes.in_process_pool import InProcessPool

ROOT = Caller(0, 0)


@asynccontextmanager
async def pool_and_client(**options):
    async with InProcessPool(**options) as pool:
        client = await pool.client(options=ClientOptions(deadline_s=10.0))
        yield pool, AsyncFileSystem(client, ROOT)
        await client.close()


def refused(error_class, cause):
    """The OSError whose cause is that nvpool error."""
    assert isinstance(cause.value, OSError) and cause.value.errno == error_class.errno, cause.value
    assert isinstance(cause.value.__cause__, error_class)


def test_volume_is_created_shown_listed_and_removed():
    async def main():
        async with pool_and_client() as (pool, fs):
            assert await fs.volumes.list() == []
            made = await fs.volumes.create("scratch", bytes_max=10 * MIB, files_max=100)
            assert (
                made.name,
                made.path,
                made.bytes_max,
                made.files_max,
                made.bytes_used,
                made.files_used,
            ) == ("scratch", "/volumes/scratch", 10 * MIB, 100, 0, 0)
            assert (await fs.stat("/volumes/scratch")).st_ino == made.inode
            assert stat.S_IMODE((await fs.stat("/volumes/scratch")).st_mode) == 0o777
            assert await fs.volumes.show("scratch") == made
            assert await fs.volumes.create("scratch", bytes_max=10 * MIB, files_max=100) == made
            with pytest.raises(FileExistsError, match="files 100, not 7"):
                await fs.volumes.create("scratch", bytes_max=10 * MIB, files_max=7)
            with pytest.raises(FileExistsError, match="mode 777, not 700"):
                await fs.volumes.create("scratch", bytes_max=10 * MIB, files_max=100, mode=0o700)
            assert await fs.volumes.create("scratch", bytes_max=10 * MIB, files_max=100, mode=0o777) == made
            other = await fs.volumes.create("models", chunk_bytes=4 * MIB)
            assert [one.name for one in await fs.volumes.list()] == [
                "models",
                "scratch",
            ] and other.chunk_bytes == 4 * MIB
            assert await fs.volumes.remove("scratch") is None  # the volume was empty
            with pytest.raises(FileNotFoundError):
                await fs.volumes.show("scratch")
            with pytest.raises(FileNotFoundError):
                await fs.volumes.remove("scratch")
            assert await fs.list("/volumes") == ["models"]
            again = await fs.volumes.create("scratch")
            assert again.inode != made.inode and again.bytes_max == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/a",
        "../a",
        "a\0b",
        "-a",
        ".a",
        "ä",
        "A\u0301",
        "x" * 64,
        "x" * 10_000,
        "a b",
        "a\n",
        7,
        b"a",
        None,
    ],
)
def test_invalid_volume_name_is_refused_with_the_rule(name):
    async def main():
        async with pool_and_client() as (pool, fs):
            for act in (fs.volumes.create, fs.volumes.show, fs.volumes.remove, fs.volumes.seal):
                with pytest.raises(OSError, match="cannot be the name of a volume") as found:
                    await act(name)
                refused(InvalidRequest, found)
            assert not await fs.exists("/volumes")

    asyncio.run(main())


def test_directory_that_is_no_volume_is_refused():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.mkdir("/volumes/plain", parents=True)
            await fs.write_bytes("/volumes/note", b"x")
            for name, kind in (("plain", "directory"), ("note", "file")):
                error_text = f"/volumes/{name} is a {kind}, not a volume; rename it"
                with pytest.raises(FileExistsError, match=error_text):
                    await fs.volumes.create(name)
                for doing in (
                    fs.volumes.show(name),
                    fs.volumes.resize(name, files_max=1),
                    fs.volumes.remove(name),
                    fs.volumes.seal(name),
                    fs.volumes.trash(name),
                    fs.volumes.restore(name, 12345),
                    fs.volumes.purge(name),
                ):
                    with pytest.raises(FileNotFoundError, match=error_text):
                        await doing

    asyncio.run(main())


def test_entries_of_a_volume_share_its_partition_and_are_counted():
    async def main():
        async with pool_and_client() as (pool, fs):
            made = await fs.volumes.create("v")
            await fs.mkdir("/volumes/v/a/b/c", parents=True)
            await fs.write_bytes("/volumes/v/a/b/f", b"x" * 5000)
            await fs.symlink("f", "/volumes/v/a/b/l")
            await fs.link("/volumes/v/a/b/f", "/volumes/v/g")
            for path in ("/volumes/v/a", "/volumes/v/a/b", "/volumes/v/a/b/c", "/volumes/v/g"):
                assert partition_of((await fs.stat(path)).st_ino) == partition_of(made.inode)
            found = await fs.volumes.show("v")
            assert (found.files_used, found.bytes_used) == (5, 5000)
            await fs.truncate("/volumes/v/g", 1000)
            assert (await fs.volumes.show("v")).bytes_used == 1000
            await fs.truncate("/volumes/v/g", 3000)
            assert (await fs.volumes.show("v")).bytes_used == 3000
            await fs.remove("/volumes/v/g")
            assert (await fs.volumes.show("v")).files_used == 5
            await fs.remove("/volumes/v/a/b/f")
            await fs.vfs.meta.release_now(made.inode)
            found = await fs.volumes.show("v")
            assert (found.files_used, found.bytes_used) == (4, 0)
            await fs.remove("/volumes/v/a/b/l")
            await fs.rmdir("/volumes/v/a/b/c")
            assert (await fs.volumes.show("v")).files_used == 2

    asyncio.run(main())


def test_volumes_keep_their_names_and_moves_between_are_refused():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v")
            await fs.volumes.create("w")
            await fs.mkdir("/plain")
            await fs.write_bytes("/volumes/v/f", b"1")
            await fs.write_bytes("/plain/f", b"1")
            await fs.mkdir("/volumes/v/d")
            for act, source, target in (
                (fs.rename, "/volumes/v/f", "/plain/g"),
                (fs.rename, "/plain/f", "/volumes/v/g"),
                (fs.rename, "/volumes/v/f", "/volumes/w/f"),
                (fs.link, "/plain/f", "/volumes/v/g"),
                (fs.link, "/volumes/v/f", "/volumes/w/g"),
                (fs.link, "/volumes/v/f", "/plain/g"),
                (fs.rename, "/volumes/v/d", "/plain/d"),
                (fs.rename, "/plain/f", "/volumes/v/f"),
            ):
                with pytest.raises(OSError) as found:
                    await act(source, target)
                refused(CrossesVolumes, found)
            for act in (
                lambda: fs.rmdir("/volumes/v"),
                lambda: fs.rename("/volumes/v", "/volumes/x"),
                lambda: fs.rename("/plain", "/volumes/w"),
                lambda: fs.rename("/volumes/w", "/plain/w"),
            ):
                with pytest.raises(OSError) as found:
                    await act()
                refused(InUse, found)
            for act in (
                lambda: fs.rename("/volumes", "/elsewhere"),
                lambda: fs.rename("/volumes", "/plain/volumes"),
                lambda: fs.vfs.rename(1, b"volumes", 1, b"plain", 2, ROOT),
                lambda: fs.vfs.rename(1, b"plain", 1, b"volumes", 2, ROOT),
            ):
                with pytest.raises((OSError, InUse), match="keeps its name|busy"):
                    await act()
            await fs.mkdir("/plain/volumes")
            await fs.rename("/plain/volumes", "/plain/any")
            assert [one.name for one in await fs.volumes.list()] == ["v", "w"] and await fs.volumes.show("v")
            await fs.rename("/volumes/v/f", "/volumes/v/d/f")
            assert await fs.list("/volumes/v/d") == ["f"]
            with pytest.raises(OSError) as found:
                await fs.mkdir("/volumes/v/wide", wide=True)
            refused(InvalidRequest, found)
            attr = await fs.vfs.getattr((await fs.stat("/volumes/w")).st_ino)
            with pytest.raises(InvalidRequest):
                await fs.vfs.spread(attr.inode, ROOT)

    asyncio.run(main())


def test_file_quota_is_exact():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v", files_max=3)
            await fs.write_bytes("/volumes/v/a", b"")
            await fs.mkdir("/volumes/v/d")
            await fs.symlink("a", "/volumes/v/l")
            for act in (
                lambda: fs.write_bytes("/volumes/v/b", b""),
                lambda: fs.mkdir("/volumes/v/e"),
                lambda: fs.symlink("a", "/volumes/v/m"),
            ):
                with pytest.raises(OSError) as found:
                    await act()
                refused(QuotaExceeded, found)
                assert found.value.errno == errno.EDQUOT
            await fs.link("/volumes/v/a", "/volumes/v/d/a")  # no new inode
            assert (await fs.volumes.show("v")).files_used == 3
            with pytest.raises(OSError, match="holds 3 files"):
                await fs.volumes.resize("v", files_max=2)
            await fs.remove("/volumes/v/l")
            await fs.write_bytes("/volumes/v/b", b"")
            await fs.volumes.resize("v", files_max=0)
            await fs.mkdir("/volumes/v/e")

    asyncio.run(main())


def test_quota_error_suggests_to_purge_the_trash():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v", bytes_max=1_000_000, files_max=1, trash_s=60)
            await fs.write_bytes("/volumes/v/f", b"x" * 1_000_000)
            inode = (await fs.stat("/volumes/v/f")).st_ino
            await fs.remove("/volumes/v/f")
            error_text = "purge its trash.*nvpool trash purge"
            with pytest.raises(OSError, match=error_text):
                await fs.mkdir("/volumes/v/d")
            await fs.volumes.set("v", files_max=0)
            with pytest.raises(OSError, match=error_text):
                await fs.write_bytes("/volumes/v/g", b"y")
            with pytest.raises(OSError, match=error_text):
                await fs.truncate("/volumes/v/g", 1)
            await fs.volumes.purge("v", inode)
            await fs.write_bytes("/volumes/v/g", b"y")

    asyncio.run(main())


def test_nonempty_volume_is_removed_in_steps():
    async def main():
        async with pool_and_client() as (pool, fs):
            made = await fs.volumes.create("v")
            for d in range(3):
                await fs.mkdir(f"/volumes/v/{d}/deep", parents=True)
                for n in range(200):
                    await fs.write_bytes(f"/volumes/v/{d}/deep/{n}", b"")
            await fs.link("/volumes/v/0/deep/7", "/volumes/v/link")
            left = await fs.volumes.remove("v")
            assert left.state == "removing" and left.files_removing == 606
            assert await fs.list("/volumes") == [] and await fs.volumes.list() == []
            assert [one.inode for one in await fs.volumes.list(removing=True)] in ([made.inode], [])
            with pytest.raises(NotFound):
                await fs.vfs.lookup(made.inode, b"0")
            new = await fs.volumes.create("v", files_max=5)
            assert new.inode != made.inode
            for _ in range(100):
                if await fs.volumes.removing(made.inode) is None:
                    break
                await pool.meta.remove_more()
            assert await fs.volumes.removing(made.inode) is None
            assert [one.inode for one in await fs.volumes.list(removing=True)] == [new.inode]

    asyncio.run(main())


def test_volume_in_use_is_not_removed():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v")
            await fs.volumes.attach("v", "docker/one")
            assert (await fs.volumes.attach("v", "docker/one")).attachments == ("docker/one",)
            assert set((await fs.volumes.attach("v", "docker/two")).attachments) == {
                "docker/one",
                "docker/two",
            }
            with pytest.raises(OSError, match="docker/one") as found:
                await fs.volumes.remove("v")
            refused(InUse, found)
            await fs.volumes.detach("v", "docker/one")
            assert (await fs.volumes.detach("v", "docker/one")).attachments == ("docker/two",)
            async with await fs.open("/volumes/v/f", "wb"):
                with pytest.raises(OSError, match="files of volume v are open") as found:
                    await fs.volumes.remove("v", force=True)
                refused(InUse, found)
            assert (await fs.volumes.remove("v", force=True)).state == "removing"

    asyncio.run(main())


def test_late_release_does_not_keep_a_volume_in_use():
    async def main():
        async with two_clients() as (_pool, fs, other):
            for name in ("sealed", "removed"):
                await fs.volumes.create(name)
                async with await other.open(f"/volumes/{name}/f", "wb") as file:
                    await file.write(0, b"x")
            assert (await fs.volumes.seal("sealed")).sealed
            async with await other.open("/volumes/removed/f", "rb"):
                pass
            assert (await fs.volumes.remove("removed")).state == "removing"

    asyncio.run(main())


@asynccontextmanager
async def two_clients(**options):
    async with pool_and_client(**options) as (pool, fs):
        client = await pool.client(options=ClientOptions(deadline_s=10.0))
        yield pool, fs, AsyncFileSystem(client, ROOT)
        await client.close()


def test_byte_quota_is_exact_for_one_writer():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v", bytes_max=1_000_000)
            async with await fs.open("/volumes/v/f", "wb") as file:
                assert await file.write(0, b"x" * 999_000) == 999_000
                with pytest.raises(OSError) as found:
                    await file.write(999_000, b"y" * 5_000)
                refused(QuotaExceeded, found)
                assert file.size == 1_000_000, "as many bytes as fit"
                with pytest.raises(OSError) as found:
                    await file.write(1_000_000, b"z")
                refused(QuotaExceeded, found)
                assert await file.write(5, b"w" * 10) == 10  # does not extend the file
                with pytest.raises(OSError):
                    await file.write(2_000_000, b"z")
            assert (await fs.stat("/volumes/v/f")).st_size == 1_000_000
            assert (await fs.volumes.show("v")).bytes_used == 1_000_000
            with pytest.raises(OSError) as found:
                await fs.write_bytes("/volumes/v/g", b"1")
            refused(QuotaExceeded, found)
            await fs.remove("/volumes/v/f")
            assert await fs.write_bytes("/volumes/v/g", b"1" * 1_000_000) == 1_000_000
            found = await fs.volumes.show("v")
            assert (found.bytes_used, found.files_used) == (1_000_000, 1)

    asyncio.run(main())


def test_truncate_append_fallocate_and_copies_keep_the_quota():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v", bytes_max=1_000_000)
            await fs.write_bytes(
                "/volumes/v/f", b"x" * 300_000
            )  # reservations made in advance are returned for the next request
            async with await fs.open("/volumes/v/g", "wb") as file:
                await file.write(0, b"1" * 10)
                with pytest.raises(OSError) as found:
                    await file.truncate(700_001)
                refused(QuotaExceeded, found)
                await file.truncate(700_000)
                await file.truncate(0)
                with pytest.raises(QuotaExceeded):
                    await fs.vfs.fallocate(file.handle, 0, 700_001, 0)
                await fs.vfs.fallocate(file.handle, 0, 600_000, 0)
            assert (await fs.volumes.show("v")).bytes_used == 900_000
            async with await fs.open("/volumes/v/g", "ab") as file:
                await file.write(0, b"2" * 99_999)
                with pytest.raises(OSError) as found:
                    await file.write(0, b"22")
                refused(QuotaExceeded, found)
                await file.write(0, b"2")
            assert (await fs.volumes.show("v")).bytes_used == 1_000_000
            await fs.truncate("/volumes/v/g", 0)
            async with await fs.open("/volumes/v/f") as source, await fs.open("/volumes/v/h", "wb") as target:
                assert await fs.vfs.copy_range(source.handle, 0, target.handle, 600_000, 300_000) == 100_000
                with pytest.raises(QuotaExceeded):
                    await fs.vfs.copy_range(source.handle, 0, target.handle, 700_000, 300_000)

    asyncio.run(main())


def test_two_writers_stay_within_the_quota():
    async def main():
        async with two_clients() as (pool, one, other):
            quota = 2_000_000
            await one.volumes.create("v", bytes_max=quota)
            taken = [0, 0]

            async def fill(number: int, fs: AsyncFileSystem) -> None:
                async with await fs.open(f"/volumes/v/{number}", "wb") as file:
                    while True:
                        try:
                            taken[number] += await fs.vfs.write(file.handle, taken[number], b"x" * 10_000)
                        except QuotaExceeded:
                            break
                        await asyncio.sleep(0)

            await asyncio.gather(fill(0, one), fill(1, other))
            assert quota - quota // 16 <= sum(taken) <= quota
            assert (await one.volumes.show("v")).bytes_used == sum(taken)
            for _ in range(300):
                if not (await one.volumes.show("v")).bytes_reserved:
                    break
                await asyncio.sleep(0.02)
            assert not (await one.volumes.show("v")).bytes_reserved
            left = quota - sum(taken)
            if left:
                assert await one.write_bytes("/volumes/v/rest", b"x" * left) == left
            with pytest.raises(OSError):
                await other.write_bytes("/volumes/v/more", b"x")

    asyncio.run(main())


def test_unused_quota_reservation_is_returned():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v", bytes_max=100_000)
            for target in (1, 2):
                pool.memory["target", target].fail_writes = [NoSpace("full")] * 10
            file = await fs.open("/volumes/v/f", "wb")
            assert await fs.vfs.write(file.handle, 0, b"x" * 120_000) == 100_000
            with pytest.raises(OSError) as found:
                await file.close()
            refused(NoSpace, found)
            for _ in range(300):
                if not (await fs.volumes.show("v")).bytes_reserved:
                    break
                await asyncio.sleep(0.02)
            for target in (1, 2):
                pool.memory["target", target].fail_writes = []
            shown = await fs.volumes.show("v")
            assert not shown.bytes_reserved, "no client has a reservation"
            other = AsyncFileSystem(await pool.client("other"), ROOT)
            assert (
                await other.write_bytes("/volumes/v/g", b"y" * (100_000 - shown.bytes_used))
                == 100_000 - shown.bytes_used
            )

    asyncio.run(main())


def test_quota_reservations_survive_a_shard_restart():
    async def main():
        async with two_clients(capacities=(64 * MIB,)) as (pool, one, other):
            await one.volumes.create("v", bytes_max=1_000_000)
            async with await one.open("/volumes/v/f", "wb") as file:
                await file.write(0, b"x" * 900_000)
                assert (await other.volumes.show("v")).bytes_reserved + (
                    await other.volumes.show("v")
                ).bytes_used >= 900_000
                await pool.stop_shard()
                await pool.start_shard()
                # the second client waits until the first has reported its reservations again
                with pytest.raises(OSError) as found:
                    await other.write_bytes("/volumes/v/g", b"y" * 200_000)
                refused(QuotaExceeded, found)
                assert (await other.stat("/volumes/v/g")).st_size <= 100_000
                await file.flush()
            shown = await one.volumes.show("v")
            assert shown.bytes_used <= 1_000_000 and (await one.stat("/volumes/v/f")).st_size == 900_000

    asyncio.run(main())


def test_new_quota_applies_to_a_running_writer():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v")
            async with await fs.open("/volumes/v/f", "wb") as file:
                await file.write(0, b"x" * 500_000)
                await file.flush()
                with pytest.raises(OSError, match="lie below"):
                    await fs.volumes.resize("v", bytes_max=400_000)
                await fs.volumes.resize("v", bytes_max=600_000)
                for room in fs.vfs.rooms.reservations.values():
                    room.until_s = 1e-9  # expires it, as ten seconds later
                assert await fs.vfs.write(file.handle, 500_000, b"x" * 200_000) == 100_000
            assert (await fs.volumes.show("v")).bytes_used == 600_000

    asyncio.run(main())


def test_trash_through_the_sdk():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v", trash_s=60)
            await fs.mkdir("/volumes/v/a/b", parents=True)
            await fs.write_bytes("/volumes/v/a/b/f", b"x" * 70_000)
            await fs.write_bytes("/volumes/v/a/g", b"y")
            await fs.remove_tree("/volumes/v/a")
            assert await fs.list("/volumes/v") == []
            entries = {entry.path: entry for entry in await fs.volumes.trash("v")}
            assert {path: (entry.kind, entry.bytes) for path, entry in entries.items()} == {
                "/volumes/v/a": ("directory", 0),
                "/volumes/v/a/b": ("directory", 0),
                "/volumes/v/a/b/f": ("file", 70_000),
                "/volumes/v/a/g": ("file", 1),
            }
            await fs.volumes.restore("v", entries["/volumes/v/a/b/f"].inode)
            assert await fs.read_bytes("/volumes/v/a/b/f") == b"x" * 70_000
            await fs.volumes.restore("v", entries["/volumes/v/a/g"].inode, to="/volumes/v/back")
            assert await fs.read_bytes("/volumes/v/back") == b"y"
            with pytest.raises(FileNotFoundError):
                await fs.volumes.restore("v", 12345)
            with pytest.raises(FileNotFoundError) as found:
                await fs.volumes.restore("v", entries["/volumes/v/a/b"].inode, to="/none/here")
            assert found.value.filename == "/none/here"
            with pytest.raises(FileNotFoundError, match="no such directory .* as /volumes/v/again"):
                await fs.volumes.restore("v", entries["/volumes/v/a/b"].inode, to="/srv/pool:/volumes/v/b")
            for to in ("", "/"):
                with pytest.raises(OSError, match="is not a name") as found:
                    await fs.volumes.restore("v", entries["/volumes/v/a/b"].inode, to=to)
                refused(InvalidRequest, found)
            await fs.remove("/volumes/v/back")
            assert await fs.volumes.purge("v") == 1 and await fs.volumes.trash("v") == []

    asyncio.run(main())


def test_trashed_file_gets_a_name_only_by_restore():
    async def main():
        async with pool_and_client() as (pool, fs):
            volume = (await fs.volumes.create("v", trash_s=60)).inode
            await fs.mkdir("/volumes/v/d")
            above = (await fs.stat("/volumes/v/d")).st_ino
            await fs.write_bytes("/volumes/v/d/f", b"x")
            inode = (await fs.stat("/volumes/v/d/f")).st_ino
            await fs.vfs.link(inode, volume, b"second", ROOT)
            await fs.remove("/volumes/v/second")
            file = await fs.open("/volumes/v/d/f", "r+b")
            assert (await fs.vfs.getattr(inode)).links == 1 and await fs.volumes.trash("v") == []
            await fs.remove_tree("/volumes/v/d")
            assert [(await fs.vfs.getattr(number)).links for number in (inode, above)] == [0, 0]
            with pytest.raises(NotFound):
                await fs.vfs.link(inode, volume, b"again", ROOT)
            await file.close()
            await fs.volumes.restore("v", inode)
            assert [(await fs.vfs.getattr(number)).links for number in (inode, above)] == [1, 2]
            await fs.vfs.link(inode, volume, b"again", ROOT)
            assert (await fs.stat("/volumes/v/again")).st_nlink == 2

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1 << 70])
def test_invalid_trash_time_is_refused_with_the_bounds(wrong):
    async def main():
        async with pool_and_client() as (pool, fs):
            with pytest.raises(OSError, match="136 years") as found:
                await fs.volumes.create("v", trash_s=wrong)
            refused(InvalidRequest, found)
            made = await fs.volumes.create("v", trash_s=(1 << 32) - 1)
            with pytest.raises(OSError, match="136 years") as found:
                await fs.volumes.set("v", trash_s=wrong)
            refused(InvalidRequest, found)
            assert await fs.volumes.show("v") == made

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [-1, 1 << 64, 1 << 90])
def test_invalid_inode_numbers_and_modes_are_refused(wrong):
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v", trash_s=60, mode=0o7777)
            await fs.write_bytes("/volumes/v/f", b"y")
            await fs.remove("/volumes/v/f")
            for call in (
                fs.volumes.restore("v", wrong),
                fs.volumes.purge("v", wrong),
                fs.volumes.create("w", mode=wrong),
            ):
                with pytest.raises(OSError) as found:
                    await call
                refused(InvalidRequest, found)
            assert len(await fs.volumes.trash("v")) == 1 and [
                one.name for one in await fs.volumes.list()
            ] == ["v"]

    asyncio.run(main())


def test_deep_tree_is_restored_from_the_trash():
    depth = 1_500

    async def main():
        async with pool_and_client() as (pool, fs):
            volume = await fs.volumes.create("v", trash_s=60)
            vfs, above = fs.vfs, [volume.inode]
            for _ in range(depth):
                above.append((await vfs.mkdir(above[-1], b"d", 0o755, ROOT)).inode)
            for directory in above[-2::-1]:
                await vfs.rmdir(directory, b"d", ROOT)
            assert await fs.list("/volumes/v") == []
            await fs.volumes.restore("v", above[-1])
            for directory, inode in itertools.pairwise(above):
                assert (await vfs.look(directory, b"d")).inode == inode
            assert await fs.volumes.trash("v") == []

    asyncio.run(main())


def test_statfs_in_a_volume_shows_its_quota():
    async def main():
        async with pool_and_client() as (pool, fs):
            await fs.volumes.create("v", bytes_max=10 * MIB, files_max=10)
            await fs.volumes.create("w")
            await fs.mkdir("/volumes/v/d")
            await fs.write_bytes("/volumes/v/d/f", b"x" * MIB)
            async with await fs.open("/volumes/v/d/f") as file:
                for path in ("/volumes/v", "/volumes/v/d", "/volumes/v/d/f"):
                    space = await fs.statfs(path)
                    assert (space.blocks_total, space.blocks_available) == (10 * 256, 9 * 256)
                    assert (space.files_total, space.files_free) == (10, 8)
                assert (await fs.vfs.statfs(file.handle.inode)).blocks_free == 9 * 256
            assert (
                (await fs.statfs("/volumes/w")).blocks_total == (await fs.statfs()).blocks_total != 10 * 256
            )

    asyncio.run(main())


def test_open_orphan_counts_until_it_is_closed():
    async def main():
        async with pool_and_client() as (pool, fs):
            made = await fs.volumes.create("v", bytes_max=1_000_000, files_max=1)
            file = await fs.open("/volumes/v/f", "wb")
            await file.write(0, b"x" * 600_000)
            await file.flush()
            await fs.remove("/volumes/v/f")
            shown = await fs.volumes.show("v")
            assert (shown.files_used, shown.bytes_used) == (1, 600_000)
            assert await fs.vfs.write(file.handle, 600_000, b"x" * 600_000) == 400_000
            await file.flush()
            assert (await fs.volumes.show("v")).bytes_used == 1_000_000
            await file.close()
            await fs.vfs.meta.release_now(made.inode)
            shown = await fs.volumes.show("v")
            assert (shown.files_used, shown.bytes_used) == (0, 0)

    asyncio.run(main())
