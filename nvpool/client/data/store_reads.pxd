# cython: language_level=3
"""C types of store_reads.py."""

cimport cython
from libc.stdint cimport uint32_t

from nvpool.client.data.hedged_reads cimport Hedging, SentRead
from nvpool.client.data.read_messages cimport ReadRequest, ReadResults
from nvpool.client.data.read_queue cimport Read, ReadBurst, ReadQueue
from nvpool.client.state.metadata_cache cimport OpenInode
from nvpool.core cimport primitives
from nvpool.core.primitives cimport ReceivedReply
from nvpool.rpc cimport reply_receivers
from nvpool.rpc.reply_receivers cimport ReplyBurst

cdef Py_ssize_t _GATHER_READS, _GATHER_BYTES, _ALONE_BYTES, _HALVED_READS, _PART_BYTES, _BURST, _IN_FLIGHT_MAX, _SMALL_PAYLOAD_BYTES
cdef uint32_t _METHOD


cdef class ReadMessage(SentRead):
    cdef StoreReads reads
    cdef ReadBurst burst
    cdef start(self, StoreReads reads, list jobs, ReadBurst burst)
    @cython.locals(reads=StoreReads)
    cpdef ReplyBurst receive_reply(self, ReceivedReply reply)


cdef class StoreReads:
    cdef readonly uint32_t flags
    cdef object _client, _loop, _dialer, _replicas, _short, _clock, _again
    cdef Hedging _hedging
    cdef bint _is_system
    cdef dict _counters
    cdef list _held
    cdef dict _collected
    cdef ReadRequest _request
    cdef ReadResults _results
    cpdef double now_s(self) except? -1
    cdef readonly double patience_s
    @cython.locals(file=OpenInode, lane=ReadQueue)
    cpdef begin(self, Read job, bint missed=*, bint collects=*, double now_s=*)
    cpdef complete_short_circuit(self, ReadQueue lane, Read job, found)
    cpdef hold(self)
    cpdef send_held(self)
    @cython.locals(collected=dict)
    cpdef send_collected(self)
    cpdef turn_over(self, ReadQueue lane)
    @cython.locals(jobs=list, size=Py_ssize_t, parts=Py_ssize_t, each=Py_ssize_t, at=Py_ssize_t)
    cdef _send_pending(self, ReadQueue lane)
    @cython.locals(connections=dict)
    cpdef send(self, ReadQueue lane, list jobs, bint collects=*, double now_s=*)
    @cython.locals(first=Read, job=Read, file=OpenInode, request=ReadRequest, size=Py_ssize_t, sent=ReadMessage,
                   others=Py_ssize_t, left_s=double, in_flight=dict, number=uint32_t, frame=bytes)
    cpdef submit(self, connection, ReadQueue lane, list jobs, bint collects=*, double now_s=*)
    @cython.locals(sent=ReadMessage, first=Read)
    cdef ReadMessage _message(self, ReadQueue lane, list jobs, double now_s)
    @cython.locals(frames=list)
    cdef _collect(self, connection, bytes frame, Py_ssize_t size, Py_ssize_t others)
    cpdef answered(self, ReadQueue lane, list jobs, reply, error)
    cdef _ended(self, SentRead sent, bint is_good)
    cpdef fail(self, SentRead sent, error)
    @cython.locals(lane=ReadQueue, jobs=list, results=ReadResults, job=Read, is_good=bint)
    cpdef complete(self, SentRead sent, ReceivedReply reply)
