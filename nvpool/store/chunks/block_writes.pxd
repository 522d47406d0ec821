# cython: language_level=3
"""C types of block_writes.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.store.chunk_write cimport ChunkWrite, Placed
from nvpool.store.chunks.index cimport Chunk, Index
from nvpool.store.chunks.location_leases cimport LocationLeases
from nvpool.store.chunks.partial_writes cimport Merger
from nvpool.store.disk cimport index_records
from nvpool.store.disk.allocator cimport Allocator, Transaction
from nvpool.store.disk.bad_blocks cimport Quarantine
from nvpool.store.disk.index_records cimport IndexSegment

cdef Py_ssize_t _BLOCK_BYTES, _BLOCK_MASK, _CHUNK_BYTES, _SEGMENT_BITS, _SEGMENT_BLOCKS, _SEGMENT_MASK


cdef class BlockWrites:
    cdef object _store, _kv, _device
    cdef Index _index
    cdef Allocator _allocator
    cdef Merger _merger
    cdef Quarantine _quarantine
    cdef LocationLeases _location_leases
    @cython.locals(chunk=Chunk)
    cpdef held(self, uint64_t inode, uint32_t index)
    cpdef changing(self, uint64_t inode, uint32_t index)
    @cython.locals(least=Py_ssize_t)
    cpdef bint places_first(self, Py_ssize_t offset, Py_ssize_t length) except -1
    @cython.locals(offset=Py_ssize_t, length=Py_ssize_t, chunk=Chunk, cut=uint64_t, known_cut=uint64_t, new_version=uint64_t,
                   first=Py_ssize_t, count=Py_ssize_t, place=uint64_t, sums=bytes, buffers=list, runs=list, old=list,
                   transaction=Transaction)
    cpdef uint64_t write_now(self, ChunkWrite write, uint64_t epoch, uint64_t version, Placed placed=*) except? 0
    @cython.locals(allocator=Allocator, transaction=Transaction, table=uint32_t, effects=list, key=bytes, record=bytes,
                   segment=IndexSegment)
    cdef uint64_t _name_first(self, Chunk chunk, ChunkWrite write, uint64_t version, uint64_t place, bytes sums, list buffers,
                              Placed placed) except? 0
    @cython.locals(chunk=Chunk, offset=Py_ssize_t, buffers=list, sums=bytes, count=Py_ssize_t, length=Py_ssize_t, grows=bint,
                   transaction=Transaction, runs=list, placed=Placed)
    cpdef Placed prepare_now(self, ChunkWrite write)
    cpdef drop_placed(self, Placed placed)
    cpdef _direct_write_ended(self, Transaction transaction, done)
    cpdef uint64_t next_version(self, Chunk chunk, record, uint64_t epoch, uint64_t given) except? 0
    @cython.locals(at=Py_ssize_t, blocks=Py_ssize_t, place=uint64_t)
    cpdef write_runs(self, runs, buffers)
    @cython.locals(block=Py_ssize_t, end=Py_ssize_t, number=Py_ssize_t, within=Py_ssize_t, blocks=Py_ssize_t, at=Py_ssize_t,
                   segments=list, segment=IndexSegment)
    cpdef list segments_at(self, Chunk chunk, Py_ssize_t first, places, bytes sums)
    @cython.locals(inode=uint64_t, index=uint32_t, effects=list, number=Py_ssize_t, segment=IndexSegment, key=bytes)
    cpdef apply_segments(self, Transaction transaction, Chunk chunk, list segments, head, overwritten, bint reclaims=*)
    cpdef apply(self, Transaction transaction, list effects, inode=*, indexes=*, bint reclaims=*)
