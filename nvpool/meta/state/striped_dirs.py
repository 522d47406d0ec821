"""Striped directories: one shard's stripe (part) of a wide directory that is spread over several shards.

The names of a wide directory are spread over all partitions. It becomes *divided* (its flag says so) when a
shard other than its own changes one of its names by itself. From then on each shard that changes names has a
stripe, the directory's own shard too. A stripe counts how many entries and subdirectories were added and
removed by its shard, and holds the time of the last change and a copy of the attributes that the creation of
a file needs. The counts are signed, because one shard may create a name and another may remove it after its
partition has migrated. The directory's own record does not change meanwhile. The attributes of the directory
are its record and all stripes together: the sums, and the latest of the times. So stripes need not migrate
with partitions.

A transaction that creates a stripe locks the directory's record. A transaction that changes this record in
another way (attributes, removal) locks the stripes of all shards and merges them into the record; then the
directory is not divided any more. So a copy is valid as long as its stripe exists. Part of the format; the
key is described in `records`. Used by `transaction`, `meta/operations` and `meta/fsck`.

    value     version u8 = 1 · flags u16 · mode u16 · uid u32 · gid u32 · table u8 · chunk_bits u8 ·
              entries i64 · subdirectories i64 · mtime ns i64 · ctime ns i64 · change u64
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nvpool.core.errors import CorruptRecord
from nvpool.meta.state import records
from nvpool.meta.state.records import DIVIDED, Inode

_VERSION = 1
_PART = struct.Struct("<BHHIIBBqqqqQ")
COPIED_FLAGS = records.WIDE | records.HAS_ACL
"""Flags of the directory that the creation of a file needs."""
LINKS_BASE = 1 << 40
"""Link count of a stripe in memory: readers of the count only check that the directory was not removed."""


class StripeCounts(NamedTuple):
    """Effect of one shard's changes of names on a directory."""

    entries: int
    subdirectories: int
    mtime_ns: int
    ctime_ns: int
    change: int


class StripeView(Inode):
    """A directory as seen by changes of names at this shard.

    `size` counts from 0 and may be negative, `links` counts from LINKS_BASE. `whole` is the directory's
    record if this stripe is new: the record must then be marked as divided together with it.
    """

    __slots__ = ("shard", "whole")

    @property
    def counts(self) -> StripeCounts:
        return StripeCounts(self.size, self.links - LINKS_BASE, self.mtime_ns, self.ctime_ns, self.change)


def new_part(directory: Inode, shard: int) -> StripeView:
    part = part_of(
        directory.number,
        shard,
        StripeCounts(0, 0, 0, 0, 0),
        mode=directory.mode,
        uid=directory.uid,
        gid=directory.gid,
        table=directory.table,
        chunk_bits=directory.chunk_bits,
        flags=directory.flags & COPIED_FLAGS,
    )
    part.whole = directory
    return part


def part_of(number: int, shard: int, counts: StripeCounts, **copied: int) -> StripeView:
    part = StripeView(
        number,
        links=LINKS_BASE + counts.subdirectories,
        size=counts.entries,
        mtime_ns=counts.mtime_ns,
        ctime_ns=counts.ctime_ns,
        change=counts.change,
        **copied,
    )
    part.shard, part.whole = shard, None
    return part


def encode_part(part: StripeView) -> bytes:
    return _PART.pack(
        _VERSION, part.flags, part.mode, part.uid, part.gid, part.table, part.chunk_bits, *part.counts
    )


def decode_part(key: bytes, raw: bytes) -> StripeView:
    if len(raw) != _PART.size or raw[0] != _VERSION:
        raise CorruptRecord(f"the part {key.hex()} of a directory cannot be read")
    number, shard = records.part_of_key(key)
    _, flags, mode, uid, gid, table, chunk_bits, *counts = _PART.unpack(raw)
    return part_of(
        number,
        shard,
        StripeCounts(*counts),
        mode=mode,
        uid=uid,
        gid=gid,
        table=table,
        chunk_bits=chunk_bits,
        flags=flags,
    )


def part_here(key: bytes, raw: bytes, shard: int) -> StripeView:
    """As `decode_part`. CorruptRecord: the stripe is not that shard's."""
    part = decode_part(key, raw)
    if part.shard != shard:
        raise CorruptRecord(
            f"shard {shard} has a part of directory {part.number} that belongs to shard {part.shard}"
        )
    return part


def take_in(directory: Inode, counts: StripeCounts) -> None:
    """Merge a stripe's counts into the directory's record. Only all stripes together give a valid size."""
    directory.size += counts.entries
    directory.links += counts.subdirectories
    directory.mtime_ns = max(directory.mtime_ns, counts.mtime_ns)
    directory.ctime_ns = max(directory.ctime_ns, counts.ctime_ns)
    directory.change += counts.change


def effects_of(inode: Inode) -> dict[bytes, bytes]:
    """Effects that store a changed inode or stripe."""
    if not isinstance(inode, StripeView):
        return {records.inode_key(inode.number): records.encode_inode(inode)}
    made = {records.part_key(inode.number, inode.shard): encode_part(inode)}
    whole = inode.whole
    if whole is not None and not whole.flags & DIVIDED:
        whole.flags |= DIVIDED
        made[records.inode_key(whole.number)] = records.encode_inode(whole)
    return made
