# cython: language_level=3
"""C types of shard_session.py."""

cimport cython
from libc.stdint cimport uint64_t

from nvpool.client.state.leases cimport ShardWatch

cdef int _COUNTER_BITS


cdef class ShardSession:
    cdef readonly object shard
    cdef public uint64_t session
    cdef public bytes secret
    cdef public double lease_s
    cdef public object incarnation, met, meeting
    cdef public object slots, waiting
    cdef public object generation
    cdef public dict open
    cdef public bint unnamed
    cdef public list released, leaving
    cdef public bytes held
    cdef public dict doubts
    cdef public object opening, renewal, releasing
    cdef public ShardWatch watch
    cdef public object watching
    cdef public dict unreported
    cdef public object reporting, report_now
    cdef public Py_ssize_t record
    cdef public object earlier
    cdef public dict arrived
    cdef public object naming
    cdef public Py_ssize_t slot_count
    cdef public object taken_up
    cdef public dict early
    cdef public list given_up
    @cython.locals(opens=dict)
    cpdef add_open(self, inode)
    @cython.locals(unreported=dict)
    cpdef add_unreported_open(self, inode)
    @cython.locals(opens=dict, left=Py_ssize_t, unreported=Py_ssize_t)
    cpdef Py_ssize_t remove_opens(self, inode, Py_ssize_t count) except -1


cdef class ShardSessions:
    cdef object _view, _map
    cdef tuple _shard_of_partition
    cdef readonly dict by_shard
    cpdef ShardSession of(self, uint64_t inode)
    @cython.locals(state=ShardSession)
    cpdef ShardSession at(self, shard)
