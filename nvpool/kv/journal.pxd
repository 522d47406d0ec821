# cython: language_level=3
"""C types of journal.py."""

cimport cython
from libc.stdint cimport uint64_t

cdef Py_ssize_t _PAGE_BYTES
cdef bytes _ZEROS


cdef class Journal:
    cdef dict __dict__
    cdef readonly uint64_t generation
    cdef readonly Py_ssize_t capacity_bytes, offset
    cdef readonly list files
    cdef list _unsynced
    cpdef begin(self, uint64_t generation)
    @cython.locals(half=Py_ssize_t, offset=Py_ssize_t, end=Py_ssize_t, filling=Py_ssize_t, written=Py_ssize_t, more=Py_ssize_t)
    cpdef append(self, bytes record)
