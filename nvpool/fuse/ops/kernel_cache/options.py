"""Options of a mount: how long the kernel answers from its caches, and whether it writes pages back.

Used by all parts of `fuse/ops/operations` and by the engines.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class FuseOptions(NamedTuple):
    """How long the kernel answers from its caches, in seconds.

    So old attributes, names and absent names may be if another node changed them and no recall reached this
    mount. Changes through this mount are seen immediately.
    """

    attr_timeout_s: float = 1.0
    entry_timeout_s: float = 1.0
    negative_timeout_s: float = 0.0
    """Zero by default: the kernel gets no notification when a name is created."""
    writeback: bool = False
    """The kernel writes its pages later, and is the only one that changes the mounted files.

    It reads through any handle, and keeps its pages from open to open.
    """

    def flags_below(self, flags: int) -> int:
        """The flags of open(2) that matter below the kernel.

        A kernel that writes pages back does so through the handle of any writer, and through that handle
        reads the rest of a page of which it has a part; so every writer may read. It does O_APPEND by itself:
        it alone knows where the file ends, and each of its writes has a place.
        """
        if self.writeback:
            flags &= ~os.O_APPEND
            if flags & os.O_ACCMODE == os.O_WRONLY:
                flags ^= os.O_WRONLY | os.O_RDWR
        return flags


class ChangeCount:
    """Number of changes made through a mount; counted when they are complete.

    A listing that was read ahead before a change is not used after it.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0
