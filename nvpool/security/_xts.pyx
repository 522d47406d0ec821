# cython: language_level=3, boundscheck=False, wraparound=False
"""XTS over whole blocks by the machine's OpenSSL (libcrypto), without a Python object for a block.

The `cryptography` package creates a context for each block, which takes ten times as long as the cipher. Here
each thread has one context of EVP_aes_256_xts(3) for a key, and a block needs two calls: a new tweak, and the
cipher. libcrypto is loaded when it is first needed: it is the one that Python's ssl module uses, or that of
the system. On a machine without it, the package does the work. Used by xts.py, and directly by the compiled
reads of a mount.
"""

from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBUF_WRITE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.dict cimport PyDict_GetItem
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

cdef enum:
    BLOCK = 4096
    TWEAK = 16
    KNOWN_MAX = 256

cdef extern from "dlfcn.h":
    void *dlopen(const char *name, int flags)
    void *dlsym(void *library, const char *name)
    int RTLD_NOW

ctypedef void *(*new_context_t)() noexcept
ctypedef void (*free_context_t)(void *) noexcept
ctypedef const void *(*cipher_t)() noexcept
ctypedef int (*init_t)(void *, const void *, void *, const uint8_t *, const uint8_t *, int) noexcept
ctypedef void (*clear_errors_t)() noexcept
ctypedef int (*update_t)(void *, uint8_t *, int *, const uint8_t *, int) noexcept

cdef new_context_t new_context = NULL
cdef free_context_t free_context = NULL
cdef cipher_t aes_256_xts = NULL
cdef init_t cipher_init = NULL
cdef update_t cipher_update = NULL
cdef clear_errors_t clear_errors = NULL

LIBRARIES = ("libcrypto.so.3", "libcrypto.so.4", "libcrypto.so.1.1")
"""Names under which libcrypto is looked for."""

cdef uint8_t[BLOCK] zeros
memset(zeros, 0, BLOCK)


cdef bint has_libcrypto() except -1:
    """Load libcrypto, unless it is loaded, and return whether it is there."""
    global new_context, free_context, aes_256_xts, cipher_init, cipher_update, clear_errors
    cdef void *library
    for name in LIBRARIES if cipher_update == NULL else ():
        library = dlopen(name.encode(), RTLD_NOW)
        if library == NULL:
            continue
        new_context = <new_context_t>dlsym(library, "EVP_CIPHER_CTX_new")
        free_context = <free_context_t>dlsym(library, "EVP_CIPHER_CTX_free")
        aes_256_xts = <cipher_t>dlsym(library, "EVP_aes_256_xts")
        cipher_init = <init_t>dlsym(library, "EVP_CipherInit_ex")
        clear_errors = <clear_errors_t>dlsym(library, "ERR_clear_error")
        if (
            new_context != NULL
            and free_context != NULL
            and aes_256_xts != NULL
            and cipher_init != NULL
            and clear_errors != NULL
        ):
            cipher_update = <update_t>dlsym(library, "EVP_CipherUpdate")
        break
    return cipher_update != NULL


cdef class XtsScratch:
    """Encryption or decryption with one key, for one thread at a time."""

    def __cinit__(self):
        self.context = NULL

    def __init__(self, const uint8_t[::1] key, bint encrypts, library=None):
        """Prepare a key of 64 bytes. `library` does the work instead if the machine has no libcrypto."""
        cdef uint8_t[TWEAK] tweak
        if key.shape[0] != 64:
            raise ValueError(f"a key of XTS has 64 bytes, not {key.shape[0]}")
        self.plain = bytearray(BATCH * BLOCK)
        self.library = library
        if has_libcrypto():
            self.context = new_context()
            if self.context == NULL:
                raise MemoryError
            memset(tweak, 0, TWEAK)
            if cipher_init(self.context, aes_256_xts(), NULL, &key[0], tweak, encrypts) == 1:
                return
            clear_errors()  # Python's ssl has the same list of errors
            free_context(self.context)
            self.context = NULL
        if library is None:
            raise OSError("this machine has no libcrypto with AES-256-XTS; install OpenSSL (libssl3)")

    def __dealloc__(self):
        if self.context != NULL:
            free_context(self.context)

    @property
    def uses_libcrypto(self):
        return self.context != NULL

    cdef int turn(self, const uint8_t *source, uint8_t *to, Py_ssize_t count, uint64_t inode, uint32_t index, uint32_t first,
                  bint keeps_zeros) except -1:
        """Do the work of `run`."""
        cdef uint8_t[TWEAK] tweak
        cdef uint32_t block
        cdef int made
        cdef Py_ssize_t number
        if self.context == NULL:
            self.library.run(
                PyMemoryView_FromMemory(<char *>source, count * BLOCK, PyBUF_READ),
                PyMemoryView_FromMemory(<char *>to, count * BLOCK, PyBUF_WRITE),
                inode,
                index,
                first,
                keeps_zeros,
            )
            return 0
        memcpy(tweak, &inode, 8)
        memcpy(tweak + 8, &index, 4)
        for number in range(count):
            if keeps_zeros and not memcmp(source, zeros, BLOCK):
                memset(to, 0, BLOCK)
            else:
                block = first + <uint32_t>number
                memcpy(tweak + 12, &block, 4)
                if (
                    cipher_init(self.context, NULL, NULL, NULL, tweak, -1) != 1
                    or cipher_update(self.context, to, &made, source, BLOCK) != 1
                    or made != BLOCK
                ):
                    clear_errors()
                    raise OSError("libcrypto has failed to encrypt or decrypt a block")
            source += BLOCK
            to += BLOCK
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
        cdef uint64_t inode
        cdef uint32_t index, first
        cdef Py_ssize_t place, length
        cdef uint8_t *at
        PyObject_GetBuffer(into, &view, PyBUF_WRITABLE)
        try:
            for inode, index, first, place, length in pieces:
                if length % BLOCK or place < 0 or length < 0 or place + length > view.len:
                    raise ValueError(f"{length} bytes at {place} are not whole blocks of {view.len}")
                at = <uint8_t *>view.buf + place
                self.turn(at, at, length // BLOCK, inode, index, first, True)
        finally:
            PyBuffer_Release(&view)

    def run(self, source, to, uint64_t inode, uint32_t index, uint32_t first, bint keeps_zeros):
        """Encrypt or decrypt the blocks of `source` into `to`, which may be the same memory.

        With `keeps_zeros`, a block of zeros stays zeros, since it represents a hole.
        """
        cdef Py_buffer have, wanted
        PyObject_GetBuffer(source, &have, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(to, &wanted, PyBUF_WRITABLE)
            try:
                if have.len % BLOCK or wanted.len != have.len:
                    raise ValueError(f"{have.len} bytes to {wanted.len} are not whole blocks")
                self.turn(<const uint8_t *>have.buf, <uint8_t *>wanted.buf, have.len // BLOCK, inode, index, first, keeps_zeros)
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
