"""A drive of this host that its store lets us read: the descriptor, the table of changes, and until when the store may serve.

Made and closed by client/data/short_circuit, on its event loop; read by any thread.
"""

from __future__ import annotations

import mmap
import os
import struct

from nvpool.blockio.reader import DIRECT_READ_BYTES, cached_pages, open_direct
from nvpool.core.errors import NotSupported
from nvpool.rpc.messages.data_codec import LENT


class Source:
    """A target that lends to us."""

    __slots__ = ("target", "fd", "direct_fd", "takes_direct", "memory", "table", "serving", "shift", "token", "connection",
                 "past")

    def __init__(self, target: int, said: bytes, descriptors: list[int], direct_reads: bool = False, *, asked_s: float):
        """Takes the descriptors over, which were asked for at `asked_s`. NotSupported for what makes no sense here."""
        try:
            its_target, slots, self.token, its_now_s = LENT.unpack(said)
            if its_target != target or len(descriptors) != 2:
                raise NotSupported(f"descriptors of target {its_target} came for target {target}")
            self.memory = mmap.mmap(descriptors[1], 4 * slots + 8, prot=mmap.PROT_READ)
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, (struct.error, OSError, ValueError)):
                raise NotSupported(f"what target {target} gave is of no use: {error}") from None
            raise
        os.close(descriptors[1])
        self.target = target
        self.fd = descriptors[0]
        self.direct_fd = open_direct(self.fd) if direct_reads else -1
        """The same past the kernel's cache, or -1."""
        self.takes_direct = self.direct_fd >= 0
        if self.takes_direct:  # what the kernel would read in advance is in memory then, and would be read from there
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.table = memoryview(self.memory)[:4 * slots].cast("I")
        self.serving = memoryview(self.memory)[4 * slots:].cast("d")
        """Until when the target may serve, on its clock."""
        self.shift = its_now_s - asked_s
        """What its clock is ahead of ours, and not less, also where the two of us are in different time namespaces."""
        self.past: dict[int, list[int]] = {}
        """Inode -> reads here, and bytes of them, since the store was told the last time."""
        self.connection = None
        """The one over which locations came last: who has answered them is alive as long as it is."""

    def close(self) -> None:
        self.table.release()
        self.serving.release()
        self.memory.close()
        os.close(self.fd)
        if self.direct_fd >= 0:
            os.close(self.direct_fd)

    def reads_direct(self, runs: list[tuple[int, int]], length: int) -> bool:
        """Whether these (place, bytes) are better read past the kernel's cache: it has less than half of them."""
        return (self.takes_direct and length >= DIRECT_READ_BYTES
                and sum([cached_pages(self.fd, place, count) for place, count in runs]) << 13 < length)
