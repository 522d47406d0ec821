# cython: language_level=3
"""C types of writeback.py."""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from nvpool.client.state.dirty_file cimport DirtyExtent, DirtyFile, kept
from nvpool.client.write.sender cimport WriteSender

cdef int64_t _BLOCK, _TAIL


cdef class Writer(WriteSender):
    cdef object _report
    cdef readonly dict files
    cdef int64_t _held_max
    @cython.locals(written=DirtyFile)
    cpdef bint write_now(self, file, int64_t offset, buffer, uint64_t unique=*) except -1
    cdef bint _has_room(self, int64_t length) except -1
    @cython.locals(written=DirtyFile)
    cdef DirtyFile _written(self, file)
    @cython.locals(length=int64_t, now_s=double, bits=int, end=int64_t, begins=bint, ready=bint, place=int64_t, border=int64_t)
    cdef _put(self, DirtyFile written, int64_t offset, data, uint64_t unique=*)
    @cython.locals(segment=DirtyExtent)
    cdef _begin_with(self, DirtyFile written, int64_t end, data, double now_s, uint64_t unique)
    @cython.locals(length=int64_t, end=int64_t, segments=list, last=DirtyExtent, segment=DirtyExtent)
    cdef bint _put_unit(self, DirtyFile written, int64_t unit, int64_t start, data, double now_s, record) except -1
