# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Compiled form of `primitives.py`, which states the contract of every class and function here."""

from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.errno cimport EINTR, EIO, errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memmove
from posix.unistd cimport read, write

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

cdef extern from "_clock.h":
    int slot_of(double took_s) nogil
    double boottime_s_c "boottime_s"() nogil
    double stopwatch_c "stopwatch"() nogil
    long long wall_ns_c "wall_ns"() nogil

cdef extern from "_fields.h":
    uint8_t *put_varint(uint8_t *at, uint64_t value) nogil
    const uint8_t *take_varint(const uint8_t *at, const uint8_t *end, uint64_t *value) nogil

cdef extern from "_head.h":
    void put_head(uint8_t *at, uint8_t kind, uint16_t code, uint32_t number, uint32_t deadline_ms, uint32_t message_bytes,
                  uint32_t payload_bytes, uint32_t message_crc) nogil
    bint is_head(const uint8_t *at, uint8_t kind) nogil

cdef extern from "_chunk_hash.h":
    uint64_t chunk_hash_c "chunk_hash"(uint64_t inode, uint32_t index) nogil

cdef extern from "_page_cache.h":
    ssize_t read_cached(int fd, void *into, size_t length, uint64_t offset) nogil

cdef extern from "_huge_page.h":
    uint8_t *huge_page() nogil

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    uint16_t get16(const uint8_t *at) nogil
    uint32_t get32(const uint8_t *at) nogil
    uint64_t get64(const uint8_t *at) nogil
    void put16(uint8_t *at, uint16_t value) nogil
    void put32(uint8_t *at, uint32_t value) nogil
    void put64(uint8_t *at, uint64_t value) nogil
    void put64_big(uint8_t *at, uint64_t value) nogil

cdef extern from "_block_sums.h":
    int has_instruction() nogil
    void sum_blocks(const unsigned char *data, size_t count, uint32_t *sums) nogil

cdef extern from "<stdlib.h>":
    int posix_memalign(void **memory, size_t alignment, size_t size) nogil

cdef extern from "sys/uio.h" nogil:
    cdef struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t writev(int fd, const iovec *vectors, int count)

cdef extern from "_record_mark.h":
    void put_mark(uint8_t *at, uint64_t mark) nogil

crc_begin(0)

cdef enum:
    HEADER_BYTES = 32
    REQUEST = 2
    REPLY = 3
    SCALAR_BYTES_MAX = 24       # a tag and a number
    FIRST_BYTES = 4096
    KEPT_BYTES_MAX = 65536
    PAGE = 4096
    SMALL_BYTES = 8 << 12       # the largest payload whose memory comes from the heap
    ROOM_BYTES = PAGE + (32 << 12)
    HUGE_ROOMS = 15             # in 2 MiB
    ROOMS_MAX = 4 * HUGE_ROOMS
    SUMS_MAX = 48               # checksums that are computed together


cdef class ByteWriter:
    def __cinit__(self):
        self._begin = self._at = self._end = NULL
        self._grow(FIRST_BYTES)

    def __dealloc__(self):
        free(self._begin)

    cdef int _grow(self, Py_ssize_t count) except -1 nogil:
        cdef Py_ssize_t used = self._at - self._begin
        cdef Py_ssize_t room = 2 * (used + count)
        cdef uint8_t *begin = <uint8_t *>realloc(self._begin, room)
        if begin is NULL:
            with gil:
                raise MemoryError
        self._begin, self._at, self._end = begin, begin + used, begin + room
        return 0

    cdef int begin(self) except -1:
        self._at = self._begin
        if self._end - self._at > KEPT_BYTES_MAX:
            free(self._begin)
            self._begin = self._at = self._end = NULL
            self._grow(FIRST_BYTES)
        return 0

    cdef Py_ssize_t size(self) noexcept:
        return self._at - self._begin

    cdef bytes take(self):
        return PyBytes_FromStringAndSize(<const char *>self._begin, self._at - self._begin)

    cdef int copy_to(self, uint8_t *memory) noexcept:
        memcpy(memory, self._begin, self._at - self._begin)
        return 0

    cdef int u8(self, uint64_t value) except -1:
        if self._end - self._at < SCALAR_BYTES_MAX:
            self._grow(SCALAR_BYTES_MAX)
        self._at[0] = <uint8_t>value
        self._at += 1
        return 0

    cdef int u16(self, uint64_t value) except -1:
        if self._end - self._at < SCALAR_BYTES_MAX:
            self._grow(SCALAR_BYTES_MAX)
        put16(self._at, <uint16_t>value)
        self._at += 2
        return 0

    cdef int u32(self, uint64_t value) except -1:
        if self._end - self._at < SCALAR_BYTES_MAX:
            self._grow(SCALAR_BYTES_MAX)
        put32(self._at, <uint32_t>value)
        self._at += 4
        return 0

    cdef int u64(self, uint64_t value) except -1:
        if self._end - self._at < SCALAR_BYTES_MAX:
            self._grow(SCALAR_BYTES_MAX)
        put64(self._at, value)
        self._at += 8
        return 0

    cdef int i64(self, int64_t value) except -1:
        return self.u64(<uint64_t>value)

    cdef int u16_big(self, uint64_t value) except -1:
        if self._end - self._at < SCALAR_BYTES_MAX:
            self._grow(SCALAR_BYTES_MAX)
        self._at[0], self._at[1] = <uint8_t>(value >> 8), <uint8_t>value
        self._at += 2
        return 0

    cdef int u56_big(self, uint64_t value) except -1:
        if self._end - self._at < SCALAR_BYTES_MAX:
            self._grow(SCALAR_BYTES_MAX)
        put64_big(self._at, value << 8)
        self._at += 7
        return 0

    cdef int u64_big(self, uint64_t value) except -1:
        if self._end - self._at < SCALAR_BYTES_MAX:
            self._grow(SCALAR_BYTES_MAX)
        put64_big(self._at, value)
        self._at += 8
        return 0

    cdef int raw(self, bytes some) except -1:
        cdef Py_ssize_t count = len(some)
        if self._end - self._at < count:
            self._grow(count)
        memcpy(self._at, PyBytes_AS_STRING(some), count)
        self._at += count
        return 0

    cdef int part(self, bytes some, Py_ssize_t first, Py_ssize_t count) except -1:
        if first < 0 or count < 0 or first > len(some) - count:
            raise ValueError("the part lies outside of its bytes")
        if self._end - self._at < count:
            self._grow(count)
        memcpy(self._at, PyBytes_AS_STRING(some) + first, count)
        self._at += count
        return 0

    cdef int varint(self, uint64_t value) except -1:
        if self._end - self._at < SCALAR_BYTES_MAX:
            self._grow(SCALAR_BYTES_MAX)
        self._at = put_varint(self._at, value)
        return 0

    cdef int number(self, uint64_t tag, uint64_t value) except -1:
        if value:
            if self._end - self._at < SCALAR_BYTES_MAX:
                self._grow(SCALAR_BYTES_MAX)
            self._at = put_varint(put_varint(self._at, tag), value)
        return 0

    cdef int fixed(self, uint64_t tag, uint64_t value) except -1:
        if value:
            if self._end - self._at < SCALAR_BYTES_MAX:
                self._grow(SCALAR_BYTES_MAX)
            self._at = put_varint(self._at, tag)
            put64(self._at, value)
            self._at += 8
        return 0

    cdef int sfixed(self, uint64_t tag, int64_t value) except -1:
        return self.fixed(tag, <uint64_t>value)

    cdef int blob(self, uint64_t tag, bytes some) except -1:
        cdef Py_ssize_t count = len(some)
        if count:
            if self._end - self._at < count + SCALAR_BYTES_MAX:
                self._grow(count + SCALAR_BYTES_MAX)
            self._at = put_varint(put_varint(self._at, tag), count)
            memcpy(self._at, PyBytes_AS_STRING(some), count)
            self._at += count
        return 0

    cdef Py_ssize_t open(self, uint64_t tag) except -1:
        if self._end - self._at < SCALAR_BYTES_MAX:
            self._grow(SCALAR_BYTES_MAX)
        self._at = put_varint(self._at, tag) + 1
        return self._at - self._begin

    cdef int close(self, Py_ssize_t mark) except -1:
        cdef Py_ssize_t count = self._at - self._begin - mark
        cdef Py_ssize_t more = 0
        cdef Py_ssize_t rest = count >> 7
        while rest:
            more += 1
            rest >>= 7
        if more:
            if self._end - self._at < more:
                self._grow(more)
            memmove(self._begin + mark + more, self._begin + mark, count)
            self._at += more
        put_varint(self._begin + mark - 1, count)
        return 0

    cdef int put_u32(self, Py_ssize_t place, uint32_t value) except -1:
        put32(self._begin + place, value)
        return 0

    cdef int put_u64(self, Py_ssize_t place, uint64_t value) except -1:
        put64(self._begin + place, value)
        return 0

    cdef uint32_t crc(self, Py_ssize_t first) noexcept:
        return crc_of(self._begin + first, self._at - self._begin - first)

    cdef int send(self, int fd) noexcept:
        return errno if write(fd, self._begin, self._at - self._begin) < 0 else 0

    cdef int send_with(self, int fd, const uint8_t *more, Py_ssize_t count) noexcept:
        cdef iovec vectors[2]
        vectors[0].iov_base, vectors[0].iov_len = self._begin, self._at - self._begin
        vectors[1].iov_base, vectors[1].iov_len = <void *>more, count
        return errno if writev(fd, vectors, 2) < 0 else 0

    cdef int piece_crcs(self, some, uint64_t offset) except -1:
        cdef Py_buffer view
        cdef Py_ssize_t at = 0, after
        PyObject_GetBuffer(some, &view, PyBUF_SIMPLE)
        try:
            while at < view.len:
                after = min(view.len, at + PAGE - <Py_ssize_t>((offset + at) % PAGE))
                self.u32(crc_of(<const uint8_t *>view.buf + at, after - at))
                at = after
        finally:
            PyBuffer_Release(&view)
        return 0


cdef class ByteReader:
    cdef int open(self, bytes raw) except -1:
        self._raw = raw
        self._base = self._at = <const uint8_t *>PyBytes_AS_STRING(raw)
        self._end = self._at + len(raw)
        self.failed = False
        self.value = 0
        return 0

    cdef uint64_t u8(self) noexcept:
        if self._end - self._at < 1:
            self.failed = True
            return 0
        self._at += 1
        return (self._at - 1)[0]

    cdef uint64_t u16(self) noexcept:
        if self._end - self._at < 2:
            self.failed = True
            return 0
        self._at += 2
        return get16(self._at - 2)

    cdef uint64_t u32(self) noexcept:
        if self._end - self._at < 4:
            self.failed = True
            return 0
        self._at += 4
        return get32(self._at - 4)

    cdef uint64_t u64(self) noexcept:
        if self._end - self._at < 8:
            self.failed = True
            return 0
        self._at += 8
        return get64(self._at - 8)

    cdef int64_t i64(self) noexcept:
        return <int64_t>self.u64()

    cdef bytes raw(self, Py_ssize_t count):
        if count < 0 or self._end - self._at < count:
            self.failed = True
            return b""
        self._at += count
        return PyBytes_FromStringAndSize(<const char *>(self._at - count), count)

    cdef bytes rest(self):
        if self._at == self._end:
            return b""
        return PyBytes_FromStringAndSize(<const char *>self._at, self._end - self._at)

    cdef uint64_t field(self) noexcept:
        cdef uint64_t tag
        if self._at == self._end:
            return 0
        self._at = take_varint(self._at, self._end, &tag)
        if self._at is NULL or tag >> 32 or not tag >> 3:
            self.failed = True
            self._at = self._end
            return 0
        cdef uint64_t kind = tag & 7
        if kind == 0:
            self._at = take_varint(self._at, self._end, &self.value)
        elif kind == 1:
            self.value = self.u64()
        elif kind == 2:
            self._at = take_varint(self._at, self._end, &self.value)
            if self._at is not NULL:
                if self.value > <uint64_t>(self._end - self._at):
                    self._at = NULL
                else:
                    self._blob = self._at
                    self._at += self.value
        else:
            self._at = NULL
        if self._at is NULL:
            self._at = self._end
            self.failed = True
        return 0 if self.failed else tag

    cdef int64_t signed(self) noexcept:
        return <int64_t>self.value

    cdef bytes blob(self):
        return PyBytes_FromStringAndSize(<const char *>self._blob, <Py_ssize_t>self.value)

    cdef Py_ssize_t enter(self) noexcept:
        cdef Py_ssize_t mark = self._end - self._base
        self._at, self._end = self._blob, self._blob + self.value
        return mark

    cdef int leave(self, Py_ssize_t mark) noexcept:
        self._at, self._end = self._end, self._base + mark
        return 0

    cdef Py_ssize_t place(self) noexcept:
        return self._at - self._base

    cdef int open_part(self, bytearray buffer, Py_ssize_t begin, Py_ssize_t end) except -1:
        if not 0 <= begin <= end <= PyByteArray_GET_SIZE(buffer):
            raise IndexError("the part lies outside of its buffer")
        self.open(b"")
        self._raw = buffer
        self._base = self._at = <const uint8_t *>PyByteArray_AS_STRING(buffer) + begin
        self._end = self._base + (end - begin)
        return 0

    cdef int open_at(self, owner, const uint8_t *begin, Py_ssize_t count) noexcept:
        self._raw = owner
        self._base = self._at = begin
        self._end = begin + count
        self.failed = False
        self.value = 0
        return 0


cdef class RequestFrames:
    cdef bytes take(self, bytearray buffer, Py_ssize_t at, Py_ssize_t end, Py_ssize_t message_max, Py_ssize_t payload_max=0):
        if end > PyByteArray_GET_SIZE(buffer):
            raise ValueError("frames lie outside of their buffer")
        cdef const uint8_t *frame = <const uint8_t *>PyByteArray_AS_STRING(buffer) + at
        if end - at < HEADER_BYTES:
            return None
        cdef Py_ssize_t count = get32(frame + 16), more = get32(frame + 20)
        if (count > message_max or more > payload_max or end - at - HEADER_BYTES < count + more or not is_head(frame, REQUEST)
                or crc_of(frame + HEADER_BYTES, count) != get32(frame + 24)):
            return None
        self.method, self.number, self.deadline_ms = get16(frame + 4), get32(frame + 8), get32(frame + 12)
        self.frame_bytes = HEADER_BYTES + count + more
        self.payload = PyBytes_FromStringAndSize(<const char *>frame + HEADER_BYTES + count, more) if more else b""
        return PyBytes_FromStringAndSize(<const char *>frame + HEADER_BYTES, count)


cdef class RecordMemory:
    def __cinit__(self, memory):
        PyObject_GetBuffer(memory, &self._view, PyBUF_WRITABLE)

    def __dealloc__(self):
        PyBuffer_Release(&self._view)

    cdef uint8_t *_room(self, Py_ssize_t place) except NULL:
        if place < 0 or place > self._view.len - 8:
            raise IndexError(f"a record at {place}, behind the memory of records")
        return <uint8_t *>self._view.buf + place

    cdef int put_u32(self, Py_ssize_t place, uint32_t value) except -1:
        put32(self._room(place), value)
        return 0

    cdef int put_u64(self, Py_ssize_t place, uint64_t value) except -1:
        put64(self._room(place), value)
        return 0

    cdef int put_mark(self, Py_ssize_t place, uint64_t value) except -1:
        put_mark(self._room(place), value)
        return 0

    cdef uint64_t get_u64(self, Py_ssize_t place) except? 0:
        return get64(self._room(place))


cdef uint8_t *rooms[ROOMS_MAX]
cdef Py_ssize_t rooms_free = 0, rooms_made = 0


cdef uint8_t *take_room() noexcept:
    """Memory for the frame of a large payload; NULL if too many are in use."""
    global rooms_free, rooms_made
    cdef uint8_t *more
    if not rooms_free:
        more = huge_page() if rooms_made < ROOMS_MAX else NULL
        if more is NULL:
            return NULL
        while rooms_free < HUGE_ROOMS:
            rooms[rooms_free] = more + rooms_free * ROOM_BYTES
            rooms_free += 1
        rooms_made += rooms_free
    rooms_free -= 1
    return rooms[rooms_free]


cdef class PayloadFrame:
    # Memory of a large payload is used again when nothing refers to the frame any more. If each took its pages
    # from the heap and gave them back, this would cost a seventh of a store's time. Within one huge page the
    # kernel also has fewer pages to look up for the drive.
    def __dealloc__(self):
        global rooms_free
        if self._room is not NULL:
            rooms[rooms_free] = self._room
            rooms_free += 1

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self._frame, self.size, 0, flags)

    cdef int begin(self, uint32_t number, ByteWriter message, Py_ssize_t payload_bytes) except -1:
        cdef Py_ssize_t count = message.size(), before = HEADER_BYTES + count
        cdef bint is_large = payload_bytes > SMALL_BYTES
        if self._frame is not NULL or payload_bytes < 0:
            raise ValueError("a frame begins once, with a payload")
        self.size, self.payload_bytes = before + payload_bytes, payload_bytes
        if is_large and before <= PAGE and payload_bytes <= ROOM_BYTES - PAGE:
            self._room = take_room()
        if self._room is not NULL:
            self._frame = self._room + PAGE - before
        else:
            self._memory = PyBytes_FromStringAndSize(NULL, self.size + (PAGE if is_large else 0))
            self._frame = <uint8_t *>PyBytes_AS_STRING(self._memory)
            if is_large:
                self._frame += PAGE - 1 - (<size_t>self._frame + before + PAGE - 1) % PAGE
        self.payload_at = self._frame + before
        message.copy_to(self._frame + HEADER_BYTES)
        put_head(self._frame, REPLY, 0, number, 0, <uint32_t>count, <uint32_t>payload_bytes,
                 crc_of(self._frame + HEADER_BYTES, count))
        return 0

    cdef bint fill(self, int fd, uint64_t offset) noexcept:
        return read_cached(fd, self.payload_at, self.payload_bytes, offset) == self.payload_bytes

    cdef object payload(self):
        return memoryview(self)[self.size - self.payload_bytes:]

    cdef object take(self):
        return memoryview(self) if self.payload_bytes > SMALL_BYTES else self._memory


cdef class BlockMemory:
    def __cinit__(self, Py_ssize_t size):
        if size <= 0 or size % PAGE:
            raise ValueError(f"{size} bytes are no pages")
        if posix_memalign(<void **>&self.at, PAGE, size):
            self.at = NULL
            raise MemoryError
        self.size = size

    def __dealloc__(self):
        free(self.at)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.at, self.size, 0, flags)

    cdef bint fill(self, int fd, uint64_t offset, Py_ssize_t count) except -1:
        if count < 0 or count > self.size:
            raise IndexError("the read is longer than its memory")
        return read_cached(fd, self.at, count, offset) == count


cdef class ReceivedReply:
    def __dealloc__(self):
        self.close()

    cpdef int open(self, message, payload) except -1:
        self.close()
        PyObject_GetBuffer(message, &self._message, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(payload, &self._payload, PyBUF_SIMPLE)
        except BaseException:
            PyBuffer_Release(&self._message)
            raise
        self._has_buffers = True
        self._kept = payload if type(payload) is memoryview else memoryview(payload)
        self.open_at(<const uint8_t *>self._message.buf, self._message.len, <const uint8_t *>self._payload.buf, self._payload.len)
        return 0

    cdef int open_at(self, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload, Py_ssize_t payload_bytes) noexcept:
        self.message_at, self.message_bytes = message, message_bytes
        self.payload_at, self.payload_bytes = payload, payload_bytes
        return 0

    cpdef int close(self) except -1:
        self.message_bytes = self.payload_bytes = 0
        if self._has_buffers:
            self._has_buffers, self._kept = False, None
            PyBuffer_Release(&self._message)
            PyBuffer_Release(&self._payload)
        return 0

    cdef int open_blocks(self, bytes sums, BlockMemory memory, Py_ssize_t count) except -1:
        if count < 0 or count > memory.size:
            raise IndexError("the blocks are longer than their memory")
        self.close()
        self.open_at(<const uint8_t *>PyBytes_AS_STRING(sums), len(sums), memory.at, count)
        return 0

    cdef int read(self, ByteReader source) noexcept:
        return source.open_at(self._kept, self.message_at, self.message_bytes)

    cdef uint32_t u16(self, Py_ssize_t place) except? 0:
        if place < 0 or place > self.message_bytes - 2:
            raise IndexError("the number lies outside of its message")
        return get16(self.message_at + place)

    cdef uint32_t u32(self, Py_ssize_t place) except? 0:
        if place < 0 or place > self.message_bytes - 4:
            raise IndexError("the number lies outside of its message")
        return get32(self.message_at + place)

    cdef bint has_sums(self, Py_ssize_t place, Py_ssize_t first, Py_ssize_t count) noexcept:
        cdef uint32_t sums[SUMS_MAX]
        cdef Py_ssize_t blocks = count >> 12, done = 0, some, at
        if (place < 0 or first < 0 or count < 0 or count & (PAGE - 1) or first > self.payload_bytes - count
                or place > self.message_bytes - blocks * 4):
            return False
        while done < blocks:
            some = min(blocks - done, <Py_ssize_t>SUMS_MAX)
            if has_instruction():
                sum_blocks(self.payload_at + first + (done << 12), some, sums)
            else:
                for at in range(some):
                    put32(<uint8_t *>&sums[at], crc_of(self.payload_at + first + (done + at << 12), PAGE))
            if memcmp(sums, self.message_at + place + done * 4, some * 4):
                return False
            done += some
        return True

    cdef int _check(self, Py_ssize_t first, Py_ssize_t count) except -1:
        if first < 0 or count < 0 or first > self.payload_bytes - count:
            raise IndexError("the part lies outside of its payload")
        return 0

    cpdef object keep(self, Py_ssize_t first, Py_ssize_t count):
        self._check(first, count)
        if self._kept is not None:
            return self._kept if count == self.payload_bytes else self._kept[first:first + count]
        return memoryview(PyBytes_FromStringAndSize(<const char *>self.payload_at + first, count))

    cdef object view(self, Py_ssize_t first, Py_ssize_t count):
        self._check(first, count)
        return PyMemoryView_FromMemory(<char *>self.payload_at + first, count, PyBUF_READ)

    cpdef int copy_to(self, into, Py_ssize_t first, Py_ssize_t count) except -1:
        cdef Py_buffer view
        self._check(first, count)
        PyObject_GetBuffer(into, &view, PyBUF_WRITABLE)
        try:
            if view.len < count:
                raise IndexError("the part is longer than the memory for it")
            memmove(view.buf, self.payload_at + first, count)
        finally:
            PyBuffer_Release(&view)
        return 0

    cdef int write(self, int fd, ByteWriter head, Py_ssize_t first, Py_ssize_t count) except -1:
        self._check(first, count)
        return head.send_with(fd, self.payload_at + first, count)


cpdef uint32_t crc32c_of(bytes some, Py_ssize_t first, Py_ssize_t end=PY_SSIZE_T_MAX) noexcept:
    end = min(end, PyBytes_GET_SIZE(some))
    first = min(first, end)
    return crc_of(<const uint8_t *>PyBytes_AS_STRING(some) + first, end - first)


cdef bytes frame_of(uint8_t kind, uint32_t code, uint32_t number, uint32_t deadline_ms, bytes message,
                    const uint8_t *payload, Py_ssize_t payload_bytes):
    cdef Py_ssize_t count = len(message)
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + count + payload_bytes)
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(frame)
    memcpy(at + HEADER_BYTES, PyBytes_AS_STRING(message), count)
    put_head(at, kind, <uint16_t>code, number, deadline_ms, <uint32_t>count, <uint32_t>payload_bytes,
             crc_of(at + HEADER_BYTES, count))
    if payload_bytes:
        memcpy(at + HEADER_BYTES + count, payload, payload_bytes)
    return frame


cpdef bytes request_frame(uint32_t method, uint32_t number, uint32_t deadline_ms, bytes message, payload=None):
    cdef Py_buffer view
    if payload is None:
        return frame_of(REQUEST, method, number, deadline_ms, message, NULL, 0)
    PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
    try:
        return frame_of(REQUEST, method, number, deadline_ms, message, <const uint8_t *>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cpdef bytes request_frame_of(uint32_t method, uint32_t number, uint32_t deadline_ms, ByteWriter first, ByteWriter rest):
    cdef Py_ssize_t before = first.size(), count = before + rest.size()
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + count)
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(frame)
    first.copy_to(at + HEADER_BYTES)
    rest.copy_to(at + HEADER_BYTES + before)
    put_head(at, REQUEST, <uint16_t>method, number, deadline_ms, <uint32_t>count, 0, crc_of(at + HEADER_BYTES, count))
    return frame


cpdef bytes reply_frame(uint32_t number, uint32_t status, bytes message):
    return frame_of(REPLY, status, number, 0, message, NULL, 0)


cpdef uint64_t chunk_hash(uint64_t inode, uint32_t index) noexcept:
    return chunk_hash_c(inode, index)


cpdef int write_whole(int fd, bytes some) noexcept:
    cdef ssize_t written = write(fd, PyBytes_AS_STRING(some), PyBytes_GET_SIZE(some))
    while written < 0 and errno == EINTR:
        written = write(fd, PyBytes_AS_STRING(some), PyBytes_GET_SIZE(some))
    if written < 0:
        return errno
    return 0 if written == PyBytes_GET_SIZE(some) else EIO


cpdef Py_ssize_t receive(int fd, bytearray buffer) noexcept:
    cdef Py_ssize_t count = read(fd, PyByteArray_AS_STRING(buffer), PyByteArray_GET_SIZE(buffer))
    return -errno if count < 0 else count


cpdef double boottime_s() noexcept:
    return boottime_s_c()


cpdef double stopwatch_s() noexcept:
    return stopwatch_c()


cpdef int64_t wall_ns() noexcept:
    return wall_ns_c()


cpdef int duration_slot(double took_s) noexcept:
    return slot_of(took_s)
