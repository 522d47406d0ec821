"""Unlink and rmdir: remove a name.

An inode without names becomes an orphan, which the collector deletes when no session has it open.
"""

from __future__ import annotations

from nvpool.core.errors import DirectoryNotEmpty, InUse, IsADirectory
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.striped_dirs import StripeView
from nvpool.meta.state.transaction import Draft, View
from nvpool.rpc.messages.meta_messages import UnlinkReply, UnlinkRequest

_S_IFMT, _S_IFDIR, _TRASHED = 0o170000, 0o040000, records.TRASHED


def unlink(view: View, request: UnlinkRequest, now_ns: int) -> Draft:
    draft = Draft.__new__(Draft)
    draft.begin(view, now_ns)
    parent = draft.holder(request.parent)
    key, number, _ = view.named(parent, request.name)
    victim = draft.inode(number)
    if victim.mode & _S_IFMT == _S_IFDIR:
        raise IsADirectory(f"{request.name!r} is a directory")
    return _remove(draft, parent, key, victim, request.name)


def rmdir(view: View, request: UnlinkRequest, now_ns: int) -> Draft:
    draft = Draft.__new__(Draft)
    draft.begin(view, now_ns)
    parent = draft.holder(request.parent)
    key, number, _ = view.named(parent, request.name)
    victim = draft.directory(number)
    check_empty(draft, victim)
    parent.links -= 1
    return _remove(draft, parent, key, victim, request.name)


def _remove(draft: Draft, parent: Inode, key: bytes, victim: Inode, name: bytes) -> Draft:
    draft.effects[key] = None
    parent.size -= 1
    draft.stamp(parent, content=True)
    draft.parent = parent
    draft.discard(victim, parent.number, name)
    links = victim.links if not victim.flags & _TRASHED else 0
    reply = draft.reply = UnlinkReply.__new__(UnlinkReply)
    reply.clear()
    reply.inode, reply.links = victim.number, links
    return draft


def check_empty(draft: Draft, directory: Inode) -> None:
    """DirectoryNotEmpty: there is a name in the directory. InUse: it is a volume.

    The names are searched, because a count could be wrong. A wide directory is searched in all partitions (12
    ms) only if its count says that it is empty; after that it is not divided any more.
    """
    if directory.volume == directory.number:
        raise InUse("it is a volume: nvpool volume rm POOL NAME removes it")
    # a stripe is loaded for a name in the directory, so it is not empty
    empty = not isinstance(directory, StripeView)
    if empty and directory.flags & records.WIDE:
        draft.take_parts(directory)
        empty = not directory.size
    if not empty or draft.view.has_names(directory):
        raise DirectoryNotEmpty(f"directory {directory.number} is not empty")
