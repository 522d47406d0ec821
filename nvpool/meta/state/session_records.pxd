# cython: language_level=3
"""C types of session_records.py."""

from libc.stdint cimport uint64_t

from nvpool.core.primitives cimport ByteWriter

cdef ByteWriter _out

cpdef bytes encode_slot(uint64_t sequence, uint64_t waits_for, bytes answer, mark=*)
