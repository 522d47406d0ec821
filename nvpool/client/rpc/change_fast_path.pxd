# cython: language_level=3
"""C types of change_fast_path.py."""

cimport cython
from libc.stdint cimport uint64_t

from nvpool.core cimport primitives
from nvpool.rpc.transports cimport request_submission

cdef int _COUNTER_BITS


cdef class SubmittedChange:
    cdef public object meta, on_end, inode, method, request, reply_type, file, unique, state, slot, sequence, generation
    cdef public object error, task
    cdef public double deadline_s
    cdef object _connection, _number
    cdef bint _ended, _left
    @cython.locals(message=bytes)
    cpdef send(self, connection, double now_s)
    cpdef answered(self, reply, error)
    cdef _end(self, answer, error)


cdef class ChangeSubmitter:
    cdef object _meta, _clock, _view, _dialer, _once
    cdef dict _shards, _counters
    cdef bint _is_system
    @cython.locals(now_s=double, begun=SubmittedChange)
    cpdef begin(self, uint64_t inode, method, request, reply_type, on_end, uid, gid, file, unique)


cpdef give_back(once, state, slot, sequence, generation)
