# cython: language_level=3
"""C types of chunk_write.py."""

from libc.stdint cimport uint32_t, uint64_t


cdef class ChunkWrite:
    cdef readonly uint64_t inode, cut
    cdef readonly uint32_t table, index
    cdef readonly Py_ssize_t offset
    cdef readonly object buffer, request, cipher
    cdef readonly bytes checksums, wrapped_key
    cdef readonly tuple name
    cpdef begin(self, uint32_t table, uint64_t inode, uint32_t index, Py_ssize_t offset, buffer, bytes checksums, uint64_t cut, request)


cdef class Placed:
    cdef public object transaction, writing
    cdef public list runs
    cdef public bytes sums
    cdef public uint64_t version, block
