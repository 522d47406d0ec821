"""One directory with very many names: listed completely, each name once, in bounded memory.

An offline loader writes the entries, as records of files that were created in the directory; the service lists them.
"""

import asyncio
import re
import stat
import time
from pathlib import Path

import pytest

from nvpool.core.ids import ROOT_INODE, inode_number, partition_of
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.meta.server.service import MetaService
from nvpool.meta.state import records
from nvpool.poolmap.shards.partitions import name_hasher
from nvpool.rpc.v1 import meta_pb2
from nvpool.testing.fakes.meta_shard import ShardClient

BATCH = 500
FIRST_COUNTER = 1 << 40
"""Far above the numbers that the service issues here."""


def anonymous_mib() -> float:
    """Memory of this process without pages of mapped files, which the kernel can reclaim."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


async def load_names(kv: LmdbKv, directory: int, count: int) -> None:
    identity = records.decode_identity(kv.get(records.IDENTITY_KEY))
    name_hash = name_hasher(identity.name_key)
    partition = partition_of(directory)
    now = time.time_ns()
    for first in range(0, count, BATCH):
        effects = []
        for number in range(first, min(first + BATCH, count)):
            inode = records.Inode(
                inode_number(partition, FIRST_COUNTER + number),
                stat.S_IFREG | 0o644,
                atime_ns=now,
                mtime_ns=now,
                ctime_ns=now,
            )
            name = b"%012d.jpg" % number
            effects.append((records.inode_key(inode.number), records.encode_inode(inode)))
            effects.append(
                (
                    records.dentry_key(partition, directory, name_hash(directory, name), name),
                    records.encode_dentry(partition, inode.number, inode.kind),
                )
            )
        while kv.full:
            await kv.room()
        kv.apply(effects)
    await kv.checkpoint()


async def list_all(path: Path, count: int) -> None:
    kv = await LmdbKv.open(path, LmdbOptions(map_bytes=1 << 30))
    service = MetaService(kv, shard=1, grant_secret=b"s" * 32)
    await service.start()
    client = await ShardClient(service).begin()
    directory = (await client.mkdir(ROOT_INODE, b"many")).inode
    await load_names(kv, directory, count)
    client = await ShardClient(service).begin()  # loading can take longer than the first session's lease
    seen = bytearray(count)
    cursor, found, begun = 0, 0, time.monotonic()
    before = 0.0
    while True:
        request = meta_pb2.ListDirRequest(
            session=client.session, inode=directory, cursor=cursor, limit=1000, attrs=True
        )
        reply = await client.ask("LIST", request)
        for entry in reply.entries:
            number = int(entry.name[:12])
            assert not seen[number], f"{entry.name} came twice"
            seen[number] = 1
        found += len(reply.entries)
        before = before or anonymous_mib()
        if not reply.more:
            break
        cursor = reply.entries[-1].cursor
    grown = anonymous_mib() - before
    print(
        f"{count} names with attributes in {time.monotonic() - begun:.1f} s, memory grew by {grown:.1f} MiB,"
        f" {kv.statistics()['used_bytes'] / count:.0f} bytes of LMDB a file"
    )
    assert found == count and sum(seen) == count
    assert grown < 32
    await service.close(1)
    await kv.close()


def test_large_directory_is_listed_in_bounded_memory(tmp_path):
    asyncio.run(list_all(tmp_path / "kv", 20_000))


@pytest.mark.soak
def test_ten_million_names_are_listed_in_bounded_memory(tmp_path):
    asyncio.run(list_all(tmp_path / "kv", 10_000_000))
