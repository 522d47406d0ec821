# cython: language_level=3
"""C types of serving_lease.py."""

from libc.stdint cimport uint64_t


cdef class ServingLease:
    cdef readonly object target, verifier
    cdef public bint vouched, shared
    cdef public double until_s
    cdef public object refused
    cdef public list changed
    cdef object _clock, _location_leases, _epoch_reported, _readable
    cdef uint64_t _epoch, _epoch_min
    cpdef bint holds(self) except -1
