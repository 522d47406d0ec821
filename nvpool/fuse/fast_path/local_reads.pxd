# cython: language_level=3
"""C types of local_reads.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.blockio._uring cimport Ring
from nvpool.client.data.local_drive cimport BlockLocations, LocalDrive
from nvpool.client.data.store_reads cimport StoreReads
from nvpool.client.state.metadata_cache cimport OpenInode
from nvpool.core cimport primitives
from nvpool.core.primitives cimport BlockMemory, ReceivedReply
from nvpool.fuse.fast_path.kernel_reads cimport KernelRead, KernelReads

cdef Py_ssize_t _RING_ENTRIES, _SPARES_MAX, _BURST_MAX, _REAP_MAX, _REAP_BYTES
cdef uint32_t _BLOCK_BYTES, _LARGE_BYTES, _DIRECT_BYTES
cdef int _LATE, _SEEN_SHIFT
cdef uint64_t _FIBONACCI, _WORD


cdef class DriveRead(KernelRead):
    cdef LocalReads local
    cdef BlockMemory memory
    cdef BlockLocations located
    cdef uint64_t handle, place
    cdef bint is_direct
    cpdef bint cancel(self) except -1
    cdef wait(self, LocalReads local, BlockMemory memory, BlockLocations located, uint64_t handle, uint64_t place, bint is_direct)


cdef class LocalReads:
    cdef KernelReads reads
    cdef StoreReads _stores
    cdef readonly object short_circuit
    cdef dict _counters, _waits
    cdef readonly Py_ssize_t inside
    cdef Py_ssize_t _prepared
    cdef bint _is_cold, _is_sent_again
    cdef list _small, _large
    cdef object _seen, _loop
    cdef ReceivedReply _blocks
    cdef Ring _ring
    @cython.locals(source=LocalDrive, first=uint32_t, count=uint32_t, place=uint64_t, begin=uint64_t, is_cold=bint, is_direct=bint,
                   pages=int64_t, memory=BlockMemory, blocks=ReceivedReply, wrong=int, reads=KernelReads, file=OpenInode, one=DriveRead)
    cdef bint begin(self, BlockLocations located, uint64_t unique, uint32_t pid, uint64_t handle, uint64_t offset, uint32_t size,
                    uint32_t within, uint32_t skip, uint32_t span) except -1
    @cython.locals(mixed=uint64_t, tag=uint32_t)
    cdef bint _was_read(self, uint64_t key) except -1
    cpdef submit(self)
    @cython.locals(count=Py_ssize_t, total=Py_ssize_t, one=DriveRead, found=list, result=Py_ssize_t)
    cpdef Py_ssize_t reap(self) except -1
    @cython.locals(located=BlockLocations, wrong=int, blocks=ReceivedReply)
    cdef _end(self, DriveRead one, Py_ssize_t result)
    cdef forget(self, DriveRead one)
    cdef give_up(self, DriveRead one, int wrong)
    @cython.locals(spares=list)
    cdef BlockMemory _spare(self, uint32_t span)
    @cython.locals(spares=list)
    cdef _give_back(self, BlockMemory memory)
