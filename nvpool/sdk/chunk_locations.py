"""Layout of a file: its chunks, and the copy of each chunk on each target.

`nvpool file info` and fsck use this module. The functions here only query the daemons and change nothing.
"""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from nvpool.core import grants
from nvpool.core.ids import partition_of, version_parts
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, LAST_BYTE, RECORD, SHARED, WHOLE
from nvpool.core.units import BLOCK_BYTES
from nvpool.poolmap.file_layout import chain_of
from nvpool.rpc.v1 import data_pb2, meta_pb2, wire_pb2
from nvpool.sdk.admin.daemon_calls import AdminCalls

if TYPE_CHECKING:
    from nvpool.client.pool_client import Client
    from nvpool.rpc.messages.meta_messages import Attr

CHUNKS_PER_REQUEST = 1000
KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}
LOCK_KINDS = {RECORD: "fcntl", WHOLE: "flock"}
LOCK_MODES = {SHARED: "shared", EXCLUSIVE: "exclusive"}


async def chunks_on(
    asking: AdminCalls, target: int, inode: int, first: int = 0, grant: bytes = b""
) -> AsyncIterator[data_pb2.ChunkDescription]:
    """Chunks of `inode` on `target`, from chunk `first` on, in order. Clients need a `grant` for the
    inode; nodes do not."""
    more = True
    while more:
        request = data_pb2.DescribeRequest(
            target=target, inode=inode, first=first, limit=CHUNKS_PER_REQUEST, grant=grant
        )
        reply = await asking.target(target, wire_pb2.DATA_DESCRIBE, request, data_pb2.DescribeReply)
        for chunk in reply.chunks:
            yield chunk
        more = reply.more and bool(reply.chunks)
        first = reply.chunks[-1].index + 1 if reply.chunks else 0


async def describe(client: Client, attr: Attr) -> dict[str, Any]:
    """The report of `nvpool file info --json` on one file.

    The report contains attributes, layout, shard and partition, locks, and the chunks with the targets that
    have them. A chunk that is on no target is a hole. Unreachable: a target does not answer.
    """
    asking, pool_map = AdminCalls(client), client.pool_map
    found: dict[str, Any] = {
        "inode": attr.inode,
        "kind": KINDS.get(stat.S_IFMT(attr.mode), "unknown"),
        "mode": stat.filemode(attr.mode),
        "uid": attr.uid,
        "gid": attr.gid,
        "size": attr.size,
        "links": attr.links,
        "mtime_ns": attr.mtime_ns,
        "partition": partition_of(attr.inode),
        "shard": pool_map.shard_of_partition[partition_of(attr.inode)],
        "map_epoch": pool_map.epoch,
    }
    if not stat.S_ISREG(attr.mode):
        return found
    chunk_bytes = 1 << attr.chunk_bits
    found |= {
        "chunk_bytes": chunk_bytes,
        "chain_table": attr.table,
        "cut": attr.cut,
        "chunks_max": -(-attr.size // chunk_bytes),
    }
    table = pool_map.table_by_id[attr.table]
    chunks: dict[int, dict[str, Any]] = {}
    grant = (
        await client.vfs.meta.ask(
            attr.inode,
            wire_pb2.META_GETATTR,
            meta_pb2.GetAttrRequest(inode=attr.inode, rights=grants.READ),
            meta_pb2.Entry,
        )
    ).grant
    for target in sorted({target for chain in table.chains for target in chain.targets}):
        async for one in chunks_on(asking, target, attr.inode, grant=grant):
            chain = chain_of(attr.inode, one.index)
            epoch, counter = version_parts(one.version)
            chunk = chunks.setdefault(
                one.index,
                {
                    "index": one.index,
                    "offset": one.index * chunk_bytes,
                    "chain": chain,
                    "chain_targets": list(table.chains[chain].targets),
                    "copies": [],
                },
            )
            chunk["copies"].append(
                {
                    "target": target,
                    "version": f"{epoch}.{counter}",
                    "allocated_bytes": one.blocks * BLOCK_BYTES,
                    "extents": one.extents,
                    "cut": one.cut,
                    "end": one.end,
                    "misplaced": target not in table.chains[chain].targets,
                }
            )
    found["locks"] = [
        {
            "kind": LOCK_KINDS[lock.kind],
            "mode": LOCK_MODES[lock.mode],
            "first": lock.start,
            "last": lock.end if lock.end < LAST_BYTE else None,
            "client": lock.client,
            "pid": lock.pid,
            "waits": lock.waits,
        }
        for lock in await client.vfs.locks_on(attr.inode)
    ]
    found["chunks"] = [chunks[index] for index in sorted(chunks)]
    found["allocated_bytes"] = sum(
        copy["allocated_bytes"] for chunk in found["chunks"] for copy in chunk["copies"]
    )
    return found
