"""Cut and remove: taking chunks away in bounded steps, each one kv change.

Whole chunks go in one step, since their segments make sense only with their head. The versions of what goes are kept as the
inode's floor as long as the inode lives, so that a version never has two contents. Called by the block store.

A cut can come again, and go on late, when its asker did not wait for it: chunks that were written under its number belong to
the time after it, since that number is given to writers only when all targets have cut. They are left alone.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from nvpool.base.checksum import ZERO_BLOCK, crc32c
from nvpool.base.errors import Busy, ChecksumMismatch, CorruptRecord, InvalidRequest, StaleCut
from nvpool.base.units import BLOCK_BYTES
from nvpool.kv.contract import Effect
from nvpool.store.allocator import Transaction, Waiting
from nvpool.store.chunkstore import MustWait
from nvpool.store.records import (
    SEGMENT_BITS,
    SEGMENT_BLOCKS,
    SEGMENT_MASK,
    Head,
    InodeRecord,
    bad_key,
    decode_segment,
    encode_inode,
    inode_end_key,
    inode_key,
    replaced,
    segment_key,
)

if TYPE_CHECKING:
    from nvpool.store.block_chunkstore import BlockChunkStore

log = logging.getLogger(__name__)

STEP_RECORDS = 256
"""Segment records in one change: 64 MiB of a file, about 10 KiB of journal. More than the 64 of the largest chunk."""
STEP_RUNS = 2048
"""Runs freed in one change before the next chunk is left to another: each may be in a group of its own."""
_TRIES_MAX = 1000
CHUNK_INDEX_MAX = 0xFFFFFFFF


async def cut(store: BlockChunkStore, inode: int, size: int, number: int, chunk_bits: int) -> None:
    """See ChunkStore.cut."""
    if not 16 <= chunk_bits <= 24 or size < 0:
        raise InvalidRequest(f"no file has {size} bytes in chunks of 2**{chunk_bits}")
    _check_newest(store, inode, number)
    await store.kv.room()
    record = _check_newest(store, inode, number)
    # First, so that late writes are refused before the first byte goes.
    _apply_inode(store, inode, InodeRecord(number, record.floor, chunk_bits), [], Transaction(), ())
    last, within = size >> chunk_bits, size & (1 << chunk_bits) - 1
    if within:
        await _cut_within(store, inode, last, within, number)
    await _drop(store, inode, last + 1 if within else last, number)
    await store.flush()


def _check_newest(store: BlockChunkStore, inode: int, number: int) -> InodeRecord:
    """The inode's record. StaleCut when a later cut is known: after each wait, since that one may be done already."""
    record = store.index.inode(inode)
    if number < record.cut:
        raise StaleCut(f"inode {inode} was cut ({record.cut}) after this cut ({number})")
    return record


async def remove(store: BlockChunkStore, inodes: Sequence[int]) -> tuple[int, int]:
    """See ChunkStore.remove."""
    chunks = blocks = 0
    for inode in inodes:
        its_chunks, its_blocks = await _drop(store, inode, 0)
        chunks += its_chunks
        blocks += its_blocks
        if store.kv.get(inode_key(inode)) is not None:
            await store.kv.room()
            store.kv.apply([(inode_key(inode), None)], reclaims=True)
        store.index.set_inode(inode, None)
    return chunks, blocks * BLOCK_BYTES


def _apply_inode(store: BlockChunkStore, inode: int, record: InodeRecord, effects: list[Effect],
                 transaction: Transaction, indexes: Sequence[int]) -> None:
    """One change with the inode's record and `effects` on these chunks."""
    effects = [*effects, (inode_key(inode), encode_inode(record))]
    store.apply(transaction, effects, inode, indexes, reclaims=True)
    store.index.set_inode(inode, record)


async def _drop(store: BlockChunkStore, inode: int, first: int, number: int | None = None) -> tuple[int, int]:
    """Remove the chunks of the inode from index `first` on; (chunks, blocks). With the `number` of a cut only those written
    before it, and the floor is kept."""
    chunks = blocks = 0
    while first <= CHUNK_INDEX_MAX:
        if store.kv.full:
            await store.kv.room()
        if number is not None:
            _check_newest(store, inode, number)
        try:
            records = store.index.records(inode, first, STEP_RECORDS)
        except CorruptRecord as error:
            _drop_damaged(store, inode, first, error)
            continue
        if not records:
            break
        transaction = Transaction()
        effects: list[Effect] = []
        gone: list[int] = []
        floor = 0
        of_chunks = [(index, list(group)) for index, group in groupby(records, key=lambda one: one[0][1])]
        if len(records) == STEP_RECORDS and len(of_chunks) > 1:
            of_chunks.pop()  # perhaps not all of it
        for index, group in of_chunks:
            if len(transaction.freed) > STEP_RUNS:
                break
            first = index + 1
            if number is not None and _cut_of(group) >= number:
                continue
            gone.append(index)
            for _, key, raw in group:
                effects.append((key, None))
                try:
                    segment, head = decode_segment(key, raw)
                except CorruptRecord as error:
                    log.error("target %d: %s; its blocks are lost until the free map is repaired", store.target, error)
                    continue
                transaction.free_places(segment.disk)
                blocks += len(segment.disk) - segment.disk.count(0)
                if head is not None:
                    floor = max(floor, head.version)
        if not gone:
            continue
        bad = [name for name in store.quarantine.within(inode, range(gone[0], gone[-1] + 1)) if name[1] in gone]
        effects += [(bad_key(*name), None) for name in bad]
        if number is not None:
            record = store.index.inode(inode)
            _apply_inode(store, inode, record._replace(floor=max(record.floor, floor)), effects, transaction, gone)
        else:
            store.apply(transaction, effects, inode, gone, reclaims=True)
        for index in gone:
            store.index.forget(inode, index)
        store.quarantine.forget(bad)
        chunks += len(gone)
    return chunks, blocks


def _cut_of(group: list[tuple[tuple[int, int, int], bytes, bytes]]) -> int:
    """The cut number that the last writer of a chunk knew; 0 where its head can not be read."""
    _, key, raw = group[0]
    try:
        head = decode_segment(key, raw)[1]
    except CorruptRecord:
        return 0
    return head.cut if head is not None else 0


def _drop_damaged(store: BlockChunkStore, inode: int, first: int, error: CorruptRecord) -> None:
    """Remove the first record of the inode, from chunk `first` on, that can not be read: what is removed needs no reading. A
    scan says only that there is one, so its key is found by halving the range. Its blocks stay used until a repair.
    """
    low, high = first << 8, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        try:
            store.kv.scan(_key(inode, low), _key(inode, middle), STEP_RECORDS)
            low = middle
        except CorruptRecord:
            high = middle
    log.error("target %d: chunk %d of inode %d is removed unread: %s", store.target, low >> 8, inode, error)
    store.lender.changing(inode, (low >> 8,))
    store.kv.apply([(_key(inode, low), None)], reclaims=True)
    store.index.forget(inode, low >> 8)


def _key(inode: int, place: int) -> bytes:
    """Of a segment by chunk index and segment as one number."""
    return segment_key(inode, place >> 8, place & 0xFF) if place < 1 << 40 else inode_end_key(inode)


async def _cut_within(store: BlockChunkStore, inode: int, index: int, end: int, number: int) -> None:
    """The chunk ends at byte `end`: whole blocks behind it go, the rest of the last one becomes zeros."""
    for _ in range(_TRIES_MAX):
        if store.kv.full:
            await store.kv.room()
        _check_newest(store, inode, number)
        chunk = store.index.chunk(inode, index)
        if not chunk.version or chunk.cut >= number:
            return
        version = chunk.version
        transaction = Transaction()
        try:
            tail = _zeroed_tail(store, chunk, end)
            if tail is not None:
                (place, _), = store.allocator.allocate(transaction, 1, grows=False)
        except Waiting:
            await store.make_room()
            continue
        except MustWait as wait:
            await wait.until()
            continue
        try:
            if tail is not None:
                # On the drive before it is named: after a loss of power the old block must not come back for it.
                store.room.with_reserve(partial(store.write_runs, [(place, 1)], [tail]))
                await store.sync_data()
                if store.index.chunk(inode, index) is not chunk or chunk.version != version or store.kv.full:
                    store.allocator.drop(transaction)
                    continue
            segments = _cut_segments(store, chunk, end, (place, tail) if tail is not None else None, transaction)
            if segments:
                head = Head(store.next_version(chunk, store.index.inode(inode), 0, 0), chunk.cut, chunk.requests)
                store.apply_segments(transaction, chunk, segments, head,
                                     range(end + BLOCK_BYTES - 1 >> 12, 1 << 32), reclaims=True)
            return
        except BaseException:
            store.allocator.drop(transaction)
            raise
    raise Busy("other writes to the chunk did not let the cut through")


def _zeroed_tail(store: BlockChunkStore, chunk, end: int) -> bytes | None:
    """The block in which `end` lies with zeros from there on; None when it need not be written."""
    border = end & BLOCK_BYTES - 1
    if not border:
        return None
    try:
        old = store.merger.old_block(chunk, end >> 12)
    except ChecksumMismatch:  # it is never returned as it is, so nothing of it can be seen again
        return None
    kept = bytes(old[:border])
    zeros = ZERO_BLOCK[border:]
    return None if old[border:] == zeros else kept + zeros


def _cut_segments(store: BlockChunkStore, chunk, end: int, tail: tuple[int, bytes] | None, transaction: Transaction) -> list:
    """The segments that change, as apply_segments wants them; what they no longer name is freed in the transaction."""
    blocks = end + BLOCK_BYTES - 1 >> 12
    changed = []
    for (_, index, number), _, _ in store.index.records(chunk.inode, chunk.index, 64):
        if index != chunk.index:
            break
        segment = store.index.segment(chunk, number)
        keep = max(0, min(SEGMENT_BLOCKS, blocks - (number << SEGMENT_BITS)))
        cut_segment = segment
        fresh = (0, 0)
        if keep < len(segment.disk):
            transaction.free_places(segment.disk[keep:])
            gone = len(segment.disk) - keep
            cut_segment = replaced(segment, keep, array("Q", bytes(8 * gone)), bytes(4 * gone))
        if tail is not None and number == end >> 12 >> SEGMENT_BITS:
            within = end >> 12 & SEGMENT_MASK
            transaction.free_places(segment.disk[within:within + 1])
            cut_segment = replaced(cut_segment, within, array("Q", [tail[0]]), crc32c(tail[1]).to_bytes(4, "little"))
            fresh = (within, 1)
        if cut_segment is not segment:
            changed.append((number, cut_segment, *fresh))
    return changed
