"""A local drive that the client may read, and the locations of chunks on it.

The drive comes with a descriptor, a table of changes and a serving lease; a location with checksums and a lifetime. Made
and closed by client/data/short_circuit, on its event loop; read by any thread, and by the mount's reads.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from typing import Any

from nvpool.blockio.reader import DIRECT_READ_BYTES, cached_pages, open_direct
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.core.errors import NotSupported
from nvpool.core.primitives import ReceivedReply
from nvpool.rpc.messages.read_write_codec import HANDOVER

LATE, WRONG = 3, 4
"""Faults of bytes that were read: they may be out of date; they do not have their checksums."""

_LATE, _WRONG = LATE, WRONG


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
        self.connection: Any = None
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


class BlockLocations:
    """The location of the first `blocks` blocks of a chunk on a drive.

    They lie from disk block `base` on, or each at its own disk block in `places` (0: a hole).
    """

    __slots__ = (
        "file",
        "index",
        "source",
        "until",
        "slot",
        "stamp",
        "version",
        "blocks",
        "base",
        "places",
        "sums",
        "bytes",
        "used",
        "read_bytes",
        "reported",
    )

    def __init__(self, file: OpenInode, index: int, source: LocalDrive) -> None:
        self.file = file
        self.index = index
        self.source = source
        self.until = 0.0
        self.slot = self.stamp = self.version = self.blocks = self.base = self.bytes = 0
        self.places = array("Q")
        self.sums = b""
        self.used = self.read_bytes = self.reported = 0
        """Reads since the location was fetched or renewed; unreported bytes; reads that were reported."""

    def place(self, first: int, count: int) -> int:
        """The disk block of block `first` if `count` blocks lie in one piece; 0: they do not, or there is a hole."""
        if self.base:
            return self.base + first
        places: Any = self.places
        if first + count > len(places):
            return 0
        place: int = places[first]
        if place:
            for at in range(1, count):
                if places[first + at] != place + at:
                    return 0
        return place

    def is_late(self, now_s: float) -> bool:
        """Whether bytes that were read there by now may be out of date, or cannot be decrypted.

        The clock and the counter are checked after the read: only that proves that the read was in time.
        """
        source, file = self.source, self.file
        return bool(
            source.connection.closed
            or now_s >= self.until
            or source.table[self.slot] != self.stamp
            or now_s + source.shift >= source.serving[0]
            or (file.encrypted and file.key is None)
        )

    def judge(self, now_s: float, blocks: ReceivedReply, first: int) -> int:
        """The fault of blocks that were just read, from block `first` of the chunk on: LATE, WRONG or 0.

        `blocks` has the checksums of the location in place of a message.
        """
        if self.is_late(now_s):
            return _LATE
        return 0 if blocks.has_sums(4 * first, 0, blocks.payload_bytes) else _WRONG

    def hit(self, byte_count: int, count: int) -> None:
        """Count successful reads with that many bytes. Any thread may call this."""
        self.used += count
        self.read_bytes += byte_count
        file = self.file
        if file.owes > 0:
            file.owes = max(0, file.owes - count)
