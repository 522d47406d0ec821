# cython: language_level=3
"""C types of frame_call.py."""

cimport cython
from libc.stdint cimport uint32_t

from nvpool.core cimport primitives
from nvpool.rpc.stats cimport ReplyStats

cdef Py_ssize_t _REPLY_MAX


cdef class FrameCall:
    cdef readonly object payload
    cdef public object method, message, peer
    cdef public double since_s, deadline_s
    cdef public bint cancelled
    cdef bint _is_system
    cpdef begin(self, method, bytes message, side, uint32_t number, double now_s, double deadline_s, list out, ReplyStats replies,
                bint is_system, bytes payload=*)
    cdef public Py_ssize_t payload_bytes, byte_count
    cdef object _side, _callback
    cdef ReplyStats _replies
    cdef uint32_t _number
    cdef list _out
    cpdef reply(self, message=*, payload=*)
    cpdef fail(self, error)
    @cython.locals(out=list, took_s=double, replies=ReplyStats)
    cdef _end(self, uint32_t status, bytes message, payload)
    cpdef keep(self)
