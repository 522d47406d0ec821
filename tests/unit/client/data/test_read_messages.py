"""Messages of reads: the bytes of protobuf, and a check of each block of a reply."""

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.client.data.read_messages import ReadRequest, ReadResults, encode_read
from nvpool.core.checksum import block_checksums
from nvpool.core.primitives import ReceivedReply
from nvpool.core.units import BLOCK_BYTES, KIB
from nvpool.rpc.messages.read_write_codec import encode_read_request
from nvpool.rpc.v1 import data_pb2

GRANTS = [b"a" * 60, b"b" * 60, b"", b"c" * 70]
numbers32, numbers64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
reads = st.tuples(
    numbers64, numbers32, numbers32, st.integers(0, 2**24), st.sampled_from(GRANTS), st.integers(0, 65535)
)


@settings(max_examples=200, deadline=None)
@given(numbers64, st.integers(0, 300), st.lists(reads, min_size=1, max_size=5), st.booleans())
def test_request_has_the_bytes_of_protobuf(epoch, target, entries, verify):
    request, places, packed = ReadRequest(), {}, b""
    for _ in range(2):  # it can be used again
        request.begin(epoch, target)
        for entry in entries:
            request.add(*entry)
    for inode, index, offset, length, grant, flags in entries:
        place = places.setdefault(grant, len(places))
        packed += struct.pack("<QIIIHH", inode, index, offset, length, place, flags)
    expected = data_pb2.ReadRequest(
        map_epoch=epoch, target=target, grants=list(places), reads=packed, verify=verify
    )
    request.close(verify)
    assert request.message() == expected.SerializeToString()
    assert (request.count, request.byte_count) == (len(entries), sum(entry[3] for entry in entries))


def test_single_read_has_the_bytes_that_stores_expect():
    packed = struct.pack("<QIIIHH", 7, 8, 9 * BLOCK_BYTES, BLOCK_BYTES, 0, 1)
    assert encode_read(5, 3, 7, 8, 9 * BLOCK_BYTES, BLOCK_BYTES, GRANTS[0], 1) == encode_read_request(
        5, 3, [GRANTS[0]], packed
    )


def reply_to(parts, statuses=None, more=b""):
    """Message and payload of a reply with these blocks."""
    statuses = statuses or [0] * len(parts)
    results = b"".join(
        struct.pack("<HHIQ", status, 1, len(part), 9) for status, part in zip(statuses, parts, strict=True)
    )
    payload = b"".join(parts)
    message = data_pb2.ReadReply(map_epoch=4, results=results, checksums=block_checksums(payload))
    return message.SerializeToString() + more, payload


def results_of(message, payload, lengths):
    """(good, status, length, first) of each read; None: the reply does not fit."""
    reply, results = ReceivedReply(), ReadResults()
    reply.open(message, payload)
    try:
        if not results.open(reply, len(lengths)):
            return None
        return [(results.step(length), results.status, results.length, results.first) for length in lengths]
    finally:
        results.close()
        reply.close()


def parts_of(seed, count):
    chance = random.Random(seed)
    return [chance.randbytes(BLOCK_BYTES * chance.choice([1, 1, 2, 7, 32])) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_good_reads_are_found_in_order(count):
    parts = parts_of(count, count)
    lengths = [len(part) for part in parts]
    found = results_of(*reply_to(parts), lengths)
    assert found == [(True, 0, len(part), sum(lengths[:at])) for at, part in enumerate(parts)]
    assert results_of(*reply_to(parts, more=b"\x20\x01"), lengths) == found, "an unknown field"


@pytest.mark.parametrize("count", [1, 3])
def test_changed_block_spoils_its_read_only(count):
    parts = parts_of(1, count)
    message, payload = reply_to(parts)
    lengths = [len(part) for part in parts]
    for at in range(0, len(payload), 1777):
        changed = bytearray(payload)
        changed[at] ^= 8
        found = results_of(message, changed, lengths)
        assert [good for good, *_ in found] == [
            not first <= at < first + length for _, _, length, first in found
        ]


def test_hole_is_shorter_and_error_has_no_bytes():
    parts = [bytes(BLOCK_BYTES), b"", b"", b"x" * BLOCK_BYTES]
    found = results_of(
        *reply_to(parts, [0, 0, 7, 0]), [2 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES]
    )
    assert [one[:3] for one in found] == [
        (True, 0, BLOCK_BYTES),
        (True, 0, 0),
        (True, 7, 0),
        (True, 0, BLOCK_BYTES),
    ]


def test_longer_or_missing_bytes_are_not_good():
    part = b"x" * 2 * BLOCK_BYTES
    message, payload = reply_to([part])
    assert [one[0] for one in results_of(message, payload, [BLOCK_BYTES])] == [False]
    for cut in (payload[:-1], payload[:BLOCK_BYTES], b""):
        assert [one[0] for one in results_of(message, cut, [len(part)])] == [False]
    message, payload = reply_to([part, part])
    assert [one[0] for one in results_of(message, payload[:-BLOCK_BYTES], [len(part)] * 2)] == [True, False]


def test_reply_that_does_not_fit_is_refused():
    parts = [b"x" * BLOCK_BYTES] * 2
    message, payload = reply_to(parts)
    for count in (0, 1, 3):
        assert results_of(message, payload, [BLOCK_BYTES] * count) is None
    for broken in (message[:-1], message[:20], b"\xff" * 9):
        assert results_of(broken, payload, [BLOCK_BYTES] * 2) is None


def test_any_changed_byte_of_a_message_gives_good_bytes_or_none():
    part = random.Random(2).randbytes(BLOCK_BYTES)
    message, payload = reply_to([part])
    for at in range(len(message)):
        for bit in range(8):
            changed = message[:at] + bytes([message[at] ^ 1 << bit]) + message[at + 1 :]
            found = results_of(changed, payload, [BLOCK_BYTES])
            if found is not None and found[0][0] and not found[0][1]:
                _, _, length, first = found[0]
                assert payload[first : first + length] in (part, b"")


def test_whole_batch_is_checked_together():
    parts = [random.Random(seed).randbytes(4 * KIB) for seed in range(20)]
    lengths = [len(part) for part in parts]

    def are_whole(message, payload, lengths):
        reply, results = ReceivedReply(), ReadResults()
        reply.open(message, payload)
        return results.open(reply, len(lengths)) and results.are_whole(lengths)

    message, payload = reply_to(parts)
    assert are_whole(message, payload, lengths)
    assert not are_whole(message, payload[:-1] + b"?", lengths)
    assert not are_whole(message, payload, [2 * BLOCK_BYTES, 0, *lengths[2:]])
    assert not are_whole(*reply_to(parts, [0] * 19 + [3]), lengths)
    assert not are_whole(*reply_to([*parts[:-1], b""]), lengths)
    assert are_whole(*reply_to(parts[:1]), lengths[:1])
