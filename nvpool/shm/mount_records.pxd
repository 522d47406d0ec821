# cython: language_level=3
"""C types of mount_records.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.core.primitives cimport RecordMemory
from nvpool.shm.arena cimport Arena

cdef Py_ssize_t _SLOT_BYTES, _SLOT_MARK, _HANDLE_BYTES, _HANDLE_MARK, _HANDLES
cdef Py_ssize_t _FILE_BYTES, _WRITE_BYTES, _FILE_MARK, _WRITE_MARK
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


cdef class FileRecords:
    cdef RecordMemory _memory
    cdef Py_ssize_t _place
    @cython.locals(memory=RecordMemory, at=Py_ssize_t)
    cpdef keep(self, Py_ssize_t index, uint64_t end, uint64_t byte_count, uint64_t cut, uint32_t error, uint32_t met,
               uint64_t inode)


cdef class WriteRecords:
    cdef RecordMemory _memory
    cdef object _table, _freed, _payloads
    cdef Py_ssize_t _place, _count
    cdef Arena _arena
    @cython.locals(pieces=Py_ssize_t, used=Py_ssize_t)
    cpdef bint has_room(self, Py_ssize_t length) except -1
    @cython.locals(memory=RecordMemory, length=Py_ssize_t, place=Py_ssize_t, index=Py_ssize_t, at=Py_ssize_t)
    cpdef tuple keep(self, uint64_t inode, uint64_t offset, buffer, uint64_t unique, bint last, uint64_t number)
    cpdef shorten(self, Py_ssize_t index, uint32_t length)
    @cython.locals(at=Py_ssize_t, place=Py_ssize_t)
    cpdef drop(self, Py_ssize_t index)
