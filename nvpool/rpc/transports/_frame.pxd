# cython: language_level=3
"""Interface of _frame.pyx: receivers of replies with a payload, in the receive buffer."""

from libc.stdint cimport uint8_t

from nvpool.rpc.reply_receivers cimport ReplyBurst


cdef class ReplyTaker:
    """An `on_done` that may take replies directly from the receive buffer.

    Only for requests without `into`."""

    cdef ReplyBurst take(self, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload, Py_ssize_t payload_bytes)
