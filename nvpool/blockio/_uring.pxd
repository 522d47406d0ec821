# cython: language_level=3
"""Interface of the ring for other compiled modules; see _uring.pyx."""

from libc.stdint cimport uint64_t

from nvpool.core.primitives cimport BlockMemory, PayloadFrame

cdef extern from "liburing.h" nogil:
    cdef struct io_uring:
        int ring_fd


cdef class Ring:
    cdef io_uring ring
    cdef bint is_open
    cdef readonly int fileno

    cdef int put(self, int fd, void *into, unsigned length, uint64_t offset, uint64_t token) except -1
    cdef int send(self) except -1
    cdef bint take(self, uint64_t *token, int *result)
    cdef int begin(self, int fd, PayloadFrame frame, uint64_t offset, one) except -1
    cdef int read_into(self, int fd, BlockMemory memory, Py_ssize_t count, uint64_t offset, one) except -1
    cdef list ended(self, Py_ssize_t limit)
