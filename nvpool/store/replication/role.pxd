# cython: language_level=3
"""C types of role.py."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from nvpool.poolmap cimport file_layout
from nvpool.store.chunk_write cimport ChunkWrite, Placed
from nvpool.store.replication.chain_writes cimport ChainWrites
from nvpool.store.replication.peer_connections cimport ReplicaPeers


cdef class Replica:
    cdef object _store, _writer
    cdef uint32_t _target
    cdef public dict chain_epochs, places
    cdef public bint shares
    cdef readonly object losing
    cdef readonly ReplicaPeers peers
    cdef readonly ChainWrites writes
    cdef readonly dict pending
    @cython.locals(places=list)
    cpdef place(self, table, uint64_t inode, uint32_t index)
    cpdef bint is_shared(self, table, uint64_t inode, uint32_t index) except -1
    cpdef bint try_submit(self, ChunkWrite write, on_end) except -1
    cpdef uint64_t follow(self, offer, uint64_t link, ChunkWrite write, on_decided) except? 0
    cpdef uint64_t write_now(self, ChunkWrite write, Placed placed) except? 0
    @cython.locals(epochs=list)
    cdef uint64_t _epoch(self, table, uint64_t inode, uint32_t index) except? 0
