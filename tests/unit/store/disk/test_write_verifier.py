"""UnstableWrites writes that a target lost with its power while the client lives: fsync reports the loss once."""

from __future__ import annotations

import asyncio
import errno
import functools
import os

import msgspec
import pytest

from nvpool.client.data import unstable_writes
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.clock import SYSTEM_CLOCK, ManualClock
from nvpool.core.errors import NotFound, WritesLost
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB, MIB
from nvpool.kv.memory_engine import MemoryKv
from nvpool.poolmap.chains.transitions import died, joined, restarted, returned, vouched
from nvpool.poolmap.file_layout import chain_of
from nvpool.poolmap.model import changed
from nvpool.rpc.v1.wire_pb2 import Method
from nvpool.store.chunks.api import StoreOptions
from nvpool.store.chunks.block_store import BlockChunkStore
from nvpool.store.disk import write_verifier
from nvpool.store.disk.device import MemoryDevice
from nvpool.testing.fakes.in_process_pool import InProcessPool

ME = Caller(1000, 1000)
FAST = ClientOptions(deadline_s=30.0, fresh_s=0.0, attr_s=0.0, release_s=0.01, short_circuit=False)


def in_loop(test):
    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 120))

    return run


class Unanswered:
    """A call whose reply never leaves."""

    def __init__(self, call):
        self._call = call

    def __getattr__(self, name):
        return getattr(self._call, name)

    def reply(self, message=b"", payload=()):
        pass

    fail = reply


class Losing:
    """An in-memory pool; each of its files uses all targets."""

    def __init__(self, replicas: int):
        self.pool = InProcessPool(
            capacities=(64 * MIB,) * replicas, replicas=replicas, serves_map=True, chunk_bytes=256 * KIB
        )

    async def __aenter__(self) -> Losing:
        await self.pool.__aenter__()
        for target in self.pool.stores:
            await self._vouch(target)
        self.vfs = (await self.pool.client("first", FAST)).vfs
        return self

    async def __aexit__(self, *failure) -> None:
        await self.pool.__aexit__(*failure)

    async def file(self, name: bytes, content: bytes):
        """The stores have the bytes, and have not flushed them."""
        _, handle = await self.vfs.create(ROOT_INODE, name, 0o644, os.O_RDWR, ME)
        await self.vfs.write(handle, 0, content)
        await self.vfs.flush(handle)
        return handle

    async def change(self, decide) -> None:
        await self.pool.change_map(
            lambda now: changed(now, tables=decide(now).tables, targets=decide(now).targets)
        )

    async def kill(self, target: int) -> None:
        await self.pool.stop_store(target)
        await self.change(lambda now: died(now, {target}))

    async def restart(self, target: int, *, power: bool) -> None:
        """Restart the target as supervisor and manager do."""
        await self.pool.stop_store(target)
        if power:
            self.pool.memory["target", target].crash()
        await self.change(lambda now: restarted(now, target))
        await self._vouch(target)
        await self.pool.start_store(target)

    async def _vouch(self, target: int) -> None:
        await self.change(lambda now: vouched(now, target, self.pool.memory["target", target].verifier))

    def memory(self) -> list:
        return [store for (role, _), store in self.pool.memory.items() if role == "target"]

    def head_of(self, handle) -> int:
        return self.pool.pool_map.chain(2, chain_of(handle.inode, 0)).targets[0]

    async def rejoin(self, target: int) -> None:
        """The target left its chains and is now a member of all of them again."""
        await self.change(lambda now: returned(now, {target}))
        async with asyncio.timeout(60):
            while any(chain.joining for table in self.pool.pool_map.tables for chain in table.chains):
                equal = [
                    (*chain, epoch) for chain, epoch in self.pool.stores[target].upkeep.resync.equal.items()
                ]
                new = joined(self.pool.pool_map, target, equal)
                if new is not self.pool.pool_map:
                    await self.change(lambda _, new=new: new)
                await asyncio.sleep(0.01)


@in_loop
async def test_fsync_reports_lost_writes_once():
    async with Losing(1) as one:
        handle = await one.file(b"file", b"unflushed" * 1000)
        await one.restart(1, power=True)
        with pytest.raises(WritesLost) as raised:
            await one.vfs.fsync(handle, False)
        assert raised.value.errno == errno.EIO
        await one.vfs.fsync(handle, False)
        await one.vfs.write(handle, 0, b"again" * 1000)
        await one.vfs.fsync(handle, False)
        await one.restart(1, power=True)
        await one.vfs.fsync(handle, False)
        assert bytes(await one.vfs.read(handle, 0, 5000)) == b"again" * 1000


@in_loop
async def test_each_open_file_gets_the_loss_once():
    async with Losing(1) as one:
        handle = await one.file(b"file", b"unflushed" * 1000)
        other = await one.vfs.open(handle.inode, os.O_RDWR, ME)
        await one.restart(1, power=True)
        for open_file in (handle, other):
            with pytest.raises(WritesLost):
                await one.vfs.fsync(open_file, False)
        later = await one.vfs.open(handle.inode, os.O_RDWR, ME)
        for open_file in (handle, other, later):
            await one.vfs.fsync(open_file, False)


@in_loop
async def test_killed_target_loses_no_writes():
    async with Losing(1) as one:
        handle = await one.file(b"file", b"x" * 9000)
        await one.restart(1, power=False)
        await one.vfs.fsync(handle, False)
        await one.vfs.write(handle, 3000, b"y" * 3000)
        await one.vfs.flush(handle)
        await one.restart(1, power=False)
        await one.restart(1, power=False)
        await one.vfs.fsync(handle, False)


@in_loop
async def test_bytes_kept_by_another_replica_are_not_lost():
    async with Losing(2) as one:
        handle = await one.file(b"file", b"x" * 9000)
        await one.restart(1, power=True)
        await one.vfs.fsync(handle, False)
        await one.rejoin(1)
        handle = await one.file(b"other", b"z" * 9000)
        await one.restart(2, power=True)
        await one.rejoin(2)
        await one.vfs.fsync(handle, False)
        assert bytes(await one.vfs.read(handle, 0, 9000)) == b"z" * 9000


@in_loop
async def test_bytes_lost_by_all_replicas_are_reported():
    async with Losing(2) as one:
        handle = await one.file(b"file", b"x" * 9000)
        await one.change(lambda now: died(now, {1, 2}))
        for target in (1, 2):
            await one.restart(target, power=True)
        with pytest.raises(WritesLost):
            await one.vfs.fsync(handle, False)
        await one.vfs.fsync(handle, False)


@in_loop
async def test_replicas_that_are_all_killed_lose_no_writes():
    async with Losing(2) as one:
        handle = await one.file(b"file", b"x" * 9000)
        await one.change(lambda now: died(now, {1, 2}))
        for target in (1, 2):
            await one.restart(target, power=False)
        await one.vfs.fsync(handle, False)
        assert bytes(await one.vfs.read(handle, 0, 9000)) == b"x" * 9000


@in_loop
async def test_rename_reports_lost_writes_before_it_replaces():
    async with Losing(1) as one:
        old = await one.file(b"name", b"old")
        await one.vfs.fsync(old, False)
        new = await one.file(b"beside", b"new")
        await one.restart(1, power=True)
        with pytest.raises(WritesLost):
            await one.vfs.rename(ROOT_INODE, b"beside", ROOT_INODE, b"name", 0, ME)
        with pytest.raises(WritesLost):
            await one.vfs.fsync(new, False)
        await one.vfs.fsync(new, False)
        assert (await one.vfs.lookup(ROOT_INODE, b"name")).inode == old.inode


@pytest.mark.parametrize("first", [1, 2])
@in_loop
async def test_replicas_killed_in_turn_lose_no_writes(first):
    async with Losing(2) as one:
        handle = await one.file(b"file", b"x" * 9000)
        await one.kill(first)
        await one.restart(3 - first, power=False)
        await one.vfs.fsync(handle, False)
        assert bytes(await one.vfs.read(handle, 0, 9000)) == b"x" * 9000


@in_loop
async def test_write_repeated_after_a_dead_head_is_not_lost():
    async with Losing(2) as one:
        handle = await one.file(b"file", b"x" * 9000)
        head = one.head_of(handle)
        methods = one.pool.stores[head].methods
        write = methods[Method.DATA_WRITE]
        methods[Method.DATA_WRITE] = lambda call: write(Unanswered(call))  # the head dies before it replies
        writing = asyncio.create_task(one.vfs.write(handle, 0, b"y" * 9000))
        flushing = asyncio.create_task(one.vfs.flush(handle))
        chunk = handle.inode, 0
        async with asyncio.timeout(60):
            while any(store.chunks[chunk].blocks[0][0][:1] != b"y" for store in one.memory()):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        await one.kill(head)
        await one.restart(3 - head, power=False)
        await writing
        await flushing
        await one.vfs.fsync(handle, False)
        assert bytes(await one.vfs.read(handle, 0, 9000)) == b"y" * 9000


@pytest.mark.parametrize("first", [1, 2])
@in_loop
async def test_loss_on_the_last_target_counts_despite_an_old_copy(first):
    """The first target was away when others read: the chain has the contents of the last one."""
    async with Losing(2) as one:
        handle = await one.file(b"file", b"x" * 9000)
        await one.restart(first, power=False)
        await one.restart(3 - first, power=True)
        await one.rejoin(first)
        with pytest.raises(WritesLost):
            await one.vfs.fsync(handle, False)


@in_loop
async def test_loss_on_a_target_that_left_is_reported():
    async with Losing(2) as one:
        handle = await one.file(b"file", b"x" * 9000)
        await one.restart(1, power=False)
        await one.restart(2, power=True)
        await one.rejoin(1)
        await one.restart(2, power=False)
        await one.rejoin(2)
        with pytest.raises(WritesLost):
            await one.vfs.fsync(handle, False)


@in_loop
async def test_losses_of_forgotten_files_are_reported_by_any_fsync(monkeypatch):
    monkeypatch.setattr(unstable_writes, "INODES_MAX", 2)
    async with Losing(1) as one:
        handles = [await one.file(b"file%d" % number, b"x" * 5000) for number in range(5)]
        await one.restart(1, power=True)
        with pytest.raises(WritesLost):  # because of the files that are not remembered
            await one.vfs.fsync(handles[0], False)
        with pytest.raises(WritesLost):  # because of its own writes
            await one.vfs.fsync(handles[4], False)
        for handle in handles:
            if handle is not handles[3]:
                await one.vfs.fsync(handle, False)
        with pytest.raises(WritesLost):
            await one.vfs.fsync(handles[3], False)


def test_chain_is_intact_while_its_last_target_loses_nothing():
    pool = InProcessPool(capacities=(64 * MIB,) * 2, replicas=2)
    now = pool.pool_map
    for target in (1, 2):
        now = vouched(now, target, 7)
    assert all(chain.intact == 0 for table in now.tables for chain in table.chains), (
        "no target was there before"
    )
    assert vouched(now, 1, 7) is now is vouched(now, 3, 7)
    for target in (1, 2):
        now = vouched(restarted(now, target), target, 8)
        now = returned(now, {target})
        now = joined(
            now, target, [(2, number, chain.epoch) for number, chain in enumerate(now.table_by_id[2].chains)]
        )
        assert all(chain.intact == 0 and set(chain.targets) == {1, 2} for chain in now.table_by_id[2].chains)
    alone = [chain.targets for chain in now.table_by_id[1].chains]
    assert all(chain.intact == chain.epoch for chain in now.table_by_id[1].chains) and set(alone) == {
        (1,),
        (2,),
    }
    now = vouched(restarted(died(now, {1, 2}), 1), 1, 9)
    assert all(chain.intact == 0 and chain.targets == (2,) for chain in now.table_by_id[2].chains)
    now = vouched(restarted(now, 2), 2, 8)
    assert all(chain.intact == 0 for chain in now.table_by_id[2].chains), "target 2 was killed"
    now = vouched(restarted(now, 2), 2, 9)
    assert all(chain.intact == chain.epoch for chain in now.table_by_id[2].chains)
    assert msgspec.json.decode(msgspec.json.encode(now), type=type(now)) == now


@in_loop
async def test_verifier_changes_only_after_a_possible_loss():
    kv = MemoryKv()
    first = write_verifier.opened(kv, SYSTEM_CLOCK, "boot 1", lost=False)
    assert first and write_verifier.opened(kv, SYSTEM_CLOCK, "boot 1", lost=False) == first  # killed
    await write_verifier.closed(kv, first)
    assert write_verifier.opened(kv, SYSTEM_CLOCK, "boot 2", lost=False) == first
    second = write_verifier.opened(kv, SYSTEM_CLOCK, "boot 3", lost=False)
    assert second != first
    assert write_verifier.opened(kv, SYSTEM_CLOCK, "boot 3", lost=True) != second


@in_loop
async def test_doubted_store_gets_a_new_verifier():
    async def opened(**options):
        store = BlockChunkStore(
            MemoryDevice(4 * MIB), 1024, target=1, options=StoreOptions(**options), clock=ManualClock()
        )
        await store.attach(kv)
        return store

    kv = MemoryKv()
    store = await opened()
    number = store.verifier
    await store.abandon()
    store = await opened()
    assert store.verifier == number
    store.fence("for a test")
    await store.abandon()
    store = await opened(doubted=True)
    assert store.verifier not in (0, number)
    await store.close()


@in_loop
async def test_client_accepts_lower_change_numbers_after_a_crash():
    async with Losing(1) as one:
        handle = await one.file(b"file", b"x" * 100)
        attr = await one.vfs.getattr(handle.inode)
        _, other = await one.vfs.create(ROOT_INODE, b"closed", 0o644, os.O_RDWR, ME)
        await one.vfs.release(other)
        kv = one.pool.kv
        await kv.sync(kv.sequence)
        for mode in (0o600, 0o640, 0o644, 0o666):
            await one.vfs.setattr(handle.inode, mode=mode, caller=ME)
            await one.vfs.setattr(other.inode, mode=mode, caller=ME)
        assert (await one.vfs.getattr(handle.inode)).change > attr.change
        kv.crash()  # its process stops in order below, and would sync
        await one.pool.stop_shard()
        await one.pool.start_shard()
        with pytest.raises(NotFound):  # until a request, the client does not notice the restart
            await one.vfs.lookup(ROOT_INODE, b"no such name")
        for inode in (handle.inode, other.inode):
            found = await one.vfs.getattr(inode)
            assert found.mode & 0o777 == 0o644 and found.change < attr.change + 4
        await one.vfs.setattr(handle.inode, mode=0o600, caller=ME)
        assert (await one.vfs.getattr(handle.inode)).mode & 0o777 == 0o600
        assert bytes(await one.vfs.read(handle, 0, 100)) == b"x" * 100
