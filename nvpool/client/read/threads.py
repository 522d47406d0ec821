"""Reads by the thread that wants the bytes, where they need nothing that only the loop may do.

A read that is handed to the loop's thread wakes it and is woken by it, which costs more than the read. So the calling thread
looks for itself: by the short cut where the file is located there, else by a connection of its own to the store, see
rpc/transports/sync_stream.
It takes what the client knows as it finds it (grant, map, places, what was written here), as a read that begins now may, and
changes none of it but figures. Whatever is not plain sailing is no business of this module: unstored writes, sequential
reading, the end of the file, holes in what is known, a stale grant or map, a store that refuses, is slow or gone, a checksum
that does not fit. Then there is None, nothing has happened, and the loop is asked, which renews, repeats and reports.

Called by sdk/filesystem from any thread. The bound of connections is LANES_MAX to a target; who finds them all in use asks
the loop, which gathers.
"""

from __future__ import annotations

from collections import deque

from nvpool.client.data.short_circuit import NOW_BYTES_MAX
from nvpool.client.data.target_queue import Lane, reads_struct, results_struct
from nvpool.client.state.attr_cache import OpenInode
from nvpool.client.state.small_file_cache import SMALL_BYTES
from nvpool.client.state.types import FileHandle
from nvpool.core.checksum import block_checksums
from nvpool.core.errors import NvpoolError
from nvpool.core.grants import READ
from nvpool.core.units import KIB
from nvpool.rpc.messages.data_codec import decode_read_reply, encode_read_request
from nvpool.rpc.transports.sync_stream import BlockingConnection
from nvpool.rpc.v1.wire_pb2 import DATA_READ

LANES_MAX = 4
"""Connections of threads to one target. More threads at once than that have one interpreter between them anyway."""
LANE_BYTES_MAX = 256 * KIB
"""A longer read costs more than the way to the loop, which receives it without a copy."""
PATIENCE_S = 1.0
"""A store that takes longer is asked anew by the loop, whose questions have the client's deadline: a read may end so much later
than that says, once in SHUN_S."""
SHUN_S = 5.0
"""A target whose connection broke is left to the loop for so long."""

_READ, _RESULT = reads_struct(1), results_struct(1)


class _Way:
    """To one target: connections that nobody uses now, None for each that may be made. Its deque is taken from and given to by
    any thread at any time."""

    __slots__ = ("idle", "not_before_s")

    def __init__(self) -> None:
        self.idle: deque[BlockingConnection | None] = deque([None] * LANES_MAX)
        self.not_before_s = 0.0

    def hang_up(self) -> None:
        """End the connections that idle now."""
        for _ in range(LANES_MAX):
            try:
                connection = self.idle.popleft()
            except IndexError:
                return
            if connection is not None:
                connection.close()
            self.idle.append(None)


class ThreadReads:
    """`vfs` and `dialer` of a client whose loop runs in another thread."""

    def __init__(self, vfs, dialer) -> None:
        self._chunks = vfs.chunks
        self._short = vfs.chunks.short
        self._now_s = vfs.clock.boottime_s
        self._dialer = dialer
        self._ways: dict[int, _Way] = {}
        self._closed = False
        self.counters = {"short_cut": 0, "lanes": 0}

    def read(self, handle: FileHandle, offset: int, length: int) -> memoryview | None:
        """What Vfs.read would return, or None: ask that. Waits at most for PATIENCE_S, for a store. Raises nothing but what
        interrupts the thread."""
        file = handle.file
        if not handle.readable or handle.closed or offset < 0 or length <= 0 or file.lost or file.untold \
                or (file.encrypted and file.key is None):
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
        elif sequential or file.size <= SMALL_BYTES:  # the loop reads ahead, and whole files
            return None
        else:
            found = self._ask(file, index, within, span)
        if found is None:
            return None
        # as Reader.read leaves it
        ahead.run, ahead.reads = (ahead.run + length, ahead.reads + 1) if sequential else (0, 0)
        ahead.next = end
        return found if span == length else found[skip:skip + length]

    def _look(self, located, within: int, span: int) -> memoryview | None:
        if span > NOW_BYTES_MAX:
            return None
        try:
            found = self._short.look(located, within, span)
        except ValueError:  # its store's descriptors were given up meanwhile
            return None
        if type(found) is not memoryview:
            return None
        self._short.hit(located, span)
        self.counters["short_cut"] += 1
        return found

    def _ask(self, file: OpenInode, index: int, within: int, span: int) -> memoryview | None:
        lane = file.lanes.get(index)
        if lane is None or span > LANE_BYTES_MAX or not file.grant_rights & READ or self._short.may_serve(lane.target):
            return None
        way = self._ways.get(lane.target) or self._ways.setdefault(lane.target, _Way())
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
            message = encode_read_request(self._chunks.epoch, lane.target, [file.grant],
                                          _READ.pack(file.inode, index, within, span, 0, 0))
            found = self._judged(connection.call(DATA_READ, message), span)
            if found is not None and file.key is not None:
                found = file.key.cipher.decrypt(file.inode, index, within >> 12, found)
            return found
        except NvpoolError:
            if connection is None or connection.closed:
                way.not_before_s = self._now_s() + SHUN_S
                way.hang_up()  # where its process has died they are all dead, and each would be found out in SHUN_S
            return None
        finally:
            way.idle.appendleft(None if connection is None or connection.closed else connection)
            if self._closed:
                self.close()

    def _connect(self, lane: Lane) -> BlockingConnection | None:
        live = self._dialer.live(lane.endpoints)
        if live is None or not live.peer.address.startswith("stream"):
            return None
        return BlockingConnection(live.peer.address, self._dialer.greeting, PATIENCE_S)

    def _judged(self, answer: tuple[bytes, memoryview], span: int) -> memoryview | None:
        """The `span` bytes, when all is well."""
        message, payload = answer
        results, checksums = decode_read_reply(message)
        if len(results) != _RESULT.size:
            return None
        status, _, length, _ = _RESULT.unpack(results)
        if status or length != len(payload) or length > span or length & 4095 or block_checksums(payload) != checksums:
            return None
        self.counters["lanes"] += 1
        if length == span:
            return payload
        whole = bytearray(span)  # a hole, or the end of what was ever written
        whole[:length] = payload
        return memoryview(whole)

    def close(self) -> None:
        """End the connections: those that idle now, those in use with their answer. From any thread, more than once."""
        self._closed = True
        for way in list(self._ways.values()):
            way.hang_up()
