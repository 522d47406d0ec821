"""A write of a chunk and its staged blocks, as the modules of a store pass them on.

The service (server/writes), the chains (replication/chain_writes) and the chunk stores (chunks/block_writes,
chunks/memory_store) use these classes; so one write has one object from its request to the index.
"""

from __future__ import annotations

from asyncio import Future
from typing import Any

from nvpool.core.ids import RequestId
from nvpool.security.volume_keys import VolumeKey
from nvpool.security.xts import BlockCipher

Name = tuple[int, int]
"""Inode and index of a chunk."""


class ChunkWrite:
    """One write to a chunk, as its client sent it.

    `table` is the chain table of the inode; 0 keeps that of the chunk. `checksums` has the packed CRC32C of each piece
    into which block borders divide the buffer, without encryption. The buffer must not change while the write is in
    progress. `request` None: the write has no name, so a repetition is not recognised.
    """

    __slots__ = (
        "table",
        "inode",
        "index",
        "offset",
        "buffer",
        "checksums",
        "cut",
        "request",
        "wrapped_key",
        "cipher",
        "name",
    )

    def __init__(
        self,
        table: int,
        inode: int,
        index: int,
        offset: int,
        buffer: memoryview,
        checksums: bytes,
        cut: int,
        request: RequestId | None,
        key: VolumeKey | None = None,
        cipher: BlockCipher | None = None,
    ) -> None:
        """Create a write. `key` is the volume key if the volume is encrypted; or `cipher`, for a local write."""
        self.begin(table, inode, index, offset, buffer, checksums, cut, request)
        self.cipher: BlockCipher | None = cipher
        if key is not None:
            self.wrapped_key, self.cipher = key.wrapped, key.cipher

    def begin(
        self,
        table: int,
        inode: int,
        index: int,
        offset: int,
        buffer: memoryview,
        checksums: bytes,
        cut: int,
        request: RequestId | None,
    ) -> None:
        """Set all fields of a write that `__new__` has made, of a volume that is not encrypted."""
        self.table = table
        self.inode = inode
        self.index = index
        self.offset = offset
        self.buffer = buffer
        self.checksums = checksums
        self.cut = cut
        self.request = request
        self.wrapped_key = b""
        self.cipher = None
        self.name: Name = (inode, index)


class Placed:
    """Staged blocks: on the drive, not yet named by the index; see ChunkWriter.stage and prepare.

    `sums` are the checksums of those blocks, which were prepared for `version` of the chunk. None means that
    the blocks fit any version. The blocks are on the drive when `writing` is done. `transaction` holds the blocks,
    `runs` lists them (empty in a store that stages nothing), and `block` is the only one if they are one.
    """

    __slots__ = ("transaction", "runs", "sums", "version", "writing", "block")

    def __init__(
        self,
        transaction: Any,
        runs: list[tuple[int, int]],
        sums: bytes | None = None,
        version: int = 0,
        writing: Future[Any] | None = None,
        block: int = 0,
    ) -> None:
        self.transaction = transaction
        self.runs = runs
        self.sums = sums
        self.version = version
        self.writing = writing
        self.block = block
