"""Transfer of whole chunks out of a block store and into it.

The module also lists the versions of chunks. This is the store's side of copies between targets. A chunk is
installed by one kv change that names all its new blocks, frees all old ones, and has the version, the
requests and the inode's truncate number. The blocks are on the drive before the change (one sync for all
chunks installed together). So a replay has nothing to check, and a loss of power leaves the old chunk or the
new one. A block that was bad at its source gets zeros under its correct checksum: a reader gets the mismatch
here as there.

The block store inherits from `ChunkTransfer`; callers use the ChunkStore interface.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from nvpool.core.checksum import ZERO_BLOCK_CHECKSUM, first_bad_block
from nvpool.core.errors import Busy, CorruptRecord
from nvpool.core.units import BLOCK_BYTES
from nvpool.kv.api import Effect
from nvpool.poolmap.chains.protocol import raised
from nvpool.poolmap.chains.tables import ChainSet
from nvpool.store.chunks import salvage
from nvpool.store.chunks import truncate as store_truncate
from nvpool.store.chunks.api import (
    CHUNK_BLOCKS_MAX,
    LOST_CHECKSUM,
    ChunkCopy,
    ChunkState,
    ChunkVersion,
    InodeCut,
    VersionsStep,
    check_copy,
)
from nvpool.store.chunks.index import SEGMENTS_MAX
from nvpool.store.disk.allocator import SpacePending, Transaction
from nvpool.store.disk.index_records import (
    NOTE_KEY,
    SEGMENT_BITS,
    SEGMENT_BLOCKS,
    TABLE_MAX,
    Head,
    IndexSegment,
    InodeRecord,
    bad_key,
    decode_inode,
    decode_segment,
    encode_inode,
    encode_segment,
    inode_key,
    segment_key,
    split_segment_key,
    state_of,
)

STEP_RECORDS = 512
"""Records examined in one step, 1 to 2 ms; more than the segments of the largest chunk."""
_SCAN_RECORDS = 256
_TRIES_MAX = 1000
_ZERO_CRC = ZERO_BLOCK_CHECKSUM.to_bytes(4, "little")
_LOST_CRC = LOST_CHECKSUM.to_bytes(4, "little")
_LAST_INDEX = 0xFFFFFFFF


class ChunkTransfer:
    """Chunk transfer methods; all attributes that they use belong to the block store."""

    def versions(
        self,
        after: tuple[int, int] | None,
        limit: int,
        wanted: ChainSet | None = None,
        until: tuple[int, int] | None = None,
    ) -> VersionsStep:
        self.refuse_when_fenced()
        first = b"c" if after is None else segment_key(*after, 0xFF) + b"\0"
        end = b"d" if until is None else segment_key(*until, 0xFF) + b"\0"
        chunks: list[ChunkVersion] = []
        looked = 0
        begun = last = None  # the chunk whose records come now, and the last complete one
        version = cut = table = blocks = 0
        is_wanted = done = False
        while looked < STEP_RECORDS:
            try:
                pairs = self.kv.scan(first, end, _SCAN_RECORDS)
            except CorruptRecord as error:
                if not first <= error.key < end:
                    raise
                pairs = [*self.kv.scan(first, error.key, _SCAN_RECORDS), (error.key, b"")]
            done = not pairs
            for key, raw in pairs:
                inode, index, _segment = split_segment_key(key)
                if (inode, index) != begun:
                    if begun is not None:
                        last = begun
                        if is_wanted:
                            chunks.append(ChunkVersion(*begun, table, version, cut, blocks))
                    begun, blocks = (inode, index), 0
                    version, cut, table, blocks = _state(key, raw)
                    is_wanted = (
                        wanted is None
                        or wanted.has_chunk(table, inode, index)
                        or (
                            not version
                            and any(wanted.has_chunk(one, inode, index) for one in range(1, TABLE_MAX + 1))
                        )
                    )
                    if len(chunks) >= limit:
                        break
                elif is_wanted:
                    blocks += _state(key, raw)[3]
            else:
                if not done:
                    looked += len(pairs)
                    first = pairs[-1][0] + b"\0"
                    continue
            break
        if done and begun is not None and is_wanted:
            chunks.append(ChunkVersion(*begun, table, version, cut, blocks))
        return self._with_cuts(after, chunks, None if done else last, until)

    def _with_cuts(
        self,
        after: tuple[int, int] | None,
        chunks: list[ChunkVersion],
        end: tuple[int, int] | None,
        until: tuple[int, int] | None,
    ) -> VersionsStep:
        first = inode_key(after[0]) if after is not None else b"i"
        last = end or until
        pairs = self.kv.scan(first, inode_key(last[0]) + b"\0" if last is not None else b"j", STEP_RECORDS)
        inodes = [
            InodeCut(int.from_bytes(key[1:], "big"), record.cut, record.floor, record.chunk_bits)
            for key, raw in pairs
            for record in (decode_inode(key, raw),)
        ]
        if len(pairs) == STEP_RECORDS:  # the next step continues after them, for the chunks too
            end = inodes[-1].inode, _LAST_INDEX
            chunks = [one for one in chunks if one[:2] <= end]
        return VersionsStep(chunks, inodes, end)

    def state(self, inode: int, index: int) -> ChunkState:
        return ChunkState(self.index.chunk(inode, index).version, self.index.inode(inode).cut)

    # -- reading chunks --------------------------------------------------------------------------------------------------

    async def fetch(
        self, inode: int, index: int, first: int = 0, blocks: int = CHUNK_BLOCKS_MAX
    ) -> ChunkCopy:
        self.refuse_when_fenced()
        chunk = self.index.chunk(inode, index)
        known = InodeCut(inode, *self.index.inode(inode))
        if not chunk.version:
            return ChunkCopy(inode, index, known=known)
        end = min(first + blocks, CHUNK_BLOCKS_MAX)
        there: list[tuple[int, int, bytes]] = []  # block, place, checksum
        more = False
        for (_, number, segment), key, raw in self.index.records(inode, index, SEGMENTS_MAX + 1, index + 1):
            if number != index:
                break
            base = segment << SEGMENT_BITS
            if base >= end:
                more = more or state_of(key, raw)[3] > 0
                continue
            if base + SEGMENT_BLOCKS <= first:
                continue
            decoded = decode_segment(key, raw)[0]
            for at, place in enumerate(decoded.disk):
                if place and base + at >= end:
                    more = True
                elif place and base + at >= first:
                    there.append((base + at, place, decoded.crcs[at * 4 : at * 4 + 4]))
        version, cut, requests, table = chunk.version, chunk.cut, chunk.requests, chunk.table
        content, bad = await self._content(inode, index, there)
        return ChunkCopy(
            inode,
            index,
            version,
            table,
            cut,
            requests,
            known,
            _runs([block for block, _, _ in there]),
            b"".join([checksum for _, _, checksum in there]),
            content,
            tuple(bad),
            more,
        )

    async def _content(
        self, inode: int, index: int, there: list[tuple[int, int, bytes]]
    ) -> tuple[memoryview, list[int]]:
        """Read the bytes of these blocks; return them and the list of bad blocks."""
        into = self.device.buffer(len(there) * BLOCK_BYTES)
        failed: set[int] = set()
        texts: dict[int, str] = {}
        runs = _runs([place for _, place, _ in there])
        offsets, lengths, positions, at = [], [], [], 0
        for place, count in runs:
            offsets.append(place << 12)
            lengths.append(count << 12)
            positions.append(at << 12)
            at += count
        with self.readings.held():
            missed = self.device.read_now(offsets, lengths, positions, into) if offsets else []
            if missed:
                outcome = await self.device.read(
                    [offsets[n] for n in missed],
                    [lengths[n] for n in missed],
                    [positions[n] for n in missed],
                    into,
                )
                for n, error in zip(missed, outcome, strict=True):
                    if error is not None:
                        failed.update(range(positions[n] >> 12, positions[n] + lengths[n] >> 12))
            if failed:  # only some blocks of a run may be bad: read one by one
                alone = sorted(failed)
                outcome = await self.device.read(
                    [there[n][1] << 12 for n in alone],
                    [BLOCK_BYTES] * len(alone),
                    [n << 12 for n in alone],
                    into,
                )
                texts = {
                    n: f"cannot be read: {error}"
                    for n, error in zip(alone, outcome, strict=True)
                    if error is not None
                }
        sums = b"".join([checksum for _, _, checksum in there])
        at = 0
        while at < len(there):
            wrong = first_bad_block(into[at << 12 :], sums[at * 4 :])
            if wrong < 0:
                break
            at += wrong
            texts.setdefault(at, "does not fit its checksum when copied")
            at += 1
        for n, text in texts.items():
            block, place, _ = there[n]
            into[n << 12 : (n + 1) << 12] = bytes(BLOCK_BYTES)
            if self.index.places(self.index.chunk(inode, index), block, 1) == [place]:
                self.quarantine.note(inode, index, block, text)
        return into, [there[n][0] for n in sorted(texts)]

    # -- installing chunks -------------------------------------------------------------------------------------------------

    async def install(self, copies: Sequence[tuple[ChunkCopy, ChunkState]]) -> list[bool]:
        self.refuse_when_fenced()
        for copy, _ in copies:
            check_copy(copy)
        placed: list[Transaction] = []
        done = 0
        try:
            for copy, _ in copies:
                transaction = Transaction()
                placed.append(transaction)
                await self._place_copy(transaction, copy)
            if any(transaction.taken for transaction in placed):
                await self.sync_data()  # before the changes name them: see the module docstring
            found = []
            for (copy, expected), transaction in zip(copies, placed, strict=True):
                if self.kv.full:
                    await self.kv.room()
                self.refuse_when_fenced()
                fits = self.state(copy.inode, copy.index) == expected  # no wait from here to the change
                if fits:
                    self._name_copy(transaction, copy)
                else:
                    self.allocator.drop(transaction)
                done += 1
                found.append(fits)
                self.was_written()
            return found
        finally:
            for transaction in placed[done:]:
                self.allocator.drop(transaction)

    async def _place_copy(self, transaction: Transaction, copy: ChunkCopy) -> None:
        count = len(copy.checksums) >> 2
        if not count:
            return
        for _ in range(_TRIES_MAX):
            self.refuse_when_fenced()
            old = sum(
                state_of(key, raw)[3]
                for _, key, raw in self.index.records(
                    copy.inode, copy.index, SEGMENTS_MAX + 1, copy.index + 1
                )
            )
            try:
                runs = self.allocator.allocate(transaction, count, grows=count > old)
                break
            except SpacePending:
                await self.make_room()
        else:
            raise Busy("the store did not find room for the chunk")
        if 0 < self.device.direct_write_bytes <= len(copy.content):
            # Not aborted by a cancellation: no other write may get these blocks while the drive is still
            # writing them.
            writing = self.device.write_direct(
                copy.content, [(place << 12, blocks << 12) for place, blocks in runs]
            )
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])
                raise
            self.note_written(len(copy.content))
        else:
            self.writer.write_runs(runs, [copy.content])

    def _name_copy(self, transaction: Transaction, copy: ChunkCopy) -> None:
        gone: dict[bytes, bytes | None] = {}
        for _, key, raw in self.index.records(copy.inode, copy.index, SEGMENTS_MAX + 1, copy.index + 1):
            gone[key] = None
            transaction.free_places(decode_segment(key, raw)[0].disk)
        self.name_copy(transaction, copy, gone)

    def name_copy(
        self, transaction: Transaction, copy: ChunkCopy, effects: dict[bytes, bytes | None]
    ) -> None:
        """Apply the one change that installs the copy.

        The copy replaces the records that `effects` removes.
        """
        inode, index = copy.inode, copy.index
        if copy.version:
            head = Head(copy.version, copy.cut, copy.requests, copy.table)
            for number, segment in _segments(copy, transaction.taken):
                # A copy with bad blocks has no fresh ones: a replay would find the bad ones and reject the
                # whole change.
                fresh = 0 if copy.bad else len(segment.disk)
                effects[segment_key(inode, index, number)] = encode_segment(
                    segment, None if number else head, 0, fresh
                )
        healed = self.quarantine.within(inode, range(index, index + 1))
        effects |= {bad_key(*name): None for name in healed}
        record = self._newer_record(copy.known)
        if record is not None:
            effects[inode_key(inode)] = encode_inode(record)
        self.writer.apply(transaction, list(effects.items()), inode, (index,), reclaims=not copy.version)
        self.index.forget(inode, index)
        if record is not None:
            self.index.set_inode(inode, record)
        self.quarantine.forget(healed)
        for block in copy.bad:
            self.quarantine.note(inode, index, block, "was bad already where it was copied from")

    def _newer_record(self, known: InodeCut) -> InodeRecord | None:
        now = self.index.inode(known.inode)
        floor = raised(now.floor, known.floor)
        if known.cut <= now.cut and floor == now.floor:
            return None
        return InodeRecord(max(known.cut, now.cut), floor, known.chunk_bits or now.chunk_bits)

    def unreadable(self, inode: int, index: int) -> bool:
        return salvage.is_unreadable(self, inode, index)

    async def install_over(self, copy: ChunkCopy) -> bool:
        self.refuse_when_fenced()
        return await salvage.install_over(self, copy)

    def note(self) -> bytes:
        return self.kv.get(NOTE_KEY) or b""

    def keep_note(self, raw: bytes) -> None:
        self.kv.apply([(NOTE_KEY, raw)], reclaims=True)

    async def discard(self, inode: int, index: int, is_wanted: Callable[[], bool] | None = None) -> int:
        self.refuse_when_fenced()
        return (await store_truncate.drop(self, inode, index, None, index + 1, is_wanted))[1] * BLOCK_BYTES

    def table_of(self, inode: int, index: int) -> int:
        chunk = self.index.chunk(inode, index)
        return chunk.table if chunk.version else 0

    @property
    def on_bad(self) -> Callable[[], None] | None:
        return self.quarantine.on_bad

    @on_bad.setter
    def on_bad(self, callback: Callable[[], None] | None) -> None:
        self.quarantine.on_bad = callback

    async def mend(
        self,
        inode: int,
        index: int,
        block: int,
        content: bytes | memoryview,
        *,
        checksum: bytes = b"",
        version: int = 0,
    ) -> bool:
        given, is_hole = checksum, not len(content)
        for _ in range(_TRIES_MAX):
            self.refuse_when_fenced()
            if self.kv.full:
                await self.kv.room()
            chunk = self.index.chunk(inode, index)
            now, places = chunk.version, self.index.places(chunk, block, 1)
            within = (block & SEGMENT_BLOCKS - 1) * 4
            checksum = self.index.segment(chunk, block >> SEGMENT_BITS).crcs[within : within + 4]
            if not now or not places[0]:
                return False
            if checksum == _LOST_CRC:
                if version != now:
                    return False
                checksum = _ZERO_CRC if is_hole else given
            elif is_hole:
                return False
            if not is_hole and (
                len(content) != BLOCK_BYTES or len(checksum) != 4 or first_bad_block(content, checksum) >= 0
            ):
                return False
            transaction = Transaction()
            try:
                runs = self.allocator.allocate(transaction, 1, grows=False) if not is_hole else [(0, 1)]
            except SpacePending:
                await self.make_room()
                continue
            try:
                if not is_hole:
                    self.writer.write_runs(runs, [content])
                    await self.sync_data()  # else a loss of power could bring the bad block back
                if (
                    self.index.chunk(inode, index) is not chunk
                    or chunk.version != now
                    or self.kv.full
                    or self.index.places(chunk, block, 1) != places
                ):
                    self.allocator.drop(transaction)
                    continue
                transaction.free_places(places)
                head = Head(now, chunk.cut, chunk.requests, chunk.table)
                segments = self.writer.segments_at(chunk, block, array("Q", [runs[0][0]]), checksum)
                self.writer.apply_segments(transaction, chunk, segments, head, range(block, block + 1))
            except BaseException:
                self.allocator.drop(transaction)
                raise
            return True
        raise Busy("the block was not replaced: no space, or its chunk keeps changing")

    async def raise_cuts(self, inodes: Sequence[InodeCut]) -> None:
        at = 0
        while at < len(inodes):
            if self.kv.full:
                await self.kv.room()
            self.refuse_when_fenced()
            part = {one.inode: one for one in inodes[at : at + _SCAN_RECORDS]}
            at += _SCAN_RECORDS
            records = [
                (number, record)
                for number, one in part.items()
                if (record := self._newer_record(one)) is not None
            ]
            effects: list[Effect] = [(inode_key(number), encode_inode(record)) for number, record in records]
            if effects:
                self.kv.apply(effects)
                for number, record in records:
                    self.index.set_inode(number, record)


def _state(key: bytes, raw: bytes) -> tuple[int, int, int, int]:
    try:
        return state_of(key, raw)
    except CorruptRecord:
        return 0, 0, 0, 0


def _runs(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    """Merge consecutive numbers into (first, count) runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return tuple((first, count) for first, count in runs)


def _segments(copy: ChunkCopy, taken: list[tuple[int, int]]) -> list[tuple[int, IndexSegment]]:
    """Return the segments of the copy with its blocks at these places; segment 0 is always included."""
    blocks = [block for first, count in copy.runs for block in range(first, first + count)]
    places = [place for first, count in taken for place in range(first, first + count)]
    found: dict[int, tuple[array, list[bytes]]] = {0: (array("Q"), [])}
    for n, (block, place) in enumerate(zip(blocks, places, strict=True)):
        disk, crcs = found.setdefault(block >> SEGMENT_BITS, (array("Q"), []))
        while len(disk) < block & SEGMENT_BLOCKS - 1:
            disk.append(0)
            crcs.append(_ZERO_CRC)
        disk.append(place)
        crcs.append(copy.checksums[n * 4 : n * 4 + 4])
    return [(number, IndexSegment(disk, b"".join(crcs))) for number, (disk, crcs) in found.items()]
