"""Removal of a volume: its name disappears immediately, its contents in steps.

All contents lie in one partition, so each step is a change of this shard alone. The remaining tree is the
only record of the progress: after a restart the removal starts again at the root. Owned by
`meta/requests/volume_handlers`.
"""

from __future__ import annotations

from collections.abc import Callable

from nvpool.core.clock import Clock
from nvpool.core.errors import CorruptRecord, NotFound
from nvpool.core.ids import partition_of
from nvpool.kv.api import Kv
from nvpool.meta.gc.collector import Collector
from nvpool.meta.operations.trash import inode_of_trash_key, purged, trash_range
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import Draft, View
from nvpool.meta.state.volume_records import (
    ATTACHMENTS_MAX,
    REMOVING,
    USE,
    VOLUME,
    VolumeRecord,
    attached_range,
    encode_volume,
    volume_key,
)

STEP = 128
"""Names removed in one change: two milliseconds."""


def removed(view: View, number: int, check: Callable[[VolumeRecord], None], now_ns: int) -> Draft:
    """Draft that removes the volume's name and marks the volume as being removed.

    An empty volume is removed completely. If the volume is marked already, the draft is empty. `check` may
    refuse.
    """
    from nvpool.meta.operations.volume_requests import read_volume

    draft = Draft(view, now_ns)
    record, use = read_volume(view, number)
    if record.flags & REMOVING:
        return draft
    check(record)
    try:
        root = draft.directory(number)
    except NotFound:
        draft.effects.update(ended(view, number))  # fsck has removed the root directory
        return draft
    parent = draft.holder(root.parent)
    partition, _, key = view.place(parent, record.name.encode())
    raw = view.get(key)
    if raw is not None and records.decode_dentry(partition, raw)[0] == number:
        draft.effects[key] = None
        parent.size -= 1
        parent.links -= 1
        draft.stamp(parent, content=True)
    draft.drop_name(root)
    if view.has_names(root) or use.files:
        draft.effects[volume_key(VOLUME, number)] = encode_volume(
            record._replace(flags=record.flags | REMOVING, files_removing=use.files)
        )
    else:
        draft.effects.update(ended(view, number))
    return draft


def ended(view: View, number: int) -> dict[bytes, bytes | None]:
    """Effects that delete all records of a volume."""
    keys = [volume_key(VOLUME, number), volume_key(USE, number)]
    keys += [key for key, _ in view.scan(*attached_range(number), ATTACHMENTS_MAX)]
    return dict.fromkeys(keys)


class Removal:
    """Removal of one volume's contents.

    Call `step` until `done`. Between two steps anything may happen except a change in the volume.
    """

    def __init__(self, kv: Kv, view: View, collector: Collector, clock: Clock, number: int) -> None:
        self._kv = kv
        self._view = view
        self._collector = collector
        self._clock = clock
        self._number = number
        self._partition = partition_of(number)
        self._way = [(number, b"")]
        """Directories from the root down to the current one, each with the key of its name."""
        self.done = False

    def _names(self) -> list[tuple[bytes, bytes]]:
        return self._kv.scan(*records.dentry_range(self._partition, self._way[-1][0]), STEP)

    def _trashed(self) -> list[int]:
        return [inode_of_trash_key(key) for key, _ in self._kv.scan(*trash_range(self._number), STEP)]

    def next(self) -> list[int]:
        """Inodes that the next step changes."""
        if trashed := self._trashed():
            return trashed
        return [
            self._way[-1][0],
            *(records.decode_dentry(self._partition, raw)[0] for _, raw in self._names()),
        ]

    def step(self) -> int:
        """Remove the next names in one change; return how many inodes have lost their last name.

        CorruptRecord: run fsck first. Held: nothing has happened; call `step` again later.
        """
        if trashed := self._trashed():
            draft = purged(self._view, self._number, trashed, self._clock.wall_ns())
            self._apply(draft)
            return len(trashed)
        draft = Draft(self._view, self._clock.wall_ns())
        top, own_key = self._way[-1]
        found = self._names()
        if not found:
            return self._leave(draft, top, own_key)
        directory = self._inode(draft, top)
        gone, deeper = 0, None
        for key, raw in found:
            number, _kind = records.decode_dentry(self._partition, raw)
            inode = self._inode(draft, number)
            if inode is not None and inode.is_directory:
                deeper = deeper or (number, key)
                continue
            draft.effects[key] = None
            if directory is not None:
                directory.size = max(0, directory.size - 1)
                draft.stamp(directory, content=True)
            if inode is not None and inode.links:
                draft.drop_name(inode)
                gone += not inode.links
        self._apply(draft)
        if deeper is not None:
            self._way.append(deeper)
        return gone

    def _leave(self, draft: Draft, top: int, own_key: bytes) -> int:
        """Remove the current directory, which is empty, and continue in its parent.

        The root ends the volume.
        """
        if len(self._way) == 1:
            draft.effects.update(ended(self._view, self._number))
            self._apply(draft)
            self._way.pop()
            self._collector.add(self._number)
            self.done = True
            return 0
        draft.effects[own_key] = None
        above = self._inode(draft, self._way[-2][0])
        if above is not None:
            above.size = max(0, above.size - 1)
            above.links = max(2, above.links - 1) if above.links else 0
            draft.stamp(above, content=True)
        inode = self._inode(draft, top)
        if inode is not None and inode.links:
            draft.drop_name(inode)
        self._apply(draft)
        self._way.pop()
        return 1

    @staticmethod
    def _inode(draft: Draft, number: int) -> Inode | None:
        try:
            return draft.inode(number)
        except NotFound:
            return None

    def _apply(self, draft: Draft) -> None:
        try:
            self._kv.apply(draft.finish(), reclaims=True)
        except CorruptRecord:
            self._way = [(self._number, b"")]
            raise
        for orphan in draft.orphans:
            self._collector.add(orphan)
