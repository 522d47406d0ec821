# cython: language_level=3
"""C types of sender.py."""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from nvpool.client.data.write_fast_path cimport SubmittedWrite, WriteSubmitter
from nvpool.client.state.dirty_file cimport DirtyExtent, DirtyFile
from nvpool.client.write.crash_journal cimport CrashJournal
from nvpool.core cimport primitives

cdef int64_t _BLOCK


cdef class SizeReport:
    cdef readonly int64_t end, stored, cut
    cdef readonly uint64_t withdrawn
    cdef readonly bint wrote


cdef class SentExtent(SubmittedWrite):
    cdef WriteSender sender
    cdef DirtyFile written
    cdef DirtyExtent extent
    cdef int64_t unit
    cdef int ended(self, error) except -1


cdef class WriteSender:
    cdef object _chunks, _options, _clock, _refresh
    cdef WriteSubmitter _submitter
    cdef readonly object begin_report, unstable, stalled
    cdef readonly CrashJournal keeping
    cdef readonly int64_t held, in_flight, last_number
    cdef readonly list room_waiters
    cdef readonly set begun
    cdef set _tasks
    cdef int64_t _flight_max
    cdef double _deadline_after_s
    cdef bint _is_system
    cdef double _now_s(self) except? -1
    @cython.locals(segments=list, segment=DirtyExtent)
    cpdef mark_all_due(self, DirtyFile written)
    @cython.locals(segments=list, kept=list, segment=DirtyExtent)
    cpdef pump(self, DirtyFile written)
    cdef bint _has_flight_room(self, int64_t length) except -1
    @cython.locals(sending=list)
    cdef _set_out(self, DirtyFile written, int64_t unit, DirtyExtent segment)
    @cython.locals(sending=list, sent=DirtyExtent, first=int64_t, last=int64_t, overlaps=bint)
    cdef bint _overlaps_sending(self, DirtyFile written, int64_t unit, DirtyExtent segment) except -1
    @cython.locals(after_s=double)
    cdef double _deadline_s(self, DirtyExtent segment, double now_s) except? -1
    @cython.locals(submitter=WriteSubmitter, writing=SentExtent, now_s=double)
    cdef bint _begin(self, DirtyFile written, int64_t unit, DirtyExtent segment) except -1
    @cython.locals(written=DirtyFile, segment=DirtyExtent, unit=int64_t)
    cdef was_sent(self, SentExtent writing, error)
    @cython.locals(end=int64_t)
    cdef _has_stored(self, DirtyFile written, DirtyExtent segment, int64_t cut)
    @cython.locals(length=int64_t, sending=list, flushing=CloseFlush)
    cdef _left(self, DirtyFile written, int64_t unit, DirtyExtent segment, SubmittedWrite stored)
    cdef _pump_stalled(self)
    cdef _hold(self, DirtyFile written, int64_t count)
    cdef _make_room(self)
    @cython.locals(freed=int64_t, segments=list, kept=list, segment=DirtyExtent)
    cdef _clip(self, DirtyFile written, int64_t size)
    cdef _give_up(self, DirtyFile written, int64_t place)
    cpdef take_error(self, DirtyFile written)
    cdef _note(self, DirtyFile written)
    @cython.locals(flushing=CloseFlush)
    cdef _wake_waiters(self, DirtyFile written)
    @cython.locals(sizes=SizeReport)
    cpdef SizeReport take_report(self, DirtyFile written)
    cpdef report_succeeded(self, DirtyFile written, SizeReport sizes)
    cpdef report_failed(self, DirtyFile written, SizeReport sizes, error)
    @cython.locals(written=DirtyFile, flush=CloseFlush)
    cpdef begin_flush(self, file, on_end, otherwise)


cdef class CloseFlush:
    cdef readonly object on_end, submitted_report
    cdef WriteSender _writer
    cdef DirtyFile _written
    cdef int64_t _number
    cdef object _otherwise, _task
    cdef SizeReport _sizes
    cdef bint _ended
    cpdef look(self)
    @cython.locals(segments=list, segment=DirtyExtent)
    cdef bint _waits_for(self, dict units) except -1
    @cython.locals(writer=WriteSender, written=DirtyFile, sizes=SizeReport)
    cpdef bint report(self) except -1
    cdef _do_otherwise(self)
    cdef _end(self, error)
