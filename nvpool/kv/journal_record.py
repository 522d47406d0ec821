"""Records of changes: the check of effects, and their format in the journal and between shard members.

A record, little-endian:

    0   crc         u32   CRC32C of everything after it, bytes 4 to length
    4   length      u32   of the whole record, 40 at least
    8   term        u64   of the primary that made the change
    16  generation  u64
    24  sequence    u64   1, 2, 3, … without a gap over all generations
    32  effects     u32   how many follow
    36  reserved    u32   0
    40  effects, each:  key length u16 · value length u32, 0xFFFFFFFF for a deletion · key · value

The effects fill the record exactly, and their keys differ. Used by the engines, by log shipping and by partition
migration, on the thread of the event loop only: the encoder and the reader of this module are shared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nvpool.core import primitives
from nvpool.core.errors import InvalidRequest, TooBig
from nvpool.core.primitives import ByteReader, ByteWriter
from nvpool.kv.api import KEY_BYTES_MAX, KEY_END, VALUE_BYTES_MAX, Effects

HEAD_BYTES = 40
"""Length of a record without effects."""
_HEAD_BYTES, _KEY_BYTES_MAX, _VALUE_BYTES_MAX = HEAD_BYTES, KEY_BYTES_MAX, VALUE_BYTES_MAX
_LENGTH_PLACE, _GENERATION_PLACE = 4, 16
_DELETED = _LENGTH_MAX = _LOW = 0xFFFFFFFF
_out = ByteWriter()

Adopted = tuple[list[bytes], list[dict[bytes, bytes | None]], int]
"""Records of a shipped group, encoded for this journal; the effects of each; and the number of all effects."""


class JournalRecord(NamedTuple):
    """One decoded record; `length` is that of its encoding."""

    term: int
    generation: int
    sequence: int
    effects: list[tuple[bytes, bytes | None]]
    length: int


def checked_effects(effects: Effects) -> dict[bytes, bytes | None]:
    """Return the effects of one change by key; a dict itself.

    InvalidRequest: a key is empty, too long, not below KEY_END, or occurs twice; or a key or value is not
    bytes.
    TooBig: a value is longer than VALUE_BYTES_MAX.
    """
    changed: dict[bytes, bytes | None] = {}
    if type(effects) is dict:
        changed = effects
        for key, value in changed.items():
            _check(key, value)
        return changed
    pairs: list[Any] = effects if type(effects) is list else list(effects)
    for key, value in pairs:
        _check(key, value)
        changed[key] = value
    if len(changed) != len(pairs):
        raise InvalidRequest("a key occurs twice in one change")
    return changed


def _check(key: object, value: object) -> None:
    count = len(key) if type(key) is bytes else 0
    if not 0 < count <= _KEY_BYTES_MAX or (count == _KEY_BYTES_MAX and key == KEY_END):
        raise InvalidRequest(f"a key is 1 to {KEY_BYTES_MAX} bytes and below KEY_END, not {key!r:.80}")
    if value is not None:
        if type(value) is not bytes:
            raise InvalidRequest(f"a value is bytes, not {type(value).__name__}")
        if len(value) > _VALUE_BYTES_MAX:
            raise TooBig(f"a value has {VALUE_BYTES_MAX} bytes at most, not {len(value)}")


def encode(term: int, generation: int, sequence: int, effects: dict[bytes, bytes | None]) -> bytes:
    """Encode a record of effects that `checked_effects` has accepted.

    OverflowError: the record is longer than its head can say; an engine accepts much less.
    """
    out = _out
    out.begin()
    out.u64(0)  # CRC and length, written last
    out.u64(term)
    out.u64(generation)
    out.u64(sequence)
    out.u64(len(effects))  # and the reserved 0
    for key, value in effects.items():
        out.u16(len(key))
        if value is None:
            out.u32(_DELETED)
            out.raw(key)
        else:
            out.u32(len(value))
            out.raw(key)
            out.raw(value)
    return _sealed(out)


def _sealed(out: ByteWriter) -> bytes:
    """Complete the record in `out` by its length and CRC."""
    count = out.size()
    if count > _LENGTH_MAX:
        raise OverflowError(f"a record of {count} bytes is longer than it can say")
    out.put_u32(_LENGTH_PLACE, count)
    out.put_u32(0, out.crc(_LENGTH_PLACE))
    return out.take()


class RecordReader:
    """Reads the records of a byte string, one after the other."""

    __slots__ = ("term", "generation", "sequence", "start", "end", "_count", "_raw", "_source")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._source = ByteReader()
        self._source.open(raw)
        self.start = self.end = 0
        self.term = self.generation = self.sequence = self._count = 0

    def has_more(self) -> bool:
        """Whether bytes follow the record that was read last."""
        return self.end < len(self._raw)

    def next(self) -> bool:
        """Read the head of the next record, which is raw[start:end] then.

        False: no complete record with a correct CRC follows, and the reader must not be used any more. Invalid bytes never
        raise an error.
        """
        source, start = self._source, self.end
        begin = source.u64()  # CRC and length
        self.term, self.generation, self.sequence = source.u64(), source.u64(), source.u64()
        count = source.u64()  # and the reserved 0
        length = begin >> 32
        if source.failed or length < _HEAD_BYTES or length > len(self._raw) - start or count >> 32:
            return False
        self.start, self.end, self._count = start, start + length, count
        return begin & _LOW == primitives.crc32c_of(self._raw, start + _LENGTH_PLACE, self.end)

    def skip(self) -> None:
        """Continue behind this record without reading its effects."""
        self._source.raw(self.end - self._source.place())

    def effects(self) -> dict[bytes, bytes | None] | None:
        """Effects of this record by key; None if they do not fill it, or if a key occurs twice."""
        source = self._source
        found: dict[bytes, bytes | None] = {}
        for _ in range(self._count):
            key_bytes, value_bytes = source.u16(), source.u32()
            key = source.raw(key_bytes)
            found[key] = None if value_bytes == _DELETED else source.raw(value_bytes)
            if source.failed:
                return None
        return found if source.place() == self.end and len(found) == self._count else None


def generation_of(head: bytes) -> int:
    """Generation in the first bytes of a record, which may be invalid."""
    return int.from_bytes(head[_GENERATION_PLACE : _GENERATION_PLACE + 8], "little")


def decode(buffer: memoryview, offset: int) -> JournalRecord | None:
    """Decode the record at `offset`.

    The result is None if there is no complete and valid record. Invalid bytes never raise an error.
    """
    # Only the record is copied: the buffer may be a whole journal.
    length = int.from_bytes(buffer[offset + _LENGTH_PLACE : offset + _LENGTH_PLACE + 4], "little")
    if length > len(buffer) - offset:
        return None
    reader = RecordReader(bytes(buffer[offset : offset + length]))
    if not reader.next():
        return None
    effects = reader.effects()
    if effects is None:
        return None
    return JournalRecord(reader.term, reader.generation, reader.sequence, list(effects.items()), length)


def adopt(payload: bytes, term: int, generation: int, sequence: int) -> Adopted | None:
    """Encode the records of a shipped group again, for a journal that ends with change `sequence`.

    Records up to `sequence` are left out. None if a record is invalid, of another term than `term`, or not the
    next change: the caller then decodes the records one by one.
    """
    records: list[bytes] = []
    effects: list[dict[bytes, bytes | None]] = []
    total = 0
    reader, out = RecordReader(payload), _out
    while reader.has_more():
        if not reader.next() or reader.term != term:
            return None
        if reader.sequence <= sequence:
            reader.skip()
            continue
        if reader.sequence != sequence + 1:
            return None
        changed = reader.effects()
        if changed is None:
            return None
        out.begin()
        out.part(payload, reader.start, reader.end - reader.start)
        out.put_u64(_GENERATION_PLACE, generation)
        records.append(_sealed(out))
        effects.append(changed)
        total += len(changed)
        sequence = reader.sequence
    return records, effects, total
