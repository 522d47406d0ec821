"""Open, and what writers tell: Report (where the data ends) and Reserve (the place of an append)."""

from __future__ import annotations

from nvpool.base.errors import InvalidRequest, IsADirectory, StaleCut
from nvpool.logic.layout import check_range
from nvpool.meta import records
from nvpool.meta.records import Inode
from nvpool.meta.view import CutInProgress, Draft, View, fill_attr
from nvpool.wire.v1 import meta_pb2


def open_inode(view: View, request: meta_pb2.OpenRequest, now_ns: int) -> Draft:
    """One more handle for the session, which keeps the inode when its last name goes. An orphan can be opened as long
    as it is there. Directories and device nodes are held open likewise; only a file has a grant."""
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    if request.truncate:
        if inode.is_directory:
            raise IsADirectory(f"inode {inode.number} is a directory")
        if inode.is_file:
            draft.cut(inode, 0)
    draft.opened = inode.number
    reply = draft.reply = meta_pb2.Entry()
    reply.grant = draft.grant(inode, request.rights, request.change.session)
    fill_attr(reply.attr, inode)
    return draft


def report(view: View, request: meta_pb2.ReportRequest, now_ns: int) -> Draft:
    """The file ends at `end` at least. Refused with StaleCut when the writer did not know of a truncation."""
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    if request.wrote or request.end:
        _check_writer(inode, request.cut)
        check_range(inode.layout, request.end, 0)
        inode.flags |= records.TOUCHED  # a loss of power may have taken the mark that the writer's grant left
        if request.end > inode.size:
            grown = request.blocks_delta or records.blocks_of(request.end) - records.blocks_of(inode.size)
            draft.resized(inode, request.end, request.change.session, reported=True)
            inode.blocks = min(inode.blocks + grown, records.blocks_of(request.end))
            draft.stamp(inode, content=True)
        elif request.wrote:
            inode.blocks = min(inode.blocks + request.blocks_delta, records.blocks_of(inode.size))
            draft.stamp(inode, content=True)
    if request.release:
        draft.closed = inode.number
    draft.sync = request.sync
    draft.reply = meta_pb2.AttrReply()
    fill_attr(draft.reply.attr, inode)
    return draft


def reserve(view: View, request: meta_pb2.ReserveRequest, now_ns: int) -> Draft:
    """[offset, offset + length) at the end of the file is the caller's alone: the file ends behind it from now on, so
    that records of several nodes never overlap. What the caller does not write there reads as zeros."""
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    if inode.number in view.cutting:
        raise CutInProgress(inode.number)
    _check_writer(inode, request.cut)
    if not request.length:
        raise InvalidRequest("an append of no bytes needs no place")
    check_range(inode.layout, inode.size, request.length)
    reply = draft.reply = meta_pb2.ReserveReply(offset=inode.size)
    grown = records.blocks_of(inode.size + request.length) - records.blocks_of(inode.size)
    draft.resized(inode, inode.size + request.length)
    inode.blocks += grown
    draft.stamp(inode, content=True)
    fill_attr(reply.attr, inode)
    return draft


def _check_writer(inode: Inode, cut: int) -> None:
    if not inode.is_file:
        raise InvalidRequest(f"inode {inode.number} is not a file")
    if cut < inode.cut - inode.punches:  # a hole takes nothing from the end
        raise StaleCut(f"inode {inode.number} was truncated since: its cut number is {inode.cut}, not {cut}")
    if cut > inode.cut:
        raise InvalidRequest(f"inode {inode.number} has the cut number {inode.cut}, {cut} was never given")
