"""Parts of wide directories whose names are spread over several shards: what a shard keeps of one.

A wide directory is *divided* (its flag says so) from the first name on that another shard than its own changes by itself. Each
shard that does has a part then, the directory's own too: how many entries and subdirectories have come and gone by its changes
(signed: a name may be made by one shard and be removed by another, when its partition has moved), when the last did, and a copy
of what a birth needs of the directory. The directory's own record stays as it is meanwhile. Its attributes are that record and
all parts together: sums, and the latest of the times; so parts need not move with partitions.

Whoever makes a part holds the directory's record for it, and whoever changes that record otherwise (attributes, removal) holds
the parts of all shards and takes them into it, after which it is not divided. So a copy is true as long as its part is there.
Part of the format; the key is told in `records`. Used by `view`, `changes`, `queries` and `fsck`.

    value     version u8 = 1 · flags u16 · mode u16 · uid u32 · gid u32 · table u8 · chunk_bits u8 · entries i64 ·
              subdirectories i64 · mtime ns i64 · ctime ns i64 · change u64
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
"""Of the directory's flags, those that a birth needs."""
LINKS_BASE = 1 << 40
"""Of a part in memory: who looks at the links of a directory only wants to know that it was not removed."""


class Counts(NamedTuple):
    """What changes of names at one shard have done to a directory."""

    entries: int
    subdirectories: int
    mtime_ns: int
    ctime_ns: int
    change: int


class Part(Inode):
    """A directory as changes of names see it at this shard. `size` counts from 0 and may be negative, `links` from LINKS_BASE.
    `whole` is the directory's record where this part is new: it has to be marked with it."""

    __slots__ = ("shard", "whole")

    @property
    def counts(self) -> Counts:
        return Counts(self.size, self.links - LINKS_BASE, self.mtime_ns, self.ctime_ns, self.change)


def new_part(directory: Inode, shard: int) -> Part:
    part = part_of(directory.number, shard, Counts(0, 0, 0, 0, 0), mode=directory.mode, uid=directory.uid, gid=directory.gid,
                   table=directory.table, chunk_bits=directory.chunk_bits, flags=directory.flags & COPIED_FLAGS)
    part.whole = directory
    return part


def part_of(number: int, shard: int, counts: Counts, **copied: int) -> Part:
    part = Part(number, links=LINKS_BASE + counts.subdirectories, size=counts.entries, mtime_ns=counts.mtime_ns,
                ctime_ns=counts.ctime_ns, change=counts.change, **copied)
    part.shard, part.whole = shard, None
    return part


def encode_part(part: Part) -> bytes:
    return _PART.pack(_VERSION, part.flags, part.mode, part.uid, part.gid, part.table, part.chunk_bits, *part.counts)


def decode_part(key: bytes, raw: bytes) -> Part:
    if len(raw) != _PART.size or raw[0] != _VERSION:
        raise CorruptRecord(f"the part {key.hex()} of a directory can not be read")
    number, shard = records.part_of_key(key)
    _, flags, mode, uid, gid, table, chunk_bits, *counts = _PART.unpack(raw)
    return part_of(number, shard, Counts(*counts), mode=mode, uid=uid, gid=gid, table=table, chunk_bits=chunk_bits, flags=flags)


def part_here(key: bytes, raw: bytes, shard: int) -> Part:
    """As `decode_part`, where the part is that shard's; else CorruptRecord."""
    part = decode_part(key, raw)
    if part.shard != shard:
        raise CorruptRecord(f"shard {shard} has a part of directory {part.number} that belongs to shard {part.shard}")
    return part


def take_in(directory: Inode, counts: Counts) -> None:
    """What a part says is in the directory's record from here on. Only all parts together are a size."""
    directory.size += counts.entries
    directory.links += counts.subdirectories
    directory.mtime_ns = max(directory.mtime_ns, counts.mtime_ns)
    directory.ctime_ns = max(directory.ctime_ns, counts.ctime_ns)
    directory.change += counts.change


def effects_of(inode: Inode) -> dict[bytes, bytes]:
    """The records of a changed inode, or part."""
    if not isinstance(inode, Part):
        return {records.inode_key(inode.number): records.encode_inode(inode)}
    made = {records.part_key(inode.number, inode.shard): encode_part(inode)}
    whole = inode.whole
    if whole is not None and not whole.flags & DIVIDED:
        whole.flags |= DIVIDED
        made[records.inode_key(whole.number)] = records.encode_inode(whole)
    return made
