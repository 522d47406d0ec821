"""Trash of a volume: keeps removed files for a while and restores them on request.

They count in the volume's quota meanwhile.
An inode that loses its last name in a volume with a trash does not become an orphan, but an entry of the
trash, which stands for that name. Its link count stays, but clients are shown one link less, so none. Its
flag TRASHED says that no path leads to it. Meanwhile it gets no other names, and a directory in the trash
takes no names. A directory is empty when it enters the trash: its former contents have entered before it, and
their entries name it as their directory. So a restore begins with the directory. Decisions are pure; the
service purges expired entries in the background. Part of the volume feature (`meta/volumes`).
"""

from __future__ import annotations

from collections.abc import Iterable

from nvpool.core.errors import AlreadyExists, CrossesVolumes, NotFound
from nvpool.meta.state import records
from nvpool.meta.state.records import TRASHED, Inode
from nvpool.meta.state.transaction import Draft, View
from nvpool.meta.state.volume_records import (
    TRASH,
    VOLUME,
    Trashed,
    decode_trashed,
    decode_volume,
    volume_key,
)
from nvpool.rpc.v1 import meta_pb2 as pb

DEPTH_MAX = 10_000


def trash_key(volume: int, inode: int) -> bytes:
    return volume_key(TRASH, volume, inode.to_bytes(8, "big"))


def trash_range(volume: int, after: int = 0) -> tuple[bytes, bytes]:
    """Key range of entries whose inode number is above `after`."""
    return trash_key(volume, after) + b"\0" if after else volume_key(TRASH, volume), volume_key(
        TRASH, volume, b"\xff" * 9
    )


def inode_of_trash_key(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def purged(view: View, volume: int, inodes: Iterable[int], now_ns: int) -> Draft:
    """Remove entries from the trash for good, as if they lost their names now.

    Inodes not in the trash are skipped.
    """
    draft = Draft(view, now_ns)
    for number in inodes:
        key = trash_key(volume, number)
        if view.get(key) is None:
            continue
        draft.effects[key] = None
        try:
            inode = draft.inode(number)
        except NotFound:
            continue  # left to fsck
        if inode.links and inode.flags & TRASHED:
            inode.flags &= ~TRASHED
            draft.drop_name(inode)
    return draft


def restored(view: View, request: pb.TrashRequest, now_ns: int) -> Draft:
    """Give the entry its old name, or the requested one.

    If the entry's directory is in the trash too, the directory is restored first.

    NotFound       it is not in the trash, or its directory is gone for good: name another directory
    AlreadyExists  the name stands for another inode
    """
    draft = Draft(view, now_ns)
    entry = _entry(view, request.inode, request.entry)
    if request.directory:
        _put_back(draft, request.inode, request.entry, request.directory, request.name)
        return draft
    way = [(request.entry, entry)]
    while (above := _directory(draft, way[-1][1])).flags & TRASHED and len(way) <= DEPTH_MAX:
        way.append((above.number, _entry(view, request.inode, above.number)))
    for number, entry in reversed(way):
        _put_back(draft, request.inode, number, entry.directory, entry.name)
    return draft


def _entry(view: View, volume: int, number: int) -> Trashed:
    raw = view.get(trash_key(volume, number))
    if raw is None:
        raise NotFound(f"inode {number} is not in the trash of the volume")
    return decode_trashed(raw)


def _directory(draft: Draft, entry: Trashed) -> Inode:
    """Directory of the entry, whether it is in the trash now or not."""
    try:
        return draft.directory(entry.directory)
    except NotFound:
        raise _gone(entry.name) from None


def _gone(name: bytes) -> NotFound:
    return NotFound(f"the directory in which {name!r} was is gone: say where it is to go, with --to")


def _put_back(draft: Draft, volume: int, number: int, to: int, name: bytes) -> None:
    view, key = draft.view, trash_key(volume, number)
    inode = draft.inode(number)
    try:
        directory = draft.directory(to)
    except NotFound:
        raise _gone(name) from None
    if not directory.links or directory.flags & TRASHED:
        raise _gone(name)
    if directory.volume != volume:
        raise CrossesVolumes("what was in a volume is put back into it")
    partition, _, name_key = view.place(directory, name)
    if name_key in draft.effects or view.get(name_key) is not None:
        raise AlreadyExists(f"{name!r} exists: rename that, or say another place, with --to")
    draft.effects[key] = None
    draft.effects[name_key] = records.encode_dentry(partition, number, inode.kind)
    draft.adds = True
    inode.flags &= ~TRASHED
    directory.size += 1
    if inode.is_directory:
        inode.parent = directory.number
        directory.links += 1
    draft.stamp(inode)
    draft.stamp(directory, content=True)


def listed(view: View, request: pb.TrashRequest, limit: int) -> pb.TrashReply:
    """The next entries, in the order of inode numbers."""
    reply = pb.TrashReply()
    pairs = view.scan(*trash_range(request.inode, request.entry), limit + 1)
    for key, raw in pairs[:limit]:
        number = inode_of_trash_key(key)
        entry = decode_trashed(raw)
        try:
            inode = view.inode(number)
        except NotFound:
            continue
        reply.entries.add(
            inode=number,
            directory=entry.directory,
            name=entry.name,
            removed_ns=entry.removed_ns,
            expires_ns=entry.expires_ns,
            mode=inode.mode,
            size=inode.size,
        )
    if len(pairs) > limit:
        reply.next = inode_of_trash_key(pairs[limit - 1][0])
    return reply


def trash_s_of(view: View, volume: int) -> int:
    """Seconds for which the volume keeps removed files; 0: it has no trash."""
    raw = view.get(volume_key(VOLUME, volume))
    return decode_volume(raw).trash_s if raw is not None else 0


__all__ = [
    "Trashed",
    "inode_of_trash_key",
    "listed",
    "purged",
    "restored",
    "trash_key",
    "trash_range",
    "trash_s_of",
]
