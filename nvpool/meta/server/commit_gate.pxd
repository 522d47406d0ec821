# cython: language_level=3
"""C types of commit_gate.py. CommitGate has none: tests of broken guarantees replace its methods."""


cdef class HeldCall:
    cdef readonly object method, message, payload, peer
    cdef readonly double since_s, deadline_s
    cdef object _gate, _history, _call, _reply, _payload, _error
    cdef bint _is_answered
    cpdef reply(self, message=*, payload=*)
    cpdef fail(self, error)
