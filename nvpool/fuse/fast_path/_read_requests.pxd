# cython: language_level=3, boundscheck=False, wraparound=False
"""Decoding of READ requests, common to the compiled reads _local_reads and _small_files."""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    REQUEST_BYTES = 80          # requests._READ_WHOLE
    OPCODE = 15                 # protocol.constants.Op.READ
    PAGE = 4096
    LARGE_BYTES = 128 << 10

cdef struct Wanted:
    uint64_t unique, handle, offset
    uint32_t pid, size


cdef inline bint is_read(bytearray buffer, Py_ssize_t count, Wanted *wanted) noexcept:
    """Decode a READ of up to LARGE_BYTES from `count` bytes in `buffer`; False: they are something else.

    A request that the kernel has resent is declined too.
    """
    cdef const uint8_t *at = <const uint8_t *>PyByteArray_AS_STRING(buffer)
    cdef uint32_t length, opcode
    if count != REQUEST_BYTES:
        return False
    memcpy(&length, at, 4)
    memcpy(&opcode, at + 4, 4)
    memcpy(&wanted.unique, at + 8, 8)
    memcpy(&wanted.pid, at + 32, 4)
    memcpy(&wanted.handle, at + 40, 8)
    memcpy(&wanted.offset, at + 48, 8)
    memcpy(&wanted.size, at + 56, 4)
    return (length == REQUEST_BYTES and opcode == OPCODE and not wanted.unique >> 63 and 0 < wanted.size <= LARGE_BYTES
            and not wanted.offset >> 62)


cdef inline object read_at_random(dict files, pages, paged, const Wanted *wanted):
    """The open file if this is a random read of it that the fast path may answer; else None.

    No data of the file may be written here, no other client may have changed it, and the read must not
    continue where the handle has read before.
    """
    cdef PyObject *found = PyDict_GetItem(files, wanted.handle)
    cdef object opened, file, ahead
    if found is NULL:
        return None
    opened = <object>found
    file = opened.file
    if (not opened.readable or opened.closed or file.lost or file.unreported or file.written is not None
            or pages.guards_pages and file.inode not in paged):
        return None
    ahead = opened.ahead
    return None if ahead.next == wanted.offset or ahead.units else opened
