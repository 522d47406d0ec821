# cython: language_level=3
"""C types of unlink.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t

from nvpool.meta.state.records cimport Inode
from nvpool.meta.state.transaction cimport Draft, View
from nvpool.rpc.messages.meta_messages cimport UnlinkReply, UnlinkRequest

cdef uint32_t _S_IFMT, _S_IFDIR, _TRASHED


@cython.locals(draft=Draft, parent=Inode, victim=Inode)
cpdef Draft unlink(View view, UnlinkRequest request, int64_t now_ns)
@cython.locals(draft=Draft, parent=Inode, victim=Inode)
cpdef Draft rmdir(View view, UnlinkRequest request, int64_t now_ns)
cdef Draft _remove(Draft draft, Inode parent, bytes key, Inode victim, bytes name)
