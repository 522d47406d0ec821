# cython: language_level=3
"""C types of kernel_reads.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.client.data.read_queue cimport Read, ReadBurst
from nvpool.client.state.metadata_cache cimport OpenInode
from nvpool.core cimport primitives
from nvpool.core.primitives cimport ByteWriter, ReceivedReply

cdef uint32_t _REPLY_BYTES, _OPCODE


cdef class KernelRead(Read):
    cdef KernelReads reads
    cdef object key
    cdef uint64_t unique
    cdef uint32_t skip, size
    cdef double since_s
    cdef bint is_done
    cdef start(self, KernelReads reads, uint64_t unique, uint32_t skip, uint32_t size, double since_s)
    cdef bint _is_pending(self) except -1
    cpdef bint done(self) except -1
    cpdef set_result(self, blocks)
    cpdef set_exception(self, error)
    @cython.locals(reads=KernelReads)
    cpdef report(self, error)
    cpdef bint cancel(self) except -1
    cpdef take(self, ReceivedReply reply, Py_ssize_t first, Py_ssize_t length)


cdef class KernelReads(ReadBurst):
    cdef readonly object path
    cdef readonly uint64_t read_bytes
    cdef dict work
    cdef object requests, _scratch
    cdef int _fd
    cdef ByteWriter _head
    cdef ReceivedReply _plain
    cdef uint64_t _outside
    cdef add(self, KernelRead one, uint32_t pid)
    cdef take_back(self, KernelRead one)
    @cython.locals(blocks=ReceivedReply, file=OpenInode)
    cdef answer(self, KernelRead one, ReceivedReply reply, Py_ssize_t first)
    @cython.locals(plain=ReceivedReply)
    cdef ReceivedReply decrypted(self, OpenInode file, index, uint32_t offset, uint32_t length, ReceivedReply reply, Py_ssize_t first)
    @cython.locals(head=ByteWriter, code=int)
    cdef write(self, uint64_t unique, ReceivedReply blocks, Py_ssize_t first, uint32_t size)
    cdef _count(self, spent, double took_s)
    cdef int go_on(self) except -1
    cpdef one_came(self)
