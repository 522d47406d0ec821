# cython: language_level=3
"""C types of direntries.py."""

cimport cython
from libc.stdint cimport uint64_t

from nvpool.core.primitives cimport ByteReader
from nvpool.rpc.messages.meta_messages cimport Attr

cdef Py_ssize_t _ENTRY_BYTES
cdef int _WORDS_BEFORE_CHANGE
cdef ByteReader _in


@cython.locals(source=ByteReader, attr=Attr)
cpdef Attr attr_of(bytes record)
@cython.locals(source=ByteReader)
cpdef uint64_t change_of(bytes record) except? 0
@cython.locals(source=ByteReader)
cdef ByteReader _opened(bytes record)
