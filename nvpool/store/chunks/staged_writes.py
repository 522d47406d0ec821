"""Staged writes: their bytes are on the drive before the index names them.

Staging serves two kinds of writes: large ones, so that the event loop is free in the meantime; and writes to
a chain, which are decided later and then must not fail here. The blocks are allocated and written. Then a
`write_now` names them, or they are dropped and free again. The user is the block store.
"""

from __future__ import annotations

import asyncio

from nvpool.core.errors import Busy
from nvpool.security.xts import BlockCipher
from nvpool.store.chunks.api import MustWait, Placed
from nvpool.store.chunks.block_store_parts import BlockStore
from nvpool.store.disk.allocator import SpacePending, Transaction

_TRIES_MAX = 1000


async def place(store: BlockStore, inode: int, index: int, offset: int, buffer: memoryview) -> Placed:
    """See ChunkStore.place."""
    transaction, count = Transaction(), len(buffer) >> 12
    for _ in range(_TRIES_MAX):
        store.refuse_when_fenced()
        try:
            grows = 0 in store.index.places(store.index.chunk(inode, index), offset >> 12, count)
            runs = store.allocator.allocate(transaction, count, grows=grows)
            break
        except SpacePending:
            await store.make_room()
    else:
        raise Busy("the store did not find room for the write")
    placed = Placed(transaction, runs)
    placed.writing = store.device.write_direct(
        buffer, [(place << 12, blocks << 12) for place, blocks in runs]
    )
    try:
        await asyncio.shield(placed.writing)
    except BaseException:
        store.drop_placed(placed)
        raise
    store.note_written(len(buffer))
    return placed


async def prepare(
    store: BlockStore,
    inode: int,
    index: int,
    offset: int,
    buffer: memoryview,
    checksums: bytes,
    cipher: BlockCipher | None = None,
) -> Placed:
    """See ChunkStore.prepare."""
    for _ in range(_TRIES_MAX):
        try:
            return prepare_now(store, inode, index, offset, buffer, checksums, cipher)
        except MustWait as wait:
            await wait.until()
    raise Busy("the store did not find room for the write")


def prepare_now(
    store: BlockStore,
    inode: int,
    index: int,
    offset: int,
    buffer: memoryview,
    checksums: bytes,
    cipher: BlockCipher | None = None,
) -> Placed:
    """See ChunkStore.prepare_now."""
    store.refuse_when_fenced()
    transaction, chunk = Transaction(), store.index.chunk(inode, index)
    buffers, sums = store.merger.whole_blocks(chunk, offset, buffer, checksums, cipher)
    count = len(sums) >> 2
    grows = 0 in store.index.places(chunk, offset >> 12, count)
    try:
        runs = store.allocator.allocate(transaction, count, grows=grows)
    except SpacePending:
        raise MustWait(store.make_room) from None
    placed = Placed(transaction, runs, sums, chunk.version)
    if store.places_first(offset, len(buffer)):
        placed.writing = store.device.write_direct(
            buffers[0], [(place << 12, blocks << 12) for place, blocks in runs]
        )
        store.note_written(len(buffer))
        return placed
    try:
        store.write_runs(runs, buffers)
    except BaseException:
        store.drop_placed(placed)
        raise
    return placed


def drop(store: BlockStore, placed: Placed, transaction: Transaction) -> None:
    """Free the staged blocks. While the drive is still writing them, no other write may get them."""
    if placed.writing is None or placed.writing.done():
        store.allocator.drop(transaction)
    else:
        placed.writing.add_done_callback(
            lambda done: (done.cancelled() or done.exception(), store.allocator.drop(transaction))
        )
