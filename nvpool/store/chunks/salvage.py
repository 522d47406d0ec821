"""Replacement of chunks with an unreadable index record, from a copy on another target.

Only an unreadable chunk is replaced, by one change, after the new blocks are on the drive. Until then the
chunk stays refused. Blocks that only the lost record named stay in use until a scrub with repair. The user is
the block store.
"""

from __future__ import annotations

from nvpool.core.errors import CorruptRecord
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX
from nvpool.store.chunks.api import ChunkCopy, check_copy
from nvpool.store.chunks.block_store_parts import BlockStore
from nvpool.store.disk.allocator import SpacePending, Transaction
from nvpool.store.disk.index_records import SEGMENT_BLOCKS, IndexSegment, decode_segment, segment_key

_SEGMENTS_MAX = CHUNK_BYTES_MAX // BLOCK_BYTES // SEGMENT_BLOCKS
_TRIES_MAX = 1000


def _segments(store: BlockStore, inode: int, index: int) -> tuple[list[IndexSegment], bool]:
    """Return the readable segments of the chunk, and whether all records are readable."""
    found, whole = [], True
    for number in range(_SEGMENTS_MAX):
        key = segment_key(inode, index, number)
        try:
            raw = store.kv.get(key)
            if raw is None:
                continue
            segment, head = decode_segment(key, raw)
            whole = whole and (head is not None or number > 0)
            found.append(segment)
        except CorruptRecord:
            whole = False
    return found, whole


def is_unreadable(store: BlockStore, inode: int, index: int) -> bool:
    """See ChunkStore.unreadable."""
    return not _segments(store, inode, index)[1]


async def install_over(store: BlockStore, copy: ChunkCopy) -> bool:
    """See ChunkStore.install_over."""
    check_copy(copy)
    transaction, count = Transaction(), len(copy.checksums) >> 2
    for _ in range(_TRIES_MAX):
        store.refuse_when_fenced()
        try:
            if count:
                runs = store.allocator.allocate(transaction, count, grows=False)
            break
        except SpacePending:
            await store.make_room()
    else:
        return False
    try:
        if count:
            store.writer.write_runs(runs, [copy.content])
            await store.sync_data()  # before the change names them
        if store.kv.full:
            await store.kv.room()
        store.refuse_when_fenced()
        known, whole = _segments(store, copy.inode, copy.index)  # no wait from here to the change
        if whole or store.index.inode(copy.inode).cut != copy.known.cut:
            store.allocator.drop(transaction)
            return False
        gone = {segment_key(copy.inode, copy.index, number): None for number in range(_SEGMENTS_MAX)}
        for segment in known:
            transaction.free_places(segment.disk)
        store.name_copy(transaction, copy, gone)
    except BaseException:
        store.allocator.drop(transaction)
        raise
    return True
