"""Rename, with NOREPLACE and EXCHANGE. Readers see the name in exactly one of its places at any time."""

from __future__ import annotations

from nvpool.core.errors import (
    AlreadyExists,
    CrossesVolumes,
    InUse,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    WouldLoop,
)
from nvpool.core.ids import ROOT_INODE
from nvpool.core.names import VOLUMES
from nvpool.meta.operations.unlink import check_empty
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.striped_dirs import StripeView
from nvpool.meta.state.transaction import Draft, View
from nvpool.rpc.v1 import meta_pb2

NOREPLACE, EXCHANGE = 1, 2
DEPTH_MAX = 100_000
"""Limit of a climb to the root: no path is so deep, so a longer climb is in a loop caused by damage."""


def rename(view: View, request: meta_pb2.RenameRequest, now_ns: int) -> Draft:
    draft = Draft(view, now_ns)
    flags = request.flags
    if flags not in (0, NOREPLACE, EXCHANGE):
        raise InvalidRequest(f"rename does not know the flags {flags:#x} together")
    old_parent, new_parent = draft.holder(request.parent), draft.entered_holder(request.new_parent)
    old_key, number, _ = view.named(old_parent, request.name)
    new_partition, _, new_key = view.place(new_parent, request.new_name)
    moved = draft.inode(number)
    raw = view.get(new_key)
    draft.reply = meta_pb2.RenameReply(inode=number)
    if raw is None:
        if flags == EXCHANGE:
            view.named(new_parent, request.new_name)  # raises NotFound
        _check_volume(moved, old_parent, request.name, new_parent)
        _check_loop(draft, moved, new_parent)
    else:
        if flags == NOREPLACE:
            raise AlreadyExists(f"{request.new_name!r} exists already")
        other = draft.inode(records.decode_dentry(new_partition, raw)[0])
        if other is moved:
            return draft
        _check_volume(moved, old_parent, request.name, new_parent)
        _check_loop(draft, moved, new_parent)
        if flags == EXCHANGE:
            _check_volume(other, new_parent, request.new_name, old_parent)
            _check_loop(draft, other, old_parent)
            _move(draft, other, new_parent, old_parent)
            old_partition = records.partition_of_key(old_key)
            draft.effects[old_key] = records.encode_dentry(old_partition, other.number, other.kind)
            draft.stamp(other)
        else:
            _replace(draft, moved, other, new_parent, request.new_name)
        draft.reply.replaced = other.number
    _move(draft, moved, old_parent, new_parent)
    draft.effects[new_key] = records.encode_dentry(new_partition, number, moved.kind)
    if flags != EXCHANGE:
        draft.effects[old_key] = None
    draft.stamp(moved)
    draft.stamp(old_parent, content=True)
    if new_parent is not old_parent:
        draft.stamp(new_parent, content=True)
    return draft


def _check_volume(inode: Inode, parent: Inode, name: bytes, new_parent: Inode) -> None:
    """CrossesVolumes: a name would leave its volume.

    InUse: a volume, or the directory of all volumes, keeps its name.
    """
    if inode.volume == inode.number:
        raise InUse("it is a volume, which keeps its name")
    if name == VOLUMES and parent.number == ROOT_INODE and inode.is_directory:
        raise InUse("the pool's volumes are found there: it keeps its name")
    if inode.volume != new_parent.volume:
        raise CrossesVolumes("a name does not move between volumes: copy what it stands for")


def _replace(draft: Draft, moved: Inode, other: Inode, new_parent: Inode, name: bytes) -> None:
    if moved.is_directory:
        if not other.is_directory:
            raise NotADirectory("a directory cannot replace a file")
        check_empty(draft, other)
        new_parent.links -= 1
    elif other.is_directory:
        raise IsADirectory("only a directory can replace a directory")
    new_parent.size -= 1
    draft.discard(other, new_parent.number, name)


def _move(draft: Draft, inode: Inode, old_parent: Inode, new_parent: Inode) -> None:
    if new_parent is old_parent:
        return
    old_parent.size -= 1
    new_parent.size += 1
    if inode.is_directory:
        inode.parent = new_parent.number
        old_parent.links -= 1
        new_parent.links += 1


def _check_loop(draft: Draft, inode: Inode, new_parent: Inode) -> None:
    """WouldLoop: `new_parent` is the directory itself, or lies below it."""
    if not inode.is_directory or inode.parent == new_parent.number:
        return
    at, view = new_parent, draft.view
    view.take_turn()
    if isinstance(at, StripeView) and at.number != inode.number:
        at = view.ancestor(at.number)
    for _ in range(DEPTH_MAX):
        if at.number == inode.number:
            raise WouldLoop("a directory cannot move below itself")
        if at.number == ROOT_INODE:
            return
        at = view.ancestor(at.parent)
    raise WouldLoop(f"directory {new_parent.number} is part of a loop; run fsck")
