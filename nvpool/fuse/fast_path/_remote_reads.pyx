# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""Compiled reads from a store: from the kernel's request to the frame, and back.

remote_reads.py has the contract.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.errno cimport ECONNABORTED, ENODEV, ENOENT, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

import asyncio

from nvpool.security._xts cimport decrypting
from nvpool.core.clock import SystemClock, stopwatch_s
from nvpool.core.errors import Stale
from nvpool.client.state.small_file_cache import SMALL_BYTES
from nvpool.client.data.hedged_reads cimport Hedging, SentRead
from nvpool.client.data.read_queue cimport ReadQueue
from nvpool.fuse.fast_path._read_requests cimport LARGE_BYTES, PAGE, Wanted, is_read, read_at_random
from nvpool.fuse.protocol.constants import Op
from nvpool.rpc.transports._head cimport HEADER_BYTES, REQUEST, put_head
from nvpool.rpc.reply_receivers cimport ReplyBurst, register
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX
from nvpool.rpc.transports.stream import StreamConnection
from nvpool.rpc.v1.wire_pb2 import DATA_READ

cdef extern from "_block_sums.h":
    int has_instruction()
    void sum_blocks(const unsigned char *data, size_t count, uint32_t *sums) nogil

cdef extern from "_clock.h":
    double boottime_s() nogil

cdef extern from "_kernel.h":
    ssize_t answer(int fd, uint64_t unique, const void *bytes, size_t length) nogil

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    uint32_t get32(const uint8_t *at) nogil
    void put32(uint8_t *at, uint32_t value) nogil
    void put64(uint8_t *at, uint64_t value) nogil

crc_begin(0)

cdef enum:
    LARGE_BLOCKS_MAX = LARGE_BYTES >> 12
    BLOCKS_MAX = 16  # frame.SMALL_PAYLOAD_BYTES: for a larger payload the connection's buffer is made wide
    MESSAGE_BYTES = 99          # read_write_codec._READ_REQUEST
    FRAME_BYTES = HEADER_BYTES + MESSAGE_BYTES
    REPLY_BYTES = 29            # of a reply's message, before the checksums
    BURST = 64                  # frames that wait for the end of a burst
    SPARES_MAX = 64
    TURN = 8                    # reads that are answered before new requests are taken
    LARGE_TURN = 2              # of those above BLOCKS_MAX

cdef int opcode_of_reads = Op.READ
cdef object opcode_key = int(Op.READ), method_key = int(DATA_READ)
cdef uint16_t method_of_reads = DATA_READ
cdef uint64_t small_bytes = SMALL_BYTES
cdef Py_ssize_t in_flight_max = IN_FLIGHT_MAX


def is_of_use():
    """Whether this processor has the instruction for checksums."""
    return bool(has_instruction())


cdef class PendingRead(SentRead):
    """A read requested from a store.

    It is an entry of the table of pending requests, and the receiver of the connection's reply.
    """
    cdef RemoteReads reads
    cdef object file, index
    cdef uint64_t unique
    cdef uint32_t size, skip, span, within
    cdef double since_s, deadline_s
    cdef bint is_done

    def cancel(self):
        """Cancel: the caller dies, or the mount is gone; reply now. False: the read was answered already."""
        entry = self.reads.requests.work.get(self.unique)
        if entry is None or entry[0] is not self:
            return False
        self.is_done = True
        self.reads.path.read_ended(self.unique, asyncio.CancelledError())
        return True

    cdef ReplyBurst take(self, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload, Py_ssize_t payload_bytes):
        """Take the reply if it has all requested data; None: the slow path gets it."""
        cdef RemoteReads reads = self.reads
        if self.jobs is not None or not fits(self, message, message_bytes, payload, payload_bytes):
            return None
        # The reply is complete and correct.
        try:
            self.replied(payload)
        except Exception as error:  # a bug: report it to the caller, and answer the others
            entry = reads.work.get(self.unique)
            if entry is not None and entry[0] is self:
                reads.path.read_ended(self.unique, error)
        return reads

    cdef int replied(self, const uint8_t *payload) except -1:
        """Handle complete and correct data."""
        cdef RemoteReads reads = self.reads
        self.lane.in_flight -= 1
        if self.is_watched:
            reads.hedging.came_at(self, reads.now_s())
        if not self.is_done:
            self.is_done = True
            reads.send_reply(self, payload)
        return 0

    def __call__(self, reply, error):
        """Handle a reply that `take` did not answer, or an error: the slow path continues from here."""
        cdef RemoteReads reads = self.reads
        if error is None and self.jobs is None and not self.is_done and reads.whole(self, reply.message, reply.payload):
            return
        if self.is_watched:
            reads.hedging.came(self, error is None)
        if self.jobs is None:
            if self.is_done:  # not reused: the table of pending requests may still contain it
                self.lane.in_flight -= 1
                return
            self.go_on()
        reads.chunks.answered(self.lane, self.jobs, reply, error)

    def send_again(self):
        """Send the read to another replica too; the slow path waits for both replies. Called by Hedging."""
        if not self.is_done:
            self.go_on()
            self.reads.chunks.hedge(self)

    cdef int go_on(self) except -1:
        """Let the slow path continue with this read."""
        self.is_done = True
        self.jobs = [self.reads.path.as_ordinary(self.unique, self.file, self.index, self.within, self.span, self.skip,
                                                 self.size, self.deadline_s)]
        return 0


cdef class ReadConnection:
    """A connection, and the frames for it that wait for the end of a burst."""
    cdef object connection
    cdef Py_ssize_t count
    cdef uint8_t[BURST * FRAME_BYTES] frames

    cdef int send(self) except -1:
        cdef Py_ssize_t count = self.count
        if count:
            self.count = 0
            transport = self.connection.frames.transport
            if not transport.is_closing():
                transport.write(PyBytes_FromStringAndSize(<const char *>self.frames, count * FRAME_BYTES))
        return 0


cdef object send_again = PendingRead.send_again


cdef class RemoteReads(ReplyBurst):
    """Compiled part of RemoteReadPath; see remote_reads.py.

    `path.requests` has the request in its buffer, and the table of pending ones.
    """
    cdef readonly object path, requests
    cdef readonly uint64_t read_bytes
    cdef Hedging hedging
    cdef object _pages, _paged, chunks, short_circuit, dialer, replicas, _counters, _clock
    cdef dict _files, work, ways, scratches
    cdef bytearray _buffer
    cdef int _fd
    cdef bint is_system
    cdef double patience_s
    cdef uint16_t flags
    cdef Py_ssize_t in_work_max
    cdef uint64_t large         # replies that were received outside the connection's buffer
    cdef list spares, waiting

    def __init__(self, path, ops, chunks, Py_ssize_t in_work_max):
        requests = path.requests
        self.path, self.requests, self.chunks, self.in_work_max = path, requests, chunks, in_work_max
        self._fd, self._buffer, self.work = requests.fd, requests.buffer, requests.work
        self._pages, self._files, self._paged = ops.cached_pages, ops.files.by_handle, ops.cached_pages.paged
        self.short_circuit, self.dialer, self.replicas = chunks.short, chunks.dialer, chunks.replicas
        self.hedging = chunks.hedging
        self._counters, self._clock = chunks.counters, chunks.clock
        self.is_system = type(chunks.clock) is SystemClock
        self.patience_s, self.flags = chunks.options.deadline_s, chunks.read_flags
        self.ways, self.scratches, self.turn = {}, {}, TURN
        self.spares, self.waiting = [], []

    cdef double now_s(self) except -1:
        return boottime_s() if self.is_system else self._clock.boottime_s()

    def take(self, Py_ssize_t count):
        """Start a read as `begin` does, for a request in the buffer."""
        if not self.begin(count):
            return False
        self.requests.deferred += 1
        return True

    cdef bint begin(self, Py_ssize_t count) except -1:
        """Start the READ of `count` bytes in the buffer.

        True: it is in the table of pending requests. False: nothing has happened.
        """
        cdef Wanted wanted
        cdef PyObject *found
        if (not is_read(self._buffer, count, &wanted) or self.requests.forwarded
                or len(self.work) >= self.in_work_max):
            return False
        opened = read_at_random(self._files, self._pages, self._paged, &wanted)
        if opened is None:
            return False
        file, ahead = opened.file, opened.ahead
        if file.encrypted and file.key is None:
            return False
        cdef uint64_t unique = wanted.unique, offset = wanted.offset, end
        cdef uint32_t size = wanted.size
        cdef uint64_t file_bytes = file.attr.size
        end = offset + size
        if end > file_bytes or file_bytes <= small_bytes:
            return False
        cdef int bits = file.chunk_bits
        cdef uint64_t index = offset >> bits
        if end - 1 >> bits != index or index >> 32:
            return False
        key = index
        if file.located and key in file.located:
            return False
        cdef ReadQueue lane = (<dict>file.lanes).get(key)
        if lane is None:
            try:
                lane = self.chunks.find_lane(file, key)
            except Stale:
                return False
        if lane.pending:
            return False
        cdef long target = lane.target
        cdef bytes grant = file.grant
        cdef uint64_t epoch = self.chunks.epoch
        if not 0 < target < 128 or PyBytes_GET_SIZE(grant) != 60 or not epoch:
            return False
        if self.short_circuit.on and self.short_circuit.may_serve(target):
            return False
        found = PyDict_GetItem(self.dialer.by_endpoints, lane.endpoints)
        if found is NULL:
            return False
        connection = <object>found
        if not isinstance(connection, StreamConnection) or connection.upgraded or connection.closed:
            return False
        cdef dict in_flight = connection.in_flight
        if not connection.writable or connection.waiting or len(in_flight) >= in_flight_max:
            return False
        cdef double now_s = self.now_s()
        cdef double deadline_s = now_s + self.patience_s
        cdef uint32_t left_ms = <uint32_t>min(self.patience_s * 1000, <double>0xFFFFFFFF)
        if not left_ms:
            return False
        if ((offset & (PAGE - 1)) + size + PAGE - 1) >> 12 > LARGE_BLOCKS_MAX:
            return False
        cdef PendingRead one = <PendingRead>self.spares.pop() if self.spares else PendingRead.__new__(PendingRead)
        one.begin(lane, 1, now_s, send_again)
        one.reads, one.file, one.index = self, file, key
        one.unique, one.size, one.is_done = unique, size, False
        one.skip = offset & (PAGE - 1)
        one.within = <uint32_t>((offset & <uint64_t>file.chunk_mask) - one.skip)
        one.span = (one.skip + size + PAGE - 1) & ~<uint32_t>(PAGE - 1)
        one.since_s, one.deadline_s = self.requests.since_s, deadline_s
        if one.span > BLOCKS_MAX << 12:
            connection.frames.reader.widen()
            self.turn = LARGE_TURN
        else:
            self.turn = TURN
        cdef ReadConnection way = self.way_of(connection)
        if way.count == BURST:
            way.send()
        cdef uint32_t number = register(connection, in_flight, one, deadline_s, one.span, method_key, now_s)
        pack(way.frames + way.count * FRAME_BYTES, number, left_ms, epoch, <uint8_t>target, PyBytes_AS_STRING(grant),
             file.inode, <uint32_t>index, one.within, one.span, self.flags)
        way.count += 1
        file.grant_used = True
        ahead.run = 0
        ahead.reads = 0
        ahead.next = end
        self._counters["messages"] += 1
        self._counters["reads"] += 1
        cdef long others = lane.in_flight
        lane.in_flight = others + 1
        self.work[unique] = one, wanted.pid, opcode_key, one.since_s
        if self.replicas.several:
            self.hedging.add(one)
        if not others:  # the store is idle
            way.send()
        elif way.count == 1:
            self.waiting.append(way)
        return True

    cdef ReadConnection way_of(self, connection):
        cdef PyObject *found = PyDict_GetItem(self.ways, connection)
        cdef ReadConnection way
        if found is not NULL:
            return <ReadConnection><object>found
        for known in list(self.ways):
            if known.closed:
                del self.ways[known]
        way = ReadConnection.__new__(ReadConnection)
        way.connection = connection
        self.ways[connection] = way
        return way

    def send(self):
        """Send the collected frames to the stores."""
        cdef list waiting = self.waiting
        if waiting:
            self.waiting = []
            for way in waiting:
                (<ReadConnection>way).send()

    cdef bint whole(self, PendingRead one, message, payload) except -1:
        """Check a reply that was received outside the connection's buffer.

        If it is correct, answer the kernel.
        """
        cdef Py_buffer said, view
        cdef bint is_good = False
        PyObject_GetBuffer(message, &said, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
            try:
                is_good = fits(one, <const uint8_t *>said.buf, said.len, <const uint8_t *>view.buf, view.len)
                if is_good:
                    one.replied(<const uint8_t *>view.buf)
            finally:
                PyBuffer_Release(&view)
        finally:
            PyBuffer_Release(&said)
        if is_good:
            self.large += 1
            if self.large & 1:
                self.path.some_ended()
            else:
                self.go_on()
        return is_good

    cdef int go_on(self) except -1:
        """Take new requests after some replies, before the other replies are handled."""
        requests, path = self.requests, self.path
        path.some_ended()
        if self.work and requests.reading and not requests.taking:
            path.take_requests()
        return 0

    cdef int send_reply(self, PendingRead one, const uint8_t *blocks) except -1:
        """Reply to the kernel."""
        cdef int error
        requests, file = self.requests, one.file
        if file.encrypted:
            blocks = decrypting(self.scratches, file.key).decrypted(blocks, one.span >> 12, file.inode, one.index,
                                                                    one.within >> 12)
        self.read_bytes += one.size
        if answer(self._fd, one.unique, blocks + one.skip, one.size) < 0:
            error = errno
            if error not in (ENOENT, ENODEV, ECONNABORTED):
                self.path.answer_refused(one.unique, error, 16 + one.size)
        del self.work[one.unique]
        if requests.interrupted:
            requests.interrupted.pop(one.unique, None)
        requests.spent.add(opcode_of_reads, max(0.0, stopwatch_s() - one.since_s))
        one.file = one.lane = None  # nothing else refers to it: Hedging no longer does, nor the connection
        if len(self.spares) < SPARES_MAX:
            self.spares.append(one)
        return 0

    def close(self):
        """Send what is collected. Replies that arrive later go to the slow path."""
        self.send()
        self.ways.clear()
        self.spares.clear()


cdef bint fits(PendingRead one, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload, Py_ssize_t payload_bytes):
    """Whether a reply has all requested blocks with correct checksums.

    The checksums are not checked if the caller is gone.
    """
    cdef uint32_t count = one.span >> 12, sums_bytes = count * 4
    cdef uint32_t sums[LARGE_BLOCKS_MAX]
    cdef int wide = count >= 32  # the length of its checksums takes two bytes
    if (payload_bytes != one.span or message_bytes != REPLY_BYTES + wide + sums_bytes or message[0] != 0x09 or message[9] != 0x12
            or message[10] != 16 or message[11] or message[12] or get32(message + 15) != one.span or message[27] != 0x1A):
        return False
    if message[28] != (sums_bytes & 127 | 128 if wide else sums_bytes) or wide and message[29] != sums_bytes >> 7:
        return False
    if one.is_done:
        return True
    sum_blocks(payload, count, sums)
    return not memcmp(sums, message + REPLY_BYTES + wide, sums_bytes)


cdef void pack(uint8_t *at, uint32_t number, uint32_t deadline_ms, uint64_t epoch, uint8_t target, const char *grant, uint64_t inode,
               uint32_t index, uint32_t offset, uint32_t length, uint16_t flags) noexcept:
    """Encode the frame: `frame.pack_head` of `read_write_codec.encode_read_request`."""
    cdef uint8_t *message = at + HEADER_BYTES
    message[0] = 0x09
    put64(message + 1, epoch)
    message[9], message[10], message[11], message[12] = 0x10, target, 0x1A, 60
    memcpy(message + 13, grant, 60)
    message[73], message[74] = 0x22, 24
    put64(message + 75, inode)
    put32(message + 83, index)
    put32(message + 87, offset)
    put32(message + 91, length)
    message[95], message[96], message[97], message[98] = 0, 0, flags & 255, flags >> 8
    put_head(at, REQUEST, method_of_reads, number, deadline_ms, MESSAGE_BYTES, 0, crc_of(message, MESSAGE_BYTES))
