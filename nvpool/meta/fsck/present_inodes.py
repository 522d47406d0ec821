"""Present inodes of a shard, as a check reads them. Used by `meta/fsck/walker` and its checks."""

from __future__ import annotations

from nvpool.core.errors import CorruptRecord
from nvpool.core.ids import partition_of
from nvpool.kv.api import Kv
from nvpool.meta.state import records
from nvpool.meta.state.records import Inode
from nvpool.meta.state.transaction import View


class PresentInodes:
    """Inodes in the partitions of this shard."""

    def __init__(self, kv: Kv, view: View) -> None:
        self._kv = kv
        self._view = view

    def is_here(self, partition: int) -> bool:
        """Whether the partition's records are ours to read and to repair now."""
        return not self._view.is_elsewhere(partition) and self._view.serves(partition)

    def current(self, number: int) -> Inode | None:
        """Present record of the inode; None if it does not exist, is not in this shard, or cannot be
        read."""
        if not self.is_here(partition_of(number)):
            return None
        try:
            raw = self._kv.get(records.inode_key(number))
            return records.decode_inode(number, raw) if raw is not None else None
        except CorruptRecord:
            return None


def changed(inode: Inode) -> tuple[bytes, bytes]:
    """Effect that stores an inode after a repair has changed it."""
    inode.change += 1
    return records.inode_key(inode.number), records.encode_inode(inode)
