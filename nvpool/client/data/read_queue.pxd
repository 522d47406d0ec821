# cython: language_level=3
"""C types of read_queue.py."""

cimport cython
from libc.stdint cimport uint32_t

from nvpool.client.state.metadata_cache cimport OpenInode
from nvpool.core.primitives cimport ReceivedReply
from nvpool.rpc.reply_receivers cimport ReplyBurst


cdef class ReadQueue:
    cdef public object target, endpoints, distance
    cdef public double shunned_s, took_s, measured_s
    cdef public list pending
    cdef public Py_ssize_t pending_bytes, in_flight
    cdef public bint scheduled


cdef class ReadBurst(ReplyBurst):
    cpdef one_came(self)


cdef class Read:
    cdef public OpenInode file
    cdef public object index, into, future, reason
    cdef public uint32_t offset, length
    cdef public double deadline_s
    cdef public Py_ssize_t tries
    cdef public bint verify, second, insisted
    cdef public tuple tried
    cdef public ReadBurst burst
    cpdef begin(self, OpenInode file, index, uint32_t offset, uint32_t length, double deadline_s)
    cpdef bint done(self) except -1
    cpdef set_result(self, blocks)
    cpdef set_exception(self, error)
    @cython.locals(file=OpenInode)
    cpdef take(self, ReceivedReply reply, Py_ssize_t first, Py_ssize_t length)


cdef ReadBurst _NO_BURST
