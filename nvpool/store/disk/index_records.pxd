# cython: language_level=3
"""C types of index_records.py."""

from libc.stdint cimport uint64_t


cdef class IndexSegment:
    cdef public object disk
    cdef public bytes crcs
    cdef public uint64_t base
