"""Prefaulting: maps all pages of a buffer before the kernel copies into the buffer.

If a process is killed while the kernel copies to a page that is not mapped yet, the copy fails halfway: the
kernel does not map pages for a process with a fatal signal (get_user_pages checks for one). /dev/fuse then
ends the request with EIO, and no other process can take the request over. With all pages mapped, this failure
cannot occur.
"""

from __future__ import annotations

from mmap import PAGESIZE


def fault_in(memory: bytearray | memoryview) -> bytearray | memoryview:
    """Map all pages of `memory` writable in this process, without changing its content, and return `memory`.

    Costs about 0.3 µs for each page that was not mapped.
    """
    for place in range(0, len(memory), PAGESIZE):
        memory[place] = memory[place]
    return memory
