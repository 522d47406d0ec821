# cython: language_level=3, boundscheck=False, wraparound=False
"""Compiled fast path for reads, from frame to frame without Python code in between.

`fast_reads.py` has the reference implementation and describes the guarantees.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from cpython cimport array
import array
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

import asyncio

from nvpool.core.clock import SystemClock
from nvpool.core.grants import CLOCK_SKEW_S, READ, SERVICE
from nvpool.blockio._uring cimport Ring
from nvpool.blockio.uring_reader import AGAIN_S
from nvpool.rpc.transports._head cimport HEADER_BYTES, REPLY, REQUEST, is_head, put_head
from nvpool.rpc.messages.read_write_codec import CLIENT_CACHES
from nvpool.rpc.multiplexer import IN_FLIGHT_MAX
from nvpool.rpc.transports.frame import EMPTY
from nvpool.rpc.v1.wire_pb2 import DATA_PEER_WRITE, DATA_READ, DATA_WRITE

cdef extern from "_clock.h":
    int slot_of(double took_s) nogil
    double boottime_s() nogil
    long long wall_ns() nogil

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    uint16_t get16(const uint8_t *at) nogil
    uint32_t get32(const uint8_t *at) nogil
    uint64_t get64(const uint8_t *at) nogil
    void put32(uint8_t *at, uint32_t value) nogil
    void put64(uint8_t *at, uint64_t value) nogil

cdef extern from *:
    """
    #include <stdint.h>
    #include <sys/mman.h>
    #define NVPOOL_HUGE ((size_t)2 << 20)

    /* 2 MiB of memory as one page, where the kernel has one; NULL where there is none. */
    static uint8_t *huge_page(void)
    {
        uint8_t *all = mmap(NULL, 2 * NVPOOL_HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *from;
        if (all == MAP_FAILED)
            return NULL;
        from = (uint8_t *)(((uintptr_t)all + NVPOOL_HUGE - 1) & ~(uintptr_t)(NVPOOL_HUGE - 1));
        if (from > all)
            munmap(all, from - all);
        munmap(from + NVPOOL_HUGE, all + NVPOOL_HUGE - from);
        madvise(from, NVPOOL_HUGE, MADV_HUGEPAGE);
        return from;
    }
    """
    uint8_t *huge_page() nogil

cdef extern from "_page_cache.h":
    ssize_t read_cached(int fd, void *into, size_t length, uint64_t offset) nogil
    uint64_t pages_in_memory(int fd, uint64_t offset, uint64_t length) nogil

crc_begin(0)

cdef enum:
    REQUEST_BYTES = 99  # read_write_codec._READ_REQUEST
    FRAME_BYTES = HEADER_BYTES + REQUEST_BYTES
    BLOCKS_MAX = 8  # largest read that is only answered immediately
    LARGE_BLOCKS_MAX = 32  # with a connection end that can answer later
    PAGE = 4096
    OUT_BYTES_MAX = 256 << 10   # stream_transport.GATHER_BYTES
    RING_ENTRIES = 512
    REAP_MAX = 8  # answers that are sent before the next completions are taken
    ROOM_BYTES = PAGE + (LARGE_BLOCKS_MAX << 12)
    HUGE_ROOMS = 15  # in 2 MiB
    ROOMS_MAX = 4 * HUGE_ROOMS

cdef uint64_t skew_ms = int(CLOCK_SKEW_S * 1000)
cdef long may_read = READ, serves_all = SERVICE
cdef uint16_t method_of_reads = DATA_READ, method_of_writes = DATA_WRITE, method_of_peer_writes = DATA_PEER_WRITE
cdef Py_ssize_t in_flight_max = IN_FLIGHT_MAX
cdef object method_key = DATA_READ
cdef uint8_t client_caches = CLIENT_CACHES


cdef uint8_t *rooms[ROOMS_MAX]
cdef Py_ssize_t rooms_free = 0, rooms_made = 0


cdef class LargeReply:
    """Reply frame with many blocks, which begin at a page border, in reused memory.

    The memory is reused when nothing refers to the frame any more. If each answer took its pages from the
    heap and gave them back, this would cost a seventh of the store's time. Within one huge page the kernel
    also has fewer pages to look up for the drive.
    """
    cdef uint8_t *room
    cdef uint8_t *frame
    cdef Py_ssize_t length

    def __len__(self):
        return self.length

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.frame, self.length, 1, flags)

    def __dealloc__(self):
        global rooms_free
        if self.room is not NULL:
            rooms[rooms_free] = self.room
            rooms_free += 1


cdef LargeReply large_answer(Py_ssize_t before, Py_ssize_t length):
    """Allocate a frame with `before` bytes of head and message and `length` bytes of blocks.

    Returns None if too many frames are in use.
    """
    global rooms_free, rooms_made
    cdef uint8_t *more
    cdef LargeReply made
    if not rooms_free:
        more = huge_page() if rooms_made < ROOMS_MAX else NULL
        if more is NULL:
            return None
        while rooms_free < HUGE_ROOMS:
            rooms[rooms_free] = more + rooms_free * ROOM_BYTES
            rooms_free += 1
        rooms_made += rooms_free
    made = LargeReply.__new__(LargeReply)
    rooms_free -= 1
    made.room, made.frame, made.length = rooms[rooms_free], rooms[rooms_free] + PAGE - before, before + length
    return made


cdef class ColdRead:
    """Read that waits for the drive, in place of an InboundCall in its connection's table.

    The object keeps the memory that the kernel writes to, even if the client has gone by then. `reply` is the
    frame that is sent when the blocks are in it.
    """

    cdef readonly object side
    cdef readonly bint cancelled
    cdef readonly int byte_count
    cdef readonly double since_s
    cdef object reply  # bytes or a LargeReply
    cdef object reading
    cdef uint64_t epoch
    cdef uint32_t number, deadline_ms, length
    cdef bint is_direct  # uses a descriptor that bypasses the page cache
    cdef Py_ssize_t start  # start of the frame within `reply`, if the blocks are aligned to a page
    cdef uint8_t[REQUEST_BYTES] message

    @property
    def method(self):
        return method_key

    def cancel(self):
        """Cancel: the client has gone or no longer wants the read; its connection has dropped it."""
        self.cancelled = True


cdef class FastReads:
    """Compiled version of fast_reads.PlainReads."""

    cdef public uint64_t epoch
    cdef public bint open
    cdef public object writes  # fast path for writes, _fast_first_writes.FastFirstWrites, or None
    cdef uint8_t _target
    cdef int _fd
    cdef bint _is_system
    cdef object _direct_reads, _clock, _store, _index, _quarantine, _reader, _serving_lease, _use
    cdef dict _grants, _pending
    cdef Ring _ring
    cdef object _loop, _readings
    cdef Py_ssize_t _inside, _prepared
    cdef bint _is_sent_again, _has_ring, _is_cold
    cdef dict _waits  # ColdRead -> None: reads still to be answered

    def __init__(self, target, grants, store, pending, serving_lease, use, clock):
        self.epoch = 0
        self.open = True
        self._target = target
        self._grants, self._pending = grants, pending
        self._store, self._index, self._quarantine, self._reader = store, store.index, store.quarantine, store.reader
        self._serving_lease, self._use, self._clock = serving_lease, use, clock
        self._fd = store.device.fd
        self._is_system = type(clock) is SystemClock
        self._readings = store.readings
        self._direct_reads = store.device.direct_reads
        self._has_ring = store.device.read_path == "io_uring"
        self._waits = {}

    @property
    def waiting(self):
        """Reads that the drive has not completed, and writes that wait for other members of their chains."""
        return self._inside if self.writes is None else self._inside + self.writes.waiting

    cdef double _now_s(self) except -1:
        return boottime_s() if self._is_system else self._clock.boottime_s()

    cdef long long _now_ms(self) except -1:
        return wall_ns() // 1_000_000 if self._is_system else self._clock.wall_ns() // 1_000_000

    def answer(self, bytearray buffer, Py_ssize_t end, dict in_work, reply_stats, list out, side=None):
        """Like PlainReads.answer.

        With `side`, blocks that are not in memory are read from the drive and answered there.
        """
        if end > PyByteArray_GET_SIZE(buffer):
            raise ValueError("frames lie outside of their buffer")
        cdef Py_ssize_t at = 0, total = 0, length, count
        cdef uint16_t method
        cdef const uint8_t *frame
        cdef object found
        cdef double since_s
        if (not self.open or not self.epoch or end < FRAME_BYTES or len(in_work) >= in_flight_max
                or self._store.fenced_because or self._store.closed or not self._serving_lease.vouched or self._use.on):
            return 0
        while end - at >= FRAME_BYTES and total < OUT_BYTES_MAX:
            frame = <const uint8_t *>PyByteArray_AS_STRING(buffer) + at
            method = get16(frame + 4)
            if self.writes is not None and (method == method_of_writes or method == method_of_peer_writes):
                count = len(out)
                length = self.writes.answer(buffer, at, end, self.epoch, in_work, reply_stats, out, side)
                if not length:
                    break
                at += length
                if len(out) > count:  # otherwise it is answered later
                    total += PyBytes_GET_SIZE(<bytes?>out[count])
                continue
            since_s = self._now_s()
            found = self._reply(frame, in_work, side)
            if found is None:
                break
            at += FRAME_BYTES
            reply_stats.begun += 1
            if type(found) is ColdRead:
                (<ColdRead>found).since_s = since_s
                continue
            if type(found) is LargeReply:
                length = get32((<LargeReply>found).frame + 20)
                out.append(memoryview(found))
                total += (<LargeReply>found).length
            else:
                length = get32(<const uint8_t *>PyBytes_AS_STRING(found) + 20)
                out.append(found)
                total += PyBytes_GET_SIZE(found)
            self._count(reply_stats, length, self._now_s() - since_s)
        if self._prepared:
            self.submit()
        return at

    cdef int _count(self, reply_stats, Py_ssize_t length, double took_s) except -1:
        cdef object times, counts, method_stats = reply_stats.by_method.get(method_key)
        self._reader.read_count += 1
        self._reader.read_bytes += length
        if method_stats is None:
            reply_stats.answered(method_key, took_s, 0, 0, length)
            return 0
        reply_stats.ended += 1
        times = method_stats.times
        counts = times.counts
        counts[slot_of(took_s)] += 1
        times.sum_s += took_s
        method_stats.bytes_out += length
        return 0

    cdef object _reply(self, const uint8_t *at, dict in_work, side):
        """Try to answer one read request.

        Returns the reply frame, a ColdRead if the drive is reading the blocks, or None for the slow path.
        """
        cdef const uint8_t *message = at + HEADER_BYTES
        cdef const uint8_t *entry = message + 75
        cdef PyObject *found
        cdef bytes crcs
        cdef array.array disk
        cdef LargeReply large = None
        cdef object reply
        cdef object grant, chunk, segment, name
        cdef list segments
        # The head: a read request without a payload, with a message as long as that of one read with one
        # grant.
        if (get16(at + 4) != method_of_reads or get32(at + 16) != REQUEST_BYTES or get32(at + 20) or not get32(at + 12)
                or not is_head(at, REQUEST) or crc_of(message, REQUEST_BYTES) != get32(at + 24)):
            return None
        cdef uint32_t number = get32(at + 8)
        if in_work and number in in_work:
            return None
        # The message has the layout of read_write_codec.encode_read_request, with one read.
        if (message[0] != 0x09 or get64(message + 1) != self.epoch or message[9] != 0x10 or message[10] != self._target
                or message[11] != 0x1A or message[12] != 60 or message[73] != 0x22 or message[74] != 24):
            return None
        cdef uint64_t inode = get64(entry), version
        cdef uint32_t index = get32(entry + 8), offset = get32(entry + 12), length = get32(entry + 16)
        if ((offset | length) & 4095 or not length or length > (BLOCKS_MAX if side is None else LARGE_BLOCKS_MAX) << 12
                or entry[20] or entry[21]):
            return None
        found = PyDict_GetItem(self._grants, PyBytes_FromStringAndSize(<const char *>message + 13, 60))
        if found is NULL:
            return None
        grant = <object>found
        cdef long rights = grant.rights
        if not rights & may_read or rights & serves_all or <uint64_t>grant.inode != inode:
            return None
        cdef uint64_t ends_ms = grant.ends_ms, now_ms = self._now_ms()
        if now_ms > skew_ms and ends_ms < now_ms - skew_ms:
            return None
        name = (inode, index)
        if self._pending and name in self._pending:
            return None
        bad = self._quarantine.chunks
        if bad and name in bad:
            return None
        found = PyDict_GetItem(<dict?>self._index.young, name)
        if found is NULL:
            return None
        chunk = <object>found
        cdef Py_ssize_t block = offset >> 12, count = length >> 12
        cdef Py_ssize_t within = block & 63
        segments = chunk.segments
        if block >> 6 >= len(segments):
            return None
        segment = segments[block >> 6]
        if segment is None:
            return None
        disk = segment.disk
        crcs = segment.crcs
        if within + count > len(disk) or (within + count) * 4 > PyBytes_GET_SIZE(crcs) or disk.ob_descr.itemsize != 8:
            return None
        cdef uint64_t place = disk.data.as_ulonglongs[within]
        if not place or count > 1 and not segment.base:  # a hole; or blocks in more than one run
            return None
        version = chunk.version
        # The answer: head, message with the layout of read_write_codec.encode_read_reply, blocks.
        cdef int wide = count >= 32  # the length of its checksums takes two bytes
        cdef Py_ssize_t message_bytes = 29 + wide + count * 4, before = HEADER_BYTES + message_bytes, start = 0
        cdef int fd = -1
        if count > BLOCKS_MAX and entry[22] & client_caches and self._has_ring and self._inside < RING_ENTRIES:
            fd = self._direct_reads.descriptor_for(place << 12, length)
        cdef uint8_t *to
        if count > BLOCKS_MAX:
            large = large_answer(before, length)
        if large is not None:
            reply, to = large, large.frame
        else:
            reply = PyBytes_FromStringAndSize(NULL, before + length + (PAGE if fd >= 0 else 0))
            to = <uint8_t *>PyBytes_AS_STRING(reply)
            if fd >= 0:
                start = PAGE - 1 - (<size_t>to + before + PAGE - 1) % PAGE
                to += start
        cdef uint8_t *said = to + HEADER_BYTES
        # A trial read makes the drive start each read by itself. After a trial that missed the page cache,
        # the ring submits all reads together.
        cdef bint is_cold = fd >= 0 or (self._is_cold and side is not None and self._has_ring
                                        and pages_in_memory(self._fd, place << 12, length) < <uint64_t>count)
        if not is_cold:
            is_cold = read_cached(self._fd, said + message_bytes, length, <long long>(place << 12)) != <ssize_t>length
        self._is_cold = is_cold
        if is_cold and (side is None or self._inside >= RING_ENTRIES or not self._has_ring or not self._opened()):
            return None
        if not is_cold and self._serving_lease.shared and not self._serving_lease.holds():
            return None
        said[0] = 0x09
        put64(said + 1, self.epoch)
        said[9], said[10] = 0x12, 16
        said[11], said[12], said[13], said[14] = 0, 0, 1, 0  # no error; not checked here
        put32(said + 15, length)
        put64(said + 19, version)
        said[27] = 0x1A
        if wide:
            said[28], said[29] = count * 4 & 127 | 128, count * 4 >> 7
        else:
            said[28] = count * 4
        memcpy(said + 29 + wide, PyBytes_AS_STRING(crcs) + within * 4, count * 4)
        put_head(to, REPLY, 0, number, 0, message_bytes, length, crc_of(said, message_bytes))
        if not is_cold:
            return reply
        return self._begin(at, in_work, side, reply, start, to + before, fd if fd >= 0 else self._fd, place, length)

    # -- reads from the drive ----------------------------------------------------------------------------------------------

    cdef bint _opened(self) except -1:
        """Whether there is a ring whose completions the event loop watches."""
        if self._ring is None:
            try:
                self._ring = Ring(RING_ENTRIES)
            except OSError:  # nor later
                self._has_ring = False
                return False
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._ring.fileno, self.reap)
        return True

    cdef ColdRead _begin(self, const uint8_t *at, dict in_work, side, reply, Py_ssize_t start, uint8_t *into, int fd,
                     uint64_t place, uint32_t length):
        cdef ColdRead one = ColdRead.__new__(ColdRead)
        cdef uint32_t number = get32(at + 8)
        one.side, one.reply, one.length, one.epoch = side, reply, length, self.epoch
        one.number, one.deadline_ms, one.start = number, get32(at + 12), start
        one.is_direct = fd != self._fd
        memcpy(one.message, at + HEADER_BYTES, REQUEST_BYTES)
        self._ring.put(fd, into, length, place << 12, <uint64_t><void *>one)
        Py_INCREF(one)
        self._inside += 1
        self._prepared += 1
        one.reading = self._readings.begin(self._store.kv.sequence)
        in_work[number] = one
        self._waits[one] = None
        if self._inside == 1:  # the drive is idle
            self.submit()
        return one

    def submit(self):
        """Submit the prepared reads to the drive; retry soon if the kernel has no memory for them now."""
        if not self._prepared or self._ring is None:
            return
        try:
            self._prepared = self._ring.send()
        except OSError:
            pass
        if self._prepared and not self._is_sent_again:
            self._is_sent_again = True
            self._loop.call_later(AGAIN_S, self._submit_again)

    def _submit_again(self):
        self._is_sent_again = False
        self.submit()

    def reap(self):
        """Answer completed reads, a few at a time: clients get the first answers early."""
        cdef uint64_t token
        cdef int result
        cdef Py_ssize_t count = REAP_MAX, total = 0
        cdef ColdRead one
        cdef list sides
        if self._ring is None:
            return
        while count == REAP_MAX or total >= OUT_BYTES_MAX:
            count, total, sides = 0, 0, []
            while count < REAP_MAX and total < OUT_BYTES_MAX and self._ring.take(&token, &result):
                one = <ColdRead><void *>token
                Py_DECREF(one)
                self._inside -= 1
                count += 1
                total += one.length
                self._readings.end(one.reading)
                if self._waits.pop(one, one) is one or one.cancelled:
                    continue
                try:
                    self._ended(one, result, sides)
                except Exception as error:  # a bug: other waiting reads must still be answered
                    self._loop.call_exception_handler({"message": "a read of a store has failed", "exception": error})
            for side in sides:
                if side.frames.out:
                    side.frames.flush()
                if side.on_idle is not None and not side.in_work:
                    side.on_idle()

    cdef int _ended(self, ColdRead one, int result, list sides) except -1:
        cdef object side = one.side
        cdef Py_ssize_t length
        del side.in_work[one.number]
        if side not in sides:
            sides.append(side)
        if (result != <int>one.length or one.epoch != self.epoch or self._store.fenced_because or self._store.closed
                or self._use.on or self._serving_lease.shared and not self._serving_lease.holds()):
            if result != <int>one.length and one.is_direct:
                self._direct_reads.refused()
            self._otherwise(one)
            return 0
        self._reader.missed_count += 1
        self._count(side.reply_stats, one.length, self._now_s() - one.since_s)
        if type(one.reply) is LargeReply:
            side.frames.out.append(memoryview(one.reply))
            side.frames.out_bytes += (<LargeReply>one.reply).length
        elif one.is_direct:
            length = get32(<const uint8_t *>PyBytes_AS_STRING(one.reply) + one.start + 16) + HEADER_BYTES + one.length
            side.frames.out.append(memoryview(one.reply)[one.start:one.start + length])
            side.frames.out_bytes += length
        else:
            side.frames.out.append(one.reply)
            side.frames.out_bytes += PyBytes_GET_SIZE(one.reply)
        return 0

    cdef int _otherwise(self, ColdRead one) except -1:
        """Pass the read to the slow path as if it arrived now; the slow path reports any error."""
        cdef double left_s = one.since_s + one.deadline_ms / 1000.0 - self._now_s()
        one.side.reply_stats.begun -= 1
        one.side.arrived(one.number, method_key, max(0, int(left_s * 1000)),
                          PyBytes_FromStringAndSize(<const char *>one.message, REQUEST_BYTES), EMPTY)
        return 0

    def give_up(self):
        """Pass all waiting requests to the slow path, which refuses them.

        Data that arrives for reads is dropped.
        """
        cdef ColdRead one
        cdef dict waits = self._waits
        if self.writes is not None:
            self.writes.give_up()
        self._waits = {}
        for one in waits:
            if not one.cancelled:
                del one.side.in_work[one.number]
                self._otherwise(one)

    def close(self):
        """Release the ring. Call when no read waits any more."""
        if self._ring is not None:
            self._loop.remove_reader(self._ring.fileno)
            self._ring.close()
            self._ring, self._has_ring = None, False
