"""Handle numbers of open files and directories, valid from open to release.

With a mount state (shm/mount_state) they stay valid in a successor of this process. Then a number contains
the index of its record in the shared memory. The record is written before the kernel gets the number, and
removed when the file is released. Used by `fuse/ops/operations`.
"""

from __future__ import annotations

from typing import NamedTuple

from nvpool.client.rpc.slot_journal import asking
from nvpool.client.state.vfs_types import Caller
from nvpool.shm.mount_records import HANDLES_MAX
from nvpool.shm.mount_state import DIRECTORY, PUBLISHED, KeptMemory, Word

_SERIALS_PER_LIFE_BITS = 24
_ROOT = Caller(0, 0)
FREE_MIN = 4096
"""Free numbers that are enough for all requests that may be pending at a time."""


class PredecessorHandle(NamedTuple):
    """A file or directory that the predecessor had open."""

    number: int
    inode: int
    flags: int
    caller: Caller
    unique: int
    """Number of the kernel's request that opened it."""
    was_published: bool

    @property
    def is_directory(self) -> bool:
        return bool(self.flags & DIRECTORY)


class Handles:
    def __init__(self, memory: KeptMemory | None) -> None:
        self._memory = memory
        self.last = 0
        """Last serial number taken; a number begins with its serial number."""
        self.start_life()

    def start_life(self) -> None:
        """Continue after the numbers of all predecessors: this process now counts as one more life."""
        self.last = self._memory.word(Word.LIVES) << _SERIALS_PER_LIFE_BITS if self._memory is not None else 0

    @property
    def has_room(self) -> bool:
        """Whether enough numbers are free for all requests that may be pending at a time."""
        return self._memory is None or self._memory.handle_records.has_room(FREE_MIN)

    def take(self, inode: int, flags: int, caller: Caller, unique: int, *, published: bool = False) -> int:
        """Allocate a number that no open file has, for request `unique` of the kernel.

        `published`: read workers may read the file, until `take_back`. Raises TooManyOpen.
        """
        self.last = serial = self.last + 1
        if self._memory is None:
            return serial
        return self._memory.handle_records.keep(
            serial,
            inode,
            flags | published * PUBLISHED,
            caller.uid,
            caller.gid,
            caller.pid & 0xFFFFFFFF,
            unique,
        )

    def directory(self, inode: int) -> int:
        return self.take(inode, DIRECTORY, _ROOT, asking())

    def give_back(self, number: int) -> None:
        if self._memory is not None:
            self._memory.handle_records.drop(number)

    def take_back(self, number: int) -> None:
        self._memory.unpublish(number & HANDLES_MAX - 1)

    def before(self) -> list[PredecessorHandle]:
        return [
            PredecessorHandle(
                number, inode, flags & ~PUBLISHED, Caller(uid, gid, pid), unique, bool(flags & PUBLISHED)
            )
            for _, inode, flags, uid, gid, pid, unique, number in self._memory.handles.valid()
        ]
