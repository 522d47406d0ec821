"""Stored formats of the metadata service: golden values, round trips, refusal of invalid records."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvpool.core.errors import CorruptRecord, StaleCursor
from nvpool.core.ids import inode_number
from nvpool.meta.state import records, session_records
from nvpool.meta.state.records import Inode
from nvpool.poolmap.shards import partitions

GOLDEN = Path(__file__).parents[3] / "golden"
T = 1_700_000_000_123_456_789
HASH = bytes(range(1, 8))
FILE = inode_number(7, 0x123456)

INODES = {
    "file": Inode(
        FILE,
        0o100644,
        uid=1000,
        gid=100,
        size=4096,
        blocks=8,
        atime_ns=T - 5000,
        mtime_ns=T,
        ctime_ns=T,
        change=2,
        flags=records.TOUCHED,
    ),
    "empty file of root": Inode(FILE, 0o100600, atime_ns=T, mtime_ns=T, ctime_ns=T),
    "large sparse file": Inode(
        FILE,
        0o100644,
        links=3,
        uid=70000,
        gid=70001,
        size=1 << 40,
        blocks=16,
        atime_ns=1,
        mtime_ns=T,
        ctime_ns=T + 77,
        change=1 << 20,
        cut=9,
        table=3,
        chunk_bits=24,
        flags=records.TOUCHED | records.HAS_XATTRS,
    ),
    "file whose owner and group have one number": Inode(
        FILE,
        0o100644,
        uid=1000,
        gid=1000,
        size=70_000,
        blocks=144,
        atime_ns=T - 5000,
        mtime_ns=T,
        ctime_ns=T,
        change=2,
        flags=records.TOUCHED,
    ),
    "root directory": Inode(1, 0o40755, links=2, atime_ns=T, mtime_ns=T, ctime_ns=T, parent=1),
    "wide directory": Inode(
        FILE,
        0o42775,
        links=5,
        gid=5,
        size=70000,
        atime_ns=T,
        mtime_ns=T,
        ctime_ns=T,
        parent=1,
        flags=records.WIDE,
    ),
    "symlink": Inode(FILE, 0o120777, size=6, atime_ns=T, mtime_ns=T, ctime_ns=T, target=b"../a\xff\xfe"),
    "device": Inode(FILE, 0o60660, rdev=0x0801, atime_ns=T, mtime_ns=T, ctime_ns=T),
    "file with holes": Inode(
        FILE,
        0o100644,
        size=1 << 20,
        blocks=8,
        atime_ns=T,
        mtime_ns=T,
        ctime_ns=T,
        cut=9,
        punches=4,
        flags=records.TOUCHED,
    ),
    "file with open appends": Inode(
        FILE,
        0o100644,
        size=100,
        blocks=8,
        atime_ns=T,
        mtime_ns=T,
        ctime_ns=T,
        volume=FILE,
        flags=records.TOUCHED,
        reserved=300,
    ),
    "times before 1970": Inode(FILE, 0o100644, atime_ns=-5, mtime_ns=-7, ctime_ns=T),
    "time of birth: that of the last change": Inode(
        FILE, 0o100644, atime_ns=T, mtime_ns=T, ctime_ns=T, birth_ns=T
    ),
    "time of birth: shortly before": Inode(
        FILE, 0o100644, atime_ns=T, mtime_ns=T, ctime_ns=T, birth_ns=T - 77, volume=9
    ),
    "time of birth: long before": Inode(
        FILE, 0o100644, atime_ns=T, mtime_ns=T, ctime_ns=T, birth_ns=T - (1 << 40)
    ),
    "time of birth: behind a time that was set": Inode(
        FILE, 0o100644, atime_ns=5, mtime_ns=7, ctime_ns=T, birth_ns=T - 1
    ),
    "access control list": Inode(
        FILE,
        0o40750,
        links=2,
        atime_ns=T,
        mtime_ns=T,
        ctime_ns=T,
        parent=1,
        birth_ns=T,
        flags=records.HAS_XATTRS | records.HAS_ACL,
    ),
    "file without a name": Inode(
        FILE,
        0o100600,
        links=0,
        atime_ns=T,
        mtime_ns=T,
        ctime_ns=T,
        birth_ns=T,
        flags=records.TOUCHED | records.LINKABLE,
    ),
}


def golden_values() -> dict[str, str]:
    values = {f"inode: {name}": records.encode_inode(inode).hex() for name, inode in INODES.items()}
    values |= {
        "key: inode": records.inode_key(FILE).hex(),
        "key: dentry": records.dentry_key(7, FILE, HASH, b"name").hex(),
        "key: xattr": records.xattr_key(FILE, b"user.a").hex(),
        "key: orphan": records.numbered_key(records.ORPHAN, FILE).hex(),
        "key: collect": records.numbered_key(records.COLLECT, FILE).hex(),
        "key: intent": records.numbered_key(records.INTENT, FILE).hex(),
        "key: lock": records.lock_key(FILE, 2, 1 << 48 | 5, 0xABCDEF0123456789, 4096).hex(),
        "key: identity": records.IDENTITY_KEY.hex(),
        "key: bounds": records.BOUNDS_KEY.hex(),
        "key: counts": records.COUNTS_KEY.hex(),
        "key: session": records.session_key(1 << 48 | 5).hex(),
        "key: slot": records.slot_key(1 << 48 | 5, 63).hex(),
        "key: damaged": records.damaged_key(b"abc").hex(),
        "dentry: same partition": records.encode_dentry(7, FILE, 8).hex(),
        "dentry: other partition": records.encode_dentry(8, FILE, 4).hex(),
        "intent": records.encode_intent(records.Intent(3, 1 << 33, 2, 20)).hex(),
        "intent of a hole": records.encode_intent(records.Intent(3, 4096, 1, 20, 1 << 33)).hex(),
        "collect": records.encode_collect(records.Collect(2, 22)).hex(),
        "lock": records.encode_lock((1 << 63) - 1, 2, 4711).hex(),
        "session": session_records.encode_session(
            session_records.SessionRecord(bytes(range(16)), T, "mount host 4711")
        ).hex(),
        "slot": session_records.encode_slot(77, FILE, b"answer").hex(),
        "slot with mark": session_records.encode_slot(77, FILE, b"answer", 0xA1B2C3D4).hex(),
        "identity": records.encode_identity(records.ShardIdentity(1, bytes(range(16)))).hex(),
        "bounds": records.encode_bounds(records.IssuedNumbers(65538, 65537)).hex(),
        "counts": records.encode_counts(12345).hex(),
        "orphan": records.ORPHAN_VALUE.hex(),
        "xattr head": records.XATTR_HEAD.hex(),
    }
    return values


def golden_partitions() -> dict:
    name_hash = partitions.name_hasher(bytes(range(16)))
    return {
        f"{directory}/{name}": [
            h.hex(),
            partitions.partition_of_name(directory, False, h),
            partitions.partition_of_name(directory, True, h),
            partitions.partition_of_directory(h),
            partitions.cursor_behind(h, 1),
        ]
        for directory in (1, FILE)
        for name in ("a", "file.txt", "é", "x" * 255)
        for h in [name_hash(directory, name.encode())]
    }


def test_keys_and_records_match_the_golden_file():
    assert golden_values() == json.loads((GOLDEN / "meta_records.json").read_text())


def test_partitions_and_name_hashes_match_the_golden_file():
    assert golden_partitions() == json.loads((GOLDEN / "partition.json").read_text())


def test_older_record_with_equal_owner_and_group_is_read():
    inode = INODES["file whose owner and group have one number"]
    older = "01860001a48115cd853dfe9c97170270110100e803e80388130000"
    assert records.decode_inode(FILE, bytes.fromhex(older)) == inode
    assert len(records.encode_inode(inode)) == len(older) // 2 - 2


@pytest.mark.parametrize("name", INODES)
def test_inode_round_trips(name):
    inode = INODES[name]
    assert records.decode_inode(inode.number, records.encode_inode(inode)) == inode


u64, s64 = st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)


@given(
    st.builds(
        Inode,
        st.integers(1, 2**63 - 1),
        st.sampled_from([0o100644, 0o40755, 0o10600]),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**63 - 1),
        u64,
        s64,
        s64,
        s64,
        u64,
        u64,
        st.integers(0, 2**32 - 1),
        st.integers(0, 255),
        st.integers(0, 255),
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**63 - 1),
        st.just(b""),
        u64,
        u64,
        st.just(0),
        s64,
    )
)
def test_random_inode_round_trips(inode):
    assert records.decode_inode(inode.number, records.encode_inode(inode)) == inode


@given(st.builds(records.Intent, u64, u64, st.integers(0, 255), st.integers(0, 255), u64))
def test_random_intent_round_trips(intent):
    assert records.decode_intent(records.encode_intent(intent)) == intent


@given(st.binary(max_size=80))
def test_invalid_record_bytes_are_reported_as_corrupt(raw):
    for decode in (
        lambda: records.decode_inode(1, raw),
        lambda: records.decode_dentry(1, raw),
        lambda: records.decode_intent(raw),
        lambda: records.decode_collect(raw),
        lambda: session_records.decode_session(raw),
        lambda: session_records.decode_slot(raw),
        lambda: records.decode_identity(raw),
        lambda: records.decode_bounds(raw),
        lambda: records.decode_lock(raw),
        lambda: records.lock_of_key(raw),
        lambda: records.decode_counts(raw),
        lambda: records.decode_xattr(raw),
        lambda: records.decode_orphan(raw),
    ):
        try:
            decode()
        except CorruptRecord:
            pass


@given(
    st.integers(0, 4095),
    st.integers(1, 2**51 - 1),
    st.integers(0, 4095),
    st.sampled_from(sorted(records.KINDS)),
)
def test_dentry_names_its_inode(owner, counter, home, kind):
    inode = inode_number(owner, counter)
    assert records.decode_dentry(home, records.encode_dentry(home, inode, kind)) == (inode, kind)


@given(st.integers(0, 4095), st.integers(1, 2**51 - 1))
def test_every_key_of_a_partition_lies_in_its_range(owner, counter):
    inode = inode_number(owner, counter)
    keys = [
        records.inode_key(inode),
        records.dentry_key(owner, inode, HASH, b"n" * 255),
        records.xattr_key(inode, b"user.x"),
        *(records.numbered_key(kind, inode) for kind in (records.ORPHAN, records.COLLECT, records.INTENT)),
        records.lock_key(inode, 2, 2**64 - 1, 2**64 - 1, 2**63 - 1),
    ]
    for key in keys:
        assert records.prefix(owner, 0) <= key < records.prefix(owner + 1, 0) and len(key) <= 511
        assert records.partition_of_key(key) == owner
    assert {records.inode_of_key(key) for key in keys if records.kind_of(key) != records.DENTRY} == {inode}
    assert keys == sorted(keys)
    assert all(key < records.IDENTITY_KEY < records.END_OF_KEYS for key in keys)


@given(st.binary(min_size=7, max_size=7).filter(any), st.integers(1, 300))
def test_cursor_holds_hash_and_count(name_hash, equal):
    cursor = partitions.cursor_behind(name_hash, equal)
    assert 4 <= cursor < 1 << 63
    again, count = partitions.cursor_parts(cursor)
    if equal < partitions.EQUAL_MAX:
        assert (again, count) == (name_hash, equal)
    elif name_hash != b"\xff" * 7:
        assert again > name_hash and count == 0


@pytest.mark.parametrize("cursor", [1, 3, 127, 1 << 63, (1 << 64) - 1])
def test_invalid_cursor_is_refused(cursor):
    with pytest.raises(StaleCursor):
        partitions.cursor_parts(cursor)
