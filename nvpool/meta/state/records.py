"""Keys and values of a metadata shard: packed, versioned, part of the format (golden values in tests/golden).

Every key begins with 16 bits, big-endian. For a record of a partition they are partition (12) and kind (3),
so that a partition is one range of keys that can be copied. For a record of the shard itself they are the top
bit and a kind. Every value begins with its version. Decoding an invalid value raises CorruptRecord, never
anything else.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nvpool.core.errors import CorruptRecord
from nvpool.core.ids import COUNTER_BITS, COUNTER_MASK
from nvpool.core.posix.byte_range_locks import EXCLUSIVE, LAST_BYTE, RECORD, SHARED, WHOLE
from nvpool.core.primitives import ByteReader, ByteWriter
from nvpool.core.units import PARTITION_COUNT, SLOTS_PER_SESSION, SYMLINK_BYTES_MAX
from nvpool.poolmap.file_layout import Layout

_in, _out = ByteReader(), ByteWriter()

# -- keys ------------------------------------------------------------------------------------------------------------

INODE, DENTRY, XATTR, ORPHAN, COLLECT, INTENT, LOCK, OTHER = range(8)
"""Kinds of a partition's records. After OTHER a second byte gives the kind: `meta/state/volume_records`."""
SHARD = 0x8000
IDENTITY, BOUNDS, SESSION, SLOT, COUNTS, DAMAGED, HELD, DECIDED, TURN = range(SHARD, SHARD + 9)
PART = SHARD + 32
"""Kinds of the shard's own records. HELD, DECIDED and TURN belong to cross-shard transactions
(`meta/transactions`), PART to striped directories (`meta/state/striped_dirs`)."""

_KIND_BITS = 3
_DENTRY_KEY, _PREFIX = struct.Struct(">HQ"), struct.Struct(">H")
_LOCK_KEY, _PART_KEY = struct.Struct(">BQQQ"), struct.Struct(">HQH")
IDENTITY_KEY, BOUNDS_KEY, COUNTS_KEY = _PREFIX.pack(IDENTITY), _PREFIX.pack(BOUNDS), _PREFIX.pack(COUNTS)
_PART_PREFIX = _PREFIX.pack(PART)
END_OF_KEYS = b"\xff\xff"
_SCATTER_1, _SCATTER_2 = 0x5851F42D4C957, 0x2545F4914F6CD
"""Odd numbers that scatter counters one to one over 51 bits (multiply, fold, multiply). Keys that rise within
each of 4,096 ranges leave B-tree pages half full, because each range ends within a page: 99 bytes of LMDB per
inode. Scattered: 67 bytes."""
_COUNTERS = COUNTER_MASK
_GATHER_1, _GATHER_2 = (
    pow(0x5851F42D4C957, -1, 1 << COUNTER_BITS),
    pow(0x2545F4914F6CD, -1, 1 << COUNTER_BITS),
)
HASH_AT, NAME_AT = 10, 17


def prefix(partition: int, kind: int) -> bytes:
    """First possible key of this kind in a partition. The keys end before prefix(partition, kind + 1)."""
    return _PREFIX.pack(partition << _KIND_BITS | kind)


def kind_of(key: bytes) -> int:
    """Kind of a key: 0..7 for a partition's record, above SHARD for the shard's own."""
    head = key[0] << 8 | key[1]
    return head if head & SHARD else head & (1 << _KIND_BITS) - 1


def partition_of_key(key: bytes) -> int:
    return (key[0] << 8 | key[1]) >> _KIND_BITS


def numbered_key(kind: int, inode: int) -> bytes:
    """9 bytes: 16 bits of partition and kind, 56 bits of the inode's counter, scattered."""
    x = inode * _SCATTER_1 & _COUNTERS
    x = (x ^ x >> 26) * _SCATTER_2 & _COUNTERS
    _out.begin()
    _out.u16_big(inode >> 51 << 3 | kind)
    _out.u56_big(x)
    return _out.take()


def inode_key(inode: int) -> bytes:
    return numbered_key(0, inode)


def inode_of_key(key: bytes) -> int:
    """Inode number in the key of any record except a dentry."""
    x = int.from_bytes(key[2:9], "big") * _GATHER_2 & COUNTER_MASK
    return partition_of_key(key) << COUNTER_BITS | (x ^ x >> 26) * _GATHER_1 & COUNTER_MASK


def dentry_key(partition: int, directory: int, name_hash: bytes, name: bytes) -> bytes:
    """Key of a directory entry: 17 bytes (prefix, directory u64, hash of the name) and the name."""
    _out.begin()
    _out.u16_big(partition << 3 | 1)
    _out.u64_big(directory)
    _out.raw(name_hash)
    _out.raw(name)
    return _out.take()


def dentry_range(partition: int, directory: int, from_hash: bytes = b"") -> tuple[bytes, bytes]:
    head = partition << _KIND_BITS | DENTRY
    return _DENTRY_KEY.pack(head, directory) + from_hash, _DENTRY_KEY.pack(head, directory + 1)


def directory_of_key(key: bytes) -> int:
    return int.from_bytes(key[2:HASH_AT], "big")


def is_numbered(kind: int, key: bytes) -> bool:
    """Whether this is a valid key of this kind with a possible inode number."""
    number = inode_of_key(key)
    return bool(number & COUNTER_MASK) and numbered_key(kind, number) == (
        key[:9] if kind in (XATTR, LOCK) else key
    )


def xattr_key(inode: int, name: bytes) -> bytes:
    return numbered_key(XATTR, inode) + name


def xattr_range(inode: int) -> tuple[bytes, bytes]:
    return numbered_key(XATTR, inode), numbered_key(XATTR, inode) + END_OF_KEYS


def lock_key(inode: int, kind: int, session: int, owner: int, start: int) -> bytes:
    """34 bytes: 9 as for all records of the inode, kind u8, session u64, owner u64, first byte u64."""
    return numbered_key(LOCK, inode) + _LOCK_KEY.pack(kind, session, owner, start)


def lock_of_key(key: bytes) -> tuple[int, int, int, int]:
    """(kind, session, owner, first byte)."""
    if len(key) != 9 + _LOCK_KEY.size:
        raise CorruptRecord(f"the key of a lock has {len(key)} bytes")
    kind, session, owner, start = _LOCK_KEY.unpack_from(key, 9)
    if kind not in (RECORD, WHOLE):
        raise CorruptRecord(f"a lock of kind {kind}")
    return kind, session, owner, start


def session_key(session: int) -> bytes:
    return _DENTRY_KEY.pack(SESSION, session)


def slot_key(session: int, slot: int) -> bytes:
    _out.begin()
    _out.u16_big(0x8003)
    _out.u64_big(session)
    _out.u8(slot)
    return _out.take()


def slot_range(session: int) -> tuple[bytes, bytes]:
    return slot_key(session, 0), slot_key(session, 255)


def session_of_key(key: bytes) -> int:
    return int.from_bytes(key[2:10], "big")


def part_key(directory: int, shard: int) -> bytes:
    """Key of a stripe, 12 bytes: kind, directory u64, shard that stores the stripe u16."""
    return _PART_KEY.pack(PART, directory, shard)


def part_of_key(key: bytes) -> tuple[int, int]:
    """(directory, shard)."""
    if len(key) != _PART_KEY.size:
        raise CorruptRecord(f"the key of a directory's part has {len(key)} bytes")
    return _PART_KEY.unpack(key)[1:]


def part_range(from_directory: int = 0) -> tuple[bytes, bytes]:
    """Key range of all stripes at this shard, from a directory on."""
    return _DENTRY_KEY.pack(PART, from_directory), _PREFIX.pack(PART + 1)


def is_part_key(key: bytes) -> bool:
    return key[:2] == _PART_PREFIX


def damaged_key(key: bytes) -> bytes:
    """Key under which fsck stores the raw value of an unreadable record."""
    return _PREFIX.pack(DAMAGED) + key


# -- inodes ----------------------------------------------------------------------------------------------------------

HAS_XATTRS, SEALED, WIDE, APPEND_ONLY, IMMUTABLE, DIVIDED, TRASHED, HAS_ACL = (1 << bit for bit in range(8))
"""DIVIDED: shards have stripes of the directory (`meta/state/striped_dirs`). TRASHED: the inode is in its
volume's trash (`meta/operations/trash`). HAS_ACL: one of its extended attributes is an access control
list."""
TOUCHED = 1 << 8
"""A write grant was given at some time, so there may be chunks. Flags from here up are not shown to
clients."""
LINKABLE = 1 << 9
"""A file that was created without a name (O_TMPFILE) and may get one."""
SHOWN_FLAGS = 0xFF

_VERSION = 1
_S_IFMT, _S_IFDIR, _S_IFREG, _S_IFLNK = 0o170000, 0o040000, 0o100000, 0o120000
_SIZE, _OWNER, _LINKS, _CTIME, _ATIME = 8, 10, 12, 13, 15
_CUT, _BLOCKS, _RDEV, _LAYOUT, _FLAGS = 1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21
_PARENT, _CHANGE, _TOUCHED, _PUNCHES, _VOLUME = 1 << 22, 1 << 23, 1 << 24, 1 << 25, 1 << 26
_BIRTH, _RESERVED = 27, 1 << 29
_KNOWN = (1 << 30) - 1
_SIZE_MAX = (1 << 63) - 1
_IS_TOUCHED = TOUCHED


def blocks_of(size: int) -> int:
    """Number of 512-byte blocks of a file of this size without holes."""
    return (size + 4095 >> 12) << 3


INODE_FIELDS = (
    "number",
    "mode",
    "links",
    "uid",
    "gid",
    "size",
    "blocks",
    "atime_ns",
    "mtime_ns",
    "ctime_ns",
    "change",
    "cut",
    "rdev",
    "table",
    "chunk_bits",
    "flags",
    "parent",
    "target",
    "punches",
    "volume",
    "reserved",
    "birth_ns",
)
"""Fields of an `Inode`, in the order of `inode_fields`."""


class Inode:
    """One inode record, decoded. Times are ns since 1970, blocks are of 512 bytes.

    `size`: of a directory the number of its entries, of a symlink the length of its target. `parent`: of a
    directory. `change` is raised by each change. `cut`, the truncate number, is raised by each truncation and
    hole that may concern chunks; the last `punches` of its values were holes, so a size reported under any of
    them is still valid. `volume`: inode number of the volume's root, or 0. `reserved`: end of the
    reservations of appends that are not reported yet; no reservation is open unless it is above `size`.
    `birth_ns`: creation time; 0 in records from before it was stored.
    """

    __slots__ = INODE_FIELDS

    def __init__(
        self,
        number: int,
        mode: int,
        links: int = 1,
        uid: int = 0,
        gid: int = 0,
        size: int = 0,
        blocks: int = 0,
        atime_ns: int = 0,
        mtime_ns: int = 0,
        ctime_ns: int = 0,
        change: int = 1,
        cut: int = 0,
        rdev: int = 0,
        table: int = 1,
        chunk_bits: int = 20,
        flags: int = 0,
        parent: int = 0,
        target: bytes = b"",
        punches: int = 0,
        volume: int = 0,
        reserved: int = 0,
        birth_ns: int = 0,
    ) -> None:
        self.number, self.mode, self.links = number, mode, links
        self.uid, self.gid, self.size = uid, gid, size
        self.blocks, self.atime_ns, self.mtime_ns = blocks, atime_ns, mtime_ns
        self.ctime_ns, self.change, self.cut = ctime_ns, change, cut
        self.rdev, self.table, self.chunk_bits = rdev, table, chunk_bits
        self.flags, self.parent, self.target = flags, parent, target
        self.punches, self.volume, self.reserved, self.birth_ns = punches, volume, reserved, birth_ns

    @property
    def is_directory(self) -> bool:
        return self.mode & _S_IFMT == _S_IFDIR

    @property
    def is_file(self) -> bool:
        return self.mode & _S_IFMT == _S_IFREG

    @property
    def is_symlink(self) -> bool:
        return self.mode & _S_IFMT == _S_IFLNK

    @property
    def kind(self) -> int:
        """File type as in a directory entry: the S_IFMT bits, 4 bits."""
        return self.mode >> 12

    @property
    def layout(self) -> Layout:
        return Layout(self.table, self.chunk_bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inode) and all(getattr(self, f) == getattr(other, f) for f in INODE_FIELDS)

    def __repr__(self) -> str:
        return "Inode(" + ", ".join(f"{f}={getattr(self, f)!r}" for f in INODE_FIELDS) + ")"


def encode_inode(i: Inode) -> bytes:
    """Fields with their usual value take no space: a file needs about 30 bytes."""
    out, head = _out, _VERSION
    mtime, size, uid, gid, flags = i.mtime_ns, i.size, i.uid, i.gid, i.flags
    ctime, atime, birth = i.ctime_ns, i.atime_ns, i.birth_ns
    if (
        size < 0
        or i.links < 0
        or i.links > 0xFFFFFFFF
        or flags > 0xFFFF
        or i.table > 0xFF
        or i.chunk_bits > 0xFF
    ):
        raise OverflowError(f"no record can hold inode {i.number}: {i!r}")
    out.begin()
    out.u32(0)  # the head, written last
    out.u16(i.mode)
    out.i64(mtime)
    if i.change > 0xFF:
        head |= _CHANGE
        out.u64(i.change)
    else:
        out.u8(i.change)
    if size > 0xFFFFFFFF:
        head |= 3 << _SIZE
        out.u64(size)
    elif size > 0xFFFF:
        head |= 2 << _SIZE
        out.u32(size)
    elif size:
        head |= 1 << _SIZE
        out.u16(size)
    if uid or gid:
        if uid == gid and uid <= 0xFFFF:
            head |= 3 << _OWNER
            out.u16(uid)
        elif uid <= 0xFFFF and gid <= 0xFFFF:
            head |= 1 << _OWNER
            out.u16(uid)
            out.u16(gid)
        else:
            head |= 2 << _OWNER
            out.u32(uid)
            out.u32(gid)
    if i.links != 1:
        head |= 1 << _LINKS
        out.u32(i.links)
    if ctime != mtime:
        since = ctime - mtime
        if ctime > mtime and since <= 0xFFFFFFFF:
            head |= 1 << _CTIME
            out.u32(since)
        else:
            head |= 2 << _CTIME
            out.i64(ctime)
    if atime != mtime:
        since = mtime - atime
        if mtime > atime and since <= 0xFFFFFFFF:
            head |= 1 << _ATIME
            out.u32(since)
        else:
            head |= 2 << _ATIME
            out.i64(atime)
    if i.cut:
        head |= _CUT
        out.u64(i.cut)
    usual = size + 4095 >> 12 << 3 if i.mode & _S_IFMT == _S_IFREG else 0
    if i.blocks != usual:
        head |= _BLOCKS
        out.u64(i.blocks)
    if i.rdev:
        head |= _RDEV
        out.u32(i.rdev)
    if i.table != 1 or i.chunk_bits != 20:
        head |= _LAYOUT
        out.u8(i.table)
        out.u8(i.chunk_bits)
    if flags & _IS_TOUCHED:
        head |= _TOUCHED
        flags ^= _IS_TOUCHED
    if flags:
        head |= _FLAGS
        out.u16(flags)
    if i.parent:
        head |= _PARENT
        out.u64(i.parent)
    if i.punches:
        head |= _PUNCHES
        out.u64(i.punches)
    if i.volume:
        head |= _VOLUME
        out.u64(i.volume)
    if birth:
        since = mtime - birth
        if mtime == birth:
            head |= 1 << _BIRTH
        elif mtime > birth and since <= 0xFFFFFFFF:
            head |= 2 << _BIRTH
            out.u32(since)
        else:
            head |= 3 << _BIRTH
            out.i64(birth)
    kept = size
    if i.reserved > kept:
        head |= _RESERVED
        out.u64(i.reserved)
    if i.target:
        out.raw(i.target)
    out.put_u32(0, head)
    return out.take()


def decode_inode(number: int, raw: bytes) -> Inode:
    """CorruptRecord: the bytes are no record of an inode."""
    source = _in
    source.open(raw)
    head = source.u32()
    size, owner, ctime, atime = head >> _SIZE & 3, head >> _OWNER & 3, head >> _CTIME & 3, head >> _ATIME & 3
    if source.failed:
        raise CorruptRecord(f"the record of inode {number} has {len(raw)} bytes, too few")
    if head & 0xFF != _VERSION or head & ~_KNOWN or ctime > 2 or atime > 2:
        raise CorruptRecord(f"no inode record begins with {head:#010x}")
    i = Inode.__new__(Inode)
    i.number, i.links, i.table, i.chunk_bits = number, 1, 1, 20
    i.uid = i.gid = i.rdev = i.flags = 0
    i.cut = i.parent = i.punches = i.volume = i.reserved = 0
    i.mode = source.u16()
    mtime = source.i64()
    i.mtime_ns = i.ctime_ns = i.atime_ns = mtime
    i.birth_ns = 0
    i.change = source.u64() if head & _CHANGE else source.u8()
    length = source.u64() if size == 3 else source.u32() if size == 2 else source.u16() if size else 0
    if length > _SIZE_MAX:
        raise CorruptRecord(f"the record of inode {number} contradicts itself")
    i.size = length
    if owner == 3:
        i.uid = i.gid = source.u16()
    elif owner == 2:
        i.uid = source.u32()
        i.gid = source.u32()
    elif owner:
        i.uid = source.u16()
        i.gid = source.u16()
    if head >> _LINKS & 1:
        i.links = source.u32()
    if ctime == 1:
        i.ctime_ns = mtime + source.u32()
    elif ctime:
        i.ctime_ns = source.i64()
    if atime == 1:
        i.atime_ns = mtime - source.u32()
    elif atime:
        i.atime_ns = source.i64()
    if head & _CUT:
        i.cut = source.u64()
    kind = i.mode & _S_IFMT
    if head & _BLOCKS:
        i.blocks = source.u64()
    else:
        i.blocks = length + 4095 >> 12 << 3 if kind == _S_IFREG else 0
    if head & _RDEV:
        i.rdev = source.u32()
    if head & _LAYOUT:
        i.table = source.u8()
        i.chunk_bits = source.u8()
    if head & _FLAGS:
        i.flags = source.u16()
    if head & _PARENT:
        i.parent = source.u64()
    if head & _PUNCHES:
        i.punches = source.u64()
    if head & _VOLUME:
        i.volume = source.u64()
    birth = head >> _BIRTH & 3
    if birth == 1:
        i.birth_ns = mtime
    elif birth == 2:
        i.birth_ns = mtime - source.u32()
    elif birth:
        i.birth_ns = source.i64()
    if head & _RESERVED:
        i.reserved = source.u64()
    if head & _TOUCHED:
        i.flags |= _IS_TOUCHED
    if source.failed:
        raise CorruptRecord(f"the record of inode {number} has {len(raw)} bytes, too few")
    target = i.target = source.rest()
    if not kind or (kind == _S_IFLNK) != (len(target) > 0) or len(target) > SYMLINK_BYTES_MAX:
        raise CorruptRecord(f"the record of inode {number} contradicts itself")
    return i


def inode_fields(number: int, raw: bytes) -> tuple:
    """Fields of an Inode in its order, for callers that read many inodes and change none."""
    i = decode_inode(number, raw)
    return (
        i.number,
        i.mode,
        i.links,
        i.uid,
        i.gid,
        i.size,
        i.blocks,
        i.atime_ns,
        i.mtime_ns,
        i.ctime_ns,
        i.change,
        i.cut,
        i.rdev,
        i.table,
        i.chunk_bits,
        i.flags,
        i.parent,
        i.target,
        i.punches,
        i.volume,
        i.reserved,
        i.birth_ns,
    )


# -- dentries --------------------------------------------------------------------------------------------------------

KINDS = frozenset((1, 2, 4, 6, 8, 10, 12))
"""File types of directory entries: FIFO, character device, directory, block device, file, symlink, socket."""


_KIND_SET = 0x1556  # bits of KINDS


def encode_dentry(partition: int, inode: int, kind: int) -> bytes:
    """Encode a dentry: version (4 bits), kind (4 bits), inode number.

    Of an inode in the dentry's own partition only the significant bytes of its counter are stored, else all
    eight bytes of the number.
    """
    _out.begin()
    _out.u8(16 | kind)
    if inode >> 51 != partition:
        _out.u64_big(inode)
        return _out.take()
    counter = inode & _COUNTERS
    bits = 48
    while bits >= 0 and not counter >> bits:
        bits -= 8
    while bits >= 0:
        _out.u8(counter >> bits)
        bits -= 8
    return _out.take()


def decode_dentry(partition: int, raw: bytes) -> tuple[int, int]:
    """(inode, kind)."""
    number = inode_of_dentry(partition, raw)
    return number, raw[0] & 15


def inode_of_dentry(partition: int, raw: bytes) -> int:
    """Inode number in the value of a directory entry. CorruptRecord: it cannot be read."""
    source = _in
    source.open(raw)
    count = len(raw)
    head = source.u8()
    number = 0
    for _ in range(1, min(count, 9)):
        number = number << 8 | source.u8()
    if (
        head >> 4 != _VERSION
        or not _KIND_SET >> (head & 15) & 1
        or not 2 <= count <= 9
        or not 0 < number <= _SIZE_MAX
    ):
        raise CorruptRecord("a directory entry cannot be read")
    return number if count == 9 else partition << 51 | number


# -- the others ------------------------------------------------------------------------------------------------------


class Intent(NamedTuple):
    """A decided truncation, which every target of the table must carry out.

    The targets truncate the inode to `size` under the truncate number `cut`. With an `end` it is a hole from
    `size` to `end`, of which only targets are notified that may have its chunks.
    """

    cut: int
    size: int
    table: int
    chunk_bits: int
    end: int = 0


class Collect(NamedTuple):
    """A deleted inode whose chunks wait to be removed from the targets of the table."""

    table: int
    chunk_bits: int


class ShardIdentity(NamedTuple):
    """Identity of a shard: its number, the pool's name key, and whether a load was started and not
    finished."""

    shard: int
    name_key: bytes
    loading: bool = False


class IssuedNumbers(NamedTuple):
    """Upper bounds: numbers below them may have been given; a start continues with them."""

    inode: int
    session: int


_INTENT, _HOLE_INTENT, _COLLECT = struct.Struct("<BQQBB"), struct.Struct("<BQQBBQ"), struct.Struct("<BBB")
_IDENTITY = struct.Struct("<BI16sB")
_BOUNDS, _COUNTS, _LOCK = struct.Struct("<BQQ"), struct.Struct("<BQ"), struct.Struct("<BBQI")
ORPHAN_VALUE = bytes((_VERSION,))
# for an inode that was open when it lost its last name: it still counts in its volume
ORPHAN_COUNTED = bytes((_VERSION + 1,))
XATTR_HEAD = bytes((_VERSION,))


def _fields(layout: struct.Struct, raw: bytes, what: str) -> tuple:
    if len(raw) != layout.size or raw[0] != _VERSION:
        raise CorruptRecord(f"{what} cannot be read")
    return layout.unpack_from(raw)[1:]


def encode_intent(intent: Intent) -> bytes:
    return _HOLE_INTENT.pack(_VERSION, *intent) if intent.end else _INTENT.pack(_VERSION, *intent[:4])


def decode_intent(raw: bytes) -> Intent:
    layout = _HOLE_INTENT if len(raw) == _HOLE_INTENT.size else _INTENT
    return Intent(*_fields(layout, raw, "the intent of a truncation"))


def encode_collect(collect: Collect) -> bytes:
    return _COLLECT.pack(_VERSION, *collect)


def decode_collect(raw: bytes) -> Collect:
    return Collect(*_fields(_COLLECT, raw, "an entry of the collect queue"))


def decode_orphan(raw: bytes) -> None:
    if raw not in (ORPHAN_VALUE, ORPHAN_COUNTED):
        raise CorruptRecord("the record of an orphan cannot be read")


def decode_xattr(raw: bytes) -> bytes:
    if raw[:1] != XATTR_HEAD:
        raise CorruptRecord("an extended attribute cannot be read")
    return raw[1:]


def encode_lock(end: int, mode: int, pid: int) -> bytes:
    return _LOCK.pack(_VERSION, mode, end, pid)


def decode_lock(raw: bytes) -> tuple[int, int, int]:
    """(last byte, mode, pid)."""
    mode, end, pid = _fields(_LOCK, raw, "a lock")
    if mode not in (SHARED, EXCLUSIVE) or end > LAST_BYTE:
        raise CorruptRecord(f"a lock of mode {mode} to byte {end}")
    return end, mode, pid


def encode_identity(identity: ShardIdentity) -> bytes:
    return _IDENTITY.pack(_VERSION, *identity)


def decode_identity(raw: bytes) -> ShardIdentity:
    shard, name_key, loading = _fields(_IDENTITY, raw, "the shard's identity")
    return ShardIdentity(shard, name_key, bool(loading))


def encode_bounds(bounds: IssuedNumbers) -> bytes:
    return _BOUNDS.pack(_VERSION, *bounds)


def decode_bounds(raw: bytes) -> IssuedNumbers:
    return IssuedNumbers(*_fields(_BOUNDS, raw, "the bounds of numbers"))


def encode_counts(inodes: int) -> bytes:
    _out.begin()
    _out.u8(1)
    _out.u64(inodes)
    return _out.take()


def decode_counts(raw: bytes) -> int:
    return _fields(_COUNTS, raw, "the count of inodes")[0]


assert COUNTER_BITS == 51 and {kind for kind in range(16) if 0x1556 >> kind & 1} == KINDS
assert PARTITION_COUNT << _KIND_BITS == SHARD and SLOTS_PER_SESSION < 255
