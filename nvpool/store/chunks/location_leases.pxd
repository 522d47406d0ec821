# cython: language_level=3
"""C types of location_leases.py: what every write uses."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

cdef uint64_t _INODE_FACTOR, _INDEX_FACTOR, _U64_MASK, _STAMP_MASK
cdef int _SLOT_SHIFT


cpdef uint32_t slot_of(uint64_t inode, uint64_t index)


cdef class LocationLeases:
    cdef dict __dict__
    cdef public double life_s
    cdef public object stamps
    @cython.locals(slot=uint32_t, stamp=uint64_t)
    cpdef changing_chunk(self, uint64_t inode, uint32_t index)
