# cython: language_level=3
"""C types of mount_records.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.core.primitives cimport RecordMemory

cdef Py_ssize_t _SLOT_BYTES, _SLOT_MARK, _HANDLE_BYTES, _HANDLE_MARK, _HANDLES
cdef int _INDEX_BITS


cdef class SlotRecords:
    cdef RecordMemory _memory
    cdef Py_ssize_t _place, _shard_bytes
    @cython.locals(memory=RecordMemory, at=Py_ssize_t)
    cpdef keep(self, Py_ssize_t shard, Py_ssize_t slot, uint64_t sequence, uint64_t method, uint64_t unique)
    cpdef clear(self, Py_ssize_t shard, Py_ssize_t slot)


cdef class HandleRecords:
    cdef RecordMemory _memory
    cdef object _table, _freed
    cdef Py_ssize_t _place
    @cython.locals(used=Py_ssize_t)
    cpdef bint has_room(self, Py_ssize_t count) except -1
    @cython.locals(memory=RecordMemory, index=Py_ssize_t, number=uint64_t, at=Py_ssize_t)
    cpdef uint64_t keep(self, uint64_t serial, uint64_t inode, uint32_t flags, uint32_t uid, uint32_t gid, uint32_t pid,
                        uint64_t unique) except? 0
    @cython.locals(index=Py_ssize_t)
    cpdef drop(self, uint64_t number)
