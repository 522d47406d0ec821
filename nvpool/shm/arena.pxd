# cython: language_level=3
"""C types of arena.py."""

cimport cython

cdef int _SMALLEST, _PIECE, _LIMIT


cdef class Arena:
    cdef list _kinds
    cdef readonly list used, fresh, free
    cdef readonly Py_ssize_t taken
    @cython.locals(wanted=Py_ssize_t)
    cpdef bint has_room(self, Py_ssize_t length) except -1
    @cython.locals(kind=int, place=Py_ssize_t, free=list)
    cpdef Py_ssize_t take(self, Py_ssize_t length) except -1
    @cython.locals(piece=Py_ssize_t, kind=int)
    cpdef give_back(self, Py_ssize_t place)


@cython.locals(kind=int)
cpdef int _kind(Py_ssize_t length) except -1
