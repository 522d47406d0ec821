# cython: language_level=3
"""C types of index_records.py."""

cimport cython
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from nvpool.core.primitives cimport ByteWriter

cdef ByteWriter _out
cdef uint8_t _SMALL, _CHUNK_KIND, _GROUP_KIND, _DELTA_KIND


cdef class IndexSegment:
    cdef public object disk
    cdef public bytes crcs
    cdef public uint64_t base
    @cython.locals(end=Py_ssize_t)
    cpdef uint64_t run(self, Py_ssize_t first, Py_ssize_t count) except? 0


cpdef tuple with_request(requests, request)
cpdef bytes segment_key(uint64_t inode, uint32_t index, uint32_t segment)
cpdef bytes group_key(uint32_t group)
cpdef bytes delta_key(uint32_t group)
cdef bytes _key_of_group(uint8_t kind, uint32_t group)
@cython.locals(session=uint64_t, slot=uint64_t, sequence=uint64_t)
cpdef bytes encode_small(uint64_t version, uint64_t cut, uint32_t table, uint64_t base, Py_ssize_t blocks, requests, bytes crcs)
