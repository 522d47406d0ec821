"""Bulk reads (`read_many`): many small reads of many files as one message per target.

For data loaders that know a batch of samples before they read it: a read costs the packing of 24 bytes, a
checksum, and one copy if its bytes do not arrive in order. The guarantees are those of ChunkClient.read. If a
reply contains anything unusual (an error, a hole, a checksum mismatch), the reads of that message are
repeated singly, each with its own retries. Used by the reader.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from nvpool.blockio.reader import read_now
from nvpool.client.data.chunk_client import ChunkClient
from nvpool.client.data.hedged_reads import SentRead
from nvpool.client.data.read_messages import ReadRequest, ReadResults
from nvpool.client.data.read_queue import ReadQueue, submit_into
from nvpool.client.data.store_reads import GATHER_BYTES, GATHER_READS
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.options import ClientOptions
from nvpool.core import errors
from nvpool.core.clock import Clock
from nvpool.core.errors import NvpoolError, Stale
from nvpool.core.futures import abandon
from nvpool.core.primitives import ReceivedReply
from nvpool.rpc.v1 import wire_pb2
from nvpool.security.xts import BlockCipher

_SAMPLE = 8
"""First reads of a batch. They show whether the page cache is likely to have the rest."""


class _TargetBatch:
    """The part of a read_many for one target: its reads, and the destinations of their bytes."""

    __slots__ = (
        "lane",
        "places",
        "bytes",
        "first",
        "next",
        "straight",
        "future",
        "late",
    )

    def __init__(self, lane: ReadQueue):
        self.lane = lane
        # (file, index, offset, blocks bytes, place in into, bytes to skip, length)
        self.places: list[tuple] = []
        self.bytes = 0
        self.first = self.next = -1
        self.straight = True  # whether the payload, as it arrives, is one contiguous part of `into`
        self.future = None
        self.late = False  # whether its reads are already repeated singly


class _Encrypted:
    """Pieces of a buffer to decrypt in place, grouped by volume."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: dict[BlockCipher, list[tuple[int, int, int, int, int]]] = {}

    def add(self, file: OpenInode, index: int, first: int, place: int, length: int) -> None:
        """Add the blocks of chunk `index` from `first` on, which lie at `place` in the buffer.

        Does nothing for a file without a key.
        """
        if file.key is not None:
            self._pieces.setdefault(file.key.cipher, []).append((file.inode, index, first, place, length))

    def decrypt(self, into: memoryview) -> None:
        for cipher, pieces in self._pieces.items():
            cipher.decrypt_many(pieces, into)


class ReadBatcher:
    """The bulk reads of a client."""

    def __init__(self, chunks: ChunkClient, dialer, options: ClientOptions, clock: Clock):
        self._chunks = chunks
        self._dialer = dialer
        self._options = options
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._request = ReadRequest()

    async def read_many(self, reads: Sequence[tuple[OpenInode, int, int, int]], into: memoryview) -> None:
        """Read each (file, offset, length, place) into into[place:place + length].

        Sends one message per target; several only where one would exceed 256 reads or 2 MiB, so that store
        and client work at the same time. Bytes that arrive in order are received in place; others are copied.

        Raises what `read` raises: the first error, after all reads have ended; the content of `into` is then
        undefined. The caller knows the files' ends: bytes behind them read as zeros.
        """
        chunks = self._chunks
        batches: dict[ReadQueue, _TargetBatch] = {}
        futures: list[asyncio.Future] = []
        deadline_s = self._clock.boottime_s() + self._options.deadline_s
        if chunks.short.on:
            reads = self._read_now(reads, into)
        for file, offset, length, place in reads:
            end = offset + length
            index = offset >> file.chunk_bits
            within = offset & file.chunk_mask
            if (end - 1) >> file.chunk_bits != index:
                futures += self._read_across(file, offset, length, into[place : place + length])
                continue
            skip = within & 4095
            first = within - skip
            span = (skip + length + 4095) & -4096
            try:
                lane = file.lanes.get(index) or chunks.find_lane(file, index)
            except Stale:
                futures += self._read_across(file, offset, length, into[place : place + length])
                continue
            batch = batches.get(lane)
            if batch is not None and batch.bytes + span > 2 * GATHER_BYTES:  # a store refuses more in pieces
                futures.append(self._send_batch(batches.pop(lane), into, deadline_s))
                batch = None
            if batch is None:
                batch = batches[lane] = _TargetBatch(lane)
                batch.first = batch.next = place
            file.grant_used = True
            batch.places.append((file, index, first, span, place, skip, length))
            if place == batch.next and span == length:
                batch.next = place + length
            else:
                batch.straight = False
            batch.bytes += span
            if len(batch.places) >= GATHER_READS or batch.bytes >= GATHER_BYTES:
                del batches[lane]
                futures.append(self._send_batch(batch, into, deadline_s))
        for batch in batches.values():
            futures.append(self._send_batch(batch, into, deadline_s))
        failed = None
        try:
            for future in futures:
                try:
                    await future
                except NvpoolError as error:
                    failed = failed or error
        except BaseException:
            for future in futures:
                abandon(future)
            raise
        if failed is not None:
            raise failed

    def _read_now(self, reads: Sequence[tuple[OpenInode, int, int, int]], into: memoryview) -> list:
        """Serve reads by short-circuit reads as far as possible without waiting; return the others.

        Whole blocks are read in place, with one call for each target.
        """
        short = self._chunks.short
        rest: list = []
        plans: dict = {}  # source -> (offset, length, place, read of each run; location, block and read of each read)
        for read in reads:
            file, offset, length, place = read
            index = offset >> file.chunk_bits
            located = file.located.get(index)
            if located is None:
                lane = file.lanes.get(index)
                if lane is not None:
                    short.want(file, index, lane)
                rest.append(read)
                continue
            within = offset & file.chunk_mask
            first = within >> 12
            if within & 4095 or length & 4095 or within + length > located.blocks << 12 or not length:
                part = (
                    short.read_now(located, within & -4096, (within & 4095) + length + 4095 & -4096)
                    if within + length <= file.chunk_mask + 1
                    else None
                )
                if part is None:
                    rest.append(read)
                else:
                    into[place : place + length] = part[within & 4095 : (within & 4095) + length]
                continue
            plan = plans.get(located.source)
            if plan is None:
                plan = plans[located.source] = ([], [], [], [], [])
            plan[4].append((located, first, read))
            if located.base:
                plan[0].append(located.base + first << 12)
                plan[1].append(length)
                plan[2].append(place)
                plan[3].append(read)
                continue
            runs = short.runs(located, first, length >> 12)
            if runs is None:
                plan[4].pop()
                rest.append(read)
            else:
                for at, count in runs:
                    plan[0].append(at)
                    plan[1].append(count)
                    plan[2].append(place)
                    plan[3].append(read)
                    place += count
        for source, (offsets, lengths, positions, read_of_run, found) in plans.items():
            first = read_now(source.fd, offsets[:_SAMPLE], lengths[:_SAMPLE], positions[:_SAMPLE], into)
            # none of the sample is in the page cache: the store reads the batch in one call
            if len(first) >= _SAMPLE:
                rest += (read for _, _, read in found)
                continue
            missed = {read_of_run[at] for at in first}
            missed.update(
                read_of_run[at + _SAMPLE]
                for at in read_now(source.fd, offsets[_SAMPLE:], lengths[_SAMPLE:], positions[_SAMPLE:], into)
            )
            if missed:
                rest += (read for _, _, read in found if read in missed)
                found = [one for one in found if one[2] not in missed]
            wrong = short.wrong_reads(found, into)
            rest += (found[number][2] for number in sorted(wrong))
            encrypted = _Encrypted()
            for number, (located, first, read) in enumerate(found):
                if located.file.key is not None and number not in wrong:
                    encrypted.add(located.file, located.index, first, read[3], read[2])
            encrypted.decrypt(into)
        return rest

    def _send_batch(self, batch: _TargetBatch, into: memoryview, deadline_s: float) -> asyncio.Future:
        batch.future = self._loop.create_future()
        connection = self._dialer.live(batch.lane.endpoints)
        if connection is None:
            _cancelled_with(
                batch.future, self._chunks.own(self._send_when_connected(batch, into, deadline_s))
            )
        else:
            self._submit(connection, batch, into, deadline_s)
        return batch.future

    async def _send_when_connected(self, batch: _TargetBatch, into: memoryview, deadline_s: float) -> None:
        try:
            connection = await self._dialer.connect(
                batch.lane.endpoints, self._chunks.connect_until_s(deadline_s)
            )
        except NvpoolError:
            await self._read_singly(batch, into)  # each read finds out what else can be done
            return
        self._submit(connection, batch, into, deadline_s)
        await asyncio.wait([batch.future])

    def _submit(self, connection, batch: _TargetBatch, into: memoryview, deadline_s: float) -> None:
        count = len(batch.places)
        request, flags = self._request, self._chunks.reads.flags
        request.begin(self._chunks.epoch, batch.lane.target)
        for file, index, first, span, *_ in batch.places:
            request.add(file.inode, index, first, span, file.grant, flags)
        request.close(False)
        message = request.message()
        self._chunks.counters["messages"] += 1
        self._chunks.counters["reads"] += count
        self._chunks.hedging.leave_out(count)
        batch.lane.in_flight += 1
        on_done = partial(self._batch_answered, batch, into)
        sent = None
        if self._chunks.replicas.several:
            sent = self._chunks.hedging.watch(batch.lane, (), partial(self._late, batch, into), cost=math.inf)
            on_done = partial(self._came, sent, on_done)
        if batch.straight:
            end = submit_into(
                connection,
                batch.lane,
                message,
                into[batch.first : batch.next],
                batch.future,
                deadline_s,
                on_done,
            )
            if sent is not None:
                sent.end = end
        else:
            connection.submit(
                wire_pb2.DATA_READ, message, deadline_s=deadline_s, on_done=on_done, room=batch.bytes
            )

    def _came(self, sent: SentRead, on_done, reply, error) -> None:
        self._chunks.hedging.came(sent, error is None)
        on_done(reply, error)

    def _late(self, batch: _TargetBatch, into: memoryview, sent: SentRead) -> None:
        """Handle a silent target: each read of the batch goes to another replica."""
        if not batch.future.done():
            sent.end()
            batch.late = True
            self._one_by_one(batch, into)

    def _batch_answered(self, batch: _TargetBatch, into: memoryview, reply, error) -> None:
        batch.lane.in_flight -= 1
        if batch.future.done() or batch.late:
            return
        if error is not None:
            self._one_by_one(batch, into)
            return
        # repeat singly if there is anything unusual (an error, a hole, a checksum mismatch): rare, and correct
        if not _are_whole(reply, [place[3] for place in batch.places]):
            self._one_by_one(batch, into)
            return
        payload = reply.payload
        if any(file.encrypted and file.key is None for file, *_ in batch.places):
            self._one_by_one(batch, into)  # a single read fetches the key
            return
        encrypted = _Encrypted()
        if not batch.straight:
            at = 0
            for file, index, first, span, place, skip, length in batch.places:
                part = payload[at : at + span]
                at += span
                if file.key is not None and length != span:
                    part = file.key.cipher.decrypt(file.inode, index, first >> 12, part)
                else:
                    encrypted.add(file, index, first >> 12, place, length)
                into[place : place + length] = part[skip : skip + length]
        else:
            if payload.obj is not into.obj:
                into[batch.first : batch.next] = payload  # the transport could not receive in place
            for file, index, first, span, place, *_ in batch.places:
                encrypted.add(file, index, first >> 12, place, span)
        encrypted.decrypt(into)
        batch.future.set_result(None)

    def _one_by_one(self, batch: _TargetBatch, into: memoryview) -> None:
        _cancelled_with(batch.future, self._chunks.own(self._read_singly(batch, into)))

    async def _read_singly(self, batch: _TargetBatch, into: memoryview) -> None:
        try:
            for begin in range(0, len(batch.places), 64):
                part = batch.places[begin : begin + 64]
                # read() batches these again; each has its own retries
                jobs = [
                    self._chunks.read(file, index, first, span) for file, index, first, span, _, _, _ in part
                ]
                for job, (_, _, _, _, place, skip, length) in zip(jobs, part, strict=True):
                    into[place : place + length] = (await job)[skip : skip + length]
        except BaseException as error:
            for job in jobs:
                abandon(job)
            if not batch.future.done():
                batch.future.set_exception(
                    error if isinstance(error, Exception) else errors.Cancelled("the client was closed")
                )
            if not isinstance(error, Exception):
                raise
            return
        if not batch.future.done():
            batch.future.set_result(None)

    def _read_across(
        self, file: OpenInode, offset: int, length: int, into: memoryview
    ) -> list[asyncio.Future]:
        future = self._loop.create_future()

        async def fill() -> None:
            try:
                await self._chunks.read_range(file, offset, length, into)
            except BaseException as error:
                if not future.done():
                    future.set_exception(
                        error if isinstance(error, Exception) else errors.Cancelled("the client was closed")
                    )
                if not isinstance(error, Exception):
                    raise
                return
            if not future.done():
                future.set_result(None)

        _cancelled_with(future, self._chunks.own(fill()))
        return [future]


def _are_whole(reply, lengths: list[int]) -> bool:
    """Whether a reply has exactly the bytes of reads of these lengths, by their checksums."""
    received, results = ReceivedReply(), ReadResults()
    received.open(reply.message, reply.payload)
    try:
        return results.open(received, len(lengths)) and results.are_whole(lengths)
    finally:
        results.close()
        received.close()


def _cancelled_with(future: asyncio.Future, task: asyncio.Task) -> None:
    """Tie a future to the task that fills its memory.

    A cancelled future cancels the task, so the caller may use the memory again. A task that ends completes
    the future, so no caller waits for ever.
    """
    future.add_done_callback(lambda _: task.cancel() if future.cancelled() else None)
    task.add_done_callback(
        lambda _: None if future.done() else future.set_exception(errors.Cancelled("the client was closed"))
    )
