# cython: language_level=3
"""C types of reply_receivers.py."""

cimport cython
from libc.stdint cimport uint32_t

from nvpool.core.primitives cimport ReceivedReply

cdef uint32_t _NUMBER_MASK


cdef class ReplyBurst:
    cdef Py_ssize_t turn
    cdef int go_on(self) except -1


cdef class ReplyReceiver:
    cpdef ReplyBurst receive(self, bytes message)


cdef class PayloadReceiver:
    cpdef ReplyBurst receive_reply(self, ReceivedReply reply)


@cython.locals(number=uint32_t)
cpdef uint32_t next_number(connection, dict in_flight, double deadline_s) except? 0
@cython.locals(number=uint32_t)
cpdef uint32_t register(connection, dict in_flight, on_done, double deadline_s, room, method, double now_s, into=*) except? 0
