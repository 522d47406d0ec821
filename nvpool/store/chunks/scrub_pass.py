"""Scrub of a block store: checks every block against its checksum, and the free map against the index.

A pass goes through the index in key order in bounded steps; the cursor is the last key (b"c…"). Each named
block is read and checked. It must lie on the drive, be in use in the free map, and be named only once. During
the pass, one bit is kept for each block seen. At its end the pass reports leaked blocks: blocks in use that
it neither saw nor found changed during the pass. Two kinds of passes still check blocks but skip this last
part: a pass that began before this process, and a pass that met an unreadable record.

With `repair` the free map follows the index. Each correction is one kv change without a wait since the index
was read. A named block that the map calls free is marked as used immediately, before it can be allocated;
until then its chunk could not even be removed. Leaked blocks are freed like those of a write: they are held
until that change is flushed, and with it the change that leaked them. So no loss of power can bring back a
record that names them. Two problems are not repaired: a block named twice (one of the two has the other's
bytes), and a block after the end of the drive.

Blocks are read in the device's background mode; writes continue between steps. The user is the block store.
"""

from __future__ import annotations

import asyncio
import logging

from nvpool.core.checksum import first_bad_block
from nvpool.core.errors import CorruptRecord, InvalidRequest, WrongFormat
from nvpool.core.units import BLOCK_BYTES
from nvpool.store.chunks.api import ScrubStep
from nvpool.store.chunks.block_store_parts import BlockStore
from nvpool.store.disk.allocator import GROUP_BITS, GROUP_BLOCKS, Transaction
from nvpool.store.disk.bad_blocks import BadBlock
from nvpool.store.disk.index_records import SEGMENT_BITS, IndexSegment, decode_segment, split_segment_key

log = logging.getLogger(__name__)

BLOCKS_MAX = 16384
PROBLEMS_MAX = 100
_READ_BLOCKS = 256


class Scrub:
    def __init__(self, store: BlockStore):
        self._store = store
        self._seen: dict[int, int] | None = None
        self._expected = b""
        self._stepping = asyncio.Lock()

    async def step(self, cursor: bytes, blocks: int, repair: bool) -> ScrubStep:
        """See ChunkStore.scrub. InvalidRequest: the cursor is malformed."""
        if cursor and cursor[:1] != b"c":
            raise InvalidRequest("not a cursor of a scrub")
        async with self._stepping:  # `_seen` is what one pass has seen up to `_expected`, nothing else
            try:
                return await self._step(cursor, blocks, repair)
            except BaseException:
                self._blind()
                raise

    def _blind(self) -> None:
        """Mark the pass as incomplete: the free map cannot be compared with it."""
        self._seen = self._store.allocator.changed_groups = None

    async def _step(self, cursor: bytes, blocks: int, repair: bool) -> ScrubStep:
        store = self._store
        if not cursor:
            self._seen = {}
            store.allocator.changed_groups = {}
        elif cursor != self._expected:
            self._blind()
        blocks = max(1, min(blocks, BLOCKS_MAX))
        checked = 0
        bad: list[BadBlock] = []
        problems: list[str] = []
        mended: list[str] = []
        first = cursor + b"\0" if cursor else b"c"
        while checked < blocks:
            with store.readings.held():
                pairs, unreadable = self._scan(first, problems)
                segments = []
                for key, raw in pairs:
                    try:
                        segment, head = decode_segment(key, raw)
                        if head is None and not split_segment_key(key)[2]:
                            raise CorruptRecord(f"the record {key.hex()} of a chunk has no head")
                        segments.append((key, segment))
                    except (CorruptRecord, WrongFormat) as error:
                        self._blind()  # the record names blocks that the pass cannot see
                        problems.append(str(error))
                        inode, index, number = split_segment_key(key)
                        store.quarantine.note(
                            inode, index, number << SEGMENT_BITS, f"cannot be found: {error}"
                        )
                for key, segment in segments:  # all before the first await: later the index may differ
                    self._against_map(key, segment, repair, problems, mended)
                for key, segment in segments:
                    checked += await self._check(key, segment, bad)
            if unreadable:
                first = unreadable + b"\0"
                continue
            if not pairs:
                await self._map_against_index(repair, problems, mended)
                return ScrubStep(b"", True, checked, bad, problems[:PROBLEMS_MAX], mended[:PROBLEMS_MAX])
            first = pairs[-1][0] + b"\0"
        self._expected = first[:-1]
        return ScrubStep(self._expected, False, checked, bad, problems[:PROBLEMS_MAX], mended[:PROBLEMS_MAX])

    def _scan(self, first: bytes, problems: list[str]) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return the next records, and the key of a damaged record after them, or b""."""
        kv = self._store.kv
        try:
            return kv.scan(first, b"d", _READ_BLOCKS // 64), b""
        except CorruptRecord as error:
            self._blind()
            if not first <= error.key < b"d":
                problems.append(
                    f"the index behind {first.hex()} cannot be read, the scrub ends there: {error}"
                )
                return [], b""
            inode, index, number = split_segment_key(error.key)
            problems.append(f"segment {number} of chunk {index} of inode {inode} cannot be read: {error}")
            self._store.quarantine.note(inode, index, number << SEGMENT_BITS, f"cannot be found: {error}")
            return kv.scan(first, error.key, _READ_BLOCKS // 64), error.key

    def _against_map(
        self, key: bytes, segment: IndexSegment, repair: bool, problems: list[str], mended: list[str]
    ) -> None:
        inode, index, number = split_segment_key(key)
        allocator = self._store.allocator
        for at, place in enumerate(segment.disk):
            if not place:
                continue
            where = f"block {(number << SEGMENT_BITS) + at} of chunk {index} of inode {inode}"
            if place >= allocator.block_count:
                problems.append(f"{where} lies at {place}, behind the end of the drive")
                continue
            if not allocator.is_used(place):
                found = mended if repair and self._claim(place) else problems
                found.append(f"{where} lies at {place}, which the free map calls free")
            if self._seen is not None:
                group, bit = place >> GROUP_BITS, 1 << (place & GROUP_BLOCKS - 1)
                seen = self._seen.get(group, 0)
                if seen & bit and not allocator.changed_groups.get(group, 0) & bit:
                    problems.append(f"{where} lies at {place}, which another block has too")
                self._seen[group] = seen | bit

    def _claim(self, place: int) -> bool:
        """Mark the block as used. False: the block is held, so this must wait for the next scrub."""
        store, transaction = self._store, Transaction()
        if store.kv.full or not store.allocator.claim(transaction, place):
            return False
        try:
            store.writer.apply(transaction, [], reclaims=True)
        except BaseException:
            store.allocator.drop(transaction)
            raise
        log.warning("target %d: block %d is marked as used: the index names it", store.target, place)
        return True

    async def _check(self, key: bytes, segment: IndexSegment, bad: list[BadBlock]) -> int:
        store = self._store
        inode, index, number = split_segment_key(key)
        blocks = [(at, place) for at, place in enumerate(segment.disk) if 0 < place < store.block_count]
        if not blocks:
            return 0
        into = store.device.buffer(len(blocks) * BLOCK_BYTES)
        # Always read with `read`: data in memory says nothing about the drive. Stores with O_DIRECT reread
        # everything from the drive; other stores at least reread what the kernel has dropped from its cache.
        outcome = await store.device.read(
            [place << 12 for _, place in blocks],
            [BLOCK_BYTES] * len(blocks),
            [n * BLOCK_BYTES for n in range(len(blocks))],
            into,
        )
        for n, ((at, _), error) in enumerate(zip(blocks, outcome, strict=True)):
            block = (number << SEGMENT_BITS) + at
            text = ""
            if error is not None:
                text = f"cannot be read: {error}"
            elif (
                first_bad_block(
                    into[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES], segment.crcs[at * 4 : at * 4 + 4]
                )
                >= 0
            ):
                text = "does not fit its checksum when scrubbed"
            if text and self._still_there(key, at, segment):
                store.quarantine.note(inode, index, block, text)
                bad.append(BadBlock(inode, index, block, text))
        return len(blocks)

    def _still_there(self, key: bytes, at: int, segment: IndexSegment) -> bool:
        raw = self._store.kv.get(key)
        if raw is None:
            return False
        now, _ = decode_segment(key, raw)
        return at < len(now.disk) and now.disk[at] == segment.disk[at]

    async def _map_against_index(self, repair: bool, problems: list[str], mended: list[str]) -> None:
        """Find leaked blocks: used in the free map, but named by no record."""
        store, allocator, seen = self._store, self._store.allocator, self._seen
        if seen is None:
            return
        # Pending versions name blocks too; while a chain has one target there are none.
        repair = repair and not store.kv.scan(b"p", b"q", 1)
        for group in range(allocator.group_count):
            if not group % 64:
                await asyncio.sleep(0)
            if not allocator.has_used(group):
                continue
            if repair and store.kv.full:
                await store.kv.room()
            lost = allocator.used_mask(group) & ~seen.get(group, 0) & ~allocator.changed_groups.get(group, 0)
            if lost:
                places = [group << GROUP_BITS | at for at in range(GROUP_BLOCKS) if lost >> at & 1]
                found = f"{len(places)} blocks from {places[0]} on are used in the free map, but by no chunk"
                (mended if repair else problems).append(found)
                if repair:
                    transaction = Transaction()
                    transaction.free_places(places)
                    store.writer.apply(transaction, [], reclaims=True)
                    log.warning("target %d: %s; they are given back", store.target, found)
        self._blind()
        if mended:
            await store.flush()
