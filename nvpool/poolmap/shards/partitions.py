"""Which of the 4,096 partitions a name and an inode belong to, and the numbers by which directories are listed.

Pure and part of the format (golden values in tests/golden/partition.json). Used by the metadata service for its keys and
by clients to choose the shard that holds a name.

    name hash   56 bits, never 0: keyed BLAKE2b (RFC 7693) of directory u64 big-endian and name, 7 bytes, with the pool's
                name key, so that nobody outside can make names that collide
    partition   of a name in a wide directory: the top 12 bits of its hash, so that the order of hashes is the order of
                partitions and a listing needs no merging; in any other directory: that of the directory's inode number
    of an inode a directory's: the low 12 bits of the hash of its first name (directories spread over the pool); any
                other's: that of its first name (a file lies beside its name)
    cursor      63 bits: name hash (56) above the count of entries with that hash already delivered (7 bits). 127 means
                all of them. The smallest is 128, so small numbers stay free for '.' and '..'.
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
    """A function (directory, name) -> the name's hash as 7 bytes, big-endian, for a pool with this name key."""
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
    """Where the inode of a directory that is born under a name with this hash goes."""
    return (name_hash[5] << 8 | name_hash[6]) & (1 << PARTITION_BITS) - 1


def cursor_behind(name_hash: bytes, equal: int) -> int:
    """The cursor behind the `equal`-th (from 1) entry with this hash."""
    return int.from_bytes(name_hash, "big") << EQUAL_BITS | min(equal, EQUAL_MAX)


def cursor_at(name_hash: int) -> int:
    """The cursor before all entries with this hash, as a number above 0."""
    return cursor_behind((name_hash - 1).to_bytes(HASH_BYTES, "big"), EQUAL_MAX)


def cursor_parts(cursor: int) -> tuple[bytes, int]:
    """(hash to go on at, entries with that hash to leave out). Cursor 0 begins; StaleCursor for what is no cursor."""
    if cursor == 0:
        return _ZERO, 0
    if not EQUAL_MAX < cursor < 1 << 63:
        raise StaleCursor(f"{cursor} is no place in a listing")
    number, equal = cursor >> EQUAL_BITS, cursor & EQUAL_MAX
    if equal == EQUAL_MAX:
        number, equal = number + 1, 0
    if number >> HASH_BITS:
        return b"\xff" * HASH_BYTES, EQUAL_MAX
    return number.to_bytes(HASH_BYTES, "big"), equal
