# cython: language_level=3, boundscheck=False, wraparound=False
"""How compiled reads of a mount take the kernel's request apart: what _plainreads and _farreads have in common."""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    REQUEST_BYTES = 80          # requests._READ_WHOLE
    OPCODE = 15                 # protocol.numbers.Op.READ
    PAGE = 4096
    LARGE_BYTES = 128 << 10

cdef struct Wanted:
    uint64_t unique, handle, offset
    uint32_t pid, size


cdef inline bint is_read(bytearray buffer, Py_ssize_t count, Wanted *wanted) noexcept:
    """Whether the `count` bytes in `buffer` are a READ of up to LARGE_BYTES, asked for the first time: then it is in `wanted`."""
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


cdef inline object read_at_random(dict files, ops, paged, const Wanted *wanted):
    """The open file that is read, where nothing of it is written here, nobody may have changed it, and it does not go on where
    the handle has read before; else None."""
    cdef PyObject *found = PyDict_GetItem(files, wanted.handle)
    cdef object opened, file, ahead
    if found is NULL:
        return None
    opened = <object>found
    file = opened.file
    if (not opened.readable or opened.closed or file.lost or file.untold or file.written is not None
            or ops.guards_pages and file.inode not in paged):
        return None
    ahead = opened.ahead
    return None if ahead.next == wanted.offset or ahead.units else opened
