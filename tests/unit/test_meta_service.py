"""The metadata service by itself: what each request does, refuses and leaves behind."""

import asyncio
import stat

import pytest

from nvpool.base import errors, grants
from nvpool.base.clock import ManualClock
from nvpool.base.ids import ROOT_INODE as ROOT
from nvpool.kv.memory import MemoryKv
from nvpool.meta.service import MetaOptions, MetaService
from nvpool.testing.meta_shard import ShardClient, StoreRecorder, small_map
from nvpool.wire.v1 import meta_pb2 as pb

SECRET = b"s" * 32
OPTIONS = MetaOptions(session_lease_s=10, grant_s=20, linger_s=2, tick_s=3600)


class Shard:
    """A shard in memory with two recorded targets, on a clock that is moved by hand."""

    def __init__(self):
        self.kv = MemoryKv()
        self.clock = ManualClock()
        self.stores = StoreRecorder()
        self.service = None

    async def start(self):
        self.service = MetaService(self.kv, grant_secret=SECRET, dialer=self.stores, clock=self.clock, options=OPTIONS)
        self.service.update_map(small_map())
        await self.service.start()
        return self

    async def stop(self):
        await self.service.close()
        assert not self.service.died.done()

    async def restart(self):
        """As after kill -9: nothing that was answered is lost."""
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


def scenario(function):
    def test():
        run(function)

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


@scenario
async def test_a_new_shard_has_an_empty_root(shard, client):
    root = (await client.getattr(ROOT)).attr
    assert stat.S_ISDIR(root.mode) and root.links == 2 and root.size == 0
    assert await client.names(ROOT) == set()


@scenario
async def test_a_created_file_is_found_with_a_grant_that_the_stores_accept(shard, client):
    reply = await client.create(ROOT, b"file", exclusive=True, open=True, rights=3)
    attr = reply.entry.attr
    assert reply.created and attr.links == 1 and attr.uid == 1000 and attr.gid == 100 and attr.chunk_bits == 20
    found = await client.lookup(ROOT, b"file", rights=1)
    assert found.attr == attr
    grant = grants.verify(found.grant, SECRET, shard.clock.wall_ns() // 1_000_000)
    assert (grant.rights, grant.session, grant.inode, grant.cut) == (1, client.session, attr.inode, 0)
    assert [e.name for e in await client.list(ROOT, attrs=True)] == [b"file"]


@scenario
async def test_names_go_and_their_places_are_free_again(shard, client):
    made = await client.file(ROOT, b"a")
    with pytest.raises(errors.AlreadyExists):
        await client.file(ROOT, b"a")
    gone = await client.unlink(ROOT, b"a")
    assert gone.inode == made.inode and gone.links == 0
    with pytest.raises(errors.NotFound):
        await client.lookup(ROOT, b"a")
    assert (await client.file(ROOT, b"a")).inode != made.inode


@scenario
async def test_a_repeated_change_is_made_once_and_answered_again(shard, client):
    first = await client.create(ROOT, b"a", exclusive=True)
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
async def test_a_truncation_is_answered_when_all_targets_have_cut(shard, client):
    inode = (await client.create(ROOT, b"a", open=True, rights=3)).entry.attr.inode
    assert (await client.report(inode, 10_000)).size == 10_000
    shard.stores.away = {"inproc://2"}
    cutting = client.send("SETATTR", pb.SetAttrRequest(change=client.change(), inode=inode, valid=8, size=5, rights=3))
    growing = client.send("SETATTR", pb.SetAttrRequest(change=client.change(1), inode=inode, valid=8, size=50))
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
