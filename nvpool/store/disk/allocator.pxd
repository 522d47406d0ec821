# cython: language_level=3
"""C types of allocator.py."""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from nvpool.core.primitives cimport ByteWriter
from nvpool.store.disk cimport index_records

cdef ByteWriter _out
cdef int _GROUP_BITS
cdef Py_ssize_t _GROUP_MASK, _GROUP_BLOCKS, _DELTAS_MAX


cdef class _Group:
    cdef public object used, deltas


@cython.locals(count=Py_ssize_t)
cpdef bytes encode_deltas(deltas, Py_ssize_t used, int64_t last=*)


cdef class Transaction:
    cdef public list taken, freed
    cdef public double until
    cdef public bytes held_record
    cdef public dict groups_after


cdef class Allocator:
    cdef object _kv, _waiting, _resting, _held_number
    cdef public Py_ssize_t block_count, reserve_blocks, group_count, held_blocks, small_group, large_group, fixed_blocks
    cdef public Py_ssize_t used_blocks, available_blocks
    cdef public object spare, levels
    cdef public dict cached_groups, held_masks, changed_groups
    @cython.locals(number=Py_ssize_t, group=_Group, at=Py_ssize_t)
    cpdef uint64_t find_block(self) except? 0
    @cython.locals(number=Py_ssize_t)
    cpdef hold_block(self, uint64_t place)
    @cython.locals(run=tuple)
    cdef uint64_t _only_block(self, Transaction transaction) except? 0
    @cython.locals(number=Py_ssize_t, at=Py_ssize_t, group=_Group)
    cpdef list block_effects(self, uint64_t place)
    @cython.locals(number=Py_ssize_t, at=Py_ssize_t, group=_Group)
    cpdef commit_block(self, uint64_t place, bint is_held)
    cpdef _Group _group(self, group)
    cpdef count_spare(self, group, change)
    cdef _unhold(self, run, give_back)
