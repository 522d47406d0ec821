# cython: language_level=3
"""C types of local_drive.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.client.state.metadata_cache cimport OpenInode
from nvpool.core.primitives cimport ReceivedReply

cdef int _LATE, _WRONG


cdef class LocalDrive:
    cdef public int fd, direct_fd
    cdef public uint64_t target
    cdef public bint takes_direct
    cdef public double shift
    cdef public object memory, table, serving, token, connection
    cdef public dict past


cdef class BlockLocations:
    cdef public OpenInode file
    cdef public object index, places
    cdef public LocalDrive source
    cdef public double until
    cdef public uint32_t slot, stamp, blocks
    cdef public uint64_t version, base, bytes, used, read_bytes, reported
    cdef public bytes sums
    @cython.locals(place=uint64_t, at=Py_ssize_t)
    cpdef uint64_t place(self, uint32_t first, uint32_t count) except? 0
    @cython.locals(source=LocalDrive, file=OpenInode)
    cpdef bint is_late(self, double now_s) except -1
    cpdef int judge(self, double now_s, ReceivedReply blocks, uint32_t first) except -1
    @cython.locals(file=OpenInode)
    cpdef hit(self, uint64_t byte_count, uint64_t count)
