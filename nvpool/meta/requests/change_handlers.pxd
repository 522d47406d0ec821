# cython: language_level=3
"""C types of change_handlers.py."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvpool.core cimport primitives
from nvpool.meta.sessions cimport table
from nvpool.meta.sessions.table cimport Session, Slot
from nvpool.meta.state cimport records, session_records
from nvpool.meta.state.transaction cimport Draft, View
from nvpool.rpc.messages.meta_messages cimport CreateReply, InodeEntry

cdef uint32_t _SLOTS


cdef class ChangeHandlers:
    cdef object _clock, _callers, _kv, _rooms, _appends, _sessions, _users, _numbers, _watches, _collector, _cuts, _moment
    cdef object _cross_shard, _coordinator, _replies, _slots, _internal, _handle
    cdef dict _counters, _by_number, _watching, _holders
    cdef bint _is_system
    cdef Session _session_of(self, number, owner)
    cdef int64_t _now_ns(self) except? -1
    cpdef caller_of(self, call)
    cdef View _view
    @cython.locals(draft=Draft)
    cpdef answer_query(self, call, method, bytes message, owner, user, request_class, decide)
    @cython.locals(session=Session, slot=Slot, draft=Draft, sequence=uint64_t, index=uint32_t)
    cpdef answer_change(self, call, method, bytes message, owner, user, request_class, decide, home)
    @cython.locals(answer=bytes, waits_for=uint64_t, leased=uint64_t)
    cpdef _commit(self, call, Draft draft, Session session, Slot slot, uint32_t index, uint64_t sequence, mark, dict effects=*,
                  committed=*)


cdef class ChangeRoute:
    cdef ChangeHandlers _handlers
    cdef object _request_class, _decide, _home
    cdef bint _is_change
    cpdef answer(self, call, method, bytes message, owner, user)
