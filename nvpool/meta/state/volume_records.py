"""Keys and values of volume records: part of the format (golden values in tests/golden/volume_records.json).

A volume is identified by the inode number of its root directory, and all its records lie in the partition of
that number. So a volume migrates, is replicated and is dumped with its partition, and a change of a name and
of the usage are one transaction.

    key       u16 partition and kind OTHER · kind u8 · counter of the root directory, scattered, 7 bytes ·
              of an attachment: its holder
    VOLUME    version u8 = 1 · flags u8 (1 sealed, 2 listed, 4 removing, 8 encrypted) · bytes_max u64 ·
              files_max u64 · trash s u32 · created ns i64 · files at removal u64 · name length u8, name ·
              grants u16, of each: write u8 · length u8, member · with the flag 8: the volume's key, wrapped
              (security/volume_keys)
    USE       version u8 = 1 · bytes u64 · files u64: contents of the volume without the root directory
    ATTACHED  version u8 = 1 · since ns i64
    TRASH     (key: inode u64 BE behind it) version u8 = 1 · removed ns i64 · expires ns i64 · directory u64 ·
              name
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from nvpool.core.errors import CorruptRecord
from nvpool.core.ids import COUNTER_BITS, COUNTER_MASK
from nvpool.core.units import NAME_BYTES_MAX
from nvpool.meta.state.records import END_OF_KEYS, OTHER, inode_of_key, numbered_key, partition_of_key, prefix
from nvpool.security.volume_keys import WRAPPED_BYTES

VOLUME, USE, ATTACHED, TRASH = 1, 2, 3, 4
SEALED, LISTED, REMOVING, ENCRYPTED = 1, 2, 4, 8
GRANTS_MAX, ATTACHMENTS_MAX = 256, 1024
KNOWN_MAX = 4096
"""Size of the caches of computed values, in volumes."""
_VERSION = 1
_HEAD = struct.Struct("<BBQQIqQ")
_USE = struct.Struct("<BQQ")
_ATTACHED = struct.Struct("<Bq")
_TRASHED = struct.Struct("<BqqQ")
_KIND_AT, KEY_BYTES = 2, 10


class VolumeRecord(NamedTuple):
    """Settings and state of a volume. `grants`: members of the pool, and whether they may write."""

    name: str
    bytes_max: int = 0
    files_max: int = 0
    trash_s: int = 0
    created_ns: int = 0
    flags: int = 0
    files_removing: int = 0
    grants: tuple[tuple[str, bool], ...] = ()
    wrapped_key: bytes = b""
    """Wrapped key of an encrypted volume."""

    @property
    def is_restricted(self) -> bool:
        """Whether requests for the volume's contents must be checked."""
        return bool(self.flags & ~ENCRYPTED)


class Trashed(NamedTuple):
    """Trash entry: the name that was removed, and the time until which it is kept."""

    removed_ns: int
    expires_ns: int
    directory: int
    name: bytes


class VolumeUse:
    """Usage of a volume, as counted in one change."""

    __slots__ = ("bytes", "files")

    def __init__(self, byte_count: int = 0, files: int = 0) -> None:
        self.bytes = byte_count
        self.files = files


def volume_key(kind: int, number: int, rest: bytes = b"") -> bytes:
    """Key of a record of the volume with that root directory."""
    plain = numbered_key(OTHER, number)
    return plain[:_KIND_AT] + bytes((kind,)) + plain[_KIND_AT:] + rest


@lru_cache(KNOWN_MAX)
def keys_of(number: int) -> tuple[bytes, bytes]:
    """Keys of the records VOLUME and USE, which each change in a volume reads."""
    return volume_key(VOLUME, number), volume_key(USE, number)


def kind_of_volume_key(key: bytes) -> int:
    """Kind of a volume record by its key. CorruptRecord: no volume record has this key."""
    kind = key[_KIND_AT] if len(key) >= KEY_BYTES else 0
    if (
        kind not in (VOLUME, USE, ATTACHED, TRASH)
        or (kind in (VOLUME, USE) and len(key) != KEY_BYTES)
        or (kind == TRASH and len(key) != KEY_BYTES + 8)
    ):
        raise CorruptRecord(f"no record of a volume has the key {key.hex()}")
    if not volume_of_key(key) & COUNTER_MASK or volume_key(kind, volume_of_key(key), key[KEY_BYTES:]) != key:
        raise CorruptRecord(f"the key {key.hex()} names no volume that can be")
    return kind


def volume_of_key(key: bytes) -> int:
    """Inode number of the volume's root directory."""
    counter = inode_of_key(key[:_KIND_AT] + key[_KIND_AT + 1 : KEY_BYTES]) & COUNTER_MASK
    return partition_of_key(key) << COUNTER_BITS | counter


def range_of(kind: int, partition: int) -> tuple[bytes, bytes]:
    """Key range of this kind for all volumes of the partition."""
    head = prefix(partition, OTHER)
    return head + bytes((kind,)), head + bytes((kind + 1,))


def attached_range(number: int) -> tuple[bytes, bytes]:
    head = volume_key(ATTACHED, number)
    return head, head + END_OF_KEYS


def encode_volume(volume: VolumeRecord) -> bytes:
    name = volume.name.encode()
    parts = [
        _HEAD.pack(
            _VERSION,
            volume.flags,
            volume.bytes_max,
            volume.files_max,
            volume.trash_s,
            volume.created_ns,
            volume.files_removing,
        ),
        bytes((len(name),)),
        name,
        struct.pack("<H", len(volume.grants)),
    ]
    for member, write in volume.grants:
        raw = member.encode()
        parts += [bytes((write, len(raw))), raw]
    parts.append(volume.wrapped_key)
    return b"".join(parts)


@lru_cache(KNOWN_MAX)
def decode_volume(raw: bytes) -> VolumeRecord:
    """Decode a volume record. Cached by its bytes, because each change in a volume needs it."""
    try:
        version, flags, bytes_max, files_max, trash_s, created_ns, files_removing = _HEAD.unpack_from(raw)
        at = _HEAD.size
        name, at = raw[at + 1 : at + 1 + raw[at]], at + 1 + raw[at]
        (count,) = struct.unpack_from("<H", raw, at)
        at += 2
        grants = []
        for _ in range(count):
            write, length = raw[at], raw[at + 1]
            grants.append((raw[at + 2 : at + 2 + length].decode(), bool(write)))
            at += 2 + length
        wrapped_key = b""
        if flags & ENCRYPTED:
            wrapped_key, at = raw[at : at + WRAPPED_BYTES], at + WRAPPED_BYTES
        volume = VolumeRecord(
            name.decode(),
            bytes_max,
            files_max,
            trash_s,
            created_ns,
            flags,
            files_removing,
            tuple(grants),
            wrapped_key,
        )
    except (struct.error, IndexError, UnicodeDecodeError):
        raise CorruptRecord("the record of a volume cannot be read") from None
    if (
        version != _VERSION
        or at != len(raw)
        or flags > SEALED | LISTED | REMOVING | ENCRYPTED
        or encode_volume(volume) != raw
    ):
        raise CorruptRecord("the record of a volume cannot be read")
    return volume


def encode_use(use: VolumeUse) -> bytes:
    return _USE.pack(_VERSION, use.bytes if use.bytes > 0 else 0, use.files if use.files > 0 else 0)


def decode_use(raw: bytes) -> VolumeUse:
    if len(raw) != _USE.size or raw[0] != _VERSION:
        raise CorruptRecord("the use of a volume cannot be read")
    return VolumeUse(*_USE.unpack(raw)[1:])


def encode_attached(since_ns: int) -> bytes:
    return _ATTACHED.pack(_VERSION, since_ns)


def decode_attached(raw: bytes) -> int:
    """Time since which the volume is attached, in ns."""
    if len(raw) != _ATTACHED.size or raw[0] != _VERSION:
        raise CorruptRecord("an attachment of a volume cannot be read")
    return _ATTACHED.unpack(raw)[1]


def encode_trashed(entry: Trashed) -> bytes:
    return _TRASHED.pack(_VERSION, *entry[:3]) + entry.name


def decode_trashed(raw: bytes) -> Trashed:
    if not _TRASHED.size < len(raw) <= _TRASHED.size + NAME_BYTES_MAX or raw[0] != _VERSION:
        raise CorruptRecord("an entry of a volume's trash cannot be read")
    return Trashed(*_TRASHED.unpack_from(raw)[1:], raw[_TRASHED.size :])
