"""The chunk store in memory, a fake for tests and simulations.

This store keeps chunks in a dict, fulfils the whole chunk store contract, and remembers which state was
flushed. `crash` simulates a loss of power: each chunk returns to its last flushed state. Tests of the client
and simulations use the fake. It has no drive, no thread and no index, so it shares nothing with the block
store but the contract.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nvpool.core.checksum import ZERO_BLOCK, ZERO_BLOCK_CHECKSUM, crc32c, piece_checksums
from nvpool.core.errors import (
    Cancelled,
    ChecksumMismatch,
    Fenced,
    InvalidRequest,
    NoSpace,
    NvpoolError,
    StaleCut,
    StaleEpoch,
    StaleGrant,
)
from nvpool.core.ids import RequestId, is_done
from nvpool.core.units import BLOCK_BYTES, CHUNK_BYTES_MAX
from nvpool.poolmap.chains.protocol import MemberChunkState, after_cut, next_version, raised
from nvpool.poolmap.chains.tables import ChainSet
from nvpool.security.xts import BlockCipher
from nvpool.store.chunk_write import ChunkWrite, Placed
from nvpool.store.chunks.api import (
    ALL_INODES,
    CHUNK_BLOCKS_MAX,
    LOST_CHECKSUM,
    READ_BATCH_BYTES_MAX,
    UNCHECKED,
    BufferSource,
    ChunkCopy,
    ChunkDescription,
    ChunkState,
    ChunkVersion,
    HeldChunk,
    InodeCut,
    ReadBatch,
    ScrubStep,
    VersionsStep,
    check_copy,
    check_table,
)
from nvpool.store.disk.bad_blocks import BadBlock

_READ = struct.Struct("<QIIIHH")
_RESULT = struct.Struct("<HHIQ")
_REQUESTS_KEPT = 16


class _Chunk(NamedTuple):
    version: int
    cut: int
    requests: tuple[tuple[int, int, int], ...]
    blocks: dict[int, tuple[bytes, int]]
    """Bytes and checksum of each block that is not a hole."""
    table: int = 1


class _MemoryWriter:
    """Implementation of ChunkWriter: nothing is staged, so a prepared write is only checked."""

    def __init__(self, store: MemoryChunkStore) -> None:
        self._store = store

    def places_first(self, offset: int, length: int) -> bool:
        return False

    async def stage(self, write: ChunkWrite) -> Placed:
        raise AssertionError("no write is staged in memory")

    async def prepare(self, write: ChunkWrite) -> Placed:
        return self.prepare_now(write)

    def prepare_now(self, write: ChunkWrite) -> Placed:
        self._store.check_write(write)
        return Placed(None, [])

    def write_now(self, write: ChunkWrite, epoch: int, version: int, placed: Placed | None = None) -> int:
        return self._store.write_now(
            write.inode,
            write.index,
            write.offset,
            write.buffer,
            write.checksums,
            cut=write.cut,
            request=write.request,
            epoch=epoch,
            version=version,
            table=write.table,
            cipher=write.cipher,
        )

    def drop_placed(self, placed: Placed) -> None:
        pass

    def held(self, inode: int, index: int) -> HeldChunk:
        return self._store.held(inode, index)

    def changing(self, inode: int, index: int) -> None:
        pass


class MemoryChunkStore:
    location_leases = None
    on_bad = None

    def __init__(self, capacity_bytes: int = 1 << 40, *, reserve_share: float = 0.02):
        self.block_count = capacity_bytes // BLOCK_BYTES
        self.block_limit = self.block_count - int(self.block_count * reserve_share)
        self.chunks: dict[tuple[int, int], _Chunk] = {}
        self._inodes: dict[int, tuple[int, int]] = {}  # truncate number, version floor
        self.drive_synced()
        self.used_blocks = 0
        self._bad: dict[tuple[int, int, int], str] = {}
        self.fenced_because = ""
        self.on_fence: Callable[[str], None] | None = None
        self.verifier = 1
        self._note = b""
        self.fail_syncs = 0
        self.fail_writes: list[NvpoolError] = []
        self.writer = _MemoryWriter(self)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_now(
        self, reads: bytes, owners: Sequence[int], verify: bool = False, room: BufferSource | None = None
    ) -> ReadBatch:
        self._refuse_when_fenced()
        if len(reads) % _READ.size:
            raise InvalidRequest("not whole read headers")
        batch = ReadBatch()
        sums = []
        total = 0
        for inode, index, offset, length, grant, _ in _READ.iter_unpack(reads):
            try:
                found = self._read(
                    inode, index, offset, length, owners[grant] if grant < len(owners) else None, verify
                )
            except NvpoolError as error:
                batch.results += _RESULT.pack(error.wire_code, 0, 0, 0)
                continue
            total += length
            if total > READ_BATCH_BYTES_MAX:
                raise InvalidRequest("the batch is too large")
            blocks, version = found
            batch.results += _RESULT.pack(
                0, UNCHECKED if blocks and not verify else 0, len(blocks) * BLOCK_BYTES, version
            )
            batch.payload += [memoryview(block) for block, _ in blocks]
            sums += [checksum for _, checksum in blocks]
        batch.checksums = struct.pack(f"<{len(sums)}I", *sums)
        return batch

    def _read(self, inode, index, offset, length, owner, verify) -> tuple[list[tuple[bytes, int]], int]:
        if (
            owner is None
            or offset % BLOCK_BYTES
            or length % BLOCK_BYTES
            or not length
            or offset + length > CHUNK_BYTES_MAX
        ):
            raise InvalidRequest("not whole blocks of a chunk")
        if owner not in (inode, ALL_INODES):
            raise StaleGrant
        chunk = self.chunks.get((inode, index))
        if chunk is None:
            return [], 0
        wanted = range(offset // BLOCK_BYTES, (offset + length) // BLOCK_BYTES)
        found = [chunk.blocks.get(number, (ZERO_BLOCK, ZERO_BLOCK_CHECKSUM)) for number in wanted]
        while found and wanted[len(found) - 1] not in chunk.blocks:
            found.pop()
        for number, (block, checksum) in zip(wanted, found, strict=False):
            if (verify or (inode, index, number) in self._bad) and crc32c(block) != checksum:
                self.note_bad(inode, index, number, "does not fit its checksum when read")
                raise ChecksumMismatch
        return found, chunk.version

    def locate(self, inode: int, index: int, blocks: int, life_s: float) -> None:
        return None  # there is no drive that a client could read

    async def finish_read(self, batch: ReadBatch) -> None:
        raise AssertionError("nothing is ever missed in memory")

    def begin_finish(self, batch: ReadBatch, on_done: Callable[[BaseException | None], None]) -> None:
        raise AssertionError("nothing is ever missed in memory")

    # -- writing -----------------------------------------------------------------------------------------------------

    def write_now(
        self,
        inode: int,
        index: int,
        offset: int,
        buffer: memoryview,
        checksums: bytes,
        *,
        cut: int = 0,
        request: RequestId | None = None,
        epoch: int = 1,
        version: int = 0,
        table: int = 0,
        cipher: BlockCipher | None = None,
    ) -> int:
        self._refuse_when_fenced()
        if not len(buffer) or offset < 0 or offset + len(buffer) > CHUNK_BYTES_MAX:
            raise InvalidRequest("a write lies in a chunk")
        check_table(table)
        chunk = self.chunks.get((inode, index)) or _Chunk(0, 0, (), {})
        its_cut, floor = self._inodes.get(inode, (0, 0))
        if request is not None:
            if is_done(chunk.requests, request):
                return chunk.version
            if request.slot > 0xFFFF:
                raise InvalidRequest("no slot")
        if cut < its_cut and not version:
            raise StaleCut
        new_version = self._next(chunk.version, floor, epoch, version)
        if len(checksums) != len(piece_checksums(bytes(len(buffer)), offset)):
            raise InvalidRequest("the checksums do not fit the write")
        if piece_checksums(buffer, offset) != bytes(checksums):
            raise ChecksumMismatch("a written block is not what its writer summed")
        blocks = self._merged(inode, index, chunk, offset, bytes(buffer), cipher)
        added = len(blocks.keys() - chunk.blocks.keys())
        if (
            added and self.used_blocks + len(blocks) > self.block_limit
        ) or self.used_blocks + added > self.block_count:
            raise NoSpace
        if self.fail_writes:
            raise self.fail_writes.pop(0)
        requests = self._with_request(chunk.requests, request)
        self.chunks[inode, index] = _Chunk(
            new_version, max(cut, chunk.cut), requests, {**chunk.blocks, **blocks}, table or chunk.table
        )
        self.used_blocks += added
        for number in blocks:
            self._bad.pop((inode, index, number), None)
        return new_version

    def held(self, inode: int, index: int) -> HeldChunk:
        self._refuse_when_fenced()
        chunk = self.chunks.get((inode, index)) or _Chunk(0, 0, (), {})
        cut, floor = self._inodes.get(inode, (0, 0))
        return HeldChunk(chunk.version, floor, cut, chunk.requests)

    async def write(self, *arguments, **named) -> int:
        return self.write_now(*arguments, **named)

    def check_write(self, write: ChunkWrite) -> None:
        """Raise what `write_now` would raise for the bytes, the checksums, an old block or the space."""
        self._refuse_when_fenced()
        offset, buffer = write.offset, write.buffer
        if not len(buffer) or offset < 0 or offset + len(buffer) > CHUNK_BYTES_MAX:
            raise InvalidRequest("a write lies in a chunk")
        if len(write.checksums) != len(piece_checksums(bytes(len(buffer)), offset)):
            raise InvalidRequest("the checksums do not fit the write")
        if piece_checksums(buffer, offset) != write.checksums:
            raise ChecksumMismatch("a written block is not what its writer summed")
        chunk = self.chunks.get(write.name) or _Chunk(0, 0, (), {})
        blocks = self._merged(*write.name, chunk, offset, bytes(buffer), write.cipher)
        added = len(blocks.keys() - chunk.blocks.keys())
        if (
            added and self.used_blocks + len(blocks) > self.block_limit
        ) or self.used_blocks + added > self.block_count:
            raise NoSpace

    @staticmethod
    def _next(version: int, floor: int, epoch: int, given: int = 0) -> int:
        if not given:
            return next_version(MemberChunkState(version, floor), epoch)
        if given <= version:
            raise StaleEpoch(f"the chunk has version {version} already, not {given}")
        return given

    def _merged(
        self, inode, index, chunk: _Chunk, offset: int, buffer: bytes, cipher: BlockCipher | None
    ) -> dict[int, tuple[bytes, int]]:
        first, end = offset // BLOCK_BYTES, -(-(offset + len(buffer)) // BLOCK_BYTES)
        whole = bytearray((end - first) * BLOCK_BYTES)
        for number in {first, end - 1}:
            place = number * BLOCK_BYTES
            if offset <= place and place + BLOCK_BYTES <= offset + len(buffer):
                continue
            block, checksum = chunk.blocks.get(number, (ZERO_BLOCK, ZERO_BLOCK_CHECKSUM))
            if crc32c(block) != checksum:
                self.note_bad(inode, index, number, "does not fit its checksum when merged with a write")
                error = ChecksumMismatch()
                error.damaged = inode, index, number
                raise error
            if cipher is not None:
                block = cipher.decrypt(inode, index, number, block)
            whole[place - first * BLOCK_BYTES : place - first * BLOCK_BYTES + BLOCK_BYTES] = block
        within = offset - first * BLOCK_BYTES
        whole[within : within + len(buffer)] = buffer
        if cipher is not None:
            whole = cipher.encrypt(inode, index, first, whole)
        parts = [bytes(whole[at : at + BLOCK_BYTES]) for at in range(0, len(whole), BLOCK_BYTES)]
        return {first + number: (part, crc32c(part)) for number, part in enumerate(parts)}

    async def flush(self) -> None:
        self._refuse_when_fenced()
        if self.fail_syncs:
            self.fail_syncs -= 1
            self.fence("the drive refused to sync")
            raise Fenced(self.fenced_because)
        self.drive_synced()

    def drive_synced(self) -> None:
        """Record that all contents survive a crash; simulations call this for a drive that syncs by itself."""
        self._flushed = dict(self.chunks), dict(self._inodes)

    async def cut(
        self,
        inode: int,
        size: int,
        cut: int,
        chunk_bits: int,
        end: int = 0,
        cipher: BlockCipher | None = None,
    ) -> int:
        self._refuse_when_fenced()
        largest = 1 << 32 + chunk_bits
        if not 16 <= chunk_bits <= 24 or not 0 <= size <= largest or (end and not size < end <= largest):
            raise InvalidRequest("no such size, hole or chunk size")
        its_cut, floor = self._inodes.get(inode, (0, 0))
        if cut < its_cut:
            raise StaleCut
        used = self.used_blocks
        whole = 1 << chunk_bits
        for name in sorted(name for name in self.chunks if name[0] == inode):
            chunk = self.chunks[name]
            first = max(0, size - name[1] * whole)
            last = min(whole, end - name[1] * whole) if end else whole
            if first >= last or chunk.cut >= cut:  # written after this truncation came first
                continue
            if (first, last) == (0, whole):
                floor = raised(floor, chunk.version)
                self.used_blocks -= len(self.chunks.pop(name).blocks)
                continue
            last = CHUNK_BYTES_MAX if last == whole else last
            blocks = {
                number: left
                for number, block in chunk.blocks.items()
                if (left := self._without(name, block, number, first, last, cipher))
            }
            self.used_blocks -= len(chunk.blocks) - len(blocks)
            self.chunks[name] = chunk._replace(blocks=blocks, version=after_cut(chunk.version), cut=cut)
            for number, (_, checksum) in blocks.items():
                if checksum == LOST_CHECKSUM:
                    self.note_bad(*name, number, "did not fit its checksum when it was cut")
        self._inodes[inode] = cut, floor
        self._forget_bad()
        await self.flush()
        return (used - self.used_blocks) * BLOCK_BYTES

    @staticmethod
    def _without(
        name: tuple[int, int],
        block: tuple[bytes, int],
        number: int,
        first: int,
        last: int,
        cipher: BlockCipher | None,
    ) -> tuple[bytes, int] | None:
        """Zero the bytes [first, last) of the chunk in one block.

        Returns the new block, or None if only zeros remain.
        """
        begin, end = max(0, first - number * BLOCK_BYTES), min(BLOCK_BYTES, last - number * BLOCK_BYTES)
        if begin >= end:
            return block
        data, checksum = block
        if end - begin < BLOCK_BYTES and crc32c(data) != checksum:
            return data, LOST_CHECKSUM
        if cipher is not None:
            data = bytes(cipher.decrypt(*name, number, data))
        zeroed = data[:begin] + ZERO_BLOCK[begin:end] + data[end:]
        if zeroed == ZERO_BLOCK:
            return None
        if cipher is not None:
            zeroed = bytes(cipher.encrypt(*name, number, zeroed))
        return zeroed, crc32c(zeroed)

    async def copy(
        self,
        source: tuple[int, int, int],
        inode: int,
        index: int,
        offset: int,
        length: int,
        *,
        cut: int = 0,
        request: RequestId | None = None,
        epoch: int = 1,
        given_up=bool,
        table: int = 0,
    ) -> tuple[int, int]:
        self._refuse_when_fenced()
        for place in (offset, source[2]):
            if length <= 0 or place < 0 or (place | length) % BLOCK_BYTES or place + length > CHUNK_BYTES_MAX:
                raise InvalidRequest("not whole blocks of a chunk")
        check_table(table)
        if given_up():
            raise Cancelled
        old = self.chunks.get(source[:2]) or _Chunk(0, 0, (), {})
        shift = (offset - source[2]) // BLOCK_BYTES
        new = {
            number + shift: block
            for number, block in old.blocks.items()
            if source[2] <= number * BLOCK_BYTES < source[2] + length
        }
        for number, (data, checksum) in new.items():
            if crc32c(data) != checksum:
                self.note_bad(*source[:2], number - shift, "does not fit its checksum when read")
                raise ChecksumMismatch
        chunk = self.chunks.get((inode, index)) or _Chunk(0, 0, (), {})
        its_cut, floor = self._inodes.get(inode, (0, 0))
        if request is not None and is_done(chunk.requests, request):
            return chunk.version, len(new) * BLOCK_BYTES
        if cut < its_cut:
            raise StaleCut
        kept = {
            number: block
            for number, block in chunk.blocks.items()
            if not offset <= number * BLOCK_BYTES < offset + length
        }
        if not new and len(kept) == len(chunk.blocks):
            return chunk.version, 0
        added = len(new.keys() - chunk.blocks.keys())
        if added and self.used_blocks + len(new) > self.block_limit:
            raise NoSpace
        if self.fail_writes:
            raise self.fail_writes.pop(0)
        self.used_blocks += len(kept) + len(new) - len(chunk.blocks)
        self.chunks[inode, index] = _Chunk(
            self._next(chunk.version, floor, epoch),
            max(cut, chunk.cut),
            self._with_request(chunk.requests, request),
            {**kept, **new},
            table or chunk.table,
        )
        self._forget_bad()
        return self.chunks[inode, index].version, len(new) * BLOCK_BYTES

    @staticmethod
    def _with_request(requests: tuple, request: RequestId | None) -> tuple:
        if request is None:
            return requests
        kept = [one for one in requests if one[:2] != request[:2]][-(_REQUESTS_KEPT - 1) :]
        return (*kept, tuple(request))

    async def remove(self, inodes: Sequence[int]) -> tuple[int, int]:
        self._refuse_when_fenced()
        gone = [name for name in self.chunks if name[0] in set(inodes)]
        blocks = sum(len(self.chunks.pop(name).blocks) for name in gone)
        self.used_blocks -= blocks
        for inode in inodes:
            self._inodes.pop(inode, None)
        self._forget_bad()
        return len(gone), blocks * BLOCK_BYTES

    # -- queries -----------------------------------------------------------------------------------------------------

    def describe(self, inode: int, first: int, limit: int) -> tuple[list[ChunkDescription], bool]:
        indexes = sorted(index for its_inode, index in self.chunks if its_inode == inode and index >= first)
        found = []
        for index in indexes[:limit]:
            chunk = self.chunks[inode, index]
            end = (max(chunk.blocks) + 1) * BLOCK_BYTES if chunk.blocks else 0
            found.append(
                ChunkDescription(
                    index, chunk.version, len(chunk.blocks), 1 if chunk.blocks else 0, chunk.cut, end
                )
            )
        return found, len(indexes) > limit

    def extents(self, inode: int, first: int, until: int) -> tuple[list[tuple[int, int, int]], int]:
        self._refuse_when_fenced()
        found: list[tuple[int, int, int]] = []
        for its_inode, index in sorted(self.chunks):
            if its_inode == inode and first <= index < until:
                for number in sorted(self.chunks[inode, index].blocks):
                    if found and found[-1][0] == index and sum(found[-1][1:]) == number:
                        found[-1] = index, found[-1][1], found[-1][2] + 1
                    else:
                        found.append((index, number, 1))
        return found, until

    def inodes(self, after: int, limit: int) -> tuple[list[int], bool]:
        found = sorted({inode for inode, _ in self.chunks if inode > after})
        return found[:limit], len(found) > limit

    # -- whole chunks ----------------------------------------------------------------------------------------------------

    def versions(
        self,
        after: tuple[int, int] | None,
        limit: int,
        wanted: ChainSet | None = None,
        until: tuple[int, int] | None = None,
    ) -> VersionsStep:
        self._refuse_when_fenced()
        names = sorted(
            name
            for name in self.chunks
            if (after is None or name > after)
            and (until is None or name <= until)
            and (wanted is None or wanted.has_chunk(self.chunks[name].table, *name))
        )
        chunks = [
            ChunkVersion(*name, chunk.table, chunk.version, chunk.cut, len(chunk.blocks))
            for name in names[:limit]
            for chunk in (self.chunks[name],)
        ]
        end = names[limit - 1] if len(names) > limit else None
        last = end or until
        inodes = [
            InodeCut(inode, *known, 0)
            for inode, known in sorted(self._inodes.items())
            if (after is None or inode >= after[0]) and (last is None or inode <= last[0])
        ]
        return VersionsStep(chunks, inodes, end)

    def state(self, inode: int, index: int) -> ChunkState:
        chunk = self.chunks.get((inode, index))
        return ChunkState(chunk.version if chunk else 0, self._inodes.get(inode, (0, 0))[0])

    async def fetch(
        self, inode: int, index: int, first: int = 0, blocks: int = CHUNK_BLOCKS_MAX
    ) -> ChunkCopy:
        self._refuse_when_fenced()
        known = InodeCut(inode, *self._inodes.get(inode, (0, 0)), 0)
        chunk = self.chunks.get((inode, index))
        if chunk is None:
            return ChunkCopy(inode, index, known=known)
        numbers = sorted(number for number in chunk.blocks if first <= number < first + blocks)
        content, sums, bad = [], [], []
        for number in numbers:
            block, checksum = chunk.blocks[number]
            if crc32c(block) != checksum:
                self.note_bad(inode, index, number, "does not fit its checksum when copied")
                bad.append(number)
                block = ZERO_BLOCK
            content.append(block)
            sums.append(checksum)
        runs = tuple((number, 1) for number in numbers)
        return ChunkCopy(
            inode,
            index,
            chunk.version,
            chunk.table,
            chunk.cut,
            chunk.requests,
            known,
            runs,
            struct.pack(f"<{len(sums)}I", *sums),
            b"".join(content),
            tuple(bad),
            any(number >= first + blocks for number in chunk.blocks),
        )

    async def install(self, copies: Sequence[tuple[ChunkCopy, ChunkState]]) -> list[bool]:
        self._refuse_when_fenced()
        used = self.used_blocks
        for copy, _ in copies:
            check_copy(copy)
            old = self.chunks.get((copy.inode, copy.index))
            used += (count := len(copy.checksums) // 4)
            if count > (len(old.blocks) if old else 0) and used > self.block_limit:
                raise NoSpace
            if self.fail_writes:
                raise self.fail_writes.pop(0)
        found = []
        for copy, expected in copies:
            found.append(self.state(copy.inode, copy.index) == expected)
            if found[-1]:
                self._install(copy)
        return found

    def _install(self, copy: ChunkCopy) -> None:
        name = copy.inode, copy.index
        old = self.chunks.pop(name, None)
        self.used_blocks -= len(old.blocks) if old else 0
        numbers = [number for first, count in copy.runs for number in range(first, first + count)]
        blocks = {
            number: (
                bytes(copy.content[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]),
                int.from_bytes(copy.checksums[at * 4 : at * 4 + 4], "little"),
            )
            for at, number in enumerate(numbers)
        }
        self.used_blocks += len(blocks)
        if copy.version:
            self.chunks[name] = _Chunk(copy.version, copy.cut, copy.requests, blocks, copy.table)
        self._raise_cut(copy.known)
        self._bad = {bad: text for bad, text in self._bad.items() if bad[:2] != name}
        for number in copy.bad:
            self.note_bad(*name, number, "was bad already where it was copied from")

    def _raise_cut(self, known: InodeCut) -> None:
        cut, floor = self._inodes.get(known.inode, (0, 0))
        if known.cut > cut or raised(floor, known.floor) != floor:
            self._inodes[known.inode] = max(cut, known.cut), raised(floor, known.floor)

    def unreadable(self, inode: int, index: int) -> bool:
        return False  # there are no records

    async def install_over(self, copy: ChunkCopy) -> bool:
        return False

    def note(self) -> bytes:
        return self._note

    def keep_note(self, raw: bytes) -> None:
        self._note = raw

    async def discard(self, inode: int, index: int, is_wanted: Callable[[], bool] | None = None) -> int:
        self._refuse_when_fenced()
        if is_wanted is not None and not is_wanted():
            return 0
        chunk = self.chunks.pop((inode, index), None)
        self._forget_bad()
        self.used_blocks -= len(chunk.blocks) if chunk else 0
        return len(chunk.blocks) * BLOCK_BYTES if chunk else 0

    def table_of(self, inode: int, index: int) -> int:
        chunk = self.chunks.get((inode, index))
        return chunk.table if chunk else 0

    async def mend(
        self,
        inode: int,
        index: int,
        block: int,
        content: bytes | memoryview,
        *,
        checksum: bytes = b"",
        version: int = 0,
    ) -> bool:
        self._refuse_when_fenced()
        chunk = self.chunks.get((inode, index))
        if chunk is None or block not in chunk.blocks:
            return False
        wanted = chunk.blocks[block][1]
        if wanted == LOST_CHECKSUM:
            if version != chunk.version:
                return False
            wanted = int.from_bytes(checksum, "little")
        elif not len(content):
            return False
        if len(content) and (len(content) != BLOCK_BYTES or crc32c(content) != wanted):
            return False
        if self.fail_writes:
            raise self.fail_writes.pop(0)
        blocks = {number: one for number, one in chunk.blocks.items() if number != block}
        if len(content):
            blocks[block] = bytes(content), wanted
        self.used_blocks -= len(chunk.blocks) - len(blocks)
        self.chunks[inode, index] = chunk._replace(blocks=blocks)
        self._bad.pop((inode, index, block), None)
        return True

    async def raise_cuts(self, inodes: Sequence[InodeCut]) -> None:
        self._refuse_when_fenced()
        for known in inodes:
            self._raise_cut(known)

    async def scrub(self, cursor: bytes, blocks: int, repair: bool = False) -> ScrubStep:
        self._refuse_when_fenced()
        if cursor and (cursor[:1] != b"c" or len(cursor) != 13):
            raise InvalidRequest("not a cursor of a scrub")
        after = struct.unpack(">QI", cursor[1:]) if cursor else (-1, -1)
        checked = 0
        bad = []
        for name in sorted(name for name in self.chunks if name > after):
            for number, (block, checksum) in sorted(self.chunks[name].blocks.items()):
                checked += 1
                if crc32c(block) != checksum:
                    text = "does not fit its checksum when scrubbed"
                    self.note_bad(*name, number, text)
                    bad.append(BadBlock(*name, number, text))
            if checked >= blocks:
                return ScrubStep(b"c" + struct.pack(">QI", *name), False, checked, bad, [], [])
        return ScrubStep(b"", True, checked, bad, [], [])

    def note_bad(self, inode: int, index: int, block: int, text: str) -> None:
        """Record that a block is damaged, and why."""
        if (inode, index, block) not in self._bad:
            self._bad[inode, index, block] = text
            if self.on_bad is not None:
                self.on_bad()

    def _forget_bad(self) -> None:
        self._bad = {
            name: text
            for name, text in self._bad.items()
            if name[:2] in self.chunks and name[2] in self.chunks[name[:2]].blocks
        }

    def bad_blocks(self) -> list[BadBlock]:
        return [BadBlock(*name, text) for name, text in sorted(self._bad.items())]

    def status(self) -> dict:
        return {
            "state": "fenced" if self.fenced_because else "serving",
            "fenced_because": self.fenced_because,
            "capacity_bytes": self.block_limit * BLOCK_BYTES,
            "used_bytes": self.used_blocks * BLOCK_BYTES,
            "chunks": len(self.chunks),
            "device": "",
            "kind": "memory",
            "read_path": "memory",
            "direct": False,
            "writes": "memory",
            "counters": {"bad_blocks": float(len(self._bad))},
        }

    async def tend(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def fence(self, reason: str) -> None:
        """Refuse all calls from now on. `on_fence` is called once."""
        if not self.fenced_because:
            self.fenced_because = reason
            if self.on_fence is not None:
                self.on_fence(reason)

    # -- for tests ---------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Simulate a loss of power: changes that are not synced are lost."""
        self.chunks, self._inodes = dict(self._flushed[0]), dict(self._flushed[1])
        self.used_blocks = sum(len(chunk.blocks) for chunk in self.chunks.values())
        self.fenced_because = ""
        self.verifier += 1

    def flip(self, inode: int, index: int, block: int) -> None:
        """Flip one bit of a stored block."""
        chunk = self.chunks[inode, index]
        data, checksum = chunk.blocks[block]
        self.chunks[inode, index] = chunk._replace(
            blocks={**chunk.blocks, block: (bytes([data[0] ^ 1]) + data[1:], checksum)}
        )

    def _refuse_when_fenced(self) -> None:
        if self.fenced_because:
            raise Fenced(self.fenced_because)
