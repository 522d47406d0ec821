# cython: language_level=3
"""C types of lookup_prefetch.py."""

cimport cython


cdef class _Directory:
    cdef public bytes name
    cdef public Py_ssize_t misses, patience, window, hits
    cdef public double last_s
    cdef public bint asking
    cdef public bytes middle
    cdef public object cursor
    cdef public Py_ssize_t ahead
    cdef public object coming
    cdef public Py_ssize_t asked_for
    cdef public double share
    cdef public bint through
    cdef public Py_ssize_t learned, used


cdef class LookupPrefetch:
    cdef object _clock, _ask_on
    cdef readonly dict directories
    @cython.locals(known=_Directory)
    cpdef hit(self, directory, bytes name)
