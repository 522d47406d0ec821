# cython: language_level=3
"""Types of `primitives` for modules that are compiled with it."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef class ByteWriter:
    cdef uint8_t *_begin
    cdef uint8_t *_at
    cdef uint8_t *_end
    cdef int _grow(self, Py_ssize_t count) except -1 nogil
    cdef int begin(self) except -1
    cdef Py_ssize_t size(self) noexcept
    cdef bytes take(self)
    cdef int copy_to(self, uint8_t *memory) noexcept
    cdef int u8(self, uint64_t value) except -1
    cdef int u16(self, uint64_t value) except -1
    cdef int u32(self, uint64_t value) except -1
    cdef int u64(self, uint64_t value) except -1
    cdef int i64(self, int64_t value) except -1
    cdef int u16_big(self, uint64_t value) except -1
    cdef int u56_big(self, uint64_t value) except -1
    cdef int u64_big(self, uint64_t value) except -1
    cdef int raw(self, bytes some) except -1
    cdef int part(self, bytes some, Py_ssize_t first, Py_ssize_t count) except -1
    cdef int varint(self, uint64_t value) except -1
    cdef int number(self, uint64_t tag, uint64_t value) except -1
    cdef int fixed(self, uint64_t tag, uint64_t value) except -1
    cdef int sfixed(self, uint64_t tag, int64_t value) except -1
    cdef int blob(self, uint64_t tag, bytes some) except -1
    cdef Py_ssize_t open(self, uint64_t tag) except -1
    cdef int close(self, Py_ssize_t mark) except -1
    cdef int put_u32(self, Py_ssize_t place, uint32_t value) except -1
    cdef int put_u64(self, Py_ssize_t place, uint64_t value) except -1
    cdef uint32_t crc(self, Py_ssize_t first) noexcept
    cdef int send(self, int fd) noexcept
    cdef int send_with(self, int fd, const uint8_t *more, Py_ssize_t count) noexcept
    cdef int piece_crcs(self, some, uint64_t offset) except -1


cdef class ByteReader:
    cdef object _raw
    cdef const uint8_t *_base
    cdef const uint8_t *_at
    cdef const uint8_t *_end
    cdef readonly bint failed
    cdef readonly uint64_t value
    cdef const uint8_t *_blob
    cdef int open(self, bytes raw) except -1
    cdef uint64_t u8(self) noexcept
    cdef uint64_t u16(self) noexcept
    cdef uint64_t u32(self) noexcept
    cdef uint64_t u64(self) noexcept
    cdef int64_t i64(self) noexcept
    cdef bytes raw(self, Py_ssize_t count)
    cdef bytes rest(self)
    cdef uint64_t field(self) noexcept
    cdef int64_t signed(self) noexcept
    cdef bytes blob(self)
    cdef Py_ssize_t enter(self) noexcept
    cdef int leave(self, Py_ssize_t mark) noexcept
    cdef Py_ssize_t place(self) noexcept
    cdef int open_part(self, bytearray buffer, Py_ssize_t begin, Py_ssize_t end) except -1
    cdef int open_at(self, owner, const uint8_t *begin, Py_ssize_t count) noexcept


cdef class RequestFrames:
    cdef readonly uint32_t method, number, deadline_ms
    cdef readonly Py_ssize_t frame_bytes
    cdef readonly bytes payload
    cdef bytes take(self, bytearray buffer, Py_ssize_t at, Py_ssize_t end, Py_ssize_t message_max, Py_ssize_t payload_max=*)


cdef class RecordMemory:
    cdef Py_buffer _view
    cdef uint8_t *_room(self, Py_ssize_t place) except NULL
    cdef int put_u32(self, Py_ssize_t place, uint32_t value) except -1
    cdef int put_u64(self, Py_ssize_t place, uint64_t value) except -1
    cdef int put_mark(self, Py_ssize_t place, uint64_t value) except -1
    cdef uint64_t get_u64(self, Py_ssize_t place) except? 0


cdef class PayloadFrame:
    cdef object _memory
    cdef uint8_t *_room
    cdef uint8_t *_frame
    cdef uint8_t *payload_at
    cdef readonly Py_ssize_t size, payload_bytes
    cdef int begin(self, uint32_t number, ByteWriter message, Py_ssize_t payload_bytes) except -1
    cdef bint fill(self, int fd, uint64_t offset) noexcept
    cdef object payload(self)
    cdef object take(self)


cdef class BlockMemory:
    cdef uint8_t *at
    cdef readonly Py_ssize_t size
    cdef bint fill(self, int fd, uint64_t offset, Py_ssize_t count) except -1


cdef class ReceivedReply:
    cdef Py_buffer _message
    cdef Py_buffer _payload
    cdef object _kept
    cdef bint _has_buffers
    cdef const uint8_t *message_at
    cdef const uint8_t *payload_at
    cdef readonly Py_ssize_t message_bytes, payload_bytes
    cpdef int open(self, message, payload) except -1
    cdef int open_at(self, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload, Py_ssize_t payload_bytes) noexcept
    cdef int open_blocks(self, bytes sums, BlockMemory memory, Py_ssize_t count) except -1
    cpdef int close(self) except -1
    cdef int read(self, ByteReader source) noexcept
    cdef uint32_t u16(self, Py_ssize_t place) except? 0
    cdef uint32_t u32(self, Py_ssize_t place) except? 0
    cdef bint has_sums(self, Py_ssize_t place, Py_ssize_t first, Py_ssize_t count) noexcept
    cdef int _check(self, Py_ssize_t first, Py_ssize_t count) except -1
    cpdef object keep(self, Py_ssize_t first, Py_ssize_t count)
    cdef object view(self, Py_ssize_t first, Py_ssize_t count)
    cpdef int copy_to(self, into, Py_ssize_t first, Py_ssize_t count) except -1
    cdef int write(self, int fd, ByteWriter head, Py_ssize_t first, Py_ssize_t count) except -1


cpdef uint32_t crc32c_of(bytes some, Py_ssize_t first, Py_ssize_t end=*) noexcept
cpdef bytes request_frame(uint32_t method, uint32_t number, uint32_t deadline_ms, bytes message, payload=*)
cpdef bytes request_frame_of(uint32_t method, uint32_t number, uint32_t deadline_ms, ByteWriter first, ByteWriter rest)
cpdef bytes reply_frame(uint32_t number, uint32_t status, bytes message)
cpdef Py_ssize_t receive(int fd, bytearray buffer) noexcept
cpdef uint64_t chunk_hash(uint64_t inode, uint32_t index) noexcept
cpdef int write_whole(int fd, bytes some) noexcept
cpdef double boottime_s() noexcept
cpdef double stopwatch_s() noexcept
cpdef int64_t wall_ns() noexcept
cpdef int duration_slot(double took_s) noexcept
