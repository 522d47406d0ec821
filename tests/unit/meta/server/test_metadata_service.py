"""Metadata service alone: effects, refusals and stored state of each request."""

import asyncio
import stat

import pytest

from nvpool.core import errors, grants, ids
from nvpool.core.clock import ManualClock
from nvpool.core.ids import ROOT_INODE as ROOT
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaOptions, MetaService
from nvpool.meta.state import records
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import PartitionRange, changed
from nvpool.poolmap.model import Shard as MapShard
from nvpool.rpc.messages.direntries import DirectoryPage
from nvpool.rpc.v1 import meta_pb2 as pb
from nvpool.rpc.v1 import wire_pb2 as wire
from nvpool.testing.fakes.meta_shard import DirectCall, ShardClient, StoreRecorder, small_map

SECRET = b"s" * 32
OPTIONS = MetaOptions(session_lease_s=10, grant_s=20, linger_s=2, tick_s=3600)


class Shard:
    """A shard in memory with two recorded targets, on a clock that the test advances."""

    def __init__(self):
        self.kv = MemoryKv()
        self.clock = ManualClock()
        self.stores = StoreRecorder()
        self.service = None

    async def start(self):
        self.service = MetaService(
            self.kv, grant_secret=SECRET, dialer=self.stores, clock=self.clock, options=OPTIONS
        )
        self.service.update_map(small_map())
        await self.service.start()
        return self

    async def stop(self):
        await self.service.close()
        assert not self.service.died.done()

    async def restart(self):
        """Restart as after kill -9: no acknowledged change is lost."""
        await self.stop()
        await self.start()

    async def client(self, uid=0, gid=0):
        return await ShardClient(self.service, uid, gid).begin()


def run(scenario):
    """Run a scenario(shard, client) on a fresh shard."""

    async def body():
        shard = await Shard().start()
        try:
            await scenario(shard, await shard.client(1000, 100))
        finally:
            await shard.stop()

    asyncio.run(body())


def test_messages_are_accepted_in_any_kind_of_buffer():
    async def body():
        shard = await Shard().start()
        for kind in (bytes, bytearray, memoryview):
            call = DirectCall(100, kind(pb.OpenSessionRequest(client="x").SerializeToString()))
            shard.service.handle(call)
            await call.wait()
        await shard.stop()

    asyncio.run(body())


def scenario(function):
    def test():
        run(function)

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


@scenario
async def test_new_shard_has_an_empty_root(shard, client):
    root = (await client.getattr(ROOT)).attr
    assert stat.S_ISDIR(root.mode) and root.links == 2 and root.size == 0
    assert await client.names(ROOT) == set()


@scenario
async def test_created_file_is_found_with_a_valid_access_token(shard, client):
    reply = await client.create(ROOT, b"file", exclusive=True, open=True, rights=3)
    attr = reply.entry.attr
    assert (
        reply.created and attr.links == 1 and attr.uid == 1000 and attr.gid == 100 and attr.chunk_bits == 20
    )
    found = await client.lookup(ROOT, b"file", rights=1)
    assert found.attr == attr
    grant = grants.verify(found.grant, SECRET, shard.clock.wall_ns() // 1_000_000)
    assert (grant.rights, grant.session, grant.inode, grant.cut) == (1, client.session, attr.inode, 0)
    assert [e.name for e in await client.list(ROOT, attrs=True)] == [b"file"]


@scenario
async def test_removed_names_can_be_used_again(shard, client):
    made = await client.file(ROOT, b"a")
    with pytest.raises(errors.AlreadyExists):
        await client.file(ROOT, b"a")
    gone = await client.unlink(ROOT, b"a")
    assert gone.inode == made.inode and gone.links == 0
    with pytest.raises(errors.NotFound):
        await client.lookup(ROOT, b"a")
    assert (await client.file(ROOT, b"a")).inode != made.inode


@scenario
async def test_replayed_change_is_applied_once(shard, client):
    first = await client.create(ROOT, b"a", exclusive=True)
    assert first.parent.inode == ROOT and first.parent.size == 1
    first.ClearField("parent")  # sent once: not kept for replays
    client.sequences[0] -= 1
    assert await client.create(ROOT, b"a", exclusive=True) == first
    await shard.restart()
    client.service = shard.service
    await client.begin()
    client.sequences[0] -= 1
    assert await client.create(ROOT, b"a", exclusive=True) == first
    await client.file(ROOT, b"b")
    client.sequences[0] -= 2
    with pytest.raises(errors.StaleSequence):
        await client.file(ROOT, b"c")
    assert await client.names(ROOT) == {b"a", b"b"}


@scenario
async def test_truncation_is_answered_after_all_targets_truncated(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=3)).entry.attr.inode
    assert (await client.report(inode, 10_000)).size == 10_000
    shard.stores.away = {"inproc://2"}
    cutting = client.send(
        "SETATTR", pb.SetAttrRequest(change=client.change(), inode=inode, valid=8, size=5, rights=3)
    )
    growing = client.send(
        "SETATTR", pb.SetAttrRequest(change=client.change(1), inode=inode, valid=8, size=50)
    )
    asking = client.send("GETATTR", pb.GetAttrRequest(session=client.session, inode=inode, rights=1))
    await asyncio.sleep(0.05)
    assert cutting.answer is growing.answer is asking.answer is None
    assert (await client.getattr(inode)).attr.size == 5
    with pytest.raises(errors.StaleCut):
        await client.report(inode, 10_000)
    shard.stores.away = set()
    entry = pb.Entry.FromString((await cutting.wait())[0])
    assert entry.attr.size == 5 and entry.attr.cut == 1 and grants.read(entry.grant).cut == 1
    await growing.wait()
    await asking.wait()
    assert (await client.getattr(inode)).attr.size == 50
    assert {cut.target for cut in shard.stores.cuts} == {1, 2}
    assert {(cut.size, cut.cut) for cut in shard.stores.cuts} == {(5, 1)}


# -- names ------------------------------------------------------------------------------------------------------------


@scenario
async def test_invalid_names_are_refused_and_255_bytes_accepted(shard, client):
    for name, error in (
        (b"", errors.InvalidRequest),
        (b".", errors.InvalidRequest),
        (b"..", errors.InvalidRequest),
        (b"a/b", errors.InvalidRequest),
        (b"a\0b", errors.InvalidRequest),
        (b"x" * 256, errors.NameTooLong),
    ):
        with pytest.raises(error):
            await client.file(ROOT, name)
    strange = bytes(byte for byte in range(1, 256) if byte != ord("/")) + b"x"
    await client.file(ROOT, strange)
    assert len(strange) == 255 and await client.names(ROOT) == {strange}


@scenario
async def test_directory_counts_its_entries_and_subdirectories(shard, client):
    made = await client.mkdir(ROOT, b"d")
    for name in (b"x", b"y"):
        await client.mkdir(made.inode, name)
    await client.file(made.inode, b"f")
    attr = (await client.getattr(made.inode)).attr
    assert attr.links == 4 and attr.size == 3 and attr.parent == ROOT
    with pytest.raises(errors.DirectoryNotEmpty):
        await client.rmdir(ROOT, b"d")
    with pytest.raises(errors.IsADirectory):
        await client.unlink(made.inode, b"x")
    with pytest.raises(errors.NotADirectory):
        await client.rmdir(made.inode, b"f")
    await client.rmdir(made.inode, b"x")
    assert (await client.getattr(made.inode)).attr.links == 3


@scenario
async def test_removed_open_directory_accepts_no_entries(shard, client):
    made = await client.mkdir(ROOT, b"d")
    await client.open(made.inode, rights=0)
    await client.rmdir(ROOT, b"d")
    for attempt in (
        client.file(made.inode, b"f"),
        client.mkdir(made.inode, b"g"),
        client.lookup(made.inode, b"f"),
    ):
        with pytest.raises(errors.NotFound):
            await attempt
    assert await client.names(made.inode) == set() and (await client.getattr(made.inode)).attr.links == 0


@scenario
async def test_set_gid_directory_passes_on_its_group(shard, client):
    made = await client.mkdir(ROOT, b"d")
    await client.setattr(made.inode, 1 | 4, mode=0o2775, gid=77)
    sub, file = await client.mkdir(made.inode, b"s"), await client.file(made.inode, b"f")
    assert (sub.gid, sub.mode & 0o7777) == (77, 0o2755) and (file.gid, file.mode & 0o7777) == (77, 0o644)


@scenario
async def test_layout_is_inherited_and_fixed_for_a_file(shard, client):
    made = await client.mkdir(ROOT, b"d")
    before = await client.file(made.inode, b"before")
    await client.setattr(made.inode, 512, chunk_bits=22)
    sub = await client.mkdir(made.inode, b"sub")
    assert (await client.file(sub.inode, b"f")).chunk_bits == 22
    assert (await client.getattr(before.inode)).attr.chunk_bits == 20
    for fields, error in (
        ({"chunk_bits": 30, "valid": 512}, errors.InvalidRequest),
        ({"replicas": 9, "valid": 1024}, errors.InvalidRequest),
    ):
        with pytest.raises(error):
            await client.setattr(made.inode, fields.pop("valid"), **fields)
    with pytest.raises(errors.NotADirectory):
        await client.setattr(before.inode, 512, chunk_bits=22)


@scenario
async def test_hard_links_share_an_inode_up_to_the_limit(shard, client):
    made = await client.file(ROOT, b"a")
    assert (await client.link(made.inode, ROOT, b"b")).links == 2
    assert (await client.unlink(ROOT, b"a")).links == 1
    directory = await client.mkdir(ROOT, b"d")
    with pytest.raises(errors.NotPermitted):
        await client.link(directory.inode, ROOT, b"e")
    inode = shard.service.parts.view.inode(made.inode)
    inode.links = 1_000_000
    shard.kv.apply([(records.inode_key(made.inode), records.encode_inode(inode))])
    with pytest.raises(errors.TooManyLinks):
        await client.link(made.inode, ROOT, b"c")


@scenario
async def test_symlinks_and_devices_are_created_as_requested(shard, client):
    link = (await client.create(ROOT, b"l", stat.S_IFLNK | 0o777, target=b"a" * 4095)).entry.attr
    assert link.size == 4095
    reply = await client.ask("READLINK", pb.ReadLinkRequest(session=client.session, inode=link.inode))
    assert reply.target == b"a" * 4095
    with pytest.raises(errors.NameTooLong):
        await client.create(ROOT, b"m", stat.S_IFLNK | 0o777, target=b"a" * 4096)
    with pytest.raises(errors.InvalidRequest):
        await client.ask("READLINK", pb.ReadLinkRequest(session=client.session, inode=ROOT))
    assert (await client.create(ROOT, b"null", stat.S_IFCHR | 0o666, rdev=0x103)).entry.attr.rdev == 0x103
    with pytest.raises(errors.InvalidRequest):
        await client.create(ROOT, b"x", 0o644)
    with pytest.raises(errors.AlreadyExists):
        await client.create(ROOT, b"l", open=True)


@scenario
async def test_create_without_exclusive_opens_the_existing_file(shard, client):
    made = await client.file(ROOT, b"a")
    reply = await client.create(ROOT, b"a", open=True, rights=3)
    assert not reply.created and reply.entry.attr.inode == made.inode and reply.entry.grant
    await client.mkdir(ROOT, b"d")
    with pytest.raises(errors.IsADirectory):
        await client.create(ROOT, b"d", open=True)
    await client.report(made.inode, 100)
    cut = (await client.create(ROOT, b"a", open=True, rights=3, truncate=True)).entry
    assert cut.attr.size == 0 and cut.attr.cut == 1 and grants.read(cut.grant).cut == 1


# -- rename -----------------------------------------------------------------------------------------------------------


@scenario
async def test_rename_moves_replaces_exchanges_and_refuses(shard, client):
    a, b = await client.mkdir(ROOT, b"a"), await client.mkdir(ROOT, b"b")
    f, g = await client.file(a.inode, b"f"), await client.file(b.inode, b"g")
    with pytest.raises(errors.AlreadyExists):
        await client.rename(a.inode, b"f", b.inode, b"g", flags=1)
    await client.rename(a.inode, b"f", b.inode, b"g", flags=2)
    assert (await client.lookup(a.inode, b"f")).attr.inode == g.inode
    reply = await client.rename(a.inode, b"f", b.inode, b"g")
    assert (reply.inode, reply.replaced) == (g.inode, f.inode)
    assert (await client.getattr(f.inode)).attr.links == 0 and await client.names(a.inode) == set()
    with pytest.raises(errors.NotFound):
        await client.rename(a.inode, b"f", b.inode, b"g")
    with pytest.raises(errors.NotFound):
        await client.rename(b.inode, b"g", b.inode, b"h", flags=2)
    with pytest.raises(errors.InvalidRequest):
        await client.rename(b.inode, b"g", b.inode, b"h", flags=3)
    with pytest.raises(errors.IsADirectory):
        await client.rename(b.inode, b"g", ROOT, b"a")
    with pytest.raises(errors.NotADirectory):
        await client.rename(ROOT, b"a", b.inode, b"g")
    with pytest.raises(errors.DirectoryNotEmpty):
        await client.rename(ROOT, b"a", ROOT, b"b")
    await client.rename(ROOT, b"b", ROOT, b"a")
    assert await client.names(ROOT) == {b"a"} and (await client.getattr(ROOT)).attr.links == 3


@scenario
async def test_directory_never_moves_below_itself(shard, client):
    a = await client.mkdir(ROOT, b"a")
    b = await client.mkdir(a.inode, b"b")
    c = await client.mkdir(b.inode, b"c")
    for parent in (a, b, c):
        with pytest.raises(errors.WouldLoop):
            await client.rename(ROOT, b"a", parent.inode, b"x")
    with pytest.raises(errors.WouldLoop):
        await client.rename(b.inode, b"c", ROOT, b"a", flags=2)
    await client.rename(b.inode, b"c", ROOT, b"c")
    assert (await client.getattr(c.inode)).attr.parent == ROOT
    await client.rename(ROOT, b"a", c.inode, b"a")
    assert (await client.getattr(a.inode)).attr.parent == c.inode


@scenario
async def test_rename_between_names_of_one_inode_is_a_no_op(shard, client):
    a = await client.file(ROOT, b"a")
    await client.link(a.inode, ROOT, b"b")
    assert (await client.rename(ROOT, b"a", ROOT, b"b")).replaced == 0
    assert await client.names(ROOT) == {b"a", b"b"}


# -- attributes, times, size ------------------------------------------------------------------------------------------


@scenario
async def test_times_never_run_backwards_with_the_clock(shard, client):
    made = await client.file(ROOT, b"a")
    shard.clock.now_s -= 500
    later = (await client.setattr(made.inode, 1, mode=0o600)).attr
    assert later.ctime_ns >= made.ctime_ns and later.change > made.change
    set_back = (await client.setattr(made.inode, 16 | 32, atime_ns=-1, mtime_ns=123_456_789)).attr
    assert (set_back.atime_ns, set_back.mtime_ns) == (-1, 123_456_789) and set_back.ctime_ns >= later.ctime_ns
    now = (await client.setattr(made.inode, 64 | 128)).attr
    assert now.atime_ns == now.mtime_ns == now.ctime_ns


@scenario
async def test_chown_clears_the_set_uid_bit(shard, client):
    made = await client.file(ROOT, b"a")
    await client.setattr(made.inode, 1, mode=0o6755)
    assert (await client.setattr(made.inode, 2, uid=5)).attr.mode & 0o7777 == 0o755


@scenario
async def test_size_reports_only_grow_and_setattr_sets_the_size(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    assert (await client.report(inode, 5000)).size == 5000
    attr = await client.report(inode, 100)
    assert attr.size == 5000 and attr.blocks == 16
    grown = (await client.setattr(inode, 8, size=1 << 30)).attr
    assert grown.size == 1 << 30 and grown.cut == 0 and grown.blocks == 16 and not shard.stores.cuts
    with pytest.raises(errors.FileTooLarge):
        await client.setattr(inode, 8, size=1 << 51)
    with pytest.raises(errors.IsADirectory):
        await client.setattr(ROOT, 8, size=0)
    with pytest.raises(errors.InvalidRequest):
        await client.report(inode, 5, cut=9)


@scenario
async def test_unwritten_file_is_truncated_without_target_requests(shard, client):
    made = await client.file(ROOT, b"a")
    await client.setattr(made.inode, 8, size=1000)
    assert (await client.setattr(made.inode, 8, size=10)).attr.cut == 0 and not shard.stores.cuts
    await client.getattr(made.inode, rights=2)
    assert (await client.setattr(made.inode, 8, size=5)).attr.cut == 1 and len(shard.stores.cuts) == 2


@scenario
async def test_concurrent_truncations_of_a_file_are_serialized(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    await client.report(inode, 1000)
    shard.stores.away = {"inproc://1"}
    first = client.send("SETATTR", pb.SetAttrRequest(change=client.change(0), inode=inode, valid=8, size=500))
    second = client.send(
        "SETATTR", pb.SetAttrRequest(change=client.change(1), inode=inode, valid=8, size=200)
    )
    third = client.send("OPEN", pb.OpenRequest(change=client.change(2), inode=inode, rights=2, truncate=True))
    client.sequences[0] -= 1
    again = client.send("SETATTR", pb.SetAttrRequest(change=client.change(0), inode=inode, valid=8, size=500))
    await asyncio.sleep(0.03)
    assert first.answer is second.answer is third.answer is again.answer is None
    shard.stores.away = set()
    sizes = [pb.Entry.FromString((await call.wait())[0]).attr.size for call in (first, again, second, third)]
    assert sizes == [500, 500, 200, 0]
    assert [(c.cut, c.size) for c in shard.stores.cuts if c.target == 1] == [(1, 500), (2, 200), (3, 0)]


@scenario
async def test_punch_hole_reaches_its_targets_and_keeps_the_size(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    assert not (await client.allocate(inode, 0, 100, punch=True)).attr.size
    await client.report(inode, 100 << 20, cut=1)
    shard.stores.cuts.clear()
    before = (await client.getattr(inode)).attr
    entry = await client.allocate(inode, 5 << 20, 4096, punch=True, rights=3)
    assert (entry.attr.size, entry.attr.cut, entry.attr.punches) == (100 << 20, 2, 2)
    assert entry.attr.change > before.change and grants.read(entry.grant).cut == 2
    (cut,) = shard.stores.cuts
    assert (cut.size, cut.end, cut.cut) == (5 << 20, (5 << 20) + 4096, 2)
    assert cut.target in small_map().tables[0].chains[chain_of(inode, 5)].targets
    await client.allocate(inode, 0, 100 << 20, punch=True)
    assert {(c.target, c.size, c.end) for c in shard.stores.cuts[1:]} == {
        (1, 0, 100 << 20),
        (2, 0, 100 << 20),
    }
    assert await client.fsck() == []


@scenario
async def test_size_reports_older_than_a_truncation_are_refused(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    await client.allocate(inode, 0, 4096, punch=True)
    assert (await client.report(inode, 5000, cut=0)).size == 5000
    await client.allocate(inode, 0, 4096, punch=True)
    assert (await client.report(inode, 6000, cut=1)).size == 6000
    attr = (await client.setattr(inode, 8, size=10)).attr
    assert (attr.cut, attr.punches) == (3, 0)
    with pytest.raises(errors.StaleCut):
        await client.report(inode, 6000, cut=2)
    await client.allocate(inode, 0, 4096, punch=True)
    with pytest.raises(errors.StaleCut):
        await client.report(inode, 6000, cut=2)
    assert (await client.report(inode, 6000, cut=3)).size == 6000
    with pytest.raises(errors.InvalidRequest):
        await client.report(inode, 6000, cut=5)


@scenario
async def test_allocate_grows_a_file_and_never_shrinks_it(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    attr = (await client.allocate(inode, 100, 900, grow=True)).attr
    assert (attr.size, attr.cut, attr.blocks) == (1000, 0, 0) and not shard.stores.cuts
    assert (await client.allocate(inode, 0, 10, grow=True)).attr == attr
    attr = (await client.allocate(inode, 500, 1500, grow=True, punch=True)).attr
    assert (attr.size, attr.cut) == (2000, 1)
    assert (await client.allocate(inode, 1 << 30, 10, punch=True)).attr.size == 2000
    assert (await client.allocate(inode, 0, 10)).attr.size == 2000
    for offset, length, error in ((0, 0, errors.InvalidRequest), (1 << 50, 1 << 50, errors.FileTooLarge)):
        with pytest.raises(error):
            await client.allocate(inode, offset, length, grow=True)
    with pytest.raises(errors.IsADirectory):
        await client.allocate(ROOT, 0, 10, grow=True)
    made = await client.file(ROOT, b"nobody could write to it")
    assert (await client.allocate(made.inode, 0, 10, punch=True, grow=True)).attr.cut == 0


@scenario
async def test_punch_hole_waits_for_truncation_and_growth_for_both(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    await client.report(inode, 10_000)
    shard.stores.away = {"inproc://1", "inproc://2"}
    first = client.send("SETATTR", pb.SetAttrRequest(change=client.change(0), inode=inode, valid=8, size=500))
    second = client.send(
        "ALLOCATE", pb.AllocateRequest(change=client.change(1), inode=inode, length=100, punch=True)
    )
    third = client.send(
        "ALLOCATE", pb.AllocateRequest(change=client.change(2), inode=inode, length=9000, grow=True)
    )
    await asyncio.sleep(0.03)
    assert first.answer is second.answer is third.answer is None
    shard.stores.away = set()
    sizes = [pb.Entry.FromString((await call.wait())[0]).attr.size for call in (first, second, third)]
    assert sizes[0] == 500 and sizes[2] == 9000
    assert [(c.cut, c.size, c.end) for c in shard.stores.cuts if c.end] == [(2, 0, 100)]


@scenario
async def test_punch_hole_interrupted_by_restart_is_completed(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    await client.report(inode, 1000)
    shard.stores.away = {"inproc://1", "inproc://2"}
    call = client.send(
        "ALLOCATE", pb.AllocateRequest(change=client.change(), inode=inode, offset=5, length=10, punch=True)
    )
    await asyncio.sleep(0)
    await shard.restart()
    with pytest.raises(errors.Draining):
        await call.wait()
    client.service = shard.service
    client.sequences[0] -= 1
    again = client.send(
        "ALLOCATE", pb.AllocateRequest(change=client.change(), inode=inode, offset=5, length=10, punch=True)
    )
    await asyncio.sleep(0.01)
    assert again.answer is None
    shard.stores.away = set()
    assert pb.Entry.FromString((await again.wait())[0]).attr.cut == 1
    assert {(c.cut, c.size, c.end) for c in shard.stores.cuts} == {(1, 5, 15)}


@scenario
async def test_punch_hole_reduces_the_block_count(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    await client.report(inode, 1 << 20)
    shard.stores.freed = 8192
    assert (await client.allocate(inode, 4096, 8192, punch=True)).attr.size == 1 << 20
    assert (await client.getattr(inode)).attr.blocks == (1 << 20) // 512 - 16
    shard.stores.freed = 1 << 40
    await client.allocate(inode, 4096, 8192, punch=True)
    assert (await client.getattr(inode)).attr.blocks == 0
    assert await client.fsck() == []


@scenario
async def test_truncation_interrupted_by_restart_is_completed(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    await client.report(inode, 1000)
    shard.stores.away = {"inproc://1", "inproc://2"}
    call = client.send("SETATTR", pb.SetAttrRequest(change=client.change(), inode=inode, valid=8, size=5))
    await asyncio.sleep(0)
    await shard.restart()
    with pytest.raises(errors.Draining):
        await call.wait()
    client.service = shard.service
    client.sequences[0] -= 1
    again = client.send("SETATTR", pb.SetAttrRequest(change=client.change(), inode=inode, valid=8, size=5))
    await asyncio.sleep(0.01)
    assert again.answer is None
    shard.stores.away = set()
    assert pb.Entry.FromString((await again.wait())[0]).attr.cut == 1
    assert {(c.cut, c.size) for c in shard.stores.cuts} == {(1, 5)}


@scenario
async def test_truncation_reports_an_exceeded_deadline(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    await client.report(inode, 1000)
    shard.stores.away = {"inproc://1"}
    request = pb.SetAttrRequest(change=client.change(), inode=inode, valid=8, size=5)
    call = DirectCall(105, request.SerializeToString(), deadline_s=shard.clock.boottime_s() + 0.02)
    shard.service.handle(call)
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await call.wait()
    assert caught.value.may_be_applied
    shard.stores.away = set()
    assert (await client.setattr(inode, 8, size=3)).attr.cut == 2, (
        "the truncation and the service went on without the caller"
    )
    assert {(c.target, c.cut, c.size) for c in shard.stores.cuts} == {
        (1, 1, 5),
        (2, 1, 5),
        (1, 2, 3),
        (2, 2, 3),
    }


@scenario
async def test_appends_of_concurrent_writers_never_overlap(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    places = []
    for length in (10, 4096, 1, 77):
        reply = await client.ask(
            "RESERVE", pb.ReserveRequest(change=client.change(), inode=inode, length=length)
        )
        places.append((reply.offset, length))
        assert reply.attr.size == reply.offset + length
    assert places == [(0, 10), (10, 4096), (4106, 1), (4107, 77)]
    client.sequences[0] -= 1
    again = await client.ask("RESERVE", pb.ReserveRequest(change=client.change(), inode=inode, length=77))
    assert again.offset == 4107
    await client.setattr(inode, 8, size=0)
    with pytest.raises(errors.StaleCut):
        await client.ask("RESERVE", pb.ReserveRequest(change=client.change(), inode=inode, length=1))


# -- extended attributes ----------------------------------------------------------------------------------------------


@scenario
async def test_extended_attributes_round_trip_and_obey_their_rules(shard, client):
    inode = (await client.file(ROOT, b"a")).inode

    async def put(name, value, flags=0):
        return await client.ask(
            "SETXATTR",
            pb.SetXattrRequest(change=client.change(), inode=inode, name=name, value=value, flags=flags),
        )

    async def get(name):
        return (
            await client.ask("GETXATTR", pb.GetXattrRequest(session=client.session, inode=inode, name=name))
        ).value

    async def names():
        return list(
            (await client.ask("LISTXATTR", pb.ListXattrRequest(session=client.session, inode=inode))).names
        )

    assert await names() == []
    assert (await put(b"user.b", b"x" * 65536)).attr.flags & 1
    await put(b"user.a", b"")
    assert await names() == [b"user.a", b"user.b"] and await get(b"user.a") == b""
    for attempt, error in (
        (put(b"user.a", b"", 1), errors.AlreadyExists),
        (put(b"user.c", b"", 2), errors.NoAttribute),
        (put(b"user.c", b"x" * 65537), errors.TooBig),
        (get(b"user.c"), errors.NoAttribute),
        (put(b"system.posix_acl_access", b"x"), errors.InvalidRequest),
        (get(b"system.posix_acl_default"), errors.NoAttribute),
        (put(b"system.nfs4_acl", b"x"), errors.NotSupported),
        (put(b"user.", b"x"), errors.InvalidRequest),
        (put(b"user." + b"n" * 255, b"x"), errors.RangeTooSmall),
    ):
        with pytest.raises(error):
            await attempt
    for name in (b"user.a", b"user.b"):
        last = await client.ask(
            "REMOVEXATTR", pb.RemoveXattrRequest(change=client.change(), inode=inode, name=name)
        )
    assert last.attr.flags & 1 == 0 and await names() == []


# -- listings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True])
def test_list_returns_each_name_once_during_changes(wide):
    async def body(shard, client):
        made = await client.mkdir(ROOT, b"d", wide=wide)
        kept = {b"k%d" % number for number in range(150)}
        gone = {b"g%d" % number for number in range(50)}
        for name in kept | gone:
            await client.file(made.inode, name)
        for limit in (1 if not wide else 40, 7, 64, 1000):
            assert await client.names(made.inode, limit) == kept | gone
        seen, cursor, removed = [], 0, sorted(gone)
        while True:
            request = pb.ListDirRequest(session=client.session, inode=made.inode, cursor=cursor, limit=9)
            reply = await client.ask("LIST", request)
            seen += [entry.name for entry in reply.entries]
            if not reply.more:
                break
            cursor = reply.entries[-1].cursor
            await client.file(made.inode, b"new%d" % len(seen))
            if removed:
                await client.unlink(made.inode, removed.pop())
        assert len(seen) == len(set(seen)) and kept <= set(seen)
        assert [e.cursor for e in await client.list(made.inode)] == sorted(
            e.cursor for e in await client.list(made.inode)
        )
        assert await client.fsck() == []

    run(body)


@scenario
async def test_names_with_equal_hashes_are_all_listed(shard, client):
    shard.service.parts.view.name_hash = lambda directory, name: bytes([0, 0, 0, 0, 0, 0, 1 + len(name) % 2])
    names = {b"n%d" % number for number in range(30)} | {b"m%d" % number for number in range(10, 40)}
    for name in names:
        await client.file(ROOT, name)
    for limit in (1, 2, 5, 7, 100):
        assert await client.names(ROOT, limit) == names


@scenario
async def test_striped_directory_is_removed_only_when_empty(shard, client):
    made = await client.mkdir(ROOT, b"d", wide=True)
    assert made.flags & 4
    inodes = {(await client.file(made.inode, b"%d" % number)).inode >> 51 for number in range(30)}
    assert len(inodes) > 20
    with pytest.raises(errors.DirectoryNotEmpty):
        await client.rmdir(ROOT, b"d")
    for number in range(30):
        await client.unlink(made.inode, b"%d" % number)
    await client.rmdir(ROOT, b"d")


@scenario
async def test_list_attributes_match_getattr(shard, client):
    made = await client.file(ROOT, b"a")
    (entry,) = await client.list(ROOT, attrs=True)
    assert entry.attr.SerializeToString() == made.SerializeToString()
    assert entry.inode == made.inode and entry.kind == 8
    with pytest.raises(errors.NotADirectory):
        await client.list(made.inode)
    with pytest.raises(errors.StaleCursor):
        await client.ask("LIST", pb.ListDirRequest(session=client.session, inode=ROOT, cursor=3))


async def both(client, **request):
    """Entries as messages, and packed, of the same request; whether there are more."""
    in_messages, in_one = [
        await client.ask(
            "LIST", pb.ListDirRequest(session=client.session, attrs=True, packed=packed, **request)
        )
        for packed in (False, True)
    ]
    assert in_messages.more == in_one.more and not in_one.entries and not in_messages.packed
    return list(in_messages.entries), DirectoryPage(in_one.packed), in_one.more


@scenario
async def test_packed_listing_matches_message_listing(shard, client):
    made = await client.mkdir(ROOT, b"d")
    for number in range(40):
        await client.file(made.inode, b"f%d" % number)
    await client.mkdir(made.inode, b"sub")
    await client.setattr((await client.file(made.inode, b"owned")).inode, 2 | 4, uid=70_000, gid=3)
    await client.create(made.inode, b"opened", open=True, rights=3)
    cursor, more, names = 0, True, []
    while more:
        entries, listed, more = await both(client, inode=made.inode, cursor=cursor, limit=7)
        assert [
            (one.name, one.cursor, one.inode, one.kind, one.attr.SerializeToString()) for one in listed
        ] == [(one.name, one.cursor, one.inode, one.kind, one.attr.SerializeToString()) for one in entries]
        names += listed.names
        cursor = listed.cursor(-1)
    assert len(names) == 43 == len(set(names))


@scenario
async def test_list_omits_unreadable_inodes(shard, client):
    numbers = {name: (await client.file(ROOT, name)).inode for name in (b"whole", b"gone", b"garbled")}
    shard.kv.apply(
        [(records.inode_key(numbers[b"gone"]), None), (records.inode_key(numbers[b"garbled"]), b"\xff" * 30)]
    )
    entries, listed, _ = await both(client, inode=ROOT)
    assert listed.names == [b"whole"] == [entry.name for entry in entries]

    def damaged(keys):
        raise errors.CorruptRecord("one of them")

    shard.service.parts.view.get_many = damaged
    assert (await both(client, inode=ROOT))[1].names == [b"whole"]


@scenario
async def test_list_continues_after_many_unreadable_inodes(shard, client):
    numbers = [(await client.file(ROOT, b"f%d" % number)).inode for number in range(40)]
    shard.kv.apply([(records.inode_key(number), None) for number in numbers[:20] + numbers[21:]])
    cursor, more, names = 0, True, []
    for _ in range(40):
        _, listed, more = await both(client, inode=ROOT, cursor=cursor, limit=3)
        names += listed.names
        if not more:
            break
        assert listed.names, "the client could not continue"
        cursor = listed.cursor(-1)
    assert names == [b"f20"] and not more


# -- sessions, orphans, collector -------------------------------------------------------------------------------------


@scenario
async def test_unlinked_file_is_collected_after_its_last_close(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    await client.report(inode, 10)
    await client.unlink(ROOT, b"a")
    shard.clock.advance(3)
    assert (await client.collect()).left == 1
    assert (await client.getattr(inode, rights=1)).attr.links == 0
    with pytest.raises(errors.NotFound):
        await client.link(inode, ROOT, b"b")
    await client.report(inode, 20, release=True)
    shard.stores.away = {"inproc://2"}
    reply = await client.collect()
    assert (reply.inodes, reply.left) == (0, 1)
    with pytest.raises(errors.NotFound):
        await client.getattr(inode)
    shard.stores.away = set()
    reply = await client.collect()
    assert (reply.inodes, reply.left) == (1, 0)
    assert {r.target for r in shard.stores.removed} == {1, 2}
    assert all(int.from_bytes(r.inodes, "little") == inode for r in shard.stores.removed)
    grant = grants.verify(shard.stores.removed[0].authority, SECRET, shard.clock.wall_ns() // 1_000_000)
    assert grant.rights == grants.SERVICE
    assert await client.fsck() == []


@scenario
async def test_unlinked_file_is_kept_for_opens_reported_later(shard, client):
    made = await client.file(ROOT, b"a")
    await client.unlink(ROOT, b"a")
    shard.clock.advance(1)
    await client.collect()
    await client.ask(
        "RENEW_SESSION",
        pb.RenewSessionRequest(session=client.session, opened=made.inode.to_bytes(8, "little")),
    )
    shard.clock.advance(5)
    await client.collect()
    assert (await client.getattr(made.inode)).attr.links == 0
    await client.ask(
        "RELEASE", pb.ReleaseRequest(session=client.session, inodes=made.inode.to_bytes(8, "little"))
    )
    await client.collect()
    with pytest.raises(errors.NotFound):
        await client.getattr(made.inode)
    assert not shard.stores.removed, "no client could have written to it"


@scenario
async def test_chunk_removals_are_batched_per_target(shard, client):
    wide = await client.mkdir(ROOT, b"w", wide=True)
    for number in range(60):
        await client.file(wide.inode, b"%d" % number, open=True, rights=2)
        await client.unlink(wide.inode, b"%d" % number)
    await client.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=client.session))
    shard.clock.advance(3)
    shard.stores.away = {"inproc://1"}
    assert (await client.collect()).left == 60
    shard.stores.away, shard.stores.removed = set(), []
    reply = await client.collect()
    assert (reply.inodes, reply.left) == (60, 0)
    assert sorted((r.target, len(r.inodes)) for r in shard.stores.removed) == [(1, 480), (2, 480)]
    assert not shard.service.parts.collector.queued


@scenario
async def test_sweep_removes_only_chunks_of_removed_inodes(shard, client):
    living = [(await client.file(ROOT, b"f%d" % number)).inode for number in range(3)]
    given = ids.inode_number(5, 2)  # the counter of the first file, in a partition where it was not born
    waiting, future = ids.inode_number(6, 3), ids.inode_number(0, shard.service.parts.view.next_number)
    shard.kv.apply(
        [(records.numbered_key(records.COLLECT, waiting), records.encode_collect(records.Collect(1, 20)))]
    )
    shard.stores.kept[2] = [*living, given, waiting, future, 1 << 63]
    assert await shard.service.parts.collector.sweep(2) == 1
    assert [(r.target, int.from_bytes(r.inodes, "little")) for r in shard.stores.removed] == [(2, given)]


@scenario
async def test_collect_without_a_session_removes_orphan_chunks(shard, client):
    living, lost = (await client.file(ROOT, b"f")).inode, ids.inode_number(5, 2)
    shard.stores.kept[2] = [living, lost]
    await client.ask("SYNC", pb.SyncRequest())
    assert (await client.ask("COLLECT", pb.CollectRequest())).inodes == 1
    assert [(r.target, int.from_bytes(r.inodes, "little")) for r in shard.stores.removed] == [(2, lost)]


@scenario
async def test_expired_session_keeps_files_until_its_tokens_expire(shard, client):
    other = await shard.client()
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    await client.unlink(ROOT, b"a")
    shard.clock.advance(8)
    await other.ask("RENEW_SESSION", pb.RenewSessionRequest(session=other.session))
    shard.clock.advance(3)
    await shard.service.run_once()
    with pytest.raises(errors.StaleSession):
        await client.lookup(ROOT, b"a")
    assert (await other.getattr(inode)).attr.links == 0
    shard.clock.advance(9)
    await other.ask("RENEW_SESSION", pb.RenewSessionRequest(session=other.session))
    shard.clock.advance(9)
    await shard.service.run_once()
    assert (await other.getattr(inode)).attr.links == 0
    await other.ask("RENEW_SESSION", pb.RenewSessionRequest(session=other.session))
    shard.clock.advance(3)
    await shard.service.run_once()
    with pytest.raises(errors.NotFound):
        await other.getattr(inode)
    assert await other.fsck() == []


@scenario
async def test_clients_report_open_files_after_a_restart(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    await client.unlink(ROOT, b"a")
    first = (await client.ask("RENEW_SESSION", pb.RenewSessionRequest(session=client.session))).incarnation
    await shard.restart()
    client.service = shard.service
    shard.clock.advance(9)
    assert (await client.collect()).left == 1
    reply = await client.ask(
        "RENEW_SESSION", pb.RenewSessionRequest(session=client.session, opened=inode.to_bytes(8, "little"))
    )
    assert reply.incarnation != first
    shard.clock.advance(5)
    await client.collect()
    assert (await client.getattr(inode)).attr.links == 0
    await client.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=client.session))
    other = await shard.client()
    assert (await other.collect()).inodes == 1


@scenario
async def test_create_replayed_after_a_restart_keeps_the_file_open(shard, client):
    for name, truncate in ((b"f", False), (b"g", True)):
        if truncate:
            await client.file(ROOT, name, open=True, rights=3)
        request = pb.CreateRequest(
            change=client.change(),
            parent=ROOT,
            name=name,
            mode=stat.S_IFREG | 0o644,
            open=True,
            rights=3,
            truncate=truncate,
        )
        inode = (await client.ask("CREATE", request)).entry.attr.inode
        await shard.restart()
        client.service = shard.service
        for _ in range(2):
            await client.ask("CREATE", request)
        assert shard.service.parts.sessions.get(client.session).opens[inode] == 1


@scenario
async def test_grace_period_after_restart_survives_a_stall(shard, client):
    inode = (await client.file(ROOT, b"f", open=True, rights=3)).inode
    await client.unlink(ROOT, b"f")
    await shard.stop()
    shard.service = MetaService(
        shard.kv,
        grant_secret=SECRET,
        dialer=shard.stores,
        clock=shard.clock,
        options=OPTIONS._replace(tick_s=0.05),
    )
    shard.service.update_map(small_map())
    await shard.service.start()
    client.service = shard.service
    await asyncio.sleep(0.12)
    shard.clock.advance(100)
    await asyncio.sleep(0.2)
    await client.ask(
        "RENEW_SESSION", pb.RenewSessionRequest(session=client.session, opened=inode.to_bytes(8, "little"))
    )
    assert (await client.getattr(inode)).attr.links == 0


@scenario
async def test_session_is_resumed_only_with_its_secret(shard, client):
    await client.file(ROOT, b"a")
    with pytest.raises(errors.StaleSession):
        await client.ask("OPEN_SESSION", pb.OpenSessionRequest(session=client.session, secret=b"guess"))
    reply = await client.ask(
        "OPEN_SESSION", pb.OpenSessionRequest(session=client.session, secret=client.secret)
    )
    assert reply.session == client.session and reply.sequences[0] == 1 and len(reply.sequences) == 64
    await client.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=client.session))
    await client.ask("CLOSE_SESSION", pb.CloseSessionRequest(session=client.session))
    with pytest.raises(errors.StaleSession):
        await client.file(ROOT, b"b")


@scenario
async def test_resumed_session_keeps_reported_and_replayable_opens(shard, client):
    def session():
        return shard.service.parts.sessions.get(client.session)

    async def resume(*named):
        await client.ask(
            "OPEN_SESSION",
            pb.OpenSessionRequest(
                session=client.session,
                secret=client.secret,
                names_open=True,
                opened=b"".join(inode.to_bytes(8, "little") for inode in named),
            ),
        )

    kept, closed = [
        (await client.create(ROOT, name, open=True, rights=3)).entry.attr.inode
        for name in (b"kept", b"closed")
    ]
    await client.ask("OPEN", pb.OpenRequest(change=client.change(), inode=kept, rights=1))
    last = (await client.create(ROOT, b"last", open=True, rights=3)).entry.attr.inode
    assert session().opens == {kept: 2, closed: 1, last: 1}
    await resume(kept)
    assert session().opens == {kept: 1, last: 1}, "the last change of the slot may be replayed"
    client.sequences[0] -= 1
    assert (await client.create(ROOT, b"last", open=True, rights=3)).entry.attr.inode == last
    assert session().opens == {kept: 1, last: 1}
    await client.ask("RELEASE", pb.ReleaseRequest(session=client.session, inodes=last.to_bytes(8, "little")))
    await resume(kept)
    assert session().opens == {kept: 1}
    await resume(kept, closed)
    assert session().opens == {kept: 1, closed: 1} and shard.service.parts.sessions.holders == {
        kept: 1,
        closed: 1,
    }


@scenario
async def test_opens_without_a_replay_are_released_after_a_kill(shard, client):
    def opens():
        return shard.service.parts.sessions.get(client.session).opens

    async def resume(*named, slots=()):
        await client.ask(
            "OPEN_SESSION",
            pb.OpenSessionRequest(
                session=client.session,
                secret=client.secret,
                names_open=True,
                names_slots=True,
                slots=slots,
                opened=b"".join(inode.to_bytes(8, "little") for inode in named),
            ),
        )

    async def create(name, slot):
        request = pb.CreateRequest(
            change=client.change(slot), parent=ROOT, name=name, mode=0o100644, open=True, rights=3
        )
        return (await client.ask("CREATE", request)).entry.attr.inode, request

    async def release(inodes=(), slots=()):
        await client.ask(
            "RELEASE",
            pb.ReleaseRequest(
                session=client.session,
                inodes=b"".join(inode.to_bytes(8, "little") for inode in inodes),
                slots=slots,
            ),
        )

    closed, _ = await create(b"closed", 1)  # answered, closed, and the release not sent
    again, request = await create(b"again", 2)
    never, _ = await create(b"never", 3)
    newer, _ = await create(b"newer", 4)
    both, _ = await create(b"both", 5)
    refused, _ = await create(b"refused", 6)
    await resume(both, slots=(2, 3, 4, 5, 6, 7))
    assert opens() == {both: 2, again: 1, never: 1, newer: 1, refused: 1}, (
        "the create of the closed file was answered"
    )

    await client.ask("CREATE", request)
    await release(slots=(2, 3, 7))
    assert opens() == {both: 2, again: 1, newer: 1, refused: 1}, "a replayed create belongs to the client"
    await client.ask("UNLINK", pb.UnlinkRequest(change=client.change(4), parent=ROOT, name=b"newer"))
    assert opens() == {both: 2, again: 1, refused: 1}, "the slot is reused"
    with pytest.raises(errors.NotFound):
        await client.ask("UNLINK", pb.UnlinkRequest(change=client.change(6), parent=ROOT, name=b"nothing"))
    assert opens() == {both: 2, again: 1}
    await release((both,))
    assert opens() == {both: 1, again: 1}
    await release(slots=(5,))
    await release((again,), slots=(5,))
    assert opens() == {} and shard.service.parts.sessions.holders == {}
    await resume(slots=range(64))
    assert opens() == {}


@scenario
async def test_replayed_refusal_is_refused_again(shard, client):
    await client.file(ROOT, b"a")
    with pytest.raises(errors.AlreadyExists):
        await client.file(ROOT, b"a")
    late = client.last.message
    await client.ask("UNLINK", pb.UnlinkRequest(change=client.change(1), parent=ROOT, name=b"a"))
    call = DirectCall(wire.META_CREATE, late)
    shard.service.handle(call)
    with pytest.raises(errors.AlreadyExists):
        await call.wait()
    assert await client.names(ROOT) == set()


@scenario
async def test_invalid_requests_are_refused_without_changes(shard, client):
    before = shard.kv.sequence
    asks_nothing = {133, 134}  # META_STATUS and META_COLLECT have empty messages
    for method in {*range(100, 135), 1, 0, 999} - asks_nothing:
        for message in (b"\xff\xff\xff", b"\x08"):
            call = DirectCall(method, message)
            shard.service.handle(call)
            with pytest.raises(errors.NvpoolError):
                await call.wait()
    for change in (
        pb.Change(session=client.session, slot=64, sequence=1),
        pb.Change(session=client.session, sequence=0),
    ):
        with pytest.raises(errors.InvalidRequest):
            await client.ask("UNLINK", pb.UnlinkRequest(change=change, parent=ROOT, name=b"a"))
    for inode in (0, 1 << 63, (1 << 64) - 1, 12345):
        with pytest.raises(errors.NotFound):
            await client.getattr(inode)
    for inode in (
        0,
        1 << 63,
        (1 << 64) - 1,
    ):  # `spread` is trusted: only the inode's own shard knows whether it is
        for method, request in (
            ("LIST", pb.ListDirRequest(session=client.session, inode=inode, cursor=1 << 62, spread=True)),
            ("LOOKUP", pb.LookupRequest(session=client.session, parent=inode, name=b"a", spread=True)),
        ):
            with pytest.raises(errors.NotFound):
                await client.ask(method, request)
    assert shard.kv.sequence == before


@scenario
async def test_inode_numbers_are_unique_across_power_losses(shard, client):
    given = set()
    for round_number in range(4):
        for number in range(3):
            given.add((await client.file(ROOT, b"r%d-%d" % (round_number, number))).inode & (1 << 51) - 1)
        await shard.service.close()
        shard.kv.crash()
        await shard.start()
        client = await shard.client()
    assert len(given) == 12
    assert await client.fsck() == []


@scenario
async def test_report_with_sync_is_answered_when_it_is_durable(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=2)).entry.attr.inode
    assert shard.kv.synced_sequence < shard.kv.sequence
    await client.report(inode, 10, sync=True)
    assert shard.kv.synced_sequence == shard.kv.sequence
    await client.file(ROOT, b"b")
    await client.ask("SYNC", pb.SyncRequest(session=client.session))
    assert shard.kv.synced_sequence == shard.kv.sequence


@scenario
async def test_engine_that_fences_itself_ends_the_service(shard, client):
    shard.kv.fail_next_sync()
    with pytest.raises(errors.Fenced):
        await client.ask("SYNC", pb.SyncRequest(session=client.session))
    with pytest.raises(errors.Fenced):
        await client.file(ROOT, b"a")
    assert (await client.status()).state == "fenced"
    with pytest.raises(errors.Fenced):
        await shard.service.died
    shard.kv.crash()
    await shard.service.close()
    await shard.start()


@scenario
async def test_changes_wait_for_a_full_engine_and_are_applied_once(shard, client):
    room = asyncio.Event()
    shard.kv.full, shard.kv.room = True, room.wait
    calls = [
        client.send(
            "CREATE",
            pb.CreateRequest(change=client.change(slot), parent=ROOT, name=b"a%d" % slot, mode=0o100644),
        )
        for slot in range(3)
    ]
    client.sequences[0] -= 1
    calls.append(
        client.send(
            "CREATE", pb.CreateRequest(change=client.change(), parent=ROOT, name=b"a0", mode=0o100644)
        )
    )
    await client.getattr(ROOT)
    assert all(call.answer is None for call in calls)
    shard.kv.full = False
    room.set()
    answers = [pb.CreateReply.FromString((await call.wait())[0]) for call in calls]
    assert answers[0].entry == answers[3].entry and await client.names(ROOT) == {b"a0", b"a1", b"a2"}


@scenario
async def test_statfs_and_status_count(shard, client):
    await client.file(ROOT, b"a")
    reply = await client.ask("STATFS", pb.StatFsRequest(session=client.session))
    assert reply.files == 2 and reply.files_max > 10**6
    status = await client.status()
    assert (
        status.state == "serving"
        and status.inodes == 2
        and status.sessions == 1
        and status.counters["kv_syncs"] >= 1
    )


@scenario
async def test_name_of_another_shard_is_refused(shard, client):
    pool_map = small_map()
    shard.service.update_map(
        changed(
            pool_map,
            shards=(*pool_map.shards, MapShard(2, 1, ("inproc://m2",))),
            partitions=(PartitionRange(0, 100, 1), PartitionRange(100, 3996, 2)),
        )
    )
    with pytest.raises(errors.WrongShard):
        await client.getattr(2000 << 51 | 5)
    await client.file(ROOT, b"a")


def test_service_that_fails_to_start_is_closed():
    async def main():
        kv = MemoryKv()
        await kv.close()
        service = MetaService(kv, grant_secret=b"s" * 16)
        with pytest.raises(errors.NvpoolError):
            await service.start()
        await service.close()

    asyncio.run(main())
