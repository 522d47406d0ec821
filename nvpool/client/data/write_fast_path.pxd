# cython: language_level=3
"""C types of write_fast_path.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.client.state.dirty_file cimport DirtyExtent
from nvpool.core cimport primitives
from nvpool.core.primitives cimport ByteWriter
from nvpool.rpc.transports cimport request_submission

cdef Py_ssize_t _PAYLOAD_MAX, _REPLY_BYTES
cdef ByteWriter _out


cdef class SubmittedWrite:
    cdef readonly uint64_t slot, sequence, cut
    cdef readonly object error
    cdef uint32_t number
    cdef bint is_watched
    cdef WriteSubmitter _submitter
    cdef object _file, _place, _epoch, _connection
    cdef uint32_t _index
    cdef bint _ended
    cdef begin(self, WriteSubmitter submitter, file, uint32_t index, tuple place, epoch, connection, uint64_t slot,
               uint64_t sequence, uint64_t cut)
    cdef int ended(self, error) except -1
    cpdef note_stored(self, unstable)
    cdef _end(self, error)


@cython.locals(raw=bytes)
cpdef bint is_success(message) except -1


cdef class WriteSubmitter:
    cdef readonly object chunks, short
    cdef list _slots
    cdef dict _lanes, _counters
    cdef object _view, _dialer
    cpdef leave(self, SubmittedWrite writing)
    @cython.locals(slots=list, start=int64_t, length=int64_t, inode=uint64_t, index=uint32_t, sequence=uint64_t, cut=uint64_t,
                   slot=uint64_t, parts=list, is_whole=bint, checksums=bytes, out=ByteWriter, mark=Py_ssize_t)
    cpdef bint begin(self, SubmittedWrite writing, file, DirtyExtent extent, double deadline_s, double now_s) except -1
