# cython: language_level=3
"""C types of report.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.meta.state.records cimport Inode
from nvpool.meta.state.transaction cimport Draft, View
from nvpool.rpc.messages.meta_messages cimport AttrReply, ReportRequest

cdef uint64_t _END_UNCHECKED
cdef uint32_t _S_IFMT, _S_IFREG, _TOUCHED


@cython.locals(draft=Draft, inode=Inode, reply=AttrReply, before=uint64_t, after=uint64_t, grown=uint64_t)
cpdef Draft report(View view, ReportRequest request, int64_t now_ns)
cpdef check_writer(Inode inode, uint64_t cut)
