"""Targets that a truncation is sent to, and how often, while chains change."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from msgspec.structs import replace

from nvpool.core.clock import ManualClock
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.kv.memory_engine import MemoryKv
from nvpool.meta.gc.truncations import Truncations
from nvpool.meta.migration.ownership import PartitionOwnership
from nvpool.meta.state.lock_table import LockTable
from nvpool.meta.state.record_locks import Holds
from nvpool.meta.state.records import Inode, Intent, ShardIdentity, decode_inode, encode_inode, inode_key
from nvpool.meta.state.transaction import View
from nvpool.meta.state.transaction_records import TransactionId
from nvpool.meta.state.volume_access import VolumeAccess
from nvpool.meta.store_client import Targets
from nvpool.poolmap.model import MAP_FORMAT, Chain, ChainTable, Drive, Node, PoolMap, PoolSettings, Target
from nvpool.rpc.v1 import data_pb2


def pool_map(epoch: int, chain: Chain) -> PoolMap:
    numbers = (1, 2, 3)
    return PoolMap(
        MAP_FORMAT,
        "p",
        "p",
        epoch,
        PoolSettings(),
        (Node(1, "n", "", ()),),
        drives=tuple(Drive(number, 1, f"d{number}", 1 << 30) for number in numbers),
        targets=tuple(Target(number, number, 1, 1 << 30, (f"inproc://{number}",)) for number in numbers),
        tables=(ChainTable(1, (chain,) * CHAINS_PER_TABLE),),
    )


class FakeTargets:
    """Fake targets that record their order; `meanwhile` is called with each before it replies."""

    def __init__(self, first: PoolMap) -> None:
        self.order: list[int] = []
        self.epoch = first.epoch
        self.meanwhile = lambda target: None
        self.targets = Targets(self, ManualClock(), bytes(32), 1)
        self.use(first)

    def use(self, newer: PoolMap) -> None:
        self.epoch = newer.epoch
        self.targets.use_map(newer)

    async def call(self, endpoints, method, message, payload=(), *, deadline_s, into=None):
        target = int(endpoints[0].rpartition("/")[2])
        self.order.append(target)
        reply = data_pb2.CutReply(map_epoch=self.epoch, bytes=512).SerializeToString()
        self.meanwhile(target)
        await asyncio.sleep(0)
        return SimpleNamespace(message=reply)

    async def cut(self) -> list[int]:
        view = SimpleNamespace(cutting={}, access=VolumeAccess())
        cuts = Truncations(MemoryKv(), view, self.targets, asyncio.ensure_future)
        await asyncio.wait_for(cuts.begin(5, Intent(size=0, cut=1, chunk_bits=20, end=0, table=1)), 60)
        return self.order


def test_each_target_is_cut_once_without_resync():
    assert sorted(asyncio.run(FakeTargets(pool_map(7, Chain(1, (1, 2)))).cut())) == [1, 2]


def test_joining_target_is_cut_again_after_all_others():
    order = asyncio.run(FakeTargets(pool_map(7, Chain(1, (1, 2), joining=(3,)))).cut())
    assert sorted(order[:3]) == [1, 2, 3] and order[3:] == [3]


def test_returning_target_is_cut_again():
    async def main() -> list[int]:
        fakes = FakeTargets(pool_map(7, Chain(1, (1, 2))))

        def meanwhile(target: int) -> None:
            if target == 1 and fakes.epoch == 7:
                fakes.use(
                    pool_map(9, Chain(3, (1,), joining=(2,)))
                )  # it may copy now what target 1 still has to cut

        fakes.meanwhile = meanwhile
        return await fakes.cut()

    order = asyncio.run(main())
    assert set(order[:2]) == {1, 2} and order[-1] == 2 and order.count(2) >= 2


def test_hole_ends_in_closed_partitions_and_locked_records():
    """A hand-over waits for the hole. A refusal of the view is no failure of the service."""

    async def main() -> int:
        clock, kv, fakes = ManualClock(), MemoryKv(), FakeTargets(pool_map(7, Chain(1, (1, 2))))
        view = View(kv, ShardIdentity(1, bytes(16)), bytes(32), 60.0, LockTable(clock, 60.0))
        kv.apply([(inode_key(5), encode_inode(Inode(5, 0o100644, size=1 << 20, blocks=8)))])
        ranges = PartitionOwnership(kv, view)
        holds = Holds(ranges, view, clock.boottime_s)
        ranges.close((0,))
        holds.take(TransactionId(2, 1, 1), 1, [inode_key(5)])
        cuts = Truncations(kv, view, fakes.targets, asyncio.ensure_future)
        await asyncio.wait_for(cuts.begin(5, Intent(size=0, cut=1, chunk_bits=20, end=1 << 20, table=1)), 60)
        assert not view.cutting
        return decode_inode(5, kv.get(inode_key(5))).blocks

    assert asyncio.run(main()) < 8


def test_silent_target_is_waited_for_until_it_is_down():
    async def main() -> list[int]:
        fakes, silent = FakeTargets(pool_map(7, Chain(1, (1, 2)))), asyncio.Event()
        answered = fakes.call

        async def call(endpoints, *message, **options):
            if endpoints == ("inproc://2",):
                silent.set()
                await asyncio.get_running_loop().create_future()
            return await answered(endpoints, *message, **options)

        fakes.call = call
        cutting = asyncio.ensure_future(fakes.cut())
        await silent.wait()
        fakes.use(pool_map(8, Chain(1, (1, 2))))
        without = pool_map(9, Chain(2, (1,)))
        fakes.use(
            replace(
                without,
                targets=tuple(
                    replace(target, state="down") if target.id == 2 else target for target in without.targets
                ),
            )
        )
        return await cutting

    assert set(asyncio.run(main())) == {1}
