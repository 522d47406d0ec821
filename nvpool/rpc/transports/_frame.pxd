# cython: language_level=3
"""Interfaces of _frame.pyx: receivers of replies from the receive buffer, and a function for senders of
frames."""

from libc.stdint cimport uint8_t


cdef class PendingReply:
    """Sender of many requests that continues when some of its replies have been taken.

    `go_on` is called after the last reply that arrived, and also after each `turn` replies if more arrived;
    with `turn` 0 only after the last.
    """
    cdef Py_ssize_t turn

    cdef int go_on(self) except -1


cdef class ReplyTaker:
    """An `on_done` that may take replies directly from the receive buffer.

    Only for requests without `into`."""

    cdef PendingReply take(self, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload, Py_ssize_t payload_bytes)


cdef object note(connection, dict in_flight, on_done, double deadline_s, room, method, double now_s)
"""Add a request to the connection's table as ClientConnection._begin does, and return its number.

The caller sends it.
"""
