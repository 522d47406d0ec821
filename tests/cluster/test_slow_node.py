"""Two nodes with two copies of everything, one of them behind a slow link: real processes, a delay below IP.

Reads go to the near copy; writes wait for the far one and succeed.
"""

import json
import os
import sys

import pytest

from nvpool.core.units import KIB, MIB
from nvpool.testing.env import etcd as real_etcd
from nvpool.testing.env import namespaces
from nvpool.testing.env.multi_node_pool import NodeMachine, Pool
from nvpool.testing.env.namespaces import Machines

DELAY_S = 0.05
"""Delay in each direction."""
FILE_BYTES, READS, BLOCK = 16 * MIB, 400, 64 * KIB

pytestmark = [
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.skipif(bool(real_etcd.missing()), reason=real_etcd.missing() or ""),
    pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="delays need /dev/net/tun"),
]

PROGRAM = """
import asyncio, json, random, sys, time
import nvpool

def content(seed, size):
    return random.Random(seed).randbytes(size)

async def write(pool, name, seed, size, *_):
    async with await pool.open(name, "wb") as file:
        await file.write(0, content(seed, size))
        await file.fsync()

async def read(pool, name, seed, size, reads, block):
    expected, chance, took = content(seed, size), random.Random(1), []
    async with await pool.open(name) as file:
        for _ in range(reads):
            at = chance.randrange(size // block) * block
            begin = time.perf_counter()
            assert await file.read(at, block) == expected[at:at + block]
            took.append(time.perf_counter() - begin)
    took.sort()
    print(json.dumps({"p50_s": took[reads // 2], "p99_s": took[reads * 99 // 100], **pool.vfs.chunks.hedging.counters}))

async def main(verb, path, name, *numbers):
    async with await nvpool.connect_async(path) as pool:
        await {"write": write, "read": read}[verb](pool, name, *map(int, numbers))

asyncio.run(main(*sys.argv[1:]))
"""


def client_does(client: NodeMachine, verb: str, name: str, *numbers: int) -> str:
    return client.machine.run(
        sys.executable, "-P", "-c", PROGRAM, verb, str(client.path), name, *map(str, numbers)
    ).stdout


def sent_by(node: NodeMachine) -> int:
    """Total bytes sent."""
    (link,) = json.loads(node.machine.run("ip", "-s", "-j", "link", "show", "eth0").stdout)
    return link["stats64"]["tx"]["bytes"]


def test_reads_use_the_near_copy_and_writes_wait():
    switch = Machines(3)
    with switch as hosts:
        pool, client = Pool(hosts[:2], plain=False, drives=2), NodeMachine(hosts[2])
        near, far = pool.nodes
        try:
            pool.join(far, pool.found("--replicas", "2", "--chunk-size", "256KiB"))
            near.nvpool("pool", "rebalance", str(near.path), "--wait")
            pool.client(client)
            client_does(client, "write", "/before", 1, FILE_BYTES)
            switch.delay(2, DELAY_S, DELAY_S)
            before = sent_by(near), sent_by(far)
            seen = json.loads(client_does(client, "read", "/before", 1, FILE_BYTES, READS, BLOCK))
            sent_bytes = [sent_by(node) - sent for node, sent in zip((near, far), before, strict=True)]
            print(
                f"one way {DELAY_S} s: p50 {seen['p50_s']:.4f} s, p99 {seen['p99_s']:.4f} s, {seen['hedged']} reads hedged; "
                f"near {sent_bytes[0] / MIB:.1f} MiB, far {sent_bytes[1] / MIB:.1f} MiB of {READS * BLOCK / MIB:.1f} MiB"
            )
            assert seen["hedged"], "no read was sent to both nodes"
            assert sent_bytes[1] < READS * BLOCK / 4, "too many reads go to the slow node"
            client_does(client, "write", "/meanwhile", 2, FILE_BYTES)
            assert near.until_all_serve()["problems"] == []
            switch.delay(2, 0, 0)
            for name, seed in (("/before", 1), ("/meanwhile", 2)):
                client_does(client, "read", name, seed, FILE_BYTES, FILE_BYTES // BLOCK, BLOCK)
            found = near.nvpool("fsck", str(near.path), check=False)
            assert found.returncode == 0, found.stdout + found.stderr
        finally:
            for node in (*pool.nodes, client):
                node.kill_all()
