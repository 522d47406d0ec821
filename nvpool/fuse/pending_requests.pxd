# cython: language_level=3
"""C types of pending_requests.py."""

cimport cython

cdef Py_ssize_t _IN_WORK
cdef int _SETLKW


cdef class PendingRequests:
    cdef object _requests, _ops, _replies, _on_full
    cdef readonly object some_ended
    cdef readonly Py_ssize_t lock_waits
    @cython.locals(opcode=int, work=dict)
    cpdef keep(self, step, unique, name, answer)
    @cython.locals(code=int, work=dict)
    cpdef ended(self, unique, name, answer, result, error)
    cpdef replace(self, unique, step, name, answer)
