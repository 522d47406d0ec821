"""Resynchronization of a target that joins chains: at the end each of their chunks equals that of the source.

Two or three stores over real transports. The chain's handling of writes is simulated in its simplest form: a write goes to
the joining target first, which pulls the chunk that the write is based on, and then to the source.
"""

import asyncio
import contextlib
import os
import random
import shutil
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvpool.core import errors, grants
from nvpool.core.checksum import piece_checksums
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.ids import RequestId, version, version_parts
from nvpool.core.units import BLOCK_BYTES, CHAINS_PER_TABLE, MIB
from nvpool.poolmap.chains.tables import ChainSet
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import MAP_FORMAT, Chain, ChainTable, Drive, Node, PoolMap, PoolSettings, Target
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.transport_registry import listen
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.chunks.api import StoreOptions, create_chunk_store
from nvpool.store.chunks.block_store import open_chunk_store
from nvpool.store.chunks.memory_store import MemoryChunkStore
from nvpool.store.chunks.read_batch import RESULT
from nvpool.store.disk.index_records import encode_segment, segment_key
from nvpool.store.replication.transfer_client import OtherTargets
from nvpool.store.server.service import StoreService
from nvpool.store.server.writes import WRITE
from nvpool.testing.contracts.chunk_store import content, get, is_sound, put, some_bytes
from nvpool.testing.contracts.chunk_transfer import everything
from tests.unit.store.chunks.test_durability import Forgetful

SECRET = b"k" * 32
CAPACITY = 64 * MIB
SOURCE, JOINER, THIRD = 1, 2, 3
FAST = 1 << 40
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


class Stores:
    """Targets of one pool, each with its service, listener and dialer."""

    def __init__(self, directory, scheme="stream", memory=False, rate=FAST):
        self.directory, self.scheme, self.memory, self.rate = directory, scheme, memory, rate
        self.stores, self.services, self.listeners, self.dialers, self.endpoints = {}, {}, {}, {}, {}
        self.failed = []
        self.has_bad_blocks = False
        self.map = None

    async def start(self, target):
        store = self.stores[target] = await self.open(target)
        dialer = self.dialers[target] = Dialer(Greeting(f"target {target}"))
        service = self.services[target] = StoreService(
            store,
            target=target,
            grant_secret=SECRET,
            dialer=dialer,
            resync_bytes_per_s=self.rate,
            on_fail=self.failed.append,
        )
        if self.map is not None:
            service.update_map(self.map)
        await service.start()
        endpoint = (
            self.endpoints.get(target)
            or {
                "stream": "stream://127.0.0.1:0",
                "grpc": "grpc://127.0.0.1:0",
                "inproc": f"inproc://resync-{id(self)}-{target}",
            }[self.scheme]
        )
        listener = self.listeners[target] = await listen(
            endpoint, Greeting(f"target {target}"), service.handle
        )
        self.endpoints[target] = listener.endpoint
        return store

    async def open(self, target):
        if self.memory:
            return self.stores.get(target) or MemoryChunkStore(CAPACITY)
        path = self.directory / str(target)
        if not path.exists():
            create_chunk_store(path, target, "pool", CAPACITY)
        return await open_chunk_store(path, target, StoreOptions())

    async def close(self):
        pass

    async def stop(self, target, kill=False):
        await self.listeners.pop(target).close()
        service = self.services.pop(target)
        if kill and not self.memory:
            await service.upkeep.close()
            await service.stop_tending()
            await self.stores[target].abandon()
        elif not self.memory:
            await service.close()
        else:
            await service.upkeep.close()
            await service.stop_tending()
        await self.dialers.pop(target).close()

    def use(self, chains, tables=(1,), only=None, requests=None):
        """Apply the next map, in which chain n of each table is chains(table, n), to these targets or all."""
        targets = tuple(
            Target(
                number,
                number,
                number,
                CAPACITY,
                (endpoint,),
                desired_state=(requests or {}).get(number, "share"),
            )
            for number, endpoint in self.endpoints.items()
        )
        self.map = PoolMap(
            MAP_FORMAT,
            "pool",
            "pool",
            self.map.epoch + 1 if self.map else 5,
            PoolSettings(),
            nodes=tuple(Node(t.id, f"n{t.id}", "", ()) for t in targets),
            drives=tuple(Drive(t.id, t.id, "", CAPACITY) for t in targets),
            targets=targets,
            tables=tuple(
                ChainTable(table, tuple(chains(table, number) for number in range(CHAINS_PER_TABLE)))
                for table in tables
            ),
        )
        for target in only or self.services:
            self.services[target].update_map(self.map)

    def resync(self, target=JOINER):
        return self.services[target].upkeep.resync

    async def equal(self, target=JOINER, epoch=None, count=CHAINS_PER_TABLE, within_s=30):
        """Wait until the target reports that all its chains are equal."""
        async with asyncio.timeout(within_s):
            while len(self.resync(target).equal) < count or (
                epoch and set(self.resync(target).equal.values()) != {epoch}
            ):
                assert not self.failed
                await asyncio.sleep(0.005)


@asynccontextmanager
async def stores(*targets, kind=Stores, **named):
    directory = Path(tempfile.mkdtemp(prefix="resync-", dir=IN_MEMORY))
    one = kind(directory, **named)
    try:
        for target in targets or (SOURCE, JOINER):
            await one.start(target)
        yield one
        assert not one.failed
        for target, store in one.stores.items():
            if target in one.services and not one.has_bad_blocks:
                await is_sound(store)
    finally:
        for target in list(one.services):
            await one.stop(target, kill=True)
        await one.close()
        shutil.rmtree(directory)


def joins(epoch=7, source=SOURCE, joiner=JOINER):
    return lambda table, number: Chain(epoch, (source,), (joiner,))


async def same(one, target=JOINER, source=SOURCE):
    ours, theirs = await everything(one.stores[target]), await everything(one.stores[source])
    assert ours.keys() == theirs.keys()
    for name, copy in theirs.items():
        assert replace(ours[name], known=copy.known) == copy, name


async def fill(store, seed=1, count=60, epoch=3, cut=0):
    chance = random.Random(seed)
    for number in range(count):
        inode, index = chance.randrange(1, 30), chance.randrange(4)
        await put(
            store,
            inode,
            index,
            chance.randrange(MIB),
            some_bytes(chance.choice((10, 4096, 70_000)), number),
            epoch=epoch,
            cut=cut,
            request=RequestId(9, chance.randrange(5), number),
        )


@pytest.mark.parametrize(
    "named",
    [{"scheme": "stream"}, {"scheme": "grpc"}, {"scheme": "inproc"}, {"scheme": "inproc", "memory": True}],
    ids=str,
)
def test_empty_target_becomes_equal_to_its_source(named):
    async def run():
        async with stores(**named) as one:
            await fill(one.stores[SOURCE])
            one.use(joins())
            await one.equal(epoch=7)
            await same(one)
            progress = one.resync().progress
            assert progress.chains == progress.chains_equal == CHAINS_PER_TABLE and progress.seconds_left == 0
            assert (
                progress.chunks_copied == len(await everything(one.stores[SOURCE])) and not progress.waits_for
            )

    asyncio.run(run())


def test_returning_target_drops_data_missing_at_its_source():
    """Differences: older versions, higher uncommitted ones, extra chunks, and missed truncations."""

    async def run():
        async with stores() as one:
            ours, theirs = one.stores[JOINER], one.stores[SOURCE]
            for store in (ours, theirs):
                await fill(store)
            for inode in range(1, 30, 3):
                await put(theirs, inode, 0, 5000, some_bytes(9000, inode), epoch=4)
                await put(ours, inode, 1, 5000, some_bytes(9000, inode), epoch=5)
            for inode in range(2, 30, 3):
                await theirs.cut(inode, 300_000, 7, 20)
            await theirs.remove([5, 6])
            for index in range(200):
                await put(ours, 40, index, 0, b"of nobody")
            one.use(joins())
            await one.equal(epoch=7)
            await same(one)
            assert one.resync().progress.chunks_removed >= 200
            with pytest.raises(errors.StaleCut):
                await put(ours, 8, 0, 0, b"late", cut=6)
            copied = one.resync().progress.chunks_copied
            one.use(joins(8))
            await one.equal(epoch=8)
            assert one.resync().progress.chunks_copied == copied, "equal chunks are not copied"

    asyncio.run(run())


def test_only_joined_chains_are_compared_with_their_tails():
    def chains(table, number):
        if table == 2:
            return Chain(9, (JOINER, SOURCE))
        return (
            Chain(7, (THIRD, SOURCE), (JOINER,)),
            Chain(8, (SOURCE, THIRD), (JOINER,)),
            Chain(5, (JOINER,)),
        )[number % 3]

    async def run():
        async with stores(SOURCE, JOINER, THIRD) as one:
            for inode in range(1, 60):
                table = 1 + inode % 2
                for target, store in one.stores.items():
                    await put(
                        store, inode, 0, 0, some_bytes(5000, inode * 10 + target), epoch=target, table=table
                    )
            before = {target: await everything(store) for target, store in one.stores.items()}
            one.use(chains, tables=(1, 2))
            joined = sum(number % 3 < 2 for number in range(CHAINS_PER_TABLE))
            await one.equal(count=joined)
            assert set(one.resync().equal.values()) == {7, 8} and len(one.resync().equal) == joined
            after = await everything(one.stores[JOINER])
            for name, copy in after.items():
                kind = chain_of(*name) % 3
                source = JOINER if copy.table == 2 or kind == 2 else SOURCE if kind == 0 else THIRD
                assert copy.content == before[source][name].content
            assert before[SOURCE] == await everything(one.stores[SOURCE])

    asyncio.run(run())


def test_large_chunks_are_copied_in_parts():
    async def run():
        async with stores() as one:
            big = some_bytes(16 * MIB)
            await put(one.stores[SOURCE], 1, 0, 0, big[: 9 * MIB])
            await put(one.stores[SOURCE], 1, 0, 11 * MIB, big[11 * MIB :])
            await put(one.stores[SOURCE], 1, 1, 15 * MIB, b"at the end")
            one.use(joins())
            await one.equal()
            await same(one)

    asyncio.run(run())


def test_source_with_an_older_map_is_retried():
    async def run():
        async with stores() as one:
            await fill(one.stores[SOURCE])
            one.use(joins(6))
            await one.equal(epoch=6)
            await put(one.stores[SOURCE], 50, 0, 0, b"new")
            one.use(joins(7), only=[JOINER])
            await until(lambda: "not yet" in one.resync().progress.waits_for)
            assert not one.resync().equal
            one.services[SOURCE].update_map(one.map)
            await one.equal(epoch=7)
            await same(one)

    asyncio.run(run())


def test_target_answers_only_pool_members_for_own_chains():
    async def run():
        async with stores(SOURCE, JOINER, THIRD) as one:
            await fill(one.stores[SOURCE])
            one.use(lambda table, number: Chain(3, (SOURCE,), (JOINER,)))
            others = one.services[JOINER].upkeep.others
            for asked in (
                others.versions(THIRD, ChainSet([(1, 5)]), None),
                others.fetch(THIRD, [(1, 0, 1)]),
                others.versions(SOURCE, ChainSet([(2, 5)]), None),
                others.fetch(SOURCE, [(1, 0, 2)]),
            ):
                with pytest.raises(errors.WrongTarget):
                    await asked
            others = OtherTargets(one.dialers[JOINER], b"z" * 32, SYSTEM_CLOCK)
            others.update_map(one.map)
            for asked in (
                others.versions(SOURCE, ChainSet([(1, 5)]), None),
                others.fetch(SOURCE, [(1, 0, 1)]),
            ):
                with pytest.raises(errors.StaleGrant):
                    await asked

    asyncio.run(run())


async def until(condition, within_s=20):
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition has no notification
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("chain_has_it", [True, False])
def test_unreadable_chunk_is_rebuilt_from_its_chain(chain_has_it):
    async def run():
        async with stores() as one:
            ours, theirs = one.stores[JOINER], one.stores[SOURCE]
            await put(theirs, 1, 0, 0, b"x" * 9000)
            one.use(joins())
            await one.equal()
            if not chain_has_it:
                await put(ours, 2, 0, 0, b"of nobody")
            inode = 1 if chain_has_it else 2
            segment = ours.index.segment(ours.index.chunk(inode, 0), 0)
            ours.kv.apply([(segment_key(inode, 0, 0), encode_segment(segment, None, 0, 0))])
            ours.index.forget(inode, 0)
            assert ours.unreadable(inode, 0)
            assert await one.services[JOINER].upkeep.repair.rebuilt(inode, 0, 1)
            assert not ours.unreadable(inode, 0)
            await same(one)

    asyncio.run(run())


class Load:
    """Writes, truncations and removals as a chain does them: the joining target first, then its source."""

    def __init__(self, one, seed, inodes=8):
        self.one, self.chance, self.inodes = one, random.Random(seed), inodes
        self.pending = {}
        self.locks = [asyncio.Lock() for _ in range(inodes + 1)]
        self.cuts = dict.fromkeys(range(1, inodes + 1), 0)
        self.epoch = 7
        self.done = 0
        self.tasks = []

    def begin(self, tasks=4):
        self.pending = self.one.services[SOURCE].replica.pending
        self.tasks = [asyncio.ensure_future(self.run()) for _ in range(tasks)]

    async def end(self):
        tasks, self.tasks = self.tasks, []
        await asyncio.gather(*tasks)

    async def run(self):
        while self.tasks:
            inode = self.chance.randint(1, self.inodes)
            async with self.locks[inode]:
                await (self.write(inode) if self.chance.random() < 0.9 else self.cut(inode))
            self.done += 1
            await asyncio.sleep(self.chance.choice((0, 0, 0.001)))

    async def write(self, inode):
        source, index = self.one.stores[SOURCE], self.chance.randrange(3)
        offset, data = self.chance.randrange(MIB), self.chance.randbytes(self.chance.choice((100, 20_000)))
        base = source.state(inode, index).version
        epoch, counter = version_parts(max(base, source.index.inode(inode).floor))
        new = version(self.epoch, 1) if self.epoch > epoch else version(epoch, counter + 1)
        named = {"version": new, "cut": self.cuts[inode], "request": RequestId(1, index, self.done)}
        self.pending[inode, index] = SimpleNamespace(older=False)
        try:
            with contextlib.suppress(
                errors.NvpoolError, KeyError
            ):  # the target is dead, and no member any more
                joiner, resync = self.one.stores[JOINER], self.one.resync()
                while joiner.state(inode, index).version != base:
                    await resync.pull(1, inode, index)
                await put(joiner, inode, index, offset, data, **named)
                await asyncio.sleep(self.chance.choice((0, 0, 0.002)))
            await put(source, inode, index, offset, data, **named)
        finally:
            del self.pending[inode, index]

    async def cut(self, inode):
        self.cuts[inode] += 1
        size = self.chance.choice((0, self.chance.randrange(3 * MIB)))
        orders = [partial(self.cut_at, target, inode, size) for target in (SOURCE, JOINER)]
        self.chance.shuffle(orders)
        for order in orders:
            await order()
            await asyncio.sleep(self.chance.choice((0, 0.005)))

    async def cut_at(self, target, inode, size):
        with contextlib.suppress(errors.Fenced, KeyError):
            service = self.one.services[target]
            service.upkeep.resync.guard.cut(inode, size, self.cuts[inode], 20, 0)
            with service.transfer_server.cutting(inode):
                await self.one.stores[target].cut(inode, size, self.cuts[inode], 20)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_equal_chains_stay_equal_during_writes(seed):
    async def run():
        async with stores() as one:
            await fill(one.stores[SOURCE], seed, 150)
            await fill(one.stores[JOINER], seed + 1, 100, epoch=4)
            load = Load(one, seed)
            one.use(joins())
            load.begin()
            await one.equal(epoch=7)
            assert load.done
            before = load.done
            await until(lambda: load.done > before + 50)
            assert len(one.resync().equal) == CHAINS_PER_TABLE
            await load.end()
            await same(one)

    asyncio.run(run())


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_crashes_of_either_side_only_delay_resync(seed):
    async def run():
        chance = random.Random(seed)
        async with stores() as one:
            await fill(one.stores[SOURCE], seed, 200)
            await fill(one.stores[JOINER], seed + 1, 200, epoch=4)
            load = Load(one, seed)
            one.use(joins())
            for turn in range(1, 7):
                load.begin(2)
                await asyncio.sleep(chance.random() * 0.1)
                await load.end()
                dies = chance.choice((SOURCE, JOINER))
                await one.stop(dies, kill=True)
                await asyncio.sleep(chance.choice((0, 0.1)))
                await one.start(dies)
                load.epoch = 7 + turn
                one.use(joins(7 + turn))
            load.begin(2)
            await one.equal(epoch=13)
            await load.end()
            await same(one)

    asyncio.run(run())


def test_resync_continues_after_its_source_was_away():
    async def run():
        async with stores(rate=4 * MIB) as one:
            for inode in range(1, 21):
                await put(one.stores[SOURCE], inode, 0, 0, some_bytes(300_000, inode))
            one.use(joins())
            await until(lambda: one.resync().progress.chunks_copied >= 2)
            await one.stop(SOURCE)
            await until(lambda: one.resync().progress.waits_for)
            assert not one.resync().equal
            one.services[JOINER].upkeep.throttle.bytes_per_s = FAST
            await one.start(SOURCE)
            await one.equal(epoch=7)
            assert one.resync().progress.chunks_copied == 20, "no chunk is copied twice"
            await same(one)

    asyncio.run(run())


def test_resync_ends_when_the_target_joins_no_chain():
    async def run():
        async with stores(rate=MIB) as one:
            for inode in range(1, 40):
                await put(one.stores[SOURCE], inode, 0, 0, some_bytes(300_000, inode))
            one.use(joins())
            await until(lambda: one.resync().progress.chunks_copied >= 1)
            one.use(lambda table, number: Chain(8, (SOURCE,)))
            await until(lambda: one.resync().is_idle)
            assert not one.resync().equal and one.resync().progress.chains == 0

    asyncio.run(run())


def test_full_target_reports_it_and_continues_with_space():
    async def run():
        async with stores() as one:
            ours, theirs = one.stores[JOINER], one.stores[SOURCE]
            await ours.write(
                90, 0, 0, memoryview(some_bytes(MIB)), piece_checksums(some_bytes(MIB), 0), table=3
            )
            for inode in range(100, 144):
                await put(ours, inode, 0, 0, some_bytes(MIB, 3), table=3)
            for inode in range(1, 31):
                await put(theirs, inode, 0, 0, some_bytes(MIB, inode))
            one.use(joins())
            await until(lambda: "full" in one.resync().progress.waits_for)
            assert not one.resync().equal and one.resync().progress.lacks_room
            for inode, copy in (await everything(ours)).items():
                if copy.table == 1:
                    assert bytes(copy.content) == some_bytes(MIB, inode[0])
            assert await content(ours, 90, 0) == some_bytes(MIB)
            await ours.remove(list(range(90, 144)))
            await one.equal()
            await same(one)
            assert not one.resync().progress.lacks_room

    asyncio.run(run())


def test_bad_block_of_the_source_is_copied_as_bad():
    async def run():
        async with stores(memory=True, scheme="inproc") as one:
            await put(one.stores[SOURCE], 1, 0, 0, some_bytes(40_960))
            await put(one.stores[SOURCE], 2, 0, 0, some_bytes(40_960))
            one.stores[SOURCE].flip(1, 0, 3)
            one.has_bad_blocks = True
            one.use(joins())
            await one.equal()
            assert one.resync().progress.bad_blocks == 1
            assert [bad[:3] for bad in one.stores[JOINER].bad_blocks()] == [(1, 0, 3)]
            ours = one.stores[JOINER]
            assert (
                await get(ours, 1, 0, 3 * BLOCK_BYTES, BLOCK_BYTES)
            ).status == errors.ChecksumMismatch.wire_code
            assert (await get(ours, 1, 0, 4 * BLOCK_BYTES, BLOCK_BYTES)).data == some_bytes(40_960)[
                16_384:20_480
            ]

    asyncio.run(run())


def test_chunk_is_pulled_when_a_write_needs_it():
    async def run():
        async with stores(rate=1) as one:
            await put(one.stores[SOURCE], 1, 0, 0, b"here", epoch=3)
            await put(one.stores[JOINER], 1, 0, 0, b"never committed", epoch=4)
            one.use(joins())
            assert await one.resync().pull(1, 1, 0) == version(3, 1)
            assert await content(one.stores[JOINER], 1, 0, 4) == b"here"
            assert await one.resync().pull(1, 1, 1) == 0
            await one.stop(SOURCE)
            with pytest.raises(errors.Unavailable):
                await one.resync().pull(1, 1, 0)

    asyncio.run(run())


def test_removal_is_not_undone_by_a_copy():
    async def run():
        async with stores(rate=1) as one:
            await put(one.stores[SOURCE], 1, 0, 0, b"to be removed")
            one.use(joins())
            one.resync().guard.removed([1])
            await one.stores[JOINER].remove([1])
            one.services[JOINER].upkeep.throttle.bytes_per_s = FAST
            pulling = asyncio.ensure_future(one.resync().pull(1, 1, 0))
            await asyncio.sleep(0.1)
            assert not pulling.done() and not one.stores[JOINER].state(1, 0).version
            await one.stores[SOURCE].remove([1])
            assert await pulling == 0

    asyncio.run(run())


class ChainLoad(Load):
    """The same load through the services, whose chains decide."""

    def begin(self, tasks=4):
        self.dialer = Dialer(Greeting("client"))
        self.tasks = [asyncio.ensure_future(self.run()) for _ in range(tasks)]

    async def end(self):
        await super().end()
        await self.dialer.close()

    def ask(self, target, method, request, payload=()):
        request.target, request.map_epoch = target, self.one.map.epoch
        return self.dialer.call(
            (self.one.endpoints[target],),
            method,
            request.SerializeToString(),
            payload,
            deadline_s=SYSTEM_CLOCK.boottime_s() + 20,
        )

    async def write(self, inode):
        index, offset = self.chance.randrange(3), self.chance.randrange(MIB)
        data = self.chance.randbytes(self.chance.choice((100, 20_000, 200_000)))[: MIB - offset]
        self.sequence = getattr(self, "sequence", 0) + 1
        ends_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000 + 60_000
        right = grants.sign(grants.Grant(grants.WRITE, 0, 10, inode, self.cuts[inode], ends_ms), SECRET)
        request = pb.WriteRequest(
            grants=[right],
            session=10,
            slot=inode,
            checksums=piece_checksums(data, offset),
            writes=WRITE.pack(inode, self.cuts[inode], self.sequence, index, offset, len(data), 0, 0),
        )
        reply = await self.ask(SOURCE, Method.DATA_WRITE, request, [data])
        ((status, *_),) = RESULT.iter_unpack(pb.WriteReply.FromString(bytes(reply.message)).results)
        assert status in (0, errors.Busy.wire_code), status

    async def cut_at(self, target, inode, size):
        ends_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000 + 60_000
        authority = grants.sign(grants.Grant(grants.SERVICE, 0, 0, 0, 0, ends_ms), SECRET)
        await self.ask(
            target,
            Method.DATA_CUT,
            pb.CutRequest(authority=authority, inode=inode, size=size, cut=self.cuts[inode], chunk_bits=20),
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_equal_chains_stay_equal_during_chain_writes(seed):
    async def run():
        async with stores(SOURCE, JOINER) as one:
            await fill(one.stores[SOURCE], seed, 150)
            await fill(one.stores[JOINER], seed + 1, 100, epoch=4)
            load = ChainLoad(one, seed)
            one.use(joins())
            load.begin()
            await one.equal(epoch=7)
            before = load.done
            await until(lambda: load.done > before + 50)
            await load.end()
            await same(one)

    asyncio.run(run())


def test_request_done_only_by_the_joiner_is_repeated_by_all():
    """Only a member that died had the request; the other targets do not know it, and the client repeats it after other
    writes."""

    async def run():
        async with stores(rate=1) as one:
            await put(one.stores[JOINER], 1, 0, 0, b"mine", epoch=4, request=RequestId(10, 1, 1))
            await put(one.stores[SOURCE], 1, 0, 4, b"others", epoch=5)
            one.use(joins())
            load = ChainLoad(one, 1)
            load.dialer = Dialer(Greeting("client"))
            ends_ms = SYSTEM_CLOCK.wall_ns() // 1_000_000 + 60_000
            right = grants.sign(grants.Grant(grants.WRITE, 0, 10, 1, 0, ends_ms), SECRET)
            request = pb.WriteRequest(
                grants=[right],
                session=10,
                slot=1,
                checksums=piece_checksums(b"mine", 0),
                writes=WRITE.pack(1, 0, 1, 0, 0, 4, 0, 0),
            )
            reply = await load.ask(SOURCE, Method.DATA_WRITE, request, [b"mine"])
            await load.dialer.close()
            ((status, _, _, its_version),) = RESULT.iter_unpack(
                pb.WriteReply.FromString(bytes(reply.message)).results
            )
            assert status == 0 and its_version == version(7, 1)
            await same(one)
            assert await content(one.stores[JOINER], 1, 0, 10) == b"mineothers"

    asyncio.run(run())


def test_orphan_chunks_of_left_chains_are_removed_later(monkeypatch):
    def chains(table, number):
        return (
            Chain(7, (SOURCE,), (), (JOINER,) if number % 4 == 1 else ())
            if number % 2
            else Chain(7, (JOINER,))
        )

    async def run():
        async with stores(memory=True, scheme="inproc") as one:
            store = one.stores[JOINER]
            for inode in range(1, 200):
                await put(store, inode, 0, 0, some_bytes(100), epoch=9 if inode % 50 == 3 else 5)
            one.use(chains)
            orphans = one.services[JOINER].upkeep.orphan_chunks
            assert await orphans.run_once() == 0, "too early"
            monkeypatch.setattr("nvpool.store.maintenance.orphan_chunks.STAY_S", 0.0)
            await orphans.run_once()
            left = {inode for inode, _ in await everything(store)}
            ours = {inode for inode in range(1, 200) if chain_of(inode, 0) % 4 != 3}
            newer = {inode for inode in range(1, 200) if inode % 50 == 3}
            assert left == ours | newer and len(left) < 199
            one.use(lambda table, number: Chain(10, (SOURCE,)))
            await until(lambda: not store.chunks)

    asyncio.run(run())


def test_orphan_chunks_are_removed_only_with_a_current_map(monkeypatch):
    """Older builds left such chunks after truncations. Until a leader reports, the map may be older than the chunks."""

    async def run():
        async with stores(memory=True, scheme="inproc") as one:
            store, service = one.stores[JOINER], one.services[JOINER]
            for inode in range(1, 50):
                await put(store, inode, 0, 0, some_bytes(100), epoch=9)
            monkeypatch.setattr("nvpool.store.maintenance.orphan_chunks.STAY_S", 0.0)
            monkeypatch.setattr("nvpool.store.maintenance.orphan_chunks.RETRY_S", 0.01)
            one.use(lambda table, number: Chain(7, (SOURCE,)))
            orphans = service.upkeep.orphan_chunks
            assert await orphans.run_once() == 0 and orphans.left_chunks == 49
            assert "49 chunks are kept until this target hears from the leading node" in orphans.waits_for
            service.serving_lease.renewed(0.0, 3.0, 0, service.serving_lease.epoch + 1)
            assert await orphans.run_once() == 0, "the leader has a newer map"
            one.use(lambda table, number: Chain(7, (SOURCE,)))
            await until(lambda: not store.chunks)
            await until(lambda: not orphans.waits_for)

    asyncio.run(run())


def test_chunk_stays_when_its_chain_returns_before_removal(monkeypatch):
    async def run():
        async with stores(scheme="inproc") as one:
            store = one.stores[JOINER]
            await put(store, 1, 0, 0, some_bytes(100), epoch=5)
            one.use(lambda table, number: Chain(7, (SOURCE,)))
            monkeypatch.setattr("nvpool.store.maintenance.orphan_chunks.STAY_S", 0.0)
            orphans = one.services[JOINER].upkeep.orphan_chunks

            class FullKv:
                """The records of the store, full until there is room: then the chain has returned."""

                full, kv = True, store.kv

                async def room(self):
                    self.full = False
                    one.use(lambda table, number: Chain(8, (JOINER,)))
                    await self.kv.room()

                def __getattr__(self, name):
                    return getattr(self.kv, name)

            store.kv = FullKv()
            assert await orphans.run_once() == 0
            assert not store.kv.full
            assert await content(store, 1, 0, 100) == some_bytes(100)

    asyncio.run(run())


def test_drained_target_removes_late_chunks(monkeypatch):
    async def run():
        async with stores(memory=True, scheme="inproc") as one:
            store, orphans = one.stores[JOINER], one.services[JOINER].upkeep.orphan_chunks
            await put(store, 1, 0, 0, some_bytes(100), epoch=5)
            for name in ("STAY_S", "DRAINED_STAY_S"):
                monkeypatch.setattr(f"nvpool.store.maintenance.orphan_chunks.{name}", 0.0)
            monkeypatch.setattr("nvpool.store.maintenance.orphan_chunks.AGAIN_S", 0.01)
            one.use(lambda table, number: Chain(7, (SOURCE,)), requests={JOINER: "drain"})
            await until(lambda: not store.chunks)
            await put(store, 1, 0, 0, some_bytes(100), epoch=5)
            one.use(lambda table, number: Chain(7, (SOURCE,)), requests={JOINER: "drain"})
            await until(lambda: not store.chunks)
            store.used_blocks = 1  # as with damaged records
            await put(store, 2, 0, 0, b"x", table=5)
            one.use(lambda table, number: Chain(7, (SOURCE,)), requests={JOINER: "drain"})
            await until(lambda: "nvpool fsck POOL --repair" in orphans.waits_for)

    asyncio.run(run())


def test_orphan_chunks_are_found_per_chain_table(monkeypatch):
    async def run():
        async with stores(memory=True, scheme="inproc") as one:
            store = one.stores[JOINER]
            for inode in range(1, 60):
                await put(store, inode, 0, 0, some_bytes(100), epoch=5, table=1 + inode % 3)
            one.use(lambda table, number: Chain(7, (SOURCE,) if table == 1 else (JOINER,)), tables=(1, 2))
            monkeypatch.setattr("nvpool.store.maintenance.orphan_chunks.STAY_S", 0.0)
            await one.services[JOINER].upkeep.orphan_chunks.run_once()
            assert {inode for inode, _ in await everything(store)} == {
                inode for inode in range(1, 60) if inode % 3
            }

    asyncio.run(run())


@pytest.mark.parametrize("asked", [False, True])
def test_bad_block_is_repaired_from_another_member(asked):
    async def run():
        async with stores(SOURCE, JOINER, THIRD, scheme="inproc", memory=True) as one:
            for store in one.stores.values():
                await put(store, 1, 0, 0, some_bytes(40_960), epoch=3)
                await put(store, 2, 0, 0, some_bytes(40_960), epoch=3)
            one.use(lambda table, number: Chain(7, (JOINER, SOURCE, THIRD)))
            ours = one.stores[JOINER]
            for target, block in ((JOINER, 4), (THIRD, 4), (JOINER, 6), (THIRD, 6), (SOURCE, 6)):
                one.stores[target].flip(1, 0, block)
            one.has_bad_blocks = True
            version_before = ours.state(1, 0)
            if asked:
                repair = one.services[JOINER].upkeep.repair
                bad = (await ours.scrub(b"", 1 << 14)).bad
                assert [one.block for one in bad] == [4, 6]
                assert [one.block for one in await repair.repaired(bad)] in (
                    [4],
                    [],
                )  # the background repair may have been first
            assert (await get(ours, 1, 0, 4 * BLOCK_BYTES, BLOCK_BYTES, verify=True)).status in (
                (0,) if asked else (errors.ChecksumMismatch.wire_code,)
            )
            await until(lambda: {one[:3] for one in ours.bad_blocks()} <= {(1, 0, 6)})
            assert (await get(ours, 1, 0, 4 * BLOCK_BYTES, BLOCK_BYTES, verify=True)).data == some_bytes(
                40_960
            )[16_384:20_480]
            assert ours.state(1, 0) == version_before
            left = await get(ours, 1, 0, 6 * BLOCK_BYTES, BLOCK_BYTES, verify=True)
            assert left.status == errors.ChecksumMismatch.wire_code

    asyncio.run(run())


class PowerStores(Stores):
    """The joining target loses power with each crash: only some unsynced blocks reach the drive."""

    chance = random.Random(1)

    async def start(self, target):
        if target != JOINER:
            return await super().start(target)
        if not hasattr(self, "forgetful"):
            self.forgetful = Forgetful(blocks=CAPACITY // BLOCK_BYTES)
            self.opened = await self.forgetful.begin()
        return await super().start(target)

    async def open(self, target):
        return self.opened if target == JOINER else await super().open(target)

    async def stop(self, target, kill=False):
        await super().stop(target, kill)
        if target == JOINER:
            share = self.chance.choice((0, 0.5, 0.9, 1))
            self.opened = await self.forgetful.die(keep=lambda number: self.chance.random() < share)

    async def close(self):
        await self.forgetful.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_power_losses_only_delay_resync(seed):
    async def run():
        chance = PowerStores.chance = random.Random(seed)
        async with stores(kind=PowerStores) as one:
            await fill(one.stores[SOURCE], seed, 300)
            await fill(one.stores[JOINER], seed + 1, 200, epoch=4)
            load = ChainLoad(one, seed)
            for turn in range(6):
                load.epoch = 7 + turn
                one.use(joins(7 + turn))
                await asyncio.sleep(chance.random() * 0.05)
                await one.stop(JOINER, kill=True)
                await one.start(JOINER)
            one.use(joins(20))
            load.begin(2)
            await one.equal(epoch=20)
            await load.end()
            await one.stores[JOINER].flush()
            await same(one)
            await one.stop(JOINER, kill=True)
            await one.start(JOINER)
            await same(one)
            await fill(one.stores[SOURCE], seed + 5, 50, epoch=21, cut=1000)
            one.use(joins(22))
            await one.equal(epoch=22)
            await one.stop(JOINER, kill=True)
            await one.start(JOINER)
            await same(one)

    asyncio.run(run())
