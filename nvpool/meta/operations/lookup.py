"""Look up a name, and get the attributes of an inode."""

from __future__ import annotations

from nvpool.core.errors import DirectoryGone, NotFound
from nvpool.core.ids import partition_of
from nvpool.meta.state import records
from nvpool.meta.state.transaction import Draft, View, attr_of, elsewhere_entry
from nvpool.rpc.messages.meta_messages import GetAttrRequest, InodeEntry, LookupRequest

_DIVIDED = records.DIVIDED


def lookup(view: View, request: LookupRequest, now_ns: int) -> Draft:
    """Look up a name.

    While the file is being truncated, a requested grant is left out, because a look-up does not wait for the
    targets. For an inode of another shard the reply has only its number and kind.
    """
    directory = view.searched(request.parent, request.name, request.spread)
    try:
        _, number, kind = view.named(directory, request.name)
    except NotFound:
        if not directory.links:
            raise DirectoryGone(f"directory {directory.number} was removed") from None
        raise
    if view.owners and view.is_elsewhere(partition_of(number)):
        return _elsewhere(view, number, kind, now_ns)
    if view.cutting and number in view.cutting:
        request.rights = 0
    found = _entry(view, number, request.rights, request.session, now_ns)
    inode = found.inodes[number]
    if inode.flags & _DIVIDED:
        # makes the client request the inode together with its stripes
        return _elsewhere(view, number, kind, now_ns)
    return found


def _elsewhere(view: View, number: int, kind: int, now_ns: int) -> Draft:
    draft = Draft.__new__(Draft)
    draft.begin(view, now_ns)
    draft.reply = elsewhere_entry(number, kind)
    return draft


def getattr(view: View, request: GetAttrRequest, now_ns: int) -> Draft:
    """Attributes of an inode, and a grant if one is requested."""
    draft = _entry(view, request.inode, request.rights, request.session, now_ns)
    if request.birth:
        draft.reply.attr.birth_ns = draft.inodes[request.inode].birth_ns
    return draft


def _entry(view: View, number: int, rights: int, session: int, now_ns: int) -> Draft:
    draft = Draft.__new__(Draft)
    draft.begin(view, now_ns)
    inode = draft.inode(number)
    if not inode.size:
        view.check_delegation(session, number, inode.mode, inode.birth_ns, now_ns)
    entry = draft.reply = InodeEntry.__new__(InodeEntry)
    entry.clear()
    if rights:
        entry.grant = draft.grant(inode, rights, session)
    entry.attr = attr_of(inode)
    entry.lease_ms = view.issue_lease(session, inode)
    return draft
