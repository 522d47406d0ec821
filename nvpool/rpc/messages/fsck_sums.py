"""Partial sums of fsck: values that one shard cannot verify alone and that all shards' results complete.

Little-endian, one after the other:

    sum    inode u64 · names i32 · subdirectories i32 · entries i32 · parents u64 · key length u16 · key
    copy   directory u64 · shard u16 (0: its own record) · flags u16 · mode u16 · uid u32 · gid u32 ·
           table u8 · chunk_bits u8

Written by meta/fsck/walker, combined by sdk/fsck. The module also encodes arrays of numbers: inodes of
8 bytes, partitions of 2 bytes, or one bit per partition.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from nvpool.core.errors import CorruptFrame
from nvpool.core.units import PARTITION_COUNT

_SUM = struct.Struct("<QiiiQH")
_COPY = struct.Struct("<QHHHIIBB")
MASK = (1 << 64) - 1


class Sum(NamedTuple):
    """Differences of one inode between what was found and what its record says.

    `names`, `subdirs` and `entries`: how many more were found than the record says. `parents`, for a
    directory: the sum of the directories that contain its names, minus the parent that its record states,
    modulo 2**64. `key`: key of one of the inode's names, where that name is not stored beside the inode.
    """

    inode: int
    names: int
    subdirs: int
    entries: int
    parents: int = 0
    key: bytes = b""

    def plus(self, other: Sum) -> Sum:
        return Sum(
            self.inode,
            self.names + other.names,
            self.subdirs + other.subdirs,
            self.entries + other.entries,
            self.parents + other.parents & MASK,
            self.key or other.key,
        )

    @property
    def is_even(self) -> bool:
        return not (self.names or self.subdirs or self.entries or self.parents)


class DirectoryCopy(NamedTuple):
    """Attributes of a striped directory, from its own record (`shard` 0) or a shard's stripe."""

    inode: int
    shard: int
    flags: int
    mode: int
    uid: int
    gid: int
    table: int
    chunk_bits: int


def pack_sums(sums: Iterable[Sum]) -> bytes:
    return b"".join([_SUM.pack(*one[:5], len(one.key)) + one.key for one in sums])


def unpack_sums(raw: bytes) -> list[Sum]:
    """Decode sums. CorruptFrame: the bytes are not complete sums."""
    found, at = [], 0
    try:
        while at < len(raw):
            inode, names, subdirs, entries, parents, length = _SUM.unpack_from(raw, at)
            at += _SUM.size + length
            found.append(Sum(inode, names, subdirs, entries, parents, raw[at - length : at]))
    except struct.error:
        raise CorruptFrame("the sums of a check are cut off") from None
    if at != len(raw):
        raise CorruptFrame("the sums of a check are cut off")
    return found


def pack_copies(copies: Iterable[DirectoryCopy]) -> bytes:
    return b"".join([_COPY.pack(*one) for one in copies])


def unpack_copies(raw: bytes) -> list[DirectoryCopy]:
    """Decode copies. CorruptFrame: the bytes are not complete copies."""
    return [DirectoryCopy(*one) for one in _unpack(_COPY, raw)]


def pack_numbers(numbers: Collection[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(raw: bytes) -> tuple[int, ...]:
    """Decode u64 numbers. CorruptFrame: the length is not a multiple of 8 bytes."""
    return tuple(number for (number,) in _unpack(struct.Struct("<Q"), raw))


def pack_partitions(partitions: Collection[int]) -> bytes:
    return struct.pack(f"<{len(partitions)}H", *partitions)


def unpack_partitions(raw: bytes) -> tuple[int, ...]:
    """Decode u16 partition numbers. CorruptFrame: the length is not a multiple of 2 bytes."""
    return tuple(number for (number,) in _unpack(struct.Struct("<H"), raw))


def pack_bits(partitions: Iterable[int]) -> bytes:
    bits = bytearray(PARTITION_COUNT // 8)
    for partition in partitions:
        bits[partition >> 3] |= 1 << (partition & 7)
    return bytes(bits)


def unpack_bits(raw: bytes) -> list[int]:
    return [place for place in range(8 * len(raw)) if raw[place >> 3] >> (place & 7) & 1]


def _unpack(form: struct.Struct, raw: bytes) -> Iterable[tuple[Any, ...]]:
    if len(raw) % form.size:
        raise CorruptFrame(f"{len(raw)} bytes are no row of {form.size} each")
    return form.iter_unpack(raw)
