"""Chunk client: reads and writes chunks at stores, batches requests, and verifies every received byte.

Guarantees: a block with a wrong checksum is never passed on. A write has one request id, and is retried under
that id until a store answers. An outdated map or grant is refreshed, and the request is retried. Every
operation ends by its deadline.

The chunk client never reads or writes more than it is asked for, and never changes sizes: bytes behind the
end of a chunk read as zeros, and the caller, who knows the file's end, trims them. Reads create no task, unless
they must wait or be retried; `store_reads` gathers and sends them. Used by the reader, the writer and vfs.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

from nvpool.client.data.data_loss_check import DataLossCheck
from nvpool.client.data.head_watch import HeadWatch
from nvpool.client.data.hedged_reads import LATE_S, HedgedReads, Hedging, SentRead
from nvpool.client.data.read_queue import Read, ReadQueue
from nvpool.client.data.replica_choice import Replicas
from nvpool.client.data.short_circuit import ShortCircuitReads
from nvpool.client.data.store_reads import StoreReads
from nvpool.client.data.unstable_writes import PATIENCE_S, StoreCommit, Stored, WrittenAt
from nvpool.client.data.volume_key_cache import VolumeKeys
from nvpool.client.data.write_fast_path import SubmittedWrite, WriteSubmitter, is_alone
from nvpool.client.rpc.backoff import at_the_deadline, pause, reason_of, until_known
from nvpool.client.state.client_events import ClientEvents
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.client.state.pool_map_cache import PoolView
from nvpool.core import errors
from nvpool.core.clock import Clock
from nvpool.core.errors import (
    Busy,
    BytesLost,
    Cancelled,
    ChecksumMismatch,
    CorruptFrame,
    Damaged,
    DeadlineExceeded,
    KeyMissing,
    NvpoolError,
    Stale,
    StaleCut,
    StaleEpoch,
    StaleGrant,
    StaleIdentity,
    StaleSession,
    StaleTenure,
    Unavailable,
    WrongTarget,
)
from nvpool.core.futures import BlocksFuture, abandon
from nvpool.core.grants import READ, WRITE
from nvpool.core.units import SLOTS_PER_SESSION
from nvpool.poolmap.model import Chain
from nvpool.rpc.messages.read_write_codec import ALL_OF_BLOCKS, decoded
from nvpool.rpc.v1 import data_pb2, wire_pb2

log = logging.getLogger(__name__)

_WRITE = struct.Struct("<QQQIIIHH")
_LANES_PER_FILE = 65536


class ChunkClient:
    """The client of the stores.

    `renew(file, rights)` fetches a new grant and attributes for an open inode. `open_files` returns the open
    inodes. `path_text` is the log text about the path of a damaged file, printed behind its inode; see
    KnownPaths.log_text.
    """

    def __init__(
        self,
        view: PoolView,
        dialer,
        options: ClientOptions,
        clock: Clock,
        events: ClientEvents,
        *,
        renew: Callable[[OpenInode, int], Awaitable[None]],
        keys: VolumeKeys,
        open_files: Callable[[], Iterable[OpenInode]],
        path_text: Callable[[int], str],
    ):
        self.view = view
        self.dialer = dialer
        self.options = options
        self.clock = clock
        self._renew = renew
        self.keys = keys
        self.ended = DataLossCheck(view, renew)
        self._loop = asyncio.get_running_loop()
        self.lanes: dict[int, ReadQueue] = {}
        self.epoch = view.map.epoch
        self.sequence = 0
        self.slots = list(range(SLOTS_PER_SESSION))
        self.slot_waiters: deque[asyncio.Future] = deque()
        self._tasks: set[asyncio.Task] = set()
        self.replicas = Replicas(view, clock, dialer.greeting.host_id, options.rack, self.lane)
        self.heads = HeadWatch(view, clock, self.chain)
        self.hedging = Hedging(clock, self._is_late, self._look_for_slow, lambda: self.counters["reads"])
        self._seconds = HedgedReads(self, view, clock, pause=self._pause, renew=renew)
        self._flushing = StoreCommit(view, clock, call=self._call, pause=self._pause)
        self.short = ShortCircuitReads(
            dialer, options, clock, epoch=lambda: self.epoch, find_lane=self.find_lane
        )
        self._open_files = open_files
        self._path_text = path_text
        self.counters = {"reads": 0, "messages": 0, "writes": 0, "repeats": 0, "mismatches": 0}
        self.reads = StoreReads(self)
        self.submitter = WriteSubmitter(self)
        """Sends the writes that need not wait; `write` sends the others."""
        view.changed.append(self._map_changed)
        events.file_changed.append(self.short.forget)

    def _forget_lanes(self) -> None:
        """Drop the target queues and locations that files have chosen."""
        for file in self._open_files():
            file.lanes.clear()
            self.short.forget(file)

    def _map_changed(self, pool_map) -> None:
        self.epoch = pool_map.epoch
        self.replicas.use_map(pool_map)
        for lane in self.lanes.values():
            target = pool_map.target_by_id.get(lane.target)
            if target is not None:
                lane.endpoints, lane.distance = target.endpoints, self.replicas.distance(target)
        self._forget_lanes()
        self.heads.map_changed()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        self.hedging.close()
        self.heads.close()
        await self.short.close()

    # -- targets -------------------------------------------------------------------------------------------------------

    def lane(self, target: int) -> ReadQueue:
        lane = self.lanes.get(target)
        if lane is None:
            known = self.view.map.target_by_id.get(target)
            if known is None:
                raise StaleEpoch(f"the pool map does not know target {target}")
            lane = self.lanes[target] = ReadQueue(target, known.endpoints, self.replicas.distance(known))
        return lane

    def find_lane(self, file: OpenInode, index: int, tried: tuple[ReadQueue, ...] = ()) -> ReadQueue:
        """The target queue of the chunk's best replica, if possible not in `tried`."""
        if tried:
            lane = self.replicas.best(self.chain(file, index).readable, tried, file.inode + index)
        else:
            lane = self.replicas.choose(file, index)
            if len(file.lanes) >= _LANES_PER_FILE:
                file.lanes.clear()
            file.lanes[index] = lane
        return lane

    def chain(self, file: OpenInode, index: int) -> Chain:
        """The chain that holds the chunk."""
        return self.replicas.chain(file, index)

    # -- reading ---------------------------------------------------------------------------------------------------------

    def read(
        self, file: OpenInode, index: int, offset: int, length: int, into: memoryview | None = None
    ) -> asyncio.Future:
        """Read the whole blocks [offset, offset + length) of chunk `index`; return a future.

        The result has `length` bytes and is a memoryview (of `into`, if given) that belongs to the caller.
        Bytes that were never written are zeros. The caller may cancel the future.

        ChecksumMismatch: no replica has good bytes. DeadlineExceeded, Disconnected: no reply in time.
        NotFound: the inode is gone, and its grant could not be renewed.
        """
        future = self._loop.create_future()
        self.begin(file, index, offset, length, future, into)
        return future

    def begin(
        self,
        file: OpenInode,
        index: int,
        offset: int,
        length: int,
        future: asyncio.Future | BlocksFuture,
        into: memoryview | None = None,
        *,
        missed: bool = False,
    ) -> None:
        """As `read`, into the caller's future. `missed`: the caller has just tried a read from memory."""
        now_s = self.reads.now_s()
        job = Read(file, index, offset, length, into, future, now_s + self.reads.patience_s)
        self.reads.begin(job, missed, False, now_s)

    def fetch_key(self, job: Read) -> None:
        """Start a read of a file of an encrypted volume once the volume's key is here."""
        self._own_reads(self._read_with_key(job), [job])

    async def _read_with_key(self, job: Read) -> None:
        try:
            await self.keys.fetch(job.file)
        except NvpoolError as error:
            if not job.done():
                job.set_exception(error)
            return
        if not job.done():
            self.reads.begin(job)

    def send(self, lane: ReadQueue, jobs: list[Read]) -> None:
        """Send the reads to the target in one message, once it is connected."""
        self.reads.send(lane, jobs)

    def send_when_connected(self, lane: ReadQueue, jobs: list[Read]) -> None:
        """Connect to the target, then send the reads in one message."""
        self._own_reads(self._send_when_connected(lane, jobs), jobs)

    def _own_reads(self, work, jobs: list[Read]) -> None:
        self.own(work).add_done_callback(partial(_closed, jobs))

    async def _send_when_connected(self, lane: ReadQueue, jobs: list[Read]) -> None:
        try:
            connection = await self.dialer.connect(lane.endpoints, self.connect_until_s(jobs[0].deadline_s))
        except NvpoolError as error:
            self.all_again(jobs, error, lane)
            return
        self.reads.submit(connection, lane, jobs)

    def connect_until_s(self, deadline_s: float) -> float:
        """Deadline of a connection attempt to a target, before other replicas are asked.

        A host that is gone sends nothing back.
        """
        return min(deadline_s, self.clock.boottime_s() + LATE_S) if self.replicas.several else deadline_s

    def hedge(self, sent: SentRead) -> None:
        """Send the slow reads of a message to another replica too."""
        self._seconds.ask(sent)

    def _is_late(self, lane: ReadQueue) -> None:
        if self.replicas.failed(lane):
            self._forget_lanes()  # the files chose their queues while this target answered

    def _look_for_slow(self) -> None:
        if self.replicas.shun_slow(self.lanes.values()):
            self._forget_lanes()

    def all_again(self, jobs: list[Read], error: BaseException, lane: ReadQueue) -> None:
        """As `again`, for each of these reads."""
        if (
            self.replicas.several
            and isinstance(error, Unavailable)
            and not isinstance(error, Busy | Cancelled)
        ):
            self._is_late(lane)
        for job in jobs:
            self.again(job, error, lane)

    def again(self, job: Read, error: BaseException, lane: ReadQueue | None = None) -> None:
        """Handle `error` of `lane`: end the read with it, or start a task that retries the read."""
        if lane is not None and isinstance(error, Unavailable | Damaged | StaleTenure):
            job.tried = (*job.tried, lane)
        if job.done():
            return
        if job.second or isinstance(error, StaleCut) or not isinstance(error, (Stale, Unavailable, Damaged)):
            job.set_exception(error)
            return
        if isinstance(error, Damaged):
            targets: tuple[int, ...] = ()
            if job.file.layout.table in self.view.map.table_by_id:
                targets = self.chain(job.file, job.index).readable
            if isinstance(error, BytesLost) or (job.verify and job.tries >= max(1, len(targets))):
                log.error(
                    "target %s has no good bytes of inode %d%s, chunk %d, offset %d (%d bytes)",
                    ", ".join(map(str, targets)) or "?",
                    job.file.inode,
                    self._path_text(job.file.inode),
                    job.index,
                    job.offset,
                    job.length,
                )
                job.set_exception(error)
                return
            job.verify = True
        self._own_reads(self._repeat(job, error), [job])

    async def _repeat(self, job: Read, error: NvpoolError) -> None:
        job.tries += 1
        job.reason = reason_of(error, job.reason)
        self.counters["repeats"] += 1
        try:
            others = set(self.chain(job.file, job.index).readable) - {lane.target for lane in job.tried}
            elsewhere = isinstance(error, (Unavailable, Damaged, StaleTenure))
            if not (others and job.tried and elsewhere):  # otherwise ask one of the others immediately
                job.tried = ()
                await self.mend(job.file, error, job.reason, job.tries, job.deadline_s, READ)
            if job.done():
                return
            self.send(self.find_lane(job.file, job.index, job.tried), [job])
        except Stale as stale:
            self.again(job, stale)
        except NvpoolError as final:
            if not job.done():
                job.set_exception(final)

    async def mend(
        self,
        file: OpenInode,
        error: NvpoolError,
        reason: NvpoolError,
        tries: int,
        deadline_s: float,
        rights: int,
    ) -> None:
        """Handle `error` before a retry. When the deadline has passed, raise it with `reason`."""
        left = deadline_s - self.clock.boottime_s()
        if left <= 0:
            raise at_the_deadline(error, reason)
        if isinstance(error, (StaleGrant, StaleSession)):
            if tries > 1:
                await self._pause(error, tries, left)
            await self._renew(file, rights)
        elif isinstance(error, (StaleEpoch, WrongTarget)):
            if not await self.view.refresh():
                await self._pause(error, tries, left)
        elif isinstance(error, StaleIdentity):
            await until_known(error, tries, left)
        elif not isinstance(error, Damaged) or tries > 1:
            await self._pause(error, tries, left)

    async def _pause(self, error: NvpoolError, tries: int, left_s: float) -> None:
        await pause(error, tries, left_s, self.view, self.options, self.clock)

    def own(self, work) -> asyncio.Task:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def read_range(self, file: OpenInode, offset: int, length: int, into: memoryview | None = None):
        """Read `length` > 0 bytes of the file from `offset`, across chunks; holes are zeros."""
        end = offset + length
        index = offset >> file.chunk_bits
        first = offset & -4096
        span = (end + 4095 & -4096) - first
        if (end - 1) >> file.chunk_bits == index:
            if into is not None and span == length:
                return await self.read(file, index, first & file.chunk_mask, span, into)
            block = await self.read(file, index, first & file.chunk_mask, span)
            part = block if span == length else block[offset - first : offset - first + length]
            if into is None:
                return part
            into[:] = part
            return into
        whole = memoryview(bytearray(span)) if into is None or span != length else into
        futures = []
        place = first
        while place < end:
            border = min((place >> file.chunk_bits) + 1 << file.chunk_bits, first + span)
            futures.append(
                self.read(
                    file,
                    place >> file.chunk_bits,
                    place & file.chunk_mask,
                    border - place,
                    whole[place - first : border - first],
                )
            )
            place = border
        try:
            for future in futures:
                await future
        except BaseException:
            for future in futures:
                abandon(future)
            raise
        part = whole[offset - first : offset - first + length]
        if into is None or whole is into:
            return part
        into[:] = part
        return into

    # -- writing ---------------------------------------------------------------------------------------------------------

    def was_written(self, file: OpenInode, index: int, epoch: int, cut: int) -> Stored:
        """Note that a write succeeded; return the unstable write, which a later commit makes durable."""
        self.short.forget_chunk(file, index)
        return self.replicas.stored(file, index, epoch, cut)

    async def write(
        self,
        file: OpenInode,
        index: int,
        offset: int,
        length: int,
        parts: Sequence,
        checksums: bytes,
        deadline_s: float,
        begun: SubmittedWrite | None = None,
    ) -> Stored:
        """Write `parts`, `length` bytes in total, to chunk `index` at `offset`.

        Returns the unstable write, which a later commit makes durable. On return the bytes survive kill -9 of
        the stores, and the loss of all but one of them. The write is retried under the same request id until
        then, or until `deadline_s`. The request carries the file's present truncate number. `parts` must not
        change until this returns. `begun`: this very write after its fast path failed; it continues under its
        request id.

        StaleCut: goes to the writer, which knows what still applies. NoSpace: nothing was written. Any
        Unavailable: the write may have been executed.
        """
        if begun is not None:
            try:
                return await self._write(
                    file,
                    index,
                    offset,
                    length,
                    parts,
                    checksums,
                    begun.slot,
                    begun.sequence,
                    deadline_s,
                    begun.error,
                )
            finally:
                self.submitter.leave(begun)
        return await self.named(
            lambda *name: self._write(file, index, offset, length, parts, checksums, *name, deadline_s),
            deadline_s,
        )

    async def named(self, work: Callable[[int, int], Awaitable], deadline_s: float):
        """Await `work(slot, sequence)`, a change of chunks, with a new request id; return its result."""
        # A slot carries one write at a time, as stores expect: a write with a smaller sequence than the
        # slot's last write of the chunk counts as a replay, and is not executed.
        slot = await self._take_slot(deadline_s)
        try:
            self.sequence += 1
            return await work(slot, self.sequence)
        finally:
            self.slots.append(slot)
            self.wake_slot_waiter()

    def wake_slot_waiter(self) -> None:
        """Wake the first task that waits for a slot; called when a slot was put back into `slots`."""
        while self.slot_waiters:
            waiter = self.slot_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def _take_slot(self, deadline_s: float) -> int:
        while not self.slots:
            waiter = self._loop.create_future()
            self.slot_waiters.append(waiter)
            try:
                async with asyncio.timeout(max(0.0, deadline_s - self.clock.boottime_s())):
                    await waiter
            except BaseException as error:
                if self.slots:
                    self.wake_slot_waiter()  # woken and cancelled at the same time: pass the slot on to the next waiter
                if not isinstance(error, TimeoutError):
                    raise
                raise DeadlineExceeded(
                    "all request slots stayed in use by earlier writes", may_be_applied=False
                ) from None
        return self.slots.pop()

    async def _write(
        self,
        file: OpenInode,
        index: int,
        offset: int,
        length: int,
        parts: Sequence,
        checksums: bytes,
        slot: int,
        sequence: int,
        deadline_s: float,
        failed: BaseException | None = None,
    ) -> Stored:
        tries, reason, flags, is_fresh = 0, None, 0, False
        while True:
            try:
                if file.encrypted and file.key is None:
                    await self.keys.fetch(file)
                if failed is not None:
                    error, failed = failed, None
                    raise error
                chain = self.chain(file, index)
                lane = self.lane(chain.targets[0])
                # may have changed since the call: grants and attributes are renewed in between
                cut = file.cut
                header = _WRITE.pack(file.inode, cut, sequence, index, offset, length, 0, flags)
                message = data_pb2.WriteRequest(
                    map_epoch=self.epoch,
                    target=lane.target,
                    grants=[file.grant],
                    writes=header,
                    checksums=checksums,
                    session=file.grant_session,
                    slot=slot,
                    wrapped_key=b"" if file.key is None else file.key.wrapped,
                )
                self.counters["writes"] += 1
                file.grant_used = True
                call = self.dialer.call(
                    lane.endpoints,
                    wire_pb2.DATA_WRITE,
                    message.SerializeToString(),
                    parts,
                    deadline_s=deadline_s,
                )
                reply = await (
                    call
                    if is_alone(chain)
                    else self.unless_moved(call, partial(self._has_other_head, file, index, lane))
                )
                answer = decoded(data_pb2.WriteReply, reply.message)
                results = answer.results
                if len(results) != 16:
                    raise CorruptFrame("a store's answer to a write does not fit the question")
                status = results[0] | results[1] << 8
                if status:
                    raise errors.BY_WIRE_CODE.get(status, Unavailable)()
                return self.was_written(file, index, chain.epoch, cut)
            except StaleCut:
                raise
            except KeyMissing:
                if is_fresh or file.key is None:
                    raise
                is_fresh = True
                await self.keys.fetch(file, stale=file.key)
            except BytesLost:
                if flags or not await self.ended.is_all(file, (index << file.chunk_bits) + offset, length):
                    raise
                flags = ALL_OF_BLOCKS
            except (Stale, Unavailable, CorruptFrame, ChecksumMismatch) as error:
                tries, reason = tries + 1, reason_of(error, reason)
                self.counters["repeats"] += 1
                # The bytes were damaged in transit, or the block to merge them with is damaged; a retry does
                # not repair the second.
                if isinstance(error, ChecksumMismatch) and tries > 2:
                    raise
                await self.mend(file, error, reason, tries, deadline_s, WRITE)

    def _has_other_head(self, file: OpenInode, index: int, lane: ReadQueue) -> bool:
        return self.chain(file, index).targets[0] != lane.target

    async def unless_moved(self, call: Awaitable, moved: Callable[[], bool]):
        """Await `call`; raise StaleEpoch if a newer map arrives first by which `moved()` is true.

        Then other targets must be asked. If the reply takes long, the client follows the pool map: a target
        that is stopped or cut off says nothing.
        """
        asked = asyncio.ensure_future(call)
        try:
            while not asked.done():
                done, _ = await asyncio.wait(
                    [asked, self.view.next], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    self.view.follow()
                elif not asked.done() and moved():
                    raise StaleEpoch("others hold the chunks by now")
            return asked.result()
        finally:
            abandon(asked)

    async def flush(self, places: Mapping[WrittenAt, int | None]) -> set[WrittenAt]:
        """Commit unstable writes; see StoreCommit.flush (client/data/unstable_writes)."""
        return await self._flushing.flush(places, self.clock.boottime_s() + self.options.deadline_s)

    def _call(self, target: int, method: int, message: bytes, deadline_s: float) -> Awaitable:
        return self.dialer.call(self.lane(target).endpoints, method, message, deadline_s=deadline_s)

    async def ask_target(self, target: int, method: int, request, deadline_s: float) -> bytes:
        """Send a repeatable request to a target; retry until the deadline. Return the encoded reply."""
        tries, reason = 0, None
        while True:
            try:
                lane = self.lane(target)
                reply = await self.dialer.call(
                    lane.endpoints, method, request.SerializeToString(), deadline_s=deadline_s
                )
                return bytes(reply.message)
            except (StaleEpoch, StaleTenure, WrongTarget, Unavailable) as error:
                tries, reason = tries + 1, reason_of(error, reason)
                left = deadline_s - self.clock.boottime_s()
                if left <= 0:
                    raise at_the_deadline(error, reason) from None
                if not (isinstance(error, Stale) and await self.view.refresh()):
                    await self._pause(error, tries, left)
                if hasattr(request, "map_epoch"):
                    request.map_epoch = self.epoch


def _closed(jobs: list[Read], task: asyncio.Task) -> None:
    """Fail the reads that a cancelled task had in hand."""
    if task.cancelled():
        for job in jobs:
            if not job.done():
                job.set_exception(Cancelled("the client was closed"))
