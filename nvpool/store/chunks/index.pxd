# cython: language_level=3
"""C types of index.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.store.disk.unknown_inodes cimport UnknownInodes
from nvpool.store.disk.index_records cimport IndexSegment


cdef class Chunk:
    cdef public uint64_t inode, version, cut
    cdef public uint32_t index, table
    cdef public object requests
    cdef public list segments


cdef class Index:
    cdef object _kv
    cdef readonly UnknownInodes unknown
    cdef public Py_ssize_t generation_max, weight
    cdef public dict young, old
    cdef dict _inodes
    @cython.locals(name=tuple, found=Chunk)
    cpdef Chunk chunk(self, inode, index)
    cpdef Chunk add(self, inode, index)
    cdef _keep(self, tuple name, Chunk chunk)
    @cython.locals(segments=list, found=IndexSegment)
    cpdef IndexSegment segment(self, Chunk chunk, Py_ssize_t number)
    cpdef inode(self, inode)
