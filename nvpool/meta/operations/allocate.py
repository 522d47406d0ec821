"""Allocate: make a hole in a file, or grow it; fallocate(2) without preallocation."""

from __future__ import annotations

from nvpool.core.errors import InvalidRequest, IsADirectory
from nvpool.meta.state.transaction import Draft, TruncationInProgress, View, fill_attr
from nvpool.poolmap.file_layout import check_range
from nvpool.rpc.v1 import meta_pb2


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
