# cython: language_level=3
"""C types of read_batch.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.core.primitives cimport ByteReader, ByteWriter
from nvpool.store.chunks.index cimport Chunk, Index
from nvpool.store.disk.bad_blocks cimport Quarantine
from nvpool.store.disk.index_records cimport IndexSegment

cdef Py_ssize_t _BLOCK_MASK, _CHUNK_BYTES, _READ_BYTES, _BATCH_BYTES, _TOGETHER_MIN
cdef uint32_t _CLIENT_CACHES, _UNCHECKED, _STALE_GRANT, _SEGMENT_BITS, _SEGMENT_MASK


cdef class BlockBatchReader:
    cdef Index _index
    cdef object _device, _readings
    cdef Quarantine _quarantine
    cdef ByteReader _source
    cdef ByteWriter _results, _sums
    cdef public int64_t read_bytes, read_count, missed_count
    @cython.locals(catalog=Index, source=ByteReader, results=ByteWriter, sums=ByteWriter, offsets=list, lengths=list, positions=list,
                   starts=list, checked=list, zeros=list, bad_chunks=set, flag=uint32_t, count=Py_ssize_t, owner_count=Py_ssize_t,
                   at=Py_ssize_t, holes=Py_ssize_t, given=Py_ssize_t, owner=uint64_t, is_of_all=bint, is_of_none=bint, looked_up=bint,
                   client_caches=bint, chunk=Chunk, number=Py_ssize_t, inode=uint64_t, which=uint64_t, offset=Py_ssize_t,
                   length=Py_ssize_t, grant=Py_ssize_t, flags=uint32_t, block=Py_ssize_t, blocks=Py_ssize_t, segment=IndexSegment,
                   place=uint64_t, found_sums=bytes)
    cpdef begin(self, bytes reads, owners, bint verify, room=*)
    cdef int _refuse(self, uint32_t code) except -1
    @cython.locals(index=Index, segment=IndexSegment, end=Py_ssize_t, within=Py_ssize_t, wanted=Py_ssize_t, have=Py_ssize_t, runs=list,
                   sums=list)
    cdef tuple _blocks(self, Chunk chunk, Py_ssize_t block, Py_ssize_t count, Py_ssize_t at, list offsets, list lengths,
                       list positions, list zeros)
    cpdef complete(self, batch, work)
