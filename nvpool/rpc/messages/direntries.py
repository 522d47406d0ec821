"""Packed directory entries with attributes: the part of LIST that is encoded for every listed name.

An entry is ENTRY followed by its name; entries follow one another. `DirectoryPage` is a received batch: values that
are needed of all entries are lists, and an Attr is made only for entries that a caller reads one by one.
Encoded by meta/operations/listing, decoded by client and fuse. This module knows nothing of files, leases or
the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from nvpool.core.errors import CorruptFrame
from nvpool.core.grants import GRANT_BYTES
from nvpool.core.primitives import ByteReader
from nvpool.rpc.messages.meta_messages import Attr
from nvpool.rpc.v1.meta_pb2 import DirEntry

ENTRY = struct.Struct("<QQIIIIQQqqqQQIHBBQQBB")
"""Fields of an entry: cursor after it, attributes as in Attr, promised, length of the name.

The attributes are inode, mode, links, uid, gid, size, blocks, atime_ns, mtime_ns, ctime_ns, change, cut,
rdev, table, chunk_bits, flags, parent and punches. `promised`: the reply's lease_ms holds for the inode."""
ENTRY_BYTES = ENTRY.size
_ENTRY_BYTES = ENTRY_BYTES
_in = ByteReader()
_ATTR_FIELDS = (
    "inode",
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
    "punches",
)
_REGULAR = 8
"""S_IFREG >> 12."""
_WORDS_BEFORE_CHANGE = 8
"""Words of 8 bytes between the cursor and the change number."""
_CURSOR, _INODE, _CHANGE, _PROMISED, _NAME_BYTES = 0, 1, 11, 19, 20


class DirectoryEntry(NamedTuple):
    """One entry of a DirectoryPage. `kind` is the S_IFMT bits >> 12."""

    name: bytes
    cursor: int
    inode: int
    kind: int
    attr: Attr


class DirectoryPage:
    """A batch of directory entries, in order.

    `words[n]` is the ENTRY tuple of the n-th entry and `records[n]` its bytes without the name. `promised` is
    the number of entries that come with a lease.
    """

    __slots__ = ("names", "words", "records", "inodes", "changes", "promised")

    def __init__(self, packed: bytes) -> None:
        """Decode packed entries. CorruptFrame: the bytes are not complete entries."""
        self.names: list[bytes] = []
        self.words: list[tuple[int, ...]] = []
        self.records: list[bytes] = []
        names, words, records = self.names, self.words, self.records
        unpack, at, end = ENTRY.unpack, 0, len(packed)
        try:
            while at < end:
                behind = at + ENTRY_BYTES
                record = packed[at:behind]
                found = unpack(record)
                at = behind + found[_NAME_BYTES]
                records.append(record)
                words.append(found)
                names.append(packed[behind:at])
        except struct.error:
            raise CorruptFrame("entries of a directory are cut off") from None
        if at != end:
            raise CorruptFrame("the name of an entry is cut off")
        self.inodes = [found[_INODE] for found in words]
        self.changes = [found[_CHANGE] for found in words]
        self.promised = sum([found[_PROMISED] for found in words])

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, at: int) -> DirectoryEntry:
        found = self.words[at]
        return DirectoryEntry(self.names[at], found[_CURSOR], found[_INODE], found[2] >> 12, self.attr(at))

    def __iter__(self) -> Iterator[DirectoryEntry]:
        return map(self.__getitem__, range(len(self.names)))

    def attr(self, at: int) -> Attr:
        return attr_of(self.records[at])

    def grants(self, packed: bytes) -> list[bytes]:
        """Grant of each entry from ListDirReply.grants, b"" for an entry without one.

        CorruptFrame: the number of grants does not match the entries.
        """
        found, at = [], 0
        for words in self.words:
            behind = at + GRANT_BYTES if words[_PROMISED] and words[2] >> 12 == _REGULAR else at
            found.append(packed[at:behind])
            at = behind
        if at != len(packed):
            raise CorruptFrame("the grants of a listing are not as many as its files")
        return found

    def cursor(self, at: int) -> int:
        """Cursor that continues the listing after the entry."""
        return self.words[at][_CURSOR]

    def is_promised(self, at: int) -> bool:
        return bool(self.words[at][_PROMISED])

    def only(self, places: list[int]) -> DirectoryPage:
        """Batch of the entries at these positions."""
        part = DirectoryPage(b"")
        for name in ("names", "words", "records", "inodes", "changes"):
            of_all = getattr(self, name)
            setattr(part, name, [of_all[at] for at in places])
        part.promised = sum([found[_PROMISED] for found in part.words])
        return part

    def put(self, at: int, attr: Attr) -> None:
        """Replace the attributes of an entry."""
        record = pack_entry(self.cursor(at), attr, self.is_promised(at), b"")
        self.records[at], self.words[at], self.changes[at] = record, ENTRY.unpack(record), attr.change


def pack_entry(cursor: int, attr: Any, promised: bool, name: bytes) -> bytes:
    return ENTRY.pack(cursor, *[getattr(attr, field) for field in _ATTR_FIELDS], promised, len(name)) + name


def packed(entries: Iterable[DirEntry]) -> bytes:
    """Encode the entries that have attributes."""
    return b"".join(
        [
            pack_entry(entry.cursor, entry.attr, entry.promised, entry.name)
            for entry in entries
            if entry.HasField("attr")
        ]
    )


def attr_of(record: bytes) -> Attr:
    """Decode the attributes of a record of a DirectoryPage. CorruptFrame: it is no such record."""
    source = _opened(record)
    attr = Attr.__new__(Attr)
    attr.inode = source.u64()
    attr.mode = source.u32()
    attr.links = source.u32()
    attr.uid = source.u32()
    attr.gid = source.u32()
    attr.size = source.u64()
    attr.blocks = source.u64()
    attr.atime_ns = source.i64()
    attr.mtime_ns = source.i64()
    attr.ctime_ns = source.i64()
    attr.change = source.u64()
    attr.cut = source.u64()
    attr.rdev = source.u32()
    attr.table = source.u16()
    attr.chunk_bits = source.u8()
    attr.flags = source.u8()
    attr.parent = source.u64()
    attr.punches = source.u64()
    attr.volume = attr.birth_ns = 0
    return attr


def change_of(record: bytes) -> int:
    """Decode the change number of a record of a DirectoryPage."""
    source = _opened(record)
    for _ in range(_WORDS_BEFORE_CHANGE):
        source.u64()
    return source.u64()


def _opened(record: bytes) -> ByteReader:
    """The reader of a record, behind its cursor."""
    if len(record) != _ENTRY_BYTES:
        raise CorruptFrame("no record of a directory entry")
    source = _in
    source.open(record)
    source.u64()
    return source


NOTHING_LISTED = DirectoryPage(b"")
