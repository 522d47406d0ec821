# cython: language_level=3, boundscheck=False, wraparound=False
"""CRC32C of each block of a buffer, with the instruction of x86-64 (SSE 4.2). See checksum.py, which uses it and no one else."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint32_t


cdef extern from "_block_sums.h":
    int has_instruction()
    void sum_blocks(const unsigned char *data, size_t count, uint32_t *sums)
    const size_t BLOCK


def is_of_use():
    """Whether this processor has the instruction."""
    return bool(has_instruction())


def block_checksums(buffer):
    """As checksum.block_checksums. `is_of_use` must have said yes."""
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
