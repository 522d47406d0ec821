from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum:
    BATCH = 32                  # blocks: the batch and its scratch memory, 128 KiB each, stay in the second-level cache

cdef class XtsScratch:
    cdef object tweak_into, data_into
    cdef bytearray sectors, tweaks, mixed, done, plain, spread
    cdef object sectors_view, tweaks_view, mixed_view, done_view, sector_view, block_view

    cdef int turn(self, const uint8_t *source, uint8_t *to, Py_ssize_t count, uint64_t inode, uint32_t index, uint32_t first,
                  bint keeps_zeros) except -1
    cdef void name(self, Py_ssize_t number, uint64_t inode, uint32_t index, uint32_t block) noexcept
    cdef int turn_all(self, const uint8_t **sources, uint8_t **targets, Py_ssize_t count, bint keeps_zeros) except -1
    cdef const uint8_t *decrypted(self, const uint8_t *source, Py_ssize_t count, uint64_t inode, uint32_t index,
                                  uint32_t first) except NULL

cdef XtsScratch decrypting(dict known, key)
