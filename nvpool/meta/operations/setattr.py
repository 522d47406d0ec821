"""SetAttr: change mode, owner, size, times, and the layout that a directory hands down to new files.

Allocate: make a hole in a file, or grow it; fallocate(2) without preallocation.
"""

from __future__ import annotations

import stat

from nvpool.core.errors import (
    Busy,
    DirectoryNotEmpty,
    FileTooLarge,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
)
from nvpool.core.posix import acl
from nvpool.core.units import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import Draft, TruncationInProgress, View, fill_attr
from nvpool.poolmap.file_layout import check_range, size_max
from nvpool.rpc.v1 import meta_pb2

MODE, UID, GID, SIZE, ATIME, MTIME, ATIME_NOW, MTIME_NOW, CTIME, CHUNK, REPLICAS, WIDE = (
    1 << bit for bit in range(12)
)
KNOWN = (1 << 12) - 1


def setattr(view: View, request: meta_pb2.SetAttrRequest, now_ns: int) -> Draft:
    """Set all attributes that `valid` names, in one change.

    ctime is always set to now: a caller's ctime (CTIME) only says that something changed. A change of the
    owner clears set-uid of a file, and set-gid if the group may execute it. An access control list follows
    the mode.
    """
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    valid = request.valid
    if valid & ~KNOWN:
        raise InvalidRequest(f"SetAttr does not know the bits {valid & ~KNOWN:#x}")
    if inode.is_directory:
        draft.take_parts(inode)
    if valid & WIDE:
        _spread(view, inode)
    if valid & SIZE:
        resize(draft, inode, request.size)
    if valid & (UID | GID):
        if valid & UID:
            inode.uid = request.uid
        if valid & GID:
            inode.gid = request.gid
        if not valid & MODE and inode.is_file:
            inode.mode &= ~stat.S_ISUID
            if inode.mode & stat.S_IXGRP:
                inode.mode &= ~stat.S_ISGID
    if valid & MODE:
        inode.mode = inode.mode & 0o170000 | request.mode & 0o7777
        if inode.flags & records.HAS_ACL and (raw := view.xattr(inode.number, acl.ACCESS)) is not None:
            draft.put_acl(inode, acl.ACCESS, acl.changed_by_mode(acl.decode_acl(raw), inode.mode))
    if valid & (CHUNK | REPLICAS):
        _hand_down(view, inode, request)
    draft.stamp(inode)
    if valid & ATIME_NOW:
        inode.atime_ns = inode.ctime_ns
    elif valid & ATIME:
        inode.atime_ns = request.atime_ns
    if valid & MTIME_NOW:
        inode.mtime_ns = inode.ctime_ns
    elif valid & MTIME:
        inode.mtime_ns = request.mtime_ns
    reply = draft.reply = meta_pb2.Entry()
    reply.grant = draft.grant(inode, request.rights, request.change.session)
    fill_attr(reply.attr, inode)
    return draft


def resize(draft: Draft, inode: Inode, size: int) -> None:
    """Set the size of a file.

    Growing adds a hole and no block. It waits for a truncation, whose bytes must be removed before they could
    become visible again.
    """
    if inode.is_directory:
        raise IsADirectory(f"inode {inode.number} is a directory")
    if not inode.is_file:
        raise InvalidRequest(f"inode {inode.number} has no size that could be set")
    if size > size_max(inode.layout):
        raise FileTooLarge(f"the file would have {size} bytes, the largest has {size_max(inode.layout)}")
    if size <= inode.size:
        draft.cut(inode, size)
    elif inode.number in draft.view.cutting:
        raise TruncationInProgress(inode.number)
    else:
        draft.resized(inode, size)
        draft.stamp(inode, content=True)


def _spread(view: View, inode: Inode) -> None:
    """Spread the names of the directory over all partitions from here on; it must be empty."""
    if not inode.is_directory:
        raise NotADirectory("only a directory can be striped")
    if inode.flags & records.WIDE:
        return
    if inode.volume:
        raise InvalidRequest("a directory in a volume cannot be striped: a volume is on one shard")
    if view.has_names(inode):
        raise DirectoryNotEmpty(
            f"directory {inode.number} has names already; make a new striped one, and move them into it"
        )
    inode.flags |= records.WIDE


def _hand_down(view: View, inode: Inode, request: meta_pb2.SetAttrRequest) -> None:
    if not inode.is_directory:
        raise NotADirectory("only a directory hands down a layout; that of a file is fixed at its birth")
    if request.valid & CHUNK:
        if not CHUNK_BYTES_MIN <= 1 << min(request.chunk_bits, 63) <= CHUNK_BYTES_MAX:
            raise InvalidRequest(f"a chunk has 64 KiB to 16 MiB, not 2**{request.chunk_bits} bytes")
        inode.chunk_bits = request.chunk_bits
    if request.valid & REPLICAS:
        if request.replicas not in view.tables:
            if request.change.map_epoch > view.map_epoch:
                raise Busy("this shard does not know the newest pool map yet", retry_after_s=0.1)
            raise InvalidRequest(
                f"the pool has no chains of {request.replicas} replicas; make them on one of its "
                f"nodes: nvpool dir set POOL:/PATH --replicas {request.replicas}"
            )
        inode.table = request.replicas


def allocate(view: View, request: meta_pb2.AllocateRequest, now_ns: int) -> Draft:
    """Make a hole of a range, grow the file to its end, or both in one change.

    The range is [offset, offset + length); `punch` makes the hole, `grow` grows the file. Growing adds no
    block. It waits for a truncation, whose bytes must be removed before they could become visible again.
    """
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    if inode.is_directory:
        raise IsADirectory(f"inode {inode.number} is a directory")
    if not inode.is_file or not request.length:
        raise InvalidRequest(f"{request.length} bytes of inode {inode.number} cannot be allocated")
    check_range(inode.layout, request.offset, request.length)
    end = request.offset + request.length
    if request.grow and end > inode.size:
        if inode.number in view.cutting:
            raise TruncationInProgress(inode.number)
        draft.resized(inode, end)
        if not request.punch:
            draft.stamp(inode, content=True)
    if request.punch:
        draft.punch(inode, request.offset, end)
    reply = draft.reply = meta_pb2.Entry()
    reply.grant = draft.grant(inode, request.rights, request.change.session)
    fill_attr(reply.attr, inode)
    return draft
