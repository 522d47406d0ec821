"""Interface of the block store that its parts use: its state, and the steps of a change.

`block_store` implements this interface and passes itself to `block_writes`, `copy_range`, `truncate`,
`salvage` and `scrub_pass`. A change allocates blocks in a transaction, writes and syncs them, and names them
in one change of the index; `apply_segments` and `apply` of the `writer` do the last step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from nvpool.kv.api import Effect, Kv
from nvpool.store.chunks.api import ChunkCopy, ChunkStore, ChunkWriter
from nvpool.store.chunks.index import Chunk, Index
from nvpool.store.chunks.location_leases import LocationLeases
from nvpool.store.chunks.partial_writes import Merger
from nvpool.store.chunks.read_batch import DriveReads
from nvpool.store.disk.allocator import Allocator, Run, Transaction
from nvpool.store.disk.bad_blocks import Quarantine
from nvpool.store.disk.device import Device
from nvpool.store.disk.index_records import Head, IndexSegment, InodeRecord
from nvpool.store.disk.reserve_file import SpaceReserve


class BlockWriter(ChunkWriter, Protocol):
    """Writes of the block store (`block_writes`), and the last steps of any change."""

    def next_version(self, chunk: Chunk, record: InodeRecord, epoch: int, given: int) -> int:
        """Return the version of a chunk after a change; `given` 0 lets the store choose."""

    def write_runs(self, runs: list[Run], buffers: list[Any]) -> None:
        """Write the buffers to these blocks. The next sync covers them."""

    def segments_at(
        self, chunk: Chunk, first: int, places: array[int], sums: bytes
    ) -> list[tuple[int, IndexSegment, int, int]]:
        """Build the segments of a chunk with new blocks from `first` on, for `apply_segments`."""

    def apply_segments(
        self,
        transaction: Transaction,
        chunk: Chunk,
        segments: list[tuple[int, IndexSegment, int, int]],
        head: Head,
        overwritten: range,
        reclaims: bool = False,
    ) -> None:
        """Apply one change: these segments, the head of the chunk, the free map."""

    def apply(
        self,
        transaction: Transaction,
        effects: list[Effect],
        inode: int = 0,
        indexes: Sequence[int] = (),
        reclaims: bool = False,
    ) -> None:
        """Apply one change: index records of these chunks, and the free map."""


class BlockStore(ChunkStore, Protocol):
    """The block store as its parts see it."""

    target: int
    block_count: int
    device: Device
    kv: Kv
    index: Index
    allocator: Allocator
    quarantine: Quarantine
    location_leases: LocationLeases
    readings: DriveReads
    merger: Merger
    room: SpaceReserve
    writer: BlockWriter
    fenced_because: str
    closed: bool

    def refuse_when_fenced(self) -> None:
        """Raise Fenced if the store is fenced or closed."""

    async def make_room(self) -> None:
        """Release blocks that earlier changes have freed. Call again if no block is free after this."""

    def note_written(self, byte_count: int) -> None:
        """Count bytes on their way to the drive; the next sync covers them."""

    def was_written(self, byte_count: int = 0) -> None:
        """Finish a write: start the checkpoint or the flush that many writes together make necessary."""

    async def sync_data(self) -> None:
        """Make all data written before the call survive the loss of power."""

    def name_copy(
        self, transaction: Transaction, copy: ChunkCopy, effects: dict[bytes, bytes | None]
    ) -> None:
        """Apply the one change that installs a copied chunk."""
