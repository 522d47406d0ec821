# cython: language_level=3
"""C types of dirty_file.py."""

cimport cython
from libc.stdint cimport int64_t


cdef class DirtyExtent:
    cdef public int64_t start, end, number
    cdef public list parts, records
    cdef public double born_s
    cdef public bint due


cdef class UnfairLock:
    cdef public bint taken
    cdef public list waiting
    cpdef bint take(self) except -1
    cpdef release(self)


cdef class DirtyFile:
    cdef public object file, error, met, changed, flushing, appended
    cdef public int unit_bits
    cdef public dict dirty, sending
    cdef public int64_t end, stored_end, held, stored_bytes, entry
    cdef public tuple ahead
    cdef public bint wrote, begun
    cdef public double wrote_s
    cdef public UnfairLock reporting
    cdef public int paused
    @cython.locals(found=int64_t, segment=DirtyExtent)
    cpdef find_end(self)
    @cython.locals(found=int64_t, end=int64_t)
    cpdef int64_t stored_up_to(self) except -1
    cpdef has_stored(self, DirtyExtent segment, int64_t end)
    @cython.locals(segments=list, count=Py_ssize_t)
    cdef bint _has_several_sending(self) except -1


cpdef kept(data, bint stays=*)
