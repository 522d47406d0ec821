"""Superblock: the first block of a data file or raw device, with its owner and format.

Little-endian, 4,096 bytes:

    magic 8 = "NVPOOL\\0\\1" · format u32 = 1 · block bytes u32 = 4096 · target u64 · capacity in blocks u64
    · store 16 (random; the index has the same) · created u64 (ns since 1970) · pool id, u16 length and UTF-8
    · zeros · CRC32C u32 of all bytes before it, at 4092

Blocks 1 to 15 are reserved and zero. The user is `store/chunks/api`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nvpool.core.checksum import crc32c
from nvpool.core.errors import CorruptRecord, InvalidRequest, WrongFormat
from nvpool.core.units import BLOCK_BYTES

MAGIC = b"NVPOOL\0\1"
FORMAT = 1
_FIXED = struct.Struct("<8sIIQQ16sQH")


class Superblock(NamedTuple):
    target: int
    block_count: int
    store: bytes
    created_ns: int
    pool_id: str


def encode_superblock(superblock: Superblock) -> bytes:
    name = superblock.pool_id.encode()
    if len(name) > 1024:
        raise InvalidRequest("the pool id is longer than 1,024 bytes")
    body = (
        _FIXED.pack(
            MAGIC,
            FORMAT,
            BLOCK_BYTES,
            superblock.target,
            superblock.block_count,
            superblock.store,
            superblock.created_ns,
            len(name),
        )
        + name
    )
    body = body.ljust(BLOCK_BYTES - 4, b"\0")
    return body + crc32c(body).to_bytes(4, "little")


def decode_superblock(raw: bytes, where: str) -> Superblock:
    """Decode a superblock.

    WrongFormat: not a chunk store, or one of another version. CorruptRecord: a damaged superblock.
    """
    magic, version, block_bytes, target, block_count, store, created_ns, name_bytes = _FIXED.unpack_from(raw)
    if magic != MAGIC:
        raise WrongFormat(f"{where} holds no chunk store of nvpool")
    if version != FORMAT or block_bytes != BLOCK_BYTES:
        raise WrongFormat(
            f"{where} has chunk store format {version} with blocks of {block_bytes} bytes, this nvpool knows "
            f"format {FORMAT} with {BLOCK_BYTES}"
        )
    if crc32c(raw[: BLOCK_BYTES - 4]) != int.from_bytes(raw[BLOCK_BYTES - 4 : BLOCK_BYTES], "little"):
        raise CorruptRecord(f"the superblock of {where} does not fit its checksum")
    pool_id = raw[_FIXED.size : _FIXED.size + name_bytes].decode()
    return Superblock(target, block_count, store, created_ns, pool_id)
