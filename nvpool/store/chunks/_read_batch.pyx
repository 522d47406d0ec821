# cython: language_level=3, boundscheck=False, wraparound=False
"""Find the blocks of many reads without Python in between. The loop in read_batch.py is the reference implementation."""

from cpython cimport array
import array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from nvpool.store.chunks.api import ALL_INODES, READ_BATCH_BYTES_MAX

cdef extern from *:
    """
    #include <stdint.h>
    #if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "headers of reads are little-endian; use the Python implementation"
    #endif
    struct read_entry { uint64_t inode; uint32_t chunk, offset, length; uint16_t grant, flags; };
    struct read_result { uint16_t status, flags; uint32_t length; uint64_t version; };
    """
    struct read_entry:
        uint64_t inode
        uint32_t chunk, offset, length
        uint16_t grant, flags
    struct read_result:
        uint16_t status, flags
        uint32_t length
        uint64_t version

cdef object all_inodes = ALL_INODES
cdef Py_ssize_t bytes_max = READ_BATCH_BYTES_MAX


def find(reads, Py_ssize_t number, owners, dict young, bytearray results, uint16_t flags, Py_ssize_t at, list offsets, list lengths,
         list positions, list crcs, list starts):
    """Of the packed `reads` from that number on do those of a chunk that is known, in one run on the drive and without a hole:
    (number of the first that is not, where the next block goes)."""
    cdef Py_buffer view
    cdef read_entry entry
    cdef read_result result
    cdef Py_ssize_t count, block, within, blocks, given = -1, held = len(owners)
    cdef uint64_t owner = 0, disk, known_inode = 0
    cdef uint32_t known_chunk = 0
    cdef array.array places
    cdef bytes sums
    cdef bint of_all = False
    cdef object whose, chunk = None, segment
    cdef list segments = None
    cdef PyObject *found
    result.status = 0
    PyObject_GetBuffer(reads, &view, PyBUF_SIMPLE)
    try:
        count = view.len // <Py_ssize_t>sizeof(read_entry)
        if number < 0 or PyByteArray_GET_SIZE(results) < count * <Py_ssize_t>sizeof(read_result):
            raise ValueError("results do not fit reads")
        while number < count:
            memcpy(&entry, <char *>view.buf + number * sizeof(read_entry), sizeof(read_entry))
            if entry.grant != given:
                if entry.grant >= held:
                    break
                whose = owners[entry.grant]
                of_all = whose == all_inodes
                if whose < 0 and not of_all:
                    break
                owner = 0 if of_all else whose
                given = entry.grant
            if owner != entry.inode and not of_all:
                break
            if (entry.offset | entry.length) & 4095 or not entry.length or at + entry.length > bytes_max:
                break
            if chunk is None or entry.inode != known_inode or entry.chunk != known_chunk:
                found = PyDict_GetItem(young, (entry.inode, entry.chunk))
                if found is NULL:
                    break
                chunk = <object>found
                segments = chunk.segments
                result.version = chunk.version
                known_inode, known_chunk = entry.inode, entry.chunk
            block, blocks = entry.offset >> 12, entry.length >> 12
            within = block & 63
            block >>= 6
            if block >= len(segments):
                break
            segment = segments[block]
            if segment is None:
                break
            places = segment.disk
            sums = segment.crcs
            if within + blocks > len(places) or (within + blocks) * 4 > PyBytes_GET_SIZE(sums) or places.ob_descr.itemsize != 8:
                break
            disk = places.data.as_ulonglongs[within]
            if not disk or blocks > 1 and not segment.base:
                break
            result.flags, result.length = flags, entry.length
            memcpy(PyByteArray_AS_STRING(results) + number * sizeof(read_result), &result, sizeof(read_result))
            starts.append(len(offsets))
            offsets.append(disk << 12)
            lengths.append(entry.length)
            positions.append(at)
            crcs.append(PyBytes_FromStringAndSize(PyBytes_AS_STRING(sums) + within * 4, blocks * 4))
            at += entry.length
            number += 1
    finally:
        PyBuffer_Release(&view)
    return number, at
