# cython: language_level=3
"""C types of partial_writes.py."""

cimport cython

from nvpool.store.chunks.index cimport Chunk, Index
from nvpool.store.disk.index_records cimport IndexSegment

cdef Py_ssize_t _BLOCK_BYTES, _BLOCK_MASK, _SEGMENT_BITS, _SEGMENT_MASK


cdef class Merger:
    cdef Index _index
    cdef object _device, _readings, _note_bad
    cdef dict _warm
    @cython.locals(buffers=list)
    cpdef tuple whole_blocks(self, Chunk chunk, Py_ssize_t offset, buffer, bytes checksums, cipher=*)
    @cython.locals(length=Py_ssize_t, head=Py_ssize_t, tail=Py_ssize_t, middle=Py_ssize_t, at=Py_ssize_t, first=Py_ssize_t, within=Py_ssize_t,
                   buffers=list, new_sums=list)
    cdef tuple _whole_blocks(self, Chunk chunk, Py_ssize_t offset, buffer, bytes sums, cipher)
    cdef _merged(self, Chunk chunk, Py_ssize_t block, Py_ssize_t within, piece, bytes checksum, cipher)
    cpdef old_block(self, Chunk chunk, Py_ssize_t block, cipher=*)
    @cython.locals(segment=IndexSegment, within=Py_ssize_t, checksum=bytes)
    cdef _stored_block(self, Chunk chunk, Py_ssize_t block)
