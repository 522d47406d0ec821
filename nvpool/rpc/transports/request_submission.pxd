# cython: language_level=3
"""C types of request_submission.py."""

cimport cython
from libc.stdint cimport uint32_t

from nvpool.core cimport primitives
from nvpool.rpc cimport reply_receivers

cdef Py_ssize_t _IN_FLIGHT, _GATHER
cdef uint32_t _LATEST_MS


@cython.locals(left_ms=double, in_flight=dict, in_flight_count=Py_ssize_t, number=uint32_t, deadline_ms=uint32_t, frame=bytes,
               gather=bint)
cpdef uint32_t submit(connection, method, bytes message, payload, double deadline_s, double now_s, on_done) except? 0
cdef uint32_t _submit_otherwise(connection, method, bytes message, payload, double deadline_s, on_done) except? 0
