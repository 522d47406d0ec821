"""RDMA in a pool of real processes: used where node.toml enables it, correct while stores are killed, a stream elsewhere."""

import asyncio
import os
import random

import pytest

from nvpool.client.pool_client import Client
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.vfs_types import Caller
from nvpool.core.units import MIB
from nvpool.host.process_identity import host_id
from nvpool.rpc.api import Greeting
from nvpool.rpc.connection_pool import Dialer
from nvpool.rpc.transports import ucx
from nvpool.rpc.transports.rdma import RdmaTransport
from nvpool.testing.env.pool import PLAIN_TCP, RealPool, end_process

pytestmark = pytest.mark.skipif(bool(ucx.missing()), reason=ucx.missing() or "never")
ME = Caller(0, 0)
BLOCK = 4096
COUNT = 512
SHM = "[rdma]\nlocal = true\n"
NETWORK = PLAIN_TCP + '[rdma]\nnetworks = "127.0.0.0/8"\ntransports = "posix,self"\n'
"""Loopback stays on this host, so that shared memory can stand for a network card."""
OFF = SHM + 'enabled = "off"\n'


def connections(client: Client) -> list:
    """Connections to stores over RDMA."""
    return [
        connection
        for connection in client.dialer.by_endpoints.values()
        if getattr(connection, "upgraded", False)
    ]


async def opened(pool: RealPool, config: str) -> Client:
    over_tcp = Dialer(
        Greeting("reader", host_id=host_id()), transports={"stream": RdmaTransport(strict=False)}
    )
    return await Client.open(
        str(pool.path),
        "reader",
        ClientOptions(deadline_s=40.0, short_circuit=False),
        dialer=over_tcp if config == NETWORK else None,
    )


@pytest.mark.parametrize("config", [SHM, NETWORK], ids=["unix", "network"])
def test_rdma_reads_are_right_while_stores_are_killed(config, tmp_path):
    async def load(pool: RealPool) -> None:
        client, draw = await opened(pool, config), random.Random(5)
        try:
            content = draw.randbytes(8 * MIB)
            _, handle = await client.vfs.create(1, b"file", 0o644, os.O_RDWR, ME)
            await client.vfs.write(handle, 0, content)
            await client.vfs.flush(handle)
            into, whole = memoryview(bytearray(COUNT * BLOCK)), memoryview(bytearray(len(content)))
            placed = kills = 0
            for turn in range(30):
                places = [draw.randrange(len(content) // BLOCK) * BLOCK for _ in range(COUNT)]
                reading = asyncio.ensure_future(
                    client.vfs.read_many([(handle, place, BLOCK) for place in places], into)
                )
                if turn in (8, 16, 24):
                    await asyncio.sleep(0.001 * turn / 8)
                    kills += len([end_process(pool.pid(name)) for name in ("target-1", "target-2")])
                assert await reading == [BLOCK] * COUNT
                for number, place in enumerate(places):
                    assert into[number * BLOCK : (number + 1) * BLOCK] == content[place : place + BLOCK]
                placed = max(placed, sum(connection.placed_bytes for connection in connections(client)))
            await client.vfs.read_many([(handle, at, MIB) for at in range(0, len(content), MIB)], whole)
            assert whole == content and kills == 6
            assert placed >= 4 * len(into), "little came by RDMA"
            assert len(connections(client)) == 2, "stores that came again are not reached by RDMA"
        finally:
            await client.close()

    with RealPool(tmp_path / "pool", config=config) as pool:
        pool.make()
        pool.start()
        asyncio.run(asyncio.wait_for(load(pool), 240))
        assert not pool.fsck()


@pytest.mark.smoke
def test_node_with_rdma_off_offers_none(tmp_path):
    async def look(pool: RealPool) -> None:
        client = await opened(pool, OFF)
        try:
            _, handle = await client.vfs.create(1, b"file", 0o644, os.O_RDWR, ME)
            await client.vfs.write(handle, 0, b"x" * MIB)
            await client.vfs.flush(handle)
            into = memoryview(bytearray(MIB))
            await client.vfs.read_many([(handle, 0, MIB)], into)
            assert into == b"x" * MIB and not connections(client)
        finally:
            await client.close()

    with RealPool(tmp_path / "pool", config=OFF) as pool:
        pool.make()
        pool.start()
        asyncio.run(asyncio.wait_for(look(pool), 120))
