# cython: language_level=3
"""Who may have answers from the buffer in which they came; `hear` in _frame.pyx asks."""

from libc.stdint cimport uint8_t


cdef class Asking:
    """Who has asked for much. When some of its answers were taken it goes on: behind the last that came, and before, where more
    came, after each `turn` of them; 0: not before."""
    cdef Py_ssize_t turn

    cdef int go_on(self) except -1


cdef class Taker:
    """What a connection's table may have as `on_done`, where nobody said `into`."""

    cdef Asking take(self, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload, Py_ssize_t payload_bytes)
