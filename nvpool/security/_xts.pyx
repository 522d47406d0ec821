# cython: language_level=3, boundscheck=False, wraparound=False
"""XTS over many blocks with two calls of the library's AES.

Used by xts.py, and directly by the compiled reads of a mount.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

cdef enum:
    BLOCK = 4096
    CIPHER_BLOCK = 16
    KNOWN_MAX = 256


cdef uint8_t[BLOCK] zeros
memset(zeros, 0, BLOCK)


cdef extern from "_xts.h":
    void spread_tweak(uint64_t *to, uint64_t low, uint64_t high) nogil
    void mix_block(uint64_t *to, const uint64_t *source, const uint64_t *tweaks) nogil


cdef class XtsScratch:
    """Buffers and AES contexts of one thread; two threads must not share a context."""

    def __init__(self, tweak_into, data_into):
        """Take `update_into` of two AES contexts in ECB mode.

        `tweak_into` encrypts with the second half of the key; `data_into` encrypts or decrypts with the first
        half.
        """
        self.tweak_into, self.data_into = tweak_into, data_into
        self.sectors, self.tweaks = bytearray(BATCH * CIPHER_BLOCK), bytearray((BATCH + 1) * CIPHER_BLOCK)
        self.mixed, self.done = bytearray(BATCH * BLOCK), bytearray(BATCH * BLOCK + CIPHER_BLOCK)
        self.plain, self.spread = bytearray(BATCH * BLOCK), bytearray(BATCH * BLOCK)
        self.sectors_view, self.tweaks_view = memoryview(self.sectors), memoryview(self.tweaks)
        self.mixed_view, self.done_view = memoryview(self.mixed), memoryview(self.done)
        self.sector_view, self.block_view = self.sectors_view[:CIPHER_BLOCK], self.mixed_view[:BLOCK]

    cdef int turn(self, const uint8_t *source, uint8_t *to, Py_ssize_t count, uint64_t inode, uint32_t index, uint32_t first,
                  bint keeps_zeros) except -1:
        """Do the work of `run` for at most BATCH blocks."""
        cdef const uint8_t *sources[BATCH]
        cdef uint8_t *targets[BATCH]
        cdef Py_ssize_t number
        for number in range(count):
            sources[number], targets[number] = source + number * BLOCK, to + number * BLOCK
            self.name(number, inode, index, first + <uint32_t>number)
        return self.turn_all(sources, targets, count, keeps_zeros)

    cdef void name(self, Py_ssize_t number, uint64_t inode, uint32_t index, uint32_t block) noexcept:
        """Set the position of block `number` of the next batch."""
        cdef uint8_t *sector = <uint8_t *>PyByteArray_AS_STRING(self.sectors) + number * CIPHER_BLOCK
        memcpy(sector, &inode, 8)
        memcpy(sector + 8, &index, 4)
        memcpy(sector + 12, &block, 4)

    cdef int turn_all(self, const uint8_t **sources, uint8_t **targets, Py_ssize_t count, bint keeps_zeros) except -1:
        """Process a batch of blocks whose positions were set with `name`."""
        cdef Py_ssize_t number
        cdef const uint64_t *tweaks = <const uint64_t *>PyByteArray_AS_STRING(self.tweaks)
        cdef uint8_t *mixed = <uint8_t *>PyByteArray_AS_STRING(self.mixed)
        cdef const uint8_t *done = <const uint8_t *>PyByteArray_AS_STRING(self.done)
        cdef uint8_t *spread = <uint8_t *>PyByteArray_AS_STRING(self.spread)
        cdef uint32_t holes = 0
        if count == 1:
            self.tweak_into(self.sector_view, self.tweaks_view)
        elif count == BATCH:
            self.tweak_into(self.sectors_view, self.tweaks_view)
        else:
            self.tweak_into(self.sectors_view[:count * CIPHER_BLOCK], self.tweaks_view)
        for number in range(count):
            if keeps_zeros and not memcmp(sources[number], zeros, BLOCK):
                holes |= <uint32_t>1 << number
            spread_tweak(<uint64_t *>(spread + number * BLOCK), tweaks[2 * number], tweaks[2 * number + 1])
            mix_block(<uint64_t *>(mixed + number * BLOCK), <const uint64_t *>sources[number],
                      <const uint64_t *>(spread + number * BLOCK))
        if count == 1:
            self.data_into(self.block_view, self.done_view)
        elif count == BATCH:
            self.data_into(self.mixed_view, self.done_view)
        else:
            self.data_into(self.mixed_view[:count * BLOCK], self.done_view)
        for number in range(count):
            if holes >> number & 1:
                memset(targets[number], 0, BLOCK)
            else:
                mix_block(<uint64_t *>targets[number], <const uint64_t *>(done + number * BLOCK),
                          <const uint64_t *>(spread + number * BLOCK))
        return 0

    cdef const uint8_t *decrypted(self, const uint8_t *source, Py_ssize_t count, uint64_t inode, uint32_t index,
                                  uint32_t first) except NULL:
        """Decrypt up to BATCH blocks into a buffer that is valid until the next call."""
        cdef uint8_t *plain = <uint8_t *>PyByteArray_AS_STRING(self.plain)
        if count > BATCH:
            raise ValueError(f"{count} blocks are more than a batch")
        self.turn(source, plain, count, inode, index, first, True)
        return plain

    def run_many(self, pieces, into):
        """Decrypt whole blocks in place: each piece is (inode, index, first block, offset in `into`,
        bytes)."""
        cdef Py_buffer view
        cdef const uint8_t *sources[BATCH]
        cdef uint8_t *targets[BATCH]
        cdef uint64_t inode
        cdef uint32_t index, first
        cdef Py_ssize_t place, length, at, count = 0
        PyObject_GetBuffer(into, &view, PyBUF_WRITABLE)
        try:
            for inode, index, first, place, length in pieces:
                if length % BLOCK or place < 0 or length < 0 or place + length > view.len:
                    raise ValueError(f"{length} bytes at {place} are not whole blocks of {view.len}")
                for at in range(0, length, BLOCK):
                    targets[count] = <uint8_t *>view.buf + place + at
                    sources[count] = targets[count]
                    self.name(count, inode, index, first + <uint32_t>(at // BLOCK))
                    count += 1
                    if count == BATCH:
                        self.turn_all(sources, targets, count, True)
                        count = 0
            if count:
                self.turn_all(sources, targets, count, True)
        finally:
            PyBuffer_Release(&view)

    def run(self, source, to, uint64_t inode, uint32_t index, uint32_t first, bint keeps_zeros):
        """Encrypt or decrypt the blocks of `source` into `to`, which may be the same memory.

        With `keeps_zeros`, a block of zeros stays zeros, since it represents a hole.
        """
        cdef Py_buffer have, wanted
        cdef Py_ssize_t count, at, batch
        PyObject_GetBuffer(source, &have, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(to, &wanted, PyBUF_WRITABLE)
            try:
                if have.len % BLOCK or wanted.len != have.len:
                    raise ValueError(f"{have.len} bytes to {wanted.len} are not whole blocks")
                count = have.len // BLOCK
                at = 0
                while at < count:
                    batch = min(count - at, <Py_ssize_t>BATCH)
                    self.turn(<const uint8_t *>have.buf + at * BLOCK, <uint8_t *>wanted.buf + at * BLOCK, batch, inode, index,
                              first + <uint32_t>at, keeps_zeros)
                    at += batch
            finally:
                PyBuffer_Release(&wanted)
        finally:
            PyBuffer_Release(&have)


cdef XtsScratch decrypting(dict known, key):
    """Return the decrypting engine of a VolumeKey, cached in `known`; both belong to this thread."""
    cipher = (<tuple>key)[1]
    cdef PyObject *found = PyDict_GetItem(known, cipher)
    if found is not NULL:
        return <XtsScratch><object>found
    if len(known) >= KNOWN_MAX:
        known.clear()
    made = known[cipher] = cipher.scratch("decrypting")
    return made
