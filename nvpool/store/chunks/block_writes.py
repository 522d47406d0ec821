"""Writes of the block store: in one step without waiting, or staged and named later.

`write_now` applies a write, or raises with nothing done. `prepare_now` does all of it that can fail, for a write
that a chain decides later; `write_now` then only names the blocks. The coroutines beside them wait for what makes the
two raise MustWait: space, an old block that is not in memory, a checkpoint. Large writes are staged first, so that
the event loop is free in the meantime. A write that fails has done nothing: its places are free again.

The first block of a chunk that does not exist takes a branch without segments to replace and without blocks to free:
most files have one block. The branch makes the same records.

The block store creates this class; `store/server/writes` and `store/replication/chain_writes` use it, and the other
changes of the block store (truncations, copies, transfers) use its last steps.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

from nvpool.core.errors import Busy, InvalidRequest, StaleCut, StaleEpoch
from nvpool.core.ids import is_done
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX
from nvpool.kv.api import Effect
from nvpool.poolmap.chains.protocol import MemberChunkState, next_version
from nvpool.store.chunk_write import ChunkWrite, Placed
from nvpool.store.chunks.api import HeldChunk, MustWait, check_table
from nvpool.store.chunks.block_store_parts import BlockStore
from nvpool.store.chunks.index import Chunk
from nvpool.store.disk import index_records
from nvpool.store.disk.allocator import Run, SpacePending, Transaction
from nvpool.store.disk.index_records import (
    SEGMENT_BITS,
    SEGMENT_BLOCKS,
    SEGMENT_MASK,
    Head,
    IndexSegment,
    InodeRecord,
    bad_key,
    encode_segment,
    replaced,
)

_TRIES_MAX = 1000
_new_tuple = tuple.__new__
_BLOCK_BYTES, _BLOCK_MASK, _CHUNK_BYTES = BLOCK_BYTES, BLOCK_BYTES - 1, CHUNK_BYTES_MAX
_SEGMENT_BITS, _SEGMENT_BLOCKS, _SEGMENT_MASK = SEGMENT_BITS, SEGMENT_BLOCKS, SEGMENT_MASK


class BlockWrites:
    """Writes of one block store. See ChunkWriter for the methods that its users call."""

    def __init__(self, store: BlockStore) -> None:
        """`store` has its index and its parts already."""
        self._store, self._kv, self._device = store, store.kv, store.device
        self._index, self._allocator, self._merger = store.index, store.allocator, store.merger
        self._quarantine, self._location_leases = store.quarantine, store.location_leases

    def held(self, inode: int, index: int) -> HeldChunk:
        """See ChunkStore.held."""
        chunk = self._index.chunk(inode, index)
        record = self._index.inode(inode)
        return _new_tuple(HeldChunk, (chunk.version, record.floor, record.cut, chunk.requests))

    def changing(self, inode: int, index: int) -> None:
        """See ChunkWriter.changing."""
        self._location_leases.changing_chunk(inode, index)

    def places_first(self, offset: int, length: int) -> bool:
        """See ChunkWriter.places_first."""
        least = self._device.direct_write_bytes
        return (
            length >= least > 0
            and not (offset | length) & _BLOCK_MASK
            and 0 <= offset <= _CHUNK_BYTES - length
        )

    # -- in one step -------------------------------------------------------------------------------------------------

    def write_now(self, write: ChunkWrite, epoch: int, version: int, placed: Placed | None = None) -> int:
        """Apply a write; see ChunkStore.write_now. `placed`: its staged blocks, for `drop_placed` afterwards.

        If this raises, staged blocks of the write are free again.
        """
        store, kv = self._store, self._kv
        if store.fenced_because or store.closed:
            store.refuse_when_fenced()
        if kv.full:
            raise MustWait(kv.room)
        offset = write.offset
        length = len(write.buffer)
        if not length or offset < 0 or offset + length > _CHUNK_BYTES:
            raise InvalidRequest(f"a write of {length} bytes at {offset} does not lie in a chunk")
        check_table(write.table)
        chunk = self._index.chunk(write.inode, write.index)
        record = self._index.inode(write.inode)
        request = write.request
        if chunk.requests and request is not None and is_done(chunk.requests, request):
            return chunk.version
        cut, known_cut = write.cut, record.cut
        if cut < known_cut and not version:
            raise StaleCut(f"inode {write.inode} was cut ({known_cut}) after this write began ({cut})")
        new_version = self.next_version(chunk, record, epoch, version)
        if (
            placed is not None
            and placed.sums is not None
            and (placed.version != chunk.version or placed.transaction is None)
        ):  # prepared for an older version of the chunk
            self.drop_placed(placed)
            placed = None
        if placed is None or placed.sums is None:
            buffers, sums = self._merger.whole_blocks(
                chunk, offset, write.buffer, write.checksums, write.cipher
            )
        else:
            buffers, sums = [], placed.sums
        first, count = offset >> 12, len(sums) >> 2
        place = 0
        if (
            not chunk.version
            and not first
            and count == 1
            and (not self._quarantine.chunks or write.name not in self._quarantine.chunks)
        ):
            place = self._allocator.find_block() if placed is None else placed.block
        if place:
            return self._name_first(chunk, write, new_version, place, sums, buffers, placed)
        old = self._index.places(chunk, first, count)
        if placed is not None:
            transaction, runs = placed.transaction, placed.runs
            placed.transaction = None
        else:
            transaction = Transaction()
            try:
                runs = self._allocator.allocate(transaction, count, grows=0 in old)
            except SpacePending:
                raise MustWait(store.make_room) from None
        try:
            if placed is None:
                self.write_runs(runs, buffers)
            transaction.free_places(old)
            places = array("Q")
            for begin, blocks in runs:
                places.extend(range(begin, begin + blocks))
            segments = self.segments_at(chunk, first, places, sums)
            requests = (
                chunk.requests if request is None else index_records.with_request(chunk.requests, request)
            )
            head = Head(new_version, max(cut, chunk.cut), requests, write.table or chunk.table)
            self.apply_segments(transaction, chunk, segments, head, range(first, first + count))
        except BaseException:
            self._allocator.drop(transaction)
            raise
        store.was_written()
        return new_version

    def _name_first(
        self,
        chunk: Chunk,
        write: ChunkWrite,
        version: int,
        place: int,
        sums: bytes,
        buffers: list[Any],
        placed: Placed | None,
    ) -> int:
        """Apply a write whose only block, at `place`, is the first block of a chunk that does not exist.

        Without `placed` the block is one that `find_block` found, and the bytes are written here.
        """
        store, allocator = self._store, self._allocator
        transaction = None
        if placed is not None:
            transaction, placed.transaction = placed.transaction, None
        table = write.table or chunk.table
        try:
            if transaction is None:
                self._device.write(buffers, place << 12)
            requests = chunk.requests
            if write.request is not None:
                requests = index_records.with_request(requests, write.request)
            effects = allocator.block_effects(place)
            key = index_records.segment_key(write.inode, write.index, 0)
            record = index_records.encode_small(version, write.cut, table, place, 1, requests, sums)
            effects.insert(0, (key, record))
            # Before the change: a client that reads the old locations from now on asks again for the locations.
            self._location_leases.changing_chunk(write.inode, write.index)
            self._kv.apply(effects)
        except BaseException:
            if transaction is not None:
                allocator.drop(transaction)
            raise
        allocator.commit_block(place, transaction is not None)
        segment: IndexSegment = IndexSegment.__new__(IndexSegment)
        segment.disk, segment.base, segment.crcs = array("Q", (place,)), place, sums
        chunk.version, chunk.cut, chunk.requests, chunk.table = version, write.cut, requests, table
        chunk.segments = [segment]
        store.was_written(_BLOCK_BYTES if transaction is None else 0)
        return version

    def prepare_now(self, write: ChunkWrite) -> Placed:
        """See ChunkWriter.prepare_now."""
        store = self._store
        if store.fenced_because or store.closed:
            store.refuse_when_fenced()
        chunk = self._index.chunk(write.inode, write.index)
        offset = write.offset
        buffers, sums = self._merger.whole_blocks(chunk, offset, write.buffer, write.checksums, write.cipher)
        count = len(sums) >> 2
        grows = not chunk.version or 0 in self._index.places(chunk, offset >> 12, count)
        transaction = Transaction()
        try:
            runs = self._allocator.allocate(transaction, count, grows=grows)
        except SpacePending:
            raise MustWait(store.make_room) from None
        placed = Placed(transaction, runs, sums, chunk.version, None, runs[0][0] if count == 1 else 0)
        try:
            length = len(write.buffer)
            if self.places_first(offset, length):
                placed.writing = self._device.write_direct(
                    buffers[0], [(place << 12, blocks << 12) for place, blocks in runs]
                )
                store.note_written(length)
            else:
                self.write_runs(runs, buffers)
        except BaseException:
            self.drop_placed(placed)
            raise
        return placed

    def drop_placed(self, placed: Placed) -> None:
        """Free the staged blocks, unless a write has named them.

        While the drive is still writing them, no other write may get them.
        """
        transaction, placed.transaction = placed.transaction, None
        if transaction is None:
            return
        if placed.writing is None or placed.writing.done():
            self._allocator.drop(transaction)
        else:
            placed.writing.add_done_callback(partial(self._direct_write_ended, transaction))

    def _direct_write_ended(self, transaction: Transaction, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # marks the exception as retrieved
        self._allocator.drop(transaction)

    # -- with waits --------------------------------------------------------------------------------------------------

    async def write(self, write: ChunkWrite, epoch: int, version: int) -> int:
        """Call `write_now` and repeat it after each wait; a large write is staged first."""
        placed = None
        if self.places_first(write.offset, len(write.buffer)):
            placed = await self.stage(write)
        try:
            for _ in range(_TRIES_MAX):
                try:
                    return self.write_now(write, epoch, version, placed)
                except MustWait as wait:
                    await wait.until()
            raise Busy("the store did not find room for the write")
        finally:
            if placed is not None:
                self.drop_placed(placed)

    async def stage(self, write: ChunkWrite) -> Placed:
        """See ChunkWriter.stage."""
        placed = await (self._place(write) if write.cipher is None else self.prepare(write))
        if placed.writing is not None:
            try:
                await asyncio.shield(placed.writing)
            except BaseException:
                self.drop_placed(placed)
                raise
        return placed

    async def _place(self, write: ChunkWrite) -> Placed:
        """Begin to write the bytes to free blocks; they fit any version of the chunk."""
        store, transaction, count = self._store, Transaction(), len(write.buffer) >> 12
        for _ in range(_TRIES_MAX):
            store.refuse_when_fenced()
            try:
                chunk = self._index.chunk(write.inode, write.index)
                grows = 0 in self._index.places(chunk, write.offset >> 12, count)
                runs = self._allocator.allocate(transaction, count, grows=grows)
                break
            except SpacePending:
                await store.make_room()
        else:
            raise Busy("the store did not find room for the write")
        placed = Placed(transaction, runs)
        placed.writing = self._device.write_direct(
            write.buffer, [(place << 12, blocks << 12) for place, blocks in runs]
        )
        store.note_written(len(write.buffer))
        return placed

    async def prepare(self, write: ChunkWrite) -> Placed:
        """See ChunkWriter.prepare."""
        for _ in range(_TRIES_MAX):
            try:
                return self.prepare_now(write)
            except MustWait as wait:
                await wait.until()
        raise Busy("the store did not find room for the write")

    # -- steps of a change -------------------------------------------------------------------------------------------

    def next_version(self, chunk: Chunk, record: InodeRecord, epoch: int, given: int) -> int:
        """Return the version of a chunk after a change; `given` 0 lets the store choose."""
        if not given:
            if not chunk.version and not record.floor:
                return epoch << 32 | 1  # as next_version, for a chunk that never existed
            return next_version(MemberChunkState(chunk.version, record.floor), epoch)
        if given <= chunk.version:
            raise StaleEpoch(
                f"chunk {chunk.index} of inode {chunk.inode} has version {chunk.version} already, not {given}"
            )
        return given

    def write_runs(self, runs: list[Run], buffers: list[Any]) -> None:
        """Write the buffers to these blocks. The next sync covers them."""
        if len(runs) == 1:
            self._device.write(buffers, runs[0][0] << 12)
            if len(buffers) == 1:
                self._store.note_written(len(buffers[0]))
                return
        else:
            whole = memoryview(buffers[0] if len(buffers) == 1 else b"".join(buffers))
            at = 0
            for place, blocks in runs:
                self._device.write([whole[at : at + (blocks << 12)]], place << 12)
                at += blocks << 12
        self._store.note_written(sum(map(len, buffers)))

    def segments_at(
        self, chunk: Chunk, first: int, places: array[int], sums: bytes
    ) -> list[tuple[int, IndexSegment, int, int]]:
        """Build the segments of a chunk with new blocks from `first` on.

        The blocks lie at `places` (0: a hole) and have the checksums `sums`. The result is the argument of
        `apply_segments`; all of these blocks are fresh.
        """
        segments: list[tuple[int, IndexSegment, int, int]] = []
        block, end = first, first + len(places)
        while block < end:
            number, within = block >> _SEGMENT_BITS, block & _SEGMENT_MASK
            blocks = min(_SEGMENT_BLOCKS - within, end - block)
            at = block - first
            segment = replaced(
                self._index.segment(chunk, number),
                within,
                places[at : at + blocks],
                sums[at * 4 : (at + blocks) * 4],
            )
            segments.append((number, segment, within, blocks))
            block += blocks
        return segments

    def apply_segments(
        self,
        transaction: Transaction,
        chunk: Chunk,
        segments: list[tuple[int, IndexSegment, int, int]],
        head: Head,
        overwritten: range,
        reclaims: bool = False,
    ) -> None:
        """Apply one change: these segments, the head of the chunk, the free map.

        On return the chunk in memory has the new state; if this raises, nothing changed. A segment is
        (number, its new state, first fresh block, number of fresh blocks).
        """
        inode, index = chunk.inode, chunk.index
        effects: list[Effect] = []
        if segments[0][0]:
            segments.insert(0, (0, self._index.segment(chunk, 0), 0, 0))
        for number, segment, fresh, blocks in segments:
            key = index_records.segment_key(inode, index, number)
            if number and not segment.disk:
                effects.append((key, None))
            else:
                effects.append((key, encode_segment(segment, None if number else head, fresh, blocks)))
        healed = self._quarantine.within(inode, range(index, index + 1), overwritten)
        if healed:
            effects += [(bad_key(*name), None) for name in healed]
        self.apply(transaction, effects, inode, (index,), reclaims)
        chunk.version, chunk.cut, chunk.requests, chunk.table = head
        for number, segment, _, _ in segments:
            self._index.store(chunk, number, segment)
        self._quarantine.forget(healed)

    def apply(
        self,
        transaction: Transaction,
        effects: list[Effect],
        inode: int = 0,
        indexes: Sequence[int] = (),
        reclaims: bool = False,
    ) -> None:
        """Apply one kv change: index records of these chunks, and the free map.

        `inode` 0: the inode of the blocks is unknown. If this raises, neither change happened; the caller
        drops the transaction.
        """
        # Before the change: a client that reads the old locations from now on asks again for the locations.
        self._location_leases.changing(inode, indexes)
        if transaction.freed:
            transaction.until = self._location_leases.until(inode)
        effects += self._allocator.effects(transaction)
        sequence = self._kv.apply(effects, reclaims=reclaims)
        self._allocator.commit(transaction, sequence)
