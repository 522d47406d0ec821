# cython: language_level=3
"""C types of chain_writes.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.rpc.messages.peer_messages cimport PeerWriteReply, PeerWriteRequest
from nvpool.store.chunk_write cimport ChunkWrite, Placed
from nvpool.store.replication.peer_connections cimport PendingForward, ReplicaPeers

cdef Py_ssize_t _LED_BYTES_MAX


cdef class Pending:
    cdef readonly ChunkWrite write
    cdef readonly uint64_t version, base
    cdef public object place, whole, deciders, waiter, on_end
    cdef public bint last, older, dropped
    cdef readonly bint is_decided
    cdef object _decided
    cdef readonly list listeners
    cdef public PendingForward sending, offered
    cdef public Placed placed
    cdef public Py_ssize_t led_bytes
    cpdef decided(self)
    cpdef listen(self, on_decided)
    @cython.locals(listeners=list)
    cpdef decide(self, outcome)


cdef class ChainWrites:
    cdef object _store, _writer, _clock, _place_of, _ask_map, _holds_lease, _repairs
    cdef ReplicaPeers _peers
    cdef uint32_t _target
    cdef dict _rebuilding
    cdef set _tasks
    cdef readonly dict pending, turns, cutting, links, refused_versions, counters
    cdef public Py_ssize_t led_bytes
    @cython.locals(name=tuple, size=Py_ssize_t, placed=Placed, version=uint64_t, above=uint64_t, pending=Pending)
    cpdef bint try_submit(self, ChunkWrite write, on_end) except -1
    @cython.locals(version=uint64_t, pending=Pending)
    cpdef uint64_t follow(self, offer, uint64_t link, ChunkWrite write, on_decided) except? 0
    @cython.locals(pending=Pending)
    cdef _held(self, tuple name)
    cdef Pending _begin(self, ChunkWrite write, uint64_t version, uint64_t base, place)
    cdef Placed _prepared_now(self, ChunkWrite write)
    cdef _start(self, Pending pending)
    cpdef _answered(self, Pending pending, PeerWriteReply reply, error)
    @cython.locals(version=uint64_t)
    cdef _commit_now(self, Pending pending)
    cpdef carry_on(self, Pending pending, outcome, fetch_from=*)
    cpdef _end(self, Pending pending, outcome)
    @cython.locals(offer=PeerWriteRequest, write=ChunkWrite)
    cdef PeerWriteRequest _offer_of(self, Pending pending, place)
    cdef uint64_t _write_now(self, ChunkWrite write, uint64_t version, Placed placed) except? 0
