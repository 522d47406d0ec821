# cython: language_level=3
"""C types of io_stats.py."""


cdef class IoStats:
    cdef object _clock, _counting
    cdef dict _known, _rows
    cdef double _until_s
    cdef public bint on
    cdef public object past_reads, past_bytes
    cdef bint _watched(self) except -1
