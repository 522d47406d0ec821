"""Messages of reads: the request for some reads, and the results in its reply.

A `ReadRequest` collects the reads of one message, `ReadResults` goes through a reply and compares each block with its
checksum. All reads of a client use them: those of the kernel, the event loop, batches and threads. The formats are
those of rpc/messages/read_write_codec; a store answers a message with one read and one grant quickest. Each object
is used by one caller at a time.
"""

from __future__ import annotations

from typing import Any

from nvpool.core import primitives
from nvpool.core.primitives import ByteReader, ByteWriter, ReceivedReply

_ENTRY_BYTES, _RESULT_BYTES, _BLOCK_BITS, _BLOCK_MASK = 24, 16, 12, 4095


class ReadRequest:
    """Request for reads. `begin`, then `add` each read, `close`, and `message` or `frame`."""

    __slots__ = ("count", "byte_count", "_grant", "_places", "_head", "_reads")

    def __init__(self) -> None:
        self.count = self.byte_count = 0
        self._grant = b""
        self._places: dict[bytes, int] | None = None
        self._head, self._reads = ByteWriter(), ByteWriter()

    def begin(self, epoch: int, target: int) -> None:
        """Begin a request to a target, by the map of this epoch."""
        self.count = self.byte_count = 0
        self._places = None
        head = self._head
        head.begin()
        head.fixed(0x09, epoch)
        head.number(0x10, target)
        self._reads.begin()

    def add(self, inode: int, index: int, offset: int, length: int, grant: bytes, flags: int) -> None:
        """Add a read of whole blocks of a chunk."""
        place = 0
        if not self.count:
            self._grant = grant
            self._add_grant(grant)
        elif self._places is not None or grant != self._grant:
            place = self._place(grant)
        reads = self._reads
        reads.u64(inode)
        reads.u32(index)
        reads.u32(offset)
        reads.u32(length)
        reads.u16(place)
        reads.u16(flags)
        self.count += 1
        self.byte_count += length

    def _place(self, grant: bytes) -> int:
        """Index of the grant among those of the request."""
        places = self._places
        if places is None:
            places = self._places = {self._grant: 0}
        place = places.get(grant)
        if place is None:
            place = places[grant] = len(places)
            self._add_grant(grant)
        return place

    def _add_grant(self, grant: bytes) -> None:
        head = self._head
        head.varint(0x1A)
        head.varint(len(grant))
        head.raw(grant)

    def close(self, verify: bool) -> None:
        """End the request. `verify`: the store compares the blocks with their checksums."""
        head = self._head
        head.varint(0x22)
        head.varint(self.count * _ENTRY_BYTES)
        self._reads.number(0x28, verify)

    def message(self) -> bytes:
        """The encoded request, after `close`."""
        return self._head.take() + self._reads.take()

    def frame(self, method: int, number: int, deadline_ms: int) -> bytes:
        """The request in a frame, after `close`."""
        return primitives.request_frame_of(method, number, deadline_ms, self._head, self._reads)


class ReadResults:
    """Results of a reply to reads. `open` it, then call `step` for each read, in the order of the request."""

    __slots__ = ("status", "length", "first", "_reply", "_source", "_result", "_sums", "_next", "_are_good")

    def __init__(self) -> None:
        self._source = ByteReader()
        self._reply: Any = None
        self._result = self._sums = self._next = 0
        self._are_good = False
        self.status = 0
        """Wire code of the read's error, or 0."""
        self.length = 0
        """Bytes of the read in the payload, from `first` on; the rest is a hole."""
        self.first = 0

    def open(self, reply: ReceivedReply, count: int) -> bool:
        """Begin. False: the reply is not one to `count` reads."""
        source = self._source
        reply.read(source)
        result_bytes = self._result = self._sums = self._next = 0
        while True:
            tag = source.field()
            if not tag:
                break
            if tag == 0x12:
                result_bytes = source.value
                self._result = source.place() - result_bytes
            elif tag == 0x1A:
                self._sums = source.place() - source.value
        self._reply = reply
        if source.failed or result_bytes != count * _RESULT_BYTES:
            return False
        if not self._sums:
            self._sums = reply.message_bytes
        # Checksums of many blocks are computed in parallel.
        self._are_good = count > 1 and reply.has_sums(self._sums, 0, reply.payload_bytes)
        return True

    def step(self, length_max: int) -> bool:
        """Go on to the next read, of at most `length_max` bytes.

        False: its bytes are not whole, or not those of their checksums. A read with an error has none.
        """
        reply: ReceivedReply = self._reply
        at = self._result
        self._result = at + _RESULT_BYTES
        self.status = reply.u16(at)
        if self.status:
            self.length = 0
            return True
        length = self.length = reply.u32(at + 4)
        place, first = self._sums, self._next
        self.first = first
        self._sums = place + (length >> _BLOCK_BITS << 2)
        self._next = first + length
        if self._are_good:
            return length <= length_max and not length & _BLOCK_MASK and self._next <= reply.payload_bytes
        return length <= length_max and reply.has_sums(place, first, length)

    def are_whole(self, lengths: list[int]) -> bool:
        """Whether the reads have exactly these bytes, without an error or a hole. To be called instead of `step`."""
        reply: ReceivedReply = self._reply
        at, total = self._result, 0
        for length in lengths:
            if reply.u16(at) or reply.u32(at + 4) != length:
                return False
            at += _RESULT_BYTES
            total += length
        return total == reply.payload_bytes and (self._are_good or reply.has_sums(self._sums, 0, total))

    def close(self) -> None:
        """Let go of the reply."""
        self._reply = None


def encode_read(
    epoch: int, target: int, inode: int, index: int, offset: int, length: int, grant: bytes, flags: int
) -> bytes:
    """Encode a request for one read. Any thread may call this."""
    request = ReadRequest()
    request.begin(epoch, target)
    request.add(inode, index, offset, length, grant, flags)
    request.close(False)
    return request.message()
