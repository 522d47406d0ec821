# cython: language_level=3
"""C types of leases.py."""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from nvpool.core cimport primitives

cdef double _NEVER_S, _SHARE
cdef int64_t _NS_PER_MS


cdef class ShardWatch:
    cdef public object number, seen
    cdef public double until_s, linger_s, floor_s
    cdef public dict ended
    cdef public bint used, delegates


cdef class InodeLease:
    cdef readonly double until_s, since_s
    cdef readonly bytes grant
    cdef readonly ShardWatch watch
    cdef readonly uint64_t number
    cpdef InodeLease replaced(self, double until_s, bytes grant)


cdef class Leases:
    cdef object _clock, _watch_of
    cdef bint _is_system
    cdef public object on_end_all
    cdef public Py_ssize_t count_max
    cdef readonly dict by_inode
    cdef public uint64_t last_number
    cpdef double now_s(self) except? -1
    @cython.locals(wall_ns=int64_t)
    cpdef int64_t now_ms(self) except? -1
    cpdef InodeLease held(self, inode)
    @cython.locals(lease=InodeLease, watch=ShardWatch)
    cpdef InodeLease held_at(self, inode, double now_s)
    @cython.locals(lease=InodeLease, watch=ShardWatch, until_s=double)
    cpdef bint keeps_bytes(self, inode) except -1
    @cython.locals(leases=dict, before=InodeLease, lease=InodeLease, until_s=double)
    cpdef InodeLease take_at(self, ShardWatch watch, inode, uint64_t lease_ms, double sent_s, bytes grant, double now_s)
    @cython.locals(known=InodeLease, lease=InodeLease)
    cpdef keep_grant(self, inode, bytes grant)
    cpdef bint is_news(self, inode, double sent_s) except -1


@cython.locals(ended_s=double)
cdef bint _is_news(ShardWatch watch, inode, double sent_s) except -1
