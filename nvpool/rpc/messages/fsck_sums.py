"""Sums of a check: what one shard alone can not tell to be right, to be laid together with what the others have of it.

Little-endian, one behind the other:

    sum    inode u64 · names i32 · subdirectories i32 · entries i32 · parents u64 · length of the key u16 · key
    copy   directory u64 · shard u16 (0: its own record) · flags u16 · mode u16 · uid u32 · gid u32 · table u8 · chunk_bits u8

Made by meta/fsck/walker, laid together by sdk/fsck/check. And numbers in a row: inodes of 8 bytes, partitions of 2, or a bit
for each.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from typing import NamedTuple

from nvpool.core.errors import CorruptFrame
from nvpool.core.units import PARTITION_COUNT

_SUM = struct.Struct("<QiiiQH")
_COPY = struct.Struct("<QHHHIIBB")
MASK = (1 << 64) - 1


class Sum(NamedTuple):
    """Of an inode: how many more names, subdirectories and entries there are than it says. `parents`, of a directory: the
    directories that it has names in, less what it says that its parent is, modulo 2**64. `key` is that of one of its names,
    where that is not beside it."""

    inode: int
    names: int
    subdirs: int
    entries: int
    parents: int = 0
    key: bytes = b""

    def plus(self, other: Sum) -> Sum:
        return Sum(self.inode, self.names + other.names, self.subdirs + other.subdirs, self.entries + other.entries,
                   self.parents + other.parents & MASK, self.key or other.key)

    @property
    def is_even(self) -> bool:
        return not (self.names or self.subdirs or self.entries or self.parents)


class Copy(NamedTuple):
    """Attributes of a wide directory, as its own record has them (`shard` 0) or a shard's part."""

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
    """CorruptFrame for what are none."""
    found, at = [], 0
    try:
        while at < len(raw):
            *numbers, length = _SUM.unpack_from(raw, at)
            at += _SUM.size + length
            found.append(Sum(*numbers, raw[at - length:at]))
    except struct.error:
        raise CorruptFrame("the sums of a check are cut off") from None
    if at != len(raw):
        raise CorruptFrame("the sums of a check are cut off")
    return found


def pack_copies(copies: Iterable[Copy]) -> bytes:
    return b"".join([_COPY.pack(*one) for one in copies])


def unpack_copies(raw: bytes) -> list[Copy]:
    """CorruptFrame for what are none."""
    return [Copy(*one) for one in _unpack(_COPY, raw)]


def pack_numbers(numbers: Collection[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(raw: bytes) -> tuple[int, ...]:
    """CorruptFrame for what are none."""
    return tuple(number for number, in _unpack(struct.Struct("<Q"), raw))


def pack_partitions(partitions: Collection[int]) -> bytes:
    return struct.pack(f"<{len(partitions)}H", *partitions)


def unpack_partitions(raw: bytes) -> tuple[int, ...]:
    """CorruptFrame for what are none."""
    return tuple(number for number, in _unpack(struct.Struct("<H"), raw))


def pack_bits(partitions: Iterable[int]) -> bytes:
    bits = bytearray(PARTITION_COUNT // 8)
    for partition in partitions:
        bits[partition >> 3] |= 1 << (partition & 7)
    return bytes(bits)


def unpack_bits(raw: bytes) -> list[int]:
    return [place for place in range(8 * len(raw)) if raw[place >> 3] >> (place & 7) & 1]


def _unpack(form: struct.Struct, raw: bytes) -> Iterable[tuple]:
    if len(raw) % form.size:
        raise CorruptFrame(f"{len(raw)} bytes are no row of {form.size} each")
    return form.iter_unpack(raw)
