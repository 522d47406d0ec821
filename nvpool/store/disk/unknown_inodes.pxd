# cython: language_level=3
"""C types of unknown_inodes.py."""

cimport cython
from libc.stdint cimport uint8_t, uint64_t

cdef uint64_t _NEVER
cdef int _COUNTER_BITS, _KEY_BYTES
cdef uint8_t _CHUNK, _INODE
cdef Py_ssize_t _SINCE_MAX


cdef class UnknownInodes:
    cdef object _kv
    cdef dict _ends
    cdef set _since
    @cython.locals(key=bytes, inode=uint64_t, end=uint64_t, at=int)
    cpdef record_changes(self, dict changed)
    cdef _forget(self)
    @cython.locals(end=uint64_t)
    cpdef bint has(self, uint64_t inode) except -1
    @cython.locals(kind=bytes)
    cdef uint64_t _look_up(self, partition) except? 0
