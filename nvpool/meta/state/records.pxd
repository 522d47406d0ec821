# cython: language_level=3
"""C types of records.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.core.primitives cimport ByteReader, ByteWriter

cdef ByteReader _in
cdef ByteWriter _out
cdef uint64_t _SCATTER_1, _SCATTER_2, _COUNTERS, _SIZE_MAX
cdef uint32_t _VERSION, _KNOWN, _RESERVED, _KIND_SET, _IS_TOUCHED
cdef uint32_t _S_IFMT, _S_IFDIR, _S_IFREG, _S_IFLNK
cdef uint32_t _SIZE, _OWNER, _LINKS, _CTIME, _ATIME, _BIRTH
cdef uint32_t _CUT, _BLOCKS, _RDEV, _LAYOUT, _FLAGS, _PARENT, _CHANGE, _TOUCHED, _PUNCHES, _VOLUME


cdef class Inode:
    cdef public uint64_t number, blocks, change, cut, parent, punches, volume, reserved
    cdef public int64_t size, links, atime_ns, mtime_ns, ctime_ns, birth_ns
    cdef public uint32_t mode, uid, gid, rdev, table, chunk_bits, flags
    cdef public bytes target


@cython.locals(x=uint64_t)
cpdef bytes numbered_key(uint32_t kind, uint64_t inode)
cpdef bytes inode_key(uint64_t inode)
cpdef bytes dentry_key(uint64_t partition, uint64_t directory, bytes name_hash, bytes name)
cpdef bytes slot_key(uint64_t session, uint32_t slot)
@cython.locals(out=ByteWriter, head=uint32_t, flags=uint32_t, uid=uint32_t, gid=uint32_t, mtime=int64_t, ctime=int64_t,
               atime=int64_t, birth=int64_t, size=int64_t, since=uint64_t, usual=uint64_t, kept=uint64_t)
cpdef bytes encode_inode(Inode i)
@cython.locals(source=ByteReader, i=Inode, head=uint32_t, size=uint32_t, owner=uint32_t, ctime=uint32_t, atime=uint32_t,
               birth=uint32_t, kind=uint32_t, mtime=int64_t, length=uint64_t, target=bytes)
cpdef Inode decode_inode(uint64_t number, bytes raw)
@cython.locals(counter=uint64_t, bits=int)
cpdef bytes encode_dentry(uint64_t partition, uint64_t inode, uint32_t kind)
@cython.locals(source=ByteReader, count=Py_ssize_t, head=uint32_t, number=uint64_t)
cpdef uint64_t inode_of_dentry(uint64_t partition, bytes raw) except? 0
cpdef bytes encode_counts(uint64_t inodes)
