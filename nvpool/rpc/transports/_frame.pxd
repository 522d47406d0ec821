# cython: language_level=3
"""Who may have answers from the buffer in which they came, which `hear` in _frame.pyx asks; and for who sends frames himself."""

from libc.stdint cimport uint8_t


cdef class Asking:
    """Who has asked for much. When some of its answers were taken it goes on: behind the last that came, and before, where more
    came, after each `turn` of them; 0: not before."""
    cdef Py_ssize_t turn

    cdef int go_on(self) except -1


cdef class Taker:
    """What a connection's table may have as `on_done`, where nobody said `into`."""

    cdef Asking take(self, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload, Py_ssize_t payload_bytes)


cdef object note(connection, dict in_flight, on_done, double deadline_s, room, method, double now_s)
"""The number of a request, which is in the connection's table from now on, as Asker._begin has it; it is sent by the caller."""
