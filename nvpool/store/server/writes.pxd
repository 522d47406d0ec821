# cython: language_level=3
"""C types of writes.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.core cimport primitives
from nvpool.core.primitives cimport ByteReader, ByteWriter, RequestFrames
from nvpool.rpc.messages.peer_messages cimport PeerWriteReply, PeerWriteRequest
from nvpool.rpc.stats cimport ReplyStats
from nvpool.rpc.transports.frame_call cimport FrameCall
from nvpool.store.chunk_write cimport ChunkWrite, Placed
from nvpool.store.replication.role cimport Replica
from nvpool.store.server.io_stats cimport IoStats
from nvpool.store.server.map_state cimport MapState
from nvpool.store.server.serving_lease cimport ServingLease
from nvpool.store.server.verified_grants cimport VerifiedGrants
from nvpool.store.server.waiting_calls cimport WaitingCalls

cdef Py_ssize_t _BREATH_BYTES, _MESSAGE_MAX, _PAYLOAD_MAX, _IN_FLIGHT_MAX, _ENTRY_BYTES, _SINGLE_BYTES, _BLOCK_BYTES, _BLOCK_MASK
cdef uint32_t _WRITE_METHOD, _PEER_METHOD, _ALL_OF_BLOCKS, _MAY_WRITE, _SERVICE, _ENCRYPTED
cdef int _DONE, _WAIT, _OFFER
cdef ByteReader _in
cdef ByteWriter _out


cdef class WriteBatch:
    cdef readonly object call
    cdef readonly uint64_t epoch, session
    cdef readonly uint32_t target
    cdef readonly list rights
    cdef readonly ChunkWrite write
    cdef readonly object until
    cdef Writes _service
    cdef object _payload, _key
    cdef bytes _headers, _checksums, _wrapped_key
    cdef list _grants, _results
    cdef dict _refused
    cdef Placed _placed
    cdef bint _has_versions, _is_decoded
    cdef uint64_t _inode, _cut, _sequence, _version
    cdef uint32_t _index, _slot, _grant, _flags, _status
    cdef Py_ssize_t _count, _number, _begin, _piece, _pieces, _offset, _length, _placed_for, _led_for
    cpdef begin(self, Writes service, call, bytes message, payload)
    @cython.locals(source=ByteReader)
    cdef bint _decode_single(self, bytes message) except -1
    cpdef check_entries(self)
    cpdef list names(self)
    @cython.locals(byte_count=Py_ssize_t, piece_count=Py_ssize_t, number=Py_ssize_t)
    cpdef open(self, list rights)
    @cython.locals(source=ByteReader, at=Py_ssize_t)
    cdef int _decode_entry(self, Py_ssize_t number) except -1
    @cython.locals(written=Py_ssize_t, status=uint32_t, version=uint64_t, state=int)
    cpdef int go_on(self) except -1
    @cython.locals(service=Writes, replica=Replica, inode=uint64_t, index=uint32_t, number=Py_ssize_t, table=uint32_t, offset=Py_ssize_t,
                   length=Py_ssize_t, is_shared=bint, checksums=bytes, write=ChunkWrite)
    cdef int _step(self) except -1
    @cython.locals(rights=uint32_t, cut=uint64_t, session=uint64_t, table=uint32_t)
    cdef uint32_t _check_grant(self) except? 0
    cdef uint32_t _refuse(self, error) except? 0
    cdef int _end_entry(self, uint32_t status, uint64_t version) except -1
    cpdef drop_placed(self)
    cpdef refuse_rest(self, uint32_t code)
    @cython.locals(results=bytes)
    cpdef bytes reply(self, uint64_t epoch)
    cpdef led(self, uint64_t version)
    cpdef ended(self, uint64_t version)


cdef class Writes:
    cdef readonly object store, writer, volume_key
    cdef readonly Replica replica
    cdef uint32_t _target
    cdef MapState _map_state
    cdef VerifiedGrants _verified_grants
    cdef WaitingCalls _waiting
    cdef ServingLease _serving_lease
    cdef IoStats _use
    cdef object _callers, _clock, _check_epoch, _is_node, _peer, _refused_methods
    cdef bint _is_system
    cdef RequestFrames _frames
    @cython.locals(work=WriteBatch, rights=list, found=list, now_ms=int64_t, raw=bytes)
    cpdef write(self, call)
    @cython.locals(state=int)
    cdef _go_on(self, WriteBatch work)
    @cython.locals(is_begun=bint)
    cdef bint _offer(self, WriteBatch work) except -1
    cpdef offer_ended(self, WriteBatch work, uint64_t version)
    cdef _answer(self, WriteBatch work)
    cdef double _now_s(self) except? -1
    @cython.locals(request=PeerWriteRequest, version=uint64_t, write=ChunkWrite)
    cpdef peer_write(self, call)
    cpdef _peer_decided(self, call, outcome)
    @cython.locals(reply=PeerWriteReply)
    cdef _peer_committed(self, call, uint64_t version)
    cdef _refuse_peer(self, call, error)
    @cython.locals(frames=RequestFrames, message=bytes, method=uint32_t, number=uint32_t, frame_bytes=Py_ssize_t, call=FrameCall, now_s=double)
    cpdef Py_ssize_t answer(self, bytearray buffer, Py_ssize_t at, Py_ssize_t end, dict in_work, ReplyStats reply_stats, list out,
                            side) except -1
