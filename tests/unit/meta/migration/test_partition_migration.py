"""Partition migration between shards while clients use them, in one process (meta/migration,
client/rpc/partition_migration)."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.clock import ManualClock
from nvpool.core.errors import Busy
from nvpool.core.ids import ROOT_INODE, inode_number, partition_of
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, RECORD, SHARED, UNLOCKED
from nvpool.core.units import PARTITION_COUNT
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.migration.cleanup import PartitionCleanup
from nvpool.meta.migration.ownership import PartitionOwnership
from nvpool.meta.migration.sessions import bring_all, sessions_to_move
from nvpool.meta.sessions.lock_service import LockService
from nvpool.meta.sessions.table import Sessions
from nvpool.meta.state.append_reservations import APPEND_S
from nvpool.meta.state.lock_table import LockTable, Owner
from nvpool.meta.state.records import (
    Inode,
    ShardIdentity,
    encode_inode,
    inode_key,
    lock_key,
    partition_of_key,
    prefix,
)
from nvpool.meta.state.session_records import SessionRecord
from nvpool.meta.state.transaction import View
from nvpool.poolmap.model import MAP_FORMAT, PartitionRange, PoolMap, PoolSettings
from nvpool.poolmap.shards import partition_moves
from nvpool.poolmap.shards.partitions import partition_of_directory
from nvpool.rpc.v1 import meta_pb2, wire_pb2
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(1000, 1000)
OPTIONS = ClientOptions(deadline_s=60.0)
WAIT_S = 30.0


class FullKv(MemoryKv):
    """In-memory store that reports that it is full until `has_room` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.has_room = asyncio.Event()

    async def room(self) -> None:
        await self.has_room.wait()

    def apply(self, effects, *, reclaims: bool = False) -> int:
        if self.full:
            raise Busy("full")
        return super().apply(effects, reclaims=reclaims)


class Moving:
    """A pool, one of its clients, and the expected tree."""

    def __init__(self, shards: int = 1, **pool_options) -> None:
        self.pool = InProcessPool(shards=shards, serves_map=True, **pool_options)
        self.files: dict[tuple[int, bytes], bytes] = {}
        self.inodes: dict[tuple[int, bytes], int] = {}
        self.directories = [ROOT_INODE]

    async def __aenter__(self) -> Moving:
        await self.pool.__aenter__()
        self.client = await self.pool.client("first", OPTIONS)
        self.vfs = self.client.vfs
        return self

    async def __aexit__(self, *failure) -> None:
        await self.pool.__aexit__(*failure)

    async def fill(self, directories: int = 12, files: int = 3) -> None:
        for _ in range(directories):
            name = b"d%d" % len(self.directories)
            self.directories.append((await self.vfs.mkdir(ROOT_INODE, name, 0o755, ME)).inode)
        for directory in self.directories:
            for number in range(files):
                await self.file(directory, b"f%d" % number, b"%d of %d" % (number, directory))

    async def file(self, directory: int, name: bytes, content: bytes) -> int:
        attr, handle = await self.vfs.create(directory, name, 0o644, os.O_RDWR | os.O_TRUNC, ME)
        await self.vfs.write(handle, 0, content)
        await self.vfs.release(handle)
        self.files[directory, name], self.inodes[directory, name] = content, attr.inode
        return attr.inode

    async def check(self, vfs=None) -> None:
        vfs = vfs or self.vfs
        for (directory, name), content in self.files.items():
            attr = await vfs.lookup(directory, name)
            assert attr.inode == self.inodes[directory, name]
            handle = await vfs.open(attr.inode, os.O_RDONLY, ME)
            assert bytes(await vfs.read(handle, 0, 1 << 16)) == content
            await vfs.release(handle)

    async def check_with_new_client(self) -> None:
        client = await self.pool.client("another", OPTIONS)
        await self.check(client.vfs)

    async def add(self) -> int:
        number = partition_moves.shards_given(self.pool.pool_map) + 1
        new = self.pool.new_shard(number)
        await self.pool.change_map(lambda now: partition_moves.shard_added(now, new))
        await self.pool.start_shard(number)
        return number

    async def request(self, shard: int, request: str) -> None:
        await self.pool.change_map(lambda now: partition_moves.with_desired_state(now, shard, request))

    async def settled(self) -> None:
        """Wait until no migration is in progress and the migrated partitions are removed at their sources."""
        async with asyncio.timeout(WAIT_S):
            while self.pool.pool_map.moves or any(self.left(meta) for meta in self.pool.metas.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    @staticmethod
    def left(meta) -> float:
        counters = meta.moving.counters()
        return counters["partitions_coming"] + counters["partitions_leaving"]

    async def remove(self, shard: int) -> None:
        await self.request(shard, "remove")
        await self.settled()
        meta = self.pool.metas[shard]
        async with asyncio.timeout(WAIT_S):
            while meta.parts.sessions.by_number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await self.pool.change_map(lambda now: partition_moves.shard_removed(now, shard))
        await self.pool.stop_shard(shard=shard)


def run(main, **options) -> None:
    async def whole() -> None:
        async with Moving(**options) as moving:
            await main(moving)

    asyncio.run(whole())


def test_shard_is_added_and_the_root_shard_removed():
    async def main(moving: Moving) -> None:
        await moving.fill()
        await moving.add()
        await moving.settled()
        assert moving.pool.pool_map.partitions[1].shard == 2
        await moving.check()
        await moving.check_with_new_client()
        counts = {shard: meta.parts.view.inode_count for shard, meta in moving.pool.metas.items()}
        assert sum(counts.values()) == 13 + len(moving.files) and min(counts.values()) > 0
        await moving.fill(2)
        await moving.remove(1)
        assert set(moving.pool.metas) == {2}
        await moving.check()
        await moving.check_with_new_client()
        assert moving.pool.metas[2].parts.view.inode_count == 15 + len(moving.files)

    run(main)


def test_open_locked_and_unlinked_files_migrate():
    async def main(moving: Moving) -> None:
        vfs = moving.vfs
        await moving.fill(6, 2)
        other = (await moving.pool.client("second", OPTIONS)).vfs
        held = []
        for directory in moving.directories:
            attr, handle = await vfs.create(directory, b"open", 0o644, os.O_RDWR, ME)
            await vfs.write(handle, 0, b"first")
            await vfs.fsync(handle, False)
            await vfs.setlk(handle, 7, 0, 99, EXCLUSIVE, 1)
            await vfs.unlink(directory, b"open", ME)
            held.append((attr.inode, handle))
        await moving.add()
        await moving.settled()
        await moving.remove(1)
        for _, handle in held:
            await vfs.write(handle, 5, b" second")
            await vfs.fsync(handle, False)
            assert bytes(await vfs.read(handle, 0, 100)) == b"first second"
            await vfs.setlk(handle, 7, 0, 49, UNLOCKED, 1)
            await vfs.setlk(handle, 7, 200, 299, SHARED, 1)
        meta = moving.pool.metas[2]
        assert meta.parts.collector.orphans.keys() == {inode for inode, _ in held}
        (session,) = {
            owner.session for inode, _ in held for owner in meta.parts.locks.table.files[inode].spans
        }
        assert session == vfs.meta.session_of(ROOT_INODE) and session >> 48 == 2
        for inode, _ in held:
            assert (
                meta.parts.sessions.by_number[session].opens[inode] >= 1
            )  # counted twice if a renewal came in between
        for _, handle in held:
            await vfs.release(handle)
        async with asyncio.timeout(WAIT_S):
            while any(inode in meta.parts.locks.table.files for inode, _ in held):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await moving.check(other)

    run(main)


def test_pending_release_is_sent_to_the_new_shard():
    async def main(moving: Moving) -> None:
        vfs, meta = moving.vfs, moving.vfs.meta
        await moving.fill(6, 1)
        await moving.add()
        await moving.settled()
        await moving.check()  # there is a session at both
        closed = []
        for directory in moving.directories:
            attr, handle = await vfs.create(directory, b"open", 0o644, os.O_RDWR, ME)
            await vfs.unlink(directory, b"open", ME)
            if meta.shard_of(attr.inode) == 1:
                closed.append((attr.inode, handle))
        async with asyncio.timeout(WAIT_S):
            while any(state.releasing and not state.releasing.done() for state in meta.shards.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        meta.options = OPTIONS._replace(release_s=1000.0)
        for _, handle in closed:
            await vfs.release(handle)
        await asyncio.sleep(0.01)  # now the releases wait to be sent
        meta.options = OPTIONS
        here = set(meta.shards[1].released)
        assert here and here <= {inode for inode, _ in closed}
        await moving.remove(1)
        orphans = moving.pool.metas[2].parts.collector.orphans
        async with asyncio.timeout(WAIT_S):
            while here & orphans.keys():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(main)


def test_migrated_lock_is_granted_to_its_waiter():
    async def main(moving: Moving) -> None:
        vfs, other = moving.vfs, (await moving.pool.client("second", OPTIONS)).vfs
        attr, mine = await vfs.create(ROOT_INODE, b"locked", 0o666, os.O_RDWR, ME)
        theirs = await other.open(attr.inode, os.O_RDWR, ME)
        await vfs.setlk(mine, 1, 0, 9, EXCLUSIVE, 1)
        waiting = asyncio.create_task(other.setlk(theirs, 2, 0, 9, EXCLUSIVE, 2, wait=True))
        async with asyncio.timeout(WAIT_S):
            while not moving.pool.metas[1].parts.locks.counters()["lock_waiters"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await moving.add()
        await moving.request(1, "remove")
        await moving.settled()
        async with asyncio.timeout(WAIT_S):
            while not moving.pool.metas[2].parts.locks.counters()["lock_waiters"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not waiting.done()
        await vfs.setlk(mine, 1, 0, 9, UNLOCKED, 1)
        await asyncio.wait_for(waiting, WAIT_S)

    run(main)


def test_migrated_append_does_not_hold_up_its_successor():
    """The report of an open reservation is sent to the new shard; the append that waits for it at the old one learns that."""

    async def main(moving: Moving) -> None:
        vfs, other = moving.vfs, (await moving.pool.client("second", OPTIONS)).vfs
        attr, mine = await vfs.create(ROOT_INODE, b"log", 0o666, os.O_RDWR, ME)
        theirs = await other.open(attr.inode, os.O_RDWR, ME)

        def send(client, method, request, reply):
            return client.meta.change(attr.inode, method, request, reply, uid=ME.uid, gid=ME.gid)

        def reserve(client, length):
            request = meta_pb2.ReserveRequest(inode=attr.inode, length=length, deferred=True)
            return send(client, wire_pb2.META_RESERVE, request, meta_pb2.ReserveReply)

        assert (await reserve(vfs, 100)).offset == 0
        waiting = asyncio.create_task(reserve(other, 10))
        async with asyncio.timeout(WAIT_S):
            while not moving.pool.metas[1].parts.waits.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await moving.add()
        await moving.request(1, "remove")
        await moving.settled()
        assert not waiting.done()
        report = meta_pb2.ReportRequest(inode=attr.inode, end=100, wrote=True)
        assert (await send(vfs, wire_pb2.META_REPORT, report, meta_pb2.AttrReply)).attr.size == 100
        async with asyncio.timeout(APPEND_S / 2):
            assert (await waiting).offset == 100
        await vfs.release(mine)
        await other.release(theirs)

    run(main)


def test_directory_is_not_created_in_a_closed_partition():
    """The partition of a directory is chosen by its name, and no record in it is read before."""

    async def main(moving: Moving) -> None:
        vfs, meta = moving.vfs, moving.pool.metas[1]
        await vfs.mkdir(ROOT_INODE, b"before", 0o755, ME)
        used = {
            partition_of_key(key) for key, _ in moving.pool.kvs[1].scan(prefix(0, 0), prefix(4096, 0), 1000)
        }
        name, partition = next(
            (name, partition)
            for name in map(str.encode, map(str, range(10_000)))
            if (partition := partition_of_directory(meta.parts.view.name_hash(ROOT_INODE, name))) not in used
        )
        meta.parts.ranges.close((partition,))
        making = asyncio.create_task(vfs.mkdir(ROOT_INODE, name, 0o755, ME))
        async with asyncio.timeout(WAIT_S):
            while not meta.parts.waits.tasks and not making.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not making.done() and not moving.pool.kvs[1].scan(
            prefix(partition, 0), prefix(partition + 1, 0), 1
        )
        meta.parts.ranges.open((partition,))
        made = await asyncio.wait_for(making, WAIT_S)
        assert partition_of(made.inode) == partition

    run(main)


def test_name_operations_continue_during_migrations():
    async def main(moving: Moving) -> None:
        await moving.fill(9, 2)
        clients = [moving.vfs, *[(await moving.pool.client(f"client {n}", OPTIONS)).vfs for n in range(2)]]
        stop = asyncio.Event()

        async def work(number: int, vfs) -> int:
            turns = 0
            while not stop.is_set():
                turns += 1
                here = moving.directories[(number * 3 + turns) % 10]
                there = moving.directories[(number * 5 + 2 * turns) % 10]
                name = b"%d-%d" % (number, turns)
                attr, handle = await vfs.create(here, name, 0o644, os.O_RDWR | os.O_EXCL, ME)
                await vfs.write(handle, 0, name)
                await vfs.release(handle)
                await vfs.rename(here, name, there, b"to-" + name, 0, ME)
                assert (await vfs.lookup(there, b"to-" + name)).inode == attr.inode
                made = await vfs.mkdir(there, b"dir-" + name, 0o755, ME)
                await vfs.link(attr.inode, made.inode, b"link", ME)
                assert (await vfs.getattr(attr.inode)).links == 2
                await vfs.unlink(there, b"to-" + name, ME)
                await vfs.unlink(made.inode, b"link", ME)
                await vfs.rmdir(there, b"dir-" + name, ME)
            return turns

        working = [asyncio.create_task(work(number, vfs)) for number, vfs in enumerate(clients)]
        await moving.add()
        await moving.settled()
        await moving.add()
        await moving.settled()
        await moving.remove(1)
        await moving.remove(3)
        stop.set()
        assert min(await asyncio.gather(*working)) > 0
        await moving.check()
        await moving.check_with_new_client()
        for directory in moving.directories[1:]:
            listed, _ = await moving.vfs.readdir(await moving.vfs.opendir(directory), 0, 1000)
            assert sorted(listed.names) == [b"f0", b"f1"]
        meta = moving.pool.metas[2]
        assert meta.parts.view.inode_count == 10 + len(moving.files) + len(meta.parts.collector.orphans)

    run(main)


def test_sessions_may_change_between_migration_messages():
    async def main(moving: Moving) -> None:
        for number in range(3):
            vfs = (await moving.pool.client(f"client {number}", OPTIONS)).vfs
            await vfs.create(ROOT_INODE, b"%d" % number, 0o644, os.O_RDWR, ME)
        inside = moving.pool.meta.moving.inside
        batches = sessions_to_move(inside, frozenset(range(PARTITION_COUNT)))
        numbers = {next(batches).session}
        another = (await moving.pool.client("another", OPTIONS)).vfs
        await another.lookup(ROOT_INODE, b"0")
        assert len({*numbers, *(session.session for session in batches)}) == 3

    run(main)


def test_full_shard_assigns_migrated_locks_later():
    async def main() -> None:
        clock, kv = ManualClock(), FullKv()
        table, sessions = LockTable(clock, 60.0), Sessions(kv, 60.0, shard=2)
        locks = LockService(kv, table, clock)
        inode = inode_number(9, 1)
        ours, theirs = (
            sessions.arrive(number, SessionRecord(bytes(16), 1, "client", True, 77), (), 0.0)
            for number in (2 << 48 | 1, 1 << 48 | 1)
        )
        step = table.decide(inode, Owner(RECORD, theirs.number, 5), 0, 9, EXCLUSIVE)
        kv.apply(step.effects)
        table.commit(step)
        inside = SimpleNamespace(kv=kv, sessions=sessions, locks=locks)
        kv.full = True
        with pytest.raises(Busy):
            bring_all(inside)
        kv.full = False
        bring_all(inside)
        assert list(sessions.by_number) == [ours.number] and list(table.counts) == [ours.number]
        ((key, _),) = kv.scan(prefix(9, 0), prefix(10, 0), 10)
        assert key == lock_key(inode, RECORD, ours.number, 5, 0)

    asyncio.run(main())


def test_migrated_records_are_removed_before_new_ones_arrive():
    async def main() -> None:
        clock, kv = ManualClock(), FullKv()
        view = View(kv, ShardIdentity(1, bytes(16)), bytes(32), 60.0, LockTable(clock, 60.0))
        ranges = PartitionOwnership(kv, view)
        leaving = PartitionCleanup(SimpleNamespace(shard=1, kv=kv, view=view, ranges=ranges))
        key = inode_key(inode_number(9, 1))
        kv.apply([(key, encode_inode(Inode(inode_number(9, 1), 0o100644)))])
        view.inode_count = 2
        leaving.begin(
            PoolMap(
                MAP_FORMAT,
                "p",
                "p",
                7,
                PoolSettings(),
                (),
                partitions=(PartitionRange(0, PARTITION_COUNT, 2),),
            ),
            (),
        )

        async def take() -> None:
            """As a destination begins, and stores the first record that arrives."""
            await leaving.remove(9)
            ranges.set_foreign((9,), True)
            kv.apply([(key, b"come")])

        await leaving.mark_partitions()
        kv.full = True
        working = [asyncio.ensure_future(take()), asyncio.ensure_future(leaving.run_once())]
        await asyncio.sleep(0)
        kv.full = False
        kv.has_room.set()
        await asyncio.gather(*working)
        assert kv.get(key) == b"come" and 9 in ranges.foreign and not leaving.waiting

    asyncio.run(main())
