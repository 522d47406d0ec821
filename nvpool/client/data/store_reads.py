"""Reads from stores: gathers reads into messages, sends the messages, and completes the reads from the replies.

All reads of an event loop take this way: those of the kernel's requests, of the reader and of the SDK. Reads create
no task; what has to wait (a connection, a key, a retry) is done by tasks of `chunk_client`. Three policies of one
queue decide when a read is sent:

* A read that finds its target idle, a large one, and one with memory of its own is sent immediately, alone.
* Other reads of one event-loop iteration for one target travel in one message, or in several parts.
* A read that is collected (of a kernel's burst) has a message of its own. It is sent immediately if the target is
  idle, else with the other frames of its connection at the end of the burst (`send_collected`).

A reply is taken from the connection's receive buffer if it has arrived there; see ReadMessage. Every block is
compared with its checksum before a read gets it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from nvpool.client.data import hedged_reads
from nvpool.client.data.hedged_reads import SentRead
from nvpool.client.data.read_messages import ReadRequest, ReadResults
from nvpool.client.data.read_queue import Read, ReadBurst, ReadQueue, error_of, mismatch, submit_into
from nvpool.core import primitives
from nvpool.core.clock import SystemClock
from nvpool.core.errors import CorruptFrame, Stale
from nvpool.core.primitives import ReceivedReply
from nvpool.core.units import KIB, MIB
from nvpool.rpc import reply_receivers
from nvpool.rpc.api import IN_FLIGHT_MAX
from nvpool.rpc.messages.read_write_codec import CLIENT_CACHES
from nvpool.rpc.reply_receivers import ReplyBurst
from nvpool.rpc.transports.frame import SMALL_PAYLOAD_BYTES
from nvpool.rpc.transports.stream import StreamConnection
from nvpool.rpc.v1.wire_pb2 import DATA_READ

GATHER_READS = 256
"""Reads in one batch: enough to make the message's cost negligible.

More would delay the first reads of the batch.
"""
GATHER_BYTES = 2 * MIB
ALONE_BYTES = 256 * KIB
"""Size from which on a read travels alone. A batch would save nothing, and delay its reply."""
HALVED_READS = 8
PART_BYTES = 512 * KIB
"""From HALVED_READS batched reads, or this many bytes, a batch travels in parts.

So the store works on the next part while the client handles the first. In a single message the drive, the
store, the client and the application would take turns: 16 readers of 128 KiB got 245 MiB/s instead of 400,
over TCP and cold.
"""
BURST = 64
"""Collected frames of a connection that wait for the end of a burst."""

_GATHER_READS, _GATHER_BYTES, _ALONE_BYTES = GATHER_READS, GATHER_BYTES, ALONE_BYTES
_HALVED_READS, _PART_BYTES, _BURST, _IN_FLIGHT_MAX = HALVED_READS, PART_BYTES, BURST, IN_FLIGHT_MAX
_SMALL_PAYLOAD_BYTES = SMALL_PAYLOAD_BYTES
_METHOD, _METHOD_KEY = int(DATA_READ), int(DATA_READ)


class ReadMessage(SentRead):
    """Reads of one message in flight: the receiver of the store's reply."""

    __slots__ = ("reads", "burst")

    def start(self, reads: StoreReads, jobs: list[Any], burst: ReadBurst) -> None:
        """Set the reads, and who continues after the reply."""
        self.reads, self.jobs, self.burst = reads, jobs, burst

    def receive_reply(self, reply: ReceivedReply) -> ReplyBurst | None:
        """Complete the reads, or begin to retry them."""
        reads: StoreReads = self.reads
        reads.complete(self, reply)
        return self.burst

    def __call__(self, reply: Any, error: BaseException | None) -> None:
        """Handle a reply that arrived outside the connection's receive buffer, or an error."""
        reads: StoreReads = self.reads
        if error is not None:
            reads.fail(self, error)
            return
        received = ReceivedReply()
        received.open(reply.message, reply.payload)
        try:
            reads.complete(self, received)
        finally:
            received.close()
        self.burst.one_came()


class StoreReads:
    """The reads of a client from its stores."""

    def __init__(self, client: Any) -> None:
        """`client`: the ChunkClient, which does what has to wait."""
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._dialer: Any = client.dialer
        self._replicas: Any = client.replicas
        self._hedging = client.hedging
        self._short: Any = client.short
        self._clock = client.clock
        self._is_system = type(client.clock) is SystemClock
        self._counters = client.counters
        self.patience_s = client.options.deadline_s
        """How long a read may take."""
        self.flags = CLIENT_CACHES if client.options.direct_reads else 0
        self._again = client.hedge
        self._held: list[ReadQueue] | None = None  # target queues with reads that wait for send_held
        self._collected: dict[Any, list[bytes]] = {}  # connection -> frames that wait for send_collected
        self._request, self._results = ReadRequest(), ReadResults()

    def now_s(self) -> float:
        """The client's time."""
        return primitives.boottime_s() if self._is_system else float(self._clock.boottime_s())

    # -- from the reader to the stores

    def begin(self, job: Read, missed: bool = False, collects: bool = False, now_s: float = 0.0) -> None:
        """Start the read. `now_s`: the present time, if the caller knows it.

        `missed`: the caller has just tried a read from memory. `collects`: the chunk has no location, and the caller
        calls `send_collected` in the same event-loop iteration.
        """
        file = job.file
        file.grant_used = True
        if file.encrypted and file.key is None:
            self._client.fetch_key(job)
            return
        lane: ReadQueue | None = file.lanes.get(job.index)
        if lane is None:
            try:
                lane = self._client.find_lane(file, job.index)
            except Stale as error:
                self._client.again(job, error)
                return
        short: Any = self._short
        if not collects and short.on:
            if job.index not in file.located:
                short.want(file, job.index, lane)
            elif short.try_read(
                file,
                job.index,
                job.offset,
                job.length,
                lane,
                partial(self.complete_short_circuit, lane, job),
                missed=missed,
            ):
                return
        if (
            collects
            or job.length >= _ALONE_BYTES
            or job.into is not None
            or not (lane.in_flight or lane.pending or self._held is not None)
        ):
            self.send(lane, [job], collects, now_s)
            return
        lane.pending.append(job)
        lane.pending_bytes += job.length
        if len(lane.pending) >= _GATHER_READS or lane.pending_bytes >= _GATHER_BYTES:
            self._send_pending(lane)
        elif not lane.scheduled:
            lane.scheduled = True
            if self._held is None:
                self._loop.call_soon(self.turn_over, lane)
            else:
                self._held.append(lane)

    def complete_short_circuit(self, lane: ReadQueue, job: Read, found: memoryview | None) -> None:
        """End the read with the bytes of a short-circuit read; None: ask the store."""
        if found is not None:
            hedged_reads.settle(job, found)
        elif not job.done():
            self.send(lane, [job])

    def hold(self) -> None:
        """Batch all reads until `send_held`, which must be called in the same event-loop iteration."""
        if self._held is None:
            self._held = []

    def send_held(self) -> None:
        """Send the reads that were batched since `hold`."""
        held, self._held = self._held, None
        for lane in held or ():
            self.turn_over(lane)

    def send_collected(self) -> None:
        """Send the collected frames."""
        if not self._collected:
            return
        collected, self._collected = self._collected, {}
        for connection, frames in collected.items():
            transport: Any = connection.frames.transport
            if not transport.is_closing():
                transport.write(b"".join(frames))

    def turn_over(self, lane: ReadQueue) -> None:
        """Send the reads that were gathered for a target; called at the end of the event-loop iteration."""
        lane.scheduled = False
        if lane.pending:
            self._send_pending(lane)

    def _send_pending(self, lane: ReadQueue) -> None:
        jobs, size = lane.pending, lane.pending_bytes
        lane.pending, lane.pending_bytes = [], 0
        parts = max((size + _PART_BYTES - 1) // _PART_BYTES, 2 if len(jobs) >= _HALVED_READS else 1)
        each = (len(jobs) + parts - 1) // parts
        for at in range(0, len(jobs), each):
            self.send(lane, jobs[at : at + each])

    def send(self, lane: ReadQueue, jobs: list[Any], collects: bool = False, now_s: float = 0.0) -> None:
        """Send the reads to the target in one message, once it is connected."""
        connections: dict[Any, Any] = self._dialer.by_endpoints
        connection: Any = connections.get(lane.endpoints)
        if connection is None or connection.closed:
            self._client.send_when_connected(lane, jobs)
        else:
            self.submit(connection, lane, jobs, collects, now_s)

    def submit(
        self,
        connection: Any,
        lane: ReadQueue,
        jobs: list[Any],
        collects: bool = False,
        now_s: float = 0.0,
    ) -> None:
        """Send the reads over this connection."""
        first: Read = jobs[0]
        request, job, file = self._request, first, first.file
        request.begin(self._client.epoch, lane.target)
        for one in jobs:
            job = one
            file = job.file
            request.add(file.inode, job.index, job.offset, job.length, file.grant, self.flags)
        request.close(first.verify)
        size = request.byte_count
        if not now_s:
            now_s = self.now_s()
        sent = self._message(lane, jobs, now_s)
        self._counters["messages"] += 1
        self._counters["reads"] += len(jobs)
        others = lane.in_flight
        lane.in_flight = others + 1
        if self._replicas.several:
            self._hedging.add(sent)
        if first.into is not None:
            sent.end = submit_into(
                connection, lane, request.message(), first.into, first.future, first.deadline_s, sent
            )
            return
        left_s = first.deadline_s - now_s
        if (
            collects
            and left_s >= 0.001
            and (type(connection) is StreamConnection or isinstance(connection, StreamConnection))
        ):
            in_flight: dict[int, Any] = connection.in_flight
            if (
                connection.writable
                and not connection.upgraded
                and not connection.waiting
                and len(in_flight) < _IN_FLIGHT_MAX
            ):
                number = reply_receivers.register(
                    connection, in_flight, sent, first.deadline_s, size, _METHOD_KEY, now_s
                )
                frame = request.frame(_METHOD, number, int(min(left_s * 1000, 4294967295.0)))
                self._collect(connection, frame, size, others)
                return
        connection.submit(
            _METHOD_KEY, request.message(), deadline_s=first.deadline_s, on_done=sent, room=size
        )

    def _message(self, lane: ReadQueue, jobs: list[Any], now_s: float) -> ReadMessage:
        sent: ReadMessage = ReadMessage.__new__(ReadMessage)
        sent.begin(lane, len(jobs), now_s, self._again)
        first: Read = jobs[0]
        sent.start(self, jobs, first.burst)
        return sent

    def _collect(self, connection: Any, frame: bytes, size: int, others: int) -> None:
        if size > _SMALL_PAYLOAD_BYTES:
            connection.frames.reader.widen()
        if others:
            frames: list[bytes] | None = self._collected.get(connection)
            if frames is None:
                self._collected[connection] = [frame]
            elif len(frames) < _BURST:
                frames.append(frame)
            else:
                self.send_collected()
                self._collected[connection] = [frame]
            return
        # The store is idle.
        transport: Any = connection.frames.transport
        if not transport.is_closing():
            transport.write(frame)

    # -- from the stores to the readers

    def answered(self, lane: ReadQueue, jobs: list[Any], reply: Any, error: BaseException | None) -> None:
        """Handle the result of reads that another module has sent and counted in the queue."""
        self._message(lane, jobs, self.now_s())(reply, error)

    def _ended(self, sent: SentRead, is_good: bool) -> None:
        sent.lane.in_flight -= 1
        if sent.is_watched:
            if is_good:
                self._hedging.came_at(sent, self.now_s())
            else:
                self._hedging.came(sent, False)

    def fail(self, sent: SentRead, error: BaseException) -> None:
        """Handle the error of a message."""
        self._ended(sent, False)
        self._client.all_again(sent.jobs, error, sent.lane)

    def complete(self, sent: SentRead, reply: ReceivedReply) -> None:
        """Handle the reply to a message."""
        self._ended(sent, True)
        lane, jobs = sent.lane, sent.jobs
        # with several reads, the end of one may lead to the end of another message
        results: ReadResults = self._results if len(jobs) == 1 else ReadResults()
        if not results.open(reply, len(jobs)):
            self._client.all_again(
                jobs, CorruptFrame("a store's answer to a read does not fit the question"), lane
            )
            return
        for one in jobs:
            job: Read = one
            is_good = results.step(job.length)
            try:
                if results.status:
                    self._client.again(job, error_of(results.status, job), lane)
                elif is_good:
                    job.take(reply, results.first, results.length)
                else:
                    self._counters["mismatches"] += 1
                    self._client.again(job, mismatch(job, lane), lane)
            except Exception as error:  # a bug: report it to the reader, and complete the others
                if job.done():
                    self._loop.call_exception_handler(
                        {"message": "the requester of a read has failed", "exception": error}
                    )
                else:
                    job.set_exception(error)
        results.close()
