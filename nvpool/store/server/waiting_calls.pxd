# cython: language_level=3
"""C types of waiting_calls.py."""

cimport cython


cdef class WaitingCalls:
    cdef object _callers, _also_waiting, _no_calls, _peer, _account
    cdef set _tasks
    cdef dict _begun, _count_of
    cpdef begin(self, call)
    cpdef withdraw(self, call)
    cpdef bint end(self, call) except -1
    cdef _take_place(self, call)
    cpdef _leave(self, account)
