# cython: language_level=3
"""C types of peer_connections.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.core cimport primitives
from nvpool.rpc.messages.peer_messages cimport PeerWriteReply, PeerWriteRequest
from nvpool.rpc.reply_receivers cimport ReplyBurst, ReplyReceiver
from nvpool.rpc.transports cimport request_submission
from nvpool.store.chunk_write cimport ChunkWrite

cdef Py_ssize_t _ON_WAY_MAX, _ON_WAY_BYTES, _BLOCK_MASK, _CHUNK_BYTES, _SMALL_BYTES
cdef uint32_t _HOP_MAX
cdef double _CALL_S
cdef int64_t _RENEWED_MS, _LIFE_MS
cdef ReplyBurst _BURST


cdef class PendingForward(ReplyReceiver):
    cdef readonly SuccessorQueue way
    cdef readonly PeerWriteRequest request
    cdef readonly object payload, on_done
    cdef public object connection
    cdef public uint32_t number
    cdef public bint ended
    cdef ReplicaPeers _peers
    cpdef ReplyBurst receive(self, bytes message)
    cpdef give_up(self)


cdef class SuccessorQueue:
    cdef readonly uint32_t target
    cdef readonly object waiting
    cdef public Py_ssize_t byte_count, count


@cython.locals(length=Py_ssize_t, pieces=Py_ssize_t, offset=Py_ssize_t, write=ChunkWrite)
cpdef tuple peer_write(PeerWriteRequest request, payload, key=*)


cdef class ReplicaPeers:
    cdef object _dialer, _clock, _secret, _map
    cdef uint32_t _target
    cdef uint64_t _process
    cdef bint _is_system
    cdef dict _ways, _links
    cdef set _tasks
    cdef bytes _authority
    cdef int64_t _authority_ends_ms
    @cython.locals(key=tuple, way=SuccessorQueue, sending=PendingForward)
    cpdef PendingForward write(self, uint32_t to, uint32_t hop, PeerWriteRequest request, payload, on_done)
    cdef _release(self, SuccessorQueue way, Py_ssize_t byte_count)
    cpdef give_up(self, PendingForward sending)
    cdef bint _has_room(self, SuccessorQueue way, Py_ssize_t byte_count) except -1
    cdef _pump(self, SuccessorQueue way)
    cdef _start(self, SuccessorQueue way, PendingForward sending)
    @cython.locals(request=PeerWriteRequest, number=uint64_t, now_s=double, message=bytes)
    cdef _send(self, PendingForward sending, connection)
    cpdef end(self, PendingForward sending, PeerWriteReply answer, error)
    @cython.locals(now_ms=int64_t)
    cpdef bytes authority(self)
