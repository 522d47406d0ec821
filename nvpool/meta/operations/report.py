"""Report: a writer says where the data of a file ends."""

from __future__ import annotations

from nvpool.core.errors import InvalidRequest, StaleCut
from nvpool.core.units import WITHDRAW_ANY
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import Draft, View, attr_of
from nvpool.poolmap.file_layout import check_range
from nvpool.rpc.messages.meta_messages import AttrReply, ReportRequest

_S_IFMT, _S_IFREG, _TOUCHED = 0o170000, 0o100000, records.TOUCHED
_END_UNCHECKED = 1 << 40
"""A file with chunks of 1 MiB may have this many bytes."""


def report(view: View, request: ReportRequest, now_ns: int) -> Draft:
    """Grow the file to `end`, if it is shorter. StaleCut: the writer did not know of a truncation."""
    draft = Draft.__new__(Draft)
    draft.begin(view, now_ns)
    inode = draft.inode(request.inode)
    if request.wrote or request.end or request.withdrawn:
        check_writer(inode, request.cut)
        if request.end > _END_UNCHECKED or inode.chunk_bits != 20:
            check_range(inode.layout, request.end, 0)
        inode.flags |= _TOUCHED  # a power loss may have lost the mark that the writer's grant set
        if request.end > inode.size:
            before, after = inode.size + 4095 >> 12 << 3, request.end + 4095 >> 12 << 3
            grown = request.blocks_delta if request.blocks_delta else after - before
            draft.resized(inode, request.end, request.change.session, True)
            inode.blocks = after if grown > after or inode.blocks + grown > after else inode.blocks + grown
            draft.stamp(inode, content=True)
        elif request.wrote:
            grown, after = request.blocks_delta, inode.size + 4095 >> 12 << 3
            inode.blocks = after if grown > after or inode.blocks + grown > after else inode.blocks + grown
            draft.stamp(inode, content=True)
        if (
            request.withdrawn
            and inode.reserved > inode.size
            and (
                request.withdrawn == inode.reserved
                or (
                    request.withdrawn == WITHDRAW_ANY
                    and view.appends is not None
                    and view.appends.is_of(inode, request.change.session)
                )
            )
        ):
            # some bytes of the withdrawn append may be on stores: they must never be visible
            draft.cut(inode, inode.size)
    draft.sized = inode.number
    if request.release:
        draft.closed = inode.number
    draft.sync = request.sync
    reply = draft.reply = AttrReply.__new__(AttrReply)
    reply.clear()
    reply.attr = attr_of(inode)
    return draft


def check_writer(inode: Inode, cut: int) -> None:
    """StaleCut: the writer did not know of a truncation. InvalidRequest: it is no file, or no such number."""
    if inode.mode & _S_IFMT != _S_IFREG:
        raise InvalidRequest(f"inode {inode.number} is not a file")
    if cut > inode.cut:
        raise InvalidRequest(f"inode {inode.number} has the cut number {inode.cut}, {cut} was never given")
    if inode.cut - cut > inode.punches:  # a hole removes nothing from the end
        raise StaleCut(f"inode {inode.number} was truncated since: its cut number is {inode.cut}, not {cut}")
