# cython: language_level=3
"""C types of lease_table.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

cdef uint64_t _HASH, _U64


cdef class _Table:
    cdef public double _lease_s, turn_s
    cdef public object new, old
    cpdef add(self, numbers, index, double now_s)
    @cython.locals(spread=uint64_t, slot=uint64_t, mine=uint32_t, held=uint32_t)
    cpdef add_one(self, uint64_t number, uint32_t index, double now_s)
