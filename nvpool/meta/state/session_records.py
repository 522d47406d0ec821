"""Stored records of sessions and slots: a session's owner, and each slot's last change with its answer.

They are read by a restarted shard, by a standby, and by another shard to which partitions migrate. Fields
that were added later stand at places where older software accepts and ignores them, so members of a shard may
run different versions: the owner of a session is appended to the name of its client, and the fingerprint of a
request follows the answer as a protobuf field that no message uses. Formats have golden files. Keys are in
`meta/state/records`. No I/O.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nvpool.core.errors import CorruptRecord
from nvpool.core.primitives import ByteWriter

SECRET_BYTES = 16
_VERSION = 1
_CLIENT_BYTES_MAX = 255
_END_OF_CLIENT = b"\0"
"""Separator between the name of a client and the owner; the name itself contains none."""
_SESSION, _SLOT = struct.Struct("<B16sq"), struct.Struct("<BQQ")
_MARK_TAG = bytes((0xFD, 0xFF, 0xFF, 0xFF, 0x0F))
"""Tag of the field 2^29 - 1, the highest possible number, with four bytes: protocol buffers, encoding,
I32."""
_MARK = struct.Struct("<5sI")
_out = ByteWriter()


class SessionRecord(NamedTuple):
    """Stored part of a session."""

    secret: bytes
    opened_ns: int
    client: str
    watches: bool = False
    """Whether the session may have leases, which a restarted shard does not know."""
    identity: int = 0
    """Identity of the client, the same at every shard; 0: the client stated none."""
    owner: str | None = None
    """Caller that opened the session, as `rpc/access_control` names it ("" is a node); None in older
    records."""


class SlotRecord(NamedTuple):
    """Last change of a slot.

    The answer must wait while the inode `waits_for` (0: none) is being truncated.
    """

    sequence: int
    waits_for: int
    answer: bytes
    mark: int | None = None
    """Fingerprint of the answered request; None in older records."""


def encode_session(record: SessionRecord) -> bytes:
    head = _SESSION.pack(
        _VERSION + record.watches + 2 * bool(record.identity), record.secret, record.opened_ns
    )
    identity = record.identity.to_bytes(8, "little") if record.identity else b""
    client = record.client.encode()[:_CLIENT_BYTES_MAX].replace(_END_OF_CLIENT, b"?")
    return (
        head + identity + client + (b"" if record.owner is None else _END_OF_CLIENT + record.owner.encode())
    )


def decode_session(raw: bytes) -> SessionRecord:
    kind = raw[0] - _VERSION if raw else -1
    if not 0 <= kind < 4:
        raise CorruptRecord("a session cannot be read")
    watches, identified = bool(kind & 1), bool(kind & 2)
    at = _SESSION.size + 8 * identified
    if len(raw) < at:
        raise CorruptRecord("a session cannot be read")
    _, secret, opened_ns = _SESSION.unpack_from(raw)
    client, bound, owner = raw[at:].partition(_END_OF_CLIENT)
    return SessionRecord(
        secret,
        opened_ns,
        client.decode(errors="replace"),
        watches,
        int.from_bytes(raw[_SESSION.size : at], "little"),
        owner.decode(errors="replace") if bound else None,
    )


def encode_slot(sequence: int, waits_for: int, answer: bytes, mark: int | None = None) -> bytes:
    """Encode a slot record; without `mark` it has no fingerprint."""
    _out.begin()
    _out.u8(1)
    _out.u64(sequence)
    _out.u64(waits_for)
    _out.raw(answer)
    if mark is not None:
        _out.raw(_MARK_TAG)
        _out.u32(mark)
    return _out.take()


def decode_slot(raw: bytes) -> SlotRecord:
    if len(raw) < _SLOT.size or raw[0] != _VERSION:
        raise CorruptRecord("a slot cannot be read")
    _, sequence, waits_for = _SLOT.unpack_from(raw)
    answer = raw[_SLOT.size :]
    if answer[-_MARK.size : -4] == _MARK_TAG:
        return SlotRecord(
            sequence, waits_for, answer[: -_MARK.size], _MARK.unpack_from(answer, len(answer) - _MARK.size)[1]
        )
    return SlotRecord(sequence, waits_for, answer)
