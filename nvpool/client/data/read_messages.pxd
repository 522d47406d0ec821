# cython: language_level=3
"""C types of read_messages.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.core cimport primitives
from nvpool.core.primitives cimport ByteReader, ByteWriter, ReceivedReply

cdef Py_ssize_t _ENTRY_BYTES, _RESULT_BYTES, _BLOCK_BITS, _BLOCK_MASK


cdef class ReadRequest:
    cdef readonly Py_ssize_t count, byte_count
    cdef bytes _grant
    cdef dict _places
    cdef ByteWriter _head, _reads
    @cython.locals(head=ByteWriter)
    cpdef begin(self, uint64_t epoch, uint32_t target)
    @cython.locals(reads=ByteWriter, place=uint32_t)
    cpdef add(self, uint64_t inode, uint32_t index, uint32_t offset, uint32_t length, bytes grant, uint32_t flags)
    @cython.locals(places=dict)
    cdef uint32_t _place(self, bytes grant) except? 0
    @cython.locals(head=ByteWriter)
    cdef _add_grant(self, bytes grant)
    @cython.locals(head=ByteWriter)
    cpdef close(self, bint verify)
    cpdef bytes message(self)
    cdef bytes frame(self, uint32_t method, uint32_t number, uint32_t deadline_ms)


cdef class ReadResults:
    cdef readonly uint32_t status, length
    cdef readonly Py_ssize_t first
    cdef ReceivedReply _reply
    cdef ByteReader _source
    cdef Py_ssize_t _result, _sums, _next
    cdef bint _are_good
    @cython.locals(source=ByteReader, tag=uint64_t, result_bytes=uint64_t)
    cpdef bint open(self, ReceivedReply reply, Py_ssize_t count) except -1
    @cython.locals(reply=ReceivedReply, at=Py_ssize_t, place=Py_ssize_t, first=Py_ssize_t, length=uint32_t)
    cpdef bint step(self, Py_ssize_t length_max) except -1
    @cython.locals(reply=ReceivedReply, at=Py_ssize_t, total=Py_ssize_t, length=uint32_t)
    cpdef bint are_whole(self, list lengths) except -1
    cpdef close(self)


cpdef bytes encode_read(uint64_t epoch, uint32_t target, uint64_t inode, uint32_t index, uint32_t offset, uint32_t length,
                        bytes grant, uint32_t flags)
