# cython: language_level=3
"""C types of grants.py: a store reads the grant of every new file."""

cdef Py_ssize_t _GRANT_BYTES
cdef unsigned char _VERSION


cpdef object read(bytes raw)
