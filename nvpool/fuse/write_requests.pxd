# cython: language_level=3
"""C types of write_requests.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.core.primitives cimport ByteReader
from nvpool.fuse.reply_sender cimport ReplySender

cdef Py_ssize_t _WRITE_BYTES, _FLUSH_BYTES
cdef uint64_t _FIRST
cdef uint32_t _KILL, _ASIDE, _APPEND, _SYNC


cdef class WriteRequests:
    cdef object _ops, _state, _keep, _start, _buffer, _view, _count, _done
    cdef ReplySender _replies
    cdef bint _keeps
    cdef ByteReader _in
    cdef ByteReader _open(self, Py_ssize_t count)
    @cython.locals(source=ByteReader, length=uint32_t, unique=uint64_t, uid=uint32_t, gid=uint32_t, pid=uint32_t, offset=uint64_t,
                   size=uint32_t, flags=uint32_t, open_flags=uint32_t)
    cpdef on_write(self, Py_ssize_t count)
    cdef bint _syncs(self, handle, uint32_t open_flags) except -1
    cdef bint _is_answered_again(self, uint64_t unique, handle, uint32_t open_flags) except -1
    @cython.locals(source=ByteReader, length=uint32_t, owner=uint64_t)
    cpdef on_flush(self, Py_ssize_t count)
