# cython: language_level=3
"""C types of stats.py."""

cimport cython
from libc.stdint cimport int64_t

from nvpool.core cimport primitives


cdef class _Answered:
    cdef public object times
    cdef public int64_t bytes_in, bytes_out


cdef class ReplyStats:
    cdef public dict by_method, errors
    cdef public int64_t begun, ended, given_up
    @cython.locals(found=_Answered)
    cpdef served(self, method, double seconds)
    @cython.locals(found=_Answered)
    cpdef answered(self, method, double seconds, status, int64_t bytes_in, int64_t bytes_out)
