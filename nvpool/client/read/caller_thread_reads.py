"""Reads by the calling thread, if the event loop is not needed for them.

A read that is handed to the event loop's thread wakes that thread and is woken by it, which costs more than
the read. So the calling thread reads by itself: with a short-circuit read if the file's location is known,
else over a blocking connection of its own to the store (rpc/transports/sync_stream).

The thread uses the client's present state (grant, map, locations, local writes), as a read that begins now
may, and changes nothing but statistics. It declines with None, without a side effect, in all of these cases:
unstored writes, sequential reading, the end of the file, an unknown location, a stale grant or map, a store
that refuses, is slow or gone, a checksum mismatch. Then the caller asks the event loop, which renews, retries
and reports.

Used by sdk/filesystem from any thread. Each target has at most LANES_MAX connections; a thread that finds all
of them in use asks the event loop, which batches reads.
"""

from __future__ import annotations

from collections import deque

from nvpool.client.data.read_messages import ReadResults, encode_read
from nvpool.client.data.read_queue import ReadQueue
from nvpool.client.data.short_circuit import NOW_BYTES_MAX
from nvpool.client.state.metadata_cache import OpenInode
from nvpool.client.state.small_file_cache import SMALL_BYTES
from nvpool.client.state.vfs_types import FileHandle
from nvpool.core.errors import NvpoolError
from nvpool.core.grants import READ
from nvpool.core.primitives import ReceivedReply
from nvpool.core.units import KIB
from nvpool.rpc.transports.sync_stream import BlockingConnection
from nvpool.rpc.v1.wire_pb2 import DATA_READ

LANES_MAX = 4
"""Connections of threads to one target. More concurrent threads share one interpreter in any case."""
LANE_BYTES_MAX = 256 * KIB
"""Longest read by a thread. A longer one costs more than the event loop, which receives without a copy."""
PATIENCE_S = 1.0
"""Wait for a store. Then the event loop repeats the read, with the client's deadline.

So a read may end this much later than the deadline says, once in SHUN_S.
"""
SHUN_S = 5.0
"""How long reads of a target go through the event loop after its connection broke."""


class _TargetConnections:
    """The idle connections to one target, with None for each that may still be opened.

    Any thread may take from the deque and give to it at any time.
    """

    __slots__ = ("idle", "not_before_s")

    def __init__(self) -> None:
        self.idle: deque[BlockingConnection | None] = deque([None] * LANES_MAX)
        self.not_before_s = 0.0

    def hang_up(self) -> None:
        """Close the connections that are idle now."""
        for _ in range(LANES_MAX):
            try:
                connection = self.idle.popleft()
            except IndexError:
                return
            if connection is not None:
                connection.close()
            self.idle.append(None)


class ThreadReads:
    """Reads of a client by threads other than the one that runs the client's event loop."""

    def __init__(self, vfs, dialer) -> None:
        self._chunks = vfs.chunks
        self._short = vfs.chunks.short
        self._now_s = vfs.clock.boottime_s
        self._dialer = dialer
        self.connections: dict[int, _TargetConnections] = {}
        self._closed = False
        self.counters = {"short_circuit": 0, "lanes": 0}

    def read(self, handle: FileHandle, offset: int, length: int) -> memoryview | None:
        """As Vfs.read, or None: then the caller uses Vfs.read. Waits for a store for at most PATIENCE_S.

        Raises nothing but exceptions that interrupt the thread.
        """
        file = handle.file
        if (
            not handle.readable
            or handle.closed
            or offset < 0
            or length <= 0
            or file.lost
            or file.unreported
            or (file.encrypted and file.key is None)
        ):
            return None
        written, ahead, end = file.written, handle.ahead, offset + length
        if (written is not None and (written.dirty or written.sending)) or ahead.units or end > file.size:
            return None
        index = offset >> file.chunk_bits
        if end - 1 >> file.chunk_bits != index:
            return None
        skip = offset & 4095
        within, span = (offset & file.chunk_mask) - skip, skip + length + 4095 & -4096
        sequential = offset == ahead.next
        located = file.located.get(index)
        if located is not None:
            found = self._look(located, within, span)
        # the event loop reads ahead, and reads small files as a whole
        elif sequential or file.size <= SMALL_BYTES:
            return None
        else:
            found = self._ask(file, index, within, span)
        if found is None:
            return None
        # leave the state as Reader.read does
        ahead.run, ahead.reads = (ahead.run + length, ahead.reads + 1) if sequential else (0, 0)
        ahead.next = end
        return found if span == length else found[skip : skip + length]

    def _look(self, located, within: int, span: int) -> memoryview | None:
        if span > NOW_BYTES_MAX:
            return None
        try:
            found = self._short.look(located, within, span)
        except ValueError:  # its store's descriptors were closed meanwhile
            return None
        if type(found) is not memoryview:
            return None
        self._short.hit(located, span)
        self.counters["short_circuit"] += 1
        return found

    def _ask(self, file: OpenInode, index: int, within: int, span: int) -> memoryview | None:
        lane = file.lanes.get(index)
        if (
            lane is None
            or span > LANE_BYTES_MAX
            or not file.grant_rights & READ
            or self._short.may_serve(lane.target)
        ):
            return None
        way = self.connections.get(lane.target) or self.connections.setdefault(
            lane.target, _TargetConnections()
        )
        if way.not_before_s > self._now_s():
            return None
        try:
            connection = way.idle.popleft()
        except IndexError:
            return None
        try:
            if connection is None and (connection := self._connect(lane)) is None:
                return None
            file.grant_used = True
            chunks = self._chunks
            message = encode_read(
                chunks.epoch, lane.target, file.inode, index, within, span, file.grant, chunks.reads.flags
            )
            found = self._judged(connection.call(DATA_READ, message), span)
            if found is not None and file.key is not None:
                found = file.key.cipher.decrypt(file.inode, index, within >> 12, found)
            return found
        except NvpoolError:
            if connection is None or connection.closed:
                way.not_before_s = self._now_s() + SHUN_S
                # if the store's process has died, all connections are dead, and each would cost a failure
                way.hang_up()
            return None
        finally:
            way.idle.appendleft(None if connection is None or connection.closed else connection)
            if self._closed:
                self.close()

    def _connect(self, lane: ReadQueue) -> BlockingConnection | None:
        live = self._dialer.live(lane.endpoints)
        if live is None or not live.peer.address.startswith("stream"):
            return None
        return BlockingConnection(live.peer.address, self._dialer.greeting, PATIENCE_S)

    def _judged(self, answer: tuple[bytes, memoryview], span: int) -> memoryview | None:
        """The `span` bytes if the reply is good; else None."""
        reply, results = ReceivedReply(), ReadResults()
        reply.open(*answer)
        try:
            if (
                not results.open(reply, 1)
                or not results.step(span)
                or results.status
                or results.length != reply.payload_bytes
            ):
                return None
            self.counters["lanes"] += 1
            if results.length == span:
                return reply.keep(results.first, span)
            whole = memoryview(bytearray(span))  # a hole, or the end of all written bytes
            reply.copy_to(whole, results.first, results.length)
            return whole
        finally:
            reply.close()

    def close(self) -> None:
        """Close the connections: idle ones now, used ones after their reply.

        Any thread may call this repeatedly.
        """
        self._closed = True
        for way in list(self.connections.values()):
            way.hang_up()
