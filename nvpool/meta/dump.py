"""Dump and load: all metadata of a shard as JSON lines, and back.

Dumps serve for backup, for migration to another format, and for people with grep. The first line is
{"nvpool_dump": 1, "shard": …}. Each further line is a record with "type": inode, dentry, xattr, orphan,
collect, intent, identity, bounds, counts, damaged, part, volume, use, attached, trash; or raw, with key and
value in hex, for a record that cannot be read. Numbers are integers, times ns since 1970. Bytes (names,
targets, values) are text if they are UTF-8, else the field ends in _hex. Lines come in the order of keys.

Sessions, slots and locks are left out: they belong to clients, which start again after a load. Records of
cross-shard transactions are left out too: if `meta/snapshot_barrier` took the snapshots, no transaction is
half done in them. The identity contains the pool's name key, without which nobody can make names that
collide: keep dumps as private as the pool.

A dump shows one point in time (a snapshot of the engine; for all shards together see
`meta/snapshot_barrier`), read in steps while the shard serves. A load needs an empty shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from nvpool.core.errors import CorruptRecord, InvalidRequest, WrongFormat
from nvpool.kv.api import KEY_BYTES_MAX
from nvpool.meta.operations.trash import inode_of_trash_key, trash_key
from nvpool.meta.state import records
from nvpool.meta.state.records import HASH_AT, NAME_AT
from nvpool.meta.state.striped_dirs import StripeCounts, decode_part, encode_part, part_of
from nvpool.meta.state.transaction import View
from nvpool.meta.state.volume_records import (
    ATTACHED,
    KEY_BYTES,
    TRASH,
    USE,
    VOLUME,
    Trashed,
    VolumeRecord,
    VolumeUse,
    decode_attached,
    decode_trashed,
    decode_use,
    decode_volume,
    encode_attached,
    encode_trashed,
    encode_use,
    encode_volume,
    kind_of_volume_key,
    volume_key,
    volume_of_key,
)

DUMP_FORMAT = 1
LEFT_OUT = frozenset((records.SESSION, records.SLOT, records.LOCK, records.HELD, records.DECIDED))
STEP_LIMIT, STEP_LIMIT_MAX = 1000, 10_000
STEP_BYTES = 4 << 20
"""Size at which a step ends: attributes may have 64 KiB each, a payload 32 MiB."""
_PAIRS = 100

_INODE_FIELDS = tuple(f for f in records.INODE_FIELDS if f not in ("number", "target", "reserved"))
_PART_FIELDS = ("mode", "uid", "gid", "table", "chunk_bits", "flags")


def _text(line: dict, name: str, value: bytes) -> None:
    try:
        line[name] = value.decode()
    except UnicodeDecodeError:
        line[name + "_hex"] = value.hex()


def _bytes(line: dict, name: str) -> bytes:
    if name + "_hex" in line:
        return bytes.fromhex(line[name + "_hex"])
    return line[name].encode()


def _inode_line(key: bytes, raw: bytes) -> dict:
    inode = records.decode_inode(records.inode_of_key(key), raw)
    line: dict[str, Any] = {"type": "inode", "inode": inode.number}
    line.update((field, getattr(inode, field)) for field in _INODE_FIELDS)
    if inode.target:
        _text(line, "target", inode.target)
    return line


def _inode_record(line: dict) -> tuple[bytes, bytes]:
    line = {"punches": 0, "volume": 0, "birth_ns": 0, **line}
    target = _bytes(line, "target") if "target" in line or "target_hex" in line else b""
    inode = records.Inode(line["inode"], target=target, **{field: line[field] for field in _INODE_FIELDS})
    return records.inode_key(inode.number), records.encode_inode(inode)


def _dentry_line(key: bytes, raw: bytes) -> dict:
    partition = records.partition_of_key(key)
    number, kind = records.decode_dentry(partition, raw)
    line = {
        "type": "dentry",
        "directory": records.directory_of_key(key),
        "inode": number,
        "kind": kind,
        "partition": partition,
        "hash": key[HASH_AT:NAME_AT].hex(),
    }
    _text(line, "name", key[NAME_AT:])
    return line


def _dentry_record(line: dict) -> tuple[bytes, bytes]:
    key = records.dentry_key(
        line["partition"], line["directory"], bytes.fromhex(line["hash"]), _bytes(line, "name")
    )
    return key, records.encode_dentry(line["partition"], line["inode"], line["kind"])


def _xattr_line(key: bytes, raw: bytes) -> dict:
    line = {"type": "xattr", "inode": records.inode_of_key(key)}
    _text(line, "name", key[9:])
    _text(line, "value", records.decode_xattr(raw))
    return line


def _xattr_record(line: dict) -> tuple[bytes, bytes]:
    return records.xattr_key(line["inode"], _bytes(line, "name")), records.XATTR_HEAD + _bytes(line, "value")


def _orphan_line(key: bytes, raw: bytes) -> dict:
    records.decode_orphan(raw)
    line: dict[str, Any] = {"type": "orphan", "inode": records.inode_of_key(key)}
    if raw == records.ORPHAN_COUNTED:
        line["counted"] = True
    return line


def _orphan_record(line: dict) -> tuple[bytes, bytes]:
    return (
        records.numbered_key(records.ORPHAN, line["inode"]),
        records.ORPHAN_COUNTED if line.get("counted") else records.ORPHAN_VALUE,
    )


def _collect_line(key: bytes, raw: bytes) -> dict:
    return {"type": "collect", "inode": records.inode_of_key(key), **records.decode_collect(raw)._asdict()}


def _collect_record(line: dict) -> tuple[bytes, bytes]:
    return (
        records.numbered_key(records.COLLECT, line["inode"]),
        records.encode_collect(records.Collect(line["table"], line["chunk_bits"])),
    )


def _intent_line(key: bytes, raw: bytes) -> dict:
    return {"type": "intent", "inode": records.inode_of_key(key), **records.decode_intent(raw)._asdict()}


def _intent_record(line: dict) -> tuple[bytes, bytes]:
    intent = records.Intent(line["cut"], line["size"], line["table"], line["chunk_bits"], line.get("end", 0))
    return records.numbered_key(records.INTENT, line["inode"]), records.encode_intent(intent)


def _part_line(key: bytes, raw: bytes) -> dict:
    part = decode_part(key, raw)
    return {
        "type": "part",
        "inode": part.number,
        "shard": part.shard,
        **part.counts._asdict(),
        **{field: getattr(part, field) for field in _PART_FIELDS},
    }


def _part_record(line: dict) -> tuple[bytes, bytes]:
    part = part_of(
        line["inode"],
        line["shard"],
        StripeCounts(*(line[field] for field in StripeCounts._fields)),
        **{field: line[field] for field in _PART_FIELDS},
    )
    return records.part_key(part.number, part.shard), encode_part(part)


def _other_line(key: bytes, raw: bytes) -> dict:
    kind, number = kind_of_volume_key(key), volume_of_key(key)
    line: dict[str, Any]
    if kind == VOLUME:
        volume = decode_volume(raw)
        line = {"type": "volume", "inode": number, **volume._asdict()}
        line["wrapped_key"] = volume.wrapped_key.hex()
        return line
    if kind == USE:
        use = decode_use(raw)
        return {"type": "use", "inode": number, "bytes": use.bytes, "files": use.files}
    if kind == TRASH:
        entry = decode_trashed(raw)
        line = {
            "type": "trash",
            "volume": number,
            "inode": inode_of_trash_key(key),
            "removed_ns": entry.removed_ns,
            "expires_ns": entry.expires_ns,
            "directory": entry.directory,
        }
        _text(line, "name", entry.name)
        return line
    line = {"type": "attached", "inode": number, "since_ns": decode_attached(raw)}
    _text(line, "holder", key[KEY_BYTES:])
    return line


def _volume_record(line: dict) -> tuple[bytes, bytes]:
    fields = {field: line[field] for field in VolumeRecord._fields if field != "wrapped_key"}
    fields["wrapped_key"] = bytes.fromhex(line.get("wrapped_key", ""))  # an older dump has none
    fields["grants"] = tuple((member, bool(write)) for member, write in fields["grants"])
    return volume_key(VOLUME, line["inode"]), encode_volume(VolumeRecord(**fields))


def _use_record(line: dict) -> tuple[bytes, bytes]:
    return volume_key(USE, line["inode"]), encode_use(VolumeUse(line["bytes"], line["files"]))


def _trash_record(line: dict) -> tuple[bytes, bytes]:
    entry = Trashed(line["removed_ns"], line["expires_ns"], line["directory"], _bytes(line, "name"))
    return trash_key(line["volume"], line["inode"]), encode_trashed(entry)


def _attached_record(line: dict) -> tuple[bytes, bytes]:
    return volume_key(ATTACHED, line["inode"], _bytes(line, "holder")), encode_attached(line["since_ns"])


def _identity_line(key: bytes, raw: bytes) -> dict:
    identity = records.decode_identity(raw)
    return {"type": "identity", "shard": identity.shard, "name_key": identity.name_key.hex()}


def _identity_record(line: dict) -> tuple[bytes, bytes]:
    identity = records.ShardIdentity(line["shard"], bytes.fromhex(line["name_key"]), True)
    return records.IDENTITY_KEY, records.encode_identity(identity)


def _bounds_line(key: bytes, raw: bytes) -> dict:
    return {"type": "bounds", **records.decode_bounds(raw)._asdict()}


def _bounds_record(line: dict) -> tuple[bytes, bytes]:
    return records.BOUNDS_KEY, records.encode_bounds(records.IssuedNumbers(line["inode"], line["session"]))


def _counts_line(key: bytes, raw: bytes) -> dict:
    return {"type": "counts", "inodes": records.decode_counts(raw)}


def _counts_record(line: dict) -> tuple[bytes, bytes]:
    return records.COUNTS_KEY, records.encode_counts(line["inodes"])


def _damaged_line(key: bytes, raw: bytes) -> dict:
    return {"type": "damaged", "key": key[2:].hex(), "value": raw.hex()}


def _damaged_record(line: dict) -> tuple[bytes, bytes]:
    return records.damaged_key(bytes.fromhex(line["key"])), bytes.fromhex(line["value"])


def _raw_record(line: dict) -> tuple[bytes, bytes]:
    return bytes.fromhex(line["key"]), bytes.fromhex(line["value"])


_LINES: dict[int, Callable[[bytes, bytes], dict]] = {
    records.INODE: _inode_line,
    records.DENTRY: _dentry_line,
    records.XATTR: _xattr_line,
    records.ORPHAN: _orphan_line,
    records.COLLECT: _collect_line,
    records.INTENT: _intent_line,
    records.IDENTITY: _identity_line,
    records.PART: _part_line,
    records.OTHER: _other_line,
    records.BOUNDS: _bounds_line,
    records.COUNTS: _counts_line,
    records.DAMAGED: _damaged_line,
}
_RECORDS: dict[str, Callable[[dict], tuple[bytes, bytes]]] = {
    "inode": _inode_record,
    "dentry": _dentry_record,
    "xattr": _xattr_record,
    "orphan": _orphan_record,
    "collect": _collect_record,
    "intent": _intent_record,
    "part": _part_record,
    "volume": _volume_record,
    "use": _use_record,
    "attached": _attached_record,
    "trash": _trash_record,
    "identity": _identity_record,
    "bounds": _bounds_record,
    "counts": _counts_record,
    "damaged": _damaged_record,
    "raw": _raw_record,
}


def line_of(key: bytes, raw: bytes) -> dict:
    """JSON line of a record.

    Its type is raw if the record cannot be read, or would not be restored exactly.
    """
    describe = _LINES.get(records.kind_of(key)) if len(key) > 1 else None
    try:
        if describe is not None:
            line = describe(key, raw)
            if record_of(line) == (key, raw) or line["type"] == "identity":
                return line
    except CorruptRecord:
        pass
    return {"type": "raw", "key": key.hex(), "value": raw.hex()}


def record_of(line: dict) -> tuple[bytes, bytes]:
    """Key and value of a line. InvalidRequest: the line is invalid."""
    try:
        key, raw = _RECORDS[line["type"]](line)
    except Exception as error:
        # Any failure on a hand-made line (a missing field, a number out of range) is reported to its author.
        raise InvalidRequest(
            f"a line of the dump cannot be read ({type(error).__name__}: {error}): {line!r:.200}"
        ) from None
    if not 1 < len(key) <= KEY_BYTES_MAX:
        raise InvalidRequest(f"a line of the dump gives a key of {len(key)} bytes")
    return key, raw


class Dump:
    """A dump in progress."""

    def __init__(self, view: View, shard: int) -> None:
        self._snapshot = view.snapshot()
        self._head: dict | None = {
            "nvpool_dump": DUMP_FORMAT,
            "shard": shard,
            "sequence": self._snapshot.sequence,
        }
        self.done = False

    def step(self, limit: int) -> tuple[bytes, int]:
        """(lines, number of records in them), for about `limit` records."""
        encode = msgspec.json.encode
        lines = []
        if self._head is not None:
            lines.append(encode(self._head))
            self._head = None
        count = size = 0
        limit = min(limit or STEP_LIMIT, STEP_LIMIT_MAX)
        while count < limit and size < STEP_BYTES and not self._snapshot.done:
            for key, raw in self._snapshot.step(min(_PAIRS, limit - count)):
                if records.kind_of(key) not in LEFT_OUT:
                    lines.append(encode(line_of(key, raw)))
                    count += 1
                    size += len(lines[-1])
        self.done = self._snapshot.done
        return b"".join(line + b"\n" for line in lines), count

    def close(self) -> None:
        self._snapshot.close()


def parse(payload: bytes, first: bool) -> Iterator[tuple[bytes, bytes]]:
    """Records of complete lines.

    With `first` a head line must come first. WrongFormat: it has another format.
    """
    for text in bytes(payload).splitlines():
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=dict)
        except msgspec.DecodeError as error:
            raise InvalidRequest(
                f"a line of the dump is not a JSON object: {error}: {text[:200]!r}"
            ) from None
        if first or "nvpool_dump" in line:  # a head line for each dumped shard of the pool
            if line.get("nvpool_dump") != DUMP_FORMAT:
                raise WrongFormat(f"a dump begins with nvpool_dump {DUMP_FORMAT}, not with {text[:100]!r}")
            first = False
            continue
        yield record_of(line)
