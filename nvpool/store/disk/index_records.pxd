# cython: language_level=3
"""C types of index_records.py."""

cimport cython
from libc.stdint cimport uint64_t


cdef class IndexSegment:
    cdef public object disk
    cdef public bytes crcs
    cdef public uint64_t base
    @cython.locals(end=Py_ssize_t)
    cpdef uint64_t run(self, Py_ssize_t first, Py_ssize_t count) except? 0
