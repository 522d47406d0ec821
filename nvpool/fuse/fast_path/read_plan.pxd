# cython: language_level=3
"""C types of read_plan.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.client.data.local_drive cimport BlockLocations
from nvpool.client.data.store_reads cimport StoreReads
from nvpool.client.state.metadata_cache cimport OpenInode
from nvpool.client.state.vfs_types cimport FileHandle, ReadAheadState
from nvpool.core.primitives cimport ByteReader
from nvpool.fuse.fast_path.kernel_reads cimport KernelRead, KernelReads
from nvpool.fuse.fast_path.local_reads cimport LocalReads

cdef Py_ssize_t _REQUEST_BYTES, _TURN, _LARGE_TURN
cdef uint32_t _OPCODE, _LARGE_BYTES, _WIDE_BYTES
cdef uint64_t _BLOCK_MASK, _SMALL_BYTES, _FIRST, _OFFSET_END


cdef class ReadPlan:
    cdef readonly object path
    cdef readonly KernelReads reads
    cdef readonly LocalReads local
    cdef uint64_t unique, handle, offset
    cdef uint32_t pid, size, skip, within, span
    cdef bytearray _buffer
    cdef object _requests, _pages, _chunks, _short
    cdef dict _files, _paged
    cdef Py_ssize_t _in_work_max
    cdef StoreReads _stores
    cdef ByteReader _source
    @cython.locals(source=ByteReader)
    cdef bint _decode(self, Py_ssize_t count) except -1
    @cython.locals(opened=FileHandle, file=OpenInode, ahead=ReadAheadState, offset=uint64_t, file_bytes=uint64_t, end=uint64_t, bits=int, index=uint64_t)
    cpdef bint take(self, Py_ssize_t count) except -1
    cdef bint _may_be_local(self, OpenInode file, index) except -1
    @cython.locals(local=LocalReads)
    cdef bint _read_from_drive(self, BlockLocations located) except -1
    @cython.locals(one=KernelRead, reads=KernelReads, now_s=double)
    cdef _read_from_store(self, OpenInode file, index)
    cpdef send(self)
