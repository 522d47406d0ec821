# cython: language_level=3
"""C types of verified_grants.py."""


cdef class VerifiedGrants:
    cdef public dict known
    cdef object _secret, _clock, _on_taken, _entries, _taken
    cpdef grant(self, bytes raw, now_ms)
