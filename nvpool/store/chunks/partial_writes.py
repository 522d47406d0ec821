"""Read-modify-write of the partial blocks at the edges of a write.

The old block is read, checked and overlaid with the new bytes. A merge never waits: a block that is not in
memory is read by `MustWait.until` and cached, by its place and checksum, for the repeated call. A bad or
unreadable old block is never merged into a good one. The users are the block store and `truncate`.
"""

from __future__ import annotations

from functools import partial

from nvpool.core.checksum import ZERO_BLOCK, block_checksums, crc32c, first_bad_block
from nvpool.core.errors import ChecksumMismatch, InvalidRequest
from nvpool.core.units import BLOCK_BYTES
from nvpool.security.xts import BlockCipher
from nvpool.store.chunks.api import MustWait
from nvpool.store.chunks.index import Chunk, Index
from nvpool.store.chunks.read_batch import DriveReads
from nvpool.store.disk.device import Device
from nvpool.store.disk.index_records import SEGMENT_BITS, SEGMENT_MASK

_BLOCK_BYTES, _BLOCK_MASK = BLOCK_BYTES, BLOCK_BYTES - 1
_SEGMENT_BITS, _SEGMENT_MASK = SEGMENT_BITS, SEGMENT_MASK
_WARM_MAX = 256
"""Old blocks cached for repeated calls that may never come."""


class Merger:
    def __init__(self, index: Index, device: Device, readings: DriveReads, note_bad):
        self._index = index
        self._device = device
        self._readings = readings
        self._note_bad = note_bad
        self._warm: dict[tuple[int, bytes], bytes] = {}

    def whole_blocks(
        self,
        chunk: Chunk,
        offset: int,
        buffer: memoryview,
        checksums: bytes,
        cipher: BlockCipher | None = None,
    ) -> tuple[list, bytes]:
        """Return the write as buffers of whole blocks, ready to be stored, and their checksums.

        `cipher` is that of the volume if the volume is encrypted.

        ChecksumMismatch: the written bytes or an old block do not match. MustWait: an old block is not in
        memory.
        """
        if cipher is None:
            return self._whole_blocks(chunk, offset, buffer, checksums, None)
        buffers, _ = self._whole_blocks(chunk, offset, buffer, checksums, cipher)
        stored = cipher.encrypt(
            chunk.inode, chunk.index, offset >> 12, buffers[0] if len(buffers) == 1 else b"".join(buffers)
        )
        return [memoryview(stored)], block_checksums(stored)

    def _whole_blocks(
        self, chunk: Chunk, offset: int, buffer: memoryview, sums: bytes, cipher: BlockCipher | None
    ) -> tuple[list, bytes]:
        length = len(buffer)
        within = offset & _BLOCK_MASK
        head = min(_BLOCK_BYTES - within, length) if within else 0
        tail = (length - head) & _BLOCK_MASK
        middle = length - head - tail
        if len(sums) != 4 * ((1 if head else 0) + (middle >> 12) + (1 if tail else 0)):
            raise InvalidRequest(
                f"{len(sums)} bytes of checksums do not fit a write of {length} bytes at {offset}"
            )
        if length == _BLOCK_BYTES and not within:
            if crc32c(buffer).to_bytes(4, "little") != sums:
                raise ChecksumMismatch("a written block is not what its writer summed")
            return [buffer], sums
        if not head and not tail:
            if first_bad_block(buffer, sums) >= 0:
                raise ChecksumMismatch("a written block is not what its writer summed")
            return [buffer], sums
        buffers = []
        new_sums = []
        at = 0
        first = offset >> 12
        if head:
            merged = self._merged(chunk, first, within, buffer[:head], sums[:4], cipher)
            buffers.append(merged)
            new_sums.append(crc32c(merged).to_bytes(4, "little"))
            at = 1
        if middle:
            part = buffer[head : head + middle]
            part_sums = sums[at * 4 : at * 4 + (middle >> 12) * 4]
            if first_bad_block(part, part_sums) >= 0:
                raise ChecksumMismatch("a written block is not what its writer summed")
            buffers.append(part)
            new_sums.append(part_sums)
        if tail:
            merged = self._merged(
                chunk, offset + head + middle >> 12, 0, buffer[head + middle :], sums[-4:], cipher
            )
            buffers.append(merged)
            new_sums.append(crc32c(merged).to_bytes(4, "little"))
        return buffers, b"".join(new_sums)

    def _merged(
        self,
        chunk: Chunk,
        block: int,
        within: int,
        piece: memoryview,
        checksum: bytes,
        cipher: BlockCipher | None,
    ) -> bytearray:
        if crc32c(piece) != int.from_bytes(checksum, "little"):
            raise ChecksumMismatch("a written piece is not what its writer summed")
        merged = bytearray(self.old_block(chunk, block, cipher))
        merged[within : within + len(piece)] = piece
        return merged

    def old_block(self, chunk: Chunk, block: int, cipher: BlockCipher | None = None) -> bytes | memoryview:
        """Return the bytes of a block, checked and decrypted.

        MustWait: the block is not in memory. ChecksumMismatch: the block is bad.
        """
        found = self._stored_block(chunk, block)
        return found if cipher is None else cipher.decrypt(chunk.inode, chunk.index, block, found)

    def _stored_block(self, chunk: Chunk, block: int) -> bytes | memoryview:
        segment = self._index.segment(chunk, block >> _SEGMENT_BITS)
        within = block & _SEGMENT_MASK
        place = segment.disk[within] if within < len(segment.disk) else 0
        if not place:
            return ZERO_BLOCK
        checksum = segment.crcs[within * 4 : within * 4 + 4]
        found = self._warm.pop((place, checksum), None)
        if found is None:
            found = self._device.buffer(BLOCK_BYTES)
            if self._device.read_now([place << 12], [BLOCK_BYTES], [0], found):
                raise MustWait(partial(self._warm_up, place, checksum))
        if not len(found) or crc32c(found) != int.from_bytes(checksum, "little"):
            text = "does not fit its checksum" if len(found) else "cannot be read"
            self._note_bad(chunk.inode, chunk.index, block, f"{text} when merged with a write")
            error = ChecksumMismatch(
                f"block {block} of chunk {chunk.index} of inode {chunk.inode} is damaged"
            )
            error.damaged = chunk.inode, chunk.index, block
            raise error
        return found

    async def _warm_up(self, place: int, checksum: bytes) -> None:
        into = self._device.buffer(BLOCK_BYTES)
        with self._readings.held():
            (error,) = await self._device.read([place << 12], [BLOCK_BYTES], [0], into)
        while len(self._warm) >= _WARM_MAX:
            del self._warm[next(iter(self._warm))]
        self._warm[place, checksum] = bytes(into) if error is None else b""
