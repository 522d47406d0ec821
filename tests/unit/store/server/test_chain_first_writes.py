"""First writes of small files in chains with several members, over frames: compiled from the client to the last member.

Members agree, and a write that the fast path cannot finish is finished by the slow path under the same name."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import tempfile
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.core.checksum import piece_checksums
from nvpool.core.errors import Disconnected, DriveFailed, NoSpace, NvpoolError
from nvpool.core.ids import ROOT_INODE, version
from nvpool.core.units import MIB
from nvpool.poolmap.chains.transitions import died
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.peer_roles import Credentials, Peer
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.transports.frame import REQUEST, pack_head, read_head
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import DATA_PEER_WRITE, DATA_READ, DATA_WRITE
from nvpool.shm.mount_state import KeptMemory
from nvpool.store.chunks.api import InodeCut
from nvpool.testing.fakes.stalling_pool import StallingPool
from tests.unit.store.replication.test_chain_writes import ME, check_replicas, held_by, read_all

pytestmark = pytest.mark.compiled

OPTIONS = ClientOptions(
    deadline_s=20.0, fresh_s=0.0, attr_s=0.0, release_s=0.01, retry_first_s=0.001, short_circuit=False
)
CHAIN_METHODS = DATA_WRITE, DATA_PEER_WRITE


class FramePool(StallingPool):
    """A pool at unix sockets whose stores use their fast paths, apart from `slow` targets and held methods.

    `asked` counts requests that took the slow path.
    """

    def __init__(self, directory, sockets, **options):
        super().__init__(
            directory, endpoints=lambda role, number: f"stream+unix://{sockets}/{role}{number}", **options
        )
        self.slow: set[int] = set()

    async def listen(self, role, number, handler) -> None:
        await super().listen(role, number, handler)
        if role == "target":
            answer = handler.__self__.fast_path.answer

            def fast(*arguments) -> int:
                return 0 if number in self.slow else answer(*arguments)

            # the listener looks it up at each connection, and none exists yet
            self.listeners[role, number].handler.fast_path = fast

    def slow_count(self) -> int:
        return sum(count for (_, method), count in self.asked.items() if method in CHAIN_METHODS)


class Scene:
    def __init__(self, pool: FramePool, vfs, replicas: int) -> None:
        self.pool, self.vfs, self.replicas = pool, vfs, replicas
        self.count = 0
        self.content: dict[int, bytes] = {}

    async def create(self):
        self.count += 1
        return (await self.vfs.create(ROOT_INODE, b"f%d" % self.count, 0o644, os.O_RDWR, ME))[1]

    def chain(self, handle) -> tuple[int, ...]:
        return self.pool.pool_map.chain(self.replicas, chain_of(handle.inode, 0)).targets

    async def of(self, head: int):
        """A new file whose chain has this head."""
        while True:
            handle = await self.create()
            if self.chain(handle)[0] == head:
                return handle

    async def write(self, handle=None, length=4096):
        handle = handle or await self.create()
        content = random.Random(handle.inode).randbytes(length)
        self.content[handle.inode] = content
        assert self.vfs.write_now(handle, 0, content)
        await self.vfs.flush(handle)
        return handle

    async def warm(self):
        """Let each member know the links of the others: the first write of a link takes the slow path."""
        table = self.pool.pool_map.table_by_id[self.replicas]
        wanted = {chain.targets for chain in table.chains}
        while wanted:
            wanted.discard(self.chain(await self.write()))
        for service in self.pool.stores.values():
            service.store.allocator.is_used(0)

    async def check(self):
        """All members of each chain, in the newest map, have the written bytes in the same version."""
        held = {inode: held_by(self.pool, inode) for inode in self.content}
        for inode, content in self.content.items():
            members = self.pool.pool_map.chain(self.replicas, chain_of(inode, 0)).targets
            assert len({held[inode][target].get(0) for target in members}) == 1, (inode, members, held[inode])
            assert await read_all(self.vfs, inode, len(content)) == content
        for service in self.pool.stores.values():
            store, writes = service.store, service.replica.writes
            assert not store.fenced_because
            assert not writes.pending and not writes.led_bytes and not service.fast_path.waiting
            assert not store.allocator.held_masks
            assert store.allocator.available_blocks == sum(store.allocator.spare)
            assert store.allocator.used_blocks + store.allocator.available_blocks == store.block_count


@asynccontextmanager
async def made(directory, replicas=2, targets=2, **options):
    descriptor = KeptMemory.make(1 << 24)
    try:
        with tempfile.TemporaryDirectory() as sockets:
            async with FramePool(
                directory, sockets, capacities=(64 * MIB,) * targets, replicas=replicas, serves_map=True
            ) as pool:
                client = await pool.client("first", OPTIONS._replace(**options), kept=KeptMemory(descriptor))
                yield Scene(pool, client.vfs, replicas)
    finally:
        os.close(descriptor)


def in_loop(test):
    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 100))

    return run


@pytest.mark.parametrize("replicas", [2, 3])
@in_loop
async def test_first_writes_use_the_fast_path_at_each_member(tmp_path, replicas):
    async with made(tmp_path, replicas, targets=3) as here:
        await here.warm()
        before = here.pool.slow_count()
        sent = here.vfs.chunks.counters["writes"]
        for length in (4096, 4096, 4096):
            await here.write(length=length)
        handles = [await here.create() for _ in range(60)]
        await asyncio.gather(*[here.write(handle) for handle in handles])
        assert here.vfs.chunks.counters["writes"] == sent + 63
        # a frame that came in two parts takes the slow path
        assert here.pool.slow_count() - before < 63
        led = {number: service.replica.writes.counters["led"] for number, service in here.pool.stores.items()}
        followed = sum(service.replica.writes.counters["followed"] for service in here.pool.stores.values())
        assert sum(led.values()) >= 63 and followed == sum(led.values()) * (replicas - 1)
        await here.check()


@in_loop
async def test_single_first_writes_take_no_slow_path(tmp_path):
    async with made(tmp_path) as here:
        await here.warm()
        before = here.pool.slow_count()
        for _ in range(30):
            await here.write()
        assert here.pool.slow_count() == before
        await here.check()


@pytest.mark.parametrize("slow", [(1,), (2,), (1, 2)], ids=str)
@in_loop
async def test_fast_and_slow_members_agree(tmp_path, slow):
    async with made(tmp_path) as here:
        await here.warm()
        here.pool.slow = set(slow)
        for _ in range(20):
            await here.write()
        await here.check()
        states = [held_by(here.pool, inode) for inode in here.content]
        assert all(
            version == 1 << 32 | 1 for held in states for of in held.values() for version, _ in of.values()
        )


def refuse(store, error, times=1):
    """Let the index of a store refuse the next changes."""
    apply = store.kv.apply

    def refused(effects, **options):
        nonlocal times
        times -= 1
        if times < 0:
            return apply(effects, **options)
        raise error

    store.kv.apply = refused


@in_loop
async def test_refusal_of_the_last_member_undoes_the_write(tmp_path):
    async with made(tmp_path) as here:
        await here.warm()
        handle = await here.of(head=1)
        refuse(here.pool.stores[2].store, NoSpace("full"), times=3)
        with pytest.raises(NoSpace):
            await here.write(handle)
        del here.content[handle.inode]
        assert not any(held_by(here.pool, handle.inode).values())
        await here.write()
        await here.check()


@in_loop
async def test_head_that_cannot_commit_repeats_the_commit_in_a_task(tmp_path):
    async with made(tmp_path) as here:
        await here.warm()
        refuse(here.pool.stores[1].store, NoSpace("for a moment"))
        await here.write(await here.of(head=1))
        await here.check()


@in_loop
async def test_head_that_cannot_commit_at_all_fences_itself(tmp_path):
    async with made(tmp_path, deadline_s=1.0) as here:
        await here.warm()
        handle = await here.of(head=1)
        refuse(here.pool.stores[1].store, DriveFailed("broken"), times=1000)
        with pytest.raises(NvpoolError):
            await here.write(handle)
        assert here.pool.stores[1].store.fenced_because
        assert here.pool.stores[2].store.held(handle.inode, 0).version


async def begun(here, *slow):
    """A write at target 1 whose offer the last member has and does not answer: its file, that member, its task.

    These targets and the last one take no fast path.
    """
    await here.warm()
    handle = await here.of(head=1)
    last = here.chain(handle)[1]
    here.pool.slow.update({last, *slow})
    here.pool.hold(last, DATA_PEER_WRITE)
    writing = asyncio.create_task(here.write(handle))
    await here.pool.until(lambda: here.pool.held[last])
    return handle, last, writing


@in_loop
async def test_silent_last_member_is_replaced_by_the_next_map(tmp_path):
    async with made(tmp_path, targets=3) as here:
        handle, last, writing = await begun(here)
        head = here.pool.stores[1]
        assert head.fast_path.waiting == head.waiting_count == 1
        assert head.replica.is_pending([(handle.inode, 0)])
        await here.pool.change_map(lambda now: died(now, {last}))
        await writing
        assert head.fast_path.waiting == 0
        assert here.chain(handle) == (1,)
        await here.pool.stop_store(last)
        await here.check()


@in_loop
async def test_chain_that_changes_before_the_task_begins_keeps_the_write(tmp_path):
    """The successor's death and the map without it arrive together: the head is the first to commit."""
    async with made(tmp_path, targets=3) as here:
        handle, last, writing = await begun(here)
        head = here.pool.stores[1]
        writes, retried = head.replica.writes, head.replica.writes.counters["offered_again"]
        pending = writes.pending[handle.inode, 0]
        pending.offered.give_up()
        writes.carry_on(pending, (None, Disconnected("the successor has died")))
        await here.pool.change_map(lambda now: died(now, {last}))  # without a step of the event loop
        await writing
        assert writes.counters["offered_again"] == retried and not writes.pending
        await here.pool.stop_store(last)
        await here.check()


@asynccontextmanager
async def handed_over(tmp_path, at_head, deadline_s=20.0):
    """A pending write that a task of the head continues, with the request of its client waiting for it.

    `at_head`: the way on which the head took it, "fast" or "slow".
    """
    async with made(tmp_path, targets=3, deadline_s=deadline_s) as here:
        handle, last, writing = await begun(here, *([] if at_head == "fast" else [1]))
        head, name = here.pool.stores[1], (handle.inode, 0)
        assert (head.fast_path.waiting == 1) == (at_head == "fast")
        writes = head.replica.writes
        assert writes.led_bytes == 4096
        writes.pending[name].offered.give_up()
        writes.carry_on(writes.pending[name], (None, Disconnected("the connection is lost")))
        await here.pool.until(lambda: name in writes.turns)
        yield here, handle, last, writes, writing


@pytest.mark.parametrize("at_head", ["fast", "slow"])
@in_loop
async def test_write_handed_over_to_a_task_is_counted_once(tmp_path, at_head):
    async with handed_over(tmp_path, at_head) as (here, _, last, writes, writing):
        assert writes.led_bytes == 4096
        await here.pool.change_map(lambda now: died(now, {last}))
        await writing
        await here.pool.stop_store(last)
        await here.check()


@pytest.mark.parametrize("at_head", ["fast", "slow"])
@in_loop
async def test_request_waits_for_its_own_write_until_its_deadline(tmp_path, at_head):
    """Afterwards the bytes count for the pending write, until that is decided."""
    async with handed_over(tmp_path, at_head, deadline_s=1.0) as (here, handle, last, writes, writing):
        with pytest.raises(NvpoolError):
            await writing
        await here.pool.until(lambda: not writes.turns)
        assert writes.led_bytes == 4096 and (handle.inode, 0) in writes.pending
        await here.pool.change_map(lambda now: died(now, {last}))
        await here.pool.until(lambda: not writes.pending)
        assert not writes.led_bytes
        del here.content[handle.inode]
        await here.pool.stop_store(last)


@pytest.mark.parametrize("at_head", ["fast", "slow"])
@in_loop
async def test_refused_version_is_not_offered_again(tmp_path, at_head):
    async with made(tmp_path) as here:
        await here.warm()
        handle = await here.of(head=1)
        here.pool.slow.update({2} if at_head == "fast" else {1, 2})
        await here.pool.stores[2].store.raise_cuts([InodeCut(handle.inode, 0, version(1, 5), 20)])
        before = here.pool.asked[2, DATA_PEER_WRITE]
        await here.write(handle)
        assert here.pool.asked[2, DATA_PEER_WRITE] == before + 2, "one refused, one committed"
        assert held_by(here.pool, handle.inode)[1][0][0] == version(1, 6)
        assert not here.pool.stores[1].replica.writes.refused_versions
        await here.check()


@in_loop
async def test_silent_head_is_replaced_by_the_next_map(tmp_path):
    """The client repeats the write at the new head, which has it pending or committed, under the same name."""
    async with made(tmp_path, targets=3) as here:
        await here.warm()
        handle = await here.of(head=1)
        here.pool.slow.add(1)
        here.pool.hold(1, DATA_WRITE)
        writing = asyncio.create_task(here.write(handle))
        await here.pool.until(lambda: here.pool.held[1])
        await here.pool.change_map(lambda now: died(now, {1}))
        # the client finds the map by itself: it follows the map after half a second
        async with asyncio.timeout(10):
            await writing
        assert not here.vfs.writer.in_flight and not here.vfs.chunks.heads.is_watching
        await here.pool.stop_store(1)
        await here.check()


@in_loop
async def test_read_at_the_head_waits_for_the_decision(tmp_path):
    async with made(tmp_path) as here:
        await here.warm()
        handle = await here.of(head=1)
        here.pool.slow.add(2)
        here.pool.hold(2, DATA_PEER_WRITE, DATA_READ)
        writing = asyncio.create_task(here.write(handle))
        await here.pool.until(lambda: here.pool.held[2])
        other = (await here.pool.client("second", OPTIONS)).vfs
        opened = await other.open(handle.inode, 0, ME)
        reading = asyncio.ensure_future(other.chunks.read(opened.file, 0, 0, 4096))
        await asyncio.sleep(0.1)
        assert not reading.done() and not writing.done()
        here.pool.slow.clear()
        here.pool.let_go(2)
        await writing
        assert bytes(await reading) == here.content[handle.inode]
        await here.check()


@in_loop
async def test_write_of_a_client_that_has_gone_is_committed(tmp_path):
    async with made(tmp_path) as here:
        await here.warm()
        handle = await here.of(head=1)
        here.pool.slow.add(2)
        here.pool.hold(2, DATA_PEER_WRITE)
        content = bytes(range(256)) * 16
        assert here.vfs.write_now(handle, 0, content)
        await here.pool.until(lambda: here.pool.held[2])
        for writing in list(here.vfs.writer.begun):
            writing.cancel()
        here.pool.slow.clear()
        here.pool.let_go(2)
        await here.pool.until(lambda: not here.pool.stores[1].replica.pending)
        check_replicas(here.pool, handle.inode, range(1), 2)
        here.content = {}
        await here.check()


@in_loop
async def test_closed_head_leaves_no_pending_write(tmp_path):
    async with made(tmp_path, deadline_s=2.0) as here:
        await here.warm()
        handle = await here.of(head=1)
        here.pool.slow.add(2)
        here.pool.hold(2, DATA_PEER_WRITE)
        writing = asyncio.create_task(here.write(handle))
        await here.pool.until(lambda: here.pool.held[2])
        head = here.pool.stores[1]
        async with asyncio.timeout(5):
            await here.pool.stop_store(1, drain_s=0.2)
        assert not head.fast_path.waiting and not head.ended_equal
        with pytest.raises(NvpoolError):
            await writing
        here.pool.let_go(2)


@pytest.mark.parametrize("victim", ["head", "last"])
@in_loop
async def test_member_that_dies_during_first_writes_loses_nothing(tmp_path, victim):
    async with made(tmp_path, targets=3) as here:
        await here.warm()
        stop = False

        async def writer() -> None:
            while not stop:
                await here.write()

        writing = [asyncio.create_task(writer()) for _ in range(8)]
        before = here.count
        await here.pool.until(lambda: here.count > before + 50)
        chain = here.chain(await here.create())
        dead = chain[0] if victim == "head" else chain[-1]
        await here.pool.stop_store(dead)
        await asyncio.sleep(0.1)
        await here.pool.change_map(lambda now: died(now, {dead}))
        before = here.count
        await here.pool.until(lambda: here.count > before + 50)
        stop = True
        await asyncio.gather(*writing)
        await here.check()


NODE, USER = (
    Peer("store", "", True),
    Peer("user", "", True, credentials=Credentials(54321, frozenset({54321}), 1)),
)
OTHER_OFFERS = (
    {"target": 1},
    {"sender": 2},
    {"sender": 0},
    {"link": 1},
    {"table": 1},
    {"table": 0},
    {"chain_epoch": 2},
    {"chain_epoch": 0},
    {"version": 0},
    {"base": 5},
    {"session": 0},
    {"slot": 0},
    {"slot": 128},
    {"sequence": 1 << 63},
    {"offset": 1},
    {"offset": (1 << 32) - 1},
    {"checksums": b"bad!"},
    {"checksums": b""},
    {"checksums": bytes(8)},
    {"last": 2},
    {"wrapped_key": b"key"},
    {"authority": b""},
    {"authority": bytes(60)},
    {"map_epoch": 1},
)


@in_loop
async def test_other_offers_are_left_without_side_effects(tmp_path):
    async with made(tmp_path) as here:
        await here.warm()
        handle = await here.of(head=1)
        first, last = here.pool.stores[1], here.pool.stores[2]
        store, side, content = last.store, SimpleNamespace(peer=NODE), bytes(range(256)) * 16
        fields = {
            "target": 2,
            "authority": first.replica.peers.authority(),
            "sender": 1,
            "link": last.replica.writes.links[1],
            "table": 2,
            "chain_epoch": 1,
            "version": 1 << 32 | 1,
            "inode": handle.inode,
            "session": 9,
            "slot": 3,
            "sequence": 5,
            "checksums": piece_checksums(content, 0),
        }

        def answered(side, changed=None, data=content, flipped=-1):
            message = pb.PeerWriteRequest(**{**fields, **(changed or {})}).SerializeToString()
            frame = bytearray(pack_head(REQUEST, DATA_PEER_WRITE, 7, 1000, message, len(data)) + data)
            if flipped >= 0:
                frame[flipped] ^= 1
            out, before = [], (store.kv.sequence, store.written_bytes, store.allocator.available_blocks)
            taken = last.fast_path.answer(frame, len(frame), {}, ReplyStats(), out, side)
            if not taken:
                assert not out
                assert before == (store.kv.sequence, store.written_bytes, store.allocator.available_blocks)
            return taken == len(frame) and out

        for changed in OTHER_OFFERS:
            assert not answered(side, changed), changed
        for at in range(len(pb.PeerWriteRequest(**fields).SerializeToString()) + 40):
            assert not answered(side, flipped=at), at
        assert not answered(side, data=content[1:]) and not answered(side, data=content * 2)
        assert not answered(None) and not answered(SimpleNamespace(peer=USER))
        writes = last.replica.writes
        for table, value in ((writes.pending, None), (writes.turns, None)):
            table[handle.inode, 0] = value
            assert not answered(side)
            del table[handle.inode, 0]
        writes.cutting[handle.inode] = [3]
        assert not answered(side)
        del writes.cutting[handle.inode]
        (reply,) = answered(side)
        message = read_head(bytearray(reply), 0, len(reply), 0)[4]
        assert pb.PeerWriteReply.FromString(message) == pb.PeerWriteReply(map_epoch=1, version=1 << 32 | 1)
        assert store.held(handle.inode, 0).requests == ((9, 3, 5),)
        assert not answered(side), "the chunk exists now"
