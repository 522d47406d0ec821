"""Encoding of replies and notifications to the kernel. No I/O.

Each function returns a complete message with its header. Exceptions are `data`, `ioctl` and `store`: their
payload follows in the same writev. An `attr` is any object with the fields of the metadata service's Attr.
The time for which the kernel may cache something is (seconds, nanoseconds). `parse` and `read` decode
replies, for tests and simulated kernels.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Container, Sequence

from nvpool.fuse.protocol.constants import EXPIRE_ONLY, Notice
from nvpool.rpc.messages.direntries import DirectoryPage

_HEADER = "=IiQ"
HEADER = struct.Struct(_HEADER)
"""len, error (negative errno; in a notification its code), unique (0: a notification)"""
HEADER_BYTES = HEADER.size

BLOCK_BYTES = 64 << 10
"""st_blksize: the buffer that stdio and Python allocate for each open file; copying tools use more anyway."""

_ATTR = "QQQqqqIIIIIIIIII"
_ENTRY = "QQQQII" + _ATTR
_ATTR_OUT = struct.Struct(_HEADER + "QI4x" + _ATTR)
_ENTRY_OUT = struct.Struct(_HEADER + _ENTRY)
_OPEN_OUT = struct.Struct(_HEADER + "QIi")
_CREATE_OUT = struct.Struct(_HEADER + _ENTRY + "QIi")
_WRITE_OUT = struct.Struct(_HEADER + "I4x")
_STATFS_OUT = struct.Struct(_HEADER + "QQQQQIII4x24x")
_LOCK_OUT = struct.Struct(_HEADER + "QQII")
_NUMBER_OUT = struct.Struct(_HEADER + "Q")
_INIT_OUT = struct.Struct(_HEADER + "IIIIHHIIHHIIH22x")
_IOCTL_OUT = struct.Struct(_HEADER + "iIII")
_STATX_OUT = struct.Struct(_HEADER + "QII16x" + "IIQIIIH2xQQQQ" + "qI4x" * 4 + "IIII112x")
_DIRENT = struct.Struct("=QQII")
_DIRENT_PLUS = struct.Struct("=" + _ENTRY + "QQII")
DIRENT_BYTES, DIRENT_PLUS_BYTES = _DIRENT.size, _DIRENT_PLUS.size
_PACK_PLUS = _DIRENT_PLUS.pack_into

Times = tuple[int, int]
NOT_KEPT: Times = (0, 0)
SECOND_NS = 1_000_000_000


def seconds(value: float) -> Times:
    """A time for which the kernel may cache something, from seconds."""
    whole = int(value)
    return whole, min(int((value - whole) * SECOND_NS), SECOND_NS - 1)


def _attr_words(attr) -> tuple:
    atime, mtime, ctime = attr.atime_ns, attr.mtime_ns, attr.ctime_ns
    atime_s, mtime_s, ctime_s = atime // SECOND_NS, mtime // SECOND_NS, ctime // SECOND_NS
    return (
        attr.inode,
        attr.size,
        attr.blocks,
        atime_s,
        mtime_s,
        ctime_s,
        atime - atime_s * SECOND_NS,
        mtime - mtime_s * SECOND_NS,
        ctime - ctime_s * SECOND_NS,
        attr.mode,
        attr.links,
        attr.uid,
        attr.gid,
        attr.rdev,
        BLOCK_BYTES,
        0,
    )


def data(unique: int, length: int) -> bytes:
    """Header before `length` bytes of data."""
    return HEADER.pack(HEADER_BYTES + length, 0, unique)


def done(unique: int) -> bytes:
    return HEADER.pack(HEADER_BYTES, 0, unique)


def failed(unique: int, errno: int) -> bytes:
    return HEADER.pack(HEADER_BYTES, -errno, unique)


def attributes(unique: int, attr, keep: Times) -> bytes:
    """Reply to GETATTR and SETATTR."""
    return _ATTR_OUT.pack(_ATTR_OUT.size, 0, unique, *keep, *_attr_words(attr))


def entry(unique: int, attr, keep_entry: Times, keep_attr: Times) -> bytes:
    """Reply to LOOKUP and to the requests that create names."""
    return _ENTRY_OUT.pack(
        _ENTRY_OUT.size,
        0,
        unique,
        attr.inode,
        0,
        keep_entry[0],
        keep_attr[0],
        keep_entry[1],
        keep_attr[1],
        *_attr_words(attr),
    )


_NOTHING = (0,) * 16


def absent(unique: int, keep_entry: Times) -> bytes:
    """Reply to LOOKUP: the name does not exist, and the kernel may cache that."""
    return _ENTRY_OUT.pack(_ENTRY_OUT.size, 0, unique, 0, 0, keep_entry[0], 0, keep_entry[1], 0, *_NOTHING)


def opened(unique: int, handle: int, flags: int, backing: int = 0) -> bytes:
    """Reply to OPEN and OPENDIR, with flags of Opening."""
    return _OPEN_OUT.pack(_OPEN_OUT.size, 0, unique, handle, flags, backing)


def created(unique: int, attr, keep_entry: Times, keep_attr: Times, handle: int, flags: int) -> bytes:
    """Reply to CREATE and TMPFILE."""
    return _CREATE_OUT.pack(
        _CREATE_OUT.size,
        0,
        unique,
        attr.inode,
        0,
        keep_entry[0],
        keep_attr[0],
        keep_entry[1],
        keep_attr[1],
        *_attr_words(attr),
        handle,
        flags,
        0,
    )


def count(unique: int, size: int) -> bytes:
    """Reply with a 32-bit number.

    To WRITE and COPY_FILE_RANGE: bytes taken; to GETXATTR and LISTXATTR of size 0: bytes needed; to POLL:
    events.
    """
    return _WRITE_OUT.pack(_WRITE_OUT.size, 0, unique, size)


def number(unique: int, value: int) -> bytes:
    """Reply to LSEEK: an offset; to BMAP: a block; to COPY_FILE_RANGE_64: bytes copied."""
    return _NUMBER_OUT.pack(_NUMBER_OUT.size, 0, unique, value)


def lock(unique: int, start: int, end: int, kind: int, pid: int) -> bytes:
    """Reply to GETLK: the conflicting lock, or one of kind F_UNLCK."""
    return _LOCK_OUT.pack(_LOCK_OUT.size, 0, unique, start, end, kind, pid)


def space(
    unique: int,
    blocks: int,
    free: int,
    available: int,
    files: int,
    files_free: int,
    block_bytes: int,
    name_bytes_max: int,
) -> bytes:
    """Reply to STATFS."""
    return _STATFS_OUT.pack(
        _STATFS_OUT.size,
        0,
        unique,
        blocks,
        free,
        available,
        files,
        files_free,
        block_bytes,
        name_bytes_max,
        block_bytes,
    )


def ioctl(unique: int, result: int, flags: int = 0, in_iovs: int = 0, out_iovs: int = 0) -> bytes:
    """Reply to IOCTL, before the bytes that it returns; those are part of the length, see `data`."""
    return _IOCTL_OUT.pack(_IOCTL_OUT.size, 0, unique, result, flags, in_iovs, out_iovs)


def init(
    unique: int,
    *,
    minor: int,
    max_readahead: int,
    flags: int,
    max_background: int,
    congestion_threshold: int,
    max_write: int,
    max_pages: int,
    map_alignment: int = 0,
    max_stack_depth: int = 0,
    request_timeout_s: int = 0,
) -> bytes:
    """Reply to INIT. `flags` are all 64. It declares that times have a resolution of one nanosecond."""
    return _INIT_OUT.pack(
        _INIT_OUT.size,
        0,
        unique,
        7,
        minor,
        max_readahead,
        flags & 0xFFFFFFFF,
        max_background,
        congestion_threshold,
        max_write,
        1,
        max_pages,
        map_alignment,
        flags >> 32,
        max_stack_depth,
        request_timeout_s,
    )


STATX_BASIC, STATX_BTIME = 0x7FF, 0x800


def statx(unique: int, attr, keep: Times, birth_ns: int = 0) -> bytes:
    """Reply to STATX; without a birth time if that is 0."""
    times = (
        word
        for ns in (attr.atime_ns, birth_ns, attr.ctime_ns, attr.mtime_ns)
        for word in divmod(ns, SECOND_NS)
    )
    mask = STATX_BASIC | STATX_BTIME if birth_ns else STATX_BASIC
    major, minor = attr.rdev >> 8 & 0xFFF, attr.rdev & 0xFF | attr.rdev >> 12 & 0xFFF00
    return _STATX_OUT.pack(
        _STATX_OUT.size,
        0,
        unique,
        *keep,
        0,
        mask,
        BLOCK_BYTES,
        0,
        attr.links,
        attr.uid,
        attr.gid,
        attr.mode,
        attr.inode,
        attr.size,
        attr.blocks,
        0,
        *times,
        major,
        minor,
        0,
        0,
    )


# -- listings ----------------------------------------------------------------------------------------------------------------


class ReaddirReply:
    """Reply to READDIR (`plus` False) or READDIRPLUS in at most `room` bytes."""

    __slots__ = ("_buffer", "_at", "_times", "_plus")

    def __init__(self, room: int, plus: bool, keep_entry: Times, keep_attr: Times) -> None:
        self._buffer = bytearray(room)
        self._at = 0
        self._plus = plus
        self._times = keep_entry[0], keep_attr[0], keep_entry[1], keep_attr[1]

    def add(self, name: bytes, attr, cursor: int) -> bool:
        """Add an entry; False: there is no space left for it.

        `cursor` is the position after the entry. '.' and '..' do not count as looked up.
        """
        if not self._plus or name in _DOTS:
            return self._add_name(name, cursor, attr.inode, attr.mode)
        words = (
            cursor,
            attr.inode,
            attr.mode,
            attr.links,
            attr.uid,
            attr.gid,
            attr.size,
            attr.blocks,
            attr.atime_ns,
            attr.mtime_ns,
            attr.ctime_ns,
            0,
            0,
            attr.rdev,
        )
        return self._add_looked_up((name,), (words,), 0, 1) == 1

    def add_all(self, listed: DirectoryPage, first: int, unknown: Container[int]) -> int:
        """Add each entry from the `first` on, as `add` does.

        Returns the index of the first entry that did not fit, or of the end.

        For inodes that are `unknown` the kernel gets the names only, and looks them up itself.
        """
        names, words, length = listed.names, listed.words, len(listed)
        if self._plus and not unknown:
            return self._add_looked_up(names, words, first, length)
        for at in range(first, length):
            cursor, inode, mode = words[at][:3]
            if self._plus and inode not in unknown:
                if self._add_looked_up(names, words, at, at + 1) == at:
                    return at
            elif not self._add_name(names[at], cursor, inode, mode):
                return at
        return length

    def _add_name(self, name: bytes, cursor: int, inode: int, mode: int) -> bool:
        at, plus = self._at, self._plus
        begin = (DIRENT_PLUS_BYTES if plus else DIRENT_BYTES) + at
        end = begin + len(name)
        after = end + 7 & ~7
        if after > len(self._buffer):
            return False
        if plus:
            _PACK_PLUS(self._buffer, at, *_NOWHERE, inode, cursor, len(name), mode >> 12 & 15)
        else:
            _DIRENT.pack_into(self._buffer, at, inode, cursor, len(name), mode >> 12 & 15)
        self._buffer[begin:end] = name
        self._at = after
        return True

    def _add_looked_up(self, names: Sequence[bytes], words: Sequence[tuple], first: int, until: int) -> int:
        """Add entries with attributes; `words` as in a DirectoryPage.

        Contains the code of _attr_words, written out for speed: listings of millions of entries use it.
        """
        pack, second, block_bytes, head = _PACK_PLUS, SECOND_NS, BLOCK_BYTES, DIRENT_PLUS_BYTES
        entry_s, attr_s, entry_ns, attr_ns = self._times
        buffer, after = self._buffer, self._at
        room = len(buffer)
        for at in range(first, until):
            name = names[at]
            begin = after + head
            end = begin + len(name)
            if end + 7 & ~7 > room:
                until = at
                break
            cursor, inode, mode, links, uid, gid, size, blocks, atime, mtime, ctime, _, _, rdev = words[at][
                :14
            ]
            atime_s, mtime_s, ctime_s = atime // second, mtime // second, ctime // second
            pack(
                buffer,
                after,
                inode,
                0,
                entry_s,
                attr_s,
                entry_ns,
                attr_ns,
                inode,
                size,
                blocks,
                atime_s,
                mtime_s,
                ctime_s,
                atime - atime_s * second,
                mtime - mtime_s * second,
                ctime - ctime_s * second,
                mode,
                links,
                uid,
                gid,
                rdev,
                block_bytes,
                0,
                inode,
                cursor,
                len(name),
                mode >> 12 & 15,
            )
            buffer[begin:end] = name
            after = end + 7 & ~7
        self._at = after
        return until

    def taken(self) -> memoryview:
        return memoryview(self._buffer)[: self._at]


_DOTS = frozenset((b".", b".."))
_NOWHERE = (0,) * 22


# -- notifications -----------------------------------------------------------------------------------------------------------


def _notice(code: Notice, body: bytes) -> bytes:
    return HEADER.pack(HEADER_BYTES + len(body), code, 0) + body


def poll_wakeup(kh: int) -> bytes:
    return _notice(Notice.POLL, struct.pack("=Q", kh))


def inval_inode(inode: int, offset: int, length: int) -> bytes:
    """Make the kernel query the attributes again.

    Offset 0 and length 0 drop all pages, a negative offset drops none.
    """
    return _notice(Notice.INVAL_INODE, struct.pack("=Qqq", inode, offset, length))


def inval_entry(parent: int, name: bytes, *, expire_only: bool = False) -> bytes:
    """Make the kernel look the name up again."""
    return _notice(
        Notice.INVAL_ENTRY, struct.pack("=QII", parent, len(name), EXPIRE_ONLY * expire_only) + name + b"\0"
    )


def delete(parent: int, child: int, name: bytes) -> bytes:
    """Report that the name is gone; the kernel notifies watchers."""
    return _notice(Notice.DELETE, struct.pack("=QQI4x", parent, child, len(name)) + name + b"\0")


def store(inode: int, offset: int, length: int) -> bytes:
    """Header before `length` bytes for the kernel's pages; those are part of the length."""
    body = struct.pack("=QQI4x", inode, offset, length)
    return HEADER.pack(HEADER_BYTES + len(body) + length, Notice.STORE, 0) + body


def retrieve(unique: int, inode: int, offset: int, size: int) -> bytes:
    """Make the kernel send its pages in a NOTIFY_REPLY with this unique."""
    return _notice(Notice.RETRIEVE, struct.pack("=QQQI4x", unique, inode, offset, size))


def resend() -> bytes:
    """Make the kernel resend unanswered requests, with RESENT in `unique`. Needs HAS_RESEND."""
    return _notice(Notice.RESEND, b"")


def inc_epoch() -> bytes:
    """Make the kernel look all names up again."""
    return _notice(Notice.INC_EPOCH, b"")


def prune(inodes: list[int]) -> bytes:
    """Make the kernel drop those of the inodes that are not in use."""
    return _notice(Notice.PRUNE, struct.pack(f"=I4x8x{len(inodes)}Q", len(inodes), *inodes))


# -- decoding ----------------------------------------------------------------------------------------------------------------


def parse(answer: bytes) -> tuple[int, int, bytes]:
    """Decode a reply: (unique, error, remaining bytes). ValueError: the declared length is wrong."""
    if len(answer) < HEADER_BYTES:
        raise ValueError(f"{len(answer)} bytes are no answer")
    length, error, unique = HEADER.unpack_from(answer)
    if length != len(answer):
        raise ValueError(f"an answer of {len(answer)} bytes says that it has {length}")
    return unique, error, answer[HEADER_BYTES:]


_ATTR_NAMES = (
    "ino size blocks atime mtime ctime atimensec mtimensec ctimensec mode nlink uid gid rdev blksize flags"
)
_ENTRY_NAMES = f"nodeid generation entry_valid attr_valid entry_valid_nsec attr_valid_nsec {_ATTR_NAMES}"


def _shape(title: str, whole: struct.Struct, names: str):
    return namedtuple(title, names), struct.Struct("=" + whole.format[len(_HEADER) :])


SHAPES = {
    "attr": _shape("AttrOut", _ATTR_OUT, f"attr_valid attr_valid_nsec {_ATTR_NAMES}"),
    "entry": _shape("EntryOut", _ENTRY_OUT, _ENTRY_NAMES),
    "open": _shape("OpenOut", _OPEN_OUT, "fh open_flags backing_id"),
    "create": _shape("CreateOut", _CREATE_OUT, f"{_ENTRY_NAMES} fh open_flags backing_id"),
    "count": _shape("CountOut", _WRITE_OUT, "size"),
    "number": _shape("NumberOut", _NUMBER_OUT, "value"),
    "lock": _shape("LockOut", _LOCK_OUT, "start end type pid"),
    "space": _shape("SpaceOut", _STATFS_OUT, "blocks bfree bavail files ffree bsize namelen frsize"),
    "ioctl": _shape("IoctlOut", _IOCTL_OUT, "result flags in_iovs out_iovs"),
    "init": _shape(
        "InitOut",
        _INIT_OUT,
        "major minor max_readahead flags max_background congestion_threshold max_write "
        "time_gran max_pages map_alignment flags2 max_stack_depth request_timeout",
    ),
    "statx": _shape(
        "StatxOut",
        _STATX_OUT,
        "attr_valid attr_valid_nsec flags mask blksize attributes nlink uid gid mode ino "
        "size blocks attributes_mask atime atimensec btime btimensec ctime ctimensec mtime mtimensec rdev_major "
        "rdev_minor dev_major dev_minor",
    ),
}


def read(shape: str, body: bytes):
    """The fields of a reply's body. struct.error: its length is wrong."""
    made, form = SHAPES[shape]
    return made(*form.unpack(body))


def read_listing(body: bytes, plus: bool) -> list[tuple[bytes, int, int, int, tuple]]:
    """Decode a listing: (name, inode, cursor, type, fields of the entry) of each entry.

    ValueError: the records do not fit the body.
    """
    found, at = [], 0
    form = _DIRENT_PLUS if plus else _DIRENT
    while at < len(body):
        if at + form.size > len(body):
            raise ValueError("a record is cut off")
        fields = form.unpack_from(body, at)
        inode, cursor, length, kind = fields[-4:]
        begin = at + form.size
        if begin + length > len(body):
            raise ValueError("a name is cut off")
        found.append((bytes(body[begin : begin + length]), inode, cursor, kind, fields[:-4]))
        at = begin + length + 7 & ~7
    return found
