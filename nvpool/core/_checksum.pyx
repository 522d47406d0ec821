# cython: language_level=3, boundscheck=False, wraparound=False
"""CRC32C of each block of a buffer, computed with the x86-64 instruction (SSE 4.2).

Only `checksum.py` imports this module.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint32_t


cdef extern from "_block_sums.h":
    int has_instruction()
    void sum_blocks(const unsigned char *data, size_t count, uint32_t *sums)
    const size_t BLOCK


def is_of_use():
    """Return whether this processor has the CRC32C instruction."""
    return bool(has_instruction())


def block_checksums(buffer):
    """Return what `checksum.block_checksums` returns; call only if `is_of_use()` is true."""
    cdef Py_buffer view
    cdef size_t count
    cdef bytes sums
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if view.len % BLOCK:
            raise ValueError(f"{view.len} bytes are not whole blocks")
        count = view.len // BLOCK
        sums = PyBytes_FromStringAndSize(NULL, 4 * count)
        sum_blocks(<const unsigned char *>view.buf, count, <uint32_t *>PyBytes_AS_STRING(sums))
        return sums
    finally:
        PyBuffer_Release(&view)
