"""Path of a damaged file from its inode number: search in a shard, walk to the root, log messages of a client."""

import asyncio
import logging
import os

import pytest

from nvpool.client import inode_paths
from nvpool.client.inode_paths import KnownPaths, PathFinder, printable
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core import errors
from nvpool.core.clock import SYSTEM_CLOCK, ManualClock
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.core.ids import partition_of
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.operations import queries as lookup_operations
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.state import records
from nvpool.rpc.messages import read_write_codec
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2
from nvpool.testing.fakes.in_process_pool import InProcessPool
from nvpool.testing.fakes.meta_shard import ShardClient, StoreRecorder, small_map
from nvpool.testing.fakes.store import PlainStore

ME = Caller(0, 0)


class CountedKv(MemoryKv):
    """Counts the results of each scan; records whose keys are in `damaged` cannot be read, as with a flipped bit in LMDB."""

    damaged: frozenset = frozenset()

    def __init__(self):
        super().__init__()
        self.scanned = []

    def scan(self, first, end, limit):
        found = super().scan(first, end, limit)
        for key, _ in found:
            if key in self.damaged:
                error = errors.CorruptRecord(f"{key.hex()} is damaged")
                error.key = key
                raise error
        self.scanned.append(len(found))
        return found


def shard(scenario):
    """A test scenario(client of a shard in memory)."""

    def run():
        async def body():
            service = MetaService(
                CountedKv(),
                grant_secret=b"s" * 32,
                dialer=StoreRecorder(),
                clock=ManualClock(),
                options=MetaOptions(tick_s=3600),
            )
            service.update_map(small_map())
            await service.start()
            client = await ShardClient(service).begin()
            await scenario(client)
            assert await client.fsck() == []
            await service.close()

        asyncio.run(body())

    run.__name__ = scenario.__name__
    return run


async def names(client, inodes, **fields):
    """(inode -> its location as reported; inodes without a name; steps)."""
    found, gone, cursor, steps = {}, [], b"", 0
    while True:
        request = pb.NamesRequest(inodes=read_write_codec.pack_inodes(inodes), cursor=cursor, **fields)
        reply = await client.ask("NAMES", request)
        steps += 1
        gone += read_write_codec.unpack_inodes(reply.gone)
        for one in reply.names:
            found.setdefault(one.inode, (one.directory, one.name, one.above))
        if reply.done:
            return found, gone, steps
        assert reply.cursor > cursor
        cursor = reply.cursor


@shard
async def test_file_is_found_in_its_first_directory(client):
    top = (await client.mkdir(ROOT, b"top")).inode
    wide = (await client.mkdir(top, b"wide", wide=True)).inode
    wanted = {}
    for directory, above in ((ROOT, ROOT), (top, ROOT), (wide, top)):
        for number in range(20):
            name = b"\xff%d" % number
            wanted[(await client.file(directory, name)).inode] = directory, name, above
    for limit in (1, 7, 0):
        assert (await names(client, list(wanted), limit=limit))[:2] == (wanted, [])


@shard
async def test_later_names_and_directories_are_found(client):
    one, other = [(await client.mkdir(ROOT, name)).inode for name in (b"one", b"other")]
    assert partition_of(one) != partition_of(other)
    moved, linked = [(await client.file(one, name)).inode for name in (b"moved", b"linked")]
    await client.rename(one, b"moved", other, b"there")
    await client.link(linked, other, b"again")
    assert (await names(client, [moved, linked]))[0] == {linked: (one, b"linked", ROOT)}
    assert (await names(client, [moved, linked], elsewhere=True))[0] == {
        moved: (other, b"there", ROOT),
        linked: (other, b"again", ROOT),
    }
    assert (await names(client, [one, other, moved], directory=ROOT))[0] == {
        one: (ROOT, b"one", ROOT),
        other: (ROOT, b"other", ROOT),
    }
    wide = (await client.mkdir(one, b"wide", wide=True)).inode
    below = (await client.mkdir(wide, b"below")).inode
    assert (await names(client, [below], directory=wide))[0] == {below: (wide, b"below", one)}


@shard
async def test_file_without_a_name_is_reported(client):
    inode = (await client.create(ROOT, b"f", exclusive=True, open=True)).entry.attr.inode
    await client.unlink(ROOT, b"f")
    assert (await names(client, [inode, inode + 1000]))[:2] == ({}, [inode, inode + 1000])


@shard
async def test_search_step_is_bounded_in_entries_and_partitions(client):
    inode = (await client.file(ROOT, b"last")).inode
    for number in range(300):
        await client.file(ROOT, b"%d" % number)
    kv = client.service.parts.kv
    for limit, scans in ((100, 1), (0, lookup_operations.NAMES_LIMIT // lookup_operations.EMPTY_SCAN)):
        for fields in ({}, {"elsewhere": True}):
            cursor, done = b"", False
            while not done:
                kv.scanned.clear()
                request = pb.NamesRequest(
                    inodes=read_write_codec.pack_inodes([inode]), cursor=cursor, limit=limit, **fields
                )
                reply = await client.ask("NAMES", request)
                assert sum(kv.scanned) <= (limit or lookup_operations.NAMES_LIMIT)
                assert len(kv.scanned) <= max(scans, limit // lookup_operations.EMPTY_SCAN)
                cursor, done = reply.cursor, reply.done


@shard
async def test_unreadable_entries_do_not_hide_others(client):
    inodes = [(await client.file(ROOT, b"%d" % number)).inode for number in range(40)]
    kv = client.service.parts.kv
    keys = [
        key
        for key, _ in MemoryKv.scan(
            kv, records.prefix(0, records.DENTRY), records.prefix(0, records.DENTRY + 1), 99
        )
    ]
    kv.damaged = frozenset((keys[0], keys[13], keys[14], keys[39]))
    for limit in (1, 5, 0):
        assert len((await names(client, inodes, limit=limit))[0]) == 36
    kv.damaged = frozenset()


@shard
async def test_invalid_requests_are_refused(client):
    for fields in (
        {"inodes": b""},
        {"inodes": b"1234567"},
        {"inodes": bytes(8)},
        {"inodes": b"\xff" * 8},
        {"inodes": read_write_codec.pack_inodes(range(1, lookup_operations.NAMES_INODES_MAX + 2))},
        {"inodes": read_write_codec.pack_inodes([7]), "directory": 1 << 63},
    ):
        with pytest.raises(errors.InvalidRequest):
            await client.ask("NAMES", pb.NamesRequest(**fields))
    for cursor in (b"\0", b"\xff" * 600):
        request = pb.NamesRequest(
            inodes=read_write_codec.pack_inodes([7]), cursor=cursor, directory=99, limit=1 << 31
        )
        assert not (await client.ask("NAMES", request)).names


# -- paths ---------------------------------------------------------------------------------------------------------------


def in_a_pool(test):
    """Decorator for a test(pool, its vfs, a PathFinder)."""

    def run(*arguments):
        async def body():
            async with InProcessPool() as pool:
                client = await pool.client()
                await test(
                    pool,
                    client.vfs,
                    PathFinder(lambda: client.pool_map, client.dialer, SYSTEM_CLOCK),
                    *arguments,
                )

        asyncio.run(asyncio.wait_for(body(), 120))

    run.__name__ = test.__name__
    return run


async def made(vfs, path, wide=False):
    """Create a file and the directories above it; return its inode."""
    *above, name = path.split(b"/")[1:]
    at = ROOT
    for part in above:
        try:
            at = (await vfs.lookup(at, part)).inode
        except errors.NotFound:
            at = (await vfs.mkdir(at, part, 0o755, ME)).inode
    attr, handle = await vfs.create(at, name, 0o644, os.O_RDWR, ME)
    await vfs.release(handle)
    return attr.inode


@in_a_pool
async def test_paths_are_found_at_any_depth_and_after_moves(pool, vfs, finder):
    paths = [b"/f", b"/a/b/c/d/e/f/g", b"/a/b/\xff\xfe", b"/z" * 60 + b"/f"]
    wanted = {await made(vfs, path): path for path in paths}
    moved, above = await made(vfs, b"/a/was"), await made(vfs, b"/m/n/o")
    target = (await vfs.lookup((await vfs.lookup(ROOT, b"a")).inode, b"b")).inode
    await vfs.rename((await vfs.lookup(ROOT, b"a")).inode, b"was", target, b"is", 0, ME)
    await vfs.rename(ROOT, b"m", target, b"moved", 0, ME)
    wanted |= {moved: b"/a/b/is", above: b"/a/b/moved/n/o"}
    gone = await made(vfs, b"/gone")
    await vfs.unlink(ROOT, b"gone", ME)
    assert await finder.find([*wanted, gone, 0, 1 << 63, 1 << 64]) == wanted | {gone: b""}


@in_a_pool
async def test_search_without_replies_ends_in_time(pool, vfs, finder):
    inode = await made(vfs, b"/a/f")
    kept, routes = [], pool.meta.routes
    names, routes[wire_pb2.META_NAMES] = (
        routes[wire_pb2.META_NAMES],
        kept.append,
    )  # accepts requests and never replies
    assert await finder.find([inode], 0.2) == {} and kept
    routes[wire_pb2.META_NAMES] = names
    assert await finder.find([inode], 60) == {inode: b"/a/f"}
    await pool.stop_shard()
    assert await finder.find([inode], 10) == {}


@in_a_pool
async def test_search_ends_for_a_directory_loop_and_an_older_shard(pool, vfs, finder):
    inode = await made(vfs, b"/a/b/f")
    a, b = [
        (await vfs.getattr(n)).inode
        for n in (
            (await vfs.lookup(ROOT, b"a")).inode,
            (await vfs.lookup((await vfs.lookup(ROOT, b"a")).inode, b"b")).inode,
        )
    ]
    view = pool.meta.parts.view
    ((key, raw),) = (
        (k, v)
        for k, v in view.scan(records.prefix(0, records.DENTRY), records.prefix(0, records.DENTRY + 1), 9)
    )
    looped = view.inode(a)
    looped.parent = b
    name_hash = view.name_hash(b, b"a")
    pool.kv.apply(
        [
            (key, None),
            (records.inode_key(a), records.encode_inode(looped)),
            (
                records.dentry_key(partition_of(b), b, name_hash, b"a"),
                records.encode_dentry(partition_of(b), a, 4),
            ),
        ]
    )
    assert await finder.find([inode], 10) == {}
    del pool.meta.routes[wire_pb2.META_NAMES]
    assert await finder.find([inode], 10) == {}


def test_paths_are_shown_on_one_line():
    assert printable("/münchen/ü".encode()) == "/münchen/ü"
    assert printable(b"/a\xff/\n\x1b[31m") == "/a\\xff/\\n\\x1b[31m"


# -- log messages ---------------------------------------------------------------------------------------------------


def test_client_log_names_inode_chunk_target_and_path(caplog, monkeypatch):
    monkeypatch.setattr(inode_paths, "PAUSE_S", 0.01)

    def spoil(payload):
        payload[-1] ^= 1

    async def store(pool, target):
        made = PlainStore(target, pool.grant_secret)
        made.spoil = spoil
        return made

    async def main():
        async with InProcessPool(make_store=store) as pool:
            vfs = (await pool.client(options=ClientOptions(deadline_s=5.0))).vfs
            directory = (await vfs.mkdir(ROOT, b"d\n", 0o755, ME)).inode
            attr, handle = await vfs.create(directory, b"file", 0o644, os.O_RDWR, ME)
            await vfs.write(handle, 0, b"x" * 8192)
            await vfs.flush(handle)
            asked = []
            search = lookup_operations.names
            monkeypatch.setattr(
                lookup_operations, "names", lambda *arguments: asked.append(1) or search(*arguments)
            )
            with pytest.raises(errors.ChecksumMismatch):
                await vfs.read(handle, 0, 4096)
            (message,) = caplog.messages
            assert (
                f"no good bytes of inode {attr.inode}, chunk 0, offset 0" in message
                and message.startswith("target ")
            )
            await asyncio.wait_for(vfs.paths.log_task, 120)
            assert caplog.messages[1:] == [f"inode {attr.inode}, of which bytes are damaged, is /d\\n/file"]
            questions = len(asked)
            for _ in range(3):
                with pytest.raises(errors.ChecksumMismatch):
                    await vfs.read(handle, 4096, 4096)
            assert all(
                f"inode {attr.inode} (/d\\n/file), chunk 0, offset 4096" in line
                for line in caplog.messages[2:]
            )
            assert len(caplog.messages) == 5 and len(asked) == questions > 0
            await vfs.release(handle)

    with caplog.at_level(logging.ERROR, "nvpool.client"):
        asyncio.run(asyncio.wait_for(main(), 120))


def test_path_cache_keeps_paths_and_misses_for_a_time():
    async def main():
        clock, searches = ManualClock(), []
        paths = KnownPaths(small_map, None, clock)

        async def find(inodes, within_s=None):
            searches.append(sorted(inodes))
            return {5: b"/five"}

        paths.finder.find = find
        await asyncio.gather(paths.look([5, 6, 5]), paths.look([6]))
        assert paths.path(5) == b"/five" and paths.path(6) is None and searches == [[5, 6]]
        clock.advance(inode_paths.FAILED_KEPT_S + 1)
        await paths.look([5, 6])
        assert searches.pop() == [6]
        clock.advance(inode_paths.KEPT_S)
        assert paths.path(5) is None
        await paths.look(range(inode_paths.FILES_MAX * 2))
        assert len(searches.pop()) == inode_paths.FILES_MAX
        for first in range(0, 5 * inode_paths.KEPT_MAX, inode_paths.FILES_MAX):
            await paths.look(range(first, first + inode_paths.FILES_MAX))
        assert len(paths.known) <= inode_paths.KEPT_MAX

    asyncio.run(main())
