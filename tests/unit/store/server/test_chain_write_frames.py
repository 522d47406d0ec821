"""Writes in chains with several members, over frames from the client to the last member.

Members agree, whether they take the frames or get calls, and a write that needs a task is finished under its name."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import tempfile
from collections import deque
from contextlib import asynccontextmanager

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.core import errors
from nvpool.core.checksum import piece_checksums
from nvpool.core.errors import Disconnected, DriveFailed, NoSpace, NvpoolError
from nvpool.core.ids import ROOT_INODE, version
from nvpool.core.units import MIB
from nvpool.poolmap.chains.transitions import died
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.multiplexer import ServerConnection
from nvpool.rpc.peer_roles import Credentials, Peer
from nvpool.rpc.stats import ReplyStats
from nvpool.rpc.transports.frame import REQUEST, pack_head, read_head
from nvpool.rpc.v1 import data_pb2 as pb
from nvpool.rpc.v1.wire_pb2 import DATA_PEER_WRITE, DATA_READ, DATA_WRITE
from nvpool.shm.mount_state import KeptMemory
from nvpool.store.chunks.api import InodeCut
from nvpool.testing.fakes.stalling_pool import StallingPool
from tests.unit.store.replication.test_chain_writes import ME, check_replicas, held_by, read_all

OPTIONS = ClientOptions(
    late_closes=False,
    deadline_s=20.0,
    fresh_s=0.0,
    attr_s=0.0,
    release_s=0.01,
    retry_first_s=0.001,
    short_circuit=False,
)
CHAIN_METHODS = DATA_WRITE, DATA_PEER_WRITE


class FramePool(StallingPool):
    """A pool at unix sockets whose stores take frames, apart from `slow` targets, which get calls like held methods.

    `asked` counts requests that became calls of the connection.
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
        """Let each member connect to the others."""
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
            assert not writes.pending and not writes.led_bytes and not service.waiting_count
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
async def test_first_writes_arrive_as_frames_at_each_member(tmp_path, replicas):
    async with made(tmp_path, replicas, targets=3) as here:
        await here.warm()
        before = here.pool.slow_count()
        sent = here.vfs.chunks.counters["writes"]
        for length in (4096, 4096, 4096):
            await here.write(length=length)
        handles = [await here.create() for _ in range(60)]
        await asyncio.gather(*[here.write(handle) for handle in handles])
        assert here.vfs.chunks.counters["writes"] == sent + 63
        # a frame that came in two parts becomes a call
        assert here.pool.slow_count() - before < 63
        led = {number: service.replica.writes.counters["led"] for number, service in here.pool.stores.items()}
        followed = sum(service.replica.writes.counters["followed"] for service in here.pool.stores.values())
        assert sum(led.values()) >= 63 and followed == sum(led.values()) * (replicas - 1)
        await here.check()


@in_loop
async def test_single_first_writes_are_no_calls(tmp_path):
    async with made(tmp_path) as here:
        await here.warm()
        before = here.pool.slow_count()
        for _ in range(30):
            await here.write()
        assert here.pool.slow_count() == before
        await here.check()


@pytest.mark.parametrize("slow", [(1,), (2,), (1, 2)], ids=str)
@in_loop
async def test_members_with_frames_and_calls_agree(tmp_path, slow):
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

    These targets and the last one get calls.
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
        assert head.waiting_count == 1
        assert head.replica.is_pending([(handle.inode, 0)])
        await here.pool.change_map(lambda now: died(now, {last}))
        await writing
        assert head.waiting_count == 0
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

    `at_head`: whether it came to the head as a "frame" or as a "call".
    """
    async with made(tmp_path, targets=3, deadline_s=deadline_s) as here:
        handle, last, writing = await begun(here, *([] if at_head == "frame" else [1]))
        head, name = here.pool.stores[1], (handle.inode, 0)
        assert head.waiting_count == 1
        writes = head.replica.writes
        assert writes.led_bytes == 4096
        writes.pending[name].offered.give_up()
        writes.carry_on(writes.pending[name], (None, Disconnected("the connection is lost")))
        await here.pool.until(lambda: name in writes.turns)
        yield here, handle, last, writes, writing


@pytest.mark.parametrize("at_head", ["frame", "call"])
@in_loop
async def test_write_handed_over_to_a_task_is_counted_once(tmp_path, at_head):
    async with handed_over(tmp_path, at_head) as (here, _, last, writes, writing):
        assert writes.led_bytes == 4096
        await here.pool.change_map(lambda now: died(now, {last}))
        await writing
        await here.pool.stop_store(last)
        await here.check()


@pytest.mark.parametrize("at_head", ["frame", "call"])
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


@pytest.mark.parametrize("at_head", ["frame", "call"])
@in_loop
async def test_refused_version_is_not_offered_again(tmp_path, at_head):
    async with made(tmp_path) as here:
        await here.warm()
        handle = await here.of(head=1)
        here.pool.slow.update({2} if at_head == "frame" else {1, 2})
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
        assert not head.waiting_count and not head.ended_equal
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


class DirectService(ServerConnection):
    """Server side of a connection whose replies are collected."""

    def __init__(self, service, peer=NODE):
        super().__init__(service.handle, peer, service.clock)
        self.sent = []

    def _send_answer(self, number, status, message, payload, payload_bytes):
        self.sent.append((number, status, message))


REFUSED_OFFERS = (
    ({"target": 1}, errors.WrongTarget),
    ({"sender": 2}, errors.StaleEpoch),
    ({"sender": 0}, errors.StaleEpoch),
    ({"link": 1}, None),
    ({"table": 1}, errors.Busy),
    ({"chain_epoch": 2}, errors.Busy),
    ({"chain_epoch": 0}, errors.StaleEpoch),
    ({"version": 0}, errors.StaleVersion),
    ({"cut": 2}, errors.StaleCut),
    ({"offset": 1}, errors.InvalidRequest),
    ({"offset": (1 << 32) - 1}, errors.InvalidRequest),
    ({"checksums": b"bad!"}, errors.ChecksumMismatch),
    ({"checksums": b""}, errors.InvalidRequest),
    ({"checksums": bytes(8)}, errors.InvalidRequest),
    ({"wrapped_key": b"key"}, errors.CorruptRecord),
    ({"authority": b""}, errors.StaleGrant),
    ({"authority": bytes(60)}, errors.StaleGrant),
)


@in_loop
async def test_refused_offers_have_no_effects(tmp_path):
    async with made(tmp_path) as here:
        await here.warm()
        handle = await here.of(head=1)
        first, last = here.pool.stores[1], here.pool.stores[2]
        store, content = last.store, bytes(range(256)) * 16
        side, user = DirectService(last), DirectService(last, USER)
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
            "cut": 3,
            "checksums": piece_checksums(content, 0),
        }

        def answered(side, changed=None, flipped=-1):
            """Status of the reply, from a frame or, if the frame is left, None."""
            message = pb.PeerWriteRequest(**{**fields, **(changed or {})}).SerializeToString()
            frame = bytearray(pack_head(REQUEST, DATA_PEER_WRITE, 7, 1000, message, len(content)) + content)
            if flipped >= 0:
                frame[flipped] ^= 1
            out, before = [], (store.kv.sequence, store.allocator.available_blocks)
            taken = last.fast_path.answer(frame, len(frame), side.in_work, ReplyStats(), out, side)
            if not taken:
                assert not out
                return None
            (reply,) = out
            _, code, _, _, message, _ = read_head(bytearray(reply), 0, len(reply), 0)
            code = code or pb.PeerWriteReply.FromString(message).status
            assert not code or before == (store.kv.sequence, store.allocator.available_blocks)
            return code

        for at in range(len(pb.PeerWriteRequest(**fields).SerializeToString()) + 32):
            assert answered(side, flipped=at) is None, at
        assert answered(user) == errors.AccessDenied.wire_code
        writes = last.replica.writes
        writes.cutting[handle.inode] = [3]
        link = writes.links[1]
        for changed, error in REFUSED_OFFERS:
            if error is None:  # a link of an earlier connection
                fields["link"], writes.links[1] = link - 1, link
                assert answered(side) == errors.StaleEpoch.wire_code
                fields["link"] = link
            else:
                assert answered(side, changed) == error.wire_code, changed
        del writes.cutting[handle.inode]
        assert answered(side) == 0
        assert store.held(handle.inode, 0).requests == ((9, 3, 5),)
        assert store.held(handle.inode, 0).version == 1 << 32 | 1
        assert answered(side) == 0, "a repeated offer is committed already"
        assert answered(side, {"sequence": 6}) == errors.StaleVersion.wire_code


@pytest.mark.parametrize("at_head", ["frame", "call", "task"])
@in_loop
async def test_head_without_a_lease_offers_nothing(tmp_path, at_head):
    """It could not acknowledge the write, and its successor may be the head of a newer chain."""
    async with made(tmp_path) as here:
        await here.warm()
        handle = await here.of(head=1)
        head, asked = here.pool.stores[1], here.pool.slow_count()
        lease, writes = head.serving_lease, head.replica.writes
        assert lease.shared
        until_s, lease.until_s = lease.until_s, 0.0
        here.pool.slow.update({2} if at_head == "frame" else {1, 2})
        if at_head == "task":
            writes.turns[handle.inode, 0] = deque()
        led = writes.counters["led"]
        writing = asyncio.create_task(here.write(handle))
        await asyncio.sleep(0.1)
        if at_head == "task":
            del writes.turns[handle.inode, 0]
        await asyncio.sleep(0.1)
        assert here.pool.asked[2, DATA_PEER_WRITE] + here.pool.asked[1, DATA_WRITE] > 0 or asked == 0
        assert writes.counters["led"] == led and not writes.pending and not writing.done()
        assert not here.pool.stores[2].store.held(handle.inode, 0).version
        lease.until_s = until_s
        await writing
        assert writes.counters["led"] == led + 1
        await here.check()


@in_loop
async def test_undecided_write_is_continued_without_a_lease(tmp_path):
    """The successor may have committed it; only the reply to the client needs the lease."""
    async with made(tmp_path, deadline_s=3.0) as here:
        await here.warm()
        handle = await here.of(head=1)
        here.pool.slow.add(2)
        here.pool.hold(2, DATA_PEER_WRITE)
        writing = asyncio.create_task(here.write(handle))
        await here.pool.until(lambda: here.pool.held[2])
        head = here.pool.stores[1]
        until_s, head.serving_lease.until_s = head.serving_lease.until_s, 0.0
        here.pool.let_go(2)
        await here.pool.until(lambda: not head.replica.pending)
        check_replicas(here.pool, handle.inode, range(1), 2)
        assert not writing.done()
        head.serving_lease.until_s = until_s
        await writing
        await here.check()


@in_loop
async def test_offer_that_is_repeated_while_pending_is_answered_too(tmp_path):
    async with made(tmp_path, replicas=3, targets=3) as here:
        await here.warm()
        handle = await here.of(head=1)
        middle, last = here.chain(handle)[1:]
        here.pool.slow.update({middle, last})
        here.pool.hold(last, DATA_PEER_WRITE)
        before = here.pool.asked[middle, DATA_PEER_WRITE]
        writing = asyncio.create_task(here.write(handle))
        await here.pool.until(lambda: here.pool.held[last])
        writes = here.pool.stores[1].replica.writes
        pending = writes.pending[handle.inode, 0]
        pending.offered.give_up()
        writes.carry_on(pending, (None, Disconnected("the reply is lost")))
        await here.pool.until(lambda: here.pool.asked[middle, DATA_PEER_WRITE] == before + 2)
        here.pool.let_go(last)
        await writing
        await here.check()
