"""Stored format of the chunk index in its kv: keys and packed, versioned records.

    key                                           value
    F                                             the store's identity (JSON, written once)
    S                                             u64, u64: changes up to the first sequence number were
                                                  flushed, their data included; the second is the
                                                  sequence number of this change
    c inode u64 · chunk u32 · segment u8          segment record (key in big-endian); segment 0 of a chunk
                                                  also holds its head. The key omits chunk and segment if
                                                  both are 0
    p …the same                                   reserved: the pending version of a segment, same record
    i inode u64                                   inode record: the newest truncate number known here
    g group u32                                   bitmap of 8,192 blocks: 1 is used; no record: all free
    d group u32                                   changes since that bitmap, at most 24
    b inode u64 · chunk u32 · block u32           a bad block (text)
    V                                             the store's write verifier: see write_verifier.py
    W                                             state of the scrub schedule: JSON, see scrub.py
    L, h number u64                               location leases of clients on the host:
                                                  location_leases.py, held_key
    r inode u64 · chunk u32 · segment u8          a replayed segment record with blocks that did not reach
                                                  the drive: rejected u64 (bit n: block n), record; see
                                                  recovery.py

A segment is 64 blocks (256 KiB) of a chunk. The general form of its record is little-endian:

    format u8 = 1 · flags u8 · runs u8 · requests u8 · fresh u8 · fresh blocks u8
    flag HEAD:   version u64 (chain epoch u32 above counter u32); the three flag bits above HOLES: the
                 inode's chain table less one
    flag CUT:    truncate number u64, absent when 0
    requests × 18: session u64, sequence u64, slot u16      the last 16 that changed the chunk, oldest first
    flag HOLES:  presence u64, bit n is block n; without the flag the blocks are 0, 1, 2, … without a gap
    runs × 6:    u32 low part of the disk block, u16: its high 10 bits above 6 bits of (blocks of the run - 1)
    present blocks × 4: CRC32C

`fresh` and `fresh blocks` say which blocks the change of this record wrote: a replay must check these. The
small form is for a segment 0 whose blocks are in one run and all fresh, with at most one request; v is
LEB128:

    format u8 = 2, in its high half the chain table less one
    · u8: blocks, bit 7: a request · chain epoch v · counter v · truncate number v · first disk block v
    request: session u64 · slot v · sequence v
    blocks × 4: CRC32C

So a full segment in 64 runs with 16 requests has 958 bytes, and a file of one block about 24, with a key of
9. The kv stores a checksum with each record, so a flipped bit in the index is an error and never a hole full
of zeros.

Only other modules of the store use this one. This module never does I/O.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from nvpool.core.checksum import ZERO_BLOCK_CHECKSUM
from nvpool.core.errors import CorruptRecord, InvalidRequest, WrongFormat
from nvpool.core.ids import RequestId
from nvpool.core.primitives import ByteWriter
from nvpool.poolmap.chains.protocol import of_old_floor

SEGMENT_BITS = 6
SEGMENT_BLOCKS = 1 << SEGMENT_BITS
SEGMENT_MASK = SEGMENT_BLOCKS - 1
REQUESTS_KEPT = 16
DISK_BLOCKS_MAX = 1 << 42

HEAD, CUT, HOLES = 1, 2, 4
_TABLE_SHIFT = 3
TABLE_MAX = 8
_FORMAT, _SMALL = 1, 2
_CHUNK_KIND, _GROUP_KIND, _DELTA_KIND = b"cgd"
_SMALL_OF_TABLE = frozenset(_SMALL | table << 4 for table in range(TABLE_MAX))
_START = struct.Struct("<BBBBBB")
_REQUEST = struct.Struct("<QQH")
_U64 = struct.Struct("<Q")
_KEY = struct.Struct(">cQIB")
_INODE_KEY = struct.Struct(">cQ")
_GROUP_KEY = struct.Struct(">cI")
_BAD_KEY = struct.Struct(">cQII")
_HELD_KEY = struct.Struct(">cQ")
_out = ByteWriter()
_ZERO_CRC = ZERO_BLOCK_CHECKSUM.to_bytes(4, "little")

IDENTITY_KEY = b"F"
FLUSHED_KEY = b"S"
NOTE_KEY = b"W"


class IndexSegment:
    """64 decoded blocks of a chunk; never changed once made.

    `disk[n]` is the disk block of block n, 0 for a hole (disk block 0 is the superblock). `crcs` has four
    bytes for each block; a hole has those of a zero block. Both end after the last block that is not a hole.
    `base` is disk[0] if all blocks lie in one run, else 0.
    """

    __slots__ = ("disk", "crcs", "base")

    def __init__(self, disk: array, crcs: bytes):
        self.disk = disk
        self.crcs = crcs
        self.base = 0
        if (
            disk
            and disk[0]
            and disk[-1] == disk[0] + len(disk) - 1
            and disk == array("Q", range(disk[0], disk[-1] + 1))
        ):
            self.base = disk[0]

    def run(self, first: int, count: int) -> int:
        """Disk block of `count` blocks from `first` on, if they are in one run without a hole; else 0.

        If it is not 0, the checksums cover these blocks too.
        """
        end = first + count
        if end > len(self.disk) or end << 2 > len(self.crcs):
            return 0
        if self.base:
            return self.base + first
        return self.disk[first] if count == 1 else 0


NO_BLOCKS = IndexSegment(array("Q"), b"")


class Head(NamedTuple):
    """Head of a chunk.

    The fields are the committed version, the truncate number it was written under, (session, slot, sequence)
    of the last requests, and the chain table of its inode.
    """

    version: int
    cut: int = 0
    requests: tuple[tuple[int, int, int], ...] = ()
    table: int = 1


def with_request(
    requests: tuple[tuple[int, int, int], ...], request: RequestId
) -> tuple[tuple[int, int, int], ...]:
    """Return the last requests after `request`."""
    session, slot, _ = request
    if slot > 0xFFFF:
        raise InvalidRequest(f"{slot} is not a slot")
    if not requests:
        return (tuple(request),)
    kept = [one for one in requests if one[0] != session or one[1] != slot][-(REQUESTS_KEPT - 1) :]
    return (*kept, tuple(request))


class InodeRecord(NamedTuple):
    """Index record of an inode; for `floor` see poolmap/chains/protocol.raised."""

    cut: int = 0
    floor: int = 0
    chunk_bits: int = 0


def segment_key(inode: int, index: int, segment: int) -> bytes:
    """Return the key of a segment of a chunk."""
    _out.begin()
    _out.u8(_CHUNK_KIND)
    _out.u64_big(inode)
    if index or segment:
        _out.u16_big(index >> 16)
        _out.u16_big(index)
        _out.u8(segment)
    return _out.take()


def split_segment_key(key: bytes) -> tuple[int, int, int]:
    """Return (inode, chunk index, segment)."""
    return _KEY.unpack(key)[1:] if len(key) == _KEY.size else (_INODE_KEY.unpack(key)[1], 0, 0)


def inode_end_key(inode: int) -> bytes:
    """Return the key after the last segment of an inode."""
    return _INODE_KEY.pack(b"c", inode + 1) if inode + 1 < 1 << 64 else b"d"


def inode_key(inode: int) -> bytes:
    return _INODE_KEY.pack(b"i", inode)


def group_key(group: int) -> bytes:
    """Return the key of a group's bitmap."""
    return _key_of_group(_GROUP_KIND, group)


def delta_key(group: int) -> bytes:
    """Return the key of the changes since a group's bitmap."""
    return _key_of_group(_DELTA_KIND, group)


def _key_of_group(kind: int, group: int) -> bytes:
    _out.begin()
    _out.u8(kind)
    _out.u16_big(group >> 16)
    _out.u16_big(group)
    return _out.take()


def group_of_key(key: bytes) -> int:
    return _GROUP_KEY.unpack(key)[1]


def bad_key(inode: int, index: int, block: int) -> bytes:
    return _BAD_KEY.pack(b"b", inode, index, block)


def split_bad_key(key: bytes) -> tuple[int, int, int]:
    return _BAD_KEY.unpack(key)[1:]


def check_format(key: bytes, raw: bytes, least: int) -> None:
    """Check the length and format of a record.

    CorruptRecord: the record has fewer than `least` bytes. WrongFormat: it has another version.
    """
    if len(raw) < least:
        raise CorruptRecord(f"the index record {key.hex()} is too short")
    if raw[0] != _FORMAT:
        raise WrongFormat(f"the index record {key.hex()} has format {raw[0]}, this nvpool knows {_FORMAT}")


def encode_segment(segment: IndexSegment, head: Head | None, fresh: int = 0, fresh_blocks: int = 0) -> bytes:
    """Encode a segment; `head` is given for segment 0 and for no other."""
    disk = segment.disk
    if (
        segment.base
        and head is not None
        and len(head.requests) < 2
        and not fresh
        and fresh_blocks == len(disk)
    ):
        return encode_small(
            head.version, head.cut, head.table, segment.base, len(disk), head.requests, segment.crcs
        )
    runs = bytearray()
    run_count = 0
    flags = 0
    crcs = segment.crcs
    if segment.base:
        run_count = 1
        runs += struct.pack("<IH", segment.base & 0xFFFFFFFF, (segment.base >> 32) << 6 | len(disk) - 1)
    elif disk:
        present = 0
        begin = count = 0
        for at, place in enumerate(disk):
            if place:
                present |= 1 << at
            if count and place == begin + count:
                count += 1
                continue
            if count:
                runs += struct.pack("<IH", begin & 0xFFFFFFFF, (begin >> 32) << 6 | count - 1)
                run_count += 1
            begin, count = place, 1 if place else 0
        if count:
            runs += struct.pack("<IH", begin & 0xFFFFFFFF, (begin >> 32) << 6 | count - 1)
            run_count += 1
        if present != (1 << len(disk)) - 1:
            flags |= HOLES
            crcs = b"".join([crcs[at * 4 : at * 4 + 4] for at, place in enumerate(disk) if place])
            runs[:0] = _U64.pack(present)
    parts = [b"", runs, crcs]
    request_count = 0
    if head is not None:
        flags |= HEAD | head.table - 1 << _TABLE_SHIFT
        request_count = len(head.requests)
        fixed = _U64.pack(head.version)
        if head.cut:
            flags |= CUT
            fixed += _U64.pack(head.cut)
        if request_count:
            fixed += b"".join(
                [_REQUEST.pack(session, sequence, slot) for session, slot, sequence in head.requests]
            )
        parts.insert(1, fixed)
    parts[0] = _START.pack(_FORMAT, flags, run_count, request_count, fresh, fresh_blocks)
    return b"".join(parts)


def encode_small(
    version: int,
    cut: int,
    table: int,
    base: int,
    blocks: int,
    requests: tuple[tuple[int, int, int], ...],
    crcs: bytes,
) -> bytes:
    """Encode the small form of a segment 0, whose `blocks` blocks lie from disk block `base` on."""
    _out.begin()
    _out.u8(_SMALL | table - 1 << 4)
    _out.u8(blocks | (128 if requests else 0))
    _out.varint(version >> 32)
    _out.varint(version & 0xFFFFFFFF)
    _out.varint(cut)
    _out.varint(base)
    for session, slot, sequence in requests:
        _out.u64(session)
        _out.varint(slot)
        _out.varint(sequence)
    _out.raw(crcs)
    return _out.take()


def _decode_small(key: bytes, body: bytes) -> tuple[IndexSegment, Head]:
    at = 2

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = body[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    try:
        blocks = body[1] & 127
        epoch, counter, cut, base = number(), number(), number(), number()
        requests: tuple = ()
        if body[1] & 128:
            (session,) = _U64.unpack_from(body, at)
            at += 8
            requests = ((session, number(), number()),)
    except (IndexError, struct.error):
        raise CorruptRecord(f"the index record {key.hex()} is too short") from None
    if len(body) - at != 4 * blocks or not 0 < blocks <= SEGMENT_BLOCKS or not base:
        raise CorruptRecord(f"the index record {key.hex()} is inconsistent")
    return IndexSegment(array("Q", range(base, base + blocks)), body[at:]), Head(
        epoch << 32 | counter, cut, requests, (body[0] >> 4) + 1
    )


def decode_segment(key: bytes, body: bytes) -> tuple[IndexSegment, Head | None]:
    """Decode a segment record.

    CorruptRecord: the record is inconsistent. WrongFormat: it has another version.
    """
    if body and body[0] in _SMALL_OF_TABLE:
        return _decode_small(key, body)
    check_format(key, body, 6)
    _, flags, run_count, request_count, _, _ = _START.unpack_from(body)
    at = 6
    head = None
    try:
        if flags & HEAD:
            (version,) = _U64.unpack_from(body, at)
            at += 8
            cut = 0
            if flags & CUT:
                (cut,) = _U64.unpack_from(body, at)
                at += 8
            requests: tuple = ()
            if request_count:
                end = at + 18 * request_count
                requests = tuple(
                    [
                        (session, slot, sequence)
                        for session, sequence, slot in _REQUEST.iter_unpack(body[at:end])
                    ]
                )
                at = end
            head = Head(version, cut, requests, (flags >> _TABLE_SHIFT) + 1)
        present = -1
        if flags & HOLES:
            (present,) = _U64.unpack_from(body, at)
            at += 8
        disk = array("Q")
        if run_count == 1:
            low, high = struct.unpack_from("<IH", body, at)
            begin = low | high >> 6 << 32
            disk.extend(range(begin, begin + (high & 63) + 1))
        elif run_count:
            fields = struct.unpack_from("<" + "IH" * run_count, body, at)
            for low, high in zip(fields[::2], fields[1::2], strict=True):
                begin = low | high >> 6 << 32
                disk.extend(range(begin, begin + (high & 63) + 1))
        at += 6 * run_count
        crcs = body[at:]
        if (
            len(crcs) != 4 * len(disk)
            or len(disk) > SEGMENT_BLOCKS
            or (flags & HOLES and present.bit_count() != len(disk))
        ):
            raise CorruptRecord(f"the index record {key.hex()} is inconsistent")
    except struct.error:
        raise CorruptRecord(f"the index record {key.hex()} is too short") from None
    if not flags & HOLES:
        return (IndexSegment(disk, crcs) if disk else NO_BLOCKS), head
    placed = array("Q", bytes(8 * present.bit_length()))
    spread = [_ZERO_CRC] * len(placed)
    source = 0
    for block in range(len(placed)):
        if present >> block & 1:
            placed[block] = disk[source]
            spread[block] = crcs[source * 4 : source * 4 + 4]
            source += 1
    return IndexSegment(placed, b"".join(spread)), head


def replaced(segment: IndexSegment, start: int, places: array, crcs: bytes) -> IndexSegment:
    """Return the segment with the blocks from `start` on at `places` (0: a hole) with checksums `crcs`."""
    end = start + len(places)
    disk = segment.disk
    have = len(disk)
    if start == 0 and end >= have:
        return _trimmed(places, crcs)
    new_disk = disk[:start]
    new_crcs = segment.crcs[: start * 4]
    if start > have:
        new_disk.extend([0] * (start - have))
        new_crcs += _ZERO_CRC * (start - have)
    new_disk.extend(places)
    new_disk.extend(disk[end:])
    return _trimmed(new_disk, b"".join((new_crcs, crcs, segment.crcs[end * 4 :])))


def _trimmed(disk: array, crcs: bytes) -> IndexSegment:
    count = len(disk)
    while count and not disk[count - 1]:
        count -= 1
    if not count:
        return NO_BLOCKS
    return IndexSegment(disk[:count], bytes(crcs[: count * 4]))


def blocks_there(key: bytes, body: bytes) -> list[tuple[int, int]]:
    """Return the runs of blocks, (first, count) within the segment, that are not holes.

    Adjacent runs are merged. Raises CorruptRecord and WrongFormat like `decode_segment`, which does ten times
    the work.
    """
    if body and body[0] in _SMALL_OF_TABLE:
        check = len(body) > 2 and body[1] & 127
        if not check:
            raise CorruptRecord(f"the index record {key.hex()} is too short")
        return [(0, check)]
    check_format(key, body, 6)
    _, flags, run_count, request_count, _, _ = _START.unpack_from(body)
    at = 6 + (8 if flags & HEAD else 0) + (8 if flags & CUT else 0) + 18 * request_count
    present = -1
    if flags & HOLES and len(body) >= at + 8:
        (present,) = _U64.unpack_from(body, at)
        at += 8
    count, rest = divmod(len(body) - at - 6 * run_count, 4)
    if rest or not 0 <= count <= SEGMENT_BLOCKS or (flags & HOLES and present.bit_count() != count):
        raise CorruptRecord(f"the index record {key.hex()} is inconsistent")
    if not flags & HOLES:
        return [(0, count)] if count else []
    runs = []
    begin = 0
    while present:
        skip = (present & -present).bit_length() - 1
        present >>= skip
        length = (~present & present + 1).bit_length() - 1
        runs.append((begin + skip, length))
        begin += skip + length
        present >>= length
    return runs


def state_of(key: bytes, body: bytes) -> tuple[int, int, int, int]:
    """Return (version, truncate number, chain table, blocks) of a segment record.

    The first three are 0 if the record has no head. Raises CorruptRecord and WrongFormat like
    `decode_segment`, which does ten times the work.
    """
    try:
        if body and body[0] in _SMALL_OF_TABLE:
            numbers = []
            at = 2
            for _ in range(3):
                value = shift = 0
                while (byte := body[at]) > 127:
                    value |= (byte & 127) << shift
                    shift += 7
                    at += 1
                numbers.append(value | byte << shift)
                at += 1
            return numbers[0] << 32 | numbers[1], numbers[2], (body[0] >> 4) + 1, body[1] & 127
        check_format(key, body, 6)
        flags = body[1]
        fixed = 6 + 6 * body[2] + (8 if flags & HOLES else 0)
        if not flags & HEAD:
            return 0, 0, 0, len(body) - fixed >> 2
        fixed += 8 + 18 * body[3]
        (version,) = _U64.unpack_from(body, 6)
        if not flags & CUT:
            return version, 0, (flags >> _TABLE_SHIFT) + 1, len(body) - fixed >> 2
        return version, *_U64.unpack_from(body, 14), (flags >> _TABLE_SHIFT) + 1, len(body) - fixed - 8 >> 2
    except (IndexError, struct.error):
        raise CorruptRecord(f"the index record {key.hex()} is too short") from None


def extent_count(body: bytes) -> int:
    """Return the number of runs of disk blocks in a segment record."""
    return 1 if body[0] in _SMALL_OF_TABLE else body[2]


def fresh_of(body: bytes) -> tuple[int, int]:
    """Return (first, count) of the blocks that the change of this segment record wrote."""
    return (0, body[1] & 127) if body[0] in _SMALL_OF_TABLE else (body[4], body[5])


def encode_flushed(flushed: int, own: int) -> bytes:
    return _U64.pack(flushed) + _U64.pack(own)


def decode_flushed(raw: bytes) -> tuple[int, int]:
    return _U64.unpack_from(raw)[0], _U64.unpack_from(raw, 8)[0]


def encode_rejected(rejected: int, body: bytes) -> bytes:
    return _U64.pack(rejected) + body


def decode_rejected(raw: bytes) -> tuple[int, bytes]:
    return _U64.unpack_from(raw)[0], raw[8:]


def held_key(number: int) -> bytes:
    return _HELD_KEY.pack(b"h", number)


def encode_held(until_s: float, runs: Sequence[tuple[int, int]]) -> bytes:
    """Encode free blocks that clients may read until `until_s` on CLOCK_BOOTTIME.

    The format is u64 milliseconds, then a u64 for each run: disk block above 16 bits of (blocks - 1).
    """
    return struct.pack(
        f"<{len(runs) + 1}Q", math.ceil(until_s * 1000), *[place << 16 | count - 1 for place, count in runs]
    )


def decode_held(key: bytes, raw: bytes) -> tuple[int, float, list[tuple[int, int]]]:
    """Return (number, until, runs). CorruptRecord: the record is malformed."""
    if len(raw) % 8 or not raw:
        raise CorruptRecord(f"the index record {key.hex()} has {len(raw)} bytes")
    until, *runs = struct.unpack(f"<{len(raw) // 8}Q", raw)
    return _HELD_KEY.unpack(key)[1], until / 1000, [(run >> 16, (run & 0xFFFF) + 1) for run in runs]


_INODE = struct.Struct("<BBHQQ")
_SPLIT_FLOOR = 1
"""Flag of an inode record: in its version floor, epoch and counter are each the highest.

Older builds store the highest version without the flag, and ignore the flag. A floor with the flag is never
below that version, so older builds can read these records.
"""


def encode_inode(record: InodeRecord) -> bytes:
    return _INODE.pack(
        _FORMAT, record.chunk_bits, _SPLIT_FLOOR if record.floor else 0, record.cut, record.floor
    )


def decode_inode(key: bytes, raw: bytes) -> InodeRecord:
    check_format(key, raw, _INODE.size)
    _, chunk_bits, flags, cut, floor = _INODE.unpack(raw)
    return InodeRecord(cut, floor if flags & _SPLIT_FLOOR else of_old_floor(floor), chunk_bits)
