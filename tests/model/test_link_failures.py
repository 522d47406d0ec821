"""A broken link between two nodes that both reach the leader: writes to the chains that cross it resume within a bound."""

from __future__ import annotations

import asyncio
import os

import pytest

from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.ids import ROOT_INODE
from nvpool.core.units import KIB
from nvpool.testing.sim.pool import SimPool
from nvpool.testing.sim.scenario import few_chains
from nvpool.testing.sim.virtual_time_loop import VirtualLoop

ME = Caller(1000, 1000)
OPTIONS = ClientOptions(deadline_s=30.0, transport="stream", short_circuit=False, fresh_s=0.0, attr_s=0.0)
CUT_S, WRITE_S = 45.0, 15.0


async def longest_write_s(loop, client, seconds: float) -> float:
    until_s, longest, number = loop.time() + seconds, 0.0, 0
    while loop.time() < until_s:
        began_s, number = loop.time(), number + 1
        _, handle = await client.vfs.create(
            ROOT_INODE, b"file-%d-%d" % (int(1000 * seconds), number), 0o644, os.O_RDWR, ME
        )
        await client.vfs.write(handle, 0, bytes(64 * KIB))
        await client.vfs.fsync(handle, False)
        await client.vfs.release(handle)
        longest = max(longest, loop.time() - began_s)
        await asyncio.sleep(0.1)
    return longest


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "ways", [((2, 3),), ((3, 2),), ((2, 3), (3, 2))], ids=["to the third", "to the second", "both"]
)
@pytest.mark.parametrize("etcd", [False, True], ids=["one manager", "etcd"])
def test_writes_continue_while_two_nodes_are_cut_apart(ways, etcd):
    async def run():
        async with SimPool(
            loop,
            "links",
            targets=3,
            replicas=2,
            options=OPTIONS,
            standbys=0,
            shards=1,
            etcd=etcd,
            durability="interval",
        ) as pool:
            client = await pool.client("client-1")
            await longest_write_s(loop, client, 2.0)
            for sender, receiver in ways:
                pool.network.lose(f"node-{sender}", f"node-{receiver}")
            assert await longest_write_s(loop, client, CUT_S) < WRITE_S
            pool.network.heal()
            for _ in range(120):
                if pool.is_whole():
                    break
                await asyncio.sleep(0.5)
            assert pool.is_whole()
            assert not pool.replica_problems()
            return pool.failures + pool.invariants.problems

    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    with few_chains():
        try:
            assert not loop.run_until_complete(run())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
