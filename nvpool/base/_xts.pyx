# cython: language_level=3, boundscheck=False, wraparound=False
"""XTS over many blocks in two calls of the library's AES. See xts.py, which uses this module and no one else."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

cdef enum:
    BLOCK = 4096
    CIPHER_BLOCK = 16
    BATCH = 32                  # blocks: the batch and its scratch memory stay in the processor's second-level cache


cdef uint8_t[BLOCK] zeros
memset(zeros, 0, BLOCK)


cdef void xor_with_tweaks(uint64_t *to, const uint64_t *source, uint64_t low, uint64_t high) noexcept nogil:
    """One block, each 16 bytes of it with the next power of the tweak (IEEE 1619-2018, 5.2)."""
    cdef Py_ssize_t at
    cdef uint64_t carry
    for at in range(0, BLOCK >> 3, 2):
        to[at] = source[at] ^ low
        to[at + 1] = source[at + 1] ^ high
        carry = high >> 63
        high = high << 1 | low >> 63
        low = low << 1 ^ (0x87 if carry else 0)


cdef class Scratch:
    """Memory and AES contexts of one thread: a context must not be used by two at a time."""
    cdef object tweak_into, data_into
    cdef bytearray sectors, tweaks, mixed, done
    cdef object sectors_view, tweaks_view, mixed_view, done_view

    def __init__(self, tweak_into, data_into):
        """`update_into` of AES in ECB mode: by the second half of the key, encrypting, and by the first, either way."""
        self.tweak_into, self.data_into = tweak_into, data_into
        self.sectors, self.tweaks = bytearray(BATCH * CIPHER_BLOCK), bytearray((BATCH + 1) * CIPHER_BLOCK)
        self.mixed, self.done = bytearray(BATCH * BLOCK), bytearray(BATCH * BLOCK + CIPHER_BLOCK)
        self.sectors_view, self.tweaks_view = memoryview(self.sectors), memoryview(self.tweaks)
        self.mixed_view, self.done_view = memoryview(self.mixed), memoryview(self.done)

    def run(self, source, to, uint64_t inode, uint32_t index, uint32_t first, bint keeps_zeros):
        """Turn the blocks of `source` into those of `to`, which may be the same memory. `keeps_zeros`: a block of zeros stays
        one, since it stands for a hole."""
        cdef Py_buffer have, wanted
        cdef Py_ssize_t count, at, batch, number
        cdef uint8_t *sectors = <uint8_t *>PyByteArray_AS_STRING(self.sectors)
        cdef const uint64_t *tweaks = <const uint64_t *>PyByteArray_AS_STRING(self.tweaks)
        cdef uint8_t *mixed = <uint8_t *>PyByteArray_AS_STRING(self.mixed)
        cdef const uint8_t *done = <const uint8_t *>PyByteArray_AS_STRING(self.done)
        cdef uint32_t holes, block
        cdef const uint8_t *source_at
        cdef uint8_t *to_at
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
                    holes = 0
                    for number in range(batch):
                        block = first + <uint32_t>(at + number)
                        memcpy(sectors + number * CIPHER_BLOCK, &inode, 8)
                        memcpy(sectors + number * CIPHER_BLOCK + 8, &index, 4)
                        memcpy(sectors + number * CIPHER_BLOCK + 12, &block, 4)
                    if batch == BATCH:
                        self.tweak_into(self.sectors_view, self.tweaks_view)
                    else:
                        self.tweak_into(self.sectors_view[:batch * CIPHER_BLOCK], self.tweaks_view)
                    for number in range(batch):
                        source_at = <const uint8_t *>have.buf + (at + number) * BLOCK
                        if keeps_zeros and not memcmp(source_at, zeros, BLOCK):
                            holes |= <uint32_t>1 << number
                        xor_with_tweaks(<uint64_t *>(mixed + number * BLOCK), <const uint64_t *>source_at, tweaks[2 * number],
                                        tweaks[2 * number + 1])
                    if batch == BATCH:
                        self.data_into(self.mixed_view, self.done_view)
                    else:
                        self.data_into(self.mixed_view[:batch * BLOCK], self.done_view)
                    for number in range(batch):
                        to_at = <uint8_t *>wanted.buf + (at + number) * BLOCK
                        if holes >> number & 1:
                            memset(to_at, 0, BLOCK)
                        else:
                            xor_with_tweaks(<uint64_t *>to_at, <const uint64_t *>(done + number * BLOCK), tweaks[2 * number],
                                            tweaks[2 * number + 1])
                    at += batch
            finally:
                PyBuffer_Release(&wanted)
        finally:
            PyBuffer_Release(&have)
