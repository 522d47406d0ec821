# cython: language_level=3
"""C types of crash_journal.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.client.state.dirty_file cimport DirtyExtent, DirtyFile
from nvpool.shm.mount_records cimport FileRecords, WriteRecords


cdef class CrashJournal:
    cdef readonly object memory
    cdef readonly uint64_t last_number
    cdef FileRecords _files
    cdef WriteRecords _writes
    cdef bint _unstable
    cpdef bint has_room(self, Py_ssize_t length) except -1
    @cython.locals(number=uint64_t)
    cpdef tuple keep(self, DirtyFile written, int64_t offset, data, uint64_t unique, bint last)
    @cython.locals(record=tuple)
    cpdef drop(self, list records)
    cpdef begin(self, DirtyFile written)
    @cython.locals(error=uint32_t, met=uint32_t)
    cpdef note(self, DirtyFile written)
