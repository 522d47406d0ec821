# cython: language_level=3
"""C types of cached_replies.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.client.state.leases cimport Leases
from nvpool.client.state.metadata_cache cimport MetadataCache, OpenInode
from nvpool.client.state.open_handles cimport OpenHandles
from nvpool.client.state.vfs_types cimport FileHandle
from nvpool.client.vfs.lookup_prefetch cimport LookupPrefetch
from nvpool.core cimport primitives
from nvpool.core.primitives cimport ByteReader, ByteWriter
from nvpool.fuse.protocol cimport reply_encoder
from nvpool.rpc.messages.meta_messages cimport Attr
from nvpool.shm.mount_records cimport HandleRecords

cdef uint32_t _LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE, _GETXATTR, _FLUSH, _CREATE
cdef Py_ssize_t _HEADER_BYTES, _GETATTR_BYTES, _FORGET_BYTES, _OPEN_BYTES, _RELEASE_BYTES, _GETXATTR_BYTES
cdef Py_ssize_t _SEEN_MAX, _SENT_CHANGES_MAX, _TOGETHER, _CLOSES_MAX
cdef uint64_t _ROOT, _FIRST
cdef unsigned char _DOT
cdef uint32_t _LEFT_OPEN, _BYPASS, _KEEP_CACHE, _NOFLUSH, _HAS_XATTRS, _ACL_FLAG
cdef bytes _CAPABILITY
cdef int _EAGAIN, _ENOENT, _ENODATA


cdef class CachedReplies:
    cdef object _path, _requests, _spent, _owners, _names, _pages, _notices, _xattrs, _published, _numbers
    cdef bytearray _buffer
    cdef list _times, _counts, _closes
    cdef tuple _takers
    cdef ByteReader _in
    cdef ByteWriter _out
    cdef Leases _leases
    cdef MetadataCache _cache
    cdef OpenHandles _handles
    cdef LookupPrefetch _prefetch
    cdef HandleRecords _records
    cdef dict _sent_changes, _withdrawn, _seen, _paged, _locked, _files
    cdef set _refused
    cdef double _fresh_s, _name_s, _absent_s
    cdef uint64_t _attr_s, _entry_s
    cdef uint32_t _attr_ns, _entry_ns
    cdef int _fd
    cdef bint _is_subtree, _squashes_root, _may_open, _keeps_names, _keeps_absent
    cdef readonly Py_ssize_t taken
    cdef uint32_t _maker
    cdef Py_ssize_t _turns
    @cython.locals(count=Py_ssize_t)
    cpdef Py_ssize_t next_request(self, Py_ssize_t most) except? -1
    @cython.locals(source=ByteReader, length=uint32_t, opcode=uint32_t, unique=uint64_t, node=uint64_t, uid=uint32_t,
                   gid=uint32_t, pid=uint32_t, extension_words=uint32_t, since_s=double, is_done=bint)
    cpdef bint take(self, Py_ssize_t count) except -1
    @cython.locals(since_s=double)
    cdef bint _take_read(self, Py_ssize_t count) except -1
    cdef _count(self, uint32_t opcode, double took_s)
    @cython.locals(code=int)
    cdef _send(self, uint64_t unique)
    cdef _send_status(self, uint64_t unique, int code)
    @cython.locals(file=OpenInode)
    cdef Attr _attr(self, inode, double now_s)
    @cython.locals(attr=Attr)
    cdef bint _getattr(self, uint64_t unique, uint64_t node) except -1
    @cython.locals(size=Py_ssize_t, name=bytes, now_s=double, attr=Attr, entry_s=uint64_t, entry_ns=uint32_t)
    cdef bint _lookup(self, uint64_t unique, uint64_t node, Py_ssize_t count) except -1
    @cython.locals(source=ByteReader, name=bytes, attr=Attr)
    cdef bint _getxattr(self, uint64_t unique, uint64_t node) except -1
    cdef bint _forget(self, uint64_t node) except -1
    @cython.locals(flags=uint32_t, handle=FileHandle, attr=Attr, is_kept=bint, opening=uint32_t)
    cdef bint _open(self, uint64_t unique, uint64_t node, uint32_t uid, uint32_t gid, uint32_t pid) except -1
    @cython.locals(serial=uint64_t)
    cdef _take_number(self, uint64_t unique, uint64_t node, uint32_t flags, uint32_t uid, uint32_t gid, uint32_t pid)
    @cython.locals(handle=FileHandle, file=OpenInode)
    cdef bint _is_flushed(self) except -1
    cdef _note_maker(self, uint32_t pid)
    cdef bint _defer_close(self, uint64_t unique, double since_s) except -1
    @cython.locals(closes=list)
    cpdef answer_closes(self)
    @cython.locals(source=ByteReader, handle=FileHandle)
    cdef bint _release(self, Py_ssize_t count) except -1
    @cython.locals(source=ByteReader, since_s=double, unique=uint64_t, handle=FileHandle)
    cpdef bint release_now(self, bytes request) except -1
