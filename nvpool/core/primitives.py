"""Primitives of the typed modules: write and read packed bytes, frame headers, clocks.

`primitives.pyx` is the compiled form; this module runs where nothing is compiled (`NVPOOL_PURE=1`). The typed
modules (a `.py` beside a `.pxd`) use nothing else that needs pointers, so each of them has one source. A
`ByteWriter` and a `ByteReader` are used by one caller at a time, which does not wait while it uses them.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from errno import EIO
from typing import Any

from nvpool.core import clock
from nvpool.core.checksum import block_checksums, crc32c, piece_checksums
from nvpool.core.clock import SYSTEM_CLOCK
from nvpool.core.units import BLOCK_BYTES

HEADER_BYTES = 32
_MAGIC, _REQUEST, _REPLY = 0x504E, 2, 3
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MASK, _GOLDEN_GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15
_MARK = struct.Struct("@Q")  # native, so that it is one store


class ByteWriter:
    """Buffer to which numbers and bytes are appended; `take` returns a copy of its content."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = bytearray()

    def begin(self) -> None:
        """Empty the buffer; memory beyond 64 KiB is given back."""
        self._bytes.clear()

    def size(self) -> int:
        """Number of bytes."""
        return len(self._bytes)

    def take(self) -> bytes:
        """Copy of the content."""
        return bytes(self._bytes)

    def u8(self, value: int) -> None:
        """Append a u8."""
        self._bytes.append(value & 0xFF)

    def u16(self, value: int) -> None:
        """Append a u16, little-endian, as all unless the name says otherwise."""
        self._bytes += (value & 0xFFFF).to_bytes(2, "little")

    def u32(self, value: int) -> None:
        """Append a u32."""
        self._bytes += (value & 0xFFFFFFFF).to_bytes(4, "little")

    def u64(self, value: int) -> None:
        """Append a u64."""
        self._bytes += value.to_bytes(8, "little")

    def i64(self, value: int) -> None:
        """Append an i64."""
        self._bytes += value.to_bytes(8, "little", signed=True)

    def u16_big(self, value: int) -> None:
        """Append a u16, big-endian."""
        self._bytes += (value & 0xFFFF).to_bytes(2, "big")

    def u56_big(self, value: int) -> None:
        """Append seven bytes, big-endian."""
        self._bytes += value.to_bytes(7, "big")

    def u64_big(self, value: int) -> None:
        """Append a u64, big-endian."""
        self._bytes += value.to_bytes(8, "big")

    def raw(self, some: bytes) -> None:
        """Append bytes."""
        self._bytes += some

    def part(self, some: bytes, first: int, count: int) -> None:
        """Append some[first : first + count]. ValueError: `some` is shorter."""
        if not 0 <= first <= first + count <= len(some):
            raise ValueError("the part lies outside of its bytes")
        self._bytes += some[first : first + count]

    def varint(self, value: int) -> None:
        """Append a varint (protocol buffers, encoding)."""
        while value > 127:
            self._bytes.append(value & 127 | 128)
            value >>= 7
        self._bytes.append(value)

    def number(self, tag: int, value: int) -> None:
        """Append a varint field, as proto3 does: nothing for 0."""
        if value:
            self.varint(tag)
            self.varint(int(value))

    def fixed(self, tag: int, value: int) -> None:
        """Append a fixed64 field; nothing for 0."""
        if value:
            self.varint(tag)
            self.u64(value)

    def sfixed(self, tag: int, value: int) -> None:
        """Append an sfixed64 field; nothing for 0."""
        if value:
            self.varint(tag)
            self.i64(value)

    def blob(self, tag: int, some: bytes) -> None:
        """Append a field of bytes; nothing for none."""
        if some:
            self.varint(tag)
            self.varint(len(some))
            self._bytes += some

    def open(self, tag: int) -> int:
        """Begin a field that is a message; what is appended up to `close` is its content. Returns a mark."""
        self.varint(tag)
        self._bytes.append(0)
        return len(self._bytes)

    def close(self, mark: int) -> None:
        """End the message with this mark."""
        content = bytes(self._bytes[mark:])
        del self._bytes[mark - 1 :]
        self.varint(len(content))
        self._bytes += content

    def put_u32(self, place: int, value: int) -> None:
        """Overwrite four bytes."""
        self._bytes[place : place + 4] = value.to_bytes(4, "little")

    def put_u64(self, place: int, value: int) -> None:
        """Overwrite eight bytes."""
        self._bytes[place : place + 8] = value.to_bytes(8, "little")

    def crc(self, first: int) -> int:
        """CRC32C of the content from `first` on."""
        return crc32c(bytes(self._bytes[first:]))

    def send(self, fd: int) -> int:
        """Write the content to a descriptor that does not block. Returns 0, or the error number."""
        try:
            os.write(fd, self._bytes)
        except OSError as error:
            return error.errno or EIO
        return 0

    def piece_crcs(self, some: Any, offset: int) -> None:
        """Append the CRC32C of each part into which block borders divide a buffer.

        `offset` is the place of the buffer's first byte.
        """
        self._bytes += piece_checksums(some, offset)


class ByteReader:
    """Reads numbers and protobuf fields of a byte string.

    After a read beyond the end `failed` is True, and the values are 0.
    """

    __slots__ = ("_raw", "_at", "_end", "failed", "value", "_blob")

    def __init__(self) -> None:
        self.open(b"")

    def open(self, raw: bytes) -> None:
        """Read `raw` from its beginning."""
        if type(raw) is not bytes:
            raise TypeError(f"expected bytes, got {type(raw).__name__}")
        self._raw, self._at, self._end = raw, 0, len(raw)
        self.failed = False
        self.value = self._blob = 0

    def _number(self, count: int, signed: bool = False) -> int:
        at = self._at
        if self._end - at < count:
            self.failed = True
            return 0
        self._at = at + count
        return int.from_bytes(self._raw[at : at + count], "little", signed=signed)

    def u8(self) -> int:
        """Read a u8."""
        return self._number(1)

    def u16(self) -> int:
        """Read a u16."""
        return self._number(2)

    def u32(self) -> int:
        """Read a u32."""
        return self._number(4)

    def u64(self) -> int:
        """Read a u64."""
        return self._number(8)

    def i64(self) -> int:
        """Read an i64."""
        return self._number(8, True)

    def raw(self, count: int) -> bytes:
        """Read `count` bytes."""
        at = self._at
        if not 0 <= count <= self._end - at:
            self.failed = True
            return b""
        self._at = at + count
        return self._raw[at : at + count]

    def rest(self) -> bytes:
        """All bytes that are not read yet."""
        return self._raw[self._at : self._end]

    def _varint(self) -> int:
        found = shift = 0
        while self._at < self._end and shift < 63:
            byte = self._raw[self._at]
            self._at += 1
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7
        self.failed = True
        return 0

    def field(self) -> int:
        """Read the next field of a message; return its tag, or 0 at the end and if `failed`.

        The value of a number is in `value`; a number has at most 63 bits, unless it is fixed64.
        """
        if self._at == self._end:
            return 0
        tag = self._varint()
        if self.failed or tag >> 32 or not tag >> 3:
            self.failed, self._at = True, self._end
            return 0
        kind = tag & 7
        if kind == 0:
            self.value = self._varint()
        elif kind == 1:
            self.value = self.u64()
        elif kind == 2:
            self.value = self._varint()
            self._blob = self._at
            if self.value > self._end - self._at:
                self.failed = True
            else:
                self._at += self.value
        else:
            self.failed = True
        if self.failed:
            self._at = self._end
            return 0
        return tag

    def signed(self) -> int:
        """Value of the last field as an sfixed64."""
        return self.value - (1 << 64) if self.value >> 63 else self.value

    def blob(self) -> bytes:
        """Bytes of the field that was read last."""
        return self._raw[self._blob : self._blob + self.value]

    def enter(self) -> int:
        """Read the fields of the message that is in the last field. Returns a mark for `leave`."""
        mark = self._end
        self._at, self._end = self._blob, self._blob + self.value
        return mark

    def leave(self, mark: int) -> None:
        """Continue behind the message."""
        self._at, self._end = self._end, mark

    def place(self) -> int:
        """Number of bytes up to the end of the last field."""
        return self._at

    def open_part(self, buffer: bytearray, begin: int, end: int) -> None:
        """Read buffer[begin:end]. The buffer must not change its size until the last read."""
        if not 0 <= begin <= end <= len(buffer):
            raise IndexError("the part lies outside of its buffer")
        self.open(bytes(buffer[begin:end]))


class RequestFrames:
    """Reads the request frames of a receive buffer."""

    __slots__ = ("method", "number", "deadline_ms", "frame_bytes", "payload")

    def take(
        self, buffer: bytearray, at: int, end: int, message_max: int, payload_max: int = 0
    ) -> bytes | None:
        """Message of the request frame at `at`; the other fields of its header are attributes then.

        None: the bytes before `end` are no whole and intact request, or the message or the payload is longer
        than its maximum. The caller must let the general parser decide about them.
        """
        if end > len(buffer):
            raise ValueError("frames lie outside of their buffer")
        if end - at < HEADER_BYTES:
            return None
        head = bytes(buffer[at : at + HEADER_BYTES])
        count = int.from_bytes(head[16:20], "little")
        more = int.from_bytes(head[20:24], "little")
        begin = at + HEADER_BYTES + count
        message = bytes(buffer[at + HEADER_BYTES : begin])
        if (
            count > message_max
            or more > payload_max
            or end - at - HEADER_BYTES < count + more
            or head[:4] != (_MAGIC | _REQUEST << 16).to_bytes(4, "little")
            or head[6:8] != b"\0\0"
            or crc32c(head[:28]) != int.from_bytes(head[28:], "little")
            or crc32c(message) != int.from_bytes(head[24:28], "little")
        ):
            return None
        self.method = int.from_bytes(head[4:6], "little")
        self.number = int.from_bytes(head[8:12], "little")
        self.deadline_ms = int.from_bytes(head[12:16], "little")
        self.frame_bytes = HEADER_BYTES + count + more
        self.payload = bytes(buffer[begin : begin + more])
        return message


class RecordMemory:
    """Writer of records in a memory that outlives this process.

    Places are offsets in bytes, and numbers are little-endian. IndexError: there is no room for 8 bytes at the
    place.
    """

    __slots__ = ("_view",)

    def __init__(self, memory: Any) -> None:
        self._view = memoryview(memory).cast("B")

    def _put(self, form: struct.Struct, place: int, value: int) -> None:
        if not 0 <= place <= len(self._view) - 8:
            raise IndexError(f"a record at {place}, behind the memory of records")
        form.pack_into(self._view, place, value)

    def put_u32(self, place: int, value: int) -> None:
        """Store a u32."""
        self._put(_U32, place, value)

    def put_u64(self, place: int, value: int) -> None:
        """Store a u64."""
        self._put(_U64, place, value)

    def put_mark(self, place: int, value: int) -> None:
        """Store a u64 as one store, after all that was stored before."""
        self._put(_MARK, place, value)

    def get_u64(self, place: int) -> int:
        """Read a u64."""
        if not 0 <= place <= len(self._view) - 8:
            raise IndexError(f"a record at {place}, behind the memory of records")
        value: int = _U64.unpack_from(self._view, place)[0]
        return value


class PayloadFrame:
    """Frame of a reply whose payload is read into it; nothing is copied to send it.

    Make it by `__new__`, then `begin`. The memory of a large payload begins at a page.
    """

    __slots__ = ("size", "_frame", "payload_bytes")

    def begin(self, number: int, message: ByteWriter, payload_bytes: int) -> None:
        """Write the head and the message. Called once."""
        said = message.take()
        self._frame = bytearray(
            _head(_REPLY, 0, number, 0, said, payload_bytes) + said + bytes(payload_bytes)
        )
        self.size, self.payload_bytes = len(self._frame), payload_bytes

    def fill(self, fd: int, offset: int) -> bool:
        """Read the payload from a file if all of it is in the page cache; return whether it was."""
        try:
            return os.preadv(fd, [self.payload()], offset, os.RWF_NOWAIT) == self.payload_bytes
        except OSError:  # EAGAIN; a read that waits meets any other error again
            return False

    def payload(self) -> memoryview:
        """Memory of the payload, to be written before the frame is sent."""
        return memoryview(self._frame)[self.size - self.payload_bytes :]

    def take(self) -> bytes | bytearray | memoryview:
        """Bytes of the frame."""
        return self._frame


class BlockMemory:
    """Memory that begins at a page, for reads of a drive that may bypass the page cache."""

    __slots__ = ("size", "_memory")

    def __init__(self, size: int) -> None:
        """`size`: whole pages."""
        if size <= 0 or size % BLOCK_BYTES:
            raise ValueError(f"{size} bytes are no pages")
        self.size = size
        self._memory = memoryview(mmap.mmap(-1, size))

    def fill(self, fd: int, offset: int, count: int) -> bool:
        """Read `count` bytes of a file into the beginning if all are in the page cache; return whether they were."""
        if not 0 <= count <= self.size:
            raise IndexError("the read is longer than its memory")
        try:
            return os.preadv(fd, [self._memory[:count]], offset, os.RWF_NOWAIT) == count
        except OSError:  # EAGAIN; a read that waits meets any other error again
            return False

    def view(self) -> memoryview:
        """All of the memory."""
        return self._memory


class ReceivedReply:
    """Message and payload of a reply, in the memory where they were received; also blocks with their checksums.

    The compiled receiver of frames opens it by `open_at` in the connection's buffer; there it is valid until the
    receiver returns.
    """

    __slots__ = ("_message", "_payload", "message_bytes", "payload_bytes")

    def __init__(self) -> None:
        self.close()

    def open(self, message: Any, payload: Any) -> None:
        """Use these bytes, which must not change before `close`."""
        self._message, self._payload = bytes(message), memoryview(payload)
        self.message_bytes, self.payload_bytes = len(self._message), len(self._payload)

    def open_blocks(self, sums: bytes, memory: BlockMemory, count: int) -> None:
        """Use the first `count` bytes of the memory, with `sums` in place of a message.

        The caller keeps both, and need not call `close`.
        """
        if not 0 <= count <= memory.size:
            raise IndexError("the blocks are longer than their memory")
        self.open(sums, memory.view()[:count])

    def close(self) -> None:
        """Let go of the bytes."""
        self._message, self._payload = b"", memoryview(b"")
        self.message_bytes = self.payload_bytes = 0

    def read(self, source: ByteReader) -> None:
        """Let `source` read the message."""
        source.open(self._message)

    def _number(self, place: int, count: int) -> int:
        if not 0 <= place <= self.message_bytes - count:
            raise IndexError("the number lies outside of its message")
        return int.from_bytes(self._message[place : place + count], "little")

    def u16(self, place: int) -> int:
        """The u16 at this place of the message."""
        return self._number(place, 2)

    def u32(self, place: int) -> int:
        """The u32 at this place of the message."""
        return self._number(place, 4)

    def has_sums(self, place: int, first: int, count: int) -> bool:
        """Whether payload[first : first + count] is of whole blocks whose checksums are at `place` of the message."""
        if place < 0 or first < 0 or count < 0 or count % BLOCK_BYTES or first + count > self.payload_bytes:
            return False
        sums = block_checksums(self._payload[first : first + count])
        return sums == self._message[place : place + len(sums)]

    def _part(self, first: int, count: int) -> memoryview:
        if not 0 <= first <= first + count <= self.payload_bytes:
            raise IndexError("the part lies outside of its payload")
        return self._payload[first : first + count]

    def keep(self, first: int, count: int) -> memoryview:
        """A part of the payload that stays valid."""
        return self._part(first, count)

    def view(self, first: int, count: int) -> memoryview:
        """A part of the payload, not to be used once the reply is not valid any more."""
        return self._part(first, count)

    def copy_to(self, into: Any, first: int, count: int) -> None:
        """Copy a part of the payload to the beginning of `into`, which may be the same memory."""
        into = memoryview(into)
        if len(into) < count:
            raise IndexError("the part is longer than the memory for it")
        into[:count] = self._part(first, count)

    def write(self, fd: int, head: ByteWriter, first: int, count: int) -> int:
        """Write `head` and a part of the payload by one call; return the error number, or 0."""
        try:
            os.writev(fd, (head.take(), self._part(first, count)))
        except OSError as error:
            return error.errno or 0
        return 0


def crc32c_of(some: bytes, first: int, end: int = sys.maxsize) -> int:
    """CRC32C of some[first:end]."""
    return crc32c(some[first:end])


def request_frame(method: int, number: int, deadline_ms: int, message: bytes, payload: Any = None) -> bytes:
    """Frame of a request (rpc/transports/frame). `payload`: a buffer, which is copied, or None."""
    if payload is None:
        return _head(_REQUEST, method, number, deadline_ms, message, 0) + message
    return b"".join((_head(_REQUEST, method, number, deadline_ms, message, len(payload)), message, payload))


def request_frame_of(
    method: int, number: int, deadline_ms: int, first: ByteWriter, rest: ByteWriter
) -> bytes:
    """As `request_frame`, for a message in two parts."""
    return request_frame(method, number, deadline_ms, first.take() + rest.take())


def reply_frame(number: int, status: int, message: bytes) -> bytes:
    """Frame of a reply without a payload (rpc/transports/frame)."""
    return _head(_REPLY, status, number, 0, message, 0) + message


def _head(kind: int, code: int, number: int, deadline_ms: int, message: bytes, payload_bytes: int) -> bytes:
    head = b"".join(
        (
            (_MAGIC | kind << 16).to_bytes(4, "little"),
            code.to_bytes(4, "little"),
            number.to_bytes(4, "little"),
            deadline_ms.to_bytes(4, "little"),
            len(message).to_bytes(4, "little"),
            payload_bytes.to_bytes(4, "little"),
            crc32c(message).to_bytes(4, "little"),
        )
    )
    return head + crc32c(head).to_bytes(4, "little")


def receive(fd: int, buffer: bytearray) -> int:
    """Read from a descriptor that does not block. Returns the number of bytes, or minus the error number."""
    try:
        return os.readv(fd, (buffer,))
    except OSError as error:
        return -(error.errno or EIO)


def chunk_hash(inode: int, index: int) -> int:
    """64 evenly distributed bits for a chunk; a part of the format (poolmap/file_layout).

    The hash applies the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014) to inode + (index + 1) * golden gamma, twice, so that neighbouring inodes and
    indexes get unrelated values.
    """
    z = (inode + (index + 1) * _GOLDEN_GAMMA) & _MASK
    for _ in range(2):
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


def write_whole(fd: int, some: bytes) -> int:
    """Write to a descriptor that takes all bytes at one time, without waiting; return 0, or the errno."""
    try:
        return 0 if os.write(fd, some) == len(some) else EIO
    except OSError as error:
        return error.errno or EIO


def boottime_s() -> float:
    """The boottime clock of core/clock."""
    return SYSTEM_CLOCK.boottime_s()


def stopwatch_s() -> float:
    """The stopwatch of core/clock."""
    return clock.stopwatch_s()


def wall_ns() -> int:
    """The wall clock of core/clock."""
    return SYSTEM_CLOCK.wall_ns()


def duration_slot(took_s: float) -> int:
    """Histogram slot of a duration (metrics/registry.Times)."""
    return int(took_s * 1e6).bit_length() if took_s > 0 else 0
