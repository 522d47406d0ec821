"""Partitions of names and inodes, and the cursors of directory listings.

Pure functions, part of the format (golden values in tests/golden/partition.json). The metadata service uses
them for its keys, clients use them to choose the shard of a name. There are 4,096 partitions.

    name hash   56 bits, never 0: keyed BLAKE2b (RFC 7693) of directory u64 big-endian and name, 7 bytes, with
                the pool's name key, so that outsiders cannot create names that collide
    partition   of a name in a striped (wide) directory: the top 12 bits of its hash, so the order of hashes
                is the order of partitions and a listing needs no merging; in any other directory: that of the
                directory's inode number
    of an inode of a directory: the low 12 bits of the hash of its first name (directories spread over the
                pool); of any other inode: the partition of its first name (a file is stored beside its name)
    cursor      63 bits: name hash (56) above the number of entries with that hash already delivered (7 bits);
                127 means all. The smallest cursor is 128, so small numbers stay free for '.' and '..'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from nvpool.core.errors import StaleCursor
from nvpool.core.ids import COUNTER_BITS
from nvpool.core.units import PARTITION_BITS

NAME_KEY_BYTES = 16
HASH_BYTES = 7
HASH_BITS = 8 * HASH_BYTES
EQUAL_BITS = 63 - HASH_BITS
EQUAL_MAX = (1 << EQUAL_BITS) - 1
_ZERO = bytes(HASH_BYTES)
_ONE = b"\0" * (HASH_BYTES - 1) + b"\1"


def name_hasher(name_key: bytes) -> Callable[[int, bytes], bytes]:
    """Return the hash function of a pool: (directory, name) -> name hash, 7 bytes, big-endian."""
    if len(name_key) != NAME_KEY_BYTES:
        raise ValueError(f"a name key has {NAME_KEY_BYTES} bytes, not {len(name_key)}")
    keyed = hashlib.blake2b(key=name_key, digest_size=HASH_BYTES).copy

    def name_hash(directory: int, name: bytes) -> bytes:
        state = keyed()
        state.update(directory.to_bytes(8, "big") + name)
        digest = state.digest()
        return digest if digest != _ZERO else _ONE

    return name_hash


def partition_of_name(directory: int, wide: bool, name_hash: bytes) -> int:
    if wide:
        return (name_hash[0] << 8 | name_hash[1]) >> 16 - PARTITION_BITS
    return directory >> COUNTER_BITS


def partition_of_directory(name_hash: bytes) -> int:
    """Return the partition of the inode of a new directory whose name has this hash."""
    return (name_hash[5] << 8 | name_hash[6]) & (1 << PARTITION_BITS) - 1


def cursor_behind(name_hash: bytes, equal: int) -> int:
    """Return the cursor after the `equal`-th (from 1) entry with this hash."""
    return int.from_bytes(name_hash, "big") << EQUAL_BITS | min(equal, EQUAL_MAX)


def cursor_at(name_hash: int) -> int:
    """Return the cursor before all entries with this hash, as a number above 0."""
    return cursor_behind((name_hash - 1).to_bytes(HASH_BYTES, "big"), EQUAL_MAX)


def cursor_parts(cursor: int) -> tuple[bytes, int]:
    """Split a cursor into (hash to continue at, number of entries with that hash to skip).

    Cursor 0 starts a listing. StaleCursor: the number is no cursor.
    """
    if cursor == 0:
        return _ZERO, 0
    if not EQUAL_MAX < cursor < 1 << 63:
        raise StaleCursor(f"{cursor} is not a place in a listing")
    number, equal = cursor >> EQUAL_BITS, cursor & EQUAL_MAX
    if equal == EQUAL_MAX:
        number, equal = number + 1, 0
    if number >> HASH_BITS:
        return b"\xff" * HASH_BYTES, EQUAL_MAX
    return number.to_bytes(HASH_BYTES, "big"), equal
