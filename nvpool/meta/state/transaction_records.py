"""Stored records of cross-shard transactions: locks of the participants, decisions of the coordinator.

Part of the format (golden values in tests/golden). Keys begin like all of a shard's own records
(`meta/state/records`).

    held      key    kind u16 · coordinator u16 · incarnation u64 · number u64
              value  version u8 = 1 · order u64 · then each locked key: length u16, key
    decided   key    kind u16 · coordinator u16 · incarnation u64 · number u64
              value  version u8 = 1 · turn u8 · then each shard to be notified, in order: shard u16 ·
                     number of effects u32, each: length of the key u16 · key · length of the value u32 (all
                     bits set: deleted) · value
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nvpool.core.errors import CorruptRecord
from nvpool.kv.api import Effect
from nvpool.meta.state.records import DECIDED, HELD, TURN

_VERSION = 1
_KEY = struct.Struct(">HHQQ")
_HELD = struct.Struct("<BQ")
_DECIDED = struct.Struct("<BB")
_SHARD = struct.Struct("<HI")
_LENGTH = struct.Struct("<H")
_VALUE = struct.Struct("<I")
_DELETED = (1 << 32) - 1
TURN_KEY = TURN.to_bytes(2, "big")
"""Lock at the root's shard for a transaction that gives a directory another parent. No record has this
key."""
NO_TURN, TURN_LAST, TURN_HERE = range(3)
"""Shard that has the turn of a decided transaction: none, the shard that is notified last, or the
coordinator."""


class TransactionId(NamedTuple):
    """Identifier of a cross-shard transaction; never reused."""

    shard: int
    incarnation: int
    number: int


class Decision(NamedTuple):
    """A committed transaction's effects at other shards: by shard, in the order of notification."""

    turn: int
    effects: dict[int, list[Effect]]


def partition_of_held(key: bytes) -> int:
    """Partition with which the locked record migrates.

    The turn has no partition: it moves with the root's.
    """
    return 0 if key == TURN_KEY else (key[0] << 8 | key[1]) >> 3


def held_key(span: TransactionId) -> bytes:
    return _KEY.pack(HELD, *span)


def decided_key(span: TransactionId) -> bytes:
    return _KEY.pack(DECIDED, *span)


def id_of_key(key: bytes) -> TransactionId:
    if len(key) != _KEY.size:
        raise CorruptRecord(f"the key of a change over several shards has {len(key)} bytes")
    return TransactionId(*_KEY.unpack(key)[1:])


def range_of(kind: int) -> tuple[bytes, bytes]:
    return kind.to_bytes(2, "big"), (kind + 1).to_bytes(2, "big")


def encode_held(order: int, keys: list[bytes]) -> bytes:
    return _HELD.pack(_VERSION, order) + b"".join(_LENGTH.pack(len(key)) + key for key in keys)


def decode_held(raw: bytes) -> tuple[int, list[bytes]]:
    """(order, keys)."""
    try:
        version, order = _HELD.unpack_from(raw)
        at, keys = _HELD.size, []
        while at < len(raw):
            (length,) = _LENGTH.unpack_from(raw, at)
            at += _LENGTH.size + length
            keys.append(raw[at - length : at])
    except struct.error:
        raise CorruptRecord("a hold cannot be read") from None
    if version != _VERSION or at != len(raw):
        raise CorruptRecord("a hold cannot be read")
    return order, keys


def encode_decision(decision: Decision) -> bytes:
    parts = [_DECIDED.pack(_VERSION, decision.turn)]
    for shard, effects in decision.effects.items():
        parts.append(_SHARD.pack(shard, len(effects)))
        for key, value in effects:
            parts += (
                _LENGTH.pack(len(key)),
                key,
                _VALUE.pack(_DELETED if value is None else len(value)),
                value or b"",
            )
    return b"".join(parts)


def decode_decision(raw: bytes) -> Decision:
    try:
        version, turn = _DECIDED.unpack_from(raw)
        at, by_shard = _DECIDED.size, {}
        while at < len(raw):
            shard, count = _SHARD.unpack_from(raw, at)
            at += _SHARD.size
            effects = by_shard[shard] = []
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(raw, at)
                at += _LENGTH.size + length
                key = raw[at - length : at]
                (size,) = _VALUE.unpack_from(raw, at)
                at += _VALUE.size
                value = None if size == _DELETED else raw[at : at + size]
                at += len(value or b"")
                if value is not None and len(value) != size:
                    raise struct.error
                effects.append((key, value))
    except struct.error:
        raise CorruptRecord("a decision over several shards cannot be read") from None
    if version != _VERSION or turn > TURN_HERE or at != len(raw):
        raise CorruptRecord("a decision over several shards cannot be read")
    return Decision(turn, by_shard)
