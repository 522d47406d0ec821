"""Reading what nobody reads: every block against its checksum, the index against the free map and the other way round.

A pass goes through the index in key order in bounded steps; the cursor is the last key (b"c…"). Each block named is read and
checked, must lie on the drive, be in use in the free map, and be named once. The blocks seen are kept as one bit each while
the pass lasts; at its end blocks that are in use and were neither seen nor changed during the pass are reported: nobody names
them. A pass that was begun before this process, or met a record that can not be read, still checks its blocks, but not the
last part.

With `repair` the free map follows the index, each time by one change of the kv without a wait since it was looked at. A block
that is named and called free is marked as used at once, before anybody is given it; until then its chunk could not even be
removed. Blocks that nobody names are freed as a write frees them: held until that change is flushed, and with it whatever
change has left them behind, so that no loss of power can bring a record back that names them. Not mended: a block that two
name (one of them has the other's bytes), and one behind the drive's end.

Blocks are read in the device's own background way; writes go on between steps. Called by the block store.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from nvpool.core.checksum import first_bad_block
from nvpool.core.errors import CorruptRecord, InvalidRequest, WrongFormat
from nvpool.core.units import BLOCK_BYTES
from nvpool.store.chunks.api import BadBlock, ScrubStep
from nvpool.store.disk.allocator import GROUP_BITS, GROUP_BLOCKS, Transaction
from nvpool.store.disk.index_records import SEGMENT_BITS, Segment, decode_segment, split_segment_key

if TYPE_CHECKING:
    from nvpool.store.chunks.block_store import BlockChunkStore

log = logging.getLogger(__name__)

BLOCKS_MAX = 16384
PROBLEMS_MAX = 100
_READ_BLOCKS = 256


class Scrub:
    def __init__(self, store: BlockChunkStore):
        self._store = store
        self._seen: dict[int, int] | None = None
        self._expected = b""
        self._stepping = asyncio.Lock()

    async def step(self, cursor: bytes, blocks: int, repair: bool) -> ScrubStep:
        """See ChunkStore.scrub. InvalidRequest for a cursor that is none."""
        if cursor and cursor[:1] != b"c":
            raise InvalidRequest("not a cursor of a scrub")
        async with self._stepping:  # `_seen` is what one pass has seen up to `_expected`, nothing else
            try:
                return await self._step(cursor, blocks, repair)
            except BaseException:
                self._blind()
                raise

    def _blind(self) -> None:
        """This pass does not see all that is named: the free map can not be held against it."""
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
                        self._blind()  # it names blocks, and nobody knows which
                        problems.append(str(error))
                        inode, index, number = split_segment_key(key)
                        store.quarantine.note(inode, index, number << SEGMENT_BITS, f"can not be found: {error}")
                for key, segment in segments:  # all before the first await: later the index may say otherwise
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
        """The next records, and the key of a damaged one behind them, or nothing."""
        kv = self._store.kv
        try:
            return kv.scan(first, b"d", _READ_BLOCKS // 64), b""
        except CorruptRecord as error:
            self._blind()
            if not first <= error.key < b"d":
                problems.append(f"the index behind {first.hex()} can not be read, the scrub ends there: {error}")
                return [], b""
            inode, index, number = split_segment_key(error.key)
            problems.append(f"segment {number} of chunk {index} of inode {inode} can not be read: {error}")
            self._store.quarantine.note(inode, index, number << SEGMENT_BITS, f"can not be found: {error}")
            return kv.scan(first, error.key, _READ_BLOCKS // 64), error.key

    def _against_map(self, key: bytes, segment: Segment, repair: bool, problems: list[str], mended: list[str]) -> None:
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
        """Mark the block as used. False where that has to wait for the next scrub."""
        store, transaction = self._store, Transaction()
        if store.kv.full or not store.allocator.claim(transaction, place):
            return False
        try:
            store.apply(transaction, [], reclaims=True)
        except BaseException:
            store.allocator.drop(transaction)
            raise
        log.warning("target %d: block %d is marked as used: the index names it", store.target, place)
        return True

    async def _check(self, key: bytes, segment: Segment, bad: list[BadBlock]) -> int:
        store = self._store
        inode, index, number = split_segment_key(key)
        blocks = [(at, place) for at, place in enumerate(segment.disk) if 0 < place < store.block_count]
        if not blocks:
            return 0
        into = store.device.buffer(len(blocks) * BLOCK_BYTES)
        # Always through the waiting way: what is in memory says nothing about the drive, but a full re-read past the page cache
        # is what O_DIRECT stores do; others at least meet what the kernel has dropped.
        outcome = await store.device.read([place << 12 for _, place in blocks], [BLOCK_BYTES] * len(blocks),
                                          [n * BLOCK_BYTES for n in range(len(blocks))], into)
        for n, ((at, _), error) in enumerate(zip(blocks, outcome, strict=True)):
            block = (number << SEGMENT_BITS) + at
            text = ""
            if error is not None:
                text = f"can not be read: {error}"
            elif first_bad_block(into[n * BLOCK_BYTES:(n + 1) * BLOCK_BYTES], segment.crcs[at * 4:at * 4 + 4]) >= 0:
                text = "does not fit its checksum when scrubbed"
            if text and self._still_there(key, at, segment):
                store.quarantine.note(inode, index, block, text)
                bad.append(BadBlock(inode, index, block, text))
        return len(blocks)

    def _still_there(self, key: bytes, at: int, segment: Segment) -> bool:
        raw = self._store.kv.get(key)
        if raw is None:
            return False
        now, _ = decode_segment(key, raw)
        return at < len(now.disk) and now.disk[at] == segment.disk[at]

    async def _map_against_index(self, repair: bool, problems: list[str], mended: list[str]) -> None:
        """What the free map calls used, and no record that was there during the pass names."""
        store, allocator, seen = self._store, self._store.allocator, self._seen
        if seen is None:
            return
        # Versions that are pending name blocks too; as long as a chain has one target there are none.
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
                    store.apply(transaction, [], reclaims=True)
                    log.warning("target %d: %s; they are given back", store.target, found)
        self._blind()
        if mended:
            await store.flush()
