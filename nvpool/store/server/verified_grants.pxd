# cython: language_level=3
"""C types of verified_grants.py."""

from nvpool.core cimport grants

cdef Py_ssize_t _BODY_BYTES


cdef class VerifiedGrants:
    cdef public dict known
    cdef object _keyed, _clock, _on_taken, _entries, _taken
    cpdef grant(self, bytes raw, now_ms)
    cpdef check_service(self, bytes raw)
