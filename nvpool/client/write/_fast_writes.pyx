# cython: language_level=3, boundscheck=False, wraparound=False
"""The first write of a small new file, and its close: bookkeeping, frames and replies in compiled code.

See fast_writes.py for the guarantees and conditions.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

import asyncio
from functools import partial

from google.protobuf.message import DecodeError

from nvpool.core import errors
from nvpool.core.clock import SystemClock
from nvpool.core.errors import CorruptFrame, NotFound, StaleCut, StaleEpoch, Unavailable
from nvpool.core.ids import COUNTER_BITS
from nvpool.shm.mount_state import FILE, WRITE
from nvpool.core.units import BLOCK_BYTES, CHAINS_PER_TABLE
from nvpool.client.rpc.change_fast_path import SubmittedChange
from nvpool.client.rpc.change_fast_path import SentChange as BegunSent
from nvpool.client.data.unstable_writes import Stored
from nvpool.client.write.sender import SizeReport
from nvpool.client.state.dirty_file import DirtyExtent, DirtyFile
from nvpool.rpc.transports._head cimport HEADER_BYTES, REQUEST, put_head
from nvpool.rpc.reply_receivers cimport register
from nvpool.rpc.messages.read_write_codec import decode_write_reply
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX
from nvpool.rpc.transports.stream import GATHER_IN_FLIGHT, StreamConnection
from nvpool.rpc.v1 import meta_pb2
from nvpool.rpc.v1.wire_pb2 import DATA_WRITE, META_REPORT

cdef extern from "_chunk_hash.h":
    uint64_t chunk_hash(uint64_t inode, uint32_t index) nogil

cdef extern from "_clock.h":
    double boottime_s() nogil

cdef extern from "_record_mark.h":
    void put_mark(uint8_t *at, uint64_t mark) nogil

cdef extern from "_fields.h":
    uint8_t *put_number(uint8_t *at, uint8_t tag, uint64_t value) nogil
    uint8_t *put_fixed(uint8_t *at, uint8_t tag, uint64_t value) nogil

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    void put32(uint8_t *at, uint32_t value) nogil
    void put64(uint8_t *at, uint64_t value) nogil

crc_begin(0)

cdef enum:
    GRANT_BYTES = 60
    REPLY_BYTES = 29            # read_write_codec._WRITE_REPLY
    BLOCK_BYTES_MIN = 4096
    BYTES_MAX = 32 << 10        # stream.JOIN_BYTES: a longer frame is not joined
    SUMS_MAX = BYTES_MAX >> 12
    MESSAGE_MAX = 192           # of a write with SUMS_MAX checksums, and of a report
    UNIT_BITS_MAX = 20          # dirty_file._UNIT_BITS_MAX
    ARENA_SMALLEST = 6          # arena._SMALLEST_BITS
    ARENA_PIECE = 20            # arena._PIECE_BITS
    FILE_BYTES = 40             # mount_state.FILE, mount_state.WRITE
    WRITE_BYTES = 48

assert FILE.size == FILE_BYTES and WRITE.size == WRITE_BYTES and BLOCK_BYTES == 4096

cdef object write_method = DATA_WRITE, report_method = META_REPORT
cdef object attr_reply_of = meta_pb2.AttrReply.FromString
cdef object zero = 0
cdef int counter_bits = COUNTER_BITS
cdef uint32_t chains_per_table = CHAINS_PER_TABLE
cdef Py_ssize_t in_flight_max = IN_FLIGHT_MAX, gather_from = GATHER_IN_FLIGHT


# -- bytes -----------------------------------------------------------------------------------------------------------------


cdef Py_ssize_t put_write(uint8_t *at, uint64_t epoch, uint64_t target, const char *grant, uint64_t inode, uint64_t cut,
                          uint64_t sequence, const uint8_t *content, uint32_t length, uint64_t session,
                          uint64_t slot) noexcept nogil:
    """Encode a write at the start of a file, as read_write_codec.encode_write_request; return the length."""
    cdef uint8_t *begin = at
    cdef uint32_t place = 0, count = (length + 4095) >> 12
    at = put_number(put_fixed(at, 0x09, epoch), 0x10, target)
    at[0], at[1] = 0x1A, GRANT_BYTES
    memcpy(at + 2, grant, GRANT_BYTES)
    at += 2 + GRANT_BYTES
    at[0], at[1] = 0x22, 40
    put64(at + 2, inode)
    put64(at + 10, cut)
    put64(at + 18, sequence)
    put32(at + 26, 0)
    put32(at + 30, 0)
    put32(at + 34, length)
    put32(at + 38, 0)
    at += 42
    at[0], at[1] = 0x2A, <uint8_t>(4 * count)
    at += 2
    while place < length:
        put32(at, crc_of(content + place, min(length - place, <uint32_t>4096)))
        place += 4096
        at += 4
    return put_number(put_fixed(at, 0x31, session), 0x38, slot) - begin


cdef Py_ssize_t put_report(uint8_t *at, uint64_t session, uint64_t slot, uint64_t sequence, uint64_t epoch, uint64_t inode,
                           uint64_t cut, uint64_t end, bint wrote, uint64_t blocks) noexcept nogil:
    """Encode a ReportRequest with its fields in rising order; return the length."""
    cdef uint8_t *begin = at
    cdef uint8_t *change = at + 2
    at = put_fixed(put_number(put_number(put_fixed(change, 0x09, session), 0x10, slot), 0x18, sequence), 0x21, epoch)
    begin[0], begin[1] = 0x0A, <uint8_t>(at - change)
    at = put_number(put_number(put_fixed(at, 0x11, inode), 0x18, cut), 0x20, end)
    return put_number(put_number(at, 0x28, wrote), 0x40, blocks) - begin


cdef bytes frame_of(int method, uint32_t number, uint32_t deadline_ms, const uint8_t *message, Py_ssize_t message_bytes,
                    const uint8_t *payload, Py_ssize_t payload_bytes):
    """A REQUEST frame with its payload, as frame.pack_head has it."""
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + message_bytes + payload_bytes)
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(frame)
    put_head(at, REQUEST, method, number, deadline_ms, <uint32_t>message_bytes, <uint32_t>payload_bytes,
             crc_of(message, message_bytes))
    memcpy(at + HEADER_BYTES, message, message_bytes)
    if payload_bytes:
        memcpy(at + HEADER_BYTES + message_bytes, payload, payload_bytes)
    return frame


cdef bint is_stored(message) except -1:
    """Whether the reply to one write reports success, in the form that stores send."""
    cdef const uint8_t *at
    if type(message) is not bytes or PyBytes_GET_SIZE(message) != REPLY_BYTES:
        return False
    at = <const uint8_t *>PyBytes_AS_STRING(message)
    return at[0] == 0x09 and at[9] == 0x12 and at[10] == 16 and not at[11] and not at[12]


# -- a write -----------------------------------------------------------------------------------------------------------------


cdef class SentWrite:
    """As client/data/write_fast_path.SubmittedWrite, for a file's first bytes."""
    cdef readonly object slot, sequence, cut, error
    cdef FastWrites writes
    cdef object written, segment, connection, number, place, index
    cdef object epoch           # of the chain
    cdef bint ended
    cdef bint watched           # by HeadWatch

    def cancel(self):
        """Call the writer with CancelledError now. The store may execute the write all the same."""
        self.fail(asyncio.CancelledError())

    def fail(self, error):
        """As SentToHead.fail."""
        if not self.ended:
            self.connection.give_up(self.number)
            self.end(error)

    def stored(self):
        """The unstable write to commit. Must be called once, after the write has succeeded."""
        return self.writes.chunks.was_written(self.written.file, 0, self.epoch, self.cut)

    def __call__(self, reply, error):
        if self.ended:
            return
        if error is None and not is_stored(reply.message):
            try:
                results = decode_write_reply(reply.message)
            except CorruptFrame as corrupt:
                error = corrupt
            else:
                status = results[0] | results[1] << 8 if len(results) == 16 else -1
                if status:
                    error = CorruptFrame("a store's answer to a write does not fit the question") if status < 0 \
                        else errors.BY_WIRE_CODE.get(status, Unavailable)()
        self.end(error)

    cdef int end(self, error) except -1:
        self.ended = True
        self.error = error
        if self.watched:
            self.writes.chunks.heads.remove(self)
        if error is not None or not self.writes.was_stored(self):
            self.writes.writer.was_sent(self.written, 0, self.segment, self, error)
        if error is None or isinstance(error, asyncio.CancelledError):
            chunks = self.writes.chunks
            (<list>chunks.slots).append(self.slot)  # as ChunkClient.leave
            if chunks.slot_waiters:
                chunks.wake_slot_waiter()
        return 0


# -- a close -----------------------------------------------------------------------------------------------------------------


cdef class Closing:
    """As `CloseFlush`, with its report as `SubmittedChange`."""
    cdef public object on_end
    cdef FastWrites writes
    cdef object written, number, otherwise
    cdef uint64_t reported_end, reported_stored
    cdef object reported_cut
    cdef bint reported_wrote
    cdef object begun           # the report after it was passed to the slow path
    cdef object task
    cdef bint ended
    cdef bint asked             # the report is in flight
    cdef object connection, request, state, session, slot, sequence, generation, epoch
    cdef double deadline_s

    @property
    def submitted_report(self):
        """The report in flight."""
        return self if self.asked else self.begun

    def look(self):
        """Check for completion; called when an extent has ended."""
        self.look_now()

    cdef int look_now(self) except -1:
        written = self.written
        if written.sending or written.dirty:
            for segment in written.segments():
                if segment.number <= self.number:
                    return 0
        written.flushing = None
        if not self.report():
            self.do_otherwise()
        return 0

    cpdef bint report(self) except -1:
        """Submit the report; return whether it was submitted. False: there was no side effect."""
        written, writer = self.written, self.writes.writer
        reporting = written.reporting
        if (written.error is not None or written.paused or not (written.wrote or written.stored_end) or reporting.taken
                or written.appended is not None and written.is_broken):
            return False
        reporting.taken = True
        self.reported_end, self.reported_stored = written.stored_end, written.stored_bytes
        self.reported_wrote, self.reported_cut = written.wrote, written.file.cut
        written.wrote = False
        written.stored_bytes = zero
        if self.submit_report():
            return True
        self.begun = writer.begin_report(written.file, self.reported_end, self.reported_stored, self.reported_wrote,
                                          self.reported)
        if self.begun is None:
            written.wrote, written.stored_bytes = self.reported_wrote, self.reported_stored
            reporting.release()
            return False
        return True

    cdef bint submit_report(self) except -1:
        """As MetaClient.begin for the report; return False if it cannot be submitted immediately."""
        cdef uint8_t message[MESSAGE_MAX]
        cdef Py_ssize_t message_bytes
        cdef double now_s
        meta, file = self.writes.meta, self.written.file
        pool_map = meta.view.map
        cdef uint64_t inode = file.inode
        state = (<dict>meta.shards).get((<tuple>pool_map.shard_of_partition)[inode >> counter_bits])
        if state is None or file.lost or not state.session or not state.slots or state.waiting or meta.closed:
            return False
        shard = (<dict>pool_map.shard_by_id).get(state.shard)
        if shard is None:
            return False
        connection = (<dict>self.writes.dialer.by_endpoints).get(shard.endpoints)
        if connection is None or connection.closed or connection is not state.met:
            return False
        (<dict>meta.counters)["changes"] += 1
        self.slot, sequence = state.slots.popleft()
        self.sequence = sequence + 1
        self.state, self.session, self.generation = state, state.session, state.generation
        self.epoch, self.connection = pool_map.epoch, connection
        now_s = self.writes.now_s()
        self.deadline_s = now_s + self.writes.meta_patience_s
        message_bytes = put_report(message, self.session, self.slot, self.sequence, self.epoch, inode, self.reported_cut,
                                   self.reported_end, self.reported_wrote, (self.reported_stored + 511) // 512)
        self.asked = True
        self.request = self.writes.submit(connection, report_method, message, message_bytes, NULL, 0, self.deadline_s, now_s,
                                          self)
        return True

    def __call__(self, reply, error):
        """Handle the service's reply to the report."""
        if not self.asked:
            return
        answer = None
        if error is None:
            message = reply.message
            try:
                answer = attr_reply_of(message if type(message) is bytes else bytes(message))
            except DecodeError:
                pass
        if answer is None:
            self.go_on().answered(reply, error)
            return
        self.asked = False
        state = self.state
        file = self.written.file
        try:
            self.was_reported()
            self.writes.reports.reported(file, self.reported_wrote, answer)
        finally:
            if state.generation == self.generation:
                state.slots.append((self.slot, self.sequence))
                if state.waiting:
                    state.wake()

    cdef object go_on(self):
        """Convert the report into a `SubmittedChange` request, which continues on the slow path."""
        reports, file, state = self.writes.reports, self.written.file, self.state
        request = reports.report_request(file, self.reported_cut, self.reported_end, self.reported_stored, self.reported_wrote)
        change = request.change
        # the session in which it was sent: there may be a newer one by now, which must not be refused for it
        change.session, change.slot, change.sequence, change.map_epoch = self.session, self.slot, self.sequence, self.epoch
        on_end = partial(reports.begun_reported, file, self.reported_wrote, self.reported)
        begun = SubmittedChange(self.writes.meta, on_end, file.inode, report_method, request, meta_pb2.AttrReply, file, 0, state,
                      self.slot, self.sequence, self.deadline_s)
        begun.was_sent(BegunSent(b"", 0.0, self.deadline_s, self.connection, self.request, state, self.slot, self.sequence,
                                 self.generation))
        self.begun = begun
        self.asked = False
        return begun

    cdef int was_reported(self) except -1:
        """Handle the success of the report."""
        written, writer = self.written, self.writes.writer
        self.begun = None
        self.end(writer.take_error(written) if written.error is not None else None)
        cdef uint64_t stored_end = written.stored_end
        if stored_end <= self.reported_end and written.error is None and not written.sending and not written.dirty:
            written.stored_end = written.end = zero
            if written.entry >= 0:
                self.writes.note(written)
        else:
            writer.report_succeeded(written, self.size_report())
        reporting = written.reporting
        if reporting.waiting:
            reporting.release()
        else:
            reporting.taken = False
        return 0

    cdef object size_report(self):
        return SizeReport(self.reported_end, self.reported_stored, self.reported_wrote, self.reported_cut)

    def reported(self, _, error):
        if error is None:
            self.was_reported()
            return
        written = self.written
        self.begun = None
        self.writes.writer.report_failed(written, self.size_report(), error)
        written.reporting.release()
        if isinstance(error, (StaleCut, NotFound)):
            self.do_otherwise()
        else:
            self.end(error)

    cdef int do_otherwise(self) except -1:
        self.task = asyncio.get_running_loop().create_task(self.otherwise())
        self.task.add_done_callback(self.was_done_otherwise)
        return 0

    def was_done_otherwise(self, task):
        self.end(asyncio.CancelledError() if task.cancelled() else task.exception())

    def cancel(self):
        """As CloseFlush.cancel."""
        if self.ended:
            return False
        if self.task is not None:
            return self.task.cancel()
        if self.asked:
            self.go_on()
        if self.begun is not None:
            return self.begun.cancel()
        self.written.flushing = None
        self.end(asyncio.CancelledError())
        return True

    cdef int end(self, error) except -1:
        self.ended = True
        self.on_end(None, error)
        return 0


# -- shared parts ------------------------------------------------------------------------------------------------------


cdef class FastWrites:
    """The fast writes and closes of one client with mount state."""
    cdef object writer, reader, reports, meta, chunks, dialer, keeping, memory, arena, pieces, files, clock, contents
    cdef dict open_files
    cdef set begun
    cdef bint is_system
    cdef double patience_s, meta_patience_s
    cdef uint64_t held_max, flight_max
    cdef Py_buffer kept
    cdef uint8_t *base
    cdef Py_ssize_t payloads_at, files_at, pieces_at

    def __init__(self, parts):
        writer = self.writer = parts.writer
        self.reader, self.reports = parts.reader, parts.reports
        self.meta, self.chunks, self.dialer = parts.meta, parts.chunks, parts.chunks.dialer
        self.keeping, self.memory = writer.keeping, writer.keeping.memory
        self.arena, self.pieces, self.files = self.memory.arena, self.memory.writes, self.memory.files
        self.clock, self.is_system = parts.clock, type(parts.clock) is SystemClock
        self.open_files, self.begun = writer.files, writer.begun
        self.patience_s, self.held_max = parts.options.deadline_s, parts.options.write_buffer_bytes
        self.flight_max, self.contents = parts.options.write_flight_bytes, parts.reader.contents.kept
        self.meta_patience_s = parts.options.deadline_s
        PyObject_GetBuffer(self.memory.mapping, &self.kept, PyBUF_WRITABLE)
        self.base = <uint8_t *>self.kept.buf
        self.payloads_at = self.kept.len - len(self.memory.payloads)
        self.files_at, self.pieces_at = self.files.place, self.pieces.place

    def __dealloc__(self):
        if self.base is not NULL:
            PyBuffer_Release(&self.kept)

    cdef double now_s(self) except -1:
        return boottime_s() if self.is_system else self.clock.boottime_s()

    cdef object submit(self, connection, object method, const uint8_t *message, Py_ssize_t message_bytes,
                       const uint8_t *payload, Py_ssize_t payload_bytes, double deadline_s, double now_s, on_done):
        """As Connection.submit."""
        cdef dict in_flight
        cdef double left_ms = (deadline_s - now_s) * 1000
        cdef bytes frame
        cdef bint gather
        if not isinstance(connection, StreamConnection) or connection.upgraded or connection.closed or left_ms < 1 \
                or not connection.writable or connection.waiting or len(<dict>connection.in_flight) >= in_flight_max:
            # a copy: the memory of the mount state may be reused before the bytes are sent
            parts = (PyBytes_FromStringAndSize(<const char *>payload, payload_bytes),) if payload_bytes else ()
            return connection.submit(method, PyBytes_FromStringAndSize(<const char *>message, message_bytes), parts,
                                     deadline_s=deadline_s, on_done=on_done)
        in_flight = connection.in_flight
        key = register(connection, in_flight, on_done, deadline_s, zero, method, now_s)
        frame = frame_of(method, key, <uint32_t>min(left_ms, <double>0xFFFFFFFF), message, message_bytes, payload, payload_bytes)
        gather = len(in_flight) >= gather_from
        if gather or connection.frames.reading or connection.frames.out:
            connection.frames.send(frame, (), 0, gather)
        else:
            self.send(connection, frame)
        return key

    cdef int send(self, connection, bytes frame) except -1:
        transport = connection.frames.transport
        if not transport.is_closing():
            transport.write(frame)
        return 0

    cdef int note(self, written) except -1:
        """As CrashJournal.note, for a file without an unreported error."""
        file, met = written.file, written.met
        cdef uint8_t *at = self.base + self.files_at + <Py_ssize_t>written.entry * FILE_BYTES
        put64(at, written.stored_up_to if written.ahead else written.stored_end)
        put64(at + 8, written.stored_bytes)
        put64(at + 16, file.cut)
        put64(at + 24, 0 if met is None else <uint64_t><uint32_t>met.errno << 32)
        put_mark(at + 32, file.inode)
        return 0

    def flush(self, written, number, on_end, otherwise):
        """As CloseFlush(writer, ...)."""
        cdef Closing closing = Closing.__new__(Closing)
        closing.writes, closing.written, closing.number = self, written, number
        closing.on_end, closing.otherwise = on_end, otherwise
        return closing

    def take(self, handle, offset, buffer, unique):
        """As FileData.write_now: accept and send the write; return whether it was accepted.

        False: no side effect.
        """
        cdef Py_buffer view
        if offset or not handle.writable or handle.append or handle.closed:
            return False
        file = handle.file
        if file.written is not None or file.lost or file.volume or file.attr.size or not file.grant_session:
            return False
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            return self.begin(file, <const uint8_t *>view.buf, view.len, unique)
        finally:
            PyBuffer_Release(&view)

    def take_at(self, handle, bytearray buffer, Py_ssize_t at, Py_ssize_t length, uint64_t unique):
        """As `take`, for `length` bytes at `at` in `buffer`, which are written to the start of the file."""
        if at < 0 or length < 0 or at + length > PyByteArray_GET_SIZE(buffer):
            raise ValueError("what is written lies outside of its buffer")
        if not handle.writable or handle.append or handle.closed:
            return False
        file = handle.file
        if file.written is not None or file.lost or file.volume or file.attr.size or not file.grant_session:
            return False
        return self.begin(file, <const uint8_t *>PyByteArray_AS_STRING(buffer) + at, length, unique)

    cdef bint begin(self, file, const uint8_t *content, Py_ssize_t length, uint64_t unique) except -1:
        cdef uint8_t message[MESSAGE_MAX]
        cdef Py_ssize_t message_bytes
        cdef uint8_t *at
        cdef uint64_t inode, held, in_flight, place, kept_number
        cdef uint32_t number
        cdef int unit_bits, kind
        cdef double now_s
        cdef list slots, free
        cdef bytes grant
        cdef SentWrite sent
        # All conditions are checked before any side effect.
        writer, chunks, pieces, arena = self.writer, self.chunks, self.pieces, self.arena
        unit_bits = min(<int>file.chunk_bits, <int>UNIT_BITS_MAX)
        if length < BLOCK_BYTES_MIN or length > BYTES_MAX or length > 1 << unit_bits or writer.stalled:
            return False
        held, in_flight = writer.held, writer.in_flight
        if held and held + length > self.held_max or in_flight and in_flight + length > self.flight_max:
            return False
        if len(<list>arena.fresh) < 2 or len(pieces.freed) + <Py_ssize_t>pieces.count - <Py_ssize_t>pieces.used <= 2:
            return False
        slots = chunks.slots
        if not slots or chunks.slot_waiters:
            return False
        pool_map = chunks.view.map
        table_id = file.layout.table
        table = (<dict>pool_map.table_by_id).get(table_id)
        if table is None:
            return False
        inode = file.inode
        number = chunk_hash(inode, 0) % chains_per_table
        chain = table.chains[number]
        targets = chain.targets
        lane = (<dict>chunks.lanes).get(targets[0])
        if lane is None:
            try:
                lane = chunks.lane(targets[0])
            except StaleEpoch:
                return False
        connection = (<dict>self.dialer.by_endpoints).get(lane.endpoints)
        if connection is None or connection.closed:
            return False
        grant = file.grant
        if PyBytes_GET_SIZE(grant) != GRANT_BYTES:
            return False
        # From here on the write is accepted.
        written = DirtyFile(file)
        written.entry = self.files.take()
        self.note(written)
        file.written = written
        self.open_files[file.inode] = written
        now_s = self.now_s()
        written.wrote = written.begun = True
        written.wrote_s = now_s
        written.end = written.held = size = length
        # Journal the piece: its bytes first, then the marks that make them valid.
        keeping = self.keeping
        kept_number = keeping.last_number + 1
        keeping.last_number = kept_number
        kind = 0
        while length > 1 << kind + ARENA_SMALLEST:
            kind += 1
        free = arena.free[kind]
        if free:
            place_key = free.pop()
            place = place_key
            (<list>arena.used)[place >> ARENA_PIECE] += 1
            arena.taken += 1
        else:
            place = place_key = arena.take(size)
        memcpy(self.base + self.payloads_at + place, content, length)
        index = pieces.take()
        at = self.base + self.pieces_at + <Py_ssize_t>index * WRITE_BYTES
        put_mark(at + 24, 0)
        put64(at, inode)
        put64(at + 8, 0)
        put64(at + 16, place)
        put32(at + 32, <uint32_t>length)
        put32(at + 36, <uint32_t>length << 1 | 1)
        put_mark(at + 40, kept_number)
        put_mark(at + 24, unique)       # after the other mark: see KeptMemory.keep_write
        view = self.memory.payloads[place_key:place_key + size]
        # Bookkeeping.
        writer.held += size
        writer.in_flight += size
        segment_number = writer.last_number + 1
        writer.last_number = segment_number
        segment = DirtyExtent(zero, size, [view], segment_number, now_s)
        segment.due = True
        segment.records.append((kept_number, index))
        written.sending = {zero: [segment]}
        file.fetching = None
        if file.ahead or file.inode in self.contents:
            self.reader.changed(file)
        # Send the write to the store.
        (<dict>chunks.counters)["writes"] += 1
        sequence = chunks.sequence + 1
        chunks.sequence = sequence
        file.grant_used = True
        sent = SentWrite.__new__(SentWrite)
        sent.slot, sent.sequence, sent.cut = slots.pop(), sequence, file.cut
        sent.writes, sent.written, sent.segment, sent.connection = self, written, segment, connection
        sent.epoch, sent.place, sent.index = chain.epoch, (table_id, number), index
        self.begun.add(sent)
        message_bytes = put_write(message, chunks.epoch, lane.target, PyBytes_AS_STRING(grant), inode, sent.cut, sequence,
                                  content, <uint32_t>length, file.grant_session, sent.slot)
        sent.number = self.submit(connection, write_method, message, message_bytes, content, length, now_s + self.patience_s,
                             now_s, sent)
        if len(targets) > 1 or chain.joining:   # see is_alone
            sent.watched = True
            chunks.heads.add(sent, file, zero, lane.target)
        return True

    cdef bint was_stored(self, SentWrite sent) except -1:
        """Record that a store has the write; False, without a side effect, if the file has more to do."""
        cdef uint64_t end, place
        cdef uint8_t *at
        writer, written, segment = self.writer, sent.written, sent.segment
        file = written.file
        cdef dict sending = written.sending
        if (file.lost or written.dirty or written.ahead or written.error is not None or written.changed is not None
                or written.paused or writer.stalled or writer.room_waiters or written.entry < 0 or len(sending) != 1
                or file.truncated > sent.cut):
            return False
        of_unit = sending.get(zero)
        if of_unit is None or len(<list>of_unit) != 1 or (<list>of_unit)[0] is not segment or len(<list>segment.records) != 1:
            return False
        self.begun.discard(sent)
        size = segment.end
        end = max(<uint64_t>written.stored_end, <uint64_t>size)
        written.stored_end = end
        written.stored_bytes += size
        written.wrote = True
        self.note(written)
        writer.in_flight -= size
        sending.clear()
        flush = written.flushing
        if flush is not None:  # first, so the service works on the report while we continue
            if type(flush) is Closing:
                (<Closing>flush).look_now()
            else:
                flush.look()
        # before the pieces are dropped: a successor process must know that the bytes are unstable
        if file.located:
            self.chunks.short.forget_chunk(file, 0)
        else:
            file.changes += 1
        writer.unstable.note_at(file.inode, sent.place, sent.epoch)
        (<list>segment.records).clear()
        index = sent.index
        at = self.base + self.pieces_at + <Py_ssize_t>index * WRITE_BYTES
        place = (<uint64_t *>(at + 16))[0]
        put_mark(at + 40, 0)
        self.pieces.freed.append(index)
        self.arena.give_back(place)
        written.held -= size
        writer.held -= size
        return True


# -- for tests: the encoders above on their own ------------------------------------------------------------------------


def chain(uint64_t inode):
    return chunk_hash(inode, 0) % chains_per_table


def write_message(uint64_t epoch, uint64_t target, bytes grant, uint64_t inode, uint64_t cut, uint64_t sequence, bytes content,
                  uint64_t session, uint64_t slot):
    cdef uint8_t message[MESSAGE_MAX]
    if len(grant) != GRANT_BYTES or not BLOCK_BYTES_MIN <= len(content) <= BYTES_MAX:
        raise ValueError("this write takes the slow path")
    cdef Py_ssize_t count = put_write(message, epoch, target, PyBytes_AS_STRING(grant), inode, cut, sequence,
                                      <const uint8_t *>PyBytes_AS_STRING(content), <uint32_t>len(content), session, slot)
    return PyBytes_FromStringAndSize(<const char *>message, count)


def report_message(uint64_t session, uint64_t slot, uint64_t sequence, uint64_t epoch, uint64_t inode, uint64_t cut,
                   uint64_t end, bint wrote, uint64_t blocks):
    cdef uint8_t message[MESSAGE_MAX]
    cdef Py_ssize_t count = put_report(message, session, slot, sequence, epoch, inode, cut, end, wrote, blocks)
    return PyBytes_FromStringAndSize(<const char *>message, count)
