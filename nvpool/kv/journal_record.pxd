# cython: language_level=3
"""C types of journal_record.py."""

cimport cython
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from nvpool.core cimport primitives
from nvpool.core.primitives cimport ByteReader, ByteWriter

cdef Py_ssize_t _HEAD_BYTES, _KEY_BYTES_MAX, _VALUE_BYTES_MAX, _LENGTH_PLACE, _GENERATION_PLACE, _LENGTH_MAX
cdef uint32_t _DELETED, _LOW
cdef ByteWriter _out


@cython.locals(pairs=list, changed=dict)
cpdef dict checked_effects(effects)
@cython.locals(count=Py_ssize_t)
cdef int _check(key, value) except -1
@cython.locals(out=ByteWriter, key=bytes, value=bytes)
cpdef bytes encode(uint64_t term, uint64_t generation, uint64_t sequence, dict effects)
@cython.locals(count=Py_ssize_t)
cdef bytes _sealed(ByteWriter out)


cdef class RecordReader:
    cdef readonly uint64_t term, generation, sequence
    cdef readonly Py_ssize_t start, end
    cdef uint32_t _count
    cdef bytes _raw
    cdef ByteReader _source
    cdef bint has_more(self)
    @cython.locals(source=ByteReader, start=Py_ssize_t, begin=uint64_t, length=Py_ssize_t, count=uint64_t)
    cdef bint next(self) except -1
    cdef skip(self)
    @cython.locals(source=ByteReader, found=dict, _=uint32_t, key=bytes, key_bytes=uint16_t, value_bytes=uint32_t)
    cdef dict effects(self)


@cython.locals(length=Py_ssize_t, reader=RecordReader, effects=dict)
cpdef decode(buffer, Py_ssize_t offset)
@cython.locals(reader=RecordReader, out=ByteWriter, records=list, effects=list, changed=dict, total=Py_ssize_t)
cpdef tuple adopt(bytes payload, uint64_t term, uint64_t generation, uint64_t sequence)
