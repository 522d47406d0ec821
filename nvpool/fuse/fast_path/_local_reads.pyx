# cython: language_level=3, boundscheck=False, wraparound=False
"""Compiled short-circuit reads, from request to reply without Python; local_reads.py has the contract."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport ECONNABORTED, ENODEV, ENOENT, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy

import asyncio

from nvpool.security._xts cimport decrypting
from nvpool.core.clock import SystemClock, stopwatch_s
from nvpool.client.data import short_circuit as short_circuit_module
from nvpool.blockio._uring cimport Ring
from nvpool.blockio.reader import DIRECT_READ_BYTES
from nvpool.blockio.uring_reader import AGAIN_S
from nvpool.fuse.fast_path._read_requests cimport LARGE_BYTES, PAGE, Wanted, is_read, read_at_random
from nvpool.fuse.protocol.constants import Op

cdef extern from "_block_sums.h":
    int has_instruction()
    void sum_blocks(const unsigned char *data, size_t count, uint32_t *sums) nogil

cdef extern from "_clock.h":
    double boottime_s() nogil

cdef extern from "_kernel.h":
    ssize_t answer(int fd, uint64_t unique, const void *bytes, size_t length) nogil

cdef extern from "_page_cache.h":
    ssize_t read_cached(int fd, void *into, size_t length, uint64_t offset) nogil
    uint64_t pages_in_memory(int fd, uint64_t offset, uint64_t length) nogil

cdef extern from "<stdlib.h>":
    int posix_memalign(void **memory, size_t alignment, size_t size) nogil

cdef enum:
    SPARES_MAX = 64             # objects of completed reads kept for the next ones, for each size
    RING_ENTRIES = 512
    SEEN_BITS = 16

cdef int LATE = short_circuit_module.LATE, WRONG = short_circuit_module.WRONG
cdef int opcode_of_reads = Op.READ
cdef uint32_t direct_bytes = DIRECT_READ_BYTES
cdef object opcode_key = int(Op.READ)


def is_of_use():
    """Whether this processor has the instruction for checksums."""
    return bool(has_instruction())


cdef class PendingLocalRead:
    """A read that is in the ring.

    Its memory is not used again before the drive has completed the read, even if the caller is gone by then.
    """
    cdef LocalReads reads
    cdef void *memory
    cdef size_t capacity
    cdef object located, source
    cdef uint64_t unique, handle, offset
    cdef uint32_t size, first, skip, span
    cdef double since_s
    cdef bint is_done, direct

    def __dealloc__(self):
        free(self.memory)

    def cancel(self):
        """Cancel: the caller dies, or the mount is gone; reply now. False: the read was answered already."""
        entry = self.reads.requests.work.get(self.unique)
        if entry is None or entry[0] is not self:
            return False
        self.is_done = True  # may be set already: then the slow path was about to start
        self.reads.short_circuit.waiting.pop(self, None)
        self.reads.path.read_ended(self.unique, asyncio.CancelledError())
        return True

    def __call__(self, found):
        """Handle a read that takes too long: request the data from its store."""
        if not self.is_done:
            self.is_done = True
            self.reads.short_circuit.note(self.located, LATE)
            self.reads.path.read_otherwise(self.unique, self.handle, self.offset, self.size)


cdef class LocalReads:
    """Compiled part of LocalReadPath; see local_reads.py.

    `path.requests` has the request in its buffer, and the table of pending ones.
    """
    cdef readonly object path, requests, short_circuit
    cdef readonly uint64_t read_bytes
    cdef object _pages, _paged, _clock
    cdef dict _files, scratches
    cdef bytearray _buffer
    cdef int _fd
    cdef bint _is_system, _is_cold, is_sent_again
    cdef Ring ring
    cdef Py_ssize_t inside, prepared
    cdef list small_spares, large_spares
    cdef uint32_t[1 << SEEN_BITS] seen

    def __init__(self, path, ops, short_circuit):
        requests = path.requests
        self.path, self.requests, self.short_circuit = path, requests, short_circuit
        self._fd, self._buffer = requests.fd, requests.buffer
        self._pages, self._files, self._paged = ops.cached_pages, ops.files.by_handle, ops.cached_pages.paged
        self._clock = short_circuit.clock
        self._is_system = type(short_circuit.clock) is SystemClock
        self.ring = Ring(RING_ENTRIES)
        self.scratches = {}
        self.small_spares, self.large_spares = [], []

    @property
    def fileno(self):
        """Descriptor that is readable when reads have ended; then call `reap`."""
        return self.ring.fileno

    @property
    def waiting(self):
        """Reads that the drive has not completed."""
        return self.inside

    cdef double now_s(self) except -1:
        return boottime_s() if self._is_system else self._clock.boottime_s()

    def take(self, Py_ssize_t count):
        """Answer or start the READ of `count` bytes in the buffer.

        True: it is answered, or in the table of pending requests. False: nothing has happened.
        """
        cdef Wanted wanted
        cdef object opened, file, ahead, located, source
        if (not is_read(self._buffer, count, &wanted) or self.inside >= RING_ENTRIES or self.requests.forwarded
                or not self.short_circuit.on):
            return False
        opened = read_at_random(self._files, self._pages, self._paged, &wanted)
        if opened is None:
            return False
        file, ahead = opened.file, opened.ahead
        cdef uint64_t unique = wanted.unique, handle = wanted.handle, offset = wanted.offset, end
        cdef uint32_t size = wanted.size
        end = offset + size
        if end > <uint64_t>file.attr.size:
            return False
        cdef int bits = file.chunk_bits
        cdef uint64_t index = offset >> bits
        if end - 1 >> bits != index:
            return False
        located = (<dict>file.located).get(index)
        if located is None:
            return False
        source = located.source
        cdef uint32_t skip = offset & (PAGE - 1)
        cdef uint64_t within = (offset & <uint64_t>file.chunk_mask) - skip
        cdef uint32_t span = (skip + size + PAGE - 1) & ~<uint32_t>(PAGE - 1)
        cdef uint32_t first = within >> 12, blocks = span >> 12
        if span > LARGE_BYTES or source.connection.closed or first + blocks > <uint64_t>located.blocks:
            return False
        cdef uint64_t place = self.place_of(located, first, blocks)
        if not place:
            return False
        cdef int drive = source.fd
        cdef bint is_cold = self._is_cold
        cdef bint direct = False
        cdef PendingLocalRead one
        cdef uint64_t pages
        one = self.spare(span)
        one.located, one.source, one.unique, one.handle, one.offset, one.size = located, source, unique, handle, offset, size
        one.first, one.skip, one.span, one.is_done, one.direct = first, skip, span, False, False
        # checking by a read would bring it into memory; see blockio/reader
        if is_cold or span >= direct_bytes:
            pages = pages_in_memory(drive, place << 12, span)
            is_cold = pages < blocks
            direct = (pages * 2 < blocks and source.takes_direct
                      and (span >= direct_bytes or not self.was_read(<uint64_t>source.target << 48 ^ place)))
        if not is_cold:
            if read_cached(drive, one.memory, span, place << 12) == <ssize_t>span:
                self._is_cold = False
                wrong = self.judge(one)
                if wrong:
                    self.short_circuit.note(located, wrong)
                    self.give_back(one)
                    return False
                self.followed(opened, ahead, file, end)
                self.hit(one)
                self.send_reply(one)
                self.give_back(one)
                return True
            self._is_cold = True
        # Read from the drive.
        one.direct = direct
        one.since_s = self.requests.since_s
        self.ring.put(source.direct_fd if direct else drive, one.memory, span, place << 12, <uint64_t><void *>one)
        Py_INCREF(one)
        self.inside += 1
        self.prepared += 1
        if self.inside == 1:  # the drive is idle
            self.submit()
        file.grant_used = True
        self.followed(opened, ahead, file, end)
        self.short_circuit.counters["cold"] += 1
        self.short_circuit.waiting[one] = self.now_s(), one
        self.requests.work[unique] = one, wanted.pid, opcode_key, one.since_s
        self.requests.deferred += 1
        return True

    cdef bint was_read(self, uint64_t key):
        """Whether a small read of that place is among the latest ones: then it is worth caching. Records this
        read.

        The table has 65,536 entries; an entry is lost earlier if another read has the same index.
        """
        cdef uint64_t mixed = key * <uint64_t>0x9E3779B97F4A7C15  # Fibonacci hashing: D. Knuth, The Art of Computer Programming 6.4
        cdef uint32_t tag = <uint32_t>(mixed >> 8) | 1
        cdef uint64_t at = mixed >> (64 - SEEN_BITS)
        if self.seen[at] == tag:
            return True
        self.seen[at] = tag
        return False

    cdef int followed(self, opened, ahead, file, uint64_t end) except -1:
        """Update the read-ahead state as the reader does; the next read continues from here."""
        ahead.run = 0
        ahead.reads = 0
        ahead.next = end
        return 0

    cdef uint64_t place_of(self, located, uint32_t first, uint32_t blocks) except? 0:
        """The first disk block if the blocks lie in one piece; 0: they do not, or there is a hole."""
        cdef uint64_t base = located.base, place
        cdef Py_buffer view
        cdef const uint64_t *places
        cdef uint32_t at
        if base:
            return base + first
        PyObject_GetBuffer(located.places, &view, PyBUF_SIMPLE)
        try:
            if view.len < <Py_ssize_t>(first + blocks) * 8:
                return 0
            places = <const uint64_t *>view.buf
            place = places[first]
            if not place:
                return 0
            for at in range(1, blocks):
                if places[first + at] != place + at:
                    return 0
            return place
        finally:
            PyBuffer_Release(&view)

    cdef int judge(self, PendingLocalRead one) except -1:
        """Check the bytes that were read, as ShortCircuitReads does; returns the reason to refuse them, or 0.

        Good bytes are then decrypted if necessary. The clock and the counter are checked after the read.
        """
        cdef object located = one.located, source = one.source
        cdef double now = self.now_s()
        cdef uint32_t sums[LARGE_BYTES >> 12]
        cdef uint32_t blocks = one.span >> 12
        cdef bytes expected
        if (source.connection.closed or now >= <double>located.until or source.table[located.slot] != located.stamp
                or now + <double>source.shift >= <double>source.serving[0]):
            return LATE
        sum_blocks(<const unsigned char *>one.memory, blocks, sums)
        expected = located.sums
        if (PyBytes_GET_SIZE(expected) < <Py_ssize_t>(one.first + blocks) * 4
                or memcmp(PyBytes_AS_STRING(expected) + one.first * 4, sums, blocks * 4)):
            return WRONG
        file = located.file
        if file.encrypted:
            if file.key is None:
                return LATE
            decrypting(self.scratches, file.key).turn(<const uint8_t *>one.memory, <uint8_t *>one.memory, blocks, file.inode,
                                                      located.index, one.first, True)
        return 0

    cdef int hit(self, PendingLocalRead one) except -1:
        """Count a hit, as ShortCircuitReads.hit does."""
        cdef object located = one.located, file
        located.used += 1
        located.read_bytes += one.span
        file = located.file
        if file.owes > 0:
            file.owes -= 1
        self.short_circuit.counters["hits"] += 1
        return 0

    cdef int send_reply(self, PendingLocalRead one) except -1:
        """Reply to the kernel with the bytes that were read."""
        cdef const char *bytes = <const char *>one.memory + one.skip
        cdef int error
        self.read_bytes += one.size
        if answer(self._fd, one.unique, bytes, one.size) < 0:
            error = errno
            if error not in (ENOENT, ENODEV, ECONNABORTED):
                self.path.answer_refused(one.unique, error, 16 + one.size)
        return 0

    def submit(self):
        """Submit the collected reads to the drive.

        If the kernel has no memory for them now, this is repeated soon. A read that takes too long is
        requested from its store.
        """
        if not self.prepared or not self.ring.is_open:
            return
        try:
            self.prepared = self.ring.send()
        except OSError:
            pass
        if self.prepared and not self.is_sent_again:
            self.is_sent_again = True
            self.requests.loop.call_later(AGAIN_S, self._submit_again)

    def _submit_again(self):
        self.is_sent_again = False
        self.submit()

    def reap(self, Py_ssize_t most, uint64_t most_bytes):
        """Answer reads that the drive has completed; returns how many.

        Stops after `most` reads, or after the read that reaches `most_bytes`.
        """
        cdef uint64_t token
        cdef int result
        cdef Py_ssize_t count = 0
        cdef uint64_t total = 0
        cdef PendingLocalRead one
        while count < most and total < most_bytes and self.ring.take(&token, &result):
            one = <PendingLocalRead><void *>token
            Py_DECREF(one)
            self.inside -= 1
            count += 1
            total += one.span
            try:
                self.ended(one, result)
            except Exception as error:  # a bug: report it to the caller, and answer the others
                entry = self.requests.work.get(one.unique)
                if entry is not None and entry[0] is one:
                    self.path.read_ended(one.unique, error)
        return count

    cdef int ended(self, PendingLocalRead one, int result) except -1:
        cdef int wrong = -1
        cdef object requests = self.requests
        if one.is_done:
            return 0  # not reused: the table of pending requests may still contain it
        one.is_done = True
        self.short_circuit.waiting.pop(one, None)
        if result == <int>one.span:
            wrong = self.judge(one)
            if wrong:
                self.short_circuit.note(one.located, wrong)
        elif one.direct:
            one.source.takes_direct = False  # perhaps the drive only requires larger blocks
        if wrong:
            self.path.read_otherwise(one.unique, one.handle, one.offset, one.size)
            return 0  # not reused either: the table contains it until the slow path starts
        self.hit(one)
        self.send_reply(one)
        del requests.work[one.unique]
        if requests.interrupted:
            requests.interrupted.pop(one.unique, None)
        requests.spent.add(opcode_of_reads, max(0.0, stopwatch_s() - one.since_s))
        self.give_back(one)
        return 0

    cdef PendingLocalRead spare(self, uint32_t span):
        cdef list spares = self.small_spares if span <= PAGE else self.large_spares
        cdef PendingLocalRead one
        if spares:
            return <PendingLocalRead>spares.pop()
        one = PendingLocalRead.__new__(PendingLocalRead)
        one.capacity = PAGE if span <= PAGE else LARGE_BYTES
        if posix_memalign(&one.memory, PAGE, one.capacity):
            one.memory = NULL
            raise MemoryError
        one.reads = self
        return one

    cdef int give_back(self, PendingLocalRead one) except -1:
        cdef list spares = self.small_spares if one.capacity == PAGE else self.large_spares
        one.located = one.source = None
        if len(spares) < SPARES_MAX:
            spares.append(one)
        return 0

    def close(self):
        """Free the memory and the ring.

        Call this when no read is pending; or when the process is about to end, and the kernel ends the reads
        with it.
        """
        self.small_spares.clear()
        self.large_spares.clear()
        if not self.inside:
            self.ring.close()
