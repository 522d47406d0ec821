"""Cross-shard transactions when a shard dies before or after any durable step: atomic, and no record stays
locked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.core.errors import NotFound, NvpoolError
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.server.service import MetaOptions
from nvpool.meta.transactions import participant
from nvpool.testing.env.pool import problems_of
from tests.unit.meta.transactions.test_cross_shard_transactions import ME, SHARDS, CrossShardNames

PATIENT = ClientOptions(
    deadline_s=60.0, fresh_s=0.0, attr_s=0.0, retry_first_s=0.01, retry_last_s=0.05, leases=False
)
STEPS_MAX = 12
"""More steps than any of these changes has."""


class Died(Exception):
    """Raised in a process after its death."""


class Trap:
    """Lets a shard die at the n-th durable step of one kind, counted from `arm`."""

    def __init__(self, names: CrossShardNames, shard: int, where: str, number: int) -> None:
        self._names, self._shard, self._where = names, shard, where
        self._left = number
        self.armed = False
        self.sprung = asyncio.Event()

    def at(self, where: str) -> None:
        if self.sprung.is_set():
            raise Died
        if self.armed and where == self._where:
            self._left -= 1
            if not self._left:
                self._die()

    def _die(self) -> None:
        """Die as by kill -9: no message leaves this process any more."""
        pool, shard = self._names.pool, self._shard
        self.sprung.set()
        pool.listeners["meta", shard].kill()
        dialer = pool.metas[shard].parts.targets.dialer
        dialer.closed = True
        for connection in dialer.by_endpoints.values():
            connection.lose("its process has died")
        raise Died


class TrappedKv:
    """An engine whose process may die at its steps."""

    def __init__(self, kv, trap: Trap) -> None:
        self.__dict__.update(kv=kv, trap=trap)

    def __getattr__(self, name: str):
        return getattr(self.kv, name)

    def apply(self, effects, *, reclaims: bool = False) -> int:
        self.trap.at("before apply")
        sequence = self.kv.apply(effects, reclaims=reclaims)
        self.trap.at("after apply")
        return sequence

    async def sync(self, sequence: int | None = None) -> None:
        self.trap.at("before sync")
        await self.kv.sync(sequence)
        self.trap.at("after sync")


STEPS = ("before apply", "after apply", "before sync", "after sync")


class Crash:
    """One change that is made while a shard dies, and a check of the result."""

    def __init__(self, names: CrossShardNames) -> None:
        self.names = names
        self.done = False

    async def prepare(self) -> None:
        raise NotImplementedError

    async def change(self) -> None:
        raise NotImplementedError

    async def check(self) -> None:
        """Called when every shard is idle. `done`: the client got a success."""
        raise NotImplementedError

    async def named(self, directory: int, name: bytes) -> int:
        try:
            return (await self.names.vfs.lookup(directory, name)).inode
        except NotFound:
            return 0


class Mkdir(Crash):
    async def prepare(self) -> None:
        number = 0
        hash_of = self.names.pool.metas[2].parts.view.name_hash
        owners = self.names.pool.pool_map.shard_of_partition
        while owners[int.from_bytes(hash_of(self.names.at[2], b"n%d" % number)[5:]) & 4095] != 3:
            number += 1
        self.name = b"n%d" % number  # on shard 3, in a directory of shard 2

    async def change(self) -> None:
        await self.names.vfs.mkdir(self.names.at[2], self.name, 0o755, ME)

    async def check(self) -> None:
        inode = await self.named(self.names.at[2], self.name)
        assert inode or not self.done
        if inode:
            assert self.names.vfs.meta.shard_of(inode) == 3
            await self.names.file(inode, b"in it")


class Rmdir(Mkdir):
    async def prepare(self) -> None:
        await super().prepare()
        await super().change()

    async def change(self) -> None:
        await self.names.vfs.rmdir(self.names.at[2], self.name, ME)

    async def check(self) -> None:
        inode = await self.named(self.names.at[2], self.name)
        assert not inode or not self.done
        if inode:
            await self.names.file(inode, b"in it")


class RenameFile(Crash):
    """Rename of an inode of shard 3, from a directory of shard 2 over a file in a directory of shard 1."""

    async def prepare(self) -> None:
        names = self.names
        self.moved = await names.file(names.at[3], b"moved", b"bytes")
        self.replaced = await names.file(names.at[1], b"there", b"old")
        await names.vfs.rename(names.at[3], b"moved", names.at[2], b"here", 0, ME)

    async def change(self) -> None:
        await self.names.vfs.rename(self.names.at[2], b"here", self.names.at[1], b"there", 0, ME)

    async def check(self) -> None:
        here = await self.named(self.names.at[2], b"here")
        there = await self.named(self.names.at[1], b"there")
        assert (here, there) in ((self.moved, self.replaced), (0, self.moved))
        assert not here or not self.done
        assert await self.names.content(self.moved) == b"bytes"


class RenameDirectory(Crash):
    """Move of an inode of shard 3, from a directory of shard 2 to one of shard 3; shard 1 gives its turn."""

    async def prepare(self) -> None:
        self.moved = await self.names.directory(3, self.names.at[2], b"x")
        self.name = next(iter(await self.names.names(self.names.at[2])))

    async def change(self) -> None:
        await self.names.vfs.rename(self.names.at[2], self.name, self.names.at[3], b"there", 0, ME)

    async def check(self) -> None:
        here = await self.named(self.names.at[2], self.name)
        there = await self.named(self.names.at[3], b"there")
        assert (here, there) in ((self.moved, 0), (0, self.moved))
        assert not here or not self.done
        parent = (await self.names.vfs.getattr(self.moved)).parent
        assert parent == self.names.at[2 if here else 3]


class Link(Crash):
    async def prepare(self) -> None:
        self.inode = await self.names.file(self.names.at[2], b"here")

    async def change(self) -> None:
        await self.names.vfs.link(self.inode, self.names.at[3], b"there", ME)

    async def check(self) -> None:
        there = await self.named(self.names.at[3], b"there")
        assert there in (0, self.inode) and (there or not self.done)
        assert (await self.names.vfs.getattr(self.inode)).links == 1 + bool(there)


class Unlink(Crash):
    async def prepare(self) -> None:
        names = self.names
        self.inode = await names.file(names.at[3], b"moved")
        await names.vfs.rename(names.at[3], b"moved", names.at[2], b"here", 0, ME)

    async def change(self) -> None:
        await self.names.vfs.unlink(self.names.at[2], b"here", ME)

    async def check(self) -> None:
        assert not await self.named(self.names.at[2], b"here") or not self.done


async def restart(names: CrossShardNames, shard: int, power_lost: bool) -> None:
    pool = names.pool
    meta = pool.metas.pop(shard)
    del pool.listeners["meta", shard]
    await meta.close()
    kv = pool.kvs[shard]
    if isinstance(kv.kv, MemoryKv):
        if power_lost:
            kv.kv.crash()
        pool.memory["meta", shard] = kv.kv
    else:
        await kv.kv.abandon()
    await pool.start_shard(shard)


async def one(
    make: Callable[[CrossShardNames], Crash],
    shard: int,
    where: str,
    number: int,
    power_lost: bool,
    directory,
) -> bool:
    """Whether that step exists."""
    async with CrossShardNames(
        directory=directory, meta_options=MetaOptions(tick_s=0.05), options=PATIENT
    ) as names:
        case = make(names)
        await case.prepare()
        await names.quiet()
        trap = Trap(names, shard, where, number)
        pool = names.pool
        meta = pool.metas[shard]
        kv = pool.kvs[shard] = TrappedKv(pool.kvs[shard], trap)
        for part in (meta, meta.parts.cross_shard.coordinator, meta.parts.cross_shard.participant):
            part._kv = kv
        for kvs in pool.kvs.values():
            await kvs.sync()
        meta.died.add_done_callback(lambda died: died.exception())
        trap.armed = True
        changing = asyncio.ensure_future(_acknowledged(case))
        await asyncio.wait(
            [changing, asyncio.ensure_future(trap.sprung.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        if changing.done():
            await asyncio.wait_for(_quiet_or(names, trap), 60)
        trap.armed = False
        died = trap.sprung.is_set()
        if died:
            await restart(names, shard, power_lost)
        await changing
        await names.quiet()
        if power_lost and died:
            case.done = False  # an acknowledged and unsynced change may be lost, but not half of it
        await case.check()
        await names.quiet()
        assert await problems_of(pool.clients[0]) == []
        return died


async def _acknowledged(case: Crash) -> None:
    try:
        await case.change()
        case.done = True
    except NvpoolError:
        pass  # the result is unknown


async def _quiet_or(names: CrossShardNames, trap: Trap) -> None:
    while not trap.sprung.is_set() and not names.is_quiet():  # noqa: ASYNC110 (no notification)
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(participant, "ASK_AFTER_S", 0.05)


CASES = [Mkdir, RenameDirectory, Unlink, Rmdir, RenameFile, Link]


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("shard", SHARDS)
def test_change_is_atomic_when_a_shard_is_killed(case: Callable[[CrossShardNames], Crash], shard: int):
    async def main() -> int:
        died = 0
        for where in STEPS:
            for number in range(1, STEPS_MAX):
                if not await one(case, shard, where, number, False, None):
                    break
                died += 1
        return died

    asyncio.run(main())


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [Mkdir, RenameFile, RenameDirectory], ids=lambda case: case.__name__)
@pytest.mark.parametrize("shard", SHARDS)
def test_change_is_atomic_when_a_shard_loses_power(case: Callable[[CrossShardNames], Crash], shard: int):
    async def main() -> None:
        for where in STEPS:
            for number in range(1, STEPS_MAX):
                if not await one(case, shard, where, number, True, None):
                    break

    asyncio.run(main())


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["after apply", "before apply"])
@pytest.mark.parametrize("shard", SHARDS)
def test_change_is_atomic_on_the_lmdb_engine(shard: int, where: str, tmp_path):
    async def main() -> None:
        for number in range(1, STEPS_MAX):
            if not await one(RenameFile, shard, where, number, False, tmp_path / f"{number}"):
                break

    asyncio.run(main())
