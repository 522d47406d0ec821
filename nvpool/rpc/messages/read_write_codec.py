"""Read and write batches as packed structs: the part of data.proto that every read encodes and decodes.

A batch is one bytes object of fixed-size entries, so that 64 reads cost one struct call each and no protobuf
objects. This module checks everything that comes from the other side: invalid bytes raise InvalidRequest (in
requests) or CorruptFrame (in replies), never an exception of `struct`. Used by the chunk client and
store/server/service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from nvpool.core.errors import CorruptFrame, InvalidRequest, TooBig
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX
from nvpool.rpc.api import PAYLOAD_BYTES_MAX, Buffer
from nvpool.rpc.v1.data_pb2 import ReadReply, ReadRequest, WriteReply, WriteRequest

READ_ENTRY = Struct("<QIIIHH")
"""inode, chunk index, offset, length, grant (index into the request's grants), flags"""
READ_RESULT = Struct("<HHIQ")
"""status, flags, length, version"""
WRITE_ENTRY = Struct("<QQQIIIHH")
"""inode, truncation epoch, sequence, chunk index, offset, length, grant, flags"""
WRITE_RESULT = Struct("<HHIQ")
"""status, flags, reserved, version"""
LOCATE_ENTRY = Struct("<QIHHQ")
"""inode, chunk index, blocks, grant, version that the client has"""
LOCATE_RESULT = Struct("<HHIIIIIQ")
"""status, flags, runs, blocks, lease time in milliseconds, slot, stamp, version"""
PAST_READS = Struct("<QQQ")
"""inode, short-circuit reads (which bypass the store), their bytes"""
PAST_ENTRIES_MAX = 4096
"""Most inodes of one report of such reads."""
HANDOVER = Struct("<QI4x16sd")
"""Message that a store sends with its descriptors (rpc/fd_passing).

Its fields: target, slots of the store's table, token, CLOCK_BOOTTIME of the store."""
INODE = Struct("<Q")

BATCH_ENTRIES_MAX = 256
"""Most entries of a batch, as clients send them (GATHER_READS in client/data/store_reads): half a millisecond of
a store's event loop."""

CLIENT_CACHES = 1
"""Flag of a read: the client caches the data itself, so the drive's cache need not keep them."""
ALL_OF_BLOCKS = 1
"""Flag of a write: the file has no other bytes in the blocks it changes in part.

The file has had no such bytes since its chain was reset."""
UNCHECKED = 1
"""Flag of a read result: the store has not compared these blocks with their checksums."""

SAME_VERSION = 1
"""Flag of a locate result: the client already knows the block locations."""
LOCATE_ENTRIES_MAX = 256
"""Most entries of a locate request: a quarter of a GiB of a file, with 256 KiB of checksums in the
message."""
LOCATE_BYTES_MAX = 2 << 20
"""Most bytes of runs and checksums in one reply; entries beyond it are left unanswered."""

_BLOCK_MASK = BLOCK_BYTES - 1

_Reply = TypeVar("_Reply", bound=Message)


# -- the most common messages without protobuf: the same bytes, a quarter of the time ------------------------

_READ_REQUEST = Struct("<BQBBBB60sBB24s")
READ_REQUEST_BYTES = _READ_REQUEST.size
_WRITE_REQUEST = Struct("<BQBBBB60sBB40sBB4sBQBB")
_WRITE_REQUEST_BYTES = _WRITE_REQUEST.size
_WRITE_REPLY = Struct("<BQBB16s")
WRITE_REPLY_BYTES = _WRITE_REPLY.size
_WRITE_MARKS = 0x09, 0x10, 0x1A, 60, 0x22, 40, 0x2A, 4, 0x31, 0x38
_READ_REPLY = Struct("<BQBB16sBB4s")
READ_REPLY_BYTES = _READ_REPLY.size
"""Protobuf encodings of the most common messages: tag, length (where there is one) and value of each field.

They are ReadRequest with one grant and one read, ReadReply with one block, WriteRequest with one grant and
one write within a block, and WriteReply to one write."""


def encode_read_request(
    epoch: int, target: int, grants: list[bytes], reads: bytes, verify: bool = False
) -> bytes:
    if (
        len(reads) == 24
        and len(grants) == 1
        and len(grants[0]) == 60
        and 0 < target < 128
        and epoch
        and not verify
    ):
        return _READ_REQUEST.pack(0x09, epoch, 0x10, target, 0x1A, 60, grants[0], 0x22, 24, reads)
    return ReadRequest(
        map_epoch=epoch, target=target, grants=grants, reads=reads, verify=verify
    ).SerializeToString()


def decode_read_request(message: Buffer) -> tuple[int, int, Sequence[bytes], bytes, bool]:
    """Return (epoch, target, grants, reads, verify).

    InvalidRequest: not a ReadRequest. The fields are not checked.
    """
    if len(message) == READ_REQUEST_BYTES:
        one, epoch, two, target, three, grant_bytes, grant, four, reads_bytes, reads = _READ_REQUEST.unpack(
            message
        )
        if (
            one == 0x09
            and two == 0x10
            and target < 128
            and three == 0x1A
            and grant_bytes == 60
            and four == 0x22
            and reads_bytes == 24
        ):
            return epoch, target, (grant,), reads, False
    try:
        request = ReadRequest.FromString(bytes(message))
    except DecodeError:
        raise InvalidRequest("not a ReadRequest") from None
    return request.map_epoch, request.target, request.grants, request.reads, request.verify


def encode_write_request(
    epoch: int, target: int, grant: bytes, writes: bytes, checksums: bytes, session: int, slot: int
) -> bytes:
    if (
        len(checksums) == 4
        and len(writes) == 40
        and len(grant) == 60
        and 0 < target < 128
        and 0 < slot < 128
        and epoch
        and session
    ):
        return _WRITE_REQUEST.pack(
            0x09,
            epoch,
            0x10,
            target,
            0x1A,
            60,
            grant,
            0x22,
            40,
            writes,
            0x2A,
            4,
            checksums,
            0x31,
            session,
            0x38,
            slot,
        )
    return WriteRequest(
        map_epoch=epoch,
        target=target,
        grants=[grant],
        writes=writes,
        checksums=checksums,
        session=session,
        slot=slot,
    ).SerializeToString()


def decode_write_request(message: Buffer) -> tuple[int, int, bytes, bytes, bytes, int, int] | None:
    """Decode a request with one write within a block; return None for any other message.

    The result is (epoch, target, grant, writes, checksums, session, slot). The fields are not checked.
    """
    if len(message) != _WRITE_REQUEST_BYTES:
        return None
    (
        one,
        epoch,
        two,
        target,
        *marks,
        grant,
        four,
        forty,
        writes,
        five,
        four_bytes,
        checksums,
        six,
        session,
        seven,
        slot,
    ) = _WRITE_REQUEST.unpack(message)
    if (
        (one, two, *marks, four, forty, five, four_bytes, six, seven) != _WRITE_MARKS
        or target > 127
        or slot > 127
    ):
        return None
    return epoch, target, grant, writes, checksums, session, slot


def encode_write_reply(epoch: int, results: bytes | bytearray) -> bytes:
    if len(results) == 16 and epoch:
        return _WRITE_REPLY.pack(0x09, epoch, 0x12, 16, results)
    return WriteReply(map_epoch=epoch, results=bytes(results)).SerializeToString()


def decode_write_reply(message: Buffer) -> bytes:
    """Return the packed results. CorruptFrame: not a WriteReply. The field is not checked."""
    results: bytes
    if len(message) == WRITE_REPLY_BYTES:
        one, _, two, results_bytes, results = _WRITE_REPLY.unpack(message)
        if one == 0x09 and two == 0x12 and results_bytes == 16:
            return results
    return decoded(WriteReply, message).results


def decoded(reply_type: type[_Reply], raw: Buffer) -> _Reply:
    """Decode a reply of another process.

    CorruptFrame: not of that type. Never raises a protobuf exception.
    """
    try:
        return reply_type.FromString(raw if type(raw) is bytes else bytes(raw))
    except DecodeError:
        raise CorruptFrame(f"an answer is not a {reply_type.__name__}") from None


def encode_read_reply(epoch: int, results: bytes | bytearray, checksums: bytes) -> bytes:
    if len(results) == 16 and len(checksums) == 4 and epoch:
        return _READ_REPLY.pack(0x09, epoch, 0x12, 16, results, 0x1A, 4, checksums)
    return ReadReply(map_epoch=epoch, results=bytes(results), checksums=checksums).SerializeToString()


def decode_read_reply(message: Buffer) -> tuple[bytes, bytes]:
    """Return (results, checksums). CorruptFrame: not a ReadReply. The fields are not checked."""
    if len(message) == READ_REPLY_BYTES:
        one, _, two, results_bytes, results, three, checksums_bytes, checksums = _READ_REPLY.unpack(message)
        if one == 0x09 and two == 0x12 and results_bytes == 16 and three == 0x1A and checksums_bytes == 4:
            return results, checksums
    try:
        reply = ReadReply.FromString(bytes(message))
    except DecodeError:
        raise CorruptFrame("an answer is not a ReadReply") from None
    return reply.results, reply.checksums


# -- entries -----------------------------------------------------------------------------------------------------------------


def pack_reads(entries: Iterable[tuple[int, int, int, int, int, int]]) -> bytes:
    pack = READ_ENTRY.pack
    return b"".join([pack(*entry) for entry in entries])


def unpack_reads(raw: Buffer, grant_count: int) -> list[tuple[int, int, int, int, int, int]]:
    """Return (inode, index, offset, length, grant, flags) of each read of a request.

    Each read covers whole blocks inside the largest chunk and names a grant of the request. InvalidRequest:
    it does not. TooBig: the reply would not fit into a frame.
    """
    entries = _unpack(READ_ENTRY, raw, InvalidRequest)
    total = 0
    for inode, _, offset, length, grant, _ in entries:
        if (offset | length) & _BLOCK_MASK or not length or offset + length > CHUNK_BYTES_MAX:
            raise InvalidRequest(
                f"a read of {length} bytes at {offset} of inode {inode} is not of whole blocks within a chunk"
            )
        if grant >= grant_count:
            raise InvalidRequest(f"a read names grant {grant} of {grant_count}")
        total += length
    if total > PAYLOAD_BYTES_MAX:
        raise TooBig(f"reads of {total} bytes do not fit into one answer")
    return entries


def pack_read_results(results: Iterable[tuple[int, int, int, int]]) -> bytes:
    pack = READ_RESULT.pack
    return b"".join([pack(*result) for result in results])


def unpack_read_results(
    raw: Buffer, lengths: Iterable[int], payload_bytes: int, checksums: Buffer
) -> list[tuple[int, int, int, int]]:
    """Return (status, flags, length, version) of each read that was requested with `lengths`.

    On return there is one result per length. Each has whole blocks and is not longer than requested; an error
    has length 0. Payload and checksums have the length that the results require. CorruptFrame: otherwise.
    """
    results = _unpack(READ_RESULT, raw, CorruptFrame)
    lengths = list(lengths)
    if len(results) != len(lengths):
        raise CorruptFrame(f"{len(results)} results for {len(lengths)} reads")
    total = 0
    for (status, _, length, _), asked in zip(results, lengths, strict=True):
        if length > asked or length & _BLOCK_MASK or (status and length):
            raise CorruptFrame(f"a result of {length} bytes (status {status}) for a read of {asked}")
        total += length
    if total != payload_bytes or len(checksums) != total // BLOCK_BYTES * 4:
        raise CorruptFrame(
            f"results of {total} bytes with {payload_bytes} bytes of payload, {len(checksums)} of checksums"
        )
    return results


def pack_writes(entries: Iterable[tuple[int, int, int, int, int, int, int, int]]) -> bytes:
    pack = WRITE_ENTRY.pack
    return b"".join([pack(*entry) for entry in entries])


def unpack_writes(
    raw: Buffer, grant_count: int, payload_bytes: int, checksums: Buffer
) -> list[tuple[int, int, int, int, int, int, int, int]]:
    """Return the fields of each write, as in WRITE_ENTRY.

    Each write lies inside the largest chunk and names a grant of the request. Payload and checksums have the
    length that the writes require. InvalidRequest: otherwise.
    """
    entries = _unpack(WRITE_ENTRY, raw, InvalidRequest)
    total = pieces = 0
    for inode, _, _, _, offset, length, grant, _ in entries:
        if not length or offset + length > CHUNK_BYTES_MAX:
            raise InvalidRequest(
                f"a write of {length} bytes at {offset} of inode {inode} is not within a chunk"
            )
        if grant >= grant_count:
            raise InvalidRequest(f"a write names grant {grant} of {grant_count}")
        total += length
        pieces += piece_count(offset, length)
    if total != payload_bytes:
        raise InvalidRequest(f"writes of {total} bytes with {payload_bytes} bytes of payload")
    if len(checksums) != pieces * 4:
        raise InvalidRequest(f"writes of {pieces} pieces with {len(checksums)} bytes of checksums")
    return entries


def piece_count(offset: int, length: int) -> int:
    """Number of pieces into which block boundaries divide a write; each piece has a checksum."""
    return (offset + length - 1) // BLOCK_BYTES - offset // BLOCK_BYTES + 1


def pack_write_results(results: Iterable[tuple[int, int, int, int]]) -> bytes:
    pack = WRITE_RESULT.pack
    return b"".join([pack(*result) for result in results])


def unpack_write_results(raw: Buffer, count: int) -> list[tuple[int, int, int, int]]:
    """Return (status, flags, reserved, version) of each of `count` writes.

    CorruptFrame: there are more or fewer.
    """
    results = _unpack(WRITE_RESULT, raw, CorruptFrame)
    if len(results) != count:
        raise CorruptFrame(f"{len(results)} results for {count} writes")
    return results


def pack_inodes(inodes: Iterable[int]) -> bytes:
    pack = INODE.pack
    return b"".join([pack(inode) for inode in inodes])


def unpack_inodes(raw: Buffer) -> list[int]:
    """Return the inode numbers (u64). InvalidRequest: the length is not a multiple of 8 bytes."""
    if len(raw) % 8:
        raise InvalidRequest(f"{len(raw)} bytes are not whole inode numbers")
    return [number for (number,) in INODE.iter_unpack(raw)]


def _unpack(
    entry: Struct, raw: Buffer, error: type[InvalidRequest] | type[CorruptFrame]
) -> list[tuple[Any, ...]]:
    count, rest = divmod(len(raw), entry.size)
    if rest or not 0 < count <= BATCH_ENTRIES_MAX:
        raise error(
            f"{len(raw)} bytes are no batch of 1 to {BATCH_ENTRIES_MAX} entries of {entry.size} bytes"
        )
    return list(entry.iter_unpack(raw))
