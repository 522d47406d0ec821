# cython: language_level=3
"""Frame headers (frame.py) for compiled modules, which must call crc_begin first."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t

cdef enum:
    HEADER_BYTES = 32
    REQUEST = 2
    REPLY = 3

cdef extern from "_head.h":
    void put_head(uint8_t *at, uint8_t kind, uint16_t code, uint32_t number, uint32_t deadline_ms, uint32_t message_bytes,
                  uint32_t payload_bytes, uint32_t message_crc) nogil
    bint is_head(const uint8_t *at, uint8_t kind) nogil
