# cython: language_level=3
"""C types of engine.py: the state that every change and every read uses."""

cimport cython
from libc.stdint cimport int64_t, uint64_t

from nvpool.kv.journal cimport Journal
from nvpool.kv.journal_record cimport checked_effects, encode
from nvpool.kv.memtable cimport Layer


cdef class LmdbKv:
    cdef dict __dict__
    cdef public Journal journal
    cdef public Layer _layer, frozen
    cdef public uint64_t term, _sequence
    cdef public int64_t _limit_adding, _limit_reclaiming, _record_bytes_max, _half_journal_bytes
    cdef public Py_ssize_t entries_max
    cdef public object history, on_apply, tree, _sync_timer, _checkpoint_timer
    cdef public set _open_snapshots
    cpdef _append_to_journal(self, bytes record)
    @cython.locals(values=dict)
    cpdef _take(self, dict changed)
