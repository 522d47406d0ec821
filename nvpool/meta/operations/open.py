"""Open, and the requests of writers: Report (end of the data) and Reserve (place of an append)."""

from __future__ import annotations

from functools import partial

from nvpool.core.errors import InvalidRequest, IsADirectory, StaleCut
from nvpool.core.units import WITHDRAW_ANY
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import Draft, TruncationInProgress, View, fill_attr
from nvpool.poolmap.file_layout import check_range
from nvpool.rpc.v1 import meta_pb2


def open_inode(view: View, request: meta_pb2.OpenRequest, now_ns: int) -> Draft:
    """Add one handle for the session. The handle keeps the inode when its last name is removed.

    An orphan can be opened as long as it exists. Directories and device nodes are opened likewise; only a
    file has a grant.
    """
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
    """Grow the file to `end`, if it is shorter. StaleCut: the writer did not know of a truncation."""
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    if request.wrote or request.end or request.withdrawn:
        _check_writer(inode, request.cut)
        check_range(inode.layout, request.end, 0)
        inode.flags |= records.TOUCHED  # a power loss may have lost the mark that the writer's grant set
        if request.end > inode.size:
            grown = request.blocks_delta or records.blocks_of(request.end) - records.blocks_of(inode.size)
            draft.resized(inode, request.end, request.change.session, reported=True)
            inode.blocks = min(inode.blocks + grown, records.blocks_of(request.end))
            draft.stamp(inode, content=True)
        elif request.wrote:
            inode.blocks = min(inode.blocks + request.blocks_delta, records.blocks_of(inode.size))
            draft.stamp(inode, content=True)
        if (
            request.withdrawn
            and inode.reserved > inode.size
            and (
                request.withdrawn == inode.reserved
                or (request.withdrawn == WITHDRAW_ANY and view.appends.is_of(inode, request.change.session))
            )
        ):
            # some bytes of the withdrawn append may be on stores: they must never be visible
            draft.cut(inode, inode.size)
    if request.release:
        draft.closed = inode.number
    draft.sync = request.sync
    draft.reply = meta_pb2.AttrReply()
    fill_attr(draft.reply.attr, inode)
    return draft


def reserve(view: View, request: meta_pb2.ReserveRequest, now_ns: int) -> Draft:
    """Reserve [offset, offset + length) behind the end of the file for the caller's append.

    So appends of several nodes never overlap. A `deferred` reservation leaves the size unchanged until the
    caller reports the bytes; other clients that append wait until then (`meta/state/append_reservations`).
    Without `deferred`, as requested by older clients, the file ends behind the reservation from now on.
    """
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    if inode.number in view.cutting:
        raise TruncationInProgress(inode.number)
    _check_writer(inode, request.cut)
    if not request.length:
        raise InvalidRequest("an append of no bytes needs no place")
    if inode.volume and view.access.restricted:
        view.access.check_change(inode.volume)
    view.appends.check(inode, request.own)
    offset = max(inode.size, inode.reserved)
    check_range(inode.layout, offset, request.length)
    reply = draft.reply = meta_pb2.ReserveReply(offset=offset)
    if request.deferred:
        inode.reserved = offset + request.length
        reply.shared = view.appends.is_shared(inode.number)
        draft.keep(inode)  # no client is notified: nothing visible of the file has changed
        draft.then = partial(view.appends.given, inode.number, inode.reserved, request.change.session)
    else:
        grown = records.blocks_of(offset + request.length) - records.blocks_of(inode.size)
        draft.resized(inode, offset + request.length)
        inode.blocks += grown
        draft.stamp(inode, content=True)
    fill_attr(reply.attr, inode)
    return draft


def _check_writer(inode: Inode, cut: int) -> None:
    if not inode.is_file:
        raise InvalidRequest(f"inode {inode.number} is not a file")
    if cut < inode.cut - inode.punches:  # a hole removes nothing from the end
        raise StaleCut(f"inode {inode.number} was truncated since: its cut number is {inode.cut}, not {cut}")
    if cut > inode.cut:
        raise InvalidRequest(f"inode {inode.number} has the cut number {inode.cut}, {cut} was never given")
