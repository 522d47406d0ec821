"""Pool of buffers for reads from a drive and for direct writes.

The pool sees by the reference count that a buffer is free; so this module is never compiled, which would change the
count. Used by `store/disk/device`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from nvpool.core.units import MIB


class BufferPool:
    """Pool of buffers that return by themselves: a buffer is free when only the pool refers to it."""

    def __init__(self, make: Callable[[int], Any], kept_bytes_max: int = 32 * MIB) -> None:
        """`make` returns new memory of at least this size."""
        self._make = make
        self._kept: deque[Any] = deque()
        self._kept_bytes = 0
        self._kept_bytes_max = kept_bytes_max

    def take(self, byte_count: int) -> memoryview:
        """Return a buffer of this size, with arbitrary contents."""
        kept = self._kept
        for _ in range(min(len(kept), 4)):
            found = kept[0]
            kept.rotate(-1)
            if len(found) >= byte_count and sys.getrefcount(found) == 3:  # the deque, `found`, the argument
                return memoryview(found)[:byte_count]
        size = max(64 * 1024, 1 << (byte_count - 1).bit_length())
        made = self._make(size)
        if self._kept_bytes + size <= self._kept_bytes_max:
            kept.append(made)
            self._kept_bytes += size
        return memoryview(made)[:byte_count]
