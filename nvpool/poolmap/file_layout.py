"""File layout: division of a file into chunks, and the chain of each chunk.

An inode keeps the chain table and chunk size of its creation. Chunk `i` of inode `n` belongs to chain
`chunk_hash(n, i) % 1024` of its table. Only the members of chains ever change, so locating a chunk needs no
look-up besides the pool map. The hash is part of the format (golden values in tests/golden/chunk_hash.json).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from nvpool.core.errors import FileTooLarge, InvalidRequest
from nvpool.core.primitives import chunk_hash
from nvpool.core.units import (
    CHAINS_PER_TABLE,
    CHUNK_BYTES_DEFAULT,
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    FILE_BYTES_MAX,
    format_bytes,
)

__all__ = [
    "Layout",
    "Piece",
    "chain_of",
    "check_range",
    "chunk_hash",
    "layout_of",
    "pack_layout",
    "pieces",
    "size_max",
]


class Layout(NamedTuple):
    """Layout stored in the inode: chain table (u8; its replica count), log2 of the chunk size (u8)."""

    table: int = 1
    chunk_bits: int = CHUNK_BYTES_DEFAULT.bit_length() - 1

    @property
    def chunk_bytes(self) -> int:
        return 1 << self.chunk_bits


class Piece(NamedTuple):
    """Part of a byte range within one chunk. `at` is its offset in the range; all numbers are in bytes."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    offset: int
    length: int
    at: int


_LAYOUT = struct.Struct("<BB")


def pack_layout(layout: Layout) -> bytes:
    return _LAYOUT.pack(*layout)


def layout_of(chunk_bytes: int, table: int = 1) -> Layout:
    """Return a layout; InvalidRequest if `chunk_bytes` is not a power of two between 64 KiB and 16 MiB."""
    if chunk_bytes & (chunk_bytes - 1) or not CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX:
        raise InvalidRequest(
            f"a chunk size is a power of two from 64 KiB to 16 MiB, not "
            f"{chunk_bytes:,} bytes ({format_bytes(chunk_bytes)})"
        )
    return Layout(table, chunk_bytes.bit_length() - 1)


def chain_of(inode: int, index: int) -> int:
    return chunk_hash(inode, index) % CHAINS_PER_TABLE


def pieces(layout: Layout, offset: int, length: int) -> Iterator[Piece]:
    """Divide the range [offset, offset + length) of a file at the borders of chunks, in order."""
    bits = layout.chunk_bits
    mask = (1 << bits) - 1
    at = 0
    while at < length:
        place = offset + at
        within = place & mask
        part = min(length - at, mask + 1 - within)
        yield Piece(place >> bits, within, part, at)
        at += part


def size_max(layout: Layout) -> int:
    return min(FILE_BYTES_MAX, 1 << 32 + layout.chunk_bits)


def check_range(layout: Layout, offset: int, length: int) -> None:
    """Verify a byte range.

    InvalidRequest: a number is negative.
    FileTooLarge: the range ends beyond the largest file.
    """
    if offset < 0 or length < 0:
        raise InvalidRequest(f"offset {offset} and length {length} must not be negative")
    if offset + length > size_max(layout):
        raise FileTooLarge(f"the file would end at byte {offset + length}, the largest is {size_max(layout)}")
