"""Checks of volume records: root directory, inodes in the volume, usage, trash and attachments.

Used by `meta/fsck/walker`, which does the walk. The usage is summed up over
the same snapshot from which its record is read: in the volume's partition all other records of the volume
come before it. A repair applies the difference, which is right whatever has changed since.
"""

from __future__ import annotations

from nvpool.core.errors import CorruptRecord
from nvpool.kv.api import Kv
from nvpool.meta.fsck.findings import Effects, Findings
from nvpool.meta.fsck.inode_sums import NAMES, PARENTS, InodeSums
from nvpool.meta.fsck.present_inodes import PresentInodes, changed
from nvpool.meta.operations.trash import inode_of_trash_key, trash_key
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import View
from nvpool.meta.state.volume_records import (
    ATTACHED,
    TRASH,
    USE,
    VOLUME,
    VolumeUse,
    decode_attached,
    decode_trashed,
    decode_use,
    decode_volume,
    encode_use,
    kind_of_volume_key,
    volume_key,
    volume_of_key,
)


class VolumeChecks:
    """Checks of volumes and of inodes in volumes."""

    def __init__(
        self, kv: Kv, view: View, inodes: PresentInodes, findings: Findings, sums: InodeSums
    ) -> None:
        self._kv = kv
        self._view = view
        self._inodes = inodes
        self._findings = findings
        self._sums = sums
        self._uses: dict[int, VolumeUse] = {}
        self._nameless: dict[int, tuple[int, int]] = {}
        """Inode without a name -> its volume and size."""

    def count_inode(self, inode: Inode) -> None:
        """Count an inode of the walk's snapshot."""
        if inode.volume == inode.number or not self._sums.is_whole:
            return
        size = inode.size if inode.is_file else 0
        if inode.links:
            use = self._uses.setdefault(inode.volume, VolumeUse())
            use.files += 1
            use.bytes += size
        else:
            self._nameless[inode.number] = inode.volume, size  # its orphan record says whether it counts

    def count_orphan(self, number: int, raw: bytes) -> None:
        """Count an orphan of the walk's snapshot."""
        volume, size = self._nameless.pop(number, (0, 0))
        if volume and raw == records.ORPHAN_COUNTED:
            use = self._uses.setdefault(volume, VolumeUse())
            use.files += 1
            use.bytes += size

    def check_inode(self, now: Inode, before: Inode) -> None:
        """Check an inode in a volume: `now` is its present record, `before` that of the walk's snapshot."""
        if now.flags & records.TRASHED and self._kv.get(trash_key(now.volume, now.number)) is None:

            def unmark() -> Effects:
                now.flags &= ~records.TRASHED
                return [changed(now)]

            # the walk did not count it as an inode with a name; after the repair it is one
            if before.flags & records.TRASHED:
                self._sums.count(now.number, NAMES, -1)
                self._sums.count(now.number, PARENTS, -before.parent)
            self._findings.found(
                "trash",
                f"inode {now.number} is marked as in the trash of a volume, which does not have it",
                unmark,
            )
        if not now.links or self._kv.get(volume_key(VOLUME, now.volume)) is not None:
            return

        def leave() -> Effects:
            now.volume = 0
            return [changed(now)]

        self._findings.found(
            "volume", f"inode {now.number} is in volume {now.volume}, which is not there", leave
        )

    def check(self, key: bytes, raw: bytes) -> None:
        """Check a record of a volume."""
        try:
            kind = kind_of_volume_key(key)
        except CorruptRecord as error:
            self._findings.lay_aside(key, raw, str(error))
            return
        checks = {VOLUME: self._volume, USE: self._use, ATTACHED: self._attachment, TRASH: self._trashed}
        checks[kind](key, raw, volume_of_key(key))

    def _volume(self, key: bytes, raw: bytes, number: int) -> None:
        if (now := self._kv.get(key)) is None:
            return
        try:
            record = decode_volume(now)
        except CorruptRecord as error:
            self._findings.lay_aside(key, raw, f"volume {number}: {error}")
            return
        root = self._inodes.current(number)
        if root is None or root.volume != number:

            def drop() -> Effects:
                self._view.access.note(number, None)
                return [(key, None), (volume_key(USE, number), None)]

            self._findings.found("volume", f"volume {record.name} has no directory {number}", drop)
            return
        if (
            self._kv.get(volume_key(USE, number)) is None
            and self._sums.is_whole
            and not self._findings.unread
        ):
            self._findings.found(
                "volume",
                f"volume {record.name} has no usage record",
                lambda: [(volume_key(USE, number), encode_use(self._uses.get(number, VolumeUse())))],
            )

    def _use(self, key: bytes, raw: bytes, number: int) -> None:
        there = self._uses.pop(number, VolumeUse())
        if (now := self._kv.get(key)) is None:
            return
        if self._kv.get(volume_key(VOLUME, number)) is None:
            self._findings.found(
                "volume", f"a usage record names volume {number}, which does not exist", lambda: [(key, None)]
            )
            return
        if not self._sums.is_whole or self._findings.unread:
            return
        try:
            recorded = decode_use(raw)
        except CorruptRecord as error:
            self._findings.found(
                "undecodable", f"volume {number}: {error}", lambda: [(key, encode_use(there))]
            )
            return
        more_bytes, more_files = there.bytes - recorded.bytes, there.files - recorded.files
        if more_bytes or more_files:

            def recount() -> Effects:
                use = decode_use(now)
                return [(key, encode_use(VolumeUse(use.bytes + more_bytes, use.files + more_files)))]

            self._findings.found(
                "counts",
                f"volume {number} holds {there.files} files with {there.bytes} bytes, {recorded.files} with "
                f"{recorded.bytes} are counted",
                recount,
            )

    def _trashed(self, key: bytes, raw: bytes, number: int) -> None:
        try:
            decode_trashed(raw)
        except CorruptRecord as error:
            self._findings.lay_aside(key, raw, f"volume {number}: {error}")
            return
        if self._kv.get(key) is None:
            return
        inode = self._inodes.current(inode_of_trash_key(key))
        if inode is None or not inode.links or not inode.flags & records.TRASHED or inode.volume != number:
            self._findings.found(
                "trash",
                f"the trash of volume {number} has inode {inode_of_trash_key(key)}, which is not in it",
                lambda: [(key, None)],
            )

    def _attachment(self, key: bytes, raw: bytes, number: int) -> None:
        if self._kv.get(key) is None:
            return
        try:
            decode_attached(raw)
        except CorruptRecord as error:
            self._findings.lay_aside(key, raw, f"volume {number}: {error}")
            return
        if self._kv.get(volume_key(VOLUME, number)) is None:
            self._findings.found(
                "volume",
                f"somebody is attached to volume {number}, which is not there",
                lambda: [(key, None)],
            )
