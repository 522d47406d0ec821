"""Typed encoders of the commonest replies to the kernel, for the fast paths; the structures are those of `replies`.

Each function but `created` writes a complete reply to a `ByteWriter`, which the caller sends. `unique` is the
number of the request. The time for which the kernel may cache something is in seconds and nanoseconds.
"""

from __future__ import annotations

from nvpool.core.primitives import ByteWriter
from nvpool.fuse.protocol.replies import BLOCK_BYTES, HEADER_BYTES, SECOND_NS
from nvpool.rpc.messages.meta_messages import Attr

_HEADER_BYTES, _BLOCK_BYTES, _SECOND_NS = HEADER_BYTES, BLOCK_BYTES, SECOND_NS
_ATTR_REPLY_BYTES, _ENTRY_REPLY_BYTES, _OPEN_REPLY_BYTES, _CREATE_REPLY_BYTES = 120, 144, 32, 160
_FAILURE_MASK = 0xFFFFFFFF
_out = ByteWriter()


def status(out: ByteWriter, unique: int, code: int) -> None:
    """Reply without data: success (`code` 0), or an error number."""
    _begin(out, _HEADER_BYTES, unique, code)


def attributes(out: ByteWriter, unique: int, attr: Attr, attr_s: int, attr_ns: int) -> None:
    """Reply to GETATTR."""
    _begin(out, _ATTR_REPLY_BYTES, unique, 0)
    out.u64(attr_s)
    out.u32(attr_ns)
    out.u32(0)
    _put_attr(out, attr)


def entry(
    out: ByteWriter, unique: int, attr: Attr, entry_s: int, entry_ns: int, attr_s: int, attr_ns: int
) -> None:
    """Reply to LOOKUP."""
    _begin(out, _ENTRY_REPLY_BYTES, unique, 0)
    _put_entry(out, attr, entry_s, entry_ns, attr_s, attr_ns)


def opened(out: ByteWriter, unique: int, handle: int, opening: int) -> None:
    """Reply to OPEN; `opening`: flags of `Opening`."""
    _begin(out, _OPEN_REPLY_BYTES, unique, 0)
    out.u64(handle)
    out.u32(opening)
    out.u32(0)


def created(
    unique: int,
    attr: Attr,
    entry_s: int,
    entry_ns: int,
    attr_s: int,
    attr_ns: int,
    handle: int,
    opening: int,
) -> bytes:
    """Reply to CREATE, as bytes."""
    out = _out
    _begin(out, _CREATE_REPLY_BYTES, unique, 0)
    _put_entry(out, attr, entry_s, entry_ns, attr_s, attr_ns)
    out.u64(handle)
    out.u32(opening)
    out.u32(0)
    return out.take()


def _begin(out: ByteWriter, byte_count: int, unique: int, code: int) -> None:
    """Begin a reply with its struct fuse_out_header."""
    out.begin()
    out.u32(byte_count)
    out.u32(-code & _FAILURE_MASK)
    out.u64(unique)


def _put_entry(out: ByteWriter, attr: Attr, entry_s: int, entry_ns: int, attr_s: int, attr_ns: int) -> None:
    """Append a struct fuse_entry_out."""
    out.u64(attr.inode)
    out.u64(0)
    out.u64(entry_s)
    out.u64(attr_s)
    out.u32(entry_ns)
    out.u32(attr_ns)
    _put_attr(out, attr)


def _put_attr(out: ByteWriter, attr: Attr) -> None:
    """Append a struct fuse_attr. A time before 1970 has a negative number of seconds."""
    atime_s, mtime_s, ctime_s = (
        attr.atime_ns // _SECOND_NS,
        attr.mtime_ns // _SECOND_NS,
        attr.ctime_ns // _SECOND_NS,
    )
    out.u64(attr.inode)
    out.u64(attr.size)
    out.u64(attr.blocks)
    out.i64(atime_s)
    out.i64(mtime_s)
    out.i64(ctime_s)
    out.u32(attr.atime_ns - atime_s * _SECOND_NS)
    out.u32(attr.mtime_ns - mtime_s * _SECOND_NS)
    out.u32(attr.ctime_ns - ctime_s * _SECOND_NS)
    out.u32(attr.mode)
    out.u32(attr.links)
    out.u32(attr.uid)
    out.u32(attr.gid)
    out.u32(attr.rdev)
    out.u32(_BLOCK_BYTES)
    out.u32(0)
