# cython: language_level=3, boundscheck=False, wraparound=False
"""io_uring for reads, and a loop of preadv2 for cached data, for uring_reader.py, reader.py and store/server/reads.py."""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EAGAIN, EBUSY, EINTR, ENOMEM
from libc.stdint cimport uint64_t, int64_t
from libc.stdlib cimport free, malloc
from posix.types cimport off_t

import os


cdef extern from "sys/uio.h" nogil:
    cdef struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t preadv2(int fd, const iovec *iov, int count, off_t offset, int flags)
    int RWF_NOWAIT

cdef extern from "unistd.h" nogil:
    long syscall(long number, ...)

cdef extern from "liburing.h" nogil:
    cdef struct io_uring_sqe:
        uint64_t user_data
    cdef struct io_uring_cqe:
        uint64_t user_data
        int res
    int io_uring_queue_init(unsigned entries, io_uring *ring, unsigned flags)
    void io_uring_queue_exit(io_uring *ring)
    io_uring_sqe *io_uring_get_sqe(io_uring *ring)
    void io_uring_prep_read(io_uring_sqe *sqe, int fd, void *buf, unsigned nbytes, uint64_t offset)
    int io_uring_submit(io_uring *ring)
    unsigned io_uring_sq_ready(const io_uring *ring)
    int io_uring_wait_cqe(io_uring *ring, io_uring_cqe **cqe)
    int io_uring_peek_cqe(io_uring *ring, io_uring_cqe **cqe)
    void io_uring_cqe_seen(io_uring *ring, io_uring_cqe *cqe)


cdef class Ring:
    """A ring for at most `entries` reads. The caller counts the reads and keeps their buffers until they are
    reaped.

    `fileno` becomes readable (poll) when reads have completed.
    """

    def __cinit__(self, unsigned entries):
        self.is_open = False
        self.fileno = -1
        cdef int code = io_uring_queue_init(entries, &self.ring, 0)
        if code < 0:
            raise OSError(-code, os.strerror(-code))
        self.is_open = True
        self.fileno = self.ring.ring_fd

    def __dealloc__(self):
        self.close()

    def close(self):
        if self.is_open:
            self.is_open = False
            self.fileno = -1
            io_uring_queue_exit(&self.ring)

    def probe(self, int fd):
        """Read 4 KiB at offset 0 and wait for the result; OSError if the system forbids any part of this."""
        cdef void *buffer = NULL
        cdef io_uring_sqe *sqe
        cdef io_uring_cqe *cqe = NULL
        cdef int code
        cdef void *raw = malloc(8192)
        try:
            buffer = <void *>((<size_t>raw + 4095) & ~<size_t>4095)
            sqe = io_uring_get_sqe(&self.ring)
            io_uring_prep_read(sqe, fd, buffer, 4096, 0)
            sqe.user_data = 0
            code = io_uring_submit(&self.ring)
            if code < 0:
                raise OSError(-code, os.strerror(-code))
            with nogil:
                code = io_uring_wait_cqe(&self.ring, &cqe)
                while code == -EINTR:  # a signal; the kernel may still write into the buffer, so keep waiting
                    code = io_uring_wait_cqe(&self.ring, &cqe)
            if code < 0:
                raise OSError(-code, os.strerror(-code))
            code = cqe.res
            io_uring_cqe_seen(&self.ring, cqe)
            if code < 0:
                raise OSError(-code, os.strerror(-code))
        finally:
            free(raw)

    cdef int put(self, int fd, void *into, unsigned length, uint64_t offset, uint64_t token) except -1:
        """Queue a read, to be submitted by `send`. The ring has space for it."""
        cdef io_uring_sqe *sqe = io_uring_get_sqe(&self.ring)
        if sqe == NULL:
            io_uring_submit(&self.ring)
            sqe = io_uring_get_sqe(&self.ring)
            if sqe == NULL:
                raise OSError(EAGAIN, "the ring is full")
        io_uring_prep_read(sqe, fd, into, length, offset)
        sqe.user_data = token
        return 0

    cdef int send(self) except -1:
        """Submit the queued reads; return how many the kernel has not accepted for lack of memory: `send`
        again soon."""
        cdef int code
        with nogil:
            code = io_uring_submit(&self.ring)
        if code < 0 and -code not in (EAGAIN, EBUSY, EINTR, ENOMEM):
            raise OSError(-code, os.strerror(-code))
        return io_uring_sq_ready(&self.ring)

    cdef bint take(self, uint64_t *token, int *result):
        """Return whether a read has completed, with its token and result."""
        cdef io_uring_cqe *cqe = NULL
        if io_uring_peek_cqe(&self.ring, &cqe):
            return False
        token[0], result[0] = cqe.user_data, cqe.res
        io_uring_cqe_seen(&self.ring, cqe)
        return True

    cdef int begin(self, int fd, PayloadFrame frame, uint64_t offset, one) except -1:
        """Queue a read of the frame's payload. `one`, which refers to the frame, lives until `ended` returns it."""
        self.put(fd, frame.payload_at, <unsigned>frame.payload_bytes, offset, <uint64_t><void *>one)
        Py_INCREF(one)
        return 0

    cdef int read_into(self, int fd, BlockMemory memory, Py_ssize_t count, uint64_t offset, one) except -1:
        """Queue a read into the beginning of the memory; as `begin`."""
        if count < 0 or count > memory.size:
            raise IndexError("the read is longer than its memory")
        self.put(fd, memory.at, <unsigned>count, offset, <uint64_t><void *>one)
        Py_INCREF(one)
        return 0

    cdef list ended(self, Py_ssize_t limit):
        """Return up to `limit` completed reads of `begin` as (one, result); a ring has these or those of `put`."""
        cdef uint64_t token
        cdef int result
        cdef list found = []
        while len(found) < limit and self.take(&token, &result):
            one = <object><void *>token
            found.append((one, result))
            Py_DECREF(one)
        return found

    def prepare_read(self, int fd, uint64_t offset, unsigned length, unsigned char[::1] into, size_t position, uint64_t token):
        if position + length > <size_t>into.shape[0]:
            raise ValueError("the read ends behind its buffer")
        self.put(fd, &into[position], length, offset, token)

    def submit(self):
        """Do the same as `send`."""
        return self.send()

    def reap(self):
        """Return (token, result) of all completed reads; the result is the bytes read, or a negative
        errno."""
        cdef uint64_t token
        cdef int result
        cdef list found = []
        while self.take(&token, &result):
            found.append((token, result))
        return found


def cached_pages(int fd, uint64_t offset, uint64_t length):
    """Do the same as `reader.cached_pages_plain`. cachestat has the same number on all processors."""
    cdef uint64_t[2] asked
    cdef uint64_t[5] found
    asked[0], asked[1] = offset, length
    return -1 if syscall(451, fd, &asked[0], &found[0], 0) < 0 else found[0]


def read_now(int fd, list offsets, list lengths, list positions, unsigned char[::1] into):
    """Do the same as `reader.read_now_plain`: return the indexes of reads that are not completely cached."""
    cdef Py_ssize_t at
    cdef list missed = []
    cdef iovec vector
    cdef size_t position, length
    cdef off_t offset
    cdef ssize_t got
    for at in range(len(offsets)):
        offset = offsets[at]
        length = lengths[at]
        position = positions[at]
        if position + length > <size_t>into.shape[0]:
            raise ValueError("the read ends behind its buffer")
        vector.iov_base = &into[position]
        vector.iov_len = length
        got = preadv2(fd, &vector, 1, offset, RWF_NOWAIT)
        if got != <ssize_t>length:
            missed.append(at)
    return missed
