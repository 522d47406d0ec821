# cython: language_level=3
"""Interface of _sent_reads.pyx: messages of compiled reads, which Hedging watches like all others."""

from nvpool.rpc.transports._frame cimport ReplyTaker


cdef class SentReads(ReplyTaker):
    """Compiled form of hedged_reads.SentRead.

    `jobs`: the reads on the slow path, once another replica is asked too; None before.
    """
    cdef readonly object lane
    cdef readonly list jobs
    cdef readonly double sent_s, cost
    cdef readonly Py_ssize_t count
    cdef public bint is_hedged
    cdef bint is_watched

    cdef int sent_to(self, lane, Py_ssize_t count, double now_s) except -1
    cdef int watch(self, hedging) except -1
    cdef int came(self, hedging, double now_s) except -1
