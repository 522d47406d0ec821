"""Index records: round trips, bounded size, and the golden file."""

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvpool.core.checksum import ZERO_BLOCK_CHECKSUM
from nvpool.core.errors import CorruptRecord, WrongFormat
from nvpool.poolmap.chains.protocol import of_old_floor
from nvpool.store.disk import index_records
from nvpool.store.disk.allocator import decode_bitmap, decode_deltas, encode_bitmap, encode_deltas
from nvpool.store.disk.index_records import NO_BLOCKS, Head, IndexSegment, InodeRecord
from nvpool.store.disk.superblock import Superblock, decode_superblock, encode_superblock

GOLDEN = Path(__file__).parents[3] / "golden" / "store-records.json"
ZERO_CRC = ZERO_BLOCK_CHECKSUM.to_bytes(4, "little")
KEY = index_records.segment_key(0x1234567890ABCDEF, 7, 1)


def segment_of(places, first_crc=1000):
    crcs = b"".join(
        (first_crc + at).to_bytes(4, "little") if place else ZERO_CRC for at, place in enumerate(places)
    )
    return IndexSegment(array("Q", places), crcs)


def same(one, other):
    return one.disk == other.disk and one.crcs == other.crcs and one.base == other.base


def test_run_needs_places_and_checksums_of_its_blocks():
    whole, divided = segment_of([7, 8, 9]), segment_of([7, 0, 9])
    assert [whole.run(first, count) for first, count in ((0, 3), (1, 1), (2, 1), (1, 2))] == [7, 8, 9, 8]
    assert not whole.run(2, 2) and not whole.run(3, 1) and not NO_BLOCKS.run(0, 1)
    assert divided.run(2, 1) == 9 and not divided.run(1, 1) and not divided.run(0, 3)
    short = IndexSegment(array("Q", [7, 8, 9]), bytes(11))
    assert short.run(0, 2) == 7 and not short.run(0, 3) and not short.run(2, 1)


heads = st.builds(
    Head,
    st.integers(1, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**16 - 1), st.integers(0, 2**64 - 1)),
        max_size=16,
    ).map(tuple),
    st.integers(1, index_records.TABLE_MAX),
)
places = st.lists(st.one_of(st.just(0), st.integers(1, 2**42 - 65), st.integers(16, 40)), max_size=63).map(
    lambda found: [*found, 99] if found else []
)


@settings(max_examples=150)
@given(places, st.one_of(st.none(), heads), st.integers(0, 63))
def test_segment_record_round_trips_below_one_kibibyte(found, head, fresh):
    raw = index_records.encode_segment(segment_of(found), head, fresh, 64 - fresh)
    segment, its_head = index_records.decode_segment(KEY, raw)
    assert same(segment, segment_of(found)) and its_head == head
    assert index_records.fresh_of(raw) == (fresh, 64 - fresh)
    assert len(raw) < 1024
    state = (head.version, head.cut, head.table) if head else (0, 0, 0)
    assert index_records.state_of(KEY, raw) == (*state, len(found) - found.count(0))


@settings(max_examples=100)
@given(places, st.integers(0, 63), st.lists(st.integers(0, 5000), min_size=1, max_size=64))
def test_replacing_blocks_matches_a_list(found, start, new):
    new = new[: 64 - start]
    crcs = b"".join(at.to_bytes(4, "little") if place else ZERO_CRC for at, place in enumerate(new))
    got = index_records.replaced(segment_of(found), start, array("Q", new), crcs)
    expected = found + [0] * (start + len(new) - len(found))
    expected[start : start + len(new)] = new
    old_crcs = segment_of(found).crcs.ljust(0) + ZERO_CRC * (len(expected) - len(found))
    while expected and not expected[-1]:
        expected.pop()
    assert list(got.disk) == expected
    whole = old_crcs[: start * 4] + crcs + old_crcs[(start + len(new)) * 4 :]
    assert got.crcs == whole[: len(expected) * 4]


def test_one_block_file_needs_few_index_bytes():
    key = index_records.segment_key(1 << 51 | 1_000_000, 0, 0)
    head = Head(1 << 32 | 1, 0, ((1 << 63, 63, 1_000_000),))
    raw = index_records.encode_segment(segment_of([1 << 28]), head, 0, 1)
    assert len(key) + len(raw) <= 9 + 26
    segment, its_head = index_records.decode_segment(key, raw)
    assert same(segment, segment_of([1 << 28])) and its_head == head and index_records.fresh_of(raw) == (0, 1)
    assert index_records.split_segment_key(key) == (1 << 51 | 1_000_000, 0, 0)


@given(st.integers(1, 2**42 - 65), st.integers(1, 64), heads)
def test_small_file_record_round_trips(base, blocks, head):
    segment = segment_of(list(range(base, base + blocks)))
    head = head._replace(requests=head.requests[:1])
    raw = index_records.encode_segment(segment, head, 0, blocks)
    assert (
        raw[0] == 2 | head.table - 1 << 4
        and index_records.extent_count(raw) == 1
        and index_records.fresh_of(raw) == (0, blocks)
    )
    found, its_head = index_records.decode_segment(KEY, raw)
    assert same(found, segment) and its_head == head
    for shorter in (raw[:2], raw[:5], raw[:-1]):
        with pytest.raises(CorruptRecord):
            index_records.decode_segment(KEY, shorter)


def test_keys_of_an_inode_sort_like_its_segments():
    names = [(7, 0, 0), (7, 0, 1), (7, 0, 63), (7, 1, 0), (7, 2**32 - 1, 63), (8, 0, 0), (8, 1, 0)]
    keys = [index_records.segment_key(*name) for name in names]
    assert keys == sorted(keys) and [index_records.split_segment_key(key) for key in keys] == names
    assert keys[4] < index_records.inode_end_key(7) <= keys[5]


def test_damaged_and_newer_records_are_distinguished():
    raw = index_records.encode_segment(segment_of([5, 6, 0, 9]), Head(1, 2), 0, 4)
    with pytest.raises(WrongFormat):
        index_records.decode_segment(KEY, b"\x03" + raw[1:])
    for shorter in (raw[:3], raw[:-1], raw[:10]):
        with pytest.raises(CorruptRecord):
            index_records.decode_segment(KEY, shorter)


def test_stored_formats_are_unchanged():
    head = Head(0x0000000300000005, 9, ((0x1111111111111111, 63, 7), (2, 3, 4)))
    made = {
        "segment key": KEY.hex(),
        "one run with head": index_records.encode_segment(segment_of([100, 101, 102]), head, 1, 2).hex(),
        "holes, high blocks": index_records.encode_segment(segment_of([0, 7, 8, 0, 2**41 + 5]), None).hex(),
        "no blocks, head without cut": index_records.encode_segment(NO_BLOCKS, Head(1)).hex(),
        "small file": index_records.encode_segment(
            segment_of([1000]), Head(3 << 32 | 1, 0, ((9, 63, 300),)), 0, 1
        ).hex(),
        "holes of table 3": index_records.encode_segment(segment_of([7, 0, 8]), Head(1, 2, (), 3)).hex(),
        "small file of table 2": index_records.encode_segment(
            segment_of([1000]), Head(3 << 32 | 1, 0, (), 2), 0, 1
        ).hex(),
        "small key": index_records.segment_key(5, 0, 0).hex(),
        "inode key": index_records.inode_key(5).hex(),
        "inode, split floor": index_records.encode_inode(InodeRecord(7, 0x0000000100000009, 20)).hex(),
        "inode without floor": index_records.encode_inode(InodeRecord(7, 0, 20)).hex(),
        "group key": index_records.group_key(3).hex(),
        "delta key": index_records.delta_key(3).hex(),
        "deltas": encode_deltas(array("I", [5 | 9 << 13, 1 << 31 | 8191]), 8192).hex(),
        "bitmap, first 32 bytes": encode_bitmap(0b1011 | 1 << 100)[:32].hex(),
        "bad key": index_records.bad_key(1, 2, 3).hex(),
        "rejected": index_records.encode_rejected(6, b"record").hex(),
        "flushed": index_records.encode_flushed(8, 10).hex(),
        "superblock, first 96 bytes": encode_superblock(Superblock(2, 25600, bytes(range(16)), 5, "pool"))[
            :96
        ].hex(),
        "superblock, checksum": encode_superblock(Superblock(2, 25600, bytes(range(16)), 5, "pool"))[
            -4:
        ].hex(),
    }
    golden = json.loads(GOLDEN.read_text())
    of_older_builds = {name: golden.pop(name) for name in ("inode",)}
    assert made == golden
    inode = index_records.decode_inode(b"k", bytes.fromhex(of_older_builds["inode"]))
    assert inode == InodeRecord(7, of_old_floor(0x0000000100000009), 20)


def test_inode_record_keeps_its_floor():
    for record in (InodeRecord(7, 5 << 32 | 9, 20), InodeRecord(7, 0, 20), InodeRecord(0, 1 << 32, 0)):
        assert index_records.decode_inode(b"k", index_records.encode_inode(record)) == record


def test_free_map_records_round_trip():
    used = 1 | 1 << 8191 | 0xFF << 77
    assert decode_bitmap(b"k", encode_bitmap(used)) == used
    deltas = array("I", range(24))
    assert decode_deltas(b"k", encode_deltas(deltas, 7)) == deltas
    with pytest.raises(CorruptRecord):
        decode_deltas(b"k", encode_deltas(deltas, 7)[:-4])
    with pytest.raises(WrongFormat):
        decode_bitmap(b"k", b"\x02" + encode_bitmap(used)[1:])


def test_superblock_is_checked():
    superblock = Superblock(2, 25600, bytes(16), 5, "pool")
    raw = encode_superblock(superblock)
    assert len(raw) == 4096 and decode_superblock(raw, "x") == superblock
    with pytest.raises(WrongFormat):
        decode_superblock(bytes(4096), "x")
    with pytest.raises(WrongFormat):
        decode_superblock(raw[:8] + b"\x02" + raw[9:], "x")
    with pytest.raises(CorruptRecord):
        decode_superblock(raw[:100] + b"\x01" + raw[101:], "x")
