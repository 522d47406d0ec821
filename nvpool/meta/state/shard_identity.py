"""Identity of a shard, and the first records of an empty one. Used by `meta/server/service`."""

from __future__ import annotations

import hashlib
import stat

from nvpool.core.errors import WrongFormat
from nvpool.core.ids import ROOT_INODE, partition_of
from nvpool.kv.api import Effect, Kv
from nvpool.meta.state import records
from nvpool.poolmap.file_layout import Layout, layout_of
from nvpool.poolmap.model import PoolMap
from nvpool.poolmap.shards.partitions import NAME_KEY_BYTES


def take_identity(
    kv: Kv, shard: int, secret: bytes, pool_map: PoolMap | None, now_ns: int
) -> records.ShardIdentity:
    """Read the identity from the records.

    An empty shard gets an identity, and the root directory if it owns the root's partition. WrongFormat: the
    records belong to another shard.
    """
    raw = kv.get(records.IDENTITY_KEY)
    if raw is not None:
        identity = records.decode_identity(raw)
        if identity.shard != shard:
            raise WrongFormat(f"these are the records of shard {identity.shard}, not of shard {shard}")
        return identity
    # Stored, and used from here on: a new grant secret must not change the places of names.
    identity = records.ShardIdentity(
        shard, hashlib.blake2b(secret, digest_size=NAME_KEY_BYTES, person=b"nvpool names").digest()
    )
    settings = pool_map.settings if pool_map is not None else None
    layout = layout_of(settings.chunk_bytes, settings.replicas) if settings is not None else Layout()
    root = records.Inode(
        ROOT_INODE,
        stat.S_IFDIR | 0o755,
        2,
        atime_ns=now_ns,
        mtime_ns=now_ns,
        ctime_ns=now_ns,
        table=layout.table,
        chunk_bits=layout.chunk_bits,
        parent=ROOT_INODE,
    )
    effects: list[Effect] = [(records.IDENTITY_KEY, records.encode_identity(identity))]
    if has_root(shard, pool_map):
        effects += [
            (records.inode_key(ROOT_INODE), records.encode_inode(root)),
            (records.COUNTS_KEY, records.encode_counts(1)),
        ]
    kv.apply(effects)
    return identity


def has_root(shard: int, pool_map: PoolMap | None) -> bool:
    """Whether this shard owns the root directory of the pool."""
    return (
        pool_map is None
        or not pool_map.partitions
        or pool_map.shard_of_partition[partition_of(ROOT_INODE)] == shard
    )
