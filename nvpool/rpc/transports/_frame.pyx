# cython: language_level=3, boundscheck=False, wraparound=False
"""Compiled frame headers and reply dispatch, without Python objects in between.

The reference implementations are in frame.py and frame_fast_path.py.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from crc32c import crc32c

from nvpool.core.clock import SystemClock
from nvpool.rpc.transports._head cimport HEADER_BYTES, REPLY, is_head, put_head
from nvpool.core.primitives cimport ReceivedReply
from nvpool.rpc.reply_receivers cimport PayloadReceiver, ReplyBurst, ReplyReceiver
from nvpool.rpc.api import MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX, Reply

cdef extern from "_clock.h":
    double boottime_s() nogil
    int slot_of(double took_s) nogil

cdef extern from "_crc.h":
    void crc_begin(int by_table)
    uint32_t crc_of(const uint8_t *bytes, size_t count) nogil
    uint32_t get32(const uint8_t *at) nogil

crc_begin(0)

cdef enum:
    TABLES_BYTES_MAX = 1024  # for a longer message the library is faster: it uses the processor's CRC instruction

cdef object nothing = memoryview(b""), new_tuple = tuple.__new__, clock_of_system = SystemClock.boottime_s
cdef ReceivedReply received = ReceivedReply()
cdef uint32_t message_max = MESSAGE_BYTES_MAX
cdef uint32_t payload_max = PAYLOAD_BYTES_MAX


cdef uint32_t message_crc(bytes message) except? 0:
    if len(message) > TABLES_BYTES_MAX:
        return crc32c(message)
    return crc_of(<uint8_t *>PyBytes_AS_STRING(message), len(message))


def pack_head(uint8_t kind, uint16_t code, uint32_t number, uint32_t deadline_ms, message, uint32_t payload_bytes):
    """Compiled form of frame.pack_head_plain."""
    cdef bytes its = message if type(message) is bytes else bytes(message)
    cdef uint32_t count = <uint32_t>len(its)
    cdef bytes head = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + count)
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(head)
    put_head(at, kind, code, number, deadline_ms, count, payload_bytes, message_crc(its))
    memcpy(at + HEADER_BYTES, PyBytes_AS_STRING(its), count)
    return head


def read_head(bytearray buffer, Py_ssize_t begin, Py_ssize_t end, uint32_t whole_max):
    """Compiled form of frame.read_head_plain; returns None where that raises an error."""
    if begin < 0 or end - begin < HEADER_BYTES or end > PyByteArray_GET_SIZE(buffer):
        raise ValueError("the head of a frame lies outside of its buffer")
    cdef const uint8_t *at = <const uint8_t *>PyByteArray_AS_STRING(buffer) + begin
    cdef uint32_t message_bytes = get32(at + 16), payload_bytes = get32(at + 20)
    if not 1 <= at[2] <= 4 or not is_head(at, at[2]) or message_bytes > message_max or payload_bytes > payload_max:
        return None
    cdef Py_ssize_t needed = HEADER_BYTES + <Py_ssize_t>message_bytes + (payload_bytes if payload_bytes <= whole_max else 0)
    if end - begin < needed:
        return needed
    cdef bytes message = PyBytes_FromStringAndSize(<const char *>at + HEADER_BYTES, message_bytes)
    if message_crc(message) != get32(at + 24):
        return None
    return at[2], at[4] | at[5] << 8, get32(at + 8), get32(at + 12), message, payload_bytes


cdef class ReplyTaker:
    cdef ReplyBurst take(self, const uint8_t *message, Py_ssize_t message_bytes, const uint8_t *payload, Py_ssize_t payload_bytes):
        """Take a successful reply directly from the connection's buffer, which holds message and payload.

        Returns the burst that should continue, or None. None means that nothing was taken; the object is
        then called as any other on_done.
        """
        return None


def hear(connection, frames, Py_ssize_t count):
    """Dispatch the successful replies among `count` bytes that a connection's frame stream has just received.

    Starts with the bytes that were kept before and stops at the first frame that is no successful reply. The
    replies complete requests as multiplexer.ClientConnection does. A reply with a payload or a long message is
    dispatched only to a PayloadReceiver or ReplyTaker. Returns -1 if all bytes were consumed; otherwise the caller passes the
    returned count to FrameReader.buffer_updated.
    """
    cdef bytearray buffer
    cdef const uint8_t *frame
    cdef const uint8_t *message
    cdef Py_ssize_t at, end, length, message_bytes, payload_bytes, run = 0
    cdef dict in_flight
    cdef tuple entry
    cdef PyObject *found
    cdef ReplyBurst asking, last = None
    cdef bint takes, receives, is_system
    cdef double took_s
    reader = frames.reader
    if reader.sink is not None or reader.stalled:
        return count
    buffer = reader.buffer
    if buffer is None:
        return count
    at, end = reader.begin, reader.end
    end += count
    if at < 0 or end > PyByteArray_GET_SIZE(buffer):
        raise ValueError("frames lie outside of their buffer")
    in_flight, waiting, calls, now_s = connection.in_flight, connection.waiting, connection.calls, connection.now_s
    is_system = now_s is clock_of_system
    frames.reading = True
    try:
        while True:
            frame = <const uint8_t *>PyByteArray_AS_STRING(buffer) + at
            length = reply_at(frame, end - at)
            if not length:
                break
            number = get32(frame + 8)
            found = PyDict_GetItem(in_flight, number)
            if found is NULL:
                break
            entry = <tuple><object>found
            who = entry[0]
            receives, takes = isinstance(who, PayloadReceiver), isinstance(who, ReplyTaker)
            message, message_bytes, payload_bytes = frame + HEADER_BYTES, get32(frame + 16), get32(frame + 20)
            if (not receives and not takes and (payload_bytes or message_bytes > TABLES_BYTES_MAX)
                    or crc_of(message, message_bytes) != get32(frame + 24)):
                break
            at += length
            del in_flight[number]
            calls.ended += 1
            took_s = (boottime_s() if is_system else <double>now_s()) - <double>entry[5]
            asking = None
            try:
                if receives:
                    received.open_at(message, message_bytes, message + message_bytes, payload_bytes)
                    try:
                        asking = (<PayloadReceiver>who).receive_reply(received)
                    finally:
                        received.close()
                elif takes:
                    asking = (<ReplyTaker>who).take(message, message_bytes, message + message_bytes, payload_bytes)
                elif isinstance(who, ReplyReceiver):
                    asking = (<ReplyReceiver>who).receive(PyBytes_FromStringAndSize(<const char *>message, message_bytes))
                if asking is None:
                    complete(who, message, message_bytes, payload_bytes)
            except Exception as error:
                connection.loop.call_exception_handler({"message": "on_done of a request raised", "exception": error})
            answered(calls, entry[4], took_s)
            if waiting:
                connection.pump()
            if asking is not None and last is not asking:
                if last is not None:
                    last.go_on()
                last, run = asking, 0
            if reader.stalled:  # the connection has ended meanwhile
                break
            if asking is None:
                continue
            run += 1
            if run == asking.turn and at < end:
                last = None
                asking.go_on()
                if frames.out:
                    frames.flush()
                if reader.stalled:
                    break
        if last is not None:
            last.go_on()
    finally:
        reader.begin = at
        frames.reading = False
        if frames.out:
            frames.flush()
    if at == end and PyByteArray_GET_SIZE(buffer) <= <Py_ssize_t>reader.linear_bytes:
        reader.begin = reader.end = 0
        return -1
    return count


cdef Py_ssize_t reply_at(const uint8_t *at, Py_ssize_t have) noexcept nogil:
    """Length of the complete frame at `at` if it is a successful reply, otherwise 0."""
    cdef Py_ssize_t length
    if have < HEADER_BYTES:
        return 0
    length = HEADER_BYTES + <Py_ssize_t>get32(at + 16) + <Py_ssize_t>get32(at + 20)
    return length if length <= have and not at[4] and not at[5] and not get32(at + 12) and is_head(at, REPLY) else 0


cdef int complete(who, const uint8_t *message, Py_ssize_t message_bytes, Py_ssize_t payload_bytes) except -1:
    payload = nothing
    if payload_bytes:
        payload = memoryview(PyBytes_FromStringAndSize(<const char *>message + message_bytes, payload_bytes))
    who(new_tuple(Reply, (PyBytes_FromStringAndSize(<const char *>message, message_bytes), payload)), None)
    return 0


cdef int answered(calls, method, double took_s) except -1:
    """Compiled form of Calls.answered."""
    times = calls.by_method.get(method)
    if times is None:
        calls.answered(method, took_s, 0)
        return 0
    counts = <list?>times.counts
    counts[slot_of(took_s)] += 1
    times.sum_s += took_s
    return 0
