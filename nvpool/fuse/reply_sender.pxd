# cython: language_level=3
"""C types of reply_sender.py."""

cimport cython

from nvpool.core cimport primitives


cdef class ReplySender:
    cdef readonly object _requests
    cdef object _ops, _keep_attr, _keep_entry, _keep_absent
    @cython.locals(fd=int, code=int)
    cpdef send(self, bytes head, payload=*)
    cpdef done(self, unique, _result=*)
    cpdef count(self, unique, size)
