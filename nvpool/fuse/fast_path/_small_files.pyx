# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""Compiled reads of complete small files, batched in one message for a store.

From the kernel's requests to the message, and back. small_files.py has the contract.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.errno cimport ECONNABORTED, ENODEV, ENOENT, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

import asyncio

from nvpool.security._xts cimport BATCH, XtsScratch, decrypting
from nvpool.core.clock import SystemClock
from nvpool.core.errors import Stale
from nvpool.core.units import CHAINS_PER_TABLE
from nvpool.client.data import store_reads
from nvpool.client.data.replica_choice import BUSIER
from nvpool.client.state import small_file_cache as contents
from nvpool.client.state.leases cimport Leases
from nvpool.client.state.metadata_cache cimport OpenInode
from nvpool.client.state.vfs_types cimport FileHandle
from nvpool.client.data.hedged_reads cimport Hedging, SentRead
from nvpool.client.data.read_queue cimport ReadQueue
from nvpool.core.primitives cimport ReceivedReply
from nvpool.fuse.fast_path._read_requests cimport PAGE, Wanted, is_read
from nvpool.fuse.protocol.constants import Op
from nvpool.rpc.transports._head cimport HEADER_BYTES, REQUEST, put_head
from nvpool.rpc.reply_receivers cimport ReplyBurst, register
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX
from nvpool.rpc.transports.stream import StreamConnection
from nvpool.rpc.v1.wire_pb2 import DATA_READ

cdef extern from "_block_sums.h":
    int has_instruction()
    void sum_blocks(const unsigned char *data, size_t count, uint32_t *sums) nogil

cdef extern from "_chunk_hash.h":
    uint64_t chunk_hash(uint64_t inode, uint32_t index) nogil

cdef extern from "_clock.h":
    int slot_of(double took_s) nogil
    double boottime_s() nogil
    double stopwatch() nogil

cdef extern from "_fields.h":
    uint8_t *put_number(uint8_t *at, uint8_t tag, uint64_t value) nogil
    uint8_t *put_fixed(uint8_t *at, uint8_t tag, uint64_t value) nogil
    const uint8_t *take_varint(const uint8_t *at, const uint8_t *end, uint64_t *value) nogil

cdef extern from "_kernel.h":
    ssize_t answer(int fd, uint64_t unique, const void *bytes, size_t length) nogil

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    uint16_t get16(const uint8_t *at) nogil
    uint32_t get32(const uint8_t *at) nogil
    void put16(uint8_t *at, uint16_t value) nogil
    void put32(uint8_t *at, uint32_t value) nogil
    void put64(uint8_t *at, uint64_t value) nogil

crc_begin(0)

cdef enum:
    GRANT_BYTES = 60
    READ_BYTES = 24             # read_write_codec.READ_ENTRY
    RESULT_BYTES = 16
    TOGETHER_MAX = 64           # reads that wait for the end of a burst
    BLOCKS_PER_BATCH = 48         # whose checksums are computed together

cdef uint32_t opcode_of_reads = Op.READ
cdef object opcode_key = int(Op.READ), method_key = int(DATA_READ)
cdef uint16_t method_of_reads = DATA_READ
cdef uint64_t small_bytes = contents.SMALL_BYTES
cdef Py_ssize_t entry_bytes = contents._ENTRY_BYTES
cdef Py_ssize_t in_flight_max = IN_FLIGHT_MAX
cdef Py_ssize_t gather_bytes = store_reads.GATHER_BYTES, part_bytes = store_reads.PART_BYTES
cdef Py_ssize_t halved_reads = store_reads.HALVED_READS, busier = BUSIER
cdef uint64_t chain_count = CHAINS_PER_TABLE


def is_of_use():
    """Whether this processor has the instruction for checksums."""
    return bool(has_instruction())


cdef inline const uint8_t *take_length(const uint8_t *at, const uint8_t *end, uint8_t tag, Py_ssize_t *length) noexcept nogil:
    """Start of the content of a bytes field with this tag; NULL: there is none, or it is incomplete."""
    cdef uint64_t found = 0
    at = take_varint(at + 1, end, &found) if at < end and at[0] == tag else NULL
    if at is NULL or found > <uint64_t>(end - at):
        return NULL
    length[0] = <Py_ssize_t>found
    return at


@cython.freelist(64)
cdef class PendingSmallRead:
    """A read of a small file.

    It is an entry of the table of pending requests, and in its file's `fetching` it stands for a reader.WholeFileFetch. `parts`
    are other reads that wait for the same bytes.
    """
    cdef SmallFileReads reads
    cdef readonly FileHandle opened
    cdef readonly OpenInode file
    cdef readonly object change
    cdef readonly list parts
    cdef readonly uint64_t unique, handle, offset, size, finish, file_bytes
    cdef uint32_t span
    cdef readonly double asked_s, deadline_s
    cdef double since_s
    cdef readonly bint is_done

    def cancel(self):
        """Cancel: the caller dies, or the mount is gone; reply now. False: the read was answered already."""
        entry = self.reads.requests.work.get(self.unique)
        if entry is None or entry[0] is not self:
            return False
        self.is_done = True  # may be set already: then the slow path was about to start
        self.reads.path.read_ended(self.unique, asyncio.CancelledError())
        return True


cdef class SmallReadBatch(SentRead):
    """The reads of one message: the receiver of the connection's reply."""
    cdef SmallFileReads reads
    cdef list asked
    cdef uint32_t bytes

    cpdef ReplyBurst receive_reply(self, ReceivedReply reply):
        if self.jobs is not None or not self.judge(reply.message_at, reply.message_bytes, reply.payload_at, reply.payload_bytes):
            return None
        self.reads.finish(self, <const char *>reply.payload_at)
        return self.reads

    def __call__(self, reply, error):
        """Handle a reply that was not taken from the buffer, or an error."""
        cdef Py_buffer said, came
        cdef bint is_good = False
        if error is None and self.jobs is None:
            message, payload = reply.message, reply.payload
            PyObject_GetBuffer(message, &said, PyBUF_SIMPLE)
            try:
                PyObject_GetBuffer(payload, &came, PyBUF_SIMPLE)
                try:
                    is_good = self.judge(<const uint8_t *>said.buf, said.len, <const uint8_t *>came.buf, came.len)
                    if is_good:
                        self.reads.finish(self, <const char *>came.buf)
                finally:
                    PyBuffer_Release(&came)
            finally:
                PyBuffer_Release(&said)
        if is_good:
            self.reads.path.some_ended()
            return
        if self.is_watched:
            self.reads.hedging.came(self, error is None)
        if self.jobs is None:
            self.jobs = self.reads.path.as_ordinary(self.asked)
        self.reads.chunks.reads.answered(self.lane, self.jobs, reply, error)

    def send_again(self):
        """Send the reads to another replica too; the slow path waits for both replies. Called by Hedging."""
        self.jobs = self.reads.path.as_ordinary(self.asked)
        self.reads.chunks.hedge(self)

    cdef bint judge(self, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload,
                    Py_ssize_t payload_bytes) noexcept:
        """Whether a reply has all bytes of all reads, with correct checksums, and nothing else."""
        cdef const uint8_t *end = message + message_bytes
        cdef const uint8_t *results
        cdef const uint8_t *expected
        cdef Py_ssize_t length = 0, at, count = len(self.asked), blocks, some
        cdef uint32_t sums[BLOCKS_PER_BATCH]
        if message_bytes < 9 or message[0] != 0x09 or payload_bytes != self.bytes:
            return False
        results = take_length(message + 9, end, 0x12, &length)
        if results is NULL or length != count * RESULT_BYTES:
            return False
        blocks = payload_bytes >> 12
        expected = take_length(results + length, end, 0x1A, &length)
        if expected is NULL or length != blocks * 4 or expected + length != end:
            return False
        for at in range(count):
            if get16(results + at * RESULT_BYTES) or get32(results + at * RESULT_BYTES + 4) != (<PendingSmallRead>self.asked[at]).span:
                return False
        at = 0
        while at < blocks:
            some = min(blocks - at, <Py_ssize_t>BLOCKS_PER_BATCH)
            sum_blocks(payload + (at << 12), some, sums)
            if memcmp(sums, expected + at * 4, some * 4):
                return False
            at += some
        return True


cdef object send_again = SmallReadBatch.send_again


cdef class SmallFileReads(ReplyBurst):
    """Compiled part of SmallFileReadPath; see small_files.py.

    `path.requests` has the request in its buffer, and the table of pending ones.
    """
    cdef readonly object path, requests
    cdef readonly uint64_t read_bytes, taken    # number of reads
    cdef Hedging hedging
    cdef object _pages, _reader, chunks, _contents, _short_circuit, _dialer, _replicas, _clock, _spent
    cdef dict _files, _work, _paged, _pending, _counters, _contents_counters, scratches
    cdef object _kept
    cdef Leases _leases
    cdef bytearray _buffer
    cdef int _fd
    cdef bint _is_system
    cdef double _patience_s, _attr_s
    cdef uint16_t _flags
    cdef Py_ssize_t _in_work_max

    def __init__(self, path, ops, vfs, Py_ssize_t in_work_max):
        chunks, requests = vfs.chunks, path.requests
        self.path, self.requests, self._pages, self._in_work_max = path, requests, ops.cached_pages, in_work_max
        self._fd, self._buffer, self._work, self._spent = requests.fd, requests.buffer, requests.work, requests.spent
        self._files, self._paged, self._leases = ops.files.by_handle, ops.cached_pages.paged, vfs.leases
        self._reader, self.chunks, self._contents, self._short_circuit = vfs.reader, chunks, vfs.reader.contents, chunks.short
        self._kept, self._contents_counters = self._contents.kept, self._contents.counters
        self._dialer, self._replicas, self.hedging = chunks.dialer, chunks.replicas, chunks.hedging
        self._counters, self._clock = chunks.counters, chunks.clock
        self._is_system = type(chunks.clock) is SystemClock
        self._patience_s, self._attr_s, self._flags = chunks.options.deadline_s, vfs.options.attr_s, chunks.reads.flags
        self._pending, self.scratches = {}, {}

    cdef double now_s(self) except -1:
        return boottime_s() if self._is_system else self._clock.boottime_s()

    # -- from the kernel to a store ------------------------------------------------------------------------------------------

    def take(self, Py_ssize_t count):
        """Start the READ of `count` bytes in the buffer.

        True: it is in the table of pending requests. False: nothing has happened.
        """
        cdef Wanted wanted
        cdef PyObject *found
        cdef uint64_t file_bytes, end
        cdef PendingSmallRead one
        cdef FileHandle opened
        cdef OpenInode file
        cdef object inode
        if not is_read(self._buffer, count, &wanted):
            return False
        found = PyDict_GetItem(self._files, wanted.handle)
        if found is NULL:
            return False
        opened = <FileHandle?><object>found
        file = opened.file
        file_bytes = file.attr.size
        if file_bytes > small_bytes or wanted.offset >= file_bytes:
            return False
        requests = self.requests
        if (not opened.readable or opened.closed or file.lost
                or file.encrypted and file.key is None
                or file.written is not None or file.fetching is not None or file.located
                or requests.forwarded or len(self._work) >= self._in_work_max
                or PyBytes_GET_SIZE(file.grant) != GRANT_BYTES):
            return False
        inode = file.inode
        if inode in self._kept:
            return False
        cdef double now_s = self.now_s(), born_s
        end = wanted.offset + wanted.size
        if end > file_bytes:
            born_s = file.attr_born_s
            if born_s + self._attr_s <= now_s and self._leases.held_at(inode, now_s) is None:
                return False  # another client may have made it longer
            end = file_bytes
        cdef bint is_short = self._short_circuit.on
        # as ShortCircuitReads.want for a file of which nothing was read before
        if is_short and file.missed:
            return False
        lane = self.lane_of(file, inode, now_s)
        if lane is None:
            return False
        # if reads wait there, it was checked; it is checked again when they are sent
        found = PyDict_GetItem(self._pending, lane)
        if found is NULL and (not 0 < <long>lane.target < 128 or self.connection_of(lane) is None):
            return False
        # The read starts here: the rest cannot fail.
        if is_short:
            file.missed = True
        one = PendingSmallRead.__new__(PendingSmallRead)
        one.reads, one.opened, one.file, one.change, one.parts = self, opened, file, file.attr.change, []
        one.unique, one.handle, one.offset, one.size, one.finish = wanted.unique, wanted.handle, wanted.offset, wanted.size, end
        one.file_bytes = file_bytes
        one.span = <uint32_t>(file_bytes + PAGE - 1) & ~<uint32_t>(PAGE - 1)
        one.asked_s, one.deadline_s, one.since_s, one.is_done = now_s, now_s + self._patience_s, requests.since_s, False
        if inode not in self._paged and self._pages.guards_pages:
            lease = self._leases.held_at(inode, now_s) if self._pages.looking is not None else None
            if lease is not None:  # as CachedPages.paging
                self._paged[inode] = lease.until_s, True
            else:
                self._pages.paging(inode)
        file.grant_used = True
        file.fetching = one
        unique_key = wanted.unique
        self._work[unique_key] = one, wanted.pid, opcode_key, one.since_s
        requests.deferred += 1
        found = PyDict_GetItem(self._pending, lane)
        if found is NULL:
            self._pending[lane] = [one]
        else:
            asked = <list><object>found
            asked.append(one)
            if len(asked) >= TOGETHER_MAX:
                del self._pending[lane]
                self.send_all(lane, asked)
        self.taken += 1
        return True

    cdef object lane_of(self, OpenInode file, inode, double now_s):
        """Compiled `ChunkClient.find_lane`, for the first chunk; None: it is unknown."""
        cdef dict lanes = file.lanes
        cdef PyObject *found = PyDict_GetItem(lanes, 0)
        cdef uint64_t key
        cdef Py_ssize_t count
        cdef ReadQueue lane
        if found is not NULL:
            return <object>found
        replicas = self._replicas
        if now_s < <double>replicas.choices_until_s:
            key = <uint64_t>(<tuple>file.layout)[0] * chain_count + chunk_hash(inode, 0) % chain_count
            found = PyDict_GetItem(<dict?>replicas.choices, key)
            if found is not NULL:  # as Replicas.choose
                choices = <tuple?><object>found
                count = len(<tuple>choices)
                lane = (<tuple>choices)[<Py_ssize_t>(<uint64_t>inode % <uint64_t>count)]
                if count == 1 or lane.in_flight + len(lane.pending) < busier:
                    lanes[0] = lane
                    return lane
        try:
            return self.chunks.find_lane(file, 0)
        except Stale:
            return None

    cdef object connection_of(self, lane):
        """A connection over which a message can be sent to that target now, or None."""
        cdef PyObject *found = PyDict_GetItem(<dict?>self._dialer.by_endpoints, lane.endpoints)
        if found is NULL:
            return None
        connection = <object>found
        if (not isinstance(connection, StreamConnection) or connection.upgraded or connection.closed
                or not connection.writable or connection.waiting or len(<dict>connection.in_flight) >= in_flight_max):
            return None
        return connection

    def send(self):
        """Send the collected reads to the stores."""
        cdef dict pending = self._pending
        if pending:
            self._pending = {}
            for lane, asked in pending.items():
                self.send_all(lane, asked)

    cdef int send_all(self, lane, list asked) except -1:
        """Send the reads in one message, or in several; see chunk_client."""
        cdef Py_ssize_t total = 0, parts, each, at
        cdef PendingSmallRead one
        for one in asked:
            total += one.span
        parts = max((total + part_bytes - 1) // part_bytes, 2 if len(asked) >= halved_reads else 1)
        each = (len(asked) + parts - 1) // parts
        for at in range(0, len(asked), each):
            some = asked if each == len(asked) else asked[at:at + each]
            try:
                self.send_some(lane, some)
            except Exception as error:  # a bug: report it to those that wait
                for one in some:
                    if one.file.fetching is one:
                        one.file.fetching = None
                    self.broken(one, error)
                    while one.parts:
                        one.parts.pop().end(None, error)
        return 0

    cdef int send_some(self, ReadQueue lane, list asked) except -1:
        cdef Py_ssize_t count = len(asked), at, length
        cdef SmallReadBatch together
        cdef PendingSmallRead one
        cdef uint8_t *begin
        cdef uint8_t *put
        cdef uint8_t head[32]
        cdef uint8_t *end
        cdef Py_ssize_t head_bytes, tail_bytes
        cdef double now_s = self.now_s()
        cdef double deadline_s = (<PendingSmallRead>asked[0]).deadline_s
        cdef uint32_t left_ms = 0
        cdef bint is_plain
        cdef bytes frame, grant
        if deadline_s > now_s:
            left_ms = <uint32_t>min((deadline_s - now_s) * 1000, <double>0xFFFFFFFF)
        connection = self.connection_of(lane) if left_ms else None
        cdef uint64_t epoch = self.chunks.epoch
        is_plain = connection is not None and epoch != 0
        if is_plain:
            for one in asked:
                grant = one.file.grant
                if PyBytes_GET_SIZE(grant) != GRANT_BYTES:
                    is_plain = False
        if not is_plain:
            self.path.small_reads_go_on(lane, asked)
            return 0
        put = put_fixed(head, 0x09, epoch)
        put = put_number(put, 0x10, <uint64_t>lane.target)
        head_bytes = put - head
        begin = put
        tail_bytes = put_number(begin, 0x22, count * READ_BYTES) - begin
        length = head_bytes + count * (2 + GRANT_BYTES) + tail_bytes + count * READ_BYTES
        frame = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + length)
        begin = <uint8_t *>PyBytes_AS_STRING(frame)
        put = begin + HEADER_BYTES
        memcpy(put, head, head_bytes)
        put += head_bytes
        for one in asked:
            grant = one.file.grant
            put[0], put[1] = 0x1A, GRANT_BYTES
            memcpy(put + 2, PyBytes_AS_STRING(grant), GRANT_BYTES)
            put += 2 + GRANT_BYTES
        put = put_number(put, 0x22, count * READ_BYTES)
        together = SmallReadBatch.__new__(SmallReadBatch)
        together.begin(lane, count, now_s, send_again)
        together.reads, together.asked = self, asked
        for at in range(count):
            one = <PendingSmallRead>asked[at]
            put64(put, one.file.inode)
            put32(put + 8, 0)
            put32(put + 12, 0)
            put32(put + 16, one.span)
            put16(put + 20, <uint16_t>at)
            put16(put + 22, self._flags)
            put += READ_BYTES
            together.bytes += one.span
        cdef dict in_flight = connection.in_flight
        cdef uint32_t number = register(connection, in_flight, together, deadline_s, together.bytes, method_key, now_s)
        put_head(begin, REQUEST, method_of_reads, number, left_ms, <uint32_t>length, 0, crc_of(begin + HEADER_BYTES, length))
        self._counters["messages"] += 1
        self._counters["reads"] += count
        lane.in_flight += 1
        if self._replicas.several:
            self.hedging.add(together)
        transport = connection.frames.transport
        if not transport.is_closing():
            transport.write(frame)
        return 0

    # -- from a store to the kernel ------------------------------------------------------------------------------------------

    cdef int finish(self, SmallReadBatch together, const char *payload) except -1:
        """Handle bytes that are complete and correct: reply to the kernel, then cache them."""
        cdef PendingSmallRead one
        cdef const char *at = payload
        cdef list asked = together.asked
        cdef double now_s = self.now_s()
        cdef bytes plain
        together.lane.in_flight -= 1
        if together.is_watched:
            self.hedging.came_at(together, now_s)
        for one in asked:
            if one.file.encrypted:
                plain = self.plain(asked, <const uint8_t *>payload, together.bytes)
                payload = at = PyBytes_AS_STRING(plain)
                break
        for one in asked:
            if not one.is_done:
                try:
                    self.send_reply(one, at, now_s)
                except Exception as error:  # a bug: report it to the caller, and answer the others
                    self.broken(one, error)
            at += one.span
        at = payload
        for one in asked:
            try:
                self.keep(one, at)
            except Exception as error:
                self.requests.loop.call_exception_handler({"message": "a small file is not in our books", "exception": error})
            at += one.span
        self._contents_counters["small_reads"] += len(asked)
        return 0

    cdef bytes plain(self, list asked, const uint8_t *payload, Py_ssize_t length):
        """The payload with its encrypted parts decrypted."""
        cdef bytes made = PyBytes_FromStringAndSize(<const char *>payload, length)
        cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(made)
        cdef Py_ssize_t done, count
        cdef PendingSmallRead one
        cdef OpenInode file
        cdef XtsScratch scratch
        for one in asked:
            file, done = one.file, 0
            if file.encrypted:
                scratch = decrypting(self.scratches, file.key)
                while done < one.span >> 12:
                    count = min((one.span >> 12) - done, <Py_ssize_t>BATCH)
                    scratch.turn(at + (done << 12), at + (done << 12), count, file.inode, 0, <uint32_t>done, True)
                    done += count
            at += one.span
        return made

    cdef int send_reply(self, PendingSmallRead one, const char *content, double now_s) except -1:
        cdef int error
        cdef size_t length = one.finish - one.offset
        requests, path = self.requests, self.path
        one.is_done = True
        if one.file.unreported and not self._leases.keeps_bytes(one.file.inode):
            # The shard may not know of the open that this read belongs to; FileData.read handles that.
            path.read_otherwise(one.unique, one.handle, one.offset, one.size)
            return 0
        self.read_bytes += length
        if answer(self._fd, one.unique, content + one.offset, length) < 0:
            error = errno
            if error not in (ENOENT, ENODEV, ECONNABORTED):
                path.answer_refused(one.unique, error, 16 + length)
        del self._work[one.unique]
        if requests.interrupted:
            requests.interrupted.pop(one.unique, None)
        self.count(stopwatch() - one.since_s)
        return 0

    cdef int keep(self, PendingSmallRead one, const char *content) except -1:
        """Cache the bytes and wake other readers; compiled `Reader._whole_came`."""
        cdef OpenInode file = one.file
        cdef object inode
        cdef bint is_wanted = file.fetching is one
        cdef Py_ssize_t begin, end
        cdef bytes whole
        if is_wanted:
            file.fetching = None
        if not one.parts and not is_wanted:
            return 0
        whole = PyBytes_FromStringAndSize(content, one.file_bytes)
        while one.parts:
            part = one.parts.pop(0)
            begin, end = part.offset, part.finish
            part.end(whole if end - begin == len(whole) else memoryview(whole)[begin:end], None)
        # Written, truncated or locked here meanwhile, the file may have newer bytes than these.
        if not is_wanted or file.attr.change != one.change or file.written is not None:
            return 0
        inode, kept = file.inode, self._contents
        if inode in self._kept or <Py_ssize_t>kept.byte_count + <Py_ssize_t>len(whole) + entry_bytes > <Py_ssize_t>kept.bytes_max:
            kept.put(inode, one.change, whole, one.asked_s)
        else:
            self._kept[inode] = one.change, whole, one.asked_s
            kept.byte_count += len(whole) + entry_bytes
        return 0

    cdef int broken(self, PendingSmallRead one, error) except -1:
        one.is_done = True
        entry = self._work.get(one.unique)
        if entry is not None and entry[0] is one:
            self.path.read_ended(one.unique, error)
        return 0

    cdef int count(self, double took_s) except -1:
        """Record a latency, as FuseTimes.add does."""
        times = (<list>self._spent.times)[opcode_of_reads]
        if times is None:
            self._spent.add(opcode_of_reads, max(0.0, took_s))
            return 0
        times.counts[slot_of(took_s)] += 1
        times.sum_s += max(0.0, took_s)
        return 0

    cdef int go_on(self) except -1:
        self.path.some_ended()
        return 0

    def close(self):
        """Send what is collected. Replies that arrive later go to the slow path."""
        self.send()
