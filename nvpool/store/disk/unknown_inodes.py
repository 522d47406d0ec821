"""Set of inodes of which the index certainly has nothing, known without a look-up.

Most first writes are to new inodes, whose numbers rise within their partition. So the highest number of a
partition in the index is looked up once, and the inodes that changes name later are added. The index
(`store/chunks/index`) asks this set before the kv engine; an inode outside of the set may or may not be in the
index.
"""

from __future__ import annotations

from nvpool.core.errors import NvpoolError
from nvpool.core.ids import COUNTER_BITS
from nvpool.kv.api import Kv

PARTITIONS = 1 << 64 - COUNTER_BITS
SINCE_MAX = 8192
"""Inodes remembered one by one; beyond this number each partition remembers only the highest one."""
_COUNTER_BITS, _SINCE_MAX = COUNTER_BITS, SINCE_MAX
_NEVER = (1 << 64) - 1
_CHUNK, _INODE = b"ci"
_KEY_BYTES = 9
"""Kind and inode number, with which the keys of segments and of inode records begin (index_records)."""


class UnknownInodes:
    """Set of the inodes without any record in the index of `kv`, as far as this is certain.

    The set takes over `Kv.on_apply`, which reports every change of the index.
    """

    __slots__ = ("_kv", "_ends", "_since")

    def __init__(self, kv: Kv) -> None:
        self._kv = kv
        self._ends: dict[int, int] = {}  # partition: number from which on the index had nothing
        self._since: set[int] = set()
        kv.on_apply = self.record_changes

    def record_changes(self, changed: dict[bytes, bytes | None]) -> None:
        """Record the effects of a change that the engine has applied."""
        for key in changed:
            if len(key) < _KEY_BYTES or (key[0] != _CHUNK and key[0] != _INODE):
                continue
            inode = 0
            for at in range(1, _KEY_BYTES):
                inode = inode << 8 | key[at]
            end = self._ends.get(inode >> _COUNTER_BITS, 0)
            if end and inode >= end:
                self._since.add(inode)
        if len(self._since) > _SINCE_MAX:
            self._forget()

    def _forget(self) -> None:
        """Replace the recorded inodes by a higher end of each partition."""
        ends = self._ends
        for inode in self._since:
            partition = inode >> COUNTER_BITS
            ends[partition] = max(ends[partition], min(inode + 1, _NEVER))
        self._since.clear()

    def has(self, inode: int) -> bool:
        """Whether the index certainly has nothing of the inode."""
        end = self._ends.get(inode >> _COUNTER_BITS, 0)
        if not end:
            end = self._look_up(inode >> _COUNTER_BITS)
        return end <= inode < _NEVER and inode not in self._since

    def __contains__(self, inode: int) -> bool:
        return self.has(inode)

    def _look_up(self, partition: int) -> int:
        """Look up the end of a partition and keep it. It is `_NEVER` if the index is damaged there."""
        first = partition << COUNTER_BITS
        highest = 0
        for kind in (b"c", b"i"):
            if partition + 1 < PARTITIONS:
                end = kind + (first + (1 << COUNTER_BITS)).to_bytes(8, "big")
            else:
                end = bytes((kind[0] + 1,))
            try:
                found = self._kv.scan_back(kind + first.to_bytes(8, "big"), end, 1)
                # A damaged key is sorted at the end of the search range and becomes visible beside a record
                # that does not exist. In this case, and if that record does exist, nothing is certain.
                is_certain = self._kv.get(end) is None
            except NvpoolError:
                is_certain = False
            if not is_certain:
                highest = _NEVER
                break
            if found:
                highest = max(highest, int.from_bytes(found[0][0][1:_KEY_BYTES], "big"))
        self._ends[partition] = min(highest + 1, _NEVER)
        return self._ends[partition]
