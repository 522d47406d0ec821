"""Buffer pool: memory for large payloads that is reused when nothing refers to it any more.

New memory costs more than the copy that fills it (measured: 1.2 ms per MiB in a virtual machine, against
0.1), because the kernel zeroes each page at its first access. Each buffer begins at a page border, as direct
I/O (O_DIRECT) requires. A memoryview keeps a reference to the mapping below it. When only the pool's list
refers to a mapping, the mapping is unused. (CPython counts references exactly; code that stores the bare
address of the memory must keep the memoryview too.) The transports use the pool for received payloads, other
modules for sent ones.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from sys import getrefcount


class PayloadBuffers:
    """Pool of reusable buffers; safe to call from several threads.

    A thread takes a buffer out of the list while it examines the buffer (each step is one operation under the
    interpreter's lock), so two threads never get the same buffer. With several threads, the pool may exceed
    its bounds by about one buffer.
    """

    COUNT_MAX = 32
    """Maximum number of pooled buffers of one size: about what a busy daemon uses simultaneously.

    Sizes are powers of two, as most payloads are."""

    BYTES_MAX = 64 << 20
    """Maximum number of pooled bytes, over all sizes."""

    def __init__(self) -> None:
        self.kept: dict[int, list[mmap]] = {}
        self.kept_bytes = 0
        memory = mmap(-1, 1)
        # The count for an object with only one local variable as reference.
        self._unshared = getrefcount(memory)

    def take(self, payload_bytes: int) -> memoryview:
        """Return writable memory of this length with arbitrary content.

        The memory belongs to the caller until the last reference to the memoryview is gone.
        """
        capacity = 1 << (payload_bytes - 1).bit_length()
        kept = self.kept.setdefault(capacity, [])
        for place in range(len(kept)):
            try:
                memory = kept.pop(place)
            except IndexError:  # another thread is examining one
                break
            view = memoryview(memory)[:payload_bytes] if getrefcount(memory) == self._unshared else None
            kept.insert(place, memory)
            if view is not None:
                return view
        memory = mmap(-1, capacity, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        # Drop all, so that sizes no longer used do not block others.
        if self.kept_bytes + capacity > self.BYTES_MAX:
            self.kept, self.kept_bytes = {capacity: (kept := [])}, 0
        if len(kept) < self.COUNT_MAX:
            kept.append(memory)
            self.kept_bytes += capacity
        return memoryview(memory)[:payload_bytes]


SPARES = PayloadBuffers()
