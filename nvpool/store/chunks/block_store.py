"""Chunk store on blocks of a data file or raw device, with a kv index.

`api.py` has the contract. The store service and the replication and maintenance code use this class through
that interface.

A write runs in this order. The pieces are compared with their checksums. Partially written blocks are merged
with the old blocks, which are checked first. The new blocks go to free places on the drive. One kv change
names them, frees the old blocks, and records the chunk's new version and the request. A write that fails
before this change has done nothing: its places are still free.

Order of durable steps:

    1. data is written before the change that names it is applied                      (block_writes.py)
    2. data is synced before the index commits to LMDB a record that names it          (before_checkpoint)
    3. a flush syncs data, then the journal                                            (flush)
    4. freed blocks are allocated again only when the change that freed them and its   (flush,
       data are flushed, no read that began before it is running, and no location      Allocator.release,
       lease for them is valid                                                         location_leases.py)
    5. a truncation syncs the zeroed tail before it names the tail, and everything     (cut)
       before it returns
    6. after an unclean stop, blocks named by replayed records are read and compared   (recovery.py)

The interval sync of the journal is not enough for the fourth step. The journal may name data that is not on
the drive yet, and then the old bytes must still exist.

Everything runs on one event loop, and the state is consistent at every await. A thread runs fdatasync and
hole punching.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from nvpool.core.clock import SYSTEM_CLOCK, Clock
from nvpool.core.errors import (
    Fenced,
    NoSpace,
    NvpoolError,
    WrongFormat,
    WrongTarget,
)
from nvpool.core.ids import RequestId
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX
from nvpool.host.process_identity import boot_id
from nvpool.kv.api import Kv
from nvpool.kv.engine import LmdbKv, LmdbOptions
from nvpool.security.xts import BlockCipher
from nvpool.store.chunk_write import ChunkWrite
from nvpool.store.chunks import copy_range
from nvpool.store.chunks import truncate as store_truncate
from nvpool.store.chunks.api import (
    BufferSource,
    ChunkDescription,
    ChunkStore,
    HeldChunk,
    LocatedBlocks,
    ReadBatch,
    ScrubStep,
    StoreOptions,
    lock_store,
)
from nvpool.store.chunks.block_writes import BlockWrites
from nvpool.store.chunks.chunk_transfer import ChunkTransfer
from nvpool.store.chunks.index import Index
from nvpool.store.chunks.location_leases import LocationLeases
from nvpool.store.chunks.partial_writes import Merger
from nvpool.store.chunks.read_batch import BlockBatchReader, DriveReads, located
from nvpool.store.chunks.recovery import ReplayCheck, settle_rejected
from nvpool.store.chunks.scrub_pass import Scrub
from nvpool.store.disk import write_verifier
from nvpool.store.disk.allocator import Allocator
from nvpool.store.disk.bad_blocks import BadBlock, Quarantine
from nvpool.store.disk.device import Device, FileDevice
from nvpool.store.disk.index_records import (
    FLUSHED_KEY,
    IDENTITY_KEY,
    encode_flushed,
)
from nvpool.store.disk.reserve_file import SpaceReserve
from nvpool.store.disk.superblock import Superblock

log = logging.getLogger(__name__)

_HELD_CHANGES_MAX = 50_000
DISCARD_BLOCKS_MIN = 64


async def open_chunk_store(
    path: str | os.PathLike[str],
    target: int = 0,
    options: StoreOptions | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
    on_fence: Callable[[str], None] | None = None,
) -> ChunkStore:
    """Open the store in the directory `path`; `target` 0 accepts the store of any target.

    Before this returns, blocks named by replayed index records are checked, and all writes acknowledged
    before the open are durable. The store calls `on_fence` once with the reason when it can no longer
    guarantee the contents of its drive: end the process, or reopen the store.

    NotFound      there is no store: create one
    WrongFormat   the store has another format version: use the nvpool that made it
    WrongTarget   the store belongs to another target
    InUse         another process has the store open
    CorruptRecord, DriveFailed   the drive needs attention
    """
    where = Path(path)
    lock, superblock = lock_store(where)
    try:
        if target and superblock.target != target:
            raise WrongTarget(f"{where} is target {superblock.target}, not {target}")
        return await open_block_store(where, superblock, lock, options or StoreOptions(), clock, on_fence)
    except BaseException:
        os.close(lock)
        raise


async def open_block_store(
    path: Path,
    superblock: Superblock,
    lock: int,
    options: StoreOptions,
    clock: Clock,
    on_fence: Callable[[str], None] | None = None,
) -> BlockChunkStore:
    """Open the store in `path`, whose lock the caller holds. On return the store owns the lock."""
    device = FileDevice(str(path / "data"), direct=options.direct, uring=options.uring)
    try:
        store = BlockChunkStore(
            device, superblock.block_count, target=superblock.target, options=options, clock=clock
        )
        store.path, store.on_fence, store.boot = device.path, on_fence, boot_id()
        engine = LmdbOptions(sync_interval_s=options.sync_interval_s, map_bytes_max=options.index_bytes_max)
        await open_index(store, path / "index", engine, superblock.store)
    except BaseException:
        await device.close()
        raise
    store.lock = lock
    store.kind = "block" if device.is_block else "directory"
    if not device.is_block:
        store.room = SpaceReserve(path / "reserve", f"target {store.target}")
        try:
            store.room.keep()
        except NoSpace:
            store.room.refused()
    return store


async def open_index(store: BlockChunkStore, path: Path, engine: LmdbOptions, identity: bytes) -> None:
    """Open the index in the directory `path` and attach it to `store`, whose device is open.

    Replayed records are compared with the blocks that they name. `identity` is that of the data file. If this
    raises, the index is closed as by the death of this process: its journal has everything acknowledged.
    """
    kv = None
    try:
        kv = await LmdbKv.open(
            path,
            engine,
            before_checkpoint=store.sync_data,
            on_replay=ReplayCheck(store.device.read_whole, store.device.write),
            on_fence=store.fence,
        )
        await store.attach(kv, identity=identity)
    except BaseException:
        if kv is not None:
            await kv.abandon()
        raise


class BlockChunkStore(ChunkTransfer):
    """Chunk store on a `Device` and a kv index. `open_block_store` creates it.

    Tests create it directly over fakes, then call `attach(kv)`.
    """

    def __init__(self, device: Device, block_count: int, *, target: int, options: StoreOptions, clock: Clock):
        self.device = device
        self.block_count = block_count
        self.target = target
        self.options = options
        self.clock = clock
        self.kv: Kv = None  # attached before any other call
        self.lock = -1
        self.path = self.boot = ""
        self.kind = "memory"
        self.verifier = 0
        self.room = SpaceReserve(None, f"target {target}")
        self.fenced_because = ""
        self.on_fence: Callable[[str], None] | None = None
        self.closed = False
        self.written_bytes = 1  # the previous process may have left unsynced writes
        """Bytes given to the drive so far; compared with earlier values to know what a sync covers."""
        self._synced = 0
        self._tended = -1
        self._checkpointed = 0
        self._tasks: set[asyncio.Task] = set()
        self._sync_task: asyncio.Task | None = None
        self._flush_lock = asyncio.Lock()
        self._durable = 0
        self.write_count = 0
        self.flush_count = 0

    async def attach(self, kv: Kv, identity: bytes = b"") -> None:
        """Take the index and resolve what a replay left. WrongFormat: it belongs to another data file."""
        self.kv = kv
        self.readings = DriveReads(kv)
        # O_DIRECT bypasses the page cache, so a client could not read anything fast
        direct = self.device.direct
        self.location_leases = LocationLeases(
            kv, self.clock, 0.0 if direct else self.options.location_lease_s, self.options.kept_table
        )
        known = kv.get(IDENTITY_KEY)
        if known is None:
            kv.apply([(IDENTITY_KEY, identity)])
        elif known != identity:
            raise WrongFormat("the index belongs to another data file or device than the one beside it")
        self.index = Index(kv, self.options.cached_segments)
        self.allocator = Allocator(kv, self.block_count, int(self.block_count * self.options.reserve_share))
        self.quarantine = Quarantine(kv, f"target {self.target} ({self.path})")
        self.reader = BlockBatchReader(self.index, self.device, self.readings, self.quarantine)
        self.merger = Merger(self.index, self.device, self.readings, self.quarantine.note)
        self.writer = BlockWrites(self)
        settled = settle_rejected(kv, self.allocator, self.location_leases.until(0))
        if settled:
            log.warning(
                "target %d: %d index records named blocks that did not reach the drive; the old blocks stand",
                self.target,
                settled,
            )
        self._forget_held(self.allocator.rest(self.clock.boottime_s(), self.location_leases.dead_until_s))
        self.scrubber = Scrub(self)
        self.verifier = write_verifier.opened(
            kv, self.clock, self.boot, lost=settled > 0 or self.options.doubted
        )
        await self.flush()

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_now(
        self, reads: bytes, owners: Sequence[int], verify: bool = False, room: BufferSource | None = None
    ) -> ReadBatch:
        if self.fenced_because or self.closed:
            self._refuse()
        batch = self.reader.begin(reads, owners, verify, room)
        if batch.missed:
            batch.work.sequence = self.kv.sequence
        return batch

    def locate(
        self, inode: int, index: int, blocks: int, life_s: float
    ) -> tuple[float, int, int, LocatedBlocks] | None:
        if self.fenced_because or self.closed:
            self._refuse()
        if (inode, index) in self.quarantine.chunks or self.allocator.scarce:
            return None
        found = located(
            self.index, self.index.chunk(inode, index), min(blocks, CHUNK_BYTES_MAX // BLOCK_BYTES)
        )
        if not found.blocks:
            return None
        life_s = self.location_leases.issue(inode, life_s)
        return (life_s, *self.location_leases.stamp(inode, index), found) if life_s else None

    async def finish_read(self, batch: ReadBatch) -> None:
        done = asyncio.get_running_loop().create_future()
        self.reader.finish(batch, lambda error: done.done() or done.set_result(error))
        error = await done
        if error is not None:
            raise error

    def begin_finish(self, batch: ReadBatch, on_done: Callable[[BaseException | None], None]) -> None:
        self.reader.finish(batch, on_done)

    # -- writing -----------------------------------------------------------------------------------------------------

    def held(self, inode: int, index: int) -> HeldChunk:
        return self.writer.held(inode, index)

    def write_now(
        self,
        inode: int,
        index: int,
        offset: int,
        buffer: memoryview,
        checksums: bytes,
        *,
        cut: int = 0,
        request: RequestId | None = None,
        epoch: int = 1,
        version: int = 0,
        table: int = 0,
        cipher: BlockCipher | None = None,
    ) -> int:
        write = ChunkWrite(table, inode, index, offset, buffer, bytes(checksums), cut, request, cipher=cipher)
        return self.writer.write_now(write, epoch, version)

    def note_written(self, byte_count: int) -> None:
        """Count bytes on their way to the drive; the next sync covers them."""
        self.written_bytes += byte_count

    def was_written(self, byte_count: int = 0) -> None:
        """Finish a write: start the checkpoint or the flush that many writes together make necessary.

        `byte_count`: bytes that were written in this step and are not noted yet.
        """
        self.written_bytes += byte_count
        self.write_count += 1
        if self.written_bytes - self._checkpointed > self.options.replay_bytes_max:
            self._checkpoint_soon()
        if self.allocator.waiting_changes > _HELD_CHANGES_MAX:
            self._make_room_soon()

    async def write(
        self,
        inode: int,
        index: int,
        offset: int,
        buffer: memoryview,
        checksums: bytes,
        *,
        cut: int = 0,
        request: RequestId | None = None,
        epoch: int = 1,
        version: int = 0,
        table: int = 0,
        cipher: BlockCipher | None = None,
    ) -> int:
        write = ChunkWrite(table, inode, index, offset, buffer, bytes(checksums), cut, request, cipher=cipher)
        return await self.writer.write(write, epoch, version)

    async def copy(
        self,
        source: tuple[int, int, int],
        inode: int,
        index: int,
        offset: int,
        length: int,
        *,
        cut: int = 0,
        request: RequestId | None = None,
        epoch: int = 1,
        given_up: Callable[[], bool] = bool,
        table: int = 0,
    ) -> tuple[int, int]:
        self.refuse_when_fenced()
        return await copy_range.copy(
            self, source, inode, index, offset, length, cut, request, epoch, given_up, table
        )

    # -- making durable ----------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        self.refuse_when_fenced()
        wanted = self.kv.sequence
        async with self._flush_lock:
            self.refuse_when_fenced()
            if self._durable < wanted:
                sequence = self.kv.sequence
                await self.sync_data()
                # From this record a replay knows that blocks of earlier changes were on the drive: a mismatch
                # means damage.
                await self.kv.room()
                mark = self.kv.apply(
                    [(FLUSHED_KEY, encode_flushed(sequence, self.kv.sequence + 1))], reclaims=True
                )
                await self.kv.sync(mark)
                self._durable = mark if mark == sequence + 1 else sequence
                self.flush_count += 1
            await self._release()

    async def sync_data(self) -> None:
        """Make all data written before the call survive the loss of power.

        The kv also calls this before a checkpoint. Fenced: the drive failed to sync; a failed sync is never
        repeated.
        """
        wanted = self.written_bytes
        while self._synced < wanted:
            if self.fenced_because:
                self._refuse()
            if self._sync_task is None:
                self._sync_task = asyncio.get_running_loop().create_task(self._sync_once())
            # Shielded: a waiting caller may be cancelled, but the outcome of a sync must never be lost.
            await asyncio.shield(self._sync_task)
        if self.fenced_because:
            self._refuse()

    async def _sync_once(self) -> None:
        now = self.written_bytes
        try:
            await self.device.sync()
            self._synced = max(self._synced, now)
        except NvpoolError as error:
            self.fence(f"the drive refused to sync: {error}")
        finally:
            self._sync_task = None

    async def _release(self) -> None:
        """Release for allocation the blocks that durable changes have freed.

        The caller holds the flush lock.
        """
        limit, now_s = min(self._durable, self.readings.oldest()), self.clock.boottime_s()
        if self.kind == "directory" and (self.options.give_back or self.room.missing):
            least = 1 if self.room.missing else DISCARD_BLOCKS_MIN
            large = [run for run in self.allocator.releasable(limit, now_s) if run[1] >= least]
            if large:
                await self.device.discard([(place << 12, count << 12) for place, count in large])
        past = self.allocator.release(limit, now_s)
        if past:
            await self.kv.room()
            self._forget_held(past)

    def _forget_held(self, keys: list[bytes]) -> None:
        if keys:
            self.kv.apply([(key, None) for key in keys], reclaims=True)

    async def make_room(self) -> None:
        await self.flush()
        if self.allocator.held_blocks:  # a running read keeps them, or a location lease
            await asyncio.sleep(
                min(0.05, max(0.001, self.allocator.next_rest_s - self.clock.boottime_s()))
                if self.allocator.resting_changes
                else 0.001
            )

    def _make_room_soon(self) -> None:
        if not self._flush_lock.locked():
            self._own(self.flush())

    def _checkpoint_soon(self) -> None:
        self._checkpointed = self.written_bytes
        self._own(self.kv.checkpoint())

    def _own(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._owned_ended)

    def _owned_ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.fenced_because:
            log.error("target %d: background work failed: %s", self.target, task.exception())

    def fence(self, reason: str) -> None:
        """Refuse all service from now on: the contents of the drive are not guaranteed."""
        if not self.fenced_because:
            self.fenced_because = reason
            log.error("target %d is fenced: %s", self.target, reason)
            if self.on_fence is not None:
                self.on_fence(reason)

    def refuse_when_fenced(self) -> None:
        if self.fenced_because or self.closed:
            self._refuse()

    def _refuse(self) -> None:
        raise Fenced(self.fenced_because or "the store is closed")

    # -- trimming ----------------------------------------------------------------------------------------------------

    async def cut(
        self,
        inode: int,
        size: int,
        cut: int,
        chunk_bits: int,
        end: int = 0,
        cipher: BlockCipher | None = None,
    ) -> int:
        self.refuse_when_fenced()
        freed = await store_truncate.cut(self, inode, size, cut, chunk_bits, end, cipher)
        await self.location_leases.clients_of_the_dead()
        return freed

    async def remove(self, inodes: Sequence[int]) -> tuple[int, int]:
        self.refuse_when_fenced()
        return await store_truncate.remove(self, inodes)

    # -- queries -----------------------------------------------------------------------------------------------------

    def describe(self, inode: int, first: int, limit: int) -> tuple[list[ChunkDescription], bool]:
        self.refuse_when_fenced()
        return self.index.describe(inode, first, limit)

    def extents(self, inode: int, first: int, until: int) -> tuple[list[tuple[int, int, int]], int]:
        self.refuse_when_fenced()
        return self.index.extents(inode, first, until)

    def inodes(self, after: int, limit: int) -> tuple[list[int], bool]:
        self.refuse_when_fenced()
        return self.index.inodes(after, limit)

    def bad_blocks(self) -> list[BadBlock]:
        return self.quarantine.listed()

    async def scrub(self, cursor: bytes, blocks: int, repair: bool = False) -> ScrubStep:
        self.refuse_when_fenced()
        return await self.scrubber.step(cursor, blocks, repair)

    def status(self) -> dict:
        allocator = self.allocator
        counters = {
            "reads": self.reader.read_count,
            "read_bytes": self.reader.read_bytes,
            "reads_waited": self.reader.missed_count,
            "writes": self.write_count,
            "flushes": self.flush_count,
            "held_blocks": allocator.held_blocks,
            "bad_blocks": len(self.quarantine),
            "lent": self.location_leases.given,
            "resting_changes": allocator.resting_changes,
        }
        counters |= {f"index_{name}": value for name, value in self.kv.statistics().items()}
        return {
            "state": "fenced" if self.fenced_because else "serving",
            "fenced_because": self.fenced_because,
            "capacity_bytes": (allocator.block_count - allocator.reserve_blocks) * BLOCK_BYTES,
            "used_bytes": (allocator.used_blocks - allocator.fixed_blocks) * BLOCK_BYTES,
            "chunks": -1,
            "device": self.path,
            "kind": self.kind,
            "read_path": self.device.read_path,
            "direct": self.device.direct,
            "writes": self.device.writes,
            "host_full": self.room.full_message,
            "counters": {name: float(value) for name, value in counters.items()},
        }

    # -- background work, closing ------------------------------------------------------------------------------------

    async def tend(self) -> None:
        if self.device.lacks_room:
            self.device.lacks_room = False
            self.room.refused()
        if self.room.full or self.room.missing:
            await asyncio.get_running_loop().run_in_executor(None, self.room.tend)
        allocator = self.allocator
        idle = self._tended == self.written_bytes
        self._tended = self.written_bytes
        much = allocator.held_blocks * 16 > allocator.block_count
        if allocator.waiting_changes and not self.fenced_because and (idle or much):
            await self.flush()
        elif allocator.next_rest_s <= self.clock.boottime_s() and not self.fenced_because:
            async with self._flush_lock:
                await self._release()

    async def close(self) -> None:
        if self.closed:
            return
        try:
            if not self.fenced_because:
                await self.flush()
                self.location_leases.end()
                await write_verifier.closed(self.kv, self.verifier)
        except NvpoolError as error:
            log.error("target %d: the last flush failed: %s", self.target, error)
        finally:
            self.closed = True
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            try:
                # The last checkpoint of the kv calls `sync_data`. If that fails, the journal keeps its
                # records for the next start.
                await self._close_kv()
            finally:
                await self._let_go()

    async def abandon(self) -> None:
        """Release all resources like the death of this process would. For tests, and after a fence."""
        self.closed = True
        tasks = [*self._tasks, *([self._sync_task] if self._sync_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self.kv, "abandon"):
            await self.kv.abandon()
        await self._let_go()

    async def _let_go(self) -> None:
        self.location_leases.close()
        await self.device.close()
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    async def _close_kv(self) -> None:
        abandon = getattr(self.kv, "abandon", None)
        if self.fenced_because and abandon is not None:
            await abandon()
        else:
            await self.kv.close()
