# cython: language_level=3
"""C types of writes.py."""

cimport cython


cdef class FileWrites:
    cdef object _vfs, _options, _changes, _pages, _bypass, _privileges, _appending
    cdef dict _files
    cpdef bint write_now(self, handle, offset, buffer, drop_set_ids, unique) except -1
    cpdef failed(self, inode)
    cpdef begin_flush(self, handle)
