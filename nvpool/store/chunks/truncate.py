"""Truncation, hole punching and removal, in bounded steps of one kv change each.

A whole chunk is removed in one step, since its segments are useless without its head record. The version
floor of the inode keeps the versions of removed chunks as long as the inode lives, so that a version never
has two contents. The user is the block store.

A truncation can be repeated, and can continue late if its caller did not wait for it. Chunks written under
its truncate number belong to the time after the truncation, since writers get that number only when all targets
have truncated. Such chunks are left alone.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from nvpool.core.checksum import ZERO_BLOCK, ZERO_BLOCK_CHECKSUM, crc32c
from nvpool.core.errors import Busy, ChecksumMismatch, CorruptRecord, InvalidRequest, StaleCut
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX
from nvpool.kv.api import Effect
from nvpool.poolmap.chains.protocol import after_cut, raised
from nvpool.security.xts import BlockCipher
from nvpool.store.chunks.api import LOST_CHECKSUM, MustWait
from nvpool.store.chunks.block_store_parts import BlockStore
from nvpool.store.chunks.index import SEGMENTS_MAX
from nvpool.store.disk.allocator import SpacePending, Transaction
from nvpool.store.disk.index_records import (
    SEGMENT_BITS,
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

log = logging.getLogger(__name__)

STEP_RECORDS = 256
"""Segment records in one change: 64 MiB of a file, about 10 KiB of journal.

More than the 64 of the largest chunk.
"""
STEP_RUNS = 2048
"""Runs freed in one change before the next chunk goes to another change: each run may be in its own group."""
_TRIES_MAX = 1000
CHUNK_INDEX_MAX = 0xFFFFFFFF
_ZERO_CRC = ZERO_BLOCK_CHECKSUM.to_bytes(4, "little")
_LOST_CRC = LOST_CHECKSUM.to_bytes(4, "little")


async def cut(
    store: BlockStore,
    inode: int,
    size: int,
    number: int,
    chunk_bits: int,
    end: int = 0,
    cipher: BlockCipher | None = None,
) -> int:
    """See ChunkStore.cut."""
    largest = CHUNK_INDEX_MAX + 1 << chunk_bits
    if not 16 <= chunk_bits <= 24 or not 0 <= size <= largest or (end and not size < end <= largest):
        raise InvalidRequest(
            f"no file has {size} bytes, or a hole from there to {end}, in chunks of 2**{chunk_bits}"
        )
    _check_newest(store, inode, number)
    await store.kv.room()
    record = _check_newest(store, inode, number)
    # First, so that late writes are refused before the first byte is removed.
    _apply_inode(store, inode, InodeRecord(number, record.floor, chunk_bits), [], Transaction(), ())
    mask = (1 << chunk_bits) - 1
    first, begin = size >> chunk_bits, size & mask
    until, rest = (end >> chunk_bits, end & mask) if end else (CHUNK_INDEX_MAX + 1, 0)
    blocks = 0
    if first == until:
        if begin < rest:  # else the largest possible file, of which nothing is removed
            blocks = await _cut_within(store, inode, first, begin, rest, number, cipher)
    else:
        if begin:
            blocks = await _cut_within(store, inode, first, begin, CHUNK_BYTES_MAX, number, cipher)
            first += 1
        blocks += (await drop(store, inode, first, number, until))[1]
        if rest:
            blocks += await _cut_within(store, inode, until, 0, rest, number, cipher)
    await store.flush()
    return blocks * BLOCK_BYTES


def _check_newest(store: BlockStore, inode: int, number: int) -> InodeRecord:
    """Return the inode's record.

    StaleCut: a later truncation is known. Call this after each wait, since that truncation may be done
    already.
    """
    record = store.index.inode(inode)
    if number < record.cut:
        raise StaleCut(f"inode {inode} was cut ({record.cut}) after this cut ({number})")
    return record


async def remove(store: BlockStore, inodes: Sequence[int]) -> tuple[int, int]:
    """See ChunkStore.remove."""
    chunks = blocks = 0
    for inode in inodes:
        its_chunks, its_blocks = await drop(store, inode, 0)
        chunks += its_chunks
        blocks += its_blocks
        if store.kv.get(inode_key(inode)) is not None:
            await store.kv.room()
            store.kv.apply([(inode_key(inode), None)], reclaims=True)
        store.index.set_inode(inode, None)
    return chunks, blocks * BLOCK_BYTES


def _apply_inode(
    store: BlockStore,
    inode: int,
    record: InodeRecord,
    effects: list[Effect],
    transaction: Transaction,
    indexes: Sequence[int],
) -> None:
    """Apply one change: the inode's record, and `effects` on these chunks."""
    effects = [*effects, (inode_key(inode), encode_inode(record))]
    store.writer.apply(transaction, effects, inode, indexes, reclaims=True)
    store.index.set_inode(inode, record)


async def drop(
    store: BlockStore,
    inode: int,
    first: int,
    number: int | None = None,
    until: int = CHUNK_INDEX_MAX + 1,
    is_wanted: Callable[[], bool] | None = None,
) -> tuple[int, int]:
    """Remove the chunks of the inode from index `first` to before `until`; return (chunks, blocks).

    With the truncate `number` of a truncation, only chunks written before it are removed, and the
    version floor is kept. `is_wanted`: see ChunkStore.discard.
    """
    chunks = blocks = 0
    while first < until:
        if store.kv.full:
            await store.kv.room()
        if is_wanted is not None and not is_wanted():
            break
        if number is not None:
            _check_newest(store, inode, number)
        try:
            records = store.index.records(inode, first, STEP_RECORDS, until)
        except CorruptRecord as error:
            _drop_damaged(store, inode, first, error, until)
            continue
        if not records:
            break
        transaction = Transaction()
        effects: list[Effect] = []
        gone: list[int] = []
        floor = 0
        of_chunks = [(index, list(group)) for index, group in groupby(records, key=lambda one: one[0][1])]
        if len(records) == STEP_RECORDS and len(of_chunks) > 1:
            of_chunks.pop()  # the last chunk may be incomplete
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
                    log.error(
                        "target %d: %s; its blocks are lost until the free map is repaired",
                        store.target,
                        error,
                    )
                    continue
                transaction.free_places(segment.disk)
                blocks += len(segment.disk) - segment.disk.count(0)
                if head is not None:
                    floor = raised(floor, head.version)
        if not gone:
            continue
        bad = [
            name for name in store.quarantine.within(inode, range(gone[0], gone[-1] + 1)) if name[1] in gone
        ]
        effects += [(bad_key(*name), None) for name in bad]
        if number is not None:
            record = store.index.inode(inode)
            _apply_inode(
                store, inode, record._replace(floor=raised(record.floor, floor)), effects, transaction, gone
            )
        else:
            store.writer.apply(transaction, effects, inode, gone, reclaims=True)
        for index in gone:
            store.index.forget(inode, index)
        store.quarantine.forget(bad)
        chunks += len(gone)
    return chunks, blocks


def _cut_of(group: list[tuple[tuple[int, int, int], bytes, bytes]]) -> int:
    """Return the truncate number that the last writer of a chunk knew; 0 if its head is unreadable."""
    _, key, raw = group[0]
    try:
        head = decode_segment(key, raw)[1]
    except CorruptRecord:
        return 0
    return head.cut if head is not None else 0


def _drop_damaged(store: BlockStore, inode: int, first: int, error: CorruptRecord, until: int) -> None:
    """Remove the first unreadable record of the inode, from chunk `first` on, without reading it.

    A scan says only that there is such a record, so a binary search finds its key. Its blocks stay in use
    until a repair.
    """
    low, high = first << 8, until << 8
    while high - low > 1:
        middle = (low + high) // 2
        try:
            store.kv.scan(_key(inode, low), _key(inode, middle), STEP_RECORDS)
            low = middle
        except CorruptRecord:
            high = middle
    log.error("target %d: chunk %d of inode %d is removed unread: %s", store.target, low >> 8, inode, error)
    store.location_leases.changing(inode, (low >> 8,))
    store.kv.apply([(_key(inode, low), None)], reclaims=True)
    store.index.forget(inode, low >> 8)


def _key(inode: int, place: int) -> bytes:
    """Return the key of a segment from chunk index and segment as one number."""
    return segment_key(inode, place >> 8, place & 0xFF) if place < 1 << 40 else inode_end_key(inode)


async def _cut_within(
    store: BlockStore,
    inode: int,
    index: int,
    begin: int,
    end: int,
    number: int,
    cipher: BlockCipher | None,
) -> int:
    """Zero the bytes [begin, end) of the chunk; return how many blocks were removed.

    Whole blocks are removed, and the blocks at both ends are overwritten in part.
    """
    for _ in range(_TRIES_MAX):
        if store.kv.full:
            await store.kv.room()
        _check_newest(store, inode, number)
        chunk = store.index.chunk(inode, index)
        if not chunk.version or chunk.cut >= number:
            return 0
        version = chunk.version
        transaction = Transaction()
        try:
            edges = _zeroed_edges(store, chunk, begin, end, cipher)
            written = [block for block in edges.values() if block]
            runs = store.allocator.allocate(transaction, len(written), grows=False) if written else []
        except SpacePending:
            await store.make_room()
            continue
        except MustWait as wait:
            await wait.until()
            continue
        try:
            if written:
                # On the drive before the change names it: after a loss of power the old block must not
                # return.
                store.room.with_reserve(partial(store.writer.write_runs, runs, written))
                await store.sync_data()
            if b"" in edges.values():
                # Without this flush a replay could reject the change that wrote the damaged block, and
                # restore its old place.
                await store.flush()
            if edges:
                if store.index.chunk(inode, index) is not chunk or chunk.version != version or store.kv.full:
                    store.allocator.drop(transaction)
                    continue
            whole = range(begin + BLOCK_BYTES - 1 >> 12, end >> 12)
            segments, gone = _cut_segments(store, chunk, whole, edges, runs, transaction)
            # The version also changes if nothing is removed here: another replica may have a damaged block
            # where this one has a hole.
            segments = segments or [(0, store.index.segment(chunk, 0), 0, 0)]
            # From here on the chunk has this truncate number: a repetition, which only some replicas get, must
            # not change the version again.
            head = Head(after_cut(version), number, chunk.requests, chunk.table)
            store.writer.apply_segments(transaction, chunk, segments, head, whole, reclaims=True)
            return gone
        except BaseException:
            store.allocator.drop(transaction)
            raise
    raise Busy("other writes to the chunk did not let the cut through")


def _zeroed_edges(
    store: BlockStore, chunk, begin: int, end: int, cipher: BlockCipher | None
) -> dict[int, bytes | None]:
    """Return the new contents of the blocks with `begin` and `end`, zeroed between these positions.

    The contents are in stored form (encrypted if there is a cipher). None means that only zeros are left, and
    b"" that the block is damaged. Blocks that need no change are not included.
    """
    edges: dict[int, bytes | None] = {}
    for number in {begin >> 12: 0, end >> 12: 0}:
        first, last = max(begin - (number << 12), 0), min(end - (number << 12), BLOCK_BYTES)
        if first >= last or last - first == BLOCK_BYTES:
            continue  # the border between two blocks
        try:
            old = store.merger.old_block(chunk, number, cipher)
        except ChecksumMismatch:
            edges[number] = b""
            continue
        zeroed = b"".join((old[:first], ZERO_BLOCK[first:last], old[last:]))
        if zeroed == ZERO_BLOCK:
            edges[number] = None
        elif zeroed != old:
            edges[number] = (
                zeroed if cipher is None else bytes(cipher.encrypt(chunk.inode, chunk.index, number, zeroed))
            )
    return edges


def _cut_segments(
    store: BlockStore,
    chunk,
    whole: range,
    edges: dict[int, bytes | None],
    runs: list[tuple[int, int]],
    transaction: Transaction,
) -> tuple[list, int]:
    """Return the changed segments, as `apply_segments` needs them, and how many blocks are removed.

    Blocks that the segments no longer name are freed in the transaction. The written blocks of a segment have
    only holes between them.
    """
    places = iter([place for run, count in runs for place in range(run, run + count)])
    new = {block: (next(places) if content else 0, content) for block, content in sorted(edges.items())}
    changed = []
    gone = 0
    low, high = (min([whole.start, *edges]), max([whole.stop, *(block + 1 for block in edges)]))
    first = low >> SEGMENT_BITS
    for (_, index, number), _, _ in store.index.records(
        chunk.inode, chunk.index, SEGMENTS_MAX + 1, chunk.index + 1
    ):
        if index != chunk.index or not first <= number or number << SEGMENT_BITS >= high:
            continue
        segment = store.index.segment(chunk, number)
        base = number << SEGMENT_BITS
        begin, end = max(low - base, 0), min(high - base, len(segment.disk))
        disk, crcs = segment.disk[begin:end], bytearray(segment.crcs[begin * 4 : end * 4])
        fresh: list[int] = []
        freed = array("Q")
        is_lost = False
        for at in range(len(disk)):
            block = base + begin + at
            if edges.get(block) == b"":
                crcs[at * 4 : at * 4 + 4] = _LOST_CRC
                is_lost = True
                continue
            place, content = new.get(block, (0, None)) if block in new or block in whole else (disk[at], None)
            if place == disk[at]:
                continue
            freed.append(disk[at])
            disk[at] = place
            crcs[at * 4 : at * 4 + 4] = (
                _ZERO_CRC if content is None else crc32c(content).to_bytes(4, "little")
            )
            if place:
                fresh.append(begin + at)
            else:
                gone += 1
        if freed or fresh or is_lost:
            transaction.free_places(freed)
            changed.append(
                (
                    number,
                    replaced(segment, begin, disk, bytes(crcs)),
                    fresh[0] if fresh else 0,
                    fresh[-1] + 1 - fresh[0] if fresh else 0,
                )
            )
    return changed, gone
