"""Open, and Reserve: the place of an append."""

from __future__ import annotations

from functools import partial

from nvpool.core.errors import InvalidRequest, IsADirectory
from nvpool.meta.operations.report import check_writer
from nvpool.meta.state import records
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
    if not inode.size:
        view.check_delegation(request.change.session, inode.number, inode.mode, inode.birth_ns, now_ns)
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
    check_writer(inode, request.cut)
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
