# cython: language_level=3, boundscheck=False, wraparound=False
"""Verification of effects, and their encoding as a journal record, without calls into Python.

api.py and journal.py have equivalent Python versions; only these two modules use this one.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    uint16_t get16(const uint8_t *at) nogil
    uint32_t get32(const uint8_t *at) nogil
    uint64_t get64(const uint8_t *at) nogil
    void put16(uint8_t *at, uint16_t value) nogil
    void put32(uint8_t *at, uint32_t value) nogil
    void put64(uint8_t *at, uint64_t value) nogil

crc_begin(0)

cdef enum:
    HEAD_BYTES = 40
    EFFECT_BYTES = 6
    KEY_BYTES_MAX = 511         # as in api.py
    VALUE_BYTES_MAX = 1 << 20

cdef uint32_t DELETED = 0xFFFFFFFF
cdef bytes KEY_END = b"\xff" * KEY_BYTES_MAX


def checked_effects(list pairs):
    """Do the work of `api.checked_effects_plain`, but return None if that function would raise an error."""
    cdef dict changed = {}
    cdef object key, value
    cdef Py_ssize_t count
    for pair in pairs:
        if type(pair) is not tuple or len(<tuple>pair) != 2:
            return None
        key, value = (<tuple>pair)[0], (<tuple>pair)[1]
        if type(key) is not bytes or value is not None and type(value) is not bytes:
            return None
        count = PyBytes_GET_SIZE(key)
        if not 0 < count <= KEY_BYTES_MAX or count == KEY_BYTES_MAX and key == KEY_END:
            return None
        if value is not None and PyBytes_GET_SIZE(value) > VALUE_BYTES_MAX:
            return None
        changed[key] = value
    return changed if len(changed) == len(pairs) else None


def encode(uint64_t term, uint64_t generation, uint64_t sequence, dict effects):
    """Return the same as `journal.encode_plain`."""
    cdef Py_ssize_t total = HEAD_BYTES, count
    cdef object key, value
    for key, value in effects.items():
        total += EFFECT_BYTES + len(<bytes?>key) + (len(<bytes?>value) if value is not None else 0)
    if total > 0xFFFFFFFF:
        raise OverflowError("a record is longer than it can say")
    cdef bytes record = PyBytes_FromStringAndSize(NULL, total)
    cdef uint8_t *begin = <uint8_t *>PyBytes_AS_STRING(record)
    cdef uint8_t *at = begin + HEAD_BYTES
    put32(begin + 4, <uint32_t>total)
    put64(begin + 8, term)
    put64(begin + 16, generation)
    put64(begin + 24, sequence)
    put32(begin + 32, <uint32_t>len(effects))
    put32(begin + 36, 0)
    for key, value in effects.items():
        count = PyBytes_GET_SIZE(key)
        put16(at, <uint16_t>count)
        put32(at + 2, 0xFFFFFFFF if value is None else <uint32_t>PyBytes_GET_SIZE(value))
        at += EFFECT_BYTES
        memcpy(at, PyBytes_AS_STRING(key), count)
        at += count
        if value is not None:
            count = PyBytes_GET_SIZE(value)
            memcpy(at, PyBytes_AS_STRING(value), count)
            at += count
    put32(begin, crc_of(begin + 4, total - 4))
    return record


def adopt(bytes payload, uint64_t term, uint64_t generation, uint64_t sequence):
    """Read the records of a shipped group, and encode them for another journal that ends with change `sequence`.

    Returns the new records, their effects, and the number of all effects; records up to `sequence` are left out. None if
    `journal.decode` refuses a record, or if it is not the next change or of another term: then the caller decodes them itself.
    """
    cdef const uint8_t *begin = <const uint8_t *>PyBytes_AS_STRING(payload)
    cdef const uint8_t *end = begin + PyBytes_GET_SIZE(payload)
    cdef const uint8_t *at
    cdef const uint8_t *last
    cdef uint8_t *to
    cdef uint32_t length, count, number, value_bytes
    cdef uint16_t key_bytes
    cdef Py_ssize_t total = 0
    cdef uint64_t found
    cdef bytes record, key
    cdef object value
    cdef dict changed
    cdef list records = [], effects = []
    while begin < end:
        if end - begin < HEAD_BYTES:
            return None
        length = get32(begin + 4)
        if (length < HEAD_BYTES or length > <uint64_t>(end - begin) or get64(begin + 8) != term or get32(begin + 36)
                or crc_of(begin + 4, length - 4) != get32(begin)):
            return None
        found, count, at, last = get64(begin + 24), get32(begin + 32), begin + HEAD_BYTES, begin + length
        if found <= sequence:
            begin = last
            continue
        if found != sequence + 1:
            return None
        changed = {}
        for number in range(count):
            if last - at < EFFECT_BYTES:
                return None
            key_bytes, value_bytes = get16(at), get32(at + 2)
            at += EFFECT_BYTES
            if last - at < key_bytes:
                return None
            key = PyBytes_FromStringAndSize(<const char *>at, key_bytes)
            at += key_bytes
            value = None
            if value_bytes != DELETED:
                if value_bytes > <uint64_t>(last - at):
                    return None
                value = PyBytes_FromStringAndSize(<const char *>at, value_bytes)
                at += value_bytes
            changed[key] = value
        if at != last or len(changed) != count:
            return None
        record = PyBytes_FromStringAndSize(<const char *>begin, length)
        to = <uint8_t *>PyBytes_AS_STRING(record)
        put64(to + 16, generation)
        put32(to, crc_of(to + 4, length - 4))
        records.append(record)
        effects.append(changed)
        total += count
        sequence, begin = found, last
    return records, effects, total


def crc32c(bytes some, bint by_table):
    """Compute the CRC with either method of `_crc.h`, for tests."""
    crc_begin(by_table)
    found = crc_of(<const uint8_t *>PyBytes_AS_STRING(some), len(some))
    crc_begin(0)
    return found
