"""A target that joins chains: at the end every chunk of theirs is what the source has, whatever happened meanwhile.

Two or three stores over real transports. What the chain does with writes is played here in its simplest form: a write goes to
the joining target first, which pulls what it is based on, and then to the source.
"""

import asyncio
import logging
import random
import shutil
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nvpool.base import errors
from nvpool.base.checksum import piece_checksums
from nvpool.base.clock import SYSTEM_CLOCK
from nvpool.base.ids import RequestId, version
from nvpool.base.units import BLOCK_BYTES, CHAINS_PER_TABLE, MIB
from nvpool.logic.layout import chain_of
from nvpool.logic.poolmap import MAP_FORMAT, Chain, ChainTable, Drive, Node, PoolMap, Settings, Target
from nvpool.store.chunkstore import StoreOptions, create_chunk_store, open_chunk_store
from nvpool.store.memory import MemoryChunkStore
from nvpool.store.service import StoreService
from nvpool.testing.contracts.chunkstore import content, is_sound, put, some_bytes
from nvpool.testing.contracts.wholechunks import everything
from nvpool.wire.dial import Dialer
from nvpool.wire.registry import listen
from nvpool.wire.transport import Greeting

SECRET = b"k" * 32
CAPACITY = 64 * MIB
SOURCE, JOINER, THIRD = 1, 2, 3
FAST = 1 << 40


class Stores:
    """Targets of one pool, each with its service, listener and dialer."""

    def __init__(self, directory, scheme="stream", memory=False, rate=FAST):
        self.directory, self.scheme, self.memory, self.rate = directory, scheme, memory, rate
        self.stores, self.services, self.listeners, self.dialers, self.endpoints = {}, {}, {}, {}, {}
        self.failed = []
        self.map = None

    async def start(self, target):
        if self.memory:
            store = self.stores.get(target) or MemoryChunkStore(CAPACITY)
        else:
            path = self.directory / str(target)
            if not path.exists():
                create_chunk_store(path, target, "pool", CAPACITY)
            store = await open_chunk_store(path, target, StoreOptions())
        self.stores[target] = store
        dialer = self.dialers[target] = Dialer(Greeting(f"target {target}"))
        service = self.services[target] = StoreService(store, target=target, grant_secret=SECRET, dialer=dialer,
                                                       resync_bytes_per_s=self.rate, on_fail=self.failed.append)
        if self.map is not None:
            service.update_map(self.map)
        await service.start()
        endpoint = self.endpoints.get(target) or {
            "stream": "stream://127.0.0.1:0", "grpc": "grpc://127.0.0.1:0", "inproc": f"inproc://resync-{id(self)}-{target}",
        }[self.scheme]
        listener = self.listeners[target] = await listen(endpoint, Greeting(f"target {target}"), service.handle)
        self.endpoints[target] = listener.endpoint
        return store

    async def stop(self, target, kill=False):
        await self.listeners.pop(target).close()
        service = self.services.pop(target)
        if kill and not self.memory:
            await service.upkeep.close()
            service._tending.cancel()
            await asyncio.gather(service._tending, return_exceptions=True)
            await self.stores[target].abandon()
        elif not self.memory:
            await service.close()
        else:
            await service.upkeep.close()
            service._tending.cancel()
        await self.dialers.pop(target).close()

    def use(self, chains, tables=(1,), only=None, **fields):
        """The next map, in which chain n of each table is chains(table, n), for these targets or all."""
        targets = tuple(Target(number, number, number, CAPACITY, (endpoint,)) for number, endpoint in self.endpoints.items())
        self.map = PoolMap(MAP_FORMAT, "pool", "pool", self.map.epoch + 1 if self.map else 5, Settings(),
                           nodes=tuple(Node(t.id, f"n{t.id}", "", ()) for t in targets),
                           drives=tuple(Drive(t.id, t.id, "", CAPACITY) for t in targets), targets=targets,
                           tables=tuple(ChainTable(table, tuple(chains(table, number) for number in range(CHAINS_PER_TABLE)))
                                        for table in tables))
        for target in only or self.services:
            self.services[target].update_map(self.map)

    def resync(self, target=JOINER):
        return self.services[target].upkeep.resync

    async def equal(self, target=JOINER, epoch=None, count=CHAINS_PER_TABLE, within_s=30):
        """Wait until the target says that it has all of its chains."""
        async with asyncio.timeout(within_s):
            while len(self.resync(target).equal) < count or epoch and set(self.resync(target).equal.values()) != {epoch}:
                assert not self.failed
                await asyncio.sleep(0.005)


@asynccontextmanager
async def stores(*targets, **named):
    directory = Path(tempfile.mkdtemp(prefix="resync-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    one = Stores(directory, **named)
    try:
        for target in targets or (SOURCE, JOINER):
            await one.start(target)
        yield one
        assert not one.failed
        for target, store in one.stores.items():
            if target in one.services:
                await is_sound(store)
    finally:
        for target in list(one.services):
            await one.stop(target, kill=True)
        shutil.rmtree(directory)


def joins(epoch=7, source=SOURCE, joiner=JOINER):
    return lambda table, number: Chain(epoch, (source,), (joiner,))


async def same(one, target=JOINER, source=SOURCE):
    ours, theirs = await everything(one.stores[target]), await everything(one.stores[source])
    assert ours.keys() == theirs.keys()
    for name, copy in theirs.items():
        assert replace(ours[name], known=copy.known) == copy, name


async def fill(store, seed=1, count=60):
    chance = random.Random(seed)
    for number in range(count):
        inode, index = chance.randrange(1, 30), chance.randrange(4)
        await put(store, inode, index, chance.randrange(MIB), some_bytes(chance.choice((10, 4096, 70_000)), number),
                  epoch=3, request=RequestId(9, chance.randrange(5), number))


@pytest.mark.parametrize("named", [{"scheme": "stream"}, {"scheme": "grpc"}, {"scheme": "inproc"},
                                   {"scheme": "inproc", "memory": True}], ids=str)
def test_an_empty_target_becomes_what_its_source_is(named):
    async def run():
        async with stores(**named) as one:
            await fill(one.stores[SOURCE])
            one.use(joins())
            await one.equal(epoch=7)
            await same(one)
            progress = one.resync().progress
            assert progress.chains == progress.chains_equal == CHAINS_PER_TABLE and progress.seconds_left == 0
            assert progress.chunks_copied == len(await everything(one.stores[SOURCE])) and not progress.waits_for

    asyncio.run(run())
