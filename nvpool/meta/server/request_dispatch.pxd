# cython: language_level=3
"""C types of request_dispatch.py."""

cimport cython
from libc.stdint cimport uint32_t

from nvpool.core cimport primitives
from nvpool.core.primitives cimport RequestFrames
from nvpool.meta.requests.change_handlers cimport ChangeRoute
from nvpool.rpc.stats cimport ReplyStats
from nvpool.rpc.transports.frame_call cimport FrameCall

cdef Py_ssize_t _MESSAGE_MAX, _OUT_BYTES_MAX, _IN_FLIGHT_MAX


cdef class RequestDispatch:
    cdef object _callers, _status, _clock, _die, _retry, _access, _view, _peer, _owner, _user, _refused
    cdef dict _routes, _restricted
    cdef bint _is_system
    cdef RequestFrames _frames
    cpdef handle(self, call)
    @cython.locals(changes=ChangeRoute)
    cpdef serve(self, call, method, bytes message, peer)
    @cython.locals(at=Py_ssize_t, total=Py_ssize_t, replies=Py_ssize_t, call=FrameCall, message=bytes, number=uint32_t,
                   now_s=double, deadline_s=double)
    cpdef Py_ssize_t answer(self, bytearray buffer, Py_ssize_t end, dict in_work, ReplyStats reply_stats, list out, side=*, handle=*,
                            watched=*) except -1
