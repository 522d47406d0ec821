# cython: language_level=3
"""C types of reads.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.blockio._uring cimport Ring
from nvpool.core cimport primitives
from nvpool.core.primitives cimport ByteReader, ByteWriter, PayloadFrame, RequestFrames
from nvpool.rpc.stats cimport ReplyStats
from nvpool.store.chunks.index cimport Chunk, Index
from nvpool.store.chunks.read_batch cimport BlockBatchReader
from nvpool.store.disk.bad_blocks cimport Quarantine
from nvpool.store.disk.index_records cimport IndexSegment
from nvpool.store.server.io_stats cimport IoStats
from nvpool.store.server.serving_lease cimport ServingLease
from nvpool.store.server.writes cimport Writes

cdef Py_ssize_t _BLOCKS_MAX, _LARGE_BLOCKS_MAX, _OUT_BYTES_MAX, _FRAME_BYTES, _REQUEST_BYTES, _REAP_MAX, _IN_FLIGHT_MAX, _RING_ENTRIES
cdef uint32_t _BLOCK_MASK, _SEGMENT_BITS, _SEGMENT_MASK, _CLIENT_CACHES, _UNCHECKED, _READ, _SERVICE
cdef uint64_t _SKEW_MS


cdef class ColdRead:
    cdef readonly object method, side
    cdef readonly bint cancelled
    cdef readonly Py_ssize_t byte_count
    cdef readonly double since_s
    cdef object reading
    cdef PayloadFrame frame
    cdef bytes message
    cdef uint64_t epoch
    cdef uint32_t number, deadline_ms
    cdef Py_ssize_t length
    cdef bint is_direct
    cdef begin(self, side, PayloadFrame frame, bytes message, uint32_t number, uint32_t deadline_ms, Py_ssize_t length,
               uint64_t epoch, double since_s, bint is_direct)


cdef class Reads:
    cdef public uint64_t epoch
    cdef public bint open
    cdef public Writes writes
    cdef object _store, _readings, _device, _clock, _direct_reads, _loop
    cdef dict _grants, _pending, _waits
    cdef Index _index
    cdef Quarantine _quarantine
    cdef BlockBatchReader _reader
    cdef ServingLease _serving_lease
    cdef IoStats _use
    cdef Ring _ring
    cdef RequestFrames _frames
    cdef ByteReader _source
    cdef ByteWriter _message
    cdef uint32_t _target
    cdef int _fd
    cdef bint _is_system, _has_ring, _is_sent_again, _is_cold
    cdef Py_ssize_t _inside, _prepared, _length
    cdef double _now_s(self) except? -1
    @cython.locals(at=Py_ssize_t, total=Py_ssize_t, count=Py_ssize_t, length=Py_ssize_t, since_s=double, message=bytes,
                   frame=PayloadFrame)
    cpdef Py_ssize_t answer(self, bytearray buffer, Py_ssize_t end, dict in_work, ReplyStats reply_stats, list out, side=*) except -1
    cdef _count(self, ReplyStats reply_stats, Py_ssize_t length, double since_s)
    @cython.locals(frames=RequestFrames, source=ByteReader, said=ByteWriter, frame=PayloadFrame, raw=bytes, inode=uint64_t,
                   index=uint32_t, offset=uint32_t, length=uint32_t, place=uint32_t, flags=uint32_t, most=Py_ssize_t, rights=uint32_t,
                   owner=uint64_t,
                   ends_ms=uint64_t, now_ms=uint64_t, name=tuple, chunk=Chunk, segment=IndexSegment, block=Py_ssize_t,
                   count=Py_ssize_t, number=Py_ssize_t, within=Py_ssize_t, begin=uint64_t, may_wait=bint, is_cold=bint, fd=int)
    cdef object _reply(self, bytes message, dict in_work, side, double since_s)
    cdef bint _has_opened(self) except -1
    @cython.locals(one=ColdRead)
    cdef ColdRead _begin(self, dict in_work, side, bytes message, PayloadFrame frame, int fd, uint64_t begin, double since_s)
    cpdef submit(self)
    @cython.locals(found=list, sides=list, total=Py_ssize_t, one=ColdRead)
    cpdef reap(self)
    @cython.locals(is_whole=bint)
    cdef _end(self, ColdRead one, Py_ssize_t result, list sides)
    @cython.locals(left_s=double)
    cdef _leave(self, ColdRead one)
    @cython.locals(one=ColdRead)
    cpdef give_up(self)
    cpdef close(self)


cdef _flush(list sides)
