"""Copy of blocks between chunks of one store: read, check, write to new places, name in one change.

The copy keeps the checksums of the source's writer: the bytes are compared with them before they are written,
and no new checksums are computed. Holes become holes. The user is the block store.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import groupby

from nvpool.core.checksum import ZERO_BLOCK_CHECKSUM
from nvpool.core.errors import BY_WIRE_CODE, Busy, Cancelled, InvalidRequest, NvpoolError, StaleCut
from nvpool.core.ids import RequestId, is_done
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX
from nvpool.store.chunk_write import ChunkWrite
from nvpool.store.chunks.api import ALL_INODES, MustWait, check_table
from nvpool.store.chunks.block_store_parts import BlockStore
from nvpool.store.chunks.read_batch import READ, RESULT
from nvpool.store.disk.allocator import SpacePending, Transaction
from nvpool.store.disk.index_records import Head, with_request

_TRIES_MAX = 1000
_ZERO_CRC = ZERO_BLOCK_CHECKSUM.to_bytes(4, "little")


async def copy(
    store: BlockStore,
    source: tuple[int, int, int],
    inode: int,
    index: int,
    offset: int,
    length: int,
    cut: int,
    request: RequestId | None,
    epoch: int,
    given_up: Callable[[], bool],
    table: int,
) -> tuple[int, int]:
    """See ChunkStore.copy."""
    for place in (offset, source[2]):
        if length <= 0 or place < 0 or (place | length) % BLOCK_BYTES or place + length > CHUNK_BYTES_MAX:
            raise InvalidRequest(f"{length} bytes at {place} are not whole blocks of a chunk")
    check_table(table)
    there, content, sums = await _read(store, source, length)
    byte_count = sum(there) * BLOCK_BYTES
    if all(there):
        return await _write(
            store, inode, index, offset, content[0], sums, cut, request, epoch, given_up, table
        ), byte_count
    for _ in range(_TRIES_MAX):
        if given_up():
            raise Cancelled("the copy was cancelled, or its deadline has passed")
        store.refuse_when_fenced()
        if store.kv.full:
            await store.kv.room()
            continue
        chunk = store.index.chunk(inode, index)
        record = store.index.inode(inode)
        if request is not None and is_done(chunk.requests, request):
            return chunk.version, byte_count
        if cut < record.cut:
            raise StaleCut(f"inode {inode} was cut ({record.cut}) after this copy began ({cut})")
        first, version = offset >> 12, chunk.version
        old = store.index.places(chunk, first, len(there))
        if not any(there) and not any(old):
            return version, 0
        transaction = Transaction()
        try:
            grows = any(new and not before for new, before in zip(there, old, strict=True))
            runs = store.allocator.allocate(transaction, sum(there), grows=grows) if content else []
        except SpacePending:
            await store.make_room()
            continue
        try:
            if content:
                store.writer.write_runs(runs, content)
                if any(before and not new for new, before in zip(there, old, strict=True)):
                    # After a loss of power, blocks that did not reach the drive are replaced by the previous
                    # blocks, but a hole is not. The copy must be applied completely or not at all, so its
                    # data is synced before the change names it.
                    await store.sync_data()
                    if (
                        given_up()
                        or store.index.chunk(inode, index) is not chunk
                        or chunk.version != version
                        or store.index.inode(inode) != record
                        or store.kv.full
                    ):
                        store.allocator.drop(transaction)
                        continue
            transaction.free_places(old)
            new_places = iter([place for run, count in runs for place in range(run, run + count)])
            places = array("Q", [next(new_places) if new else 0 for new in there])
            new_version = store.writer.next_version(chunk, record, epoch, 0)
            requests = chunk.requests if request is None else with_request(chunk.requests, request)
            head = Head(new_version, max(cut, chunk.cut), requests, table or chunk.table)
            store.writer.apply_segments(
                transaction,
                chunk,
                store.writer.segments_at(chunk, first, places, sums),
                head,
                range(first, first + len(there)),
            )
        except BaseException:
            store.allocator.drop(transaction)
            raise
        store.was_written()
        return new_version, byte_count
    raise Busy("the store did not find room for the copy")


async def _write(
    store: BlockStore,
    inode: int,
    index: int,
    offset: int,
    content: memoryview,
    sums: bytes,
    cut: int,
    request: RequestId | None,
    epoch: int,
    given_up: Callable[[], bool],
    table: int,
) -> int:
    """Write like ChunkStore.write, for a copy without holes."""
    write = ChunkWrite(table, inode, index, offset, content, sums, cut, request)
    writer, placed = store.writer, None
    try:
        for _ in range(_TRIES_MAX):
            if given_up():
                raise Cancelled("the copy was cancelled, or its deadline has passed")
            if placed is None and writer.places_first(offset, len(content)):
                placed = await writer.stage(write)
                continue
            try:
                return writer.write_now(write, epoch, 0, placed)
            except MustWait as wait:
                await wait.until()
    finally:
        if placed is not None:
            writer.drop_placed(placed)
    raise Busy("the store did not find room for the copy")


async def _read(
    store: BlockStore, source: tuple[int, int, int], length: int
) -> tuple[list[bool], list, bytes]:
    """Read the source.

    Returns for each block whether it exists, the checked bytes of the existing blocks, and the checksums of
    all.
    """
    inode, index, offset = source
    there = [
        place > 0 for place in store.index.places(store.index.chunk(inode, index), offset >> 12, length >> 12)
    ]
    batch = store.read_now(READ.pack(inode, index, offset, length, 0, 0), [ALL_INODES], True)
    if batch.missed:
        await store.finish_read(batch)
    status, _, _, _ = RESULT.unpack_from(batch.results)
    if status:
        raise BY_WIRE_CODE.get(status, NvpoolError)(f"chunk {index} of inode {inode} cannot be copied")
    whole = (
        memoryview(b"".join(batch.payload))
        if len(batch.payload) > 1
        else batch.payload[0]
        if batch.payload
        else b""
    )
    content = []
    for is_there, blocks in groupby(range(len(there)), there.__getitem__):
        if is_there:
            numbers = list(blocks)
            content.append(whole[numbers[0] * BLOCK_BYTES : (numbers[-1] + 1) * BLOCK_BYTES])
    return there, content, batch.checksums + _ZERO_CRC * (len(there) - len(batch.checksums) // 4)
