# cython: language_level=3
"""C types of table.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.core cimport primitives

cdef uint64_t _MARK_METHOD, _MARK_UID, _MARK_GID
cdef int _CHANGE_TAG, _ONE_BYTE


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


@cython.locals(behind=Py_ssize_t, uid=uint64_t, gid=uint64_t, number=uint64_t, crc=uint64_t)
cpdef mark_of(method, request, bytes message)
@cython.locals(opens=dict)
cpdef open_inode(dict holders, Session session, inode)
