# cython: language_level=3
"""C types of reply_encoder.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.core.primitives cimport ByteWriter
from nvpool.rpc.messages.meta_messages cimport Attr

cdef uint32_t _HEADER_BYTES, _BLOCK_BYTES, _ATTR_REPLY_BYTES, _ENTRY_REPLY_BYTES, _OPEN_REPLY_BYTES, _CREATE_REPLY_BYTES
cdef int64_t _SECOND_NS, _FAILURE_MASK
cdef ByteWriter _out


cdef status(ByteWriter out, uint64_t unique, int64_t code)
cdef attributes(ByteWriter out, uint64_t unique, Attr attr, uint64_t attr_s, uint32_t attr_ns)
cdef entry(ByteWriter out, uint64_t unique, Attr attr, uint64_t entry_s, uint32_t entry_ns, uint64_t attr_s, uint32_t attr_ns)
cdef opened(ByteWriter out, uint64_t unique, uint64_t handle, uint32_t opening)
@cython.locals(out=ByteWriter)
cpdef bytes created(uint64_t unique, Attr attr, uint64_t entry_s, uint32_t entry_ns, uint64_t attr_s, uint32_t attr_ns,
             uint64_t handle, uint32_t opening)
cdef _begin(ByteWriter out, uint32_t byte_count, uint64_t unique, int64_t code)
cdef _put_entry(ByteWriter out, Attr attr, uint64_t entry_s, uint32_t entry_ns, uint64_t attr_s, uint32_t attr_ns)
@cython.locals(atime_s=int64_t, mtime_s=int64_t, ctime_s=int64_t)
cdef _put_attr(ByteWriter out, Attr attr)
