"""Sums of a check: what one shard alone can not tell to be right, to be laid together with what the others have of it.

Little-endian, one behind the other: inode u64 · names i32 · subdirectories i32 · entries i32 · length of the key u16 · key.
Made by meta/fsck, laid together by sdk/checkup.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from nvpool.base.errors import CorruptFrame

_SUM = struct.Struct("<QiiiH")


class Sum(NamedTuple):
    """Of an inode: how many more names, subdirectories and entries there are than it says. `key` is that of one of its names,
    where that is not beside it."""

    inode: int
    names: int
    subdirs: int
    entries: int
    key: bytes = b""

    def plus(self, other: Sum) -> Sum:
        return Sum(self.inode, self.names + other.names, self.subdirs + other.subdirs, self.entries + other.entries,
                   self.key or other.key)


def pack_sums(sums: Iterable[Sum]) -> bytes:
    return b"".join([_SUM.pack(*one[:4], len(one.key)) + one.key for one in sums])


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
