"""Memory for large payloads that is used again when everybody has let go of it.

Fresh memory costs more than the copy that fills it (measured: 1.2 ms a MiB in a virtual machine, against 0.1): the kernel
zeroes each page at its first touch. It begins at a page, as drives want it that are read and written past the kernel's cache.
Whoever was given a memoryview holds the mapping below it: when only our list refers to that, nobody can see it any more.
(CPython counts references exactly; who keeps a bare address of the memory must keep the memoryview too.) Called by the
transports for what they receive, by others for what they send.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from sys import getrefcount


class Spares:
    """Safe from several threads at once: memory is taken out of the list while it is looked at (each step is one operation
    under the interpreter's lock), so two never get the same; the bounds are then kept to about one."""

    COUNT_MAX = 32
    """Of one size: what a busy daemon has in hand at once. Sizes are powers of two, as most payloads are."""

    BYTES_MAX = 64 << 20
    """Kept in all."""

    def __init__(self) -> None:
        self._kept: dict[int, list[mmap]] = {}
        self._bytes = 0
        memory = mmap(-1, 1)
        self._unshared = getrefcount(memory)  # what it says of what only one local variable refers to

    def take(self, payload_bytes: int) -> memoryview:
        """Writable memory of this length with anything in it, the caller's for as long as somebody refers to it."""
        capacity = 1 << (payload_bytes - 1).bit_length()
        kept = self._kept.setdefault(capacity, [])
        for place in range(len(kept)):
            try:
                memory = kept.pop(place)
            except IndexError:  # another thread has one in hand
                break
            view = memoryview(memory)[:payload_bytes] if getrefcount(memory) == self._unshared else None
            kept.insert(place, memory)
            if view is not None:
                return view
        memory = mmap(-1, capacity, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        if self._bytes + capacity > self.BYTES_MAX:  # forget all, so that sizes no longer asked for do not keep others out
            self._kept, self._bytes = {capacity: (kept := [])}, 0
        if len(kept) < self.COUNT_MAX:
            kept.append(memory)
            self._bytes += capacity
        return memoryview(memory)[:payload_bytes]


SPARES = Spares()
