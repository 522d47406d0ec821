# cython: language_level=3
"""C types of read_queue.py."""


cdef class ReadQueue:
    cdef public object target, endpoints, distance
    cdef public double shunned_s, took_s, measured_s
    cdef public list pending
    cdef public Py_ssize_t pending_bytes, in_flight
    cdef public bint scheduled
