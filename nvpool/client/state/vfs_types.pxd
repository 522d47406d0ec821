# cython: language_level=3
"""C types of vfs_types.py."""

from libc.stdint cimport int64_t, uint64_t

from nvpool.client.state.metadata_cache cimport OpenInode

cdef int64_t _ACCESS, _READS_ONLY, _WRITES_ONLY, _APPEND

cdef class ReadAheadState:
    cdef public int64_t next, run, reads
    cdef public dict units
    cdef public int64_t window, far


cdef class FileHandle:
    cdef public OpenInode file
    cdef public uint64_t inode
    cdef public int64_t flags
    cdef public bint readable, writable, append
    cdef public ReadAheadState ahead
    cdef public bint closed
    cdef public uint64_t number
    cdef public object reported_error
