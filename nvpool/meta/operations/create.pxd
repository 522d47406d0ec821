# cython: language_level=3
"""C types of create.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.meta.state cimport records
from nvpool.meta.state.records cimport Inode
from nvpool.meta.state.transaction cimport Draft, View
from nvpool.rpc.messages.meta_messages cimport Change, CreateReply, CreateRequest, InodeEntry

cdef uint32_t _S_ISGID, _S_IFREG, _S_IFDIR, _S_IFLNK, _HAS_ACL, _TOUCHED


@cython.locals(draft=Draft, mode=uint32_t, kind=uint32_t, parent=Inode, change=Change, gid=uint32_t, flags=uint32_t,
               volume=uint64_t, born=Inode, reply=CreateReply, entry=InodeEntry)
cpdef Draft create(View view, CreateRequest request, int64_t now_ns)
