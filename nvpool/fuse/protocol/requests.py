"""Decoding and encoding of the kernel's requests. No I/O.

`decode` handles any request; `decode_read` and the like handle the frequent ones, with one unpacking and no
objects but the numbers. All check every length. A request that is shorter or longer than it declares, or has
a name without an end, raises Malformed, which carries `unique` so that an error can be sent as the reply.
`encode` is the inverse, for tests and simulated kernels. Fields are named as in linux/fuse.h.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from typing import Any, NamedTuple

from nvpool.fuse.protocol.constants import OP_COUNT, Op

_HEADER = "=IIQQIIIHH"
HEADER = struct.Struct(_HEADER)
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen (in units of 8 bytes, at the end), padding"""
HEADER_BYTES = HEADER.size
WRITE_BYTES = HEADER_BYTES + 40
"""Bytes of a WRITE before its data."""

NAME_BYTES_MAX = 1024
"""FUSE_NAME_MAX; the target of a SYMLINK may be one page long."""


class Malformed(Exception):
    """Bytes that are not a valid request.

    `unique` identifies the request to reply to; 0 if it cannot be read.
    """

    def __init__(self, unique: int, reason: str) -> None:
        super().__init__(reason)
        self.unique = unique


class FuseRequest(NamedTuple):
    """Any request.

    `body` has the fields of its structure, or is None; `payload` is the data that follows: bytes, or pairs to
    forget.
    """

    opcode: int
    unique: int
    node: int
    uid: int
    gid: int
    pid: int
    body: Any = None
    names: tuple[bytes, ...] = ()
    payload: Any = b""
    extension: bytes = b""


class _Form(NamedTuple):
    """Layout of a request: structure, zero-terminated names, then `rest`."""

    body: Any
    struct: struct.Struct
    names: int = 0
    rest: str = ""
    """'': nothing; a field's name: as many bytes as the field says; 'forget', 'unmap': as many records;
    'any': all remaining bytes."""


def _form(title: str, fields: str, names: int = 0, rest: str = "") -> _Form:
    """`fields`: words name:code; a word without a name is padding."""
    words = [word.rpartition(":") for word in fields.split()]
    body = namedtuple(title, [name for name, _, _ in words if name]) if words else None
    return _Form(body, struct.Struct("=" + "".join(code for _, _, code in words)), names, rest)


_READ = "fh:Q offset:Q size:I read_flags:I lock_owner:Q flags:I 4x"
_LOCK = "fh:Q owner:Q start:Q end:Q type:I pid:I lk_flags:I 4x"
_RELEASE = "fh:Q flags:I release_flags:I lock_owner:Q"
_FSYNC = "fh:Q fsync_flags:I 4x"
_COPY = "fh_in:Q off_in:Q nodeid_out:Q fh_out:Q off_out:Q len:Q flags:Q"

FORMS: dict[int, _Form] = {
    Op.LOOKUP: _form("Lookup", "", 1),
    Op.FORGET: _form("Forget", "nlookup:Q"),
    Op.GETATTR: _form("GetAttr", "getattr_flags:I 4x fh:Q"),
    Op.SETATTR: _form(
        "SetAttr",
        "valid:I 4x fh:Q size:Q lock_owner:Q atime:q mtime:q ctime:q atimensec:I mtimensec:I "
        "ctimensec:I mode:I 4x uid:I gid:I 4x",
    ),
    Op.READLINK: _form("ReadLink", ""),
    Op.SYMLINK: _form("SymLink", "", 2),
    Op.MKNOD: _form("MkNod", "mode:I rdev:I umask:I 4x", 1),
    Op.MKDIR: _form("MkDir", "mode:I umask:I", 1),
    Op.UNLINK: _form("Unlink", "", 1),
    Op.RMDIR: _form("RmDir", "", 1),
    Op.RENAME: _form("Rename", "newdir:Q", 2),
    Op.LINK: _form("Link", "oldnodeid:Q", 1),
    Op.OPEN: _form("Open", "flags:I open_flags:I"),
    Op.READ: _form("Read", _READ),
    Op.WRITE: _form("Write", "fh:Q offset:Q size:I write_flags:I lock_owner:Q flags:I 4x", 0, "size"),
    Op.STATFS: _form("StatFs", ""),
    Op.RELEASE: _form("Release", _RELEASE),
    Op.FSYNC: _form("Fsync", _FSYNC),
    Op.SETXATTR: _form("SetXattr", "size:I flags:I", 1, "size"),
    Op.GETXATTR: _form("GetXattr", "size:I 4x", 1),
    Op.LISTXATTR: _form("ListXattr", "size:I 4x"),
    Op.REMOVEXATTR: _form("RemoveXattr", "", 1),
    Op.FLUSH: _form("Flush", "fh:Q unused:I 4x lock_owner:Q"),
    Op.INIT: _form("Init", "major:I minor:I max_readahead:I flags:I", 0, "any"),
    Op.OPENDIR: _form("OpenDir", "flags:I open_flags:I"),
    Op.READDIR: _form("ReadDir", _READ),
    Op.RELEASEDIR: _form("ReleaseDir", _RELEASE),
    Op.FSYNCDIR: _form("FsyncDir", _FSYNC),
    Op.GETLK: _form("GetLk", _LOCK),
    Op.SETLK: _form("SetLk", _LOCK),
    Op.SETLKW: _form("SetLkW", _LOCK),
    Op.ACCESS: _form("Access", "mask:I 4x"),
    Op.CREATE: _form("Create", "flags:I mode:I umask:I open_flags:I", 1),
    Op.INTERRUPT: _form("Interrupt", "unique:Q"),
    Op.BMAP: _form("Bmap", "block:Q blocksize:I 4x"),
    Op.DESTROY: _form("Destroy", ""),
    Op.IOCTL: _form("Ioctl", "fh:Q flags:I cmd:I arg:Q in_size:I out_size:I", 0, "in_size"),
    Op.POLL: _form("Poll", "fh:Q kh:Q flags:I events:I"),
    Op.NOTIFY_REPLY: _form("NotifyReply", "8x offset:Q size:I 4x 8x 8x", 0, "size"),
    Op.BATCH_FORGET: _form("BatchForget", "count:I 4x", 0, "forget"),
    Op.FALLOCATE: _form("Fallocate", "fh:Q offset:Q length:Q mode:I 4x"),
    Op.READDIRPLUS: _form("ReadDirPlus", _READ),
    Op.RENAME2: _form("Rename2", "newdir:Q flags:I 4x", 2),
    Op.LSEEK: _form("Lseek", "fh:Q offset:Q whence:I 4x"),
    Op.COPY_FILE_RANGE: _form("CopyFileRange", _COPY),
    Op.SETUPMAPPING: _form("SetupMapping", "fh:Q foffset:Q len:Q flags:Q moffset:Q"),
    Op.REMOVEMAPPING: _form("RemoveMapping", "count:I", 0, "unmap"),
    Op.SYNCFS: _form("SyncFs", "8x"),
    Op.TMPFILE: _form("TmpFile", "flags:I mode:I umask:I open_flags:I", 1),
    Op.STATX: _form("StatX", "getattr_flags:I 4x fh:Q sx_flags:I sx_mask:I"),
    Op.COPY_FILE_RANGE_64: _form("CopyFileRange64", _COPY),
}
SETXATTR_EXTENDED = _form("SetXattrExtended", "size:I flags:I setxattr_flags:I 4x", 1, "size")
"""Layout if SETXATTR_EXT was agreed on."""

_PAIR = struct.Struct("=QQ")
_INIT_MORE = struct.Struct("=I11I")
"""flags2 and reserved fields, from version 7.36 on."""

LENGTH_MIN = [HEADER_BYTES] * OP_COUNT
for _opcode, _made in FORMS.items():
    LENGTH_MIN[_opcode] = HEADER_BYTES + _made.struct.size + 2 * _made.names


def decode(buffer, count: int, *, setxattr_extended: bool = False) -> FuseRequest:
    """The request in the first `count` bytes of `buffer`. Its payload is a view of the buffer, its names are
    copies.

    Malformed: the bytes are no request, or its length is wrong; the buffer is unchanged.
    """
    if count < HEADER_BYTES or count > len(buffer):
        raise Malformed(0, f"{count} bytes are no request")
    length, opcode, unique, node, uid, gid, pid, extension_words, _ = HEADER.unpack_from(buffer)
    if length != count:
        raise Malformed(unique, f"a request of {count} bytes says that it has {length}")
    end = count - 8 * extension_words
    form = FORMS.get(opcode)
    if form is None:
        return FuseRequest(opcode, unique, node, uid, gid, pid, None, (), bytes(buffer[HEADER_BYTES:count]))
    if setxattr_extended and opcode == Op.SETXATTR:
        form = SETXATTR_EXTENDED
    place = HEADER_BYTES + form.struct.size
    if place > end:
        raise Malformed(unique, f"{Op(opcode).name} of {count} bytes")
    body = form.body(*form.struct.unpack_from(buffer, HEADER_BYTES)) if form.body else None
    view = memoryview(buffer)
    names = []
    for _ in range(form.names):
        name = _name(view, place, end, unique)
        names.append(name)
        place += len(name) + 1
    payload = view[place:end]
    match form.rest:
        case "any":
            pass
        case "":
            if place != end:
                raise Malformed(unique, f"{end - place} bytes behind {Op(opcode).name}")
        case "forget" | "unmap":
            if len(payload) != body.count * _PAIR.size:
                raise Malformed(unique, f"{len(payload)} bytes for {body.count} records")
            payload = list(_PAIR.iter_unpack(payload))
        case field:
            if len(payload) != getattr(body, field):
                raise Malformed(unique, f"{len(payload)} bytes where {getattr(body, field)} are announced")
    return FuseRequest(
        opcode, unique, node, uid, gid, pid, body, tuple(names), payload, bytes(view[end:count])
    )


def _name(view: memoryview, place: int, end: int, unique: int) -> bytes:
    text = bytes(view[place:end])
    length = text.find(b"\0")
    if length < 0:
        raise Malformed(unique, "a name without an end")
    return text[:length]


def flags_of(request: FuseRequest) -> int:
    """The 64 flags of an INIT request."""
    flags = request.body.flags
    if flags & 1 << 30 and len(request.payload) >= _INIT_MORE.size:
        flags |= _INIT_MORE.unpack_from(request.payload)[0] << 32
    return flags


def encode(request: FuseRequest, *, setxattr_extended: bool = False) -> bytes:
    """The request as the kernel would send it."""
    form = (
        SETXATTR_EXTENDED
        if setxattr_extended and request.opcode == Op.SETXATTR
        else FORMS.get(request.opcode)
    )
    parts = [form.struct.pack(*(request.body or ()))] if form is not None else []
    parts += [name + b"\0" for name in request.names]
    if form is not None and form.rest in ("forget", "unmap"):
        parts += [_PAIR.pack(*pair) for pair in request.payload]
    else:
        parts.append(bytes(request.payload))
    if len(request.extension) % 8:
        raise ValueError("an extension consists of words of 8 bytes")
    tail = b"".join(parts) + request.extension
    return (
        HEADER.pack(
            HEADER_BYTES + len(tail),
            request.opcode,
            request.unique,
            request.node,
            request.uid,
            request.gid,
            request.pid,
            len(request.extension) // 8,
            0,
        )
        + tail
    )


# -- frequent requests: header and body in one unpacking -------------------------------------------------------------------

_unpack_header = HEADER.unpack_from
_NAMED_MIN = HEADER_BYTES + 2
_READ_WHOLE = struct.Struct(_HEADER + "QQI20x")
_WRITE_WHOLE = struct.Struct(_HEADER + "QQII8xI4x")
_GETATTR_WHOLE = struct.Struct(_HEADER + "I4xQ")
_OPEN_WHOLE = struct.Struct(_HEADER + "II")
_RELEASE_WHOLE = struct.Struct(_HEADER + "QIIQ")
RELEASE_BYTES = _RELEASE_WHOLE.size
"""Bytes of a RELEASE, RELEASEDIR or FLUSH."""
_CREATE_WHOLE = struct.Struct(_HEADER + "IIII")
_FORGET_WHOLE = struct.Struct(_HEADER + "Q")
_GETXATTR_WHOLE = struct.Struct(_HEADER + "I4x")


def _fixed(whole: struct.Struct):
    """Make a decoder of requests that have no tail.

    It returns the header's numbers, then those of the body.
    """
    size, unpack = whole.size, whole.unpack_from

    def decode_fixed(buffer, count: int) -> tuple:
        if count != size or count > len(buffer):
            raise _odd(buffer, count)
        fields = unpack(buffer)
        if fields[0] != count:
            raise _odd(buffer, count)
        return fields

    return decode_fixed


decode_read = _fixed(_READ_WHOLE)
"""READ, READDIR, READDIRPLUS: the nine numbers of the header, fh, offset, size."""
decode_getattr = _fixed(_GETATTR_WHOLE)
"""GETATTR: the header's numbers, getattr_flags, fh"""
decode_open = _fixed(_OPEN_WHOLE)
"""OPEN, OPENDIR: the header's numbers, flags, open_flags"""
decode_forget = _fixed(_FORGET_WHOLE)
"""FORGET: the header's numbers, nlookup"""
decode_release = _fixed(_RELEASE_WHOLE)
"""RELEASE, RELEASEDIR, FLUSH: the header's numbers, fh, flags (FLUSH: unused), release_flags (FLUSH:
padding), lock_owner"""


def decode_write(buffer, count: int) -> tuple:
    """Decode a WRITE: the header's numbers, fh, offset, size, write_flags, current flags of the open file.

    The data is buffer[WRITE_BYTES:WRITE_BYTES + size].
    """
    if not WRITE_BYTES <= count <= len(buffer):
        raise _odd(buffer, count)
    fields = _WRITE_WHOLE.unpack_from(buffer)
    if fields[0] != count or WRITE_BYTES + fields[11] != count:
        raise _odd(buffer, count)
    return fields


def decode_lookup(buffer, count: int) -> tuple[int, int, bytes, int, int, int]:
    """Decode LOOKUP, UNLINK, RMDIR or REMOVEXATTR: unique, node, the name, uid, gid, pid."""
    if not _NAMED_MIN <= count <= len(buffer):
        raise _odd(buffer, count)
    length, _, unique, node, uid, gid, pid, extension_words, _ = _unpack_header(buffer)
    name = bytes(buffer[HEADER_BYTES : count - 8 * extension_words if extension_words else count])
    if length != count or name.find(b"\0") != len(name) - 1 or not name:
        raise _odd(buffer, count)
    return unique, node, name[:-1], uid, gid, pid


def decode_create(buffer, count: int) -> tuple[tuple, bytes]:
    """Decode a CREATE: the header's nine numbers, flags, mode, umask, open_flags; and the name."""
    if not _CREATE_WHOLE.size + 2 <= count <= len(buffer):
        raise _odd(buffer, count)
    fields = _CREATE_WHOLE.unpack_from(buffer)
    name = bytes(buffer[_CREATE_WHOLE.size : max(count - 8 * fields[7], 0)])
    if fields[0] != count or name.find(b"\0") != len(name) - 1 or not name:
        raise _odd(buffer, count)
    return fields, name[:-1]


def decode_getxattr(buffer, count: int) -> tuple[int, int, int, bytes]:
    """Decode a GETXATTR: unique, node, size, the name."""
    if not _GETXATTR_WHOLE.size + 2 <= count <= len(buffer):
        raise _odd(buffer, count)
    length, _, unique, node, _, _, _, extension_words, _, size = _GETXATTR_WHOLE.unpack_from(buffer)
    name = bytes(buffer[_GETXATTR_WHOLE.size : max(count - 8 * extension_words, 0)])
    if length != count or name.find(b"\0") != len(name) - 1 or not name:
        raise _odd(buffer, count)
    return unique, node, size, name[:-1]


def _odd(buffer, count: int) -> Malformed:
    if count < HEADER_BYTES or len(buffer) < HEADER_BYTES:
        return Malformed(0, f"{count} bytes are no request")
    length, opcode, unique = HEADER.unpack_from(buffer)[:3]
    return Malformed(unique, f"operation {opcode} of {count} bytes, which says that it has {length}")
