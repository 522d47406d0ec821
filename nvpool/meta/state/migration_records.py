"""Stored records about partitions that migrate (golden values in tests/golden/moving_records.json).

    0x8010 coming    source u32 BE                  version u8 · term u64 · attempt u64 · number u64 ·
                                                    inodes u64 · whole u8 · partitions u16 each: their
                                                    records here are not ours yet
    0x8011 arrived   source u32 BE · session u64 BE a session that came with them, as a session's value
    0x8012 gone      partition u16 BE               version u8: the records here belong to another shard, and
                                                    are being removed
    0x8013 seen      -                              version u8 · epoch u64 of the newest map by which
                                                    partitions came or went

They are among the shard's own records. Values are little-endian; "source" is the number of the source shard. Used by
`meta/migration` only.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nvpool.core.errors import CorruptRecord
from nvpool.meta.state.records import SHARD

COMING, ARRIVED, GONE, SEEN = range(SHARD + 0x10, SHARD + 0x14)
_VERSION = 1
_PREFIX = struct.Struct(">H")
_SOURCE_KEY = struct.Struct(">HI")
_ARRIVED_KEY = struct.Struct(">HIQ")
_GONE_KEY = struct.Struct(">HH")
_COMING = struct.Struct("<BQQQQ?")
_SEEN = struct.Struct("<BQ")
SEEN_KEY = _PREFIX.pack(SEEN)
GONE_VALUE = bytes((_VERSION,))
GONE_RANGE = _PREFIX.pack(GONE), _PREFIX.pack(GONE + 1)
COMING_RANGE = _PREFIX.pack(COMING), _PREFIX.pack(COMING + 1)


class IncomingMigration(NamedTuple):
    """State of one migration to this shard.

    `number`: last message that is in the records. `inodes`: number of inodes among the received records.
    `whole`: all records have arrived, and only the pool map must still say that the partitions are ours.
    """

    term: int
    attempt: int
    number: int
    inodes: int
    whole: bool
    partitions: tuple[int, ...]


def coming_key(source: int) -> bytes:
    return _SOURCE_KEY.pack(COMING, source)


def source_of_key(key: bytes) -> int:
    if len(key) != _SOURCE_KEY.size:
        raise CorruptRecord(f"the key of a hand-over has {len(key)} bytes")
    return _SOURCE_KEY.unpack(key)[1]


def encode_coming(coming: IncomingMigration) -> bytes:
    return _COMING.pack(
        _VERSION, coming.term, coming.attempt, coming.number, coming.inodes, coming.whole
    ) + struct.pack(f"<{len(coming.partitions)}H", *coming.partitions)


def decode_coming(raw: bytes) -> IncomingMigration:
    if len(raw) < _COMING.size or (len(raw) - _COMING.size) % 2 or raw[0] != _VERSION:
        raise CorruptRecord("the record of a hand-over cannot be read")
    _, term, attempt, number, inodes, whole = _COMING.unpack_from(raw)
    count = (len(raw) - _COMING.size) // 2
    return IncomingMigration(
        term, attempt, number, inodes, whole, struct.unpack_from(f"<{count}H", raw, _COMING.size)
    )


def arrived_key(source: int, session: int) -> bytes:
    return _ARRIVED_KEY.pack(ARRIVED, source, session)


def arrived_range(source: int) -> tuple[bytes, bytes]:
    return _SOURCE_KEY.pack(ARRIVED, source), _SOURCE_KEY.pack(ARRIVED, source + 1)


def arrived_session_of_key(key: bytes) -> int:
    if len(key) != _ARRIVED_KEY.size:
        raise CorruptRecord(f"the key of an arrived session has {len(key)} bytes")
    return _ARRIVED_KEY.unpack(key)[2]


def gone_key(partition: int) -> bytes:
    return _GONE_KEY.pack(GONE, partition)


def partition_of_gone_key(key: bytes) -> int:
    if len(key) != _GONE_KEY.size:
        raise CorruptRecord(f"the key of a gone partition has {len(key)} bytes")
    return _GONE_KEY.unpack(key)[1]


def encode_seen(epoch: int) -> bytes:
    return _SEEN.pack(_VERSION, epoch)


def decode_seen(raw: bytes) -> int:
    if len(raw) != _SEEN.size or raw[0] != _VERSION:
        raise CorruptRecord("the epoch of the last hand-over cannot be read")
    return _SEEN.unpack(raw)[1]
