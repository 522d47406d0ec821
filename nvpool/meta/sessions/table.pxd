# cython: language_level=3
"""C types of table.py."""

from libc.stdint cimport uint64_t


cdef class Slot:
    cdef public uint64_t sequence, waits_for, opened
    cdef public bytes answer
    cdef public object mark, error
    cdef public bint restored, awaited
    cpdef uint64_t take_awaited(self)


cdef class Session:
    cdef public object number, client, opened_ns, expires_s, identity, member, peer, opens_max, owner
    cdef public bytes secret
    cdef public bint watches
    cdef public list slots
    cdef public dict opens, brought
