# cython: language_level=3
"""C types of bad_blocks.py."""


cdef class Quarantine:
    cdef object _kv, _where
    cdef dict _texts
    cdef public object on_bad
    cdef public set chunks
