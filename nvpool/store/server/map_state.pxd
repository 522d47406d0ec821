# cython: language_level=3
"""C types of map_state.py."""

from libc.stdint cimport uint64_t


cdef class MapState:
    cdef public object pool_map, stale_below
    cdef public uint64_t epoch
    cdef public dict changed_at
