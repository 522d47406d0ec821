"""Batched reads: from packed headers to buffers, checksums and results, with little work for each read.

One pass over the headers finds the grant, chunk and disk blocks of each read and collects three lists of
numbers. One call passes the lists to the device. One buffer holds all blocks in the order of the reads. A
successful read needs no object, no task and no exception. If a compiler was available, `_read_batch.find`
does the pass over all reads of the common case. Then a warm 4 KiB read in a batch of 256 takes 1.4 µs of the
store's processor time, compared with 1.9 in Python. The user is the block store.
"""

from __future__ import annotations

import math
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from nvpool.blockio.api import Outcome
from nvpool.core.checksum import ZERO_BLOCK_CHECKSUM, first_bad_block
from nvpool.core.compiled_loader import load_compiled
from nvpool.core.errors import (
    ChecksumMismatch,
    CorruptRecord,
    InvalidRequest,
    NvpoolError,
    StaleGrant,
)
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX
from nvpool.kv.api import Kv
from nvpool.rpc.messages.read_write_codec import CLIENT_CACHES
from nvpool.store.chunks.api import (
    ALL_INODES,
    READ_BATCH_BYTES_MAX,
    UNCHECKED,
    BufferSource,
    LocatedBlocks,
    ReadBatch,
)
from nvpool.store.chunks.index import Chunk, Index
from nvpool.store.disk.bad_blocks import Quarantine
from nvpool.store.disk.device import Device
from nvpool.store.disk.index_records import SEGMENT_BITS, SEGMENT_BLOCKS, SEGMENT_MASK

compiled = load_compiled("nvpool.store.chunks._read_batch")

READ = struct.Struct("<QIIIHH")
RESULT = struct.Struct("<HHIQ")
_ZERO_CRC = ZERO_BLOCK_CHECKSUM.to_bytes(4, "little")
_BLOCK_MASK = BLOCK_BYTES - 1
_NOTHING = memoryview(b"")


class DriveReads:
    """Reads that wait for the drive. No write gets the blocks of such a read before the read ends."""

    def __init__(self, kv: Kv):
        self._kv = kv
        self._begun: dict[int, int] = {}
        self._last = 0

    def begin(self, sequence: int) -> int:
        """Register a waiting read; return the number for `end`.

        `sequence` is the last change at the time when the read looked at the index.
        """
        self._last = number = self._last + 1
        self._begun[number] = sequence
        return number

    def end(self, number: int) -> None:
        del self._begun[number]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context of a read that looks at the index now and waits later."""
        number = self.begin(self._kv.sequence)
        try:
            yield
        finally:
            self.end(number)

    def oldest(self) -> float:
        """Return the sequence of the change at which the oldest waiting read began.

        Infinite if none waits.
        """
        return min(self._begun.values(), default=math.inf)


class _Work:
    """State for finishing a batch that waits for the drive or is checked.

    These are the device's lists, the buffer, and the reads to check or to drop.
    """

    __slots__ = (
        "offsets",
        "lengths",
        "positions",
        "into",
        "reads",
        "crcs",
        "failed",
        "checked",
        "starts",
        "sequence",
    )

    def __init__(
        self,
        lists: tuple[list[int], list[int], list[int]],
        into: memoryview,
        reads: bytes,
        crcs: list[bytes],
        checked: list[int],
        starts: list[int],
    ) -> None:
        self.offsets, self.lengths, self.positions = lists
        self.into = into
        self.reads = reads
        self.crcs = crcs
        self.failed: dict[int, type[NvpoolError]] = {}
        self.checked = checked
        self.starts = starts
        self.sequence = 0


_TOGETHER_MIN = 7
"""Smallest number of remaining reads that is worth a common chunk look-up.

The look-up saves 3 % of 7 µs for each read with 8 reads, and 11 % with 1,024.
"""


class BlockBatchReader:
    def __init__(self, index: Index, device: Device, readings: DriveReads, quarantine: Quarantine):
        self._index = index
        self._device = device
        self._readings = readings
        self._quarantine = quarantine
        self.read_bytes = 0
        self.read_count = 0
        self.missed_count = 0

    def begin(self, reads: bytes, owners, verify: bool, room: BufferSource | None = None) -> ReadBatch:
        """See ChunkStore.read_now."""
        if len(reads) % READ.size:
            raise InvalidRequest(f"{len(reads)} bytes are not whole read headers")
        batch = ReadBatch()
        index = self._index
        young = index.young
        offsets: list[int] = []
        lengths: list[int] = []
        positions: list[int] = []
        crcs: list[bytes] = []
        starts: list[int] = []
        checked: list[int] = []
        results = batch.results = bytearray(len(reads) // READ.size * RESULT.size)
        pack_result = RESULT.pack_into
        bad_chunks = self._quarantine.chunks
        flag = 0 if verify else UNCHECKED
        zeros: list[tuple[int, int]] = []
        at = number = 0  # position of the next block in the payload; number of the next read
        holes = 0  # requested bytes without a block in the payload: they cost time too, and no memory
        count = len(reads) // READ.size
        find = compiled.find if compiled is not None else None
        looked_up = False
        while number < count:
            if find is not None and not bad_chunks:
                number, at = find(
                    reads,
                    number,
                    owners,
                    index.young,
                    results,
                    flag,
                    at,
                    offsets,
                    lengths,
                    positions,
                    crcs,
                    starts,
                )
                if number == count:
                    break
            inode, which, offset, length, grant, _ = READ.unpack_from(reads, number * READ.size)
            place = number * RESULT.size
            number += 1
            starts.append(len(offsets))
            try:
                owner = owners[grant]
                if owner != inode and owner != ALL_INODES:
                    pack_result(results, place, StaleGrant.wire_code, 0, 0, 0)
                    crcs.append(b"")
                    continue
                chunk = young.get((inode, which))
                if chunk is None:
                    if not looked_up and count - number >= _TOGETHER_MIN:
                        looked_up = True
                        index.look_up(
                            {
                                (read[0], read[1])
                                for read in READ.iter_unpack(reads[(number - 1) * READ.size :])
                            }
                        )
                    chunk = index.chunk(inode, which)
                    young = index.young
                if length == BLOCK_BYTES and not offset & _BLOCK_MASK and offset < CHUNK_BYTES_MAX:
                    block = offset >> 12
                    within = block & SEGMENT_MASK
                    try:
                        segment = chunk.segments[block >> SEGMENT_BITS] or index.segment(
                            chunk, block >> SEGMENT_BITS
                        )
                    except IndexError:
                        segment = index.segment(chunk, block >> SEGMENT_BITS)
                    try:
                        disk = segment.disk[within]
                    except IndexError:
                        disk = 0
                    if disk:
                        offsets.append(disk << 12)
                        lengths.append(BLOCK_BYTES)
                        positions.append(at)
                        crcs.append(segment.crcs[within * 4 : within * 4 + 4])
                        pack_result(results, place, 0, flag, BLOCK_BYTES, chunk.version)
                        at += BLOCK_BYTES
                    else:
                        crcs.append(b"")
                        pack_result(results, place, 0, 0, 0, chunk.version)
                else:
                    if (
                        offset & _BLOCK_MASK
                        or length & _BLOCK_MASK
                        or not length
                        or offset + length > CHUNK_BYTES_MAX
                    ):
                        raise InvalidRequest
                    if at + length > READ_BATCH_BYTES_MAX:
                        raise InvalidRequest
                    present, sums = self._blocks(
                        chunk, offset >> 12, length >> 12, at, (offsets, lengths, positions), zeros
                    )
                    crcs.append(sums)
                    pack_result(results, place, 0, flag if present else 0, present << 12, chunk.version)
                    at += present << 12
                    holes += length - (present << 12)
                    if holes > READ_BATCH_BYTES_MAX:
                        break
                if bad_chunks and (inode, which) in bad_chunks:
                    checked.append(number - 1)
            except (NvpoolError, IndexError) as error:
                if isinstance(error, CorruptRecord):
                    self._quarantine.note(inode, which, offset >> 12, f"cannot be found: {error}")
                code = error.wire_code if isinstance(error, NvpoolError) else InvalidRequest.wire_code
                pack_result(results, place, code, 0, 0, 0)
                crcs.append(b"")
        if at > READ_BATCH_BYTES_MAX or holes > READ_BATCH_BYTES_MAX:
            raise InvalidRequest(f"a batch reads at most {READ_BATCH_BYTES_MAX} bytes")
        self.read_count += len(crcs)
        self.read_bytes += at
        into = _NOTHING
        if at:
            theirs = room(at) if room is not None and not verify and not checked else None
            into = self._device.buffer(at) if theirs is None else theirs
            for begin, count in zeros:
                into[begin : begin + count] = bytes(count)
            if offsets:
                batch.missed = self._device.read_now(offsets, lengths, positions, into, _client_caches(reads))
            if batch.missed and theirs is not None:  # the client may go before the drive answers
                into = self._device.buffer(at)
                if zeros or len(batch.missed) < len(offsets):
                    into[:] = theirs
        if batch.missed or verify or checked:
            batch.work = _Work(
                (offsets, lengths, positions),
                into,
                reads,
                crcs,
                list(range(len(crcs))) if verify else checked,
                starts,
            )
            if batch.missed:
                self.missed_count += len(batch.missed)
            else:
                self.complete(batch, batch.work)
            return batch
        if at:
            batch.payload = [into]
        batch.checksums = b"".join(crcs)
        return batch

    def _blocks(
        self,
        chunk: Chunk,
        block: int,
        count: int,
        at: int,
        lists: tuple[list[int], list[int], list[int]],
        zeros: list,
    ) -> tuple[int, bytes]:
        """Add the disk reads of `count` blocks from `block` on.

        Returns the number of blocks up to the last one that is not a hole, and their checksums.
        """
        runs: list[list[int]] = []  # [disk block or 0, count]
        sums: list[bytes] = []
        index = self._index
        end = block + count
        while block < end:
            segment = index.segment(chunk, block >> SEGMENT_BITS)
            within = block & SEGMENT_MASK
            wanted = min(SEGMENT_BLOCKS - within, end - block)
            have = min(wanted, len(segment.disk) - within)
            if have > 0:
                sums.append(segment.crcs[within * 4 : (within + have) * 4])
                if segment.base:
                    extend_runs(runs, segment.base + within, have)
                else:
                    for place in segment.disk[within : within + have]:
                        extend_runs(runs, place, 1)
            else:
                have = 0
            if have < wanted:
                sums.append(_ZERO_CRC * (wanted - have))
                extend_runs(runs, 0, wanted - have)
            block += wanted
        if runs and not runs[-1][0]:
            count -= runs.pop()[1]
        for place, length in runs:
            length <<= 12
            if place:
                for values, value in zip(lists, (place << 12, length, at), strict=True):
                    values.append(value)
            else:
                zeros.append((at, length))
            at += length
        return count, b"".join(sums)[: count * 4]

    def finish(self, batch: ReadBatch, on_done: Callable[[BaseException | None], None]) -> None:
        """See ChunkStore.begin_finish."""
        work, missed = batch.work, batch.missed
        # Changes after this sequence may have freed the blocks that the batch reads.
        number = self._readings.begin(work.sequence)
        try:
            self._device.begin_read(
                [work.offsets[at] for at in missed],
                [work.lengths[at] for at in missed],
                [work.positions[at] for at in missed],
                work.into,
                _client_caches(work.reads),
                partial(self._came, batch, number, on_done),
            )
        except BaseException:
            self._readings.end(number)
            raise

    def _came(
        self, batch: ReadBatch, number: int, on_done: Callable[[BaseException | None], None], outcome: Outcome
    ) -> None:
        self._readings.end(number)
        work, missed = batch.work, batch.missed
        try:
            if any(outcome):
                for at, error in zip(missed, outcome, strict=True):
                    if error is not None:
                        work.failed[bisect_right(work.starts, at) - 1] = type(error)
            batch.missed = []
            self.complete(batch, work)
        except Exception as error:  # the drive's reader has other batches to complete and must continue
            on_done(error)
        else:
            on_done(None)

    def complete(self, batch: ReadBatch, work: _Work) -> None:
        if work.checked:
            self._check(batch, work)
        into = work.into
        if not work.failed:
            batch.payload = [into] if len(into) else []
        else:
            at = 0
            for read in range(len(work.crcs)):
                _, _, length, _ = RESULT.unpack_from(batch.results, read * RESULT.size)
                error = work.failed.get(read)
                if error is not None:
                    RESULT.pack_into(batch.results, read * RESULT.size, error.wire_code, 0, 0, 0)
                    work.crcs[read] = b""
                elif length:
                    batch.payload.append(into[at : at + length])
                at += length
        batch.checksums = b"".join(work.crcs)
        batch.work = None

    def _check(self, batch: ReadBatch, work: _Work) -> None:
        positions = {}
        at = 0
        for read in range(len(work.crcs)):
            positions[read] = at
            at += RESULT.unpack_from(batch.results, read * RESULT.size)[2]
        for read in work.checked:
            sums = work.crcs[read]
            if not sums or read in work.failed:
                continue
            length = len(sums) // 4 * BLOCK_BYTES
            bad = first_bad_block(work.into[positions[read] : positions[read] + length], sums)
            if bad >= 0:
                inode, number, offset, _, _, _ = READ.unpack_from(work.reads, read * READ.size)
                self._quarantine.note(
                    inode, number, (offset >> 12) + bad, "does not fit its checksum when read"
                )
                work.failed[read] = ChecksumMismatch


def _client_caches(reads: bytes) -> bool:
    """Whether the client caches the data. A batch has one client, so its first read says so."""
    return bool(READ.unpack_from(reads)[5] & CLIENT_CACHES)


def extend_runs(runs: list[list[int]], place: int, count: int) -> None:
    """Add `count` disk blocks from `place` on (0: holes) to runs of [first, count]."""
    if runs:
        last = runs[-1]
        if (place and last[0] and last[0] + last[1] == place) or (not place and not last[0]):
            last[1] += count
            return
    runs.append([place, count])


def located(index: Index, chunk: Chunk, blocks: int) -> LocatedBlocks:
    """Return the locations of the first `blocks` blocks of a chunk. Trailing holes may be omitted."""
    runs: list[list[int]] = []
    sums: list[bytes] = []
    at = 0
    for number in range((blocks + SEGMENT_BLOCKS - 1) >> SEGMENT_BITS):
        segment = index.segment(chunk, number)
        start = number << SEGMENT_BITS
        have = min(len(segment.disk), blocks - start)
        if not have:
            continue
        if at < start:
            extend_runs(runs, 0, start - at)
            sums.append(bytes(4 * (start - at)))
        if segment.base:
            extend_runs(runs, segment.base, have)
        else:
            for place in segment.disk[:have]:
                extend_runs(runs, place, 1)
        sums.append(segment.crcs[: 4 * have])
        at = start + have
    return LocatedBlocks(
        chunk.version, at, array("Q", [place << 12 | count - 1 for place, count in runs]), b"".join(sums)
    )
