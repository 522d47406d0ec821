"""Repairs that change several records together, in one shard or several, like any other change.

Each repair checks the problem again, and changes nothing if it no longer exists. Called for
`meta/fsck/walker`.
"""

from __future__ import annotations

from nvpool.core.errors import DirectoryGone, InvalidRequest, NotFound
from nvpool.core.ids import ROOT_INODE
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.striped_dirs import StripeView
from nvpool.meta.state.transaction import Draft, View
from nvpool.poolmap.shards.partitions import partition_of_directory

LOST_AND_FOUND = b"lost+found"
NAMES_MAX = 100


def to_lost(view: View, number: int, key: bytes | None, now_ns: int) -> Draft:
    """Move the inode's entry `key` (None: it has none) to /lost+found.

    Its link count stays, at least one. NotFound: the inode is gone, or the entry names another inode now.
    """
    draft = Draft(view, now_ns)
    inode = draft.inode(number)
    if key is not None and _named_by(view, key) != number:
        raise NotFound(f"inode {number} does not have that name any more")
    lost = _lost_and_found(draft)
    for attempt in range(NAMES_MAX):
        name = b"#%d" % number if not attempt else b"#%d.%d" % (number, attempt)
        partition, _, lost_key = view.place(lost, name)
        if view.get(lost_key) is None:
            break
    else:
        raise InvalidRequest(f"lost+found has {NAMES_MAX} entries for it already")
    draft.effects[lost_key] = records.encode_dentry(partition, number, inode.kind)
    if key is not None:
        draft.effects[key] = None
    lost.size += 1
    if inode.is_directory:
        inode.parent = lost.number
        lost.links += 1
    if not inode.links:
        inode.links = 2 if inode.is_directory else 1
        draft.effects[records.numbered_key(records.ORPHAN, number)] = None
    draft.stamp(inode)
    draft.stamp(lost, content=True)
    return draft


def _lost_and_found(draft: Draft) -> Inode:
    root = draft.directory(ROOT_INODE)
    partition, name_hash, key = draft.view.place(root, LOST_AND_FOUND)
    raw = draft.view.get(key)
    if raw is not None:
        return draft.entered_holder(records.decode_dentry(partition, raw)[0])
    lost = draft.birth(partition_of_directory(name_hash), 0o40700, 0, 0, 0)
    lost.links, lost.parent = 2, ROOT_INODE
    draft.effects[key] = records.encode_dentry(partition, lost.number, 4)
    root.size += 1
    root.links += 1
    draft.stamp(root, content=True)
    return lost


def without_dangling(view: View, number: int, key: bytes, now_ns: int) -> Draft:
    """Remove the entry `key`, whose inode does not exist.

    NotFound: the entry names another inode now. InvalidRequest: the inode does exist.
    """
    draft = Draft(view, now_ns)
    raw = view.record(key)
    if raw is None or _named_by(view, key) != number:
        raise NotFound(f"inode {number} does not have that name any more")
    if view.record(records.inode_key(number)) is not None:
        raise InvalidRequest(f"inode {number} is there")
    draft.effects[key] = None
    _count_less(draft, key, raw[0] & 15 == 4)
    return draft


def _count_less(draft: Draft, key: bytes, subdirectory: bool) -> None:
    """Reduce the counts of the directory in which the entry `key` was."""
    directory = draft.holder(records.directory_of_key(key))
    directory.size = directory.size - 1 if isinstance(directory, StripeView) else max(0, directory.size - 1)
    if subdirectory:
        directory.links = max(2, directory.links - 1)
    draft.stamp(directory, content=True)


def loosened(view: View, number: int, key: bytes, now_ns: int) -> Draft:
    """Move the directory's entry `key` to /lost+found, because it lies in a directory below it.

    As `to_lost`.
    """
    draft = to_lost(view, number, key, now_ns)
    _count_less(draft, key, True)
    return draft


def recounted(view: View, number: int, subdirs: int, entries: int, now_ns: int) -> Draft:
    """Correct a directory's counts by the number of subdirectories and entries that it has beyond them."""
    draft = Draft(view, now_ns)
    directory = draft.directory(number)
    draft.take_parts(directory, at_least=False)
    directory.links = max(directory.links + subdirs, 2) if directory.links else 0
    directory.size = max(directory.size + entries, 0)
    directory.change += 1
    draft.dirty[number] = directory
    return draft


def undivided(view: View, number: int, now_ns: int) -> Draft:
    """Merge all stripes of a wide directory into its record. Our stripe is deleted in any case."""
    draft = Draft(view, now_ns)
    draft.effects[records.part_key(number, view.shard)] = None
    try:
        draft.take_parts(draft.directory(number))
    except DirectoryGone:
        pass
    return draft


def _named_by(view: View, key: bytes) -> int:
    """Inode number that the entry names; 0 if there is no such entry."""
    raw = view.record(key)
    return records.decode_dentry(records.partition_of_key(key), raw)[0] if raw is not None else 0
