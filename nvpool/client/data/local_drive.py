"""A local drive that the client may read: descriptor, change table and serving lease.

Made and closed by client/data/short_circuit, on its event loop; read by any thread.
"""

from __future__ import annotations

import mmap
import os
import struct

from nvpool.blockio.reader import DIRECT_READ_BYTES, cached_pages, open_direct
from nvpool.core.errors import NotSupported
from nvpool.rpc.messages.read_write_codec import HANDOVER


class LocalDrive:
    """A target whose drive the client may read (short-circuit reads)."""

    __slots__ = (
        "target",
        "fd",
        "direct_fd",
        "takes_direct",
        "memory",
        "table",
        "serving",
        "shift",
        "token",
        "connection",
        "past",
    )

    def __init__(
        self, target: int, said: bytes, descriptors: list[int], direct_reads: bool = False, *, asked_s: float
    ):
        """Take over the descriptors, which were requested at `asked_s`.

        NotSupported: they make no sense here.
        """
        try:
            its_target, slots, self.token, its_now_s = HANDOVER.unpack(said)
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
        """The same file or device for reads that bypass the kernel's page cache, or -1."""
        self.takes_direct = self.direct_fd >= 0
        # without this the kernel's read-ahead would fill the page cache, and reads would come from there
        if self.takes_direct:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        self.table = memoryview(self.memory)[: 4 * slots].cast("I")
        self.serving = memoryview(self.memory)[4 * slots :].cast("d")
        """End of the target's serving lease, on the target's clock."""
        self.shift = its_now_s - asked_s
        """Upper bound of the target's clock minus ours; they may be in different time namespaces."""
        self.past: dict[int, list[int]] = {}
        """Inode -> reads here and their bytes since the last report to the store."""
        self.connection = None
        """The connection of the last locations: while it is open, that store process is alive."""

    def close(self) -> None:
        self.table.release()
        self.serving.release()
        self.memory.close()
        os.close(self.fd)
        if self.direct_fd >= 0:
            os.close(self.direct_fd)

    def reads_direct(self, runs: list[tuple[int, int]], length: int) -> bool:
        """Whether a read of these (place, bytes) should bypass the page cache.

        True if the page cache has less than half of the bytes.
        """
        return (
            self.takes_direct
            and length >= DIRECT_READ_BYTES
            and sum([cached_pages(self.fd, place, count) for place, count in runs]) << 13 < length
        )
