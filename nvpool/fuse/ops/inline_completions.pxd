# cython: language_level=3
"""C types of inline_completions.py: of the changes whose result is success or an error."""


cdef class PendingChange:
    cdef public object begun, on_end
    cdef object _changes
    cpdef ended(self, _, error)


cdef class SubmittedFlush(PendingChange):
    cdef object _on_failed, _inode
    cpdef ended(self, _, error)


cdef class SubmittedUnlink(PendingChange):
    cdef object _names, _directory
    cpdef ended(self, _, error)
