# cython: language_level=3
"""C types of handle_writes.py."""

cimport cython
from libc.stdint cimport uint64_t

from nvpool.client.write.writeback cimport Writer


cdef class HandleWrites:
    cdef Writer _writer
    cdef object _changed, _rooms, _flush_writes, _lock_owners, _late_closes
    @cython.locals(length=Py_ssize_t)
    cpdef bint write_now(self, handle, offset, buffer, uint64_t unique=*) except -1
    cpdef bint is_flushed(self, handle) except -1
    cpdef begin_flush(self, handle, on_end)
