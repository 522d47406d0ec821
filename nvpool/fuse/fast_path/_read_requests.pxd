# cython: language_level=3, boundscheck=False, wraparound=False
"""Decoding of READ requests for _small_files."""

from cpython.bytearray cimport PyByteArray_AS_STRING
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
