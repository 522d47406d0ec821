"""Frames of the stream transport: a fixed header, a protobuf message, a payload of raw bytes.

Header, 32 bytes, little-endian:

    bytes   field           meaning
    0-1     magic u16       0x504E ("NP")
    2       kind u8         1 HELLO, 2 REQUEST, 3 REPLY, 4 CANCEL (wire.proto, Frame.Kind)
    3       flags u8        0; a receiver that finds another value ends the connection
    4-5     code u16        REQUEST: the method · REPLY, HELLO: 0 or an error's wire code · CANCEL: 0
    6-7     reserved u16    0
    8-11    number u32      of the request, chosen by the client, unique among its pending requests · HELLO: 0
    12-15   deadline u32    REQUEST: milliseconds left when it was sent · else 0
    16-19   message u32     bytes of the message after the header, at most MESSAGE_BYTES_MAX
    20-23   payload u32     bytes of the payload after the message, at most PAYLOAD_BYTES_MAX
    24-27   message crc u32 CRC32C of the message
    28-31   header crc u32  CRC32C of bytes 0-27

The header has its own checksum, so that a flipped bit in a length is detected immediately and not only after
that many bytes. The payload has no checksum here: its blocks carry their checksums from writer to reader.
This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

from nvpool.core.checksum import crc32c
from nvpool.core.compiled_loader import load_compiled
from nvpool.core.containers.buffer_pool import SPARES
from nvpool.core.errors import CorruptFrame
from nvpool.rpc.api import MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX, Buffer
from nvpool.rpc.v1 import wire_pb2

# None in a process without compiled modules.
compiled_frame: Any = load_compiled("nvpool.rpc.transports._frame")

MAGIC = 0x504E
HELLO, REQUEST, REPLY, CANCEL = (
    wire_pb2.Frame.HELLO,
    wire_pb2.Frame.REQUEST,
    wire_pb2.Frame.REPLY,
    wire_pb2.Frame.CANCEL,
)
HEADER = Struct("<HBBHHIIIIII")
HEADER_BYTES = HEADER.size
_CHECKED = Struct("<HBBHHIIIII")
_CHECKED_BYTES = _CHECKED.size
_LENGTHS = Struct("<II")

SMALL_PAYLOAD_BYTES = 64 << 10
"""Largest payload that is copied out of the linear buffer.

A larger one is received directly into its own memory.
"""

LINEAR_BYTES = 128 << 10
"""Most bytes of one receive call: dozens of small frames, and not too much of a large payload that must be
copied."""

WIDE_PAYLOAD_BYTES = 128 << 10
WIDE_BYTES = 4 * (WIDE_PAYLOAD_BYTES + (4 << 10))
"""The same for connections with many payloads of up to WIDE_PAYLOAD_BYTES: four of them in one receive call.

Such payloads are processed directly in the buffer."""

NARROW_AFTER = 64
"""Number of larger payloads, without a `widen`, after which the buffer is narrow again.

A wide buffer would receive parts of such payloads, which must then be copied."""

EMPTY = memoryview(b"")

Frame = tuple[int, int, int, int, bytes, memoryview]
"""A received frame: kind, code, number, deadline_ms, message, payload."""
Head = tuple[int, int, int, int, bytes, int]
"""The same with the number of the payload's bytes."""
_NO_FRAME = (0, 0, 0, 0, b"")


def pack_head_plain(
    kind: int, code: int, number: int, deadline_ms: int, message: Buffer, payload_bytes: int
) -> bytes:
    """Header and message of a frame; the caller sends `payload_bytes` of payload after them."""
    checked = _CHECKED.pack(
        MAGIC, kind, 0, code, 0, number, deadline_ms, len(message), payload_bytes, crc32c(message)
    )
    return b"".join((checked, crc32c(checked).to_bytes(4, "little"), message))


def read_head_plain(buffer: bytearray, begin: int, end: int, whole_max: int) -> Head | int:
    """Return (kind, code, number, deadline_ms, message, payload bytes) of the frame at `begin`.

    If the frame is not complete before `end`, the result is the number of bytes needed instead: header,
    message and a payload of up to `whole_max`. CorruptFrame: the bytes are not a valid frame.
    """
    view = memoryview(buffer)[begin:end]
    (
        magic,
        kind,
        flags,
        code,
        reserved,
        number,
        deadline_ms,
        message_bytes,
        payload_bytes,
        message_crc,
        header_crc,
    ) = HEADER.unpack_from(view)
    if magic != MAGIC or crc32c(view[:_CHECKED_BYTES]) != header_crc:
        raise CorruptFrame("what came is not a frame of ours, or was changed on its way")
    if flags or reserved or not HELLO <= kind <= CANCEL:
        raise CorruptFrame(f"a frame of unknown kind {kind} (flags {flags:#x}, reserved {reserved})")
    if message_bytes > MESSAGE_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
        raise CorruptFrame(f"a frame of {message_bytes} + {payload_bytes} bytes is too long")
    needed: int = HEADER_BYTES + message_bytes + (payload_bytes if payload_bytes <= whole_max else 0)
    if len(view) < needed:
        return needed
    message = bytes(view[HEADER_BYTES : HEADER_BYTES + message_bytes])
    if crc32c(message) != message_crc:
        raise CorruptFrame("a message was changed on its way")
    return kind, code, number, deadline_ms, message, payload_bytes


def read_head_compiled(buffer: bytearray, begin: int, end: int, whole_max: int) -> Head | int:
    """Compiled form of read_head_plain."""
    found: Head | int | None = compiled_frame.read_head(buffer, begin, end, whole_max)
    # For an invalid frame the plain version raises the exact error.
    return found if found is not None else read_head_plain(buffer, begin, end, whole_max)


pack_head: Callable[[int, int, int, int, Buffer, int], bytes] = (
    pack_head_plain if compiled_frame is None else compiled_frame.pack_head
)
read_head: Callable[[bytearray, int, int, int], Head | int] = (
    read_head_plain if compiled_frame is None else read_head_compiled
)


class FrameReader:
    """Frame parser: takes received bytes (asyncio.BufferedProtocol's two calls) and passes frames to
    `deliver`.

    deliver(kind, code, number, deadline_ms, message bytes, payload memoryview): message and payload belong to
    the receiver. place(kind, number, payload_bytes) may return a destination for a payload (a writable
    memoryview of exactly that length), or None. CorruptFrame: the reader must not be used any more. While
    `stalled` is True frames are kept; set it to False and call `parse` to continue.
    """

    def __init__(
        self,
        deliver: Callable[[int, int, int, int, bytes, memoryview], None],
        place: Callable[[int, int, int], memoryview | None],
        admit: Callable[[int, int], bool] | None = None,
    ) -> None:
        """Create a reader with an optional memory check `admit`.

        `admit(kind, bytes)` is called, once or more often, before memory is taken for a frame with a message
        or a payload above LINEAR_BYTES. If it returns False, it must have set `stalled`; the next `parse`
        calls it again.
        """
        self.stalled = False
        self.admit = admit
        self.deliver = deliver
        self._place = place
        self.buffer = bytearray(LINEAR_BYTES)
        self._view = memoryview(self.buffer)
        self.begin = self.end = 0
        self.linear_bytes = LINEAR_BYTES
        self._whole_max = SMALL_PAYLOAD_BYTES
        self._larger = 0
        self._parsing = False
        self.sink: memoryview | None = None  # receives the rest of a large payload
        self._sink_at = 0
        self._sink_frame: tuple[int, int, int, int, bytes] = _NO_FRAME

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.sink is not None:
            return self.sink[self._sink_at :]
        if self.end == len(self.buffer):
            self._make_room(self.end - self.begin + HEADER_BYTES)
        elif not self.end and len(self.buffer) != self.linear_bytes:
            self._be_ordinary()
        return self._view[self.end :] if self.end else self._view

    def buffer_updated(self, count: int) -> None:
        if self.sink is None:
            self.end += count
        else:
            self._sink_at += count
            if self._sink_at < len(self.sink):
                return
            payload, self.sink = self.sink, None
            frame, self._sink_frame = self._sink_frame, _NO_FRAME
            self.deliver(*frame, payload)
        self.parse()

    def widen(self) -> None:
        """Prepare for many payloads of up to WIDE_PAYLOAD_BYTES that are processed in the receive buffer.

        To be called for each such payload. Takes effect when the buffer is empty.
        """
        self.linear_bytes, self._whole_max, self._larger = WIDE_BYTES, WIDE_PAYLOAD_BYTES, 0

    @property
    def empty(self) -> bytearray | None:
        """The receive buffer if it is empty and the reader is not stalled, otherwise None."""
        return None if self.end or self.stalled or self.sink is not None else self.buffer

    def rewind(self) -> int:
        """Number of kept bytes, moved to the buffer's start; pass the number to `buffer_updated` again."""
        if self.sink is not None:
            return 0
        kept = self.end - self.begin
        if self.begin:
            self._view[:kept] = self._view[self.begin : self.end]
        self.begin = self.end = 0
        return kept

    def skip(self, count: int) -> None:
        """Skip the first `count` of the bytes received next into `empty`. The caller has processed them."""
        self.begin = count

    def only(self, count: int) -> Frame | None:
        """Return the frame in `count` received bytes if they are exactly one frame.

        `deliver` is not called for it. None: pass the bytes to `buffer_updated` instead. CorruptFrame: the
        bytes are not a valid frame.
        """
        if self.end or self.stalled or self.sink is not None or count < HEADER_BYTES:
            return None
        found = read_head(self.buffer, 0, count, SMALL_PAYLOAD_BYTES)
        if not isinstance(found, tuple):
            return None
        at = HEADER_BYTES + len(found[4])
        if at + found[5] != count:
            return None
        return *found[:5], memoryview(bytes(self._view[at:count]))

    def parse(self) -> None:
        """Deliver all complete frames. Does nothing when called from within `deliver`."""
        if self._parsing:
            return
        self._parsing = True
        try:
            while not self.stalled and self.sink is None and self.end - self.begin >= HEADER_BYTES:
                if not self._take():
                    break
        finally:
            self._parsing = False
        if self.begin == self.end:
            self.begin = self.end = 0
            if len(self.buffer) > self.linear_bytes:  # it had grown for one long message
                self._be_ordinary()

    def _take(self) -> bool:
        """Deliver the frame at the buffer's start or begin to receive its payload.

        Return False if bytes are missing.
        """
        begin = self.begin
        found = read_head(self.buffer, begin, self.end, self._whole_max)
        if not isinstance(found, tuple):
            self._make_room(found)
            return False
        kind, code, number, deadline_ms, message, payload_bytes = found
        if (
            payload_bytes > LINEAR_BYTES
            and self.admit is not None
            and not self.admit(kind, len(message) + payload_bytes)
        ):
            return False
        at = begin + HEADER_BYTES + len(message)
        if not payload_bytes:
            self.begin = at
            self.deliver(kind, code, number, deadline_ms, message, EMPTY)
            return True
        if payload_bytes > self._whole_max > SMALL_PAYLOAD_BYTES:
            self._larger += 1
            if self._larger > NARROW_AFTER:
                self.linear_bytes, self._whole_max = LINEAR_BYTES, SMALL_PAYLOAD_BYTES
        have = min(self.end - at, payload_bytes)
        self.begin = at + have
        payload = self._place(kind, number, payload_bytes)
        view = self._view
        if have == payload_bytes:
            if payload is None and payload_bytes <= SMALL_PAYLOAD_BYTES:
                payload = memoryview(bytes(view[at : at + have]))
            else:
                payload = SPARES.take(payload_bytes) if payload is None else payload
                payload[:] = view[at : at + have]
            self.deliver(kind, code, number, deadline_ms, message, payload)
            return True
        if payload is None:
            payload = SPARES.take(payload_bytes)
        payload[:have] = view[at : at + have]
        self.sink, self._sink_at = payload, have
        self._sink_frame = (kind, code, number, deadline_ms, message)
        return True

    def abandon(self, number: int) -> None:
        """Stop writing to the caller's memory for this request's payload.

        Receive the rest into other memory.
        """
        if self.sink is not None and self._sink_frame[2] == number:
            self.sink = memoryview(bytearray(len(self.sink)))

    def release(self) -> None:
        """Release memory and callbacks of a closed connection.

        A reference cycle would keep them until a collection.
        """
        # Nothing is received after this; what else may still be called compares with None first.
        self.buffer = self._view = self.sink = None  # type: ignore[assignment]  # see above
        self.deliver = self._place = self.admit = None  # type: ignore[assignment]  # see above

    def unfinished(self) -> tuple[bytes, int] | None:
        """Return the start and the length, as far as known, of an incomplete frame.

        The start (bytes) distinguishes the frame from earlier ones. None if there is no such frame, or while
        frames are kept.
        """
        if self.stalled or self.buffer is None:
            return None
        if self.sink is not None:
            return b"%012d" % self._sink_frame[2], len(self.sink)
        kept = self.end - self.begin
        if not kept:
            return None
        head = bytes(self._view[self.begin : self.begin + min(kept, HEADER_BYTES)])
        return head[:12], sum(_LENGTHS.unpack_from(head, 16)) if kept >= HEADER_BYTES else 0

    def _be_ordinary(self) -> None:
        """Receive into a buffer of the normal size. The old buffer must be empty."""
        self.buffer = bytearray(self.linear_bytes)
        self._view = memoryview(self.buffer)

    def _make_room(self, frame_bytes: int) -> None:
        """Make space for the frame that begins at `begin`: move it to the front, or rarely enlarge the
        buffer.

        The buffer at most doubles when it is full, since the length in a header is only a claim, and has
        space for this frame alone.
        """
        if len(self.buffer) - self.begin >= frame_bytes:
            return
        kept = self.end - self.begin
        if kept == len(self.buffer):
            if self.admit is not None:
                _, kind, _, _, _, _, _, message_bytes, payload_bytes, _, _ = HEADER.unpack_from(
                    self.buffer, self.begin
                )
                if not self.admit(kind, message_bytes + payload_bytes):
                    return
            buffer = bytearray(min(frame_bytes, 2 * kept))
            buffer[:kept] = self._view[self.begin : self.end]
            self.buffer, self._view = buffer, memoryview(buffer)
        elif self.begin:
            self._view[:kept] = self._view[self.begin : self.end]  # may overlap, which memoryview allows
        self.begin, self.end = 0, kept
