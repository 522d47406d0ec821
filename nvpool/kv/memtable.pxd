# cython: language_level=3
"""C types of memtable.py."""

cimport cython


cdef class OrderedKeys:
    cdef list _buckets, _lasts
    cpdef rebuild(self, keys)
    @cython.locals(at=Py_ssize_t, bucket=list)
    cpdef add(self, bytes key)
    @cython.locals(at=Py_ssize_t, bucket=list)
    cpdef remove(self, bytes key)


cdef class Layer:
    cdef readonly dict values
    cdef OrderedKeys _keys
    cdef Py_ssize_t _indexed_count
    @cython.locals(new_count=Py_ssize_t)
    cdef OrderedKeys _index(self)
