"""Allocate: a hole in a file, and a size that it has at least. That is fallocate(2) where nothing is preallocated."""

from __future__ import annotations

from nvpool.core.errors import InvalidRequest, IsADirectory
from nvpool.meta.state.transaction import CutInProgress, Draft, View, fill_attr
from nvpool.poolmap.layout import check_range
from nvpool.rpc.v1 import meta_pb2


def allocate(view: View, request: meta_pb2.AllocateRequest, now_ns: int) -> Draft:
    """[offset, offset + length) becomes a hole (`punch`), and the file ends behind it at least (`grow`), both at once. Growing
    adds no block, and waits for a truncation, whose bytes must be gone before they could be seen again."""
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    if inode.is_directory:
        raise IsADirectory(f"inode {inode.number} is a directory")
    if not inode.is_file or not request.length:
        raise InvalidRequest(f"{request.length} bytes of inode {inode.number} can not be allocated")
    check_range(inode.layout, request.offset, request.length)
    end = request.offset + request.length
    if request.grow and end > inode.size:
        if inode.number in view.cutting:
            raise CutInProgress(inode.number)
        draft.resized(inode, end)
        if not request.punch:
            draft.stamp(inode, content=True)
    if request.punch:
        draft.punch(inode, request.offset, end)
    reply = draft.reply = meta_pb2.Entry()
    reply.grant = draft.grant(inode, request.rights, request.change.session)
    fill_attr(reply.attr, inode)
    return draft
