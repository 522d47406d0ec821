"""Memory whose pages are all there.

A process that is killed while the kernel copies to a page that is not mapped yet does not get it: finding pages is given up for
who is about to die (get_user_pages looks at fatal signals), and the call fails with what was to be copied half done. /dev/fuse
ends the request with EIO then, which nobody can take up any more. Where all is mapped there is nothing to be found.
"""

from __future__ import annotations

from mmap import PAGESIZE


def fault_in(memory: bytearray | memoryview) -> bytearray | memoryview:
    """The same, as it is, with each of its pages mapped and writable in this process: about 0.3 µs a page that was not."""
    for place in range(0, len(memory), PAGESIZE):
        memory[place] = memory[place]
    return memory
