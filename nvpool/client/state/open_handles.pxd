# cython: language_level=3
"""C types of open_handles.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.client.state.shard_session cimport ShardSession, ShardSessions
from nvpool.client.state.leases cimport InodeLease, Leases
from nvpool.client.state.metadata_cache cimport MetadataCache, OpenInode
from nvpool.client.state.vfs_types cimport FileHandle, ReadAheadState

cdef uint32_t _READ
cdef uint64_t _SMALL_BYTES
cdef int64_t _NOT_TO_READ


cdef class OpenHandles:
    cdef object _meta, _reader, _writer, _chunks, _rooms, _owners
    cdef ShardSessions _sessions
    cdef Leases _leases
    cdef MetadataCache _cache
    @cython.locals(lease=InodeLease, file=OpenInode, state=ShardSession, is_large=bint)
    cpdef FileHandle open_now(self, inode, int64_t flags, double now_s)
    @cython.locals(file=OpenInode, ahead=ReadAheadState)
    cpdef bint release_now(self, FileHandle handle) except -1
    @cython.locals(state=ShardSession, known=Py_ssize_t)
    cpdef let_go(self, OpenInode file)
