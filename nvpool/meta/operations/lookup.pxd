# cython: language_level=3
"""C types of lookup.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.meta.state.records cimport Inode
from nvpool.meta.state.transaction cimport Draft, View
from nvpool.rpc.messages.meta_messages cimport InodeEntry, GetAttrRequest, LookupRequest

cdef uint32_t _DIVIDED


@cython.locals(directory=Inode, found=Draft, inode=Inode)
cpdef Draft lookup(View view, LookupRequest request, int64_t now_ns)
cpdef Draft getattr(View view, GetAttrRequest request, int64_t now_ns)
@cython.locals(draft=Draft, inode=Inode, entry=InodeEntry)
cdef Draft _entry(View view, number, uint32_t rights, uint64_t session, int64_t now_ns)
