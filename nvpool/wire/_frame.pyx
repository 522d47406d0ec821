# cython: language_level=3, boundscheck=False, wraparound=False
"""Heads of frames, packed and read without Python objects in between. See frame.py, which has the twins and uses no one else's."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from crc32c import crc32c

from nvpool.wire.transport import MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    uint32_t get32(const uint8_t *at) nogil
    void put32(uint8_t *at, uint32_t value) nogil

crc_begin(0)

cdef enum:
    HEADER_BYTES = 32
    TABLES_BYTES_MAX = 1024  # a longer message is worth a call of the library, which uses the processor's instruction

cdef uint32_t message_max = MESSAGE_BYTES_MAX
cdef uint32_t payload_max = PAYLOAD_BYTES_MAX


cdef uint32_t message_crc(bytes message) except? 0:
    if len(message) > TABLES_BYTES_MAX:
        return crc32c(message)
    return crc_of(<uint8_t *>PyBytes_AS_STRING(message), len(message))


def pack_head(uint8_t kind, uint16_t code, uint32_t number, uint32_t deadline_ms, message, uint32_t payload_bytes):
    """As frame.pack_head_plain."""
    cdef bytes its = message if type(message) is bytes else bytes(message)
    cdef uint32_t count = <uint32_t>len(its)
    cdef bytes head = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + count)
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(head)
    at[0], at[1], at[2], at[3] = 0x4E, 0x50, kind, 0
    at[4], at[5], at[6], at[7] = code & 255, code >> 8, 0, 0
    put32(at + 8, number)
    put32(at + 12, deadline_ms)
    put32(at + 16, count)
    put32(at + 20, payload_bytes)
    put32(at + 24, message_crc(its))
    put32(at + 28, crc_of(at, 28))
    memcpy(at + HEADER_BYTES, PyBytes_AS_STRING(its), count)
    return head


def read_head(bytearray buffer, Py_ssize_t begin, Py_ssize_t end, uint32_t whole_max):
    """As frame.read_head_plain, but None for what that raises an error about."""
    if begin < 0 or end - begin < HEADER_BYTES or end > PyByteArray_GET_SIZE(buffer):
        raise ValueError("the head of a frame lies outside of its buffer")
    cdef const uint8_t *at = <const uint8_t *>PyByteArray_AS_STRING(buffer) + begin
    cdef uint32_t message_bytes = get32(at + 16), payload_bytes = get32(at + 20)
    if (at[0] != 0x4E or at[1] != 0x50 or crc_of(at, 28) != get32(at + 28) or at[3] or at[6] or at[7] or not 1 <= at[2] <= 4
            or message_bytes > message_max or payload_bytes > payload_max):
        return None
    cdef Py_ssize_t needed = HEADER_BYTES + <Py_ssize_t>message_bytes + (payload_bytes if payload_bytes <= whole_max else 0)
    if end - begin < needed:
        return needed
    cdef bytes message = PyBytes_FromStringAndSize(<const char *>at + HEADER_BYTES, message_bytes)
    if message_crc(message) != get32(at + 24):
        return None
    return at[2], at[4] | at[5] << 8, get32(at + 8), get32(at + 12), message, payload_bytes
