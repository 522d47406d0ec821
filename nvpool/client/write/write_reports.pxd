# cython: language_level=3
"""C types of write_reports.py."""

cimport cython
from libc.stdint cimport uint64_t

from nvpool.client.rpc.change_fast_path cimport ChangeSubmitter
from nvpool.rpc.messages.meta_messages cimport ReportRequest


cdef class WriteReports:
    cdef object _meta, _cache, _callbacks
    cdef ChangeSubmitter _submitter
    @cython.locals(request=ReportRequest)
    cpdef begin_report(self, file, uint64_t end, uint64_t stored, bint wrote, on_end)
    cpdef _begun_reported(self, file, bint wrote, on_end, reply, error)
    cpdef reported(self, file, bint wrote, reply)
