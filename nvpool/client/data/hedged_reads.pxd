# cython: language_level=3
"""C types of hedged_reads.py."""

cimport cython

from nvpool.client.data.read_queue cimport ReadQueue
from nvpool.rpc.reply_receivers cimport PayloadReceiver

cdef double _MEASURED_S


cdef class SentRead(PayloadReceiver):
    cdef public ReadQueue lane
    cdef public object jobs, again, end
    cdef public double sent_s, cost
    cdef public Py_ssize_t count
    cdef public bint is_hedged, is_watched
    cpdef begin(self, ReadQueue lane, Py_ssize_t count, double sent_s, again)


cdef class Hedging:
    cdef dict __dict__
    cdef public dict sent
    cdef public object timer
    cdef public double delay_s
    cpdef add(self, SentRead sent)
    @cython.locals(lane=ReadQueue)
    cpdef came_at(self, SentRead sent, double now_s)
    cpdef measure(self, ReadQueue lane, double took_s, bint good=*)
