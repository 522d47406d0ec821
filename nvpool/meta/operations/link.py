"""Link: give an inode one more name."""

from __future__ import annotations

from nvpool.core.errors import AlreadyExists, CrossesVolumes, NotFound, NotPermitted, TooManyLinks
from nvpool.core.units import LINK_COUNT_MAX
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import Draft, View, fill_attr
from nvpool.rpc.v1 import meta_pb2


def link(view: View, request: meta_pb2.LinkRequest, now_ns: int) -> Draft:
    """Add a name. An inode that has lost its last name gets none; a file of O_TMPFILE does while it is
    open."""
    draft = Draft(view, now_ns)
    inode = draft.inode(request.inode)
    parent = draft.entered_holder(request.parent)
    partition, _, key = view.place(parent, request.name)
    if inode.is_directory:
        raise NotPermitted("a directory has one name only")
    if inode.volume != parent.volume:
        raise CrossesVolumes("a file has all its names in one volume, or in none: copy it")
    if view.get(key) is not None:
        raise AlreadyExists(f"{request.name!r} exists already")
    if inode.flags & records.TRASHED or (not inode.links and not _is_linkable(view, inode)):
        # a trashed inode with another name would be purged together with that name, and too early
        raise NotFound(f"inode {inode.number} has lost its last name")
    if not inode.links:
        inode.flags &= ~records.LINKABLE
        draft.effects[records.numbered_key(records.ORPHAN, inode.number)] = None
    if inode.links >= LINK_COUNT_MAX:
        raise TooManyLinks(f"a file has {LINK_COUNT_MAX} names at most")
    inode.links += 1
    draft.adds = True
    draft.stamp(inode)
    draft.effects[key] = records.encode_dentry(partition, inode.number, inode.kind)
    parent.size += 1
    draft.stamp(parent, content=True)
    draft.linked = inode.number
    draft.reply = meta_pb2.Entry()
    fill_attr(draft.reply.attr, inode)
    return draft


def _is_linkable(view: View, inode: Inode) -> bool:
    """Whether the inode was created without a name and some session still has it open.

    In a volume its orphan record is ORPHAN_COUNTED for that time.
    """
    if not inode.flags & records.LINKABLE:
        return False
    orphan = view.get(records.numbered_key(records.ORPHAN, inode.number))
    return orphan == (records.ORPHAN_COUNTED if inode.volume else records.ORPHAN_VALUE)
