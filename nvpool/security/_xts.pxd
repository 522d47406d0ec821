from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum:
    BATCH = 32                  # blocks that `decrypted` takes: the buffer of 128 KiB stays in the second-level cache

cdef class XtsScratch:
    cdef void *context          # EVP_CIPHER_CTX; NULL without libcrypto
    cdef object library         # does the work without libcrypto
    cdef bytearray plain

    cdef int turn(self, const uint8_t *source, uint8_t *to, Py_ssize_t count, uint64_t inode, uint32_t index, uint32_t first,
                  bint keeps_zeros) except -1
    cdef const uint8_t *decrypted(self, const uint8_t *source, Py_ssize_t count, uint64_t inode, uint32_t index,
                                  uint32_t first) except NULL

cdef XtsScratch decrypting(dict known, key)
