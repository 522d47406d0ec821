"""fsck finds damage of every kind, repairs it, then finds nothing, and leaves everything else unchanged."""

import asyncio
import functools
import stat

import pytest

from nvpool.core.errors import InUse, InvalidRequest, StaleCursor
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.core.ids import counter_of, inode_number, partition_of
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.state import records, session_records
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.testing.fakes.meta_shard import ShardClient, StoreRecorder, small_map

OPTIONS = MetaOptions(linger_s=3600, tick_s=3600)


class Planted:
    """A shard with a small tree, in which damage can be planted through the engine."""

    async def begin(self):
        self.kv = MemoryKv()
        self.service = MetaService(self.kv, grant_secret=b"s" * 32, dialer=StoreRecorder(), options=OPTIONS)
        self.service.update_map(small_map())
        await self.service.start()
        self.view = self.service.parts.view
        c = self.client = await ShardClient(self.service).begin()
        self.dir = (await c.mkdir(ROOT, b"dir")).inode
        self.sub = (await c.mkdir(self.dir, b"sub")).inode
        self.deep = (await c.mkdir(self.sub, b"deep")).inode
        self.wide = (await c.mkdir(ROOT, b"wide", wide=True)).inode
        self.file = (await c.file(self.dir, b"file", open=True, rights=2)).inode
        for number in range(20):
            await c.file(self.wide, b"w%d" % number)
        await c.link(self.file, self.wide, b"second name")
        await c.create(ROOT, b"link", stat.S_IFLNK | 0o777, target=b"dir/file")
        await c.ask(
            "SETXATTR", pb.SetXattrRequest(change=c.change(), inode=self.file, name=b"user.a", value=b"1")
        )
        self.orphan = (await c.file(ROOT, b"gone", open=True, rights=2)).inode
        await c.unlink(ROOT, b"gone")
        assert await c.fsck() == []
        return self

    def name(self, directory, name):
        """Key of a directory entry."""
        return self.view.place(self.view.directory(directory), name)[2]

    def put(self, key, value):
        self.kv.apply([(key, value)])

    def change(self, number, **fields):
        inode = self.view.inode(number)
        for field, value in fields.items():
            setattr(inode, field, value)
        self.put(records.inode_key(number), records.encode_inode(inode))

    async def tree(self):
        """Each path with its inode and link count."""
        found = {}
        waiting = [(b"", ROOT)]
        while waiting:
            path, inode = waiting.pop()
            for entry in await self.client.list(inode, attrs=True):
                found[path + b"/" + entry.name] = (entry.inode, entry.attr.links)
                if entry.kind == 4:
                    waiting.append((path + b"/" + entry.name, entry.inode))
        return found


def plant_dentry_without_inode(p):
    p.put(p.name(p.dir, b"ghost"), records.encode_dentry(partition_of(p.dir), inode_number(5, 99), 8))
    p.change(p.dir, size=p.view.inode(p.dir).size + 1)


def plant_dentry_without_inode_uncounted(p):
    p.put(p.name(p.dir, b"ghost"), records.encode_dentry(partition_of(p.dir), inode_number(5, 99), 8))


def plant_inode_without_dentry(p):
    p.put(p.name(p.wide, b"w3"), None)


def plant_directory_without_dentry(p):
    p.put(p.name(p.dir, b"sub"), None)


def plant_wrong_link_count(p):
    p.change(p.file, links=7)


def plant_link_count_of_zero(p):
    p.change(p.file, links=0)


def plant_wrong_directory_counts(p):
    p.change(p.dir, links=9, size=77)


def plant_missing_orphan_record(p):
    p.put(records.numbered_key(records.ORPHAN, p.orphan), None)


def plant_orphan_record_of_a_live_file(p):
    p.put(records.numbered_key(records.ORPHAN, p.file), records.ORPHAN_VALUE)


def plant_orphan_record_of_nothing(p):
    p.put(records.numbered_key(records.ORPHAN, inode_number(9, 77)), records.ORPHAN_VALUE)


def plant_undecodable_orphan(p):
    p.put(records.numbered_key(records.ORPHAN, p.orphan), b"?")


def plant_undecodable_inode(p):
    p.put(records.inode_key(p.view.named(p.view.directory(p.wide), b"w5")[1]), b"\xffgarbage")


def plant_undecodable_directory(p):
    p.put(records.inode_key(p.sub), b"\x01")


def plant_undecodable_dentry(p):
    p.put(p.name(p.dir, b"sub"), b"")


def plant_undecodable_xattr(p):
    p.put(records.xattr_key(p.file, b"user.a"), b"")


def plant_xattr_of_nothing(p):
    p.put(records.xattr_key(inode_number(9, 77), b"user.a"), records.XATTR_HEAD)


def plant_xattr_without_mark(p):
    p.change(p.file, flags=records.TOUCHED)


def plant_mark_without_xattr(p):
    p.change(p.dir, flags=records.HAS_XATTRS)


def plant_intent_of_nothing(p):
    p.put(
        records.numbered_key(records.INTENT, inode_number(9, 77)),
        records.encode_intent(records.Intent(1, 0, 1, 20)),
    )


def plant_forgotten_intent(p):
    p.change(p.file, cut=1)
    p.put(records.numbered_key(records.INTENT, p.file), records.encode_intent(records.Intent(1, 0, 1, 20)))


def plant_intent_of_another_cut(p):
    p.put(records.numbered_key(records.INTENT, p.file), records.encode_intent(records.Intent(5, 0, 1, 20)))


def plant_undecodable_intent(p):
    p.put(records.numbered_key(records.INTENT, p.file), b"?")


def plant_forgotten_hole(p):
    p.change(p.file, cut=2, punches=1)
    p.put(
        records.numbered_key(records.INTENT, p.file), records.encode_intent(records.Intent(2, 0, 1, 20, 4096))
    )


def plant_undecodable_hole(p):
    p.change(p.file, cut=2, punches=1)
    p.put(records.numbered_key(records.INTENT, p.file), b"?")


def plant_collect_of_a_live_file(p):
    p.put(records.numbered_key(records.COLLECT, p.file), records.encode_collect(records.Collect(1, 20)))


def plant_undecodable_collect(p):
    p.put(records.numbered_key(records.COLLECT, inode_number(9, 77)), b"?")


def plant_slot_of_a_dead_session(p):
    p.put(records.slot_key(12345, 0), session_records.encode_slot(1, 0, b""))


def plant_undecodable_slot(p):
    p.put(records.slot_key(p.client.session, 63), b"")


def plant_dead_session(p):
    p.put(
        records.session_key(12345),
        session_records.encode_session(session_records.SessionRecord(bytes(16), 0, "x")),
    )


def plant_undecodable_session(p):
    p.put(records.session_key(12345), b"")


def plant_wrong_hash(p):
    partition = partition_of(p.dir)
    p.put(p.name(p.dir, b"file"), None)
    p.put(
        records.dentry_key(partition, p.dir, b"\1" * 7, b"file"), records.encode_dentry(partition, p.file, 8)
    )


def plant_wrong_partition(p):
    key = p.name(p.wide, b"w7")
    number = p.view.named(p.view.directory(p.wide), b"w7")[1]
    other = (records.partition_of_key(key) + 1) % 4096
    p.put(key, None)
    p.put(records.dentry_key(other, p.wide, key[10:17], b"w7"), records.encode_dentry(other, number, 8))


def plant_second_name_of_a_directory(p):
    p.put(
        p.name(p.wide, b"again"),
        records.encode_dentry(records.partition_of_key(p.name(p.wide, b"again")), p.sub, 4),
    )


def plant_wrong_parent(p):
    p.change(p.sub, parent=p.wide)


def plant_wrong_kind(p):
    p.put(p.name(p.dir, b"file"), records.encode_dentry(partition_of(p.dir), p.file, 4))


def plant_entry_in_a_missing_directory(p):
    missing = inode_number(77, 5)
    p.put(records.dentry_key(77, missing, b"\2" * 7, b"x"), records.encode_dentry(77, p.file, 8))
    p.change(p.file, links=3)


def plant_impossible_name(p):
    partition = partition_of(p.dir)
    p.put(
        records.dentry_key(partition, p.dir, b"\2" * 7, b"a/b"), records.encode_dentry(partition, p.file, 8)
    )
    p.change(p.file, links=3)


def plant_loop(p):
    p.put(p.name(p.dir, b"sub"), None)
    p.put(p.name(p.deep, b"sub"), records.encode_dentry(partition_of(p.deep), p.sub, 4))
    p.change(p.dir, links=2, size=p.view.inode(p.dir).size - 1)
    p.change(p.sub, parent=p.deep)
    p.change(p.deep, links=3, size=1)


def plant_counter_above_the_next(p):
    number = inode_number(3, p.view.next_number + 500_000)
    p.put(
        p.name(p.wide, b"future"),
        records.encode_dentry(records.partition_of_key(p.name(p.wide, b"future")), number, 8),
    )
    p.put(records.inode_key(number), records.encode_inode(records.Inode(number, 0o100644)))


def plant_low_bound(p):
    p.put(records.BOUNDS_KEY, records.encode_bounds(records.IssuedNumbers(2, 1)))


def plant_undecodable_bounds(p):
    p.put(records.BOUNDS_KEY, b"?")


def plant_wrong_count(p):
    p.put(records.COUNTS_KEY, records.encode_counts(5))


def plant_inode_under_a_key_of_no_number(p):
    p.put(records.inode_key(p.file)[:2] + b"\xff" * 7, records.encode_inode(p.view.inode(p.file)))


def plant_inode_of_no_number(p):
    p.put(records.inode_key(0), records.encode_inode(records.Inode(0, 0o100644)))


def plant_inode_key_with_more_behind_it(p):
    p.put(records.inode_key(p.file) + b"x", records.encode_inode(p.view.inode(p.file)))


def plant_entry_that_names_the_root(p):
    p.put(p.name(p.dir, b"up"), records.encode_dentry(partition_of(p.dir), ROOT, 4))
    p.change(p.dir, links=4, size=p.view.inode(p.dir).size + 1)


def plant_unknown_kind(p):
    p.put(records.prefix(4, records.OTHER) + b"x", b"y")


PLANTS = [value for name, value in sorted(globals().items()) if name.startswith("plant_")]


def on_a_shard(test):
    @functools.wraps(test)
    def body(*arguments):
        async def run():
            shard = await Planted().begin()
            try:
                await test(shard, *arguments)
            finally:
                await shard.service.close()
                assert not shard.service.died.done()

        asyncio.run(run())

    del body.__wrapped__
    return body


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.__name__[6:])
def test_planted_damage_is_found_and_repaired(plant):
    @on_a_shard
    async def check(shard):
        before = await shard.tree()
        plant(shard)
        found = await shard.client.fsck(limit=7)
        assert found and not any(problem.repaired for problem in found)
        assert await shard.client.fsck(limit=1000) == found
        mended = await shard.client.fsck(repair=True, limit=7)
        assert mended and all(problem.repaired for problem in mended), mended
        await asyncio.sleep(0.01)
        again = await shard.client.fsck()
        assert again == [], (plant.__name__, found, again)
        after = await shard.tree()
        inodes = {inode for inode, _ in after.values()}
        lost = {number for number, _ in before.values()} - inodes
        assert len(lost) <= ("undecodable_inode" in plant.__name__) + (
            "undecodable_directory" in plant.__name__
        )
        if (
            "undecodable_" not in plant.__name__
            and "without_dentry" not in plant.__name__
            and "loop" not in plant.__name__
        ):
            assert {path: after.get(path, (0,))[0] for path in before} == {
                path: found[0] for path, found in before.items()
            }
        root = await shard.client.file(ROOT, b"new")
        assert counter_of(root.inode) >= shard.view.next_number - 1

    check()


@on_a_shard
async def test_unnamed_tree_is_moved_to_lost_and_found(shard):
    plant_directory_without_dentry(shard)
    await shard.client.fsck(repair=True)
    tree = await shard.tree()
    assert tree[b"/lost+found/#%d" % shard.sub][0] == shard.sub
    assert tree[b"/lost+found/#%d/deep" % shard.sub][0] == shard.deep
    attr = (await shard.client.lookup(ROOT, b"lost+found")).attr
    assert attr.links == 3 and attr.size == 1


@on_a_shard
async def test_changes_during_a_check_are_not_reported(shard):
    client, cursor, number = shard.client, b"", 0
    while True:
        reply = await client.ask("FSCK", pb.FsckRequest(cursor=cursor, limit=3, repair=True))
        assert not reply.problems, reply.problems
        if reply.done:
            break
        cursor = reply.cursor
        number += 1
        await client.file(shard.dir, b"n%d" % number)
        await client.rename(shard.dir, b"n%d" % number, shard.wide, b"m%d" % number)
        made = await client.mkdir(shard.sub, b"d%d" % number)
        await client.rename(shard.sub, b"d%d" % number, shard.wide, b"d%d" % number)
        if number % 3 == 0:
            await client.unlink(shard.wide, b"m%d" % number)
            await client.rmdir(shard.wide, b"d%d" % number)
        assert made.links == 2
    assert number > 10 and await client.fsck() == []


@on_a_shard
async def test_damage_is_repaired_while_the_inodes_change(shard):
    client, cursor, step = shard.client, b"", 0
    plant_wrong_link_count(shard)
    plant_wrong_directory_counts(shard)
    while True:
        reply = await client.ask("FSCK", pb.FsckRequest(cursor=cursor, limit=5, repair=True))
        if reply.done:
            break
        cursor = reply.cursor
        step += 1
        await client.link(shard.file, shard.dir, b"l%d" % step)
        await client.mkdir(shard.dir, b"d%d" % step)
    assert await client.fsck() == []
    assert (await client.getattr(shard.file)).attr.links == 2 + step


@on_a_shard
async def test_step_can_be_repeated_and_a_wrong_cursor_is_refused(shard):
    plant_wrong_count(shard)
    first = await shard.client.ask("FSCK", pb.FsckRequest(limit=10))
    second = await shard.client.ask("FSCK", pb.FsckRequest(cursor=first.cursor, limit=10))
    assert await shard.client.ask("FSCK", pb.FsckRequest(cursor=first.cursor, limit=10)) == second
    with pytest.raises(StaleCursor):
        await shard.client.ask("FSCK", pb.FsckRequest(cursor=b"x" * 12))
    with pytest.raises(StaleCursor):
        await shard.client.ask("DUMP", pb.DumpRequest(cursor=first.cursor))


@on_a_shard
async def test_number_of_concurrent_checks_is_limited(shard):
    for _ in range(3):
        await shard.client.ask("FSCK", pb.FsckRequest(limit=1))
    with pytest.raises(InUse):
        await shard.client.ask("FSCK", pb.FsckRequest(limit=1))


async def dump_all(client, limit=7):
    cursor, lines = b"", b""
    while True:
        reply = await client.ask("DUMP", pb.DumpRequest(cursor=cursor, limit=limit))
        lines += client.payload
        if reply.done:
            return lines
        cursor = reply.cursor


def stored(kv):
    """All records except sessions, slots and bounds."""
    return {
        key: raw
        for key, raw in kv.scan(b"\0", b"\xff" * 8, 10**6)
        if records.kind_of(key) not in (records.SESSION, records.SLOT, records.BOUNDS)
    }


async def load_all(client, lines, parts=3):
    rows = lines.splitlines(keepends=True)
    size = -(-len(rows) // parts)
    for at in range(0, len(rows), size):
        await client.ask(
            "LOAD", pb.LoadRequest(first=not at, last=at + size >= len(rows)), b"".join(rows[at : at + size])
        )


@on_a_shard
async def test_dump_is_consistent_and_loads_into_an_empty_shard(shard):
    client = shard.client
    await client.file(shard.dir, b"bad \xff\xfe name")
    shard.put(records.prefix(4, records.OTHER) + b"x", b"y")
    before = stored(shard.kv)
    reply = await client.ask("DUMP", pb.DumpRequest(limit=5))
    lines = client.payload
    number = 0
    while not reply.done:
        number += 1
        await client.file(shard.dir, b"later %d" % number)
        reply = await client.ask("DUMP", pb.DumpRequest(cursor=reply.cursor, limit=5))
        lines += client.payload
    kv = MemoryKv()
    other = MetaService(kv, grant_secret=b"another secret" * 3, options=OPTIONS)
    await other.start()
    empty = ShardClient(other)
    await load_all(empty, lines)
    assert stored(kv) == before
    kv.apply([(records.prefix(4, records.OTHER) + b"x", None)])
    await empty.begin()
    assert await empty.fsck() == []
    assert (await empty.lookup(shard.dir, b"file")).attr.inode == shard.file
    made = await empty.file(ROOT, b"after")
    assert counter_of(made.inode) > max(
        counter_of(records.inode_of_key(k)) for k in before if records.kind_of(k) == 0
    )
    await other.close()


@on_a_shard
async def test_load_needs_an_empty_shard_and_a_complete_dump(shard):
    client = shard.client
    lines = await dump_all(client)
    with pytest.raises(InUse):
        await load_all(client, lines)
    kv = MemoryKv()
    other = MetaService(kv, grant_secret=b"s" * 32, options=OPTIONS)
    await other.start()
    empty = ShardClient(other)
    with pytest.raises(InvalidRequest):
        await empty.ask("LOAD", pb.LoadRequest(last=True), lines)
    half = lines[: len(lines) // 2]
    with pytest.raises(InvalidRequest):
        await load_all(empty, half + b"\n{broken\n")
    await other.close()
    again = MetaService(kv, grant_secret=b"s" * 32, options=OPTIONS)
    await again.start()
    assert (await ShardClient(again).status()).state == "loading"
    await load_all(ShardClient(again), lines)
    assert (await ShardClient(again).status()).state == "serving"
    assert stored(kv) == stored(shard.kv)
    await again.close()


@on_a_shard
async def test_volume_being_removed_is_not_damage(shard):
    """Its files are removed in the background; a repair would move them to /lost+found."""
    c = shard.client
    made = (
        await c.create(ROOT, b"v", stat.S_IFDIR | 0o755, exclusive=True, volume=pb.VolumePolicy())
    ).entry.attr
    below = await c.mkdir(made.inode, b"d")
    for directory, name in ((made.inode, b"f"), (made.inode, b"g"), (below.inode, b"h")):
        await c.file(directory, name)
    await c.ask(
        "VOLUME", pb.VolumeRequest(session=c.session, inode=made.inode, action=pb.VolumeRequest.REMOVE)
    )
    assert await c.fsck() == await c.fsck(repair=True) == []
    while await shard.service.remove_more():
        pass
    assert await c.fsck() == [] and b"lost+found" not in await c.names(ROOT)
