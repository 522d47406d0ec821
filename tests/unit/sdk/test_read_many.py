"""Batch reads of many paths: number of messages, and for each path the same result or error as alone."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller, FileHandle
from nvpool.core.errors import AccessDenied, Disconnected, NameTooLong, NotADirectory, NotFound, NvpoolError
from nvpool.core.ids import ROOT_INODE
from nvpool.meta.server.service import MetaOptions
from nvpool.poolmap.shards import partition_moves
from nvpool.rpc.v1 import meta_pb2
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.sdk.async_filesystem import AsyncFileSystem
from tests.unit.client.state.test_small_file_cache import LONG, ME, Case, StandingClock, put, run

OPTIONS = ClientOptions(deadline_s=10.0, release_s=0.01)
DIRECTORIES = 200
OTHER_CLIENT = "client/other.0a1b2c3d"
TARGETS = "..", "../a", ".", "f1", "../f2", "a/b", "l", "/"


async def planted(case: Case, levels: int = 1, count: int = DIRECTORIES) -> dict[str, bytes]:
    """Create files, each in its own directory; return path -> content."""
    top = (await case.other.mkdir(ROOT_INODE, b"top", 0o755, ME)).inode
    contents = {}
    for number in range(count):
        path, at = f"top/d{number}", top
        at = (await case.other.mkdir(at, b"d%d" % number, 0o755, ME)).inode
        for _ in range(levels - 1):
            path, at = f"{path}/e", (await case.other.mkdir(at, b"e", 0o755, ME)).inode
        contents[f"{path}/f"] = os.urandom(number * 7 % 3000)
        await put(case.other, b"f", contents[f"{path}/f"], at)
    return contents


async def read(pool: AsyncFileSystem, contents: dict[str, bytes]) -> None:
    assert [bytes(one) for one in await pool.read_many(list(contents))] == list(contents.values())


def questions(sent: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in sent.items() if not name.startswith("DATA_")}


async def leases_again(pool: AsyncFileSystem) -> None:
    """After a jump of the client's clock: wait until the shard has heard of the client and gives leases again."""
    while not pool.client.vfs.lease_until_s(ROOT_INODE):
        await asyncio.sleep(0.01)
        pool.client.vfs.cache.grow_old(ROOT_INODE)
        await pool.client.vfs.getattr(ROOT_INODE)


class Intercepting(Case):
    """`about(call)` may answer in place of a shard, or change the caller."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.about = lambda call, shard: False
        listen = self.pool.listen

        async def intercepting(role: str, number: int, handler) -> None:
            def handle(call) -> None:
                if role != "meta" or not self.about(call, number):
                    handler(call)

            await listen(role, number, handle)

        self.pool.listen = intercepting


# -- number of messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 3])
def test_many_directories_cost_one_message_per_level(levels):
    async def main() -> None:
        async with Case(OPTIONS, shards=1) as case:
            contents = await planted(case, levels)
            clock = StandingClock()
            pool = AsyncFileSystem(await case.client(clock), ME)
            _, sent = await case.counted(read(pool, contents))
            assert sent.pop("DATA_READ") <= 2 and sent == {"META_LOOKUP": 1, "META_LOOKUP_MANY": levels + 1}
            _, sent = await case.counted(read(pool, contents))
            assert not questions(sent)
            clock.ahead_s += 2.0  # cached names are old, leases may hold
            await leases_again(pool)
            _, sent = await case.counted(read(pool, contents))
            assert sum(questions(sent).values()) <= levels + 2
            clock.ahead_s += 1000.0  # no lease holds any more
            await leases_again(pool)
            _, sent = await case.counted(read(pool, contents))
            assert sum(questions(sent).values()) <= levels + 2

    run(main())


@pytest.mark.parametrize("levels", [1, 3])
def test_each_shard_gets_one_message_per_level(levels):
    async def main() -> None:
        async with Case(OPTIONS, LONG, shards=2) as case:
            contents = await planted(case, levels)
            pool = AsyncFileSystem(await case.client(), ME)
            _, sent = await case.counted(read(pool, contents))
            assert sent.pop("DATA_READ") <= 2
            assert sent.pop("META_LOOKUP_MANY") <= 2 * (levels + 1) and sent.pop("META_GETATTR_MANY") <= 2
            assert sum(sent.values()) <= 2  # "top"
            for _ in range(2):  # look-ups made before there was a session at a shard are repeated
                _, sent = await case.counted(read(pool, contents))
                assert sum(questions(sent).values()) <= 2 * (levels + 2)
                await asyncio.sleep(1.1)
            _, sent = await case.counted(read(pool, contents))
            assert not questions(sent)  # leases cover it, though all names are old

    run(main())


def test_old_names_without_leases_are_looked_up_together():
    async def main() -> None:
        async with Case(OPTIONS._replace(leases=False, attr_s=0.0), shards=1) as case:
            contents = await planted(case, 2, 50)
            pool = AsyncFileSystem(await case.client(), ME)
            for _ in range(2):
                _, sent = await case.counted(read(pool, contents))
                assert (
                    sent.pop("META_LOOKUP_MANY") <= 3
                    and sent.pop("META_OPEN") == 50
                    and sent.pop("META_LOOKUP", 0) <= 1
                )
                assert set(sent) == {"DATA_READ"}

    run(main())


def test_more_names_than_a_message_holds_need_several():
    async def main() -> None:
        async with Case(OPTIONS, shards=1) as case:
            top = (await case.other.mkdir(ROOT_INODE, b"top", 0o755, ME)).inode
            for number in range(1100):
                await case.other.mkdir(top, b"d%d" % number, 0o755, ME)
            vfs = (await case.client()).vfs
            found, sent = await case.counted(
                vfs.walk_many([(top, b"d%d" % number) for number in range(1100)])
            )
            assert sent == {"META_LOOKUP_MANY": 2} and len({inode for inode, _ in found}) == 1100

    run(main())


@pytest.mark.parametrize("shards", [1, 2])
def test_files_of_pieces_are_opened_together_and_kept_open(shards):
    async def main() -> None:
        async with Case(OPTIONS, shards=shards) as case:
            contents = await planted(case, 1, 100)
            pool = AsyncFileSystem(await case.client(clock := StandingClock()), ME)
            pieces = [(path, 1, 50) for path in contents]
            for ahead_s, most in ((0.0, 3 * shards + 1), (0.0, 0), (2.0, 3 * shards + 1), (0.0, 0)):
                clock.ahead_s += ahead_s
                if ahead_s:
                    await leases_again(pool)
                found, sent = await case.counted(pool.read_many(pieces))
                assert [bytes(one) for one in found] == [content[1:51] for content in contents.values()]
                assert sum(questions(sent).values()) <= most
            with pytest.raises(FileNotFoundError) as raised:
                await pool.read_many([*pieces, ("top/d1/no", 0, 1), ("top/no/f", 0, 1)])
            assert raised.value.filename == "top/d1/no"
            assert len(pool.client.vfs.cache.open) == 100
            await pool.read_batches.forget()
            assert not pool.client.vfs.cache.open

    run(main())


def test_files_shared_by_batches_are_read_and_closed():
    async def main() -> None:
        async with Case(OPTIONS._replace(attr_s=0.0), shards=1) as case:
            contents = await planted(case, 1, 20)
            pool = AsyncFileSystem(await case.client(), ME)

            async def some() -> None:
                for _ in range(5):
                    found = await pool.read_many([(path, 0, 4096) for path in contents])
                    assert [bytes(one) for one in found] == list(contents.values())

            await asyncio.gather(*(some() for _ in range(4)))
            assert {file.handles for file in pool.client.vfs.cache.open.values()} <= {1}
            await pool.read_batches.forget()
            assert not pool.client.vfs.cache.open

    run(main())


def test_replaced_handles_are_closed_during_other_batches():
    async def main() -> None:
        async with Case(OPTIONS._replace(attr_s=0.0), shards=1) as case:
            contents = await planted(case, 1, 5)
            pool = AsyncFileSystem(await case.client(), ME)
            vfs, gates = pool.client.vfs, []
            read_many = vfs.read_many

            async def gated(plan, into):
                if gates:
                    gate, came = gates.pop()
                    came.set()
                    await gate.wait()
                return await read_many(plan, into)

            async def read() -> None:
                found = await pool.read_many([(path, 0, 4096) for path in contents])
                assert [bytes(one) for one in found] == list(contents.values())

            async def begun() -> tuple[asyncio.Task, asyncio.Event]:
                gates.append((asyncio.Event(), came := asyncio.Event()))
                gate, task = gates[0][0], asyncio.ensure_future(read())
                await came.wait()
                return task, gate

            vfs.read_many = gated
            first, first_gate = await begun()
            for _ in range(10):
                await read()
            assert sum(file.handles for file in vfs.cache.open.values()) == 55, (
                "the first batch may use any of them"
            )
            second, second_gate = await begun()
            first_gate.set()
            await first
            assert sum(file.handles for file in vfs.cache.open.values()) == 10, (
                "the handles of the second batch, and those that it replaced"
            )
            second_gate.set()
            await second
            await pool.read_batches.forget()
            assert not vfs.cache.open

    run(main())


def test_striped_directories_are_walked_over_several_shards():
    async def main() -> None:
        async with Case(OPTIONS, LONG, shards=3) as case:
            top = (await case.other.mkdir(ROOT_INODE, b"top", 0o755, ME, wide=True)).inode
            contents = {}
            for number in range(30):
                at = (await case.other.mkdir(top, b"d%d" % number, 0o755, ME, wide=True)).inode
                for name in (b"f", b"g", b"h"):
                    contents[f"top/d{number}/{name.decode()}"] = name * number
                    await put(case.other, name, name * number, at)
            pool = AsyncFileSystem(await case.client(), ME)
            _, sent = await case.counted(read(pool, contents))
            assert sent["META_LOOKUP_MANY"] <= 3 * 3 and sum(questions(sent).values()) <= 20
            await read(pool, contents)
            _, sent = await case.counted(read(pool, contents))
            assert not questions(sent)

    run(main())


@pytest.mark.parametrize("older", [False, True])
def test_inodes_of_another_shard_are_requested_together(older):
    async def main() -> None:
        async with Intercepting(OPTIONS, LONG, shards=2) as case:
            vfs = case.other
            at = [(await vfs.mkdir(ROOT_INODE, b"d%d" % number, 0o755, ME)).inode for number in range(8)]
            made = next(one for one in at if vfs.meta.shard_of(one) == 1)
            to = next(one for one in at if vfs.meta.shard_of(one) == 2)
            contents = {}
            for number in range(40):
                content = contents[f"d{at.index(to)}/f{number}"] = os.urandom(number * 50)
                await put(vfs, b"tmp", content, made)
                await vfs.rename(made, b"tmp", to, b"f%d" % number, 0, ME)
            links = [f"d{at.index(to)}/l{number}" for number in range(3)]
            for number in range(3):
                await vfs.symlink(made, b"l", b"f%d" % number, ME)
                await vfs.rename(made, b"l", to, b"l%d" % number, 0, ME)
            pool = AsyncFileSystem(await case.client(), ME)

            def forget(call, shard) -> bool:
                if older and call.method == Method.Value("META_GETATTR_MANY"):
                    request = meta_pb2.GetAttrManyRequest.FromString(call.message)
                    request.ClearField("rights")
                    call.message = request.SerializeToString()
                return False

            case.about = forget
            _, sent = await case.counted(read(pool, contents))
            sent.pop("DATA_READ")
            assert sent.pop("META_GETATTR", 0) <= (42 if older else 2) and sum(sent.values()) <= 5
            await read(pool, contents)  # look-ups made before there was a lease on their inodes
            _, sent = await case.counted(read(pool, contents))
            assert not questions(sent)
            expected = [contents[path.replace("/l", "/f")] for path in links]
            assert [bytes(one) for one in await pool.read_many([*links, *contents])] == [
                *expected,
                *contents.values(),
            ]
            await vfs.unlink(to, b"f7", ME)
            with pytest.raises(FileNotFoundError):
                await pool.read_many(list(contents))
            assert not pool.client.vfs.cache.open

    run(main())


# -- errors of single paths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_error_names_its_path(shards):
    async def main() -> None:
        async with Case(OPTIONS, shards=shards) as case:
            contents = await planted(case, 1, 20)
            pool = AsyncFileSystem(await case.client(), ME)
            for wrong, error in (
                ("top/nothing/f", FileNotFoundError),
                ("top/d3/g", FileNotFoundError),
                ("top/d4/f/x", NotADirectoryError),
                ("top/d5", IsADirectoryError),
                ("/", IsADirectoryError),
                ("top/d6/..", IsADirectoryError),
                ("top/d6/f/..", NotADirectoryError),
                ("n" * 300 + "/f", OSError),
                ("top/" + "n" * 300, OSError),
                ("top/d1/\0", ValueError),
            ):
                for _ in range(2):
                    with pytest.raises(error) as raised:
                        await pool.read_many([*contents, wrong, "no/path"])
                    if error is ValueError:
                        assert "null character" in str(raised.value) and repr(wrong) in str(raised.value)
                    else:
                        assert raised.value.filename == wrong
            assert not pool.client.vfs.cache.open
            vfs = pool.client.vfs
            top = (await vfs.lookup(ROOT_INODE, b"top")).inode
            found = await vfs.walk_many(
                [(top, b"d1"), (top, b"no"), (top, b"n" * 300), (top, b"d2"), (ROOT_INODE, b"top")]
            )
            assert [type(one) for one in found] == [tuple, NotFound, NameTooLong, tuple, tuple]
            file = (await vfs.lookup(found[0][0], b"f")).inode
            opened = await vfs.open_many(
                [
                    (found[0][0], b"f"),
                    (top, b"d1"),
                    (file, b"x"),
                    (top, b"a/b"),
                    (top, b"no"),
                    (found[3][0], b"f"),
                ],
                ME,
            )
            assert [isinstance(one, FileHandle) for one in opened] == [True, False, False, False, False, True]
            assert (
                type(opened[2]) is NotADirectory
                and type(opened[4]) is NotFound
                and isinstance(opened[3], NvpoolError)
            )
            for one in (opened[0], opened[5]):
                await vfs.release(one)
            await read(pool, contents)

    run(main())


@pytest.mark.parametrize("shards", [1, 2])
def test_forbidden_volume_fails_only_its_paths(shards):
    async def main() -> None:
        async with Intercepting(OPTIONS, shards=shards) as case:
            owner = AsyncFileSystem(await case.client(), Caller(0, 0))
            for name in ("open", "secret"):
                await owner.volumes.create(name)
                for number in range(5):
                    await owner.mkdir(f"/volumes/{name}/d{number}")
                    await owner.write_bytes(f"/volumes/{name}/d{number}/f", name.encode())
            await owner.volumes.grant("secret", "client/reader.0a1b2c3d", "ro")

            def as_other_client(call, shard) -> bool:
                call.peer = call.peer._replace(member=OTHER_CLIENT)
                return False

            pool = AsyncFileSystem(await case.client(), ME)
            case.about = as_other_client
            good = [f"volumes/open/d{number}/f" for number in range(5)]
            with pytest.raises(PermissionError) as raised:
                await pool.read_many([*good, "volumes/secret/d1/f", "volumes/secret/d2/f"])
            assert raised.value.filename == "volumes/secret/d1/f" and isinstance(
                raised.value.__cause__, AccessDenied
            )
            assert [bytes(one) for one in await pool.read_many(good)] == [b"open"] * 5
            assert not pool.client.vfs.cache.open

    run(main())


def test_silent_shard_fails_only_its_paths():
    async def main() -> None:
        async with Intercepting(OPTIONS._replace(deadline_s=0.5), shards=2) as case:
            contents = await planted(case, 1, 20)
            vfs = (await case.client()).vfs
            top = (await vfs.lookup(ROOT_INODE, b"top")).inode
            directories = [
                inode for inode, _ in await vfs.walk_many([(top, b"d%d" % number) for number in range(20)])
            ]
            case.about = lambda call, shard: (
                call.method == Method.Value("META_LOOKUP_MANY")
                and shard == 2
                and (call.fail(Disconnected("on the way")) or True)
            )
            opened = await vfs.open_many([(directory, b"f") for directory in directories], ME)
            for directory, one in zip(directories, opened, strict=True):
                assert isinstance(one, FileHandle) == (vfs.meta.shard_of(directory) == 1)
            assert {vfs.meta.shard_of(directory) for directory in directories} == {1, 2}
            for one in opened:
                if isinstance(one, FileHandle):
                    await vfs.release(one)
            case.about = lambda call, shard: False
            await read(AsyncFileSystem(await case.client(), ME), contents)

    run(main())


@pytest.mark.parametrize("answer", [b"", b"\xff\xff\xff"])
def test_invalid_reply_fails_its_paths(answer):
    async def main() -> None:
        async with Intercepting(OPTIONS, shards=1) as case:
            contents = await planted(case, 1, 5)
            pool = AsyncFileSystem(await case.client(), ME)
            case.about = lambda call, shard: (
                call.method == Method.Value("META_LOOKUP_MANY") and (call.reply(answer) or True)
            )
            with pytest.raises(OSError) as raised:
                await pool.read_many(list(contents))
            assert raised.value.filename == next(iter(contents)) and not pool.client.vfs.cache.open
            case.about = lambda call, shard: False
            await read(pool, contents)

    run(main())


# -- concurrent changes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_moved_and_replaced_directories_are_found(shards):
    async def main() -> None:
        async with Case(OPTIONS, meta=MetaOptions(watch_s=1.0), shards=shards) as case:
            contents = await planted(case, 2, 30)
            pool = AsyncFileSystem(await case.client(), ME)
            for _ in range(3):
                await read(pool, contents)
                await asyncio.sleep(0 if shards == 1 else 1.1)
            other = case.other
            top = (await other.lookup(ROOT_INODE, b"top")).inode
            await other.rename(top, b"d1", ROOT_INODE, b"away", 0, ME)
            await other.rename(top, b"d2", top, b"d1", 0, ME)
            third = (await other.lookup(top, b"d3")).inode
            await other.rename(third, b"e", top, b"e", 0, ME)
            await put(other, b"f", b"new", (await other.mkdir(third, b"e", 0o755, ME)).inode)
            if shards == 2:
                await asyncio.sleep(1.1)  # an inode of another shard than its name may be cached for so long
            with pytest.raises(FileNotFoundError) as raised:
                await pool.read_many(list(contents))
            assert raised.value.filename == "top/d2/e/f"
            contents["away/e/f"], contents["top/d1/e/f"] = contents["top/d1/e/f"], contents.pop("top/d2/e/f")
            contents["top/e/f"], contents["top/d3/e/f"] = contents["top/d3/e/f"], b"new"
            await read(pool, contents)

    run(main())


def test_partitions_migrate_during_reads():
    async def main() -> None:
        async with Case(OPTIONS._replace(attr_s=0.0, leases=False), shards=2, serves_map=True) as case:
            contents = await planted(case, 2, 40)
            pool = AsyncFileSystem(await case.client(), ME)
            await read(pool, contents)
            await case.pool.change_map(
                lambda pool_map: partition_moves.with_desired_state(pool_map, 2, "remove")
            )
            while case.pool.pool_map.moves:
                await read(pool, contents)
            assert set(case.pool.pool_map.shard_of_partition) == {1}
            await read(pool, contents)

    run(main())


# -- same results as single reads --------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("shards", [2, 1, 3])
def test_random_tree_is_read_like_single_paths(shards):
    async def main() -> None:
        chance = random.Random(shards)
        async with Case(OPTIONS, shards=shards) as case:
            vfs = case.other
            directories, names = [(ROOT_INODE, "")], [b"a", b"b", b"c", b"d"]
            for _ in range(40):
                parent, path = chance.choice(directories)
                name = chance.choice(names)
                try:
                    attr = await vfs.mkdir(parent, name, 0o755, ME, wide=chance.random() < 0.3)
                except NvpoolError:
                    continue
                directories.append((attr.inode, f"{path}/{name.decode()}"))
            paths = [path for _, path in directories]
            for _ in range(300):
                parent, path = chance.choice(directories)
                name = chance.choice([*names, *(b"f%d" % number for number in range(5))])
                try:
                    if chance.random() < 0.4:
                        target = chance.choice([*(path or "/" for path in paths), *TARGETS])
                        await vfs.symlink(parent, name, target.encode(), ME)
                    elif chance.random() < 0.3:
                        to, _ = chance.choice(directories)
                        await vfs.link((await vfs.lookup(parent, b"f1")).inode, to, name, ME)
                    else:
                        await put(vfs, name, f"{path}/{name.decode()}".encode(), parent)
                except NvpoolError:
                    continue
            parts = ["a", "b", "c", "d", "..", ".", "f1", "f2", "f3", "", "no"]
            wanted = ["/".join(chance.choices(parts, k=chance.randint(1, 5))) for _ in range(400)]
            wanted += [f"{path}/f{number}" for path in paths for number in range(5)]

            async def each(pool: AsyncFileSystem, path: str):
                try:
                    return await pool.read_bytes(path)
                except OSError as error:
                    return error.errno

            plain = AsyncFileSystem(await case.client(), ME)
            expected = [await each(plain, path) for path in wanted]
            good = [(path, one) for path, one in zip(wanted, expected, strict=True) if isinstance(one, bytes)]
            assert len(good) > 50 and len({one for one in expected if isinstance(one, int)}) >= 3
            together = AsyncFileSystem(await case.client(), ME)
            for _ in range(2):
                assert [bytes(one) for one in await together.read_many([path for path, _ in good])] == [
                    one for _, one in good
                ]
            for path, one in zip(wanted, expected, strict=True):
                if isinstance(one, int):
                    with pytest.raises(OSError) as raised:
                        await together.read_many([good[0][0], path, "no/such/path"])
                    assert raised.value.errno == one and raised.value.filename == path
            assert not together.client.vfs.cache.open

    run(main())
